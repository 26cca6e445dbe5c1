"""Registration, empty batches and launches of every operator other than softmax attention."""

from functools import partial

import pytest
import torch
from torch import Tensor

from leaner_kernels.ops.statistics import AttentionStats
from tests import registration
from tests.backends import GPU
from tests.gpu.draws import randn
from tests.operators import (
    CHANNEL,
    CROSS,
    Case,
    Inputs,
    call,
    leaves_of,
    make_inputs,
)
from tests.ops.test_covariance import CovarianceTestCase
from tests.ops.test_empty import shapes_of
from tests.ops.test_nystrom import NystromTestCase
from tests.ops.test_outlook import OutlookTestCase
from tests.ops.test_windows import WindowTestCase

# Small calls, for PyTorch's own checks.
REGISTERED = (
    CovarianceTestCase("cross, fewer tokens than channels", CROSS, 2, 5, 2, 20),
    CovarianceTestCase("channel, channels of zeros", CHANNEL, 2, 17, 2, 24, zero_channels=True),
    WindowTestCase("window, flat windows", 2, (3, 2), (2, 5), 2, 10),
    OutlookTestCase("outlook, windows at every pixel", 1, (5, 4), 1, 12, (3, 1, 1)),
)
WHOLE_BATCH = NystromTestCase(
    "nystrom, whole batch, padded", 2, 36, 1, 12, 12, (15, 35), iterations=1, whole_batch=True
)


def small(case: Case) -> Inputs:
    """Return contiguous inputs that have gradients, and a sample whose slots are all written."""
    inputs = make_inputs(case, torch.float32)
    sample = torch.tensor([len(inputs.grad) - 1, 0], dtype=torch.int32)
    tensors = tuple(t if t is None else t.contiguous() for t in inputs.tensors)
    for leaf in leaves_of(inputs, tensors):
        leaf.nan_to_num_().requires_grad_()
    return inputs._replace(tensors=tensors, sample=sample)


def samples() -> registration.Samples:
    found: registration.Samples = {}
    for inputs in map(small, REGISTERED):
        name, tensors, numbers = inputs.operator, inputs.tensors, inputs.numbers
        plain, with_stats, backward = (
            getattr(torch.ops.leaner_kernels, name + suffix).default
            for suffix in ("", "_with_stats", "_backward")
        )
        saved = *(t if t is None else t.detach() for t in tensors), plain(*tensors, *numbers)[1]
        saved = *saved[:-1], saved[-1].detach()
        found |= {
            name: (plain, (*tensors, *numbers)),
            f"{name}_with_stats": (with_stats, (*tensors, inputs.sample, *numbers)),
            f"{name}_with_stats, no sample": (with_stats, (*tensors, None, *numbers)),
            f"{name}_backward": (backward, (inputs.grad, *saved, *numbers)),
        }
    return found


test_opcheck, test_fake_equals_real = registration.tests_of(samples())


@pytest.mark.parametrize("case", [*REGISTERED, WHOLE_BATCH], ids=lambda case: case.name)
def test_autocast_narrows_what_a_function_takes_and_rounds_nothing_in_between(
    case: Case,
) -> None:
    """Temperatures stay as they are."""
    inputs = small(case)
    leaves = leaves_of(inputs, inputs.tensors)
    halves = [t.bfloat16() if t.dim() > 1 else t for t in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        out = call(inputs, *leaves)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, call(inputs, *halves))


EMPTY = (
    CovarianceTestCase("channel, no batch", CHANNEL, 0, 5, 2, 8),
    CovarianceTestCase("channel, no tokens", CHANNEL, 2, 0, 2, 8),
    CovarianceTestCase("channel, no heads", CHANNEL, 2, 5, 0, 8),
    CovarianceTestCase("cross, no batch", CROSS, 0, 5, 2, 8),
    CovarianceTestCase("cross, no heads", CROSS, 2, 5, 0, 8),
    WindowTestCase("window, no batch", 0, (2, 3), (2, 2), 2, 8),
    WindowTestCase("window, no heads", 2, (2, 3), (2, 2), 0, 8),
    OutlookTestCase("outlook, no batch", 0, (4, 5), 2, 8, (3, 1, 1)),
    OutlookTestCase("outlook, no heads", 2, (4, 5), 0, 8, (3, 1, 1)),
    *(
        NystromTestCase(f"nystrom, {what}, {whole}", *sizes, 8, 4, whole_batch=whole)
        for whole in (False, True)
        for what, sizes in (("no batch", (0, 8, 2)), ("no heads", (2, 8, 0)))
    ),
)


@pytest.mark.parametrize("case", EMPTY, ids=lambda case: case.name)
def test_an_empty_batch_has_empty_results(case: Case) -> None:
    inputs = make_inputs(case, torch.float32)
    tensors = [t.requires_grad_() for t in leaves_of(inputs, inputs.tensors)]
    (out,) = shapes_of(partial(call, inputs), tensors)
    assert shapes_of(partial(call, inputs, suffix="_with_stats"), tensors)[0] == out


# --- On a GPU: launches that are repeated, compiled and captured ----------------------------------


SCALE = 32**-0.5
CALLS = {
    "cross_covariance": CovarianceTestCase("", CROSS, 4, 100, 4, 32),
    "channel": CovarianceTestCase("", CHANNEL, 4, 100, 4, 32, scale=SCALE),
    "window": WindowTestCase("", 4, (2, 2), (7, 7), 4, 32),
    "outlook": OutlookTestCase("", 4, (14, 14), 4, 32, (3, 2, 1)),
    "nystrom": NystromTestCase("", 4, 96, 4, 32, 12, scale=SCALE),
}
OPERATORS = {name: make_inputs(case, torch.float32) for name, case in CALLS.items()}
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


@pytest.mark.backends(GPU)
@each_operator
def test_a_second_call_gives_what_its_own_tensors_say(operator: Inputs) -> None:
    """The plan that the first call leaves is for a kind of call, not for its tensors."""
    first, other = (leaves(operator, torch.float32) for _ in range(2))
    shifted = leaves(operator, torch.float32, offset=1)  # no multiple of 16 bytes
    for inputs in (first, other, shifted, first):
        expected = call(operator, *(t.detach().cpu().double() for t in inputs))
        actual = call(operator, *inputs).detach().cpu().double()
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.backends(GPU)
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


@pytest.mark.backends(GPU)
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


@pytest.mark.backends(GPU)
@each_operator
def test_what_kernels_cannot_do_is_refused(operator: Inputs) -> None:
    with pytest.raises(ValueError, match=r"one of float32, float16, bfloat16, got torch.float64"):
        call(operator, *leaves(operator, torch.float64))
    with pytest.raises(ValueError, match=r"sample must be \(S,\) int32 on cuda"):
        with_stats(
            operator, *leaves(operator, torch.float32), sample=torch.zeros(1, dtype=torch.int32)
        )
