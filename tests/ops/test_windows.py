"""Window attention: error budget on every backend, truths, statistics, errors, the module."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from leaner_kernels.nn import WindowAttention
from leaner_kernels.ops.attention import attention_qkvpacked, attention_qkvpacked_with_stats
from leaner_kernels.ops.window import window_attention, window_attention_with_stats
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
from tests.operators import (
    WINDOW,
    Inputs,
    amid_nan,
    assert_written_derivatives_are_autograds,
    check,
    diagonal,
    make_inputs,
    peers_of,
    reference_results,
    run,
    run_function,
    run_kernels,
    sample_of,
)

REPEATS = 20  # on a GPU, of a test that the same call gives the same bits


class WindowTestCase(NamedTuple):
    """A map of ``windows`` windows of ``window`` tokens, (rows, columns) each."""

    name: str
    batch: int
    windows: tuple[int, int]
    window: tuple[int, int]
    heads: int
    dim: int

    def make(self, dtype: torch.dtype, device: str) -> Inputs:
        """Return its tensors."""
        size = self.batch, *(n * tokens for n, tokens in zip(self.windows, self.window))
        qkv = torch.randn(*size, 3, self.heads, self.dim)
        qkv = amid_nan(qkv, (0, 1, 2, 0, 0, 5), dtype, device)
        grad = torch.randn(*size, self.heads, self.dim)
        grad = amid_nan(grad, (0, 1, 2, 0, 5), dtype, device)
        numbers = *self.window, self.dim**-0.5
        return Inputs(WINDOW, (qkv,), numbers, grad, sample_of(self.batch, device))


DAVIT = WindowTestCase("DaViT", 2, (1, 2), (7, 7), 3, 32)
FLAT_WINDOWS = WindowTestCase("flat windows", 2, (3, 2), (2, 5), 2, 10)
FULL_TILE = WindowTestCase("a full tile", 1, (1, 2), (8, 8), 2, 24)
MORE_THAN_A_TILE = WindowTestCase("more than a tile", 1, (1, 2), (5, 14), 2, 16)
CASES = (
    WindowTestCase("one of everything", 1, (1, 1), (1, 1), 1, 1),
    DAVIT,
    WindowTestCase("the third stage of the lean DaViT", 1, (2, 1), (7, 7), 5, 16),
    FLAT_WINDOWS,
    WindowTestCase("windows of one column", 1, (1, 3), (17, 1), 1, 48),
    FULL_TILE,
    MORE_THAN_A_TILE,
    WindowTestCase("head_dim 128", 1, (2, 1), (3, 6), 2, 128),
)
# Stages of DaViT, and windows of other models.
GPU_CASES = (
    WindowTestCase("first stage", 2, (8, 8), (7, 7), 4, 32),
    WindowTestCase("third stage", 4, (2, 2), (7, 7), 16, 32),
    WindowTestCase("third stage, lean", 4, (2, 2), (7, 7), 32, 16),
    WindowTestCase("fourth stage", 8, (1, 1), (7, 7), 32, 32),
    WindowTestCase("windows of 8", 2, (3, 2), (8, 8), 6, 30),
    WindowTestCase("windows of 12", 2, (2, 2), (12, 12), 4, 32),
    WindowTestCase("windows of 14", 1, (2, 1), (14, 14), 3, 64),
)
EXECUTED_EACH_COMMIT = {("DaViT", BFLOAT16, capability) for capability in (80, 90, 120)}


# --- The error budget -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "target"),
    [
        *on_cpu(CASES),
        *in_interpreter(CASES),
        *executed(CASES, EXECUTED_EACH_COMMIT),
        *on_gpu(CASES + GPU_CASES),
    ],
)
def test_results_stay_within_the_error_budget(case: WindowTestCase, target: Target) -> None:
    """The output, every gradient, every statistic and the captured heads."""
    results, inputs = run(case, target), make_inputs(case, target.dtype)
    check(inputs, results, *([run_function(inputs)] if target.backend == CPU else []))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_written_out_derivatives_are_autograds(case: WindowTestCase) -> None:
    assert_written_derivatives_are_autograds(case)


@pytest.mark.parametrize(
    ("case", "target"),
    [
        one(DAVIT, Target(INTERPRETER, FLOAT16)),
        one(MORE_THAN_A_TILE, Target(INTERPRETER, FLOAT16)),
        *on_gpu(GPU_CASES, [BFLOAT16]),
    ],
)
def test_the_same_call_gives_the_same_bits(case: WindowTestCase, target: Target) -> None:
    first = run(case, target)
    for _ in range(REPEATS if target.backend == GPU else 1):
        torch.testing.assert_close(run(case, target), first, rtol=0, atol=0, equal_nan=True)


@pytest.mark.backends(INTERPRETER)
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_any_scale_will_do(scale: float) -> None:
    inputs = make_inputs(FLAT_WINDOWS, torch.float32).scaled(scale)
    check(inputs, run_kernels(inputs))


@pytest.mark.backends(INTERPRETER)
@pytest.mark.parametrize("rounding", ["exact", "gpu"], indirect=True)
def test_gradients_cancel_what_all_values_share(rounding: None) -> None:
    """A log-sum-exp of 30 is rounded by 1e-6, and dP - delta must not keep that of a large dP."""
    inputs = make_inputs(WindowTestCase("", 1, (2, 2), (2, 5), 2, 10), torch.float32).scaled(3.0)
    inputs.tensors[0][:, :, :, 2] += 20
    check(inputs, run_kernels(inputs))


@pytest.mark.backends(INTERPRETER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_whose_weight_is_all_on_one_key_has_no_entropy(dtype: torch.dtype) -> None:
    """The compiler makes ``a * b - c`` one operation that rounds once.

    A maximum ``c`` of products that were rounded before is then not what it is subtracted from.
    """
    from tests.interpreter.rounding import contracted

    # No power of two: scores are rounded.
    inputs = make_inputs(WindowTestCase("", 1, (1, 1), (4, 4), 1, 16), dtype).scaled(0.3)
    for part, tokens in enumerate(diagonal(16, dtype)):
        inputs.tensors[0][0, :, :, part, 0] = tokens.view(4, 4, 16)
    with contracted():
        entropy = run_kernels(inputs)["entropy"]
    assert (entropy == 0).all(), entropy


@pytest.mark.parametrize(("case", "target"), in_interpreter([FULL_TILE], half_first=True))
def test_the_capture_sees_what_keys_of_little_weight_add(
    case: WindowTestCase, target: Target
) -> None:
    """One key of nothing takes almost all the weight: the others are below float16's normals."""
    inputs = make_inputs(case, target.dtype).scaled(0.25)
    query, key, value = inputs.tensors[0].unbind(3)
    query[..., 0], key[..., 0] = 4, -1
    key[:, ::8, ::8], value[:, ::8, ::8] = 0, 0
    key[:, ::8, ::8, :, 0] = 10
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs, target.dtype)
    assert 0 < exact["heads"].abs().max() < 0.05
    with target.active():
        heads = run_kernels(inputs)["heads"]
    assert_within_budget(heads, peers["heads"], exact["heads"])


