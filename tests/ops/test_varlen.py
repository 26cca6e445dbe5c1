"""Attention over sequences side by side: error budget on every backend, truths, starts, errors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leaner_kernels import attention_varlen, attention_varlen_with_stats, attention_with_stats
from leaner_kernels.ops import route
from leaner_kernels.ops.attention import dispatch
from tests import registration
from tests.backends import (
    BFLOAT16,
    FLOAT16,
    GPU,
    INTERPRETER,
    Target,
    executed,
    in_interpreter,
    on_cpu,
    on_gpu,
    one,
)
from tests.error_budget import assert_within_budget
from tests.gpu.draws import randn
from tests.varlen_cases import (
    CASES,
    STATISTICS,
    WINDOW_CASES,
    Inputs,
    VarlenTestCase,
    assemble,
    case_named,
    check,
    finish,
    lengths_of,
    make_inputs,
    run_operators,
)

OPS = torch.ops.leaner_kernels
INT = torch.int32
STARTS = torch.tensor([1, 4, 4, 9], dtype=INT)
REPEATS = 20  # on a GPU, of a test that the same call gives the same bits
GPU_CASES = (
    VarlenTestCase("NaViT", (49, 256, 100, 197, 81, 64, 144, 225), 16, 64, slack=8),
    VarlenTestCase("texts", (512, 3, 77, 130, 290), 12, 32, causal=True, after=12),
    VarlenTestCase("a long text", (2048, 5, 1000), 2, 128, causal=True),
    VarlenTestCase("many short sequences", (16, 9, 1, 12) * 64, 4, 10),
)
EXECUTED_EACH_COMMIT = {
    ("texts, causal", BFLOAT16, 80),
    ("texts, causal", BFLOAT16, 120),
    ("window, crossed", BFLOAT16, 90),
    ("images of many sizes", BFLOAT16, 90),
}


def run_kernels(inputs: Inputs) -> dict[str, Tensor]:
    """Run what the CUDA operators run: forward with statistics, capture and backward."""
    from leaner_kernels.ops.attention import op

    out, lse, stats, heads, max_log_sum = route.forward_on_gpu(
        op.Varlen, True, *inputs.operands, inputs.sample, *inputs.params
    )
    grads = route.backward_on_gpu(
        op.Varlen, inputs.grad, *inputs.operands, out, max_log_sum, *inputs.params
    )
    names = "out", "lse", *STATISTICS, "heads", "dq", "dk", "dv"
    return finish(inputs, dict(zip(names, (out, lse, *stats, heads, *grads), strict=True)))


def run(case: VarlenTestCase, target: Target) -> dict[str, Tensor]:
    """Run forward with statistics, capture and backward on the backend of the target."""
    with target.active():
        inputs = make_inputs(case, target.dtype, target.device)
        results = (run_kernels if target.backend == INTERPRETER else run_operators)(inputs)
    assert all(result.device.type == target.device for result in results.values())
    return results


# --- The error budget -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "target"),
    [
        *on_cpu(CASES + WINDOW_CASES),
        *in_interpreter(CASES + WINDOW_CASES),
        *executed(CASES + WINDOW_CASES, EXECUTED_EACH_COMMIT),
        *on_gpu(CASES + WINDOW_CASES + GPU_CASES),
    ],
)
def test_results_stay_within_the_error_budget(case: VarlenTestCase, target: Target) -> None:
    """Outside the sequences all is NaN: what is read there shows."""
    check(make_inputs(case, target.dtype), run(case, target))


@pytest.mark.parametrize(
    ("case", "target"),
    [
        one(
            case_named("dropout with everything"),
            Target(INTERPRETER, FLOAT16),
            pytest.mark.slow,
        ),
        one(case_named("dropout with everything"), Target(GPU, BFLOAT16)),
    ],
)
def test_the_same_call_gives_the_same_bits(case: VarlenTestCase, target: Target) -> None:
    first = run(case, target)
    for _ in range(REPEATS if target.backend == GPU else 1):
        for name, value in run(case, target).items():
            assert torch.equal(value, first[name]), name


@pytest.mark.backends(INTERPRETER)
def test_much_padding_is_filled() -> None:
    """More than one round of all programs that fill."""
    before = 5
    case = VarlenTestCase(
        "a short sequence in a long buffer", (3,), 8, 128, before=before, after=300
    )
    inputs = make_inputs(case, torch.float32)
    exact = assemble(inputs, torch.float64)
    assert inputs.query.numel() > 2 * 128 * 1024
    results = run_kernels(inputs)
    owned = slice(before, before + 3)
    for name in ("out", "dq", "dk", "dv"):
        assert (results[name][:before] == 0).all()
        assert (results[name][owned] != 0).all()
        assert (results[name][before + 3 :] == 0).all()
    assert torch.equal(results["lse"].isinf(), exact["lse"].isinf())


@pytest.mark.backends(INTERPRETER)
@pytest.mark.parametrize(
    ("wild", "clamped"),
    [
        ((-7, 4, 8, 20), (0, 4, 8, 20)),
        ((0, 4, 8, 1 << 30), (0, 4, 8, 20)),
        ((0, 20, 1 << 30, 1 << 30), (0, 20, 20, 20)),
        ((50, 50, 50, 50), (20, 20, 20, 20)),
        ((9, 9, -(1 << 31), -5), (9, 9, 9, 9)),
    ],
    ids=str,
)
def test_wild_starts_and_samples_are_clamped_and_skipped(
    wild: tuple[int, ...], clamped: tuple[int, ...]
) -> None:
    """The device cannot raise; it must not reach outside either."""
    from leaner_kernels.ops.attention import op

    inputs = make_inputs(VarlenTestCase("", (4, 4, 12), 2, 16), torch.float32)
    found = []
    for starts in (wild, clamped):
        tensor = torch.tensor(starts, dtype=torch.int32)
        sample = torch.tensor([3, -7, 1 << 20], dtype=torch.int32)
        packed = inputs._replace(cu_seqlens=tensor, cu_seqlens_k=tensor, sample=sample)
        out, *stats, heads, max_log_sum = route.forward_on_gpu(
            op.Varlen, True, *packed.operands, sample, *packed.params
        )
        assert heads.isnan().all()
        grads = route.backward_on_gpu(
            op.Varlen, packed.grad, *packed.operands, out, max_log_sum, *packed.params
        )
        found.append((out, *stats, *grads))
    for actual, expected in zip(*found):
        torch.testing.assert_close(actual, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.backends(INTERPRETER)
def test_a_maximum_that_is_too_short_computes_the_first_rows() -> None:
    from leaner_kernels.ops.attention import op

    inputs = make_inputs(VarlenTestCase("", (40, 20), 2, 16), torch.float32)
    short = inputs._replace(max_seqlen=33, max_seqlen_k=33)
    cut = torch.cat([torch.arange(33), torch.arange(40, 60)])
    expected = make_inputs(VarlenTestCase("", (33, 20), 2, 16), torch.float32)
    expected = expected._replace(**{n: getattr(inputs, n)[cut] for n in ("query", "key", "value")})
    out, _ = route.forward_on_gpu(op.Varlen, False, *short.operands, *short.params)
    wanted, _ = route.forward_on_gpu(op.Varlen, False, *expected.operands, *expected.params)
    assert torch.equal(out[cut], wanted)
    assert out[33:40].isnan().all()


# --- Truths, layouts and registration -------------------------------------------------------------


def qkv(
    *shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False
) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for _ in range(3)]


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


# --- Calls that PyTorch computes ------------------------------------------------------------------

TOKENS, HEADS, DIM = 40, 2, 16
LIBRARY_STARTS = torch.tensor([3, 10, 10, 33], dtype=torch.int32)
OUTSIDE = (torch.arange(TOKENS) < 3) | (torch.arange(TOKENS) >= 33)


class _Spoil(torch.autograd.Function):
    """Leave what no sequence owns as memory may be, and its gradient too."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t.masked_fill(OUTSIDE[:, None, None], float("nan"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.masked_fill(OUTSIDE[:, None, None], float("nan"))


