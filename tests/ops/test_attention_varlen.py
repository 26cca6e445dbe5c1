"""Attention over varlen sequences through its public functions and operators, on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leaner_kernels import attention_varlen, attention_varlen_with_stats, attention_with_stats
from tests import registration
from tests.varlen_cases import (
    CASES,
    STATISTICS,
    WINDOW_CASES,
    VarlenTestCase,
    check,
    lengths_of,
    make_inputs,
    run_operators,
)

OPS = torch.ops.leaner_kernels
INT = torch.int32
STARTS = torch.tensor([1, 4, 4, 9], dtype=INT)


def qkv(
    *shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False
) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES, *WINDOW_CASES], ids=lambda case: case.name)
def test_operators_stay_within_the_error_budget(case: VarlenTestCase, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    check(inputs, run_operators(inputs))


@pytest.mark.parametrize("case", [c for c in CASES if not c.dropout_p], ids=lambda c: c.name)
def test_every_sequence_equals_attention_on_it_alone(case: VarlenTestCase) -> None:
    inputs = make_inputs(case, torch.float64)
    options = {"is_causal": case.causal, "enable_gqa": case.kv_heads is not None}
    crossed = {}
    if case.key_lengths is not None:
        crossed = {"cu_seqlens_k": inputs.cu_seqlens_k, "max_seqlen_k": inputs.max_seqlen_k}
    arguments = *inputs[:3], inputs.cu_seqlens, inputs.max_seqlen
    stats = attention_varlen_with_stats(
        *arguments, **crossed, **options, sample=inputs.sample[inputs.sample >= 0]
    )
    out = attention_varlen(*arguments, **crossed, **options)
    assert out.is_contiguous()
    assert torch.equal(out, stats.out)
    lengths = lengths_of(inputs.cu_seqlens), lengths_of(inputs.cu_seqlens_k)
    for number, (rows, cols) in enumerate(zip(*lengths)):
        row, col = inputs.cu_seqlens[number], inputs.cu_seqlens_k[number]
        if not rows or not cols:
            assert (out[row : row + rows] == 0).all()
            assert (stats.max_logit[number] == float("-inf")).all()
            assert (stats.entropy[number] == 0).all()
            continue
        parts = inputs.query[row : row + rows], *(t[col : col + cols] for t in inputs[1:3])
        alone = attention_with_stats(*(t.transpose(0, 1)[None] for t in parts), **options)
        torch.testing.assert_close(out[row : row + rows], alone.out[0].transpose(0, 1))
        torch.testing.assert_close(stats.lse[:, row : row + rows], alone.lse[0])
        for name in STATISTICS:
            torch.testing.assert_close(getattr(stats, name)[number], getattr(alone, name)[0])
    assert (out[: case.before] == 0).all()
    assert (out[len(out) - case.after :] == 0).all()


def test_heads_of_sampled_sequences_are_padded_with_zeros() -> None:
    q, k, v = qkv(10, 3, 8)
    sample = torch.tensor([2, -1, 0, 1], dtype=INT)
    stats = attention_varlen_with_stats(q, k, v, STARTS, 7, sample=sample)
    assert stats.heads is not None
    assert stats.heads.shape == (4, 7, 24)
    torch.testing.assert_close(stats.heads[0, :5], stats.out[4:9].flatten(1))
    torch.testing.assert_close(stats.heads[2, :3], stats.out[1:4].flatten(1))
    assert stats.heads[1].isnan().all()
    for padding in (stats.heads[0, 5:], stats.heads[2, 3:], stats.heads[3]):
        assert (padding == 0).all()


def test_sequences_draw_the_dropout_of_their_entry_in_a_batch() -> None:
    q, k, v = qkv(12, 2, 8)
    torch.manual_seed(7)
    packed = attention_varlen(q, k, v, torch.tensor([0, 4, 8, 12], dtype=INT), 4, dropout_p=0.5)
    torch.manual_seed(7)
    batch = (t.unflatten(0, (3, 4)).transpose(1, 2) for t in (q, k, v))
    expected = attention_with_stats(*batch, dropout_p=0.5).out
    torch.testing.assert_close(packed, expected.transpose(1, 2).flatten(0, 1))


class SeeGradients(TorchDispatchMode):
    """Note the strides of the gradients that reach the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.strides: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is OPS.attention_varlen_backward.default:
            self.strides.append(args[0].stride())
        return func(*args, **(kwargs or {}))


def test_a_gradient_of_another_layout_is_made_contiguous() -> None:
    """The kernels load along the last axis; other strides are theirs to follow."""
    q, k, v = qkv(10, 3, 8, requires_grad=True)
    out = attention_varlen(q, k, v, STARTS, 5)
    with SeeGradients() as trace:
        torch.autograd.grad(out.sum(), q, retain_graph=True)
        torch.autograd.grad(out, q, torch.randn(8, 3, 10).permute(2, 1, 0), retain_graph=True)
        torch.autograd.grad(out, q, torch.randn(3, 10, 8).transpose(0, 1))
    assert trace.strides == [(24, 8, 1), (24, 8, 1), (8, 80, 1)]


