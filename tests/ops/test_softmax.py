"""Softmax attention: error budget on every backend, truths, dropout, statistics, errors.

Masks and lengths are in ``test_softmax_masks.py``, fused projections in ``test_qkvpacked.py`` and
sequences side by side in ``test_varlen.py``.
"""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leaner_kernels import (
    attention,
    attention_qkvpacked,
    attention_with_stats,
    explain,
)
from leaner_kernels.ops.attention.reference import keep_mask
from tests import registration
from tests.attention_cases import (
    CASES,
    MODELS,
    STATISTICS,
    WINDOW_CASES,
    AttentionTestCase,
    aligned,
    case_named,
    check,
    make_inputs,
    reference_results,
    run_operators,
)
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
)
from tests.error_budget import assert_within_budget
from tests.gpu.draws import randn

OPS = torch.ops.leaner_kernels
EXECUTED_EACH_COMMIT = {
    ("head_dim 48", BFLOAT16, 80),
    ("head_dim 48", BFLOAT16, 120),
    ("dropout with everything", BFLOAT16, 90),
    ("softcap of Gemma 2", BFLOAT16, 80),
    ("softcap, additive mask", BFLOAT16, 90),
    ("window of both sides", BFLOAT16, 80),
    ("window, more rows than keys", BFLOAT16, 90),
}
MODELS_EXECUTED_EACH_COMMIT = {
    ("ViT-B", BFLOAT16, 80),
    ("ViT-B", BFLOAT16, 89),
    ("ViT-B", BFLOAT16, 90),
    ("ViT-B", BFLOAT16, 120),
    ("ViT-B", FLOAT16, 90),
    ("ViT-B, lengths", BFLOAT16, 80),
    ("ViT-B, dropout", BFLOAT16, 90),
    ("ViT-B, dropout", BFLOAT16, 100),
    ("ViT-B, additive mask", BFLOAT16, 80),
    ("ViT-B, grouped queries", BFLOAT16, 90),
    ("BERT", BFLOAT16, 90),
    ("128 tokens, causal", FLOAT16, 80),
    ("GPT-2, 512 tokens", BFLOAT16, 90),
    ("GPT-2, 512 tokens", FLOAT16, 120),
    ("inner tokens of TNT", BFLOAT16, 80),
    ("inner tokens of TNT", BFLOAT16, 90),
    ("inner tokens of TNT", BFLOAT16, 100),
    ("inner tokens of TNT", BFLOAT16, 120),
    ("64 tokens, additive mask", BFLOAT16, 90),
}


def qkv(
    *shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False
) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for _ in range(3)]


# --- The error budget -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "target"),
    [
        *on_cpu(CASES + WINDOW_CASES),
        *in_interpreter(CASES + WINDOW_CASES),
        *executed(CASES + WINDOW_CASES, EXECUTED_EACH_COMMIT),
        *on_gpu(CASES + WINDOW_CASES),
    ],
)
def test_results_stay_within_the_error_budget(case: AttentionTestCase, target: Target) -> None:
    """The output, every gradient, every statistic and the captured heads.

    The interpreter runs the kernels for any length; test_short_kernels.py has the others.
    """
    inputs = make_inputs(case, target.dtype)
    with target.active():
        if target.backend == INTERPRETER:
            from tests.interpreter import online

            results = online.run(inputs)
        else:
            results = run_operators(make_inputs(case, target.dtype, target.device))
    assert all(result.device.type == target.device for result in results.values())
    assert results.keys() == reference_results(inputs, torch.float64).keys()
    check(inputs, results)


@pytest.mark.parametrize(("case", "target"), executed(MODELS, MODELS_EXECUTED_EACH_COMMIT))
def test_aligned_rows_of_models_stay_within_the_error_budget(
    case: AttentionTestCase, target: Target
) -> None:
    """Most of these calls are computed by kernels in Gluon, or by those for whole heads."""
    with target.active():
        results = run_operators(make_inputs(case, target.dtype, "cuda", aligned))
    check(make_inputs(case, target.dtype, layout=aligned), results)