def pytorchs(q: Tensor, k: Tensor, v: Tensor, *ends: Any, scale: Any, window_size: Any) -> Tensor:
    assert window_size in ((-1, 0), (-1, -1))
    q, k, v = (_Spoil.apply(t) for t in (q, k, v))
    starts, _, longest, _ = ends
    causal = window_size == (-1, 0)
    out = attention_varlen(q, k, v, starts, longest, is_causal=causal, scale=scale)
    return _Spoil.apply(out)


@pytest.mark.backends(INTERPRETER)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_library_leaves_zeros_in_what_no_sequence_owns(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leaner_kernels.ops.attention import sdpa
    from leaner_kernels.ops.attention.call import Call, Sequences

    monkeypatch.setattr(sdpa, "_varlen_attn", lambda: pytorchs)
    torch.manual_seed(0)
    projection = torch.randn(TOKENS, 3, HEADS, DIM)
    grad = torch.randn(TOKENS, HEADS, DIM)
    results = []
    sequences = Sequences(LIBRARY_STARTS, LIBRARY_STARTS, 23, 23)

    def theirs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tensors, numbers = (query, key, value, None, None, None), (0.0, is_causal, 0.3)
        return sdpa.varlen_attention(Call(*tensors, *numbers, sequences=sequences))

    ours = partial(attention_varlen, cu_seqlens=LIBRARY_STARTS, max_seqlen=23, is_causal=is_causal)
    for call in (partial(ours, scale=0.3), theirs):
        leaf = projection.clone().requires_grad_()
        out = call(*leaf.unbind(1))
        results.append((out.detach(), *torch.autograd.grad(out, leaf, grad)))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    assert not results[1][0][OUTSIDE].any()
    assert not results[1][1][OUTSIDE].any()


# --- What is refused ------------------------------------------------------------------------------

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
        "max_seqlen must be at least the length of the longest sequence, 5, got 4",
    ),
    "keys longer than the longest": (
        call(cu_seqlens_k=ints(0, 1, 2, 10), max_seqlen_k=7),
        "max_seqlen_k must be at least the length of the longest sequence, 8, got 7",
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


# --- On a GPU -------------------------------------------------------------------------------------


@pytest.mark.backends(GPU)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_pytorchs_computes_the_same_and_leaves_zeros_outside(
    dim: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.use_deterministic_algorithms(False)  # which every test has on, and which keeps ours
    qkv = randn(900, 3, 4, dim, dtype=torch.bfloat16)
    grad = randn(900, 4, dim, dtype=torch.bfloat16)
    starts = torch.tensor([3, 400, 400, 877], dtype=torch.int32, device="cuda")

    def run(rule: dispatch.Rule | None, given: Tensor) -> list[Tensor]:
        monkeypatch.setattr(dispatch, "find_rule_of_library", lambda *_, **call: rule)
        leaf = given.detach().requires_grad_()
        tensors, place = leaf.unbind(1), starts.to(given.device)
        out = attention_varlen(*tensors, place, 477, is_causal=is_causal)
        return [out, *torch.autograd.grad(out, leaf, grad.to(out))]

    exact, plain = (run(None, qkv.cpu().to(dtype)) for dtype in (torch.float64, torch.bfloat16))
    for actual, peer, truth in zip(run(dispatch.Rule(1, None, "a test"), qkv), plain, exact):
        assert_within_budget(actual, peer, truth)
        assert not actual[:3].any()
        assert not actual[877:].any()


@pytest.mark.backends(GPU)
def test_pytorchs_never_follows_wild_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(
        dispatch, "find_rule_of_library", lambda *_, **call: dispatch.Rule(1, None, "a test")
    )
    q = randn(20, 4, 16, dtype=torch.bfloat16)
    wild, clamped = (
        torch.tensor(starts, dtype=torch.int32, device="cuda")
        for starts in ((-7, 4, 2, 8, 1 << 30), (0, 4, 4, 8, 20))
    )
    expected = attention_varlen(q, q, q, clamped, 12)
    assert torch.equal(attention_varlen(q, q, q, wild, 12), expected)


@pytest.mark.backends(GPU)
def test_wild_starts_on_a_gpu_are_clamped() -> None:
    q, k, v = (randn(20, 4, 16) for _ in range(3))
    wild, clamped = (
        torch.tensor(starts, dtype=torch.int32, device="cuda")
        for starts in ((-7, 4, 8, 1 << 30), (0, 4, 8, 20))
    )
    expected = attention_varlen(q, k, v, clamped, 12)
    assert torch.equal(attention_varlen(q, k, v, wild, 12), expected)


@pytest.mark.backends(GPU)
@pytest.mark.parametrize("with_stats", [False, True])
def test_one_compiled_graph_serves_batches_of_other_sizes(with_stats: bool) -> None:
    def call(packed: Tensor, starts: Tensor, longest: int) -> Tensor:
        q, k, v = packed.unbind(1)
        if not with_stats:
            return attention_varlen(q, k, v, starts, longest)
        stats = attention_varlen_with_stats(q, k, v, starts, longest, sample=starts[:1] * 0)
        return stats.out + stats.heads.mean() + stats.entropy.mean()

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for lengths in ((30, 0, 5), (70, 2), (1, 40, 2, 300)):
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
        packed = randn(sum(lengths) + 2, 3, 4, 32).requires_grad_()
        expected, actual = (f(packed, starts, max(lengths)) for f in (call, compiled))
        torch.testing.assert_close(actual, expected)
        grads = [torch.autograd.grad(t.square().sum(), packed)[0] for t in (expected, actual)]
        torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.backends(GPU)
def test_a_captured_graph_follows_starts_and_samples_on_the_device() -> None:
    # A graph would fill its memory with NaN at every replay.
    torch.utils.deterministic.fill_uninitialized_memory = False
    q, k, v = (randn(100, 3, 16) for _ in range(3))
    starts = torch.tensor([0, 40, 100], dtype=torch.int32, device="cuda")
    sample = torch.tensor([1], dtype=torch.int32, device="cuda")

    def call() -> tuple[Tensor, ...]:
        return attention_varlen_with_stats(q, k, v, starts, 64, sample=sample)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for second, index in ((60, 0), (37, 1)):
        starts[1] = second
        sample.fill_(index)
        graph.replay()
        for actual, expected in zip(captured, call(), strict=True):
            assert torch.equal(actual, expected)
    captured.heads.fill_(7)
    sample.fill_(-1)
    graph.replay()
    assert (captured.heads == 7).all()
