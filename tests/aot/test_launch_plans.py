"""Plans against Triton: a launch from a plan is the launch that Triton would have made.

Everything of Triton runs but the compiler and the driver: its binder, its specialisation, its
cache and what a compiled kernel does with its arguments.
"""

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

from leaner_kernels.ops.attention import launch, operators, tiles
from leaner_kernels.ops.attention.call import Call


class Utilities:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132}


class Driver:
    """A card that compiles nothing and runs nothing."""

    utils = Utilities()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 77


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What arrives at the driver: grid, stream, specialisation, and values or addresses."""
    log: list[tuple[Any, ...]] = []

    def compile_nothing(source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        kernel = CompiledKernel.__new__(CompiledKernel)
        kernel.src, kernel.metadata, kernel.module = source, None, object()
        kernel.name, kernel.hash, kernel.packed_metadata = source.fn.__name__, "", None
        kernel.function = source.hash()
        kinds = list(source.signature.values())

        def run(x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
            values = rest[-len(kinds) :]
            assert len(rest) == len(kinds) + 4  # metadata twice, and a hook before and after
            seen = tuple(
                value.data_ptr() if isinstance(value, Tensor) else value
                for kind, value in zip(kinds, values, strict=True)
                if kind != "constexpr"
            )
            log.append(((x, y, z), stream, function, seen))

        kernel._run = run
        return kernel

    monkeypatch.setattr(triton.compiler, "compile", compile_nothing)
    monkeypatch.setattr(tiles, "capability", lambda _: 90)
    before = driver._active if hasattr(driver, "_active") else None
    driver.set_active(Driver())
    yield log
    driver._active = before
    launch._forward_plans._plans.clear()
    launch._backward_plans._plans.clear()


def draw(rng: random.Random) -> dict[str, Any]:
    """Return a call; few shapes and many flavours, so that kinds repeat and nearly repeat."""
    batch, heads = 2, 4
    rows, dim = rng.choice([(16, 10), (64, 32), (197, 64), (300, 64)])
    dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
    kv_heads = rng.choice([heads, heads, heads // 2])

    def new(heads: int) -> Tensor:
        apart = rng.choice([0, 0, 1])  # an address that is no multiple of 16
        flat = torch.empty(batch * heads * rows * dim + apart, dtype=dtype)[apart:]
        return flat.view(batch, rows, heads, dim).transpose(1, 2)

    query, key, value = new(heads), new(kv_heads), new(kv_heads)
    mask = None
    kind = rng.choice(["none", "none", "boolean", "additive", "line"])
    if kind != "none":
        shape = (rows,) if kind == "line" else (batch, 1, rows, rows)
        mask = torch.empty(shape, dtype=torch.bool if kind == "boolean" else dtype)
    causal = mask is None and rng.random() < 0.3
    dropout_p = rng.choice([0.0, 0.0, 0.1, 0.2])
    return {
        "inputs": Call(
            *(query, key, value, mask),
            torch.empty(batch, dtype=torch.int32) if rng.random() < 0.3 else None,
            torch.empty(1, dtype=torch.int64) if dropout_p else None,
            *(dropout_p, causal, rng.choice([0.125, 0.3, -0.1])),
        ),
        "grad": new(heads),
        "mask_grad": kind == "additive" and rng.random() < 0.5,
        "stats": rng.random() < 0.3,
    }


def run(call: dict[str, Any]) -> None:
    out, max_log_sum = call["out"], call["max_log_sum"]
    launch.forward(call["inputs"], out, max_log_sum, call["stats_tensors"])
    dmask = call["grads"][3] if call["mask_grad"] else None
    launch.backward(call["grad"], call["inputs"], out, max_log_sum, *call["grads"][:3], dmask)


def test_a_plan_launches_what_triton_would(launched: list[tuple[Any, ...]]) -> None:
    rng, from_plans = random.Random(0), 0
    for _ in range(400):
        call = draw(rng)
        query, key, value, mask, *_ = call["inputs"]
        call["out"] = operators.new_out(query)
        call["max_log_sum"] = operators.new_max_log_sum(query)
        call["stats_tensors"] = operators.new_stats(query, None)[:5] if call["stats"] else None
        call["grads"] = operators.new_gradients(query, key, value, mask, call["mask_grad"])
        plans = (launch._forward_plans, launch._backward_plans)
        known = sum(len(one._plans) for one in plans)
        launched.clear()
        run(call)
        actual = list(launched)
        from_plans += sum(len(one._plans) for one in plans) == known
        kept = [dict(one._plans) for one in plans]
        for one in plans:
            one._plans.clear()
        launched.clear()
        run(call)
        expected = list(launched)
        for one, old in zip(plans, kept):
            one._plans.clear()
            one._plans.update(old)
        assert len(actual) == len(expected) == 2
        for mine, tritons in zip(actual, expected):
            assert mine[:3] == tritons[:3]
            same = [a == b for a, b in zip(mine[3], tritons[3], strict=True)]
            # Temporary tensors, a mask's scores and the sums of statistics, are new in each run.
            assert same.count(False) <= call["mask_grad"] + bool(call["stats"])
    assert from_plans > 40