@pytest.mark.backends(INTERPRETER)
def test_the_backward_is_deterministic() -> None:
    from tests.interpreter import online

    inputs = make_inputs(case_named("dropout with everything"), torch.float16)
    first, second = online.run(inputs), online.run(inputs)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.backends(INTERPRETER)
def test_statistics_show_a_nan() -> None:
    from tests.interpreter import online

    inputs = make_inputs(case_named("lengths"), torch.float32)
    inputs.query[1, 1, 7, 3] = float("nan")
    results = online.run(inputs)
    for name in STATISTICS:
        assert results[name].isnan().nonzero().tolist() == [[1, 1]], name


@pytest.mark.backends(INTERPRETER)
def test_lengths_and_samples_outside_the_batch_are_clamped_and_skipped() -> None:
    """The device cannot raise; it must not read outside either."""
    from leaner_kernels.ops.attention import op
    from tests.interpreter import online

    inputs = make_inputs(case_named("lengths"), torch.float32)
    clamped = inputs._replace(key_lengths=torch.tensor([1, 50, 50], dtype=torch.int32))
    wild = inputs._replace(
        key_lengths=torch.tensor([-4, 50, 1 << 20], dtype=torch.int32),
        sample=torch.tensor([3, -7, 1 << 20], dtype=torch.int32),
    )
    out = op.new_out(inputs.query)
    online.forward(wild.call, out, online.new_max_log_sum(inputs.query))
    assert torch.equal(out, online.run(clamped)["out"])
    heads = torch.full((3, 50, 32), 7.0)
    online.capture(wild.call, wild.sample, heads)
    assert (heads == 7).all()


# --- Truths that need no second implementation ----------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if not c.dropout_p], ids=lambda c: c.name)
def test_attention_equals_the_reference(case: AttentionTestCase) -> None:
    inputs = make_inputs(case, torch.float64)
    query, key, value, mask, lengths = *inputs[:3], inputs.attn_mask, inputs.key_lengths
    gqa = case.heads != case.kv_heads
    named = {"enable_gqa": gqa, "key_lengths": lengths, "softcap": case.softcap}
    actual = attention(query, key, value, mask, 0.0, case.causal, **named)
    expected = reference_results(inputs, torch.float64)["out"]
    torch.testing.assert_close(actual, expected)


def test_constant_values_pass_through() -> None:
    q, k, _ = qkv(2, 3, 17, 8)
    out = attention_with_stats(q, k, torch.full_like(k, 3.5)).out
    torch.testing.assert_close(out, torch.full_like(out, 3.5))


def test_permuted_keys_change_nothing() -> None:
    q, k, v = qkv(2, 3, 17, 8, dtype=torch.float64)
    order = torch.randperm(17)
    stats, permuted = (
        attention_with_stats(q, k[:, :, i], v[:, :, i]) for i in (slice(None), order)
    )
    for first, second in zip(stats[:-1], permuted[:-1]):
        torch.testing.assert_close(first, second)


def test_equal_keys_have_the_entropy_of_a_fair_die() -> None:
    q, k, v = qkv(1, 2, 6, 8, dtype=torch.float64)
    stats = attention_with_stats(q, k[:, :, :1].expand_as(k), v)
    torch.testing.assert_close(stats.entropy, torch.full((1, 2), 6.0).log())
    torch.testing.assert_close(stats.prob_norm, torch.ones(1, 2))


def test_dropout_is_a_pure_function_of_the_seed() -> None:
    seed = torch.tensor([1234567890123456789])
    mask = keep_mask(seed, 2, 3, 64, 48, 0.25)
    assert torch.equal(mask, keep_mask(seed, 2, 3, 64, 48, 0.25))
    # A position keeps its bit whatever surrounds it: the tile that holds it does not matter.
    assert torch.equal(mask[:1, :, :10, :7], keep_mask(seed, 1, 3, 10, 7, 0.25))
    assert not torch.equal(mask, keep_mask(seed + 1, 2, 3, 64, 48, 0.25))
    share, deviation = mask.double().mean(), (0.25 * 0.75 / mask.numel()) ** 0.5
    assert abs(share - 0.75) < 5 * deviation


