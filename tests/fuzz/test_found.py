"""What fuzzing found, each as a plain test."""

import math

import pytest
import torch

from leaner_kernels import (
    ConditioningPenalty,
    EntropyAlarm,
    KappaMonitor,
    QKClip,
    attention,
    attention_qkvpacked,
    attention_varlen,
    attention_with_stats,
    channel_attention,
    condition_number,
    condition_report,
    conditioning_penalty,
    cross_covariance_attention,
    cross_covariance_attention_with_stats,
    gaussian_condition_number,
    head_report,
    nystrom_attention,
    outlook_attention,
    singular_values,
    window_attention,
    window_attention_with_stats,
)
from leaner_kernels.nn import ManyHeadAttention, OutlookAttention
from tests.error_budget import assert_within_budget

q = torch.randn(2, 3, 8, 4)
qkv = torch.randn(2, 8, 3, 2, 4)
packed = torch.randn(8, 3, 4)
starts = torch.tensor([0, 3, 8], dtype=torch.int32)
lengths = torch.tensor([1, 8], dtype=torch.int32)
huge = 10**400
REFUSED = {
    "a scale that no float can hold": (
        lambda: attention(q, q, q, scale=huge),
        "scale must be a finite number, got 1000",
    ),
    "an eps that no float can hold": (
        lambda: cross_covariance_attention(qkv, torch.ones(2), eps=huge),
        "eps must be a number",
    ),
    "a sparse mask of five axes": (
        lambda: attention(*[q[None, None]] * 3, torch.ones(1, 1, 1, 8, 8).bool().to_sparse()),
        "attn_mask must be a dense tensor",
    ),
    "a dropout of None": (lambda: attention(q, q, q, dropout_p=None), "dropout_p must be .* None"),
    "a dropout in words": (
        lambda: attention_qkvpacked(qkv, dropout_p="1"),
        "dropout_p must be .*'1'",
    ),
    "a dropout in a tensor": (
        lambda: attention(q, q, q, dropout_p=torch.tensor([0.1, 0.2])),
        "dropout_p must be",
    ),
    "a flag in words": (lambda: attention(q, q, q, is_causal="yes"), "is_causal must be True or"),
    "a flag of None, with statistics": (
        lambda: attention_with_stats(q, q, q, is_causal=None),
        "is_causal must be True or False, got None",
    ),
    "a flag of None, packed": (
        lambda: attention_qkvpacked(qkv, is_causal=None),
        "is_causal must be",
    ),
    "a flag that is a tensor of many lines": (
        lambda: attention(q, q, q, enable_gqa=q),
        r"enable_gqa must be True or False, got tensor[^\n]*\.\.\.$",
    ),
    "a longest sequence past int32": (
        lambda: attention_varlen(packed, packed, packed, starts, 10**30),
        "max_seqlen must be at most 2147483647",
    ),
    "sparse starts": (
        lambda: attention_varlen(packed, packed, packed, starts.to_sparse(), 8),
        "cu_seqlens must be a dense tensor, got torch.sparse_coo",
    ),
    "sparse lengths": (
        lambda: attention(q, q, q, key_lengths=lengths.to_sparse()),
        "key_lengths must be a dense tensor",
    ),
    "a sparse mask": (
        lambda: attention(q, q, q, torch.ones(8, 8, dtype=torch.bool).to_sparse()),
        "attn_mask must be a dense tensor",
    ),
    "a sparse map": (
        lambda: window_attention_with_stats(torch.randn(1, 2, 2, 3, 1, 4).to_sparse(), 2),
        "qkv must be a dense tensor",
    ),
    "a sparse temperature": (
        lambda: cross_covariance_attention(qkv, torch.ones(2).to_sparse()),
        "temperature must be a dense tensor",
    ),
    "a nested query of another rank": (
        lambda: attention(*[torch.nested.nested_tensor([q[0, 0]], layout=torch.strided)] * 3),
        "query must not be nested: attention_varlen",
    ),
    "a nested projection": (
        lambda: channel_attention(torch.nested.nested_tensor([qkv[0]], layout=torch.strided)),
        "qkv must be a dense tensor, got a nested tensor",
    ),
    "a start of the inverse in a list": (
        lambda: nystrom_attention(q, q, q, 2, init=["matrix"]),
        r"init must be one of matrix, batch, got \['matrix'\]",
    ),
    "a tensor of many lines as a stride": (
        lambda: outlook_attention(qkv, qkv, stride=qkv),
        r"stride must be a whole number in \[1, 4\], got tensor[^\n]*\.\.\.$",
    ),
    "a tensor of many lines as a window": (
        lambda: window_attention(torch.randn(1, 2, 2, 3, 1, 4), (qkv, 1)),
        r"window_size must be [^\n]*\.\.\.$",
    ),
    "no matrix": (lambda: condition_number(None), "matrices must be a tensor, got NoneType"),
    "a sparse matrix": (lambda: singular_values(q.to_sparse()), "matrices must be a dense tensor"),
    "no lengths": (lambda: condition_report(q, lengths=3), "lengths must be a tensor, got int"),
    "lengths past the matrix": (
        lambda: condition_number(q[0], lengths=torch.tensor([1, 9, 3])),
        r"lengths must be in \[0, 8\], got 9",
    ),
    "lengths below zero": (
        lambda: condition_number(q[0], lengths=torch.tensor([1, -9, 3])),
        r"lengths must be in \[0, 8\], got -9",
    ),
    "lengths on meta": (
        lambda: condition_number(q[0], lengths=torch.ones(3, dtype=torch.int32, device="meta")),
        "lengths and matrices must both be meta tensors or neither, got meta and cpu",
    ),
    "a count of heads that is no count": (lambda: head_report(q, 2.0), "num_heads must divide"),
    "a size that is no number": (
        lambda: gaussian_condition_number(math.nan, 3),
        "tokens and width must be at least 1, got nan and 3",
    ),
    "a size of infinity": (lambda: gaussian_condition_number(math.inf, 3), "got inf and 3"),
    "no heads": (lambda: conditioning_penalty(None), "heads must be a tensor"),
    "a threshold of None": (
        lambda: QKClip(ManyHeadAttention(8, 2, 4), threshold=None),
        "threshold must be above 0 and finite, got None",
    ),
    "a model that is none, clipped": (lambda: QKClip(3), "model must be a torch.nn.Module, got 3"),
    "a model that is none, penalised": (lambda: ConditioningPenalty(3), "model must be a"),
    "a model that is none, monitored": (lambda: KappaMonitor(None), "model must be a"),
    "half a sample": (
        lambda: ConditioningPenalty(ManyHeadAttention(8, 2, 4), samples=1.5),
        "samples must be a whole number from 1, got 1.5",
    ),
    "never a number": (
        lambda: KappaMonitor(ManyHeadAttention(8, 2, 4), every=math.nan),
        "every and samples must be whole numbers of at least 1, got nan and 4",
    ),
    "a path of bytes": (
        lambda: KappaMonitor(ManyHeadAttention(8, 2, 4), path=b"kappa"),
        "path must be a str or a path",
    ),
    "no tensor in a module": (lambda: ManyHeadAttention(8, 2, 4)(None), "x must be a tensor, got"),
    "nothing in a module": (
        lambda: ManyHeadAttention(8, 2, 4)(torch.zeros(2, 0, 8)),
        r"x must be \(B, N, 8\) and not empty, got \(2, 0, 8\)",
    ),
    "no map in a module": (
        lambda: OutlookAttention(8, 2, 4)(torch.zeros(2, 0, 3, 8)),
        r"x must be \(B, Y, X, 8\) and not empty, got \(2, 0, 3, 8\)",
    ),
    "a skip of numbers": (
        lambda: ManyHeadAttention(8, 2, 4)(torch.zeros(2, 3, 8), skip=3.0),
        "skip must be a tensor, got float",
    ),
    "a width of True": (lambda: ManyHeadAttention(True), "dim must be a whole number"),
    "a width that no tensor has": (lambda: ManyHeadAttention(10**30), "dim must be a whole number"),
    "a floor of None": (lambda: EntropyAlarm(floor=None), r"floor must be in \[0, 1\), got None"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_one_line(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as raised:
        call()
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_temperature_of_double_precision_fits_any_projection(dtype):
    narrow, double = (torch.tensor([2.0, 3.0], dtype=d) for d in (torch.float32, torch.float64))
    double.requires_grad_()
    half = qkv.to(dtype)
    for function in (
        cross_covariance_attention,
        lambda *args: cross_covariance_attention_with_stats(*args).out,
    ):
        out = function(half, double)
        (grad,) = torch.autograd.grad(out.sum(), double)
        assert grad.dtype == torch.float64
        assert out.dtype == dtype
        assert torch.equal(out, function(half, narrow))
        assert_within_budget(out, out, function(half.double(), double))


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_the_stable_rank_of_a_matrix_far_from_one_is_that_of_its_multiple(scale):
    a = torch.randn(6, 4, dtype=torch.float64)
    found, wanted = (condition_report(t).stable_rank for t in (a * scale, a))
    torch.testing.assert_close(found, wanted)


def test_an_entropy_that_is_not_finite_is_passed_over():
    alarm = EntropyAlarm()
    row = {"step": 0, "layer": "a", "columns": 9}
    for entropy in (*[2.0] * 10, math.nan, math.inf, None):
        assert alarm.update([row | {"entropy": entropy}]) == []
    assert [a.reason for a in alarm.update([row | {"entropy": 0.1}])] == ["floor"]