@pytest.mark.backends(INTERPRETER)
def test_autocast_around_the_backward_of_large_windows_rounds_nothing() -> None:
    inputs = make_inputs(WindowTestCase("", 1, (1, 1), (9, 9), 1, 16), torch.float16)
    expected = run_kernels(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = run_kernels(inputs)
    assert torch.equal(found["dqkv"], expected["dqkv"])


# --- Truths that need no second implementation ----------------------------------------------------


def random_map(
    *shape: int, dtype: torch.dtype = torch.float64, requires_grad: bool = False
) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=dtype, requires_grad=requires_grad)


def test_one_window_is_attention_over_the_map() -> None:
    qkv = random_map(2, 4, 6, 3, 3, 8)
    sample = torch.tensor([1], dtype=torch.int32)
    stats = window_attention_with_stats(qkv, (4, 6), sample=sample)
    whole = attention_qkvpacked_with_stats(qkv.flatten(1, 2), sample=sample)
    torch.testing.assert_close(stats.out, whole.out.unflatten(1, (4, 6)))
    torch.testing.assert_close(stats.lse, whole.lse.unflatten(2, (4, 6)))
    for actual, expected in zip(stats[2:], whole[2:], strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("window", [(2, 3), (4, 2), (1, 6)])
def test_every_window_is_a_sequence_of_its_own(window: tuple[int, int]) -> None:
    qkv = random_map(2, 4, 6, 3, 3, 8)
    out = window_attention(qkv, window)
    for y in range(0, 4, window[0]):
        for x in range(0, 6, window[1]):
            inside = slice(None), slice(y, y + window[0]), slice(x, x + window[1])
            expected = attention_qkvpacked(qkv[inside].flatten(1, 2)).unflatten(1, window)
            torch.testing.assert_close(out[inside], expected)


def test_equal_keys_have_the_entropy_of_a_fair_die() -> None:
    qkv = random_map(1, 4, 6, 3, 2, 8)
    qkv[:, :, :, 1] = 0.25
    stats = window_attention_with_stats(qkv, (2, 3))
    torch.testing.assert_close(stats.entropy, torch.full((1, 2), 6.0).log())
    # Four windows of six rows, each of which has a sixth of the probability in every column.
    torch.testing.assert_close(stats.prob_norm, torch.full((1, 2), 2.0))


def test_a_map_of_any_strides_is_read_in_place() -> None:
    qkv = random_map(2, 4, 6, 3, 3, 8)
    expected = window_attention_with_stats(qkv, 2)
    channels_first = qkv.permute(0, 3, 4, 5, 1, 2).contiguous().permute(0, 4, 5, 1, 2, 3)
    for strided in (qkv.transpose(1, 2).contiguous().transpose(1, 2), qkv.repeat(1, 1, 2, 1, 1, 1)):
        found = window_attention_with_stats(strided[:, :, :6], 2)
        for actual, wanted in zip(found[:-1], expected[:-1], strict=True):
            torch.testing.assert_close(actual, wanted)
    with pytest.raises(ValueError, match="must be contiguous along its last axis"):
        window_attention(channels_first, 2)


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "window", "message"),
    [
        ((2, 4, 6, 2, 2, 8), 2, r"qkv must be \(B, Y, X, 3, H, D\), got \(2, 4, 6, 2, 2, 8\)"),
        ((2, 24, 3, 2, 8), 2, r"qkv must be \(B, Y, X, 3, H, D\), got \(2, 24, 3, 2, 8\)"),
        ((2, 4, 6, 3, 2, 129), 2, "head dimension up to 128, got 129"),
        ((2, 0, 6, 3, 2, 8), 2, "windows of 2 x 2 must fill the map, got 0 x 6"),
        ((2, 4, 6, 3, 2, 8), 4, "windows of 4 x 4 must fill the map, got 4 x 6"),
        ((2, 4, 6, 3, 2, 8), (3, 2), "windows of 3 x 2 must fill the map, got 4 x 6"),
        ((2, 4, 6, 3, 2, 8), 0, "whole numbers of at least 1, got 0"),
        ((2, 4, 6, 3, 2, 8), 2.0, r"whole numbers of at least 1, got 2.0"),
        ((2, 4, 6, 3, 2, 8), (2,), r"whole numbers of at least 1, got \(2,\)"),
        ((2, 4, 6, 3, 2, 8), (2, 1.5), r"whole numbers of at least 1, got \(2, 1.5\)"),
    ],
)
def test_wrong_arguments_are_refused(shape: tuple[int, ...], window: object, message: str) -> None:
    for function in (window_attention, window_attention_with_stats):
        with pytest.raises(ValueError, match=message):
            function(torch.zeros(shape), window)