def test_philox_draws_the_published_numbers() -> None:
    """Random123's known answer for counter 0 and key 0 starts with 0x6627e8d5."""
    bits = 0x6627E8D5 >> 1
    seed = torch.zeros(1, dtype=torch.int64)
    assert keep_mask(seed, 1, 1, 1, 1, bits / 2**31).item()
    assert not keep_mask(seed, 1, 1, 1, 1, (bits + 1) / 2**31).item()


def test_dropout_follows_pytorchs_generator() -> None:
    q, k, v = qkv(2, 3, 17, 8)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attention_with_stats(q, k, v, dropout_p=0.5).out)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("function", ["packed", "attention", "stats"])
def test_outputs_may_be_changed_in_place(function: str) -> None:
    q, k, v = qkv(2, 3, 5, 8, requires_grad=True)
    packed = torch.stack([t.transpose(1, 2) for t in (q, k, v)], dim=2)
    if function == "packed":
        out = OPS.attention_qkvpacked(packed, None, None, 0.0, False, 0.3, -1, -1)[0]
    elif function == "attention":
        out = OPS.attention(q, k, v, None, None, None, 0.0, False, 0.3, 0.0, -1, -1)[0]
    else:
        out = attention_with_stats(q, k, v).out
    expected = 2 * out
    assert torch.equal(out.mul_(2), expected)


# --- Registration, autocast and torch.compile -----------------------------------------------------


def operator_samples() -> dict[str, tuple[Callable[..., object], tuple[object, ...]]]:
    q, k, v = qkv(2, 4, 7, 6, requires_grad=True)
    k, v = (t[:, :2].detach().requires_grad_() for t in (k, v))
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    seed, sample = torch.tensor([5]), torch.tensor([1, 0], dtype=torch.int32)
    mask = torch.randn(4, 7, 7, requires_grad=True)
    packed = torch.randn(2, 7, 3, 4, 6, requires_grad=True)
    out, max_log_sum = OPS.attention(q, k, v, mask, lengths, seed, 0.2, False, 0.4, 1.5, -1, -1)
    forward = q, k, v, mask, lengths, seed
    detached = [t.detach() for t in (out, q, k, v, mask, lengths, seed, out, max_log_sum)]
    params = 0.2, False, 0.4, -1, -1
    capped = 0.2, False, 0.4, 1.5, -1, -1
    packed_out = OPS.attention_qkvpacked(packed, lengths, seed, *params)
    packed_backward = [t.detach() for t in (packed_out[0], packed, lengths, seed, *packed_out)]
    return {
        "attention": (OPS.attention.default, (*forward, *capped)),
        "attention, causal": (
            OPS.attention.default,
            (q, k, v, None, None, None, 0.0, True, 1.0, 0.0, -1, -1),
        ),
        "attention_with_stats": (OPS.attention_with_stats.default, (*forward, sample, *capped)),
        "attention_with_stats, no sample": (
            OPS.attention_with_stats.default,
            (*forward, None, *capped),
        ),
        "attention_backward": (OPS.attention_backward.default, (*detached, *capped, True)),
        "attention_qkvpacked": (OPS.attention_qkvpacked.default, (packed, lengths, seed, *params)),
        "attention_qkvpacked_with_stats": (
            OPS.attention_qkvpacked_with_stats.default,
            (packed, lengths, seed, sample, *params),
        ),
        "attention_qkvpacked_backward": (
            OPS.attention_qkvpacked_backward.default,
            (*packed_backward, *params),
        ),
    }


test_opcheck, test_fake_equals_real = registration.tests_of(operator_samples())


