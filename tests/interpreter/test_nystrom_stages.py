"""Two stages of Nyström attention's kernels, each alone, run by Triton's interpreter on the CPU.

Between them the whole operator would hide which one is off, and what it passes on would be only as
hard as its inputs happen to make it.
"""

import os
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from leaner_kernels.ops.statistics import AttentionStats, per_head
from tests.error_budget import assert_all_within_budget, peers_of

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from leaner_kernels.ops.nystrom import reference
from leaner_kernels.ops.nystrom.inverse import Inversion, invert_backward, invert_forward
from leaner_kernels.ops.nystrom.output import (
    LastStage,
    output_backward_landmarks,
    output_backward_query,
    output_capture,
    output_forward,
)
from tests.interpreter.rounding import LibraryProducts
from tests.operator_cases import NystromTestCase, make_inputs

STATISTICS = AttentionStats._fields[2:-1]


class Tensors(NamedTuple):
    """What the stage takes; query and gradient are in the dtype under test, the others float32."""

    query: Tensor
    grad: Tensor
    k_land: Tensor
    core: Tensor
    dq_land: Tensor


def in_nan(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, H, N, D) as a view of (B, N, H, D) amid NaN, so that a stray read shows."""
    batch, heads, tokens, dim = numbers.shape
    block = torch.full((batch, tokens + 2, heads + 1, dim + 3), float("nan"), dtype=dtype)
    view = block[:, :tokens, :heads, :dim].transpose(1, 2)
    return view.copy_(numbers)


def output_inputs(tokens: int, dim: int, landmarks: int) -> Tensors:
    torch.manual_seed(0)
    query, grad = torch.randn(2, 2, 1, tokens, dim)
    k_land, core, dq_land = torch.randn(3, 2, 1, landmarks, dim)
    views = (in_nan(t, torch.float32) for t in (query, grad))
    return Tensors(*views, k_land, core, dq_land)


def run_output(t: Tensors, scale: float) -> dict[str, Tensor]:
    batch, heads, tokens, dim = t.query.shape
    out, dq = (in_nan(torch.full(t.query.shape, float("nan")), t.query.dtype) for _ in range(2))
    lse = torch.empty(batch, heads, tokens)
    stats = torch.empty(len(STATISTICS), batch, heads)
    stage = LastStage(t.query, t.k_land, t.core, None, scale)
    output_forward(stage, out, lse, stats)
    captured = torch.full((3, tokens, heads * dim), float("nan"))
    sample = torch.tensor([batch - 1, -1, batch], dtype=torch.int32)
    output_capture(stage, captured, sample)
    assert captured[1:].isnan().all(), "a slot that names no entry was written"
    dk_land, dcore, delta = output_backward_landmarks(stage, t.grad, lse)
    output_backward_query(stage, t.grad, lse, delta, t.dq_land, dq)
    for written in (out, dq):
        around = torch.ones(batch, tokens + 2, heads + 1, dim + 3, dtype=torch.bool)
        around[:, :tokens, :heads, :dim] = False
        block = written.as_strided(around.shape, around.stride())
        assert block[around].isnan().all(), "something beside the result was written"
    results = {"out": out, "lse": lse, "heads": captured[:1]}
    results |= {"dq": dq, "dk_land": dk_land, "dcore": dcore}
    return results | dict(zip(STATISTICS, stats, strict=True))


def output_reference(t: Tensors, scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute the stage in ``dtype``, its derivatives by autograd."""
    q, k_land, core = leaves = [
        leaf.to(dtype).requires_grad_() for leaf in (t.query, t.k_land, t.core)
    ]
    s = scale * (q @ k_land.mT)
    k1 = torch.softmax(s, dim=-1)
    out = k1 @ core
    q_land = reference.landmarks(q, k_land.shape[2])
    grads = torch.autograd.grad([out, q_land], leaves, [t.grad.to(dtype), t.dq_land.to(dtype)])
    stats = per_head(k1, s, out)
    results = {"out": out, "lse": s.logsumexp(dim=-1), "heads": out[-1:].transpose(1, 2).flatten(2)}
    results |= dict(zip(("dq", "dk_land", "dcore"), grads, strict=True))
    return results | dict(zip(STATISTICS, stats, strict=True))


