"""Awkward shapes of softmax attention, and what the reference makes of them.

One table serves every backend; ``tests/ops/test_softmax.py`` runs it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from leaner_kernels.ops.attention import aten, op, reference
from leaner_kernels.ops.attention.call import Call
from leaner_kernels.ops.attention.op import new_out
from leaner_kernels.ops.attention.reference import keep_mask
from leaner_kernels.ops.statistics import AttentionStats, per_head
from tests import error_budget, shared_lse


class AttentionTestCase(NamedTuple):
    """Sizes as in the kernels; ``mask`` names one of the masks that ``make_inputs`` builds."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    rows: int
    cols: int
    dim: int
    causal: bool = False
    lengths: tuple[int, ...] | None = None
    mask: str | None = None
    dropout_p: float = 0.0
    softcap: float = 0.0
    window: tuple[int, int] = (-1, -1)


CASES = (
    AttentionTestCase("one of everything", 1, 1, 1, 1, 1, 1),
    AttentionTestCase("inner tokens of TNT", 3, 4, 4, 16, 16, 10),
    AttentionTestCase("a window of DaViT", 2, 2, 2, 49, 49, 32),
    AttentionTestCase("ViT", 1, 2, 2, 197, 197, 64),
    AttentionTestCase("GPT-2 on stories", 1, 2, 2, 64, 64, 42, causal=True),
    AttentionTestCase("head_dim 48", 1, 2, 2, 65, 65, 48),
    AttentionTestCase("head_dim 80, crossed", 1, 2, 2, 70, 33, 80),
    AttentionTestCase("head_dim 127", 1, 1, 1, 34, 40, 127, causal=True),
    AttentionTestCase("head_dim 128", 1, 1, 1, 40, 70, 128),
    AttentionTestCase("one query, many keys", 2, 2, 1, 1, 300, 16),
    AttentionTestCase("causal, more keys than rows", 1, 1, 1, 33, 130, 16, causal=True),
    AttentionTestCase("causal, more rows than keys", 1, 1, 1, 130, 33, 16, causal=True),
    AttentionTestCase("lengths", 3, 2, 2, 50, 50, 16, lengths=(1, 50, 23)),
    AttentionTestCase("lengths, causal", 2, 2, 2, 70, 70, 32, causal=True, lengths=(5, 66)),
    AttentionTestCase("grouped queries", 2, 6, 2, 37, 41, 16),
    AttentionTestCase("boolean mask, a hidden row", 2, 2, 2, 20, 45, 16, mask="boolean"),
    AttentionTestCase("boolean mask over keys", 2, 2, 2, 20, 45, 16, mask="keys"),
    AttentionTestCase("additive mask", 2, 2, 2, 37, 45, 16, mask="additive"),
    AttentionTestCase("additive mask for all", 1, 2, 2, 37, 70, 64, mask="shared"),
    AttentionTestCase("additive mask, one axis", 2, 2, 2, 20, 45, 16, mask="line"),
    AttentionTestCase("float32 mask", 2, 2, 2, 37, 45, 16, mask="float32"),
    AttentionTestCase(
        "additive mask, lengths", 2, 2, 1, 20, 45, 16, lengths=(3, 45), mask="additive"
    ),
    AttentionTestCase("dropout", 2, 2, 2, 37, 70, 16, dropout_p=0.3),
    AttentionTestCase(
        "dropout with everything", 2, 4, 2, 40, 40, 64, causal=True, lengths=(7, 40), dropout_p=0.5
    ),
    AttentionTestCase(
        "dropout, head_dim 128, mask", 1, 2, 2, 33, 35, 128, mask="additive", dropout_p=0.1
    ),
    AttentionTestCase("softcap of Gemma 2", 1, 4, 2, 70, 70, 128, causal=True, softcap=50.0),
    AttentionTestCase("softcap, lengths", 3, 2, 2, 37, 41, 64, lengths=(1, 41, 23), softcap=1.0),
    AttentionTestCase("softcap, additive mask", 2, 2, 2, 37, 45, 16, mask="additive", softcap=0.7),
    AttentionTestCase(
        "softcap, boolean mask", 2, 4, 2, 20, 45, 48, mask="boolean", dropout_p=0.3, softcap=2.0
    ),
    AttentionTestCase("softcap below most scores", 2, 2, 2, 33, 40, 32, softcap=0.05),
)
NAMES = [case.name for case in CASES]
WINDOW_CASES = (
    AttentionTestCase("window of itself", 1, 2, 2, 40, 40, 16, window=(0, 0)),
    AttentionTestCase("window to the left", 1, 2, 2, 197, 197, 64, window=(30, 0)),
    AttentionTestCase("window of both sides", 2, 2, 2, 150, 150, 32, window=(7, 70)),
    AttentionTestCase("window to the right alone", 1, 2, 2, 90, 90, 16, window=(-1, 5)),
    AttentionTestCase("window, causal", 1, 2, 2, 130, 130, 16, causal=True, window=(33, 9)),
    AttentionTestCase("window, more keys than rows", 1, 2, 2, 33, 160, 16, window=(40, 0)),
    # The first rows see no key.
    AttentionTestCase("window, more rows than keys", 1, 2, 2, 160, 33, 16, window=(4, 3)),
    AttentionTestCase("window wider than all", 1, 2, 2, 50, 70, 16, window=(2**31 - 1, 2**31 - 1)),
    AttentionTestCase(
        "window, lengths, grouped queries", 3, 4, 2, 70, 70, 16, lengths=(1, 70, 40), window=(9, 2)
    ),
    AttentionTestCase("window, mask", 2, 2, 2, 70, 75, 16, mask="additive", window=(20, 20)),
    AttentionTestCase(
        "window, mask, dropout, softcap",
        2,
        4,
        2,
        40,
        45,
        48,
        mask="boolean",
        dropout_p=0.3,
        softcap=2.0,
        window=(12, 3),
    ),
)
# Shapes of models, whose rows are aligned.
MODELS = (
    AttentionTestCase("ViT-B", 1, 2, 2, 197, 197, 64),
    AttentionTestCase("ViT-B, lengths", 2, 2, 2, 197, 197, 64, lengths=(50, 197)),
    AttentionTestCase("ViT-B, dropout", 1, 2, 2, 197, 197, 64, dropout_p=0.1),
    AttentionTestCase("ViT-B, additive mask", 1, 2, 2, 197, 197, 64, mask="additive"),
    AttentionTestCase("ViT-B, boolean mask", 1, 2, 2, 197, 197, 64, mask="boolean"),
    AttentionTestCase("ViT-B, head_dim 48", 1, 2, 2, 197, 197, 48),
    AttentionTestCase("ViT-B, grouped queries", 1, 4, 2, 197, 197, 64),
    AttentionTestCase("ViT-H", 1, 1, 1, 257, 257, 80),
    AttentionTestCase("ViT-B, 384 pixels", 1, 1, 1, 577, 577, 64),
    AttentionTestCase("256 tokens", 1, 2, 2, 256, 256, 64),
    AttentionTestCase("BERT", 1, 2, 2, 128, 128, 32),
    AttentionTestCase("BERT, dropout", 1, 2, 2, 128, 128, 32, dropout_p=0.2),
    AttentionTestCase("128 tokens, causal", 1, 2, 2, 128, 128, 64, causal=True),
    AttentionTestCase("64 tokens", 1, 2, 2, 64, 64, 64),
    AttentionTestCase("GPT-2, 64 tokens", 1, 2, 2, 64, 64, 32, causal=True),
    AttentionTestCase("GPT-2, 512 tokens", 1, 2, 2, 512, 512, 32, causal=True),
    AttentionTestCase("64 tokens, additive mask", 1, 2, 2, 64, 64, 32, mask="additive"),
    AttentionTestCase("a window of DaViT", 2, 3, 3, 49, 49, 32),
    AttentionTestCase("inner tokens of TNT", 3, 4, 4, 16, 16, 10),
    AttentionTestCase("inner tokens of TNT, dropout", 3, 4, 4, 16, 16, 10, dropout_p=0.1),
    AttentionTestCase("32 tokens, additive mask", 2, 2, 2, 32, 32, 64, mask="additive"),
    AttentionTestCase("16 tokens, boolean mask", 2, 2, 2, 16, 16, 16, mask="boolean"),
    AttentionTestCase("class attention", 2, 2, 2, 1, 197, 32),
    AttentionTestCase("head_dim 128, causal", 1, 1, 1, 300, 300, 128, causal=True),
)


