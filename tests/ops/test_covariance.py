"""Attention between channels: error budget on every backend, truths, capture, errors, modules."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from leaner_kernels import condition_number
from leaner_kernels.nn import ChannelAttention, CrossCovarianceAttention
from leaner_kernels.ops.covariance import (
    channel_attention,
    channel_attention_with_stats,
    cross_covariance_attention,
    cross_covariance_attention_with_stats,
)
from leaner_kernels.ops.statistics import AttentionStats
from tests.backends import (
    BFLOAT16,
    CPU,
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
from tests.operators import (
    CHANNEL,
    CROSS,
    Inputs,
    amid_nan,
    assert_written_derivatives_are_autograds,
    check,
    diagonal,
    make_inputs,
    reference_results,
    run,
    run_function,
    run_kernels,
    sample_of,
)

REPEATS = 20  # on a GPU, of a test that the same call gives the same bits
OPERATORS = CROSS, CHANNEL
FUNCTIONS = {
    CROSS: (cross_covariance_attention, cross_covariance_attention_with_stats),
    CHANNEL: (channel_attention, channel_attention_with_stats),
}


class CovarianceTestCase(NamedTuple):
    """Sizes as in the kernels; ``eps`` and ``scale`` are those of the operator."""

    name: str
    operator: str
    batch: int
    tokens: int
    heads: int
    dim: int
    eps: float = 1e-12
    scale: float = 0.2
    zero_channels: bool = False

    def make(self, dtype: torch.dtype, device: str) -> Inputs:
        """Return its tensors; the temperature is float32, as models keep it."""
        numbers = torch.randn(self.batch, self.tokens, 3, self.heads, self.dim)
        numbers *= torch.linspace(0.5, 2, self.dim)
        if self.zero_channels:
            numbers[..., ::3] = 0
        qkv = amid_nan(numbers, (0, 2, 0, 1, 5), dtype, device)
        grad = torch.randn(self.batch, self.tokens, self.heads, self.dim).to(device, dtype)
        tensors, param = (qkv,), self.scale
        if self.operator == CROSS:
            temperature = (torch.arange(self.heads, device=device) * 0.75 + 2).float()
            tensors, param = (qkv, temperature), self.eps
        return Inputs(self.operator, tensors, (param,), grad, sample_of(self.batch, device))


CASES = (
    CovarianceTestCase("cross, one of everything", CROSS, 1, 1, 1, 1),
    CovarianceTestCase("cross, XCiT", CROSS, 1, 196, 2, 48),
    CovarianceTestCase("cross, XCiT large, lean", CROSS, 2, 197, 2, 64),
    CovarianceTestCase("cross, head_dim 32", CROSS, 3, 60, 2, 32),
    CovarianceTestCase("cross, head_dim 10", CROSS, 2, 33, 3, 10),
    CovarianceTestCase("cross, fewer tokens than channels", CROSS, 2, 5, 2, 20),
    CovarianceTestCase("cross, channels shorter than eps", CROSS, 2, 70, 2, 16, eps=8.0),
    CovarianceTestCase(
        "cross, channels of zeros", CROSS, 2, 70, 2, 24, eps=1e-3, zero_channels=True
    ),
    CovarianceTestCase("channel, one of everything", CHANNEL, 1, 1, 1, 1),
    CovarianceTestCase("channel, last stage of DaViT", CHANNEL, 2, 49, 3, 32),
    CovarianceTestCase("channel, third stage, lean", CHANNEL, 1, 196, 4, 16, scale=0.25),
    CovarianceTestCase("channel, long", CHANNEL, 1, 784, 1, 32, scale=0.1),
    CovarianceTestCase("channel, first stage of DaViT, lean", CHANNEL, 1, 3136, 1, 16, scale=0.03),
    CovarianceTestCase("channel, head_dim 42", CHANNEL, 2, 65, 2, 42, scale=-0.15),
    CovarianceTestCase("channel, channels of zeros", CHANNEL, 2, 17, 2, 24, zero_channels=True),
)
# They would take the interpreter long.
CPU_CASES = (
    CovarianceTestCase("cross, head_dim 128", CROSS, 1, 150, 1, 128),
    CovarianceTestCase("channel, head_dim 127", CHANNEL, 1, 40, 1, 127),
)
# XCiT at 224 and 384 pixels, the stages of DaViT.
GPU_CASES = tuple(
    CovarianceTestCase(f"{operator} {tokens}·{heads}·{dim}", operator, 2, tokens, heads, dim)
    for operator, tokens, heads, dim in (
        (CHANNEL, 49, 32, 32),
        (CHANNEL, 3136, 4, 32),
        (CHANNEL, 784, 8, 32),
        (CHANNEL, 196, 48, 16),
        (CROSS, 196, 8, 64),
        (CROSS, 196, 16, 48),
        (CROSS, 576, 16, 32),
    )
)
EXECUTED_EACH_COMMIT = {
    ("cross, XCiT", BFLOAT16, 90),
    ("cross, XCiT", BFLOAT16, 120),
    ("channel, last stage of DaViT", BFLOAT16, 80),
}


# --- The error budget -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "target"),
    [
        *on_cpu(CASES),
        *on_cpu(CPU_CASES, [torch.float32]),
        *in_interpreter(CASES),
        *executed(CASES, EXECUTED_EACH_COMMIT),
        *on_gpu(CASES + GPU_CASES),
    ],
)
def test_results_stay_within_the_error_budget(case: CovarianceTestCase, target: Target) -> None:
    """The output, every gradient, every statistic and the captured heads."""
    results, inputs = run(case, target), make_inputs(case, target.dtype)
    check(inputs, results, *([run_function(inputs)] if target.backend == CPU else []))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_written_out_derivatives_are_autograds(case: CovarianceTestCase) -> None:
    assert_written_derivatives_are_autograds(case)


@pytest.mark.parametrize(
    ("case", "target"),
    [
        one(CovarianceTestCase("cross", CROSS, 2, 70, 2, 16), Target(INTERPRETER, FLOAT16)),
        one(CovarianceTestCase("channel", CHANNEL, 2, 70, 2, 16), Target(INTERPRETER, FLOAT16)),
        *on_gpu(GPU_CASES, [BFLOAT16]),
    ],
)
def test_the_same_call_gives_the_same_bits(case: CovarianceTestCase, target: Target) -> None:
    first = run(case, target)
    for _ in range(REPEATS if target.backend == GPU else 1):
        torch.testing.assert_close(run(case, target), first, rtol=0, atol=0, equal_nan=True)


@pytest.mark.backends(INTERPRETER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_whose_weight_is_all_on_one_key_has_no_entropy(dtype: torch.dtype) -> None:
    """The compiler makes ``a * b - c`` one operation that rounds once.

    A maximum ``c`` of products that were rounded before is then not what it is subtracted from.
    """
    from tests.interpreter.rounding import contracted

    # No power of two: scores are rounded.
    inputs = make_inputs(CovarianceTestCase("", CHANNEL, 1, 16, 1, 16), dtype).scaled(0.3)
    qkv = inputs.tensors[0]
    qkv[0, :, 1, 0], qkv[0, :, 2, 0] = diagonal(16, dtype)
    with contracted():
        entropy = run_kernels(inputs)["entropy"]
    assert (entropy == 0).all(), entropy


# --- What half precision hides or cannot hold -----------------------------------------------------


@pytest.mark.backends(INTERPRETER)
def test_the_capture_shows_condition_numbers_that_half_precision_hides() -> None:
    inputs = make_inputs(CovarianceTestCase("kappa", CROSS, 1, 150, 4, 32), torch.float16)
    inputs = inputs._replace(tensors=(inputs.tensors[0], torch.full((4,), 0.1)))
    qkv, temperature = (t.double() for t in inputs.tensors)
    exact = cross_covariance_attention(qkv, temperature).flatten(2)
    wanted = condition_number(exact).kappa
    assert wanted.item() > 1e5
    captured = condition_number(run_kernels(inputs)["heads"]).kappa.double()
    torch.testing.assert_close(captured[-1:], wanted, rtol=0.01, atol=0)
    rounded = condition_number(exact.half().float()).kappa.double()
    assert rounded.item() < wanted.item() / 2


@pytest.mark.backends(GPU)
def test_the_capture_shows_condition_numbers_that_bfloat16_hides() -> None:
    """Softmax rows that are nearly one another: the heads' small singular values are small."""
    qkv = randn(1, 196, 3, 4, 32, dtype=torch.bfloat16)
    temperature = torch.full((4,), 0.2, device="cuda")
    sample = torch.zeros(1, dtype=torch.int32, device="cuda")
    stats = cross_covariance_attention_with_stats(qkv, temperature, sample=sample)
    assert stats.heads is not None
    exact = cross_covariance_attention(qkv.cpu().double(), temperature.cpu().double())
    wanted = condition_number(exact.flatten(2)).kappa
    assert wanted.item() > 1e5
    captured = condition_number(stats.heads).kappa.cpu().double()
    torch.testing.assert_close(captured, wanted, rtol=0.01, atol=0)