def check_output(t: Tensors, scale: float, *names: str) -> None:
    run = partial(output_reference, t, scale, torch.float64)
    found, peers = run_output(t, scale), peers_of([run], torch.float32)
    assert_all_within_budget({name: found[name] for name in names}, peers, run())


@pytest.mark.parametrize("landmarks", [7, 66], ids=["one tile", "several tiles"])
def test_gradients_cancel_what_all_landmarks_share(landmarks: int) -> None:
    """A log-sum-exp of 30 is rounded by 1e-6, and dP - delta must not keep that of a large dP."""
    t = output_inputs(2 * landmarks, 20, landmarks)
    check_output(t._replace(core=t.core + 20), 3.0, "dq", "dk_land")


def test_the_last_stage_adds_up_short_sums_of_many_landmarks(gpu_rounding: None) -> None:
    """A chain over all of them rounds the whole sum 256 times."""
    t = output_inputs(256, 16, 256)
    t = t._replace(k_land=0.1 * t.k_land, core=t.core + 2)
    check_output(t, 0.3, "out", "heads", "dq", "dk_land", "dcore")


def inverse_reference(
    inputs: tuple[Tensor, ...], inversion: Inversion, dtype: torch.dtype
) -> dict[str, Tensor]:
    *leaves, dcore = (t.to(dtype) for t in inputs)
    q_land, k_land, k3v = (leaf.requires_grad_() for leaf in leaves)
    s = inversion.scale * (q_land @ k_land.mT)
    k2 = torch.softmax(s, dim=-1)
    core = reference.iterates(k2, inversion.iterations, inversion.whole_batch)[-1] @ k3v
    grads = torch.autograd.grad(core, leaves, dcore)
    return name_inverse(core, s.amax(dim=(-2, -1)), *grads)


def run_inverse(inputs: tuple[Tensor, ...], inversion: Inversion) -> dict[str, Tensor]:
    *land, dcore = inputs
    core, largest = invert_forward((*land,), inversion)
    return name_inverse(core, largest, *invert_backward(dcore, (*land,), inversion))


def name_inverse(*results: Tensor) -> dict[str, Tensor]:
    return dict(zip(("core", "max2", "dq_land", "dk_land", "dk3v"), results, strict=True))


@pytest.mark.slow
def test_the_inverse_of_many_landmarks_adds_up_short_sums() -> None:
    """The iteration magnifies what one chain over 256 would lose, most where padding is alike."""
    tokens = make_inputs(NystromTestCase("", 1, 1024, 2, 64, 256, (682,)), torch.float64)
    *projected, lengths = tokens.tensors
    qkv = [reference.hide(t, lengths) for t in projected]
    q_land, k_land = (reference.landmarks(t, 256) for t in qkv[:2])
    parts = reference.attend(*projected, lengths, 256, 0.1, 6, whole_batch=False)
    k3v = torch.softmax(parts.scores[2], dim=-1) @ qkv[2]
    dcore = parts.k1.mT @ tokens.grad.transpose(1, 2)
    inputs = tuple(t.float().contiguous() for t in (q_land, k_land, k3v, dcore))
    inversion = Inversion(0.1, 6, whole_batch=False)
    run = partial(inverse_reference, inputs, inversion, torch.float64)
    with LibraryProducts():
        found = run_inverse(inputs, inversion)
    assert_all_within_budget(found, peers_of([run], torch.float32), run())


@pytest.mark.parametrize("whole_batch", [False, True], ids=["each matrix", "whole batch"])
def test_columns_that_share_the_maximum_share_its_gradient(whole_batch: bool) -> None:
    """As the landmarks of padding do, which are all zero."""
    torch.manual_seed(0)
    q_land, k_land, k3v, dcore = torch.randn(4, 1, 1, 16, 8)
    q_land, k_land = q_land.abs(), -(q_land + k_land).abs()
    k_land[:, :, 5:] = 0
    inputs, inversion = (q_land, k_land, k3v, dcore), Inversion(0.5, 1, whole_batch)
    exact = inverse_reference(inputs, inversion, torch.float64)
    found = run_inverse(inputs, inversion)
    assert exact["dk_land"].abs().max() > 1e-3
    torch.testing.assert_close(found["dk_land"].double(), exact["dk_land"], rtol=1e-4, atol=1e-6)
