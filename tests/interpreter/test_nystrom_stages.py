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
from tests.error_budget import assert_within_budget, peers_of

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


class Output(NamedTuple):
    """Sizes of the last stage, and its inputs' magnitudes."""

    name: str
    tokens: int
    dim: int
    landmarks: int
    lengths: tuple[int, int] | None = None
    scale: float = 0.3
    core: float = 1.0


class Tensors(NamedTuple):
    """What the stage takes; query and gradient are in the dtype under test, the others float32."""

    query: Tensor
    grad: Tensor
    k_land: Tensor
    core: Tensor
    dq_land: Tensor
    lengths: Tensor | None


def in_nan(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, H, N, D) as a view of (B, N, H, D) amid NaN, so that a stray read shows."""
    batch, heads, tokens, dim = numbers.shape
    block = torch.full((batch, tokens + 2, heads + 1, dim + 3), float("nan"), dtype=dtype)
    view = block[:, :tokens, :heads, :dim].transpose(1, 2)
    return view.copy_(numbers)


def output_inputs(case: Output, dtype: torch.dtype) -> Tensors:
    torch.manual_seed(0)
    tokens, dim, landmarks = case.tokens, case.dim, case.landmarks
    query, grad = torch.randn(2, 2, 1, tokens, dim)
    k_land, core, dq_land = torch.randn(3, 2, 1, landmarks, dim)
    lengths = None
    if case.lengths is not None:
        lengths = torch.tensor(case.lengths, dtype=torch.int32)
        query[reference.padded(query, lengths).expand_as(query)] = float("nan")
    core *= case.core
    grad /= case.core
    return Tensors(in_nan(query, dtype), in_nan(grad, dtype), k_land, core, dq_land, lengths)


def run_output(t: Tensors, scale: float) -> dict[str, Tensor]:
    batch, heads, tokens, dim = t.query.shape
    out, dq = (in_nan(torch.full(t.query.shape, float("nan")), t.query.dtype) for _ in range(2))
    lse = torch.empty(batch, heads, tokens)
    stats = torch.empty(len(STATISTICS), batch, heads)
    stage = LastStage(t.query, t.k_land, t.core, t.lengths, scale)
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
    leaves = [each.to(dtype).requires_grad_() for each in (t.query, t.k_land, t.core)]
    q, k_land, core = reference.hide(leaves[0], t.lengths), *leaves[1:]
    s = scale * (q @ k_land.mT)
    k1 = torch.softmax(s, dim=-1)
    out = k1 @ core
    q_land = reference.landmarks(q, k_land.shape[2])
    grads = torch.autograd.grad([out, q_land], leaves, [t.grad.to(dtype), t.dq_land.to(dtype)])
    stats = per_head(k1, s, out)
    results = {"out": out, "lse": s.logsumexp(dim=-1), "heads": out[-1:].transpose(1, 2).flatten(2)}
    results |= dict(zip(("dq", "dk_land", "dcore"), grads, strict=True))
    return results | dict(zip(STATISTICS, stats, strict=True))


@pytest.mark.parametrize("landmarks", [7, 66], ids=["one tile", "several tiles"])
def test_gradients_cancel_what_all_landmarks_share(landmarks: int) -> None:
    """A log-sum-exp of 30 is rounded by 1e-6, and dP - delta must not keep that of a large dP."""
    case, scale = Output("", 2 * landmarks, 20, landmarks), 3.0
    t = output_inputs(case, torch.float32)
    t = t._replace(core=t.core + 20)
    exact = output_reference(t, scale, torch.float64)
    peers = peers_of([partial(output_reference, t, scale, torch.float64)], torch.float32)
    found = run_output(t, scale)
    for name in ("dq", "dk_land"):
        assert_within_budget(found[name], peers[name], exact[name])


def test_the_last_stage_adds_up_short_sums_of_many_landmarks(gpu_rounding: None) -> None:
    """A chain over all of them rounds the whole sum 256 times."""
    case = Output("", 256, 16, 256)
    t = output_inputs(case, torch.float32)
    t = t._replace(k_land=0.1 * t.k_land, core=t.core + 2)
    exact = output_reference(t, case.scale, torch.float64)
    run = partial(output_reference, t, case.scale, torch.float64)
    peers, found = peers_of([run], torch.float32), run_output(t, case.scale)
    for name in ("out", "heads", "dq", "dk_land", "dcore"):
        assert_within_budget(found[name], peers[name], exact[name])


class Inverse(NamedTuple):
    """Sizes of the middle stage."""

    name: str
    batch: int
    heads: int
    landmarks: int
    dim: int
    iterations: int
    whole_batch: bool = False


def landmarks_of(case: Inverse) -> tuple[Tensor, ...]:
    """Return q~, k~, K3 V and the gradient of the core: neighbouring landmarks are alike."""
    torch.manual_seed(0)
    q_land, k_land, k3v, dcore = torch.randn(4, case.batch, case.heads, case.landmarks, case.dim)
    return q_land, (q_land + k_land).contiguous(), k3v, dcore


def inverse_reference(
    inputs: tuple[Tensor, ...], case: Inverse, dtype: torch.dtype
) -> dict[str, Tensor]:
    *leaves, dcore = (each.to(dtype) for each in inputs)
    q_land, k_land, k3v = (leaf.requires_grad_() for leaf in leaves)
    s = 0.5 * (q_land @ k_land.mT)
    z = reference.iterates(torch.softmax(s, dim=-1), case.iterations, case.whole_batch)[-1]
    core = z @ k3v
    grads = torch.autograd.grad(core, leaves, dcore)
    return name_inverse(core, s.amax(dim=(-2, -1)), *grads)


def run_inverse(inputs: tuple[Tensor, ...], case: Inverse) -> dict[str, Tensor]:
    *land, dcore = inputs
    inversion = Inversion(0.5, case.iterations, case.whole_batch)
    core, largest = invert_forward((*land,), inversion)
    return name_inverse(core, largest, *invert_backward(dcore, (*land,), inversion))


def name_inverse(*results: Tensor) -> dict[str, Tensor]:
    return dict(zip(("core", "max2", "dq_land", "dk_land", "dk3v"), results, strict=True))


@pytest.mark.slow
def test_the_inverse_of_many_landmarks_adds_up_short_sums() -> None:
    """The iteration magnifies what one chain over 256 would lose, most where padding is alike."""
    case = Inverse("", 1, 2, 256, 64, 6)
    tokens = make_inputs(NystromTestCase("", 1, 1024, 2, 64, 256, (682,)), torch.float64)
    *projected, lengths = tokens.tensors
    qkv = [reference.hide(t, lengths) for t in projected]
    q_land, k_land = (reference.landmarks(t, 256) for t in qkv[:2])
    parts = reference.attend(*projected, lengths, 256, 0.1, 6, whole_batch=False)
    k3v = torch.softmax(parts.scores[2], dim=-1) @ qkv[2]
    dcore = parts.k1.mT @ tokens.grad.transpose(1, 2)
    # The stage's scale here is 0.5.
    inputs = tuple(t.float().contiguous() for t in (0.2 * q_land, k_land, k3v, dcore))
    exact = inverse_reference(inputs, case, torch.float64)
    peers = peers_of([partial(inverse_reference, inputs, case, torch.float64)], torch.float32)
    with LibraryProducts():
        found = run_inverse(inputs, case)
    for name, actual in found.items():
        assert_within_budget(actual, peers[name], exact[name])


@pytest.mark.parametrize("whole_batch", [False, True], ids=["each matrix", "whole batch"])
def test_columns_that_share_the_maximum_share_its_gradient(whole_batch: bool) -> None:
    """As the landmarks of padding do, which are all zero."""
    case = Inverse("tied", 1, 1, 16, 8, 1, whole_batch)
    inputs = landmarks_of(case)
    q_land, k_land, *_ = inputs
    q_land.abs_()
    k_land.copy_(-k_land.abs())
    k_land[:, :, 5:] = 0
    exact, found = inverse_reference(inputs, case, torch.float64), run_inverse(inputs, case)
    assert exact["dk_land"].abs().max() > 1e-3
    torch.testing.assert_close(found["dk_land"].double(), exact["dk_land"], rtol=1e-4, atol=1e-6)