@pytest.mark.backends(INTERPRETER)
@pytest.mark.parametrize(
    ("operator", "q", "k", "v", "grad"),
    [
        (CROSS, 2.0**11, 2.0**-12, 2.0**9, 1.0),
        (CROSS, 2.0**-14, 1.0, 2.0**-9, 2.0**-12),
        (CHANNEL, 2.0**11, 1.0, 1.0, 2.0**6),
    ],
    ids=["cross, past 65504", "cross, under 6e-8", "channel, past 65504"],
)
def test_what_the_scores_pass_on_may_be_outside_half_precision(
    operator: str, q: float, k: float, v: float, grad: float
) -> None:
    """Inputs and gradients are inside it, and so must be what is between them."""
    case = CovarianceTestCase("far", operator, 1, 196, 1, 16, scale=2e-3)
    inputs = make_inputs(case, torch.float16)
    factors = torch.tensor([q, k, v], dtype=torch.float16)[:, None, None]
    qkv, *others = inputs.tensors
    inputs = inputs._replace(tensors=(qkv * factors, *others), grad=inputs.grad * grad)
    exact = reference_results(inputs, torch.float64)
    largest = {name: exact[name].abs().max() for name in ("dq", "dk", "dv")}
    held = [name for name, size in largest.items() if 2**-13 < size < 65504]
    assert len(held) >= 2
    results = run_kernels(inputs)
    for name in held:
        error = (results[name].double() - exact[name]).abs().max()
        assert error <= 2**-9 * largest[name], name