def case_named(name: str) -> AttentionTestCase:
    """Return the case of ``CASES`` or ``WINDOW_CASES`` that has this name."""
    (case,) = (case for case in (*CASES, *WINDOW_CASES) if case.name == name)
    return case


STATISTICS = AttentionStats._fields[2:-1]
FLOAT32_RESULTS = "lse", *(name for name in STATISTICS if name != "head_norm"), "heads"


class Inputs(NamedTuple):
    """Tensors in the dtype under test, and the arguments that go with them."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    attn_mask: Tensor | None
    key_lengths: Tensor | None
    seed: Tensor | None
    sample: Tensor
    dropout_p: float
    is_causal: bool
    scale: float
    softcap: float = 0.0
    window: tuple[int, int] = (-1, -1)

    @property
    def call(self) -> Call:
        """What the launchers take."""
        tensors = self.query, self.key, self.value, self.attn_mask, self.key_lengths, self.seed
        numbers = self.dropout_p, self.is_causal, self.scale, self.softcap
        return Call(*tensors, *numbers, *self.window)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the operator takes."""
        *arguments, _sequences = self.call
        return tuple(arguments)


def poisoned(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, width: int | None = None
) -> Tensor:
    """Return random numbers inside a larger block of NaN, so that a stray read shows.

    Rows of the block have ``width`` elements, five more than the numbers if None.
    """
    *outer, rows, dim = shape
    size = *outer, rows + 3, width or dim + 5
    block = torch.full(size, float("nan"), dtype=dtype, device=device)
    inside = block[..., :rows, :dim]
    return inside.copy_(torch.randn(shape, device="cpu").to(dtype))


