"""The samples of PyTorch's own operator and module tests, put to ours and to PyTorch's.

In a process of their own: importing PyTorch's tests freezes ``torch.backends``.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from leaner_kernels import attention
from leaner_kernels.adapters import pytorch
from tests.error_budget import DRAWS, assert_within_budget
from tests.peers.outcomes import settle
from tests.random_rounding import RandomRounding

WHY = "PyTorch's own tests need expecttest"
methods = pytest.importorskip(
    "torch.testing._internal.common_methods_invocations", reason=WHY, exc_type=ImportError
)
from torch.testing._internal.common_modules import module_db  # noqa: E402

SDPA = next(op for op in methods.op_db if op.name == "nn.functional.scaled_dot_product_attention")
DTYPES = sorted(SDPA.supported_dtypes("cpu"), key=str)
SAMPLES = [(d, i) for d in DTYPES for i in range(len([*SDPA.sample_inputs("cpu", d)]))]
MODULES = {info.module_cls: info for info in module_db}
CLASSES = nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer


def inputs_of(cls: type[nn.Module], training: bool) -> list[Any]:
    torch.manual_seed(0)
    info = MODULES[cls]
    return info.module_inputs_func(info, "cpu", torch.float32, True, training)


LAYERS = [(c, t, i) for c in CLASSES for t in (True, False) for i in range(len(inputs_of(c, t)))]


def cast(given: Any, dtype: torch.dtype) -> Any:
    def one(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        return t.detach().to(dtype, copy=True).requires_grad_(t.requires_grad)

    return tree_map(one, given)


def with_gradients(out: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Return every output, then every gradient that there is, for one random direction."""
    outs = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in outs]
    total = sum((t * d.to(t.dtype)).sum() for t, d in zip(outs, directions) if t.requires_grad)
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if leaves else ()
    return [*outs, *(grad for grad in grads if grad is not None)]


def judged(found: list[Tensor], peers: list[list[Tensor]], exact: list[Tensor]) -> None:
    assert len(found) == len(exact)
    for result, truth, *others in zip(found, exact, *peers):
        nan = truth.isnan()
        assert torch.equal(result.isnan(), nan)
        given = (t.masked_fill(nan, 0) for t in (result, truth, *others))
        result, truth, *others = given
        assert_within_budget(result, tuple(others), truth)


@pytest.mark.parametrize(("dtype", "index"), SAMPLES, ids=str)
def test_a_sample_of_the_operator(dtype: torch.dtype, index: int) -> None:
    torch.manual_seed(0)
    sample = [*SDPA.sample_inputs("cpu", dtype, requires_grad=True)][index]
    given = (sample.input, *sample.args), sample.kwargs

    def run(function: Callable[..., Tensor], dtype: torch.dtype = dtype) -> list[Tensor]:
        args, keywords = cast(given, dtype)
        torch.manual_seed(7)  # of dropout
        leaves = [t for t in (*args, *keywords.values()) if isinstance(t, Tensor)]
        leaves = [t for t in leaves if t.requires_grad]
        return with_gradients(function(*args, **keywords), leaves)

    def judge(found: list[Tensor]) -> None:
        peers = [run(F.scaled_dot_product_attention)]
        with sdpa_kernel(SDPBackend.MATH):
            peers += [run(F.scaled_dot_product_attention)]
            exact = run(F.scaled_dot_product_attention, torch.float64)
        judged(found, peers, exact)

    settle(lambda: run(attention), judge)


@pytest.mark.parametrize(("cls", "training", "index"), LAYERS, ids=str)
def test_a_sample_of_a_module(cls: type, training: bool, index: int) -> None:
    given = inputs_of(cls, training)[index]
    made, called = given.constructor_input, given.forward_input
    torch.manual_seed(0)
    oracle = cls(*made.args, **made.kwargs).train(training)
    if getattr(oracle, "bias_k", None) is not None or getattr(oracle, "add_zero_attn", False):
        pytest.skip("appended keys are refused (tests/adapters)")

    def run(module: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        module = copy.deepcopy(module).to(dtype)
        args, keywords = cast((called.args, called.kwargs), dtype)
        torch.manual_seed(7)
        return with_gradients(module(*args, **keywords), [*module.parameters()])

    def ours() -> list[Tensor]:
        module = copy.deepcopy(oracle)
        assert pytorch.use(module).swapped
        return run(module)

    def judge(found: list[Tensor]) -> None:
        peers = [run(oracle)]
        with sdpa_kernel(SDPBackend.MATH):
            peers += [run(oracle)]
            exact = run(oracle, torch.float64)
            # What one run makes of a few numbers is luck, and the processor's.
            for seed in range(DRAWS):
                with RandomRounding(torch.float32, seed, units=1):
                    peers.append(run(oracle, torch.float64))
        judged(found, peers, exact)

    settle(ours, judge)