# --- Truths that need no second implementation ----------------------------------------------------


def tensors(
    operator: str, *shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False
) -> list[Tensor]:
    """Return qkv (B, N, 3, H, D) and what else the operator takes."""
    torch.manual_seed(0)
    found = [torch.randn(shape, dtype=dtype)]
    if operator == CROSS:
        found.append(torch.linspace(0.5, 3, shape[3], dtype=dtype)[:, None, None])
    return [t.requires_grad_(requires_grad) for t in found]


def plain(operator: str) -> Callable[..., Tensor]:
    return FUNCTIONS[operator][0]


def with_stats(operator: str) -> Callable[..., AttentionStats]:
    return FUNCTIONS[operator][1]


@pytest.mark.parametrize("operator", OPERATORS)
def test_values_that_are_one_constant_pass_through(operator: str) -> None:
    qkv, *rest = tensors(operator, 2, 17, 3, 4, 6)
    qkv[:, :, 2 if operator == CROSS else 0] = 3.5
    for out in (plain(operator)(qkv, *rest), with_stats(operator)(qkv, *rest).out):
        torch.testing.assert_close(out, torch.full_like(out, 3.5))


@pytest.mark.parametrize("operator", OPERATORS)
def test_permuted_tokens_permute_the_output_and_no_statistic(operator: str) -> None:
    qkv, *rest = tensors(operator, 2, 17, 3, 4, 6, dtype=torch.float64)
    order = torch.randperm(17)
    one, other = (with_stats(operator)(x, *rest) for x in (qkv, qkv[:, order]))
    torch.testing.assert_close(other.out, one.out[:, order])
    for first, second in zip(one[1:-1], other[1:-1]):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("operator", OPERATORS)