def aligned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return random numbers inside a block of NaN whose rows start at multiples of 16 elements.

    Kernels for short rows copy 16 bytes at a time, which strides that are no such multiples forbid.
    """
    return poisoned(shape, dtype, device, width=-(-shape[-1] // 16) * 16 + 16)


def side_by_side(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return random numbers (B, H, N, D) whose heads lie side by side, as projections leave them.

    They lie inside a block of NaN.
    """
    batch, heads, rows, dim = shape
    numbers = aligned((batch, rows, heads * dim), dtype, device)
    return numbers.unflatten(2, (heads, dim)).transpose(1, 2)


def make_inputs(
    case: AttentionTestCase,
    dtype: torch.dtype,
    device: str = "cpu",
    layout: Callable[..., Tensor] = poisoned,
) -> Inputs:
    """Return the same numbers at every call; query, key, value and gradient as ``layout`` does."""
    torch.manual_seed(0)
    shape = case.batch, case.heads, case.rows, case.dim
    kv_shape = case.batch, case.kv_heads, case.cols, case.dim
    lengths = seed = None
    if case.lengths is not None:
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    if case.dropout_p:
        seed = torch.tensor([0x123456789ABCDEF], device=device)
    return Inputs(
        layout(shape, dtype, device),
        layout(kv_shape, dtype, device),
        layout(kv_shape, dtype, device),
        layout(shape, dtype, device),
        make_mask(case, dtype, device),
        lengths,
        seed,
        torch.tensor([case.batch - 1, -1, 0], dtype=torch.int32, device=device),
        case.dropout_p,
        case.causal,
        case.dim**-0.5,
        case.softcap,
        case.window,
    )