def test_inductor_compiles_the_operator() -> None:
    q, k, v = qkv(2, 4, 9, 8, requires_grad=True)
    call = functools.partial(attention_with_stats, is_causal=True)
    compiled = torch.compile(lambda *x: call(*x).out, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v).out)


def test_sdpa_may_be_replaced_by_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """``attention`` keeps PyTorch's own function, so that replacing it does not recurse."""
    q, k, v = qkv(2, 4, 9, 8)
    expected = F.scaled_dot_product_attention(q, k, v)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected)


def test_autocast_narrows_as_it_does_for_pytorchs_function() -> None:
    q, k, v = qkv(2, 4, 9, 8)
    packed = torch.stack([t.transpose(1, 2) for t in (q, k, v)], dim=2)
    exact = F.scaled_dot_product_attention(*(t.bfloat16().double() for t in (q, k, v)))
    with torch.autocast("cpu", torch.bfloat16):
        peer = F.scaled_dot_product_attention(q, k.bfloat16(), v)
        for out in (
            attention(q, k.bfloat16(), v),
            attention_qkvpacked(packed).transpose(1, 2),
            attention_with_stats(q, k.bfloat16(), v).out,
        ):
            assert out.dtype == peer.dtype == torch.bfloat16
            assert_within_budget(out, peer, exact)


def test_statistics_do_not_round_inside_a_region_of_autocast() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 9, 8, dtype=torch.bfloat16) for _ in range(3))
    outside = attention_with_stats(query, key, value)
    with torch.autocast("cpu", torch.bfloat16):
        inside = attention_with_stats(query, key, value)
    for name, value in inside._asdict().items():
        if value is not None:
            assert torch.equal(value, getattr(outside, name)), name


# --- What is refused ------------------------------------------------------------------------------