def test_equal_scores_have_the_entropy_of_a_fair_die(operator: str) -> None:
    qkv, *rest = tensors(operator, 2, 17, 3, 4, 6)
    cols = 1 if operator == CROSS else 2
    qkv[:, :, cols] = qkv[:, :, cols, :, :1].clone()
    stats = with_stats(operator)(qkv, *rest)
    torch.testing.assert_close(stats.entropy, torch.full((2, 4), 6.0).log())
    torch.testing.assert_close(stats.prob_norm, torch.ones(2, 4))


def test_the_smallest_eps_divides_channels_of_zeros() -> None:
    qkv, temperature = tensors(CROSS, 1, 5, 3, 1, 4, requires_grad=True)
    with torch.no_grad():
        qkv[:, :, :2, :, 0] = 0
    out = cross_covariance_attention(qkv, temperature, eps=1e-15)
    grads = torch.autograd.grad(out.sum(), (qkv, temperature))
    assert all(t.isfinite().all() for t in (out, *grads))


# --- The modules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPERATORS)
def test_modules_are_timms(kind: str) -> None:
    """Its parameters load unchanged; output and gradients are within the budget."""
    davit, xcit = pytest.importorskip("timm.models.davit"), pytest.importorskip("timm.models.xcit")
    torch.manual_seed(0)
    if kind == CROSS:
        theirs, ours = xcit.XCA(24, 4, qkv_bias=True), CrossCovarianceAttention(24, 4, "split")
        torch.nn.init.uniform_(theirs.temperature, 0.5, 2)
    else:
        theirs, ours = davit.ChannelAttention(24, 4), ChannelAttention(24, 4, 6, qkv_bias=False)
    ours.load_state_dict(theirs.state_dict())
    x, grad = torch.randn(2, 30, 24), torch.randn(2, 30, 24)

    def run(module: torch.nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        module.to(dtype)
        out = module(x.to(dtype))
        weights = dict(module.named_parameters())
        grads = torch.autograd.grad(out, list(weights.values()), grad.to(dtype))
        return {"out": out.detach(), **dict(zip(weights, grads, strict=True))}

    peers, exact = run(theirs, torch.float32), run(theirs, torch.float64)
    for samples in (0, 1):
        ours.capture_samples = samples
        for name, actual in run(ours, torch.float32).items():
            assert_within_budget(actual, peers[name], exact[name])


# --- What is refused ------------------------------------------------------------------------------


X, T = torch.randn(2, 6, 3, 4, 8), torch.ones(4)
INT = torch.int32
BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "four axes": (
        lambda: channel_attention(X[0]),
        r"qkv must be \(B, N, 3, H, D\), got \(6, 3, 4, 8\)",
    ),
    "head_dim 129": (
        lambda: channel_attention(torch.randn(1, 2, 3, 1, 129)),
        "up to 128, got 129",
    ),
    "scale of nan": (
        lambda: channel_attention(X, scale=float("nan")),
        "scale must be a finite number, got nan",
    ),
    "no temperature": (
        lambda: cross_covariance_attention(X, 1.0),
        "temperature must be a tensor, got float",
    ),
    "temperatures of other heads": (
        lambda: cross_covariance_attention(X, T[:3]),
        r"temperature must be \(4,\) or \(4, 1, 1\), got \(3,\)",
    ),
    "temperatures of other heads, with three axes": (
        lambda: cross_covariance_attention(X, T[:3, None, None]),
        r"temperature must be \(4,\) or \(4, 1, 1\), got \(3, 1, 1\)",
    ),
    "temperatures of integers": (
        lambda: cross_covariance_attention(X, T.int()),
        "temperature must be floating point on cpu, got torch.int32 on cpu",
    ),
    "temperature elsewhere": (
        lambda: cross_covariance_attention(X, T.to("meta")),
        "temperature must be floating point on cpu, got torch.float32 on meta",
    ),
    "eps of zero": (
        lambda: cross_covariance_attention(X, T, eps=0),
        "eps must be a number of at least 1e-15, got 0",
    ),
    "sample past the batch": (
        lambda: channel_attention_with_stats(X, sample=torch.tensor([2], dtype=INT)),
        "sample must be below 2, got 2",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_refused_in_one_line(name: str) -> None:
    call, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