def make_mask(case: AttentionTestCase, dtype: torch.dtype, device: str) -> Tensor | None:
    rows, cols = case.rows, case.cols
    if case.mask is None:
        return None
    if case.mask == "boolean":
        mask = torch.rand(case.batch, 1, rows, cols) > 0.3
        mask[0, 0, 3] = False
    elif case.mask == "keys":
        mask = torch.rand(case.batch, 1, 1, cols) > 0.3
    elif case.mask == "additive":
        mask = torch.randn(case.batch, case.heads, rows, cols).to(dtype)
        mask[..., 1::3] = float("-inf")
    elif case.mask == "shared":
        mask = torch.randn(rows, cols).to(dtype)
        mask[2, ::2] = torch.finfo(dtype).min
    elif case.mask == "float32":
        # In half precision these are up to a tenth off, and so would the probabilities be.
        mask = 30 + torch.randn(case.batch, 1, rows, cols)
        mask[..., 1::3] = float("-inf")
    else:
        assert case.mask == "line", case.mask
        mask = torch.randn(cols).to(dtype)
    return mask.to(device)


def reference_results(
    inputs: Inputs, dtype: torch.dtype, *, fused: bool = False
) -> dict[str, Tensor]:
    """Run the reference on the CPU with every floating-point input cast to ``dtype``.

    With ``fused``, as fused kernels do: P from the log-sum-exp, and delta from the output.
    """
    q, k, v, grad, mask, lengths, seed, sample = (
        t.cpu().to(dtype) if t is not None and t.is_floating_point() else t
        for t in (None if t is None else t.cpu() for t in inputs[:8])
    )
    params = {"scale": inputs.scale, "softcap": inputs.softcap}
    p, lse, s = reference.probabilities(q, k, mask, lengths, **params, **inputs.call.visibility)
    keep = None
    if seed is not None:
        keep = keep_mask(seed, *s.shape, inputs.dropout_p)
    if fused:
        p = torch.exp(s - lse.masked_fill(lse.isinf(), 0)[..., None])
    a = reference.forward(p, v, keep, inputs.dropout_p)
    backward = _fused_backward if fused else reference.backward
    dq, dk, dv, ds = backward(grad, q, k, v, p, keep, inputs.dropout_p, **params)
    results = {
        "out": a,
        "lse": lse,
        **dict(zip(STATISTICS, per_head(p, s, a), strict=True)),
        "heads": a[sample[sample >= 0]].transpose(1, 2).flatten(2),
        "dq": dq,
        "dk": dk,
        "dv": dv,
    }
    if mask is not None and mask.is_floating_point():
        results["dmask"] = ds.sum_to_size(mask.shape)
    return results


def _fused_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    keep: Tensor | None,
    dropout_p: float,
    scale: float,
    softcap: float,
) -> tuple[Tensor, ...]:
    """Return what ``reference.backward`` does, delta taken from the output."""
    delta = (grad * reference.forward(p, v, keep, dropout_p)).sum(dim=-1, keepdim=True)
    groups = k.shape[1], q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(groups[1], dim=1) for t in (k, v))
    ds = p * (reference.dropped(grad @ values.mT, keep, dropout_p) - delta)
    unbounded = ds
    if softcap:
        u = scale * (q @ keys.mT) / softcap
        unbounded = 4 * torch.sigmoid(2 * u) * torch.sigmoid(-2 * u) * ds
    dk, dv = scale * (unbounded.mT @ q), reference.dropped(p, keep, dropout_p).mT @ grad
    dk, dv = (t.unflatten(1, groups).sum(dim=2) for t in (dk, dv))
    return scale * (unbounded @ keys), dk, dv, ds