def operator_samples() -> dict[str, tuple[Callable[..., object], tuple[object, ...]]]:
    torch.manual_seed(0)
    packed = torch.randn(10, 3, 4, 6)
    q = packed[:, 0].requires_grad_()
    k, v = (packed[:, i, :2].requires_grad_() for i in (1, 2))
    other = torch.tensor([0, 2, 2, 8], dtype=INT)
    seed, sample = torch.tensor([5]), torch.tensor([1, 2], dtype=INT)
    params = 5, 6, 0.2, False, 0.4, -1, -1
    inputs = q, k, v, STARTS, other, seed
    detached = [t.detach() if isinstance(t, Tensor) else t for t in inputs]
    out, max_log_sum = OPS.attention_varlen(*detached, *params)
    with_stats = OPS.attention_varlen_with_stats.default
    return {
        "attention_varlen": (OPS.attention_varlen.default, (*inputs, *params)),
        "attention_varlen, plain": (
            OPS.attention_varlen.default,
            (q, k, v, STARTS, STARTS, None, 5, 5, 0.0, True, 1.0, -1, -1),
        ),
        "attention_varlen_with_stats": (with_stats, (*inputs, sample, *params)),
        "attention_varlen_with_stats, no sample": (with_stats, (*inputs, None, *params)),
        "attention_varlen_backward": (
            OPS.attention_varlen_backward.default,
            (out, *detached, out, max_log_sum, *params),
        ),
    }


test_opcheck, test_fake_equals_real = registration.tests_of(operator_samples())


Q = torch.randn(10, 4, 8)


def call(
    *changed: Tensor, starts: object = STARTS, longest: object = 5, **options: object
) -> Callable[[], object]:
    return lambda: attention_varlen(*(changed or (Q, Q, Q)), starts, longest, **options)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT)


BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "query of four axes": (
        call(Q[None], Q, Q),
        r"query must be \(T, H, D\), got \(1, 10, 4, 8\)",
    ),
    "widths differ": (call(Q, Q[..., :4], Q[..., :4]), "must agree in D"),
    "other keys without their starts": (
        call(Q, Q[:7], Q[:7]),
        "key must have the 10 tokens of query unless cu_seqlens_k is given, got 7",
    ),
    "starts of the keys without the longest": (
        call(cu_seqlens_k=STARTS),
        "cu_seqlens_k and max_seqlen_k go together, got cu_seqlens_k and max_seqlen_k=None",
    ),
    "longest of the keys without their starts": (
        call(max_seqlen_k=5),
        "cu_seqlens_k and max_seqlen_k go together, got no cu_seqlens_k and max_seqlen_k=5",
    ),
    "more sequences of keys": (
        call(cu_seqlens_k=ints(0, 2, 4, 5, 6), max_seqlen_k=5),
        "cu_seqlens_k must have 4 entries as cu_seqlens has, got 5",
    ),
    "starts of booleans": (
        call(starts=STARTS.bool()),
        r"cu_seqlens must be \(S \+ 1,\) integers, got \(4,\) torch.bool on cpu",
    ),
    "no starts": (call(starts=ints()), r"integers, got \(0,\) torch.int32"),
    "starts elsewhere": (
        call(starts=STARTS.to("meta")),
        "cu_seqlens must be on cpu as query is, got meta",
    ),
    "a start below zero": (
        call(starts=ints(-1, 3)),
        r"cu_seqlens must stay in \[0, 10\], got -1 to 3",
    ),
    "an end past the tokens": (
        call(starts=ints(6, 11)),
        r"cu_seqlens must stay in \[0, 10\], got 6 to 11",
    ),
    "starts that fall": (
        call(starts=ints(0, 5, 3, 8)),
        "cu_seqlens must not decrease, got a sequence of -2 tokens",
    ),
    "a sequence longer than the longest": (
        call(longest=4),
        "max_seqlen must be the length of the longest sequence or more, got 4 for 5",
    ),
    "keys longer than the longest": (
        call(cu_seqlens_k=ints(0, 1, 2, 10), max_seqlen_k=7),
        "max_seqlen_k must be the length of the longest sequence or more, got 7 for 8",
    ),
    "longest below zero": (call(longest=-1), "max_seqlen must be an int of at least 0, got -1"),
    "longest in a tensor": (
        call(longest=torch.tensor(5)),
        r"max_seqlen must be an int of at least 0, got tensor\(5\)",
    ),
    "sample past the sequences": (
        lambda: attention_varlen_with_stats(Q, Q, Q, STARTS, 5, sample=ints(3)),
        "sample must be below 3, got 3",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_refused_in_one_line(name: str) -> None:
    bad_call, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message) as caught:
        bad_call()
    assert "\n" not in str(caught.value)