def test_other_wrong_arguments_are_refused() -> None:
    qkv = torch.zeros(2, 4, 6, 3, 2, 8)
    with pytest.raises(ValueError, match="qkv must be a tensor, got int"):
        window_attention(3, 2)
    with pytest.raises(ValueError, match="must be one of float32, float16, bfloat16, float64, got"):
        window_attention(qkv.int(), 2)
    with pytest.raises(ValueError, match="scale must be a finite number, got nan"):
        window_attention(qkv, 2, scale=float("nan"))
    with pytest.raises(ValueError, match="sample must be below 2, got 2"):
        window_attention_with_stats(qkv, 2, sample=torch.tensor([2], dtype=torch.int32))


# --- The module -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(14, 14), (9, 16)], ids=["whole windows", "padded"])
def test_the_module_is_timms(size: tuple[int, int]) -> None:
    """Output and gradients of DaViT's spatial block, whose other layers pass through."""
    from timm.models.davit import SpatialBlock

    torch.manual_seed(0)
    block = SpatialBlock(32, 4, window_size=7).double()
    block.cpe1 = block.cpe2 = torch.nn.Identity()
    torch.nn.init.zeros_(block.mlp.fc2.weight)
    torch.nn.init.zeros_(block.mlp.fc2.bias)
    module = WindowAttention(32, 4, "split", window_size=7, dtype=torch.float64)
    module.load_state_dict(block.attn.state_dict())
    images = torch.randn(2, 32, *size, dtype=torch.float64)
    expected, skip = block(images), images.permute(0, 2, 3, 1)
    actual = (skip + module(block.norm1(skip), skip=skip)).permute(0, 3, 1, 2)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, list(block.attn.parameters()), grad)
    found = torch.autograd.grad(actual, list(module.parameters()), grad)
    torch.testing.assert_close(found, wanted)


def test_the_module_names_its_window() -> None:
    with pytest.raises(ValueError, match="whole numbers of at least 1, got 0"):
        WindowAttention(24, 3, 16, window_size=0)