def peers_of(inputs: Inputs, dtype: torch.dtype) -> dict[str, tuple[Tensor, ...]]:
    """Return, for every result, what correct arithmetic may make of it: see error_budget."""
    plain, fused = (
        partial(reference_results, inputs, torch.float64, fused=each) for each in (False, True)
    )
    return error_budget.peers_of((plain, fused), dtype, FLOAT32_RESULTS)


def check(inputs: Inputs, found: dict[str, Tensor]) -> None:
    """Assert that results, all of them or some, are within the error budget."""
    exact = reference_results(inputs, torch.float64)
    error_budget.assert_all_within_budget(found, peers_of(inputs, inputs.query.dtype), exact)


def new_stats(query: Tensor, sample: Tensor | None) -> list[Tensor]:
    """Allocate lse (B, H, N), the statistics (STATISTICS, B, H) and heads."""
    batch, heads, rows, dim = query.shape
    slots = 0 if sample is None else sample.shape[0]
    shapes = (batch, heads, rows), (len(STATISTICS), batch, heads), (slots, rows, heads * dim)
    return [query.new_empty(shape, dtype=torch.float32) for shape in shapes]


def new_gradients(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, mask_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate dq, dk, dv in the memory order of the output, and dmask, empty unless wanted."""
    dmask = query.new_empty(0)
    if attn_mask is not None and mask_grad:
        dmask = attn_mask.new_empty(attn_mask.shape)
    return new_out(query), new_out(key), new_out(value), dmask


def run_operators(inputs: Inputs) -> dict[str, Tensor]:
    """Run ``attention_with_stats`` and its backward on the device of the inputs."""
    query, key, value, mask, lengths, seed, *params = inputs.arguments
    leaves = [query, key, value]
    if mask is not None and mask.is_floating_point():
        leaves.append(mask)
    for leaf in leaves:
        leaf.requires_grad_()
    results = torch.ops.leaner_kernels.attention_with_stats(
        query, key, value, mask, lengths, seed, inputs.sample, *params
    )
    out, lse, per_head, heads, _ = results
    found = {"out": out, "lse": lse, **dict(zip(STATISTICS, per_head, strict=True)), "heads": heads}
    grads = torch.autograd.grad(found["out"], leaves, inputs.grad)
    found |= dict(zip(("dq", "dk", "dv", "dmask"), grads))
    unwritten = found["heads"][inputs.sample < 0]
    assert unwritten.isnan().all(), "a slot with a negative index was written"
    found["heads"] = found["heads"][inputs.sample >= 0]
    return found


@contextmanager
def sharing_lse(by_kernels: bool = True) -> Iterator[None]:
    """Let kernels store and load the log-sum-exp, or launches convert it."""
    with mock.patch.object(aten, "KERNELS_SHARE_LSE", by_kernels):
        yield


def share_lse(form: Any, grad: Tensor, tensors: Any, numbers: Any) -> dict[str, Tensor]:
    """Run a forward and a backward that share the output and the log-sum-exp alone."""
    out, lse = shared_lse.forward_with_lse(form, tensors, numbers)
    grads = shared_lse.backward_from_lse(form, grad, tensors, numbers, out=out, lse=lse)
    assert lse.is_contiguous()
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def run_sharing_lse(inputs: Inputs) -> dict[str, Tensor]:
    """Run what PyTorch's operators will, by kernels, on the device of the inputs."""
    with sharing_lse():
        found = share_lse(op.Dense, inputs.grad, inputs.arguments[:6], inputs.arguments[6:])
    return found | {"lse": as_reference(found["lse"])}


def as_reference(lse: Tensor) -> Tensor:
    """Return a log-sum-exp with -inf, not inf, for rows without a visible key."""
    assert (lse != float("-inf")).all(), "a backward would compute infinite probabilities"
    return torch.where(lse == float("inf"), float("-inf"), lse)
