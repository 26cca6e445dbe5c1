"""Operators beside softmax attention on a GPU: the same cases and budget, bfloat16 included."""

import pytest
import torch
from torch import Tensor

import leaner_kernels as ours
from leaner_kernels import condition_number
from leaner_kernels.nn import OutlookAttention
from leaner_kernels.ops.statistics import AttentionStats
from tests.gpu.draws import randn
from tests.operator_cases import (
    CHANNEL,
    CROSS,
    CovarianceTestCase,
    Inputs,
    NystromTestCase,
    OperatorTestCase,
    OutlookTestCase,
    WindowTestCase,
    call,
    check,
    every_case,
    identify,
    leaves_of,
    make_inputs,
    reference_results,
    run_operator,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
REPEATS = 20  # of a test that the same call gives the same bits
# Sizes of the models: XCiT at 224 and 384 pixels, the stages of DaViT, VOLO-D3 and D4 on images of
# 224 and 448 pixels, the Long-Range Arena's rows, lean ones too, and the ends of the range.
MODELS: list[OperatorTestCase] = [
    *(
        CovarianceTestCase(f"{operator} {tokens}·{heads}·{dim}", operator, 2, tokens, heads, dim)
        for operator, tokens, heads, dim in (
            *((CHANNEL, 49, 32, 32), (CHANNEL, 3136, 4, 32), (CHANNEL, 784, 8, 32)),
            *((CHANNEL, 196, 48, 16), (CROSS, 196, 8, 64)),
            *((CROSS, 196, 16, 48), (CROSS, 576, 16, 32)),
        )
    ),
    WindowTestCase("first stage", 2, (8, 8), (7, 7), 4, 32),
    WindowTestCase("third stage", 4, (2, 2), (7, 7), 16, 32),
    WindowTestCase("third stage, lean", 4, (2, 2), (7, 7), 32, 16),
    WindowTestCase("fourth stage", 8, (1, 1), (7, 7), 32, 32),
    WindowTestCase("windows of 8", 2, (3, 2), (8, 8), 6, 30),
    WindowTestCase("windows of 12", 2, (2, 2), (12, 12), 4, 32),
    WindowTestCase("windows of 14", 1, (2, 1), (14, 14), 3, 64),
    OutlookTestCase("D3", 4, (28, 28), 8, 32, (3, 2, 1)),
    OutlookTestCase("D3, lean", 4, (28, 28), 16, 16, (3, 2, 1)),
    OutlookTestCase("D4", 2, (28, 28), 12, 32, (3, 2, 1)),
    OutlookTestCase("D4, lean, large images", 2, (56, 56), 24, 16, (3, 2, 1)),
    OutlookTestCase("head_dim 64", 2, (14, 14), 4, 64, (3, 2, 1)),
    *(
        NystromTestCase(
            *(f"{tokens}, {landmarks} landmarks, {whole_batch}", 2, tokens, 2, dim, landmarks),
            *((tokens, tokens * 2 // 3), 0.1),
            whole_batch=whole_batch,
        )
        for tokens, landmarks, dim in (
            *((1024, 64, 32), (2048, 32, 32), (4096, 128, 32), (1024, 256, 64), (1056, 48, 40)),
        )
        for whole_batch in (False, True)
    ),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*every_case(), *MODELS], ids=identify)
def test_kernels_stay_within_the_error_budget(case: OperatorTestCase, dtype: torch.dtype) -> None:
    found = run_operator(make_inputs(case, dtype, "cuda"))
    assert all(result.is_cuda for result in found.values())
    check(make_inputs(case, dtype), found)


@pytest.mark.parametrize("case", MODELS, ids=identify)
def test_results_and_gradients_are_bitwise_deterministic(case: OperatorTestCase) -> None:
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    first = run_operator(inputs)
    for _ in range(REPEATS):
        torch.testing.assert_close(run_operator(inputs), first, rtol=0, atol=0, equal_nan=True)


SCALE = 32**-0.5
CASES = {
    "cross_covariance": CovarianceTestCase("", CROSS, 4, 100, 4, 32),
    "channel": CovarianceTestCase("", CHANNEL, 4, 100, 4, 32, scale=SCALE),
    "window": WindowTestCase("", 4, (2, 2), (7, 7), 4, 32),
    "outlook": OutlookTestCase("", 4, (14, 14), 4, 32, (3, 2, 1)),
    "nystrom": NystromTestCase("", 4, 96, 4, 32, 12, scale=SCALE),
}
OPERATORS = {name: make_inputs(case, torch.float32) for name, case in CASES.items()}
OPERATORS["outlook"] = OPERATORS["outlook"].scaled(SCALE)
each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


def leaves(operator: Inputs, dtype: torch.dtype, offset: int = 0) -> list[Tensor]:
    """Return random inputs with gradients, each from an element of a larger block on."""
    shapes = [t.shape for t in leaves_of(operator, operator.tensors)]
    flat = (randn(offset + shape.numel(), dtype=dtype) for shape in shapes)
    views = (t[offset:].view(shape) for t, shape in zip(flat, shapes))
    return [t.detach().requires_grad_() for t in views]


def with_stats(operator: Inputs, *tensors: Tensor, sample: Tensor) -> AttentionStats:
    return call(operator, *tensors, suffix="_with_stats", sample=sample)


@each_operator
def test_a_second_call_gives_what_its_own_tensors_say(operator: Inputs) -> None:
    """The plan that the first call leaves is for a kind of call, not for its tensors."""
    first, other = (leaves(operator, torch.float32) for _ in range(2))
    shifted = leaves(operator, torch.float32, offset=1)  # no multiple of 16 bytes
    for inputs in (first, other, shifted, first):
        expected = call(operator, *(t.detach().cpu().double() for t in inputs))
        actual = call(operator, *inputs).detach().cpu().double()
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


def test_a_second_call_has_lengths_of_its_own() -> None:
    operator = OPERATORS["nystrom"]
    tensors = [t.detach() for t in leaves(operator, torch.float32)]
    lengths = torch.tensor([96, 40, 96, 1], dtype=torch.int32)
    for key_lengths in (None, lengths, lengths.flip(0)):
        there = None if key_lengths is None else key_lengths.cuda()
        cpu, gpu = (operator._replace(tensors=(n,)) for n in (key_lengths, there))
        expected = call(cpu, *(t.cpu().double() for t in tensors))
        actual = call(gpu, *tensors).cpu().double()
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_operator
def test_compiles_without_a_graph_break(operator: Inputs, dtype: torch.dtype) -> None:
    tensors = leaves(operator, dtype)
    sample = torch.tensor([1], dtype=torch.int32, device="cuda")

    def run(*x: Tensor) -> Tensor:
        stats = with_stats(operator, *x, sample=sample)
        return stats.out + call(operator, *x) + stats.heads.mean() + stats.entropy.mean()

    compiled = torch.compile(run, fullgraph=True)
    expected, actual = run(*tensors), compiled(*tensors)
    close = {"atol": 0.02, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(actual, expected, **close)
    grads = [torch.autograd.grad(t.sum(), tensors) for t in (expected, actual)]
    torch.testing.assert_close(grads[1], grads[0], **close)


@each_operator
def test_a_captured_graph_may_skip_a_sample(operator: Inputs) -> None:
    """The index lives on the device: a negative one leaves the slot as it was."""
    # A graph would fill its memory with NaN at every replay.
    torch.utils.deterministic.fill_uninitialized_memory = False
    inputs = [t.detach() for t in leaves(operator, torch.bfloat16)]
    sample = torch.tensor([2], dtype=torch.int32, device="cuda")
    expected = with_stats(operator, *inputs, sample=sample).heads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats = with_stats(operator, *inputs, sample=sample)
    graph.replay()
    assert torch.equal(stats.heads, expected)
    stats.heads.fill_(7)
    sample.fill_(-1)
    graph.replay()
    assert (stats.heads == 7).all()


def test_the_capture_of_channels_shows_condition_numbers_that_bfloat16_hides() -> None:
    """Softmax rows that are nearly one another: the heads' small singular values are small."""
    qkv = randn(1, 196, 3, 4, 32, dtype=torch.bfloat16)
    temperature = torch.full((4,), 0.2, device="cuda")
    sample = torch.zeros(1, dtype=torch.int32, device="cuda")
    stats = ours.cross_covariance_attention_with_stats(qkv, temperature, sample=sample)
    assert stats.heads is not None
    exact = ours.cross_covariance_attention(qkv.cpu().double(), temperature.cpu().double())
    wanted = condition_number(exact.flatten(2)).kappa
    assert wanted.item() > 1e5
    found = condition_number(stats.heads).kappa.cpu().double()
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_capture_of_landmarks_shows_condition_numbers_that_half_precision_hides(
    dtype: torch.dtype,
) -> None:
    case = NystromTestCase("kappa", 1, 64, 2, 16, 32, scale=0.014)
    heads = reference_results(make_inputs(case, dtype), torch.float64)["heads"]
    wanted = condition_number(heads).kappa
    assert wanted.min().item() > 1e5
    captured = run_operator(make_inputs(case, dtype, "cuda"))["heads"]
    found = condition_number(captured).kappa.cpu().double()
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0)


def test_no_window_of_outlook_is_unfolded_in_memory() -> None:
    """A training step keeps its inputs and lse, and takes what it returns: K * K values nowhere."""
    value = randn(8, 28, 28, 8, 32, dtype=torch.bfloat16).requires_grad_()
    logits = randn(8, 14, 14, 8, 9, 9, dtype=torch.bfloat16).requires_grad_()
    grad = randn(*value.shape, dtype=torch.bfloat16)
    for _ in range(2):  # the first step compiles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = ours.outlook_attention(value, logits, stride=2)
        kept = torch.autograd.grad(out, (value, logits), grad)
        taken = torch.cuda.max_memory_allocated() - before
        returned = sum(t.nbytes for t in (out, *kept))
        del out, kept
    lse = 4 * logits.numel() // 9
    assert taken <= returned + lse + (1 << 16)


def test_a_module_on_a_gpu_equals_itself_on_the_cpu() -> None:
    module = OutlookAttention(96, 8, 16)
    x = torch.randn(2, 28, 28, 96)
    expected = module(x)
    actual = module.cuda()(x.cuda()).cpu()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_autocast_rounds_the_inputs_of_landmarks_alone() -> None:
    operator = OPERATORS["nystrom"]
    tensors = leaves(operator, torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        found = call(operator, *tensors)
    assert torch.equal(found, call(operator, *(t.bfloat16() for t in tensors)))


@each_operator
def test_what_kernels_cannot_do_is_refused(operator: Inputs) -> None:
    with pytest.raises(ValueError, match=r"one of float32, float16, bfloat16, got torch.float64"):
        call(operator, *leaves(operator, torch.float64))
    with pytest.raises(ValueError, match=r"sample must be \(S,\) int32 on cuda"):
        with_stats(
            operator, *leaves(operator, torch.float32), sample=torch.zeros(1, dtype=torch.int32)
        )