Q = torch.randn(2, 4, 6, 8)
INT = torch.int32
BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "rows too far apart": (
        lambda: attention(*[torch.empty(1).as_strided((1, 1, 1, 1), (1, 1, 1 << 24, 1))] * 3),
        "query must have rows at most 8388607 elements apart, got 16777216",
    ),
    "head_dim 129": (lambda: attention_with_stats(*qkv(1, 1, 4, 129)), "up to 128, got 129"),
    "lengths of float64": (
        lambda: attention(Q, Q, Q, key_lengths=torch.ones(2, dtype=torch.float64)),
        r"key_lengths must be \(2,\) integers on cpu, got \(2,\) torch.float64 on cpu",
    ),
    "length 0": (
        lambda: attention(Q, Q, Q, key_lengths=torch.tensor([0, 2], dtype=INT)),
        r"key_lengths must be in \[1, 6\], got 0",
    ),
    "length past the keys": (
        lambda: attention_qkvpacked(
            torch.randn(2, 6, 3, 4, 8), key_lengths=torch.tensor([6, 7], dtype=INT)
        ),
        r"key_lengths must be in \[1, 6\], got 7",
    ),
    "a list of more lengths": (
        lambda: attention(Q, Q, Q, key_lengths=[1, 2, 3]),
        r"key_lengths must be \(2,\) integers on cpu, got a list of 3",
    ),
    "packed list": (lambda: attention_qkvpacked([1.0]), "qkv must be a tensor, got list"),
    "packed of four axes": (
        lambda: attention_qkvpacked(Q),
        r"qkv must be \(B, N, 3, H, D\), got \(2, 4, 6, 8\)",
    ),
    "sample past the batch": (
        lambda: attention_with_stats(Q, Q, Q, sample=torch.tensor([2], dtype=INT)),
        "sample must be below 2, got 2",
    ),
    "sample of int64": (
        lambda: attention_with_stats(Q, Q, Q, sample=torch.tensor([0])),
        r"sample must be \(S,\) int32 on cpu, got \(1,\) torch.int64",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_refused_in_one_line(name: str) -> None:
    call, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_tokens_in_the_place_of_heads_are_told_of() -> None:
    """Of flash-attention's layout, where keys and queries are not as many."""
    q = torch.randn(2, 9, 4, 8)
    with pytest.raises(ValueError, match=r"key has 7 heads for 9 .*; \(B, N, H, D\), as flash"):
        attention(q, q[:, :7], q[:, :7])


# --- On a GPU: launches that are repeated, compiled and captured ----------------------------------


@pytest.mark.backends(GPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [50, 197, 1024])
@pytest.mark.parametrize("function", ["attention", "packed", "stats"])
def test_compiles_without_a_graph_break(function: str, tokens: int, dtype: torch.dtype) -> None:
    packed = randn(2, tokens, 3, 4, 32, dtype=dtype).requires_grad_()
    sample = torch.tensor([1], dtype=torch.int32, device="cuda")

    def call(x: Tensor) -> Tensor:
        if function == "packed":
            return attention_qkvpacked(x).transpose(1, 2)
        q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
        if function == "attention":
            return attention(q, k, v)
        stats = attention_with_stats(q, k, v, sample=sample)
        return stats.out + stats.heads.mean() + stats.entropy[..., None, None]

    compiled = torch.compile(call, fullgraph=True)
    expected, actual = call(packed), compiled(packed)
    close = {"atol": 0.02, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(actual, expected, **close)
    grads = [torch.autograd.grad(t.sum(), packed)[0] for t in (expected, actual)]
    torch.testing.assert_close(grads[1], grads[0], **close)


@pytest.mark.backends(GPU)
def test_a_captured_graph_may_skip_a_sample() -> None:
    """The index lives on the device: a negative one leaves the slot as it was."""
    # A graph would fill its memory with NaN at every replay.
    torch.utils.deterministic.fill_uninitialized_memory = False
    q, k, v = (randn(4, 3, 50, 16) for _ in range(3))
    sample = torch.tensor([2], dtype=torch.int32, device="cuda")
    attention_with_stats(q, k, v, sample=sample)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats = attention_with_stats(q, k, v, sample=sample)
    expected = attention_with_stats(q, k, v, sample=sample).heads
    graph.replay()
    assert torch.equal(stats.heads, expected)
    stats.heads.fill_(7)
    sample.fill_(-1)
    graph.replay()
    assert (stats.heads == 7).all()


@pytest.mark.backends(GPU)
def test_dropout_draws_the_same_mask_as_the_cpu() -> None:
    case = case_named("dropout")
    cpu, cuda = (make_inputs(case, torch.float32, device) for device in ("cpu", "cuda"))
    outs = [torch.ops.leaner_kernels.attention(*i.arguments)[0].cpu() for i in (cpu, cuda)]
    torch.testing.assert_close(outs[1], outs[0], atol=1e-4, rtol=1e-4)


@pytest.mark.backends(GPU)
def test_long_sequences_go_to_a_library_that_computes_the_same() -> None:
    torch.use_deterministic_algorithms(False)  # which every test has on, and which keeps ours
    q, k, v = (randn(2, 4, 1024, 64, dtype=torch.bfloat16) for _ in range(3))
    grad = randn(2, 4, 1024, 64, dtype=torch.bfloat16)
    assert explain(q, k, v, is_causal=True).forward.implementation == "sdpa"

    def run(*tensors: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = attention(*leaves, is_causal=True)
        return [out, *torch.autograd.grad(out, leaves, grad.to(out))]

    exact = run(*(t.double().cpu() for t in (q, k, v)))
    plain = run(*(t.cpu() for t in (q, k, v)))
    for actual, peer, truth in zip(run(q, k, v), plain, exact):
        assert_within_budget(actual, peer, truth)


@pytest.mark.backends(GPU)
def test_what_kernels_cannot_do_is_refused() -> None:
    q = randn(2, 3, 8, 16)
    with pytest.raises(ValueError, match=r"one of float32, float16, bfloat16, got torch.float64"):
        attention(q.double(), q.double(), q.double())
    with pytest.raises(ValueError, match=r"got torch.float32 on cpu"):
        attention(q, q.cpu(), q)
