"""Outlook attention: error budget on every backend, truths, statistics, errors, the module."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leaner_kernels.nn import OutlookAttention
from leaner_kernels.ops.outlook import (
    OutlookCall,
    outlook_attention,
    outlook_attention_with_stats,
    reference,
)
from leaner_kernels.ops.route import Results
from tests.backends import (
    BFLOAT16,
    CPU,
    FLOAT16,
    FLOAT32,
    GPU,
    INTERPRETER,
    Target,
    executed,
    on_cpu,
    on_gpu,
    one,
)
from tests.gpu.draws import randn
from tests.operators import (
    OUTLOOK,
    STATISTICS,
    Inputs,
    amid_nan,
    assert_written_derivatives_are_autograds,
    check,
    make_inputs,
    reference_results,
    run,
    run_function,
    run_kernels,
    sample_of,
)

REPEATS = 20  # on a GPU, of a test that the same call gives the same bits


class OutlookTestCase(NamedTuple):
    """A map of ``size`` pixels, and the kernel size, stride and padding of its windows."""

    name: str
    batch: int
    size: tuple[int, int]
    heads: int
    dim: int
    window: tuple[int, int, int]

    def make(self, dtype: torch.dtype, device: str) -> Inputs:
        """Return its tensors; strides are multiples of 16, as of most models, which sets tiles."""
        shape = self.batch, *self.size, self.heads, self.dim
        count = [reference.num_windows(size, self.window) for size in self.size]
        places = self.window[0] ** 2
        value, logits, grad = (
            amid_nan(t, (0, 1, 2, *[0] * (t.dim() - 4), 16 + -t.shape[-1] % 16), dtype, device)
            for t in (
                torch.randn(shape),
                torch.randn(self.batch, *count, self.heads, places, places),
                torch.randn(shape),
            )
        )
        # Larger than the default, so that a softmax is not almost uniform.
        numbers = *self.window, 1.5
        return Inputs(OUTLOOK, (value, logits), numbers, grad, sample_of(self.batch, device))


VOLO = OutlookTestCase("VOLO", 2, (4, 6), 2, 32, (3, 2, 1))
MORE_THAN_A_TILE = OutlookTestCase("more than a tile, lean", 1, (16, 18), 1, 16, (3, 2, 1))
EVERY_PIXEL = OutlookTestCase("windows at every pixel", 1, (5, 4), 1, 12, (3, 1, 1))
UNHELD_PIXELS = OutlookTestCase("pixels that no window holds", 1, (6, 8), 1, 4, (3, 2, 0))
CASES = (
    OutlookTestCase("one of everything", 1, (1, 1), 1, 1, (1, 1, 0)),
    VOLO,
    MORE_THAN_A_TILE,
    OutlookTestCase("an odd map", 1, (7, 5), 1, 10, (3, 2, 1)),
    EVERY_PIXEL,
    UNHELD_PIXELS,
    OutlookTestCase("stride 3 of 4, padding 2", 1, (5, 8), 1, 6, (4, 3, 2)),
    OutlookTestCase("kernel size 5", 1, (5, 6), 1, 8, (5, 2, 2)),
    OutlookTestCase("kernel size 2, windows at every pixel", 1, (4, 5), 1, 8, (2, 1, 0)),
    OutlookTestCase("head_dim 128", 1, (4, 3), 1, 128, (3, 2, 1)),
)
# VOLO-D3 and D4 on images of 224 and 448 pixels.
GPU_CASES = (
    OutlookTestCase("D3", 4, (28, 28), 8, 32, (3, 2, 1)),
    OutlookTestCase("D3, lean", 4, (28, 28), 16, 16, (3, 2, 1)),
    OutlookTestCase("D4", 2, (28, 28), 12, 32, (3, 2, 1)),
    OutlookTestCase("D4, lean, large images", 2, (56, 56), 24, 16, (3, 2, 1)),
    OutlookTestCase("head_dim 64", 2, (14, 14), 4, 64, (3, 2, 1)),
)
# Nothing is rounded between inputs and results: a dtype of each case, and all of a small one.
ARITHMETIC = {"an odd map": FLOAT32, "kernel size 5": BFLOAT16}
IN_INTERPRETER = [
    *(one(c, Target(INTERPRETER, ARITHMETIC.get(c.name, FLOAT16))) for c in CASES),
    one(VOLO, Target(INTERPRETER, FLOAT16, "gpu")),
    one(VOLO, Target(INTERPRETER, BFLOAT16, "gpu")),
    one(VOLO, Target(INTERPRETER, BFLOAT16)),
    one(VOLO, Target(INTERPRETER, FLOAT32)),
]
EXECUTED_EACH_COMMIT = {
    ("VOLO", BFLOAT16, 80),
    ("VOLO", FLOAT16, 90),
    ("VOLO", BFLOAT16, 120),
}


# --- The error budget -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "target"),
    [
        *on_cpu(CASES),
        *IN_INTERPRETER,
        *executed(CASES, EXECUTED_EACH_COMMIT),
        *on_gpu(CASES + GPU_CASES),
    ],
)
def test_results_stay_within_the_error_budget(case: OutlookTestCase, target: Target) -> None:
    """The output, every gradient, every statistic and the captured heads."""
    results, inputs = run(case, target), make_inputs(case, target.dtype)
    check(inputs, results, *([run_function(inputs)] if target.backend == CPU else []))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_written_out_derivatives_are_autograds(case: OutlookTestCase) -> None:
    assert_written_derivatives_are_autograds(case)


@pytest.mark.parametrize(
    ("case", "target"),
    [one(UNHELD_PIXELS, Target(INTERPRETER, FLOAT16)), *on_gpu(GPU_CASES, [BFLOAT16])],
)
def test_the_same_call_gives_the_same_bits(case: OutlookTestCase, target: Target) -> None:
    first = run(case, target)
    for _ in range(REPEATS if target.backend == GPU else 1):
        torch.testing.assert_close(run(case, target), first, rtol=0, atol=0, equal_nan=True)


@pytest.mark.backends(INTERPRETER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [1, 32])
def test_a_row_whose_weight_is_all_on_one_key_has_no_entropy(dim: int, dtype: torch.dtype) -> None:
    """The compiler makes ``a * b - c`` one operation that rounds once.

    A maximum ``c`` of products that were rounded before is then not what it is subtracted from.
    """
    from tests.interpreter.rounding import contracted

    # Windows of one pixel. The scale is no power of two: scores are rounded.
    case = OutlookTestCase("one pixel", 1, (4, 4), 2, dim, (1, 1, 0))
    with contracted():
        entropy = run_kernels(make_inputs(case, dtype).scaled(0.3))["entropy"]
    assert (entropy == 0).all(), entropy


@pytest.mark.backends(INTERPRETER)
@pytest.mark.parametrize("case", [VOLO, EVERY_PIXEL], ids=lambda case: case.name)
def test_a_place_that_is_never_looked_at_costs_no_statistic(case: OutlookTestCase) -> None:
    inputs = make_inputs(case, torch.float16)
    inputs.tensors[1][..., 1:2] = float("-inf")
    exact, results = reference_results(inputs, torch.float64), run_kernels(inputs)
    for name in STATISTICS:
        torch.testing.assert_close(results[name].double(), exact[name], rtol=1e-3, atol=0)


@pytest.mark.backends(INTERPRETER)
def test_output_without_statistics_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs then own a tile each, and not a whole head."""
    from leaner_kernels.ops._launch_cache import Launch
    from leaner_kernels.ops.outlook import kernels

    grids, start = [], Launch.start

    def noted(self: Launch) -> None:
        grids.append(self.grid)
        start(self)

    monkeypatch.setattr(Launch, "start", noted)
    inputs = make_inputs(MORE_THAN_A_TILE, torch.float16)
    value, logits = inputs.tensors
    found = []
    for stats in (torch.empty(len(STATISTICS), 1, 1), None):
        out = value.new_empty(value.shape)
        lse = torch.empty(1, 1, *logits.shape[1:3], logits.shape[-1])
        call = OutlookCall(*inputs.tensors, *inputs.numbers)
        kernels.prepare_forward(call, Results(out, lse=lse, stats=stats)).start()
        found.append((out, lse))
    expected, actual = found
    (with_stats,), (plain,) = grids
    assert with_stats == 1
    assert plain > 1
    for a, b in zip(actual, expected):
        assert torch.equal(a, b)


@pytest.mark.backends(GPU)
def test_no_window_is_unfolded_in_memory() -> None:
    """A training step keeps its inputs and lse, and takes what it returns: K * K values nowhere."""
    value = randn(8, 28, 28, 8, 32, dtype=torch.bfloat16).requires_grad_()
    logits = randn(8, 14, 14, 8, 9, 9, dtype=torch.bfloat16).requires_grad_()
    grad = randn(*value.shape, dtype=torch.bfloat16)
    for _ in range(2):  # the first step compiles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = outlook_attention(value, logits, stride=2)
        kept = torch.autograd.grad(out, (value, logits), grad)
        taken = torch.cuda.max_memory_allocated() - before
        returned = sum(t.nbytes for t in (out, *kept))
        del out, kept
    lse = 4 * logits.numel() // 9
    assert taken <= returned + lse + (1 << 16)


# --- Truths that need no second implementation ----------------------------------------------------


WINDOWS = [(3, 2, 1), (3, 1, 1), (3, 2, 0), (5, 2, 2), (5, 1, 0)]


def out_with_stats(*args: Tensor, **params: Any) -> Tensor:
    return outlook_attention_with_stats(*args, **params).out


FUNCTIONS = {"plain": outlook_attention, "stats": out_with_stats}


def tensors(
    size: tuple[int, int] = (7, 6),
    window: tuple[int, int, int] = (3, 2, 1),
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    kernel_size, stride, padding = window
    count = [(n + 2 * padding - kernel_size) // stride + 1 for n in size]
    value = torch.randn(2, *size, 3, 4, dtype=dtype, requires_grad=requires_grad)
    shape = 2, *count, 3, kernel_size**2, kernel_size**2
    return value, torch.randn(shape, dtype=dtype, requires_grad=requires_grad)


def named(window: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("kernel_size", "stride", "padding"), window))


@pytest.mark.parametrize("window", WINDOWS)
def test_it_is_unfold_product_and_fold(window: tuple[int, int, int]) -> None:
    """As VOLO has it, in loops over windows and places."""
    value, logits = tensors(window=window)
    kernel_size, stride, padding = window
    p = torch.softmax(4**-0.5 * logits, dim=-1)
    padded = F.pad(value, (0, 0, 0, 0, padding, padding, padding, padding))
    expected = torch.zeros_like(padded)
    for i in range(logits.shape[1]):
        for j in range(logits.shape[2]):
            y, x = i * stride, j * stride
            patch = padded[:, y : y + kernel_size, x : x + kernel_size].flatten(1, 2)
            mixed = torch.einsum("bhac,bchd->bahd", p[:, i, j], patch)
            mixed = mixed.unflatten(1, (kernel_size, kernel_size))
            expected[:, y : y + kernel_size, x : x + kernel_size] += mixed
    rows, cols = value.shape[1:3]
    expected = expected[:, padding : padding + rows, padding : padding + cols]
    torch.testing.assert_close(outlook_attention(value, logits, **named(window)), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_equal_logits_are_a_box_filter(function: str) -> None:
    value, logits = tensors(window=(3, 1, 1))
    out = FUNCTIONS[function](value, torch.zeros_like(logits))
    # Each window spreads its mean over its pixels: two box filters, one after the other.
    box = value.permute(0, 3, 4, 1, 2).flatten(1, 2)
    for factor in (1, 9):
        box = factor * F.avg_pool2d(box, 3, stride=1, padding=1)
    expected = box.unflatten(1, (3, 4)).permute(0, 3, 4, 1, 2)
    torch.testing.assert_close(out, expected)


def test_equal_logits_have_the_entropy_of_a_fair_die() -> None:
    value, logits = tensors()
    stats = outlook_attention_with_stats(value, torch.full_like(logits, 2.0), stride=2)
    rows = logits[0, :, :, 0, :, 0].numel()
    torch.testing.assert_close(stats.entropy, torch.full((2, 3), 9.0).log())
    torch.testing.assert_close(stats.prob_norm, torch.full((2, 3), (rows / 9) ** 0.5))
    torch.testing.assert_close(stats.max_logit, torch.ones(2, 3))
    torch.testing.assert_close(stats.lse, (1 + torch.tensor(9.0).log()).expand(stats.lse.shape))


def test_a_captured_map_is_the_output_in_rows() -> None:
    value, logits = tensors()
    sample = torch.tensor([1, 0], dtype=torch.int32)
    stats = outlook_attention_with_stats(value, logits, stride=2, sample=sample)
    assert stats.heads.shape == (2, 42, 12)
    torch.testing.assert_close(stats.heads, stats.out.flip(0).reshape(2, 42, 12).float())
    torch.testing.assert_close(stats.out, outlook_attention(value, logits, stride=2))
    assert outlook_attention_with_stats(value, logits, stride=2).heads is None
    assert not any(statistic.requires_grad for statistic in stats[1:])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradcheck(function: str, window: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    size = 5, 6
    count = [(n + 2 * window[2] - window[0]) // window[1] + 1 for n in size]
    value = torch.randn(1, *size, 2, 2, dtype=torch.float64, requires_grad=True)
    places = window[0] ** 2
    logits = torch.randn(1, *count, 2, places, places, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: FUNCTIONS[function](*x, **named(window), scale=0.7),
        (value, logits),
        fast_mode=True,
    )


def test_layouts_other_than_contiguous_give_the_same() -> None:
    value, logits = tensors(requires_grad=True)
    out = outlook_attention_with_stats(value, logits, stride=2).out
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (value, logits), grad)
    # Heads before the map, as another projection would leave them; the gradient of a sum has none.
    moved = value.detach().permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    wide = torch.cat([logits.detach(), logits.detach()], dim=-1)[..., :9]
    assert not moved.is_contiguous()
    assert not wide.is_contiguous()
    leaves = moved.requires_grad_(), wide.requires_grad_()
    found = outlook_attention_with_stats(*leaves, stride=2).out
    assert found.is_contiguous()
    torch.testing.assert_close(found, out)
    strided = grad.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    for actual, wanted in zip(torch.autograd.grad(found, leaves, strided), expected):
        torch.testing.assert_close(actual, wanted)


# --- The module -----------------------------------------------------------------------------------


@pytest.mark.backends(GPU)
def test_a_module_on_a_gpu_equals_itself_on_the_cpu() -> None:
    module = OutlookAttention(96, 8, 16)
    x = torch.randn(2, 28, 28, 96)
    expected = module(x)
    actual = module.cuda()(x.cuda()).cpu()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [(3, 2, 1), (3, 1, 1), (5, 2, 2)])
def test_module_equals_timms(window: tuple[int, int, int]) -> None:
    volo = pytest.importorskip("timm.models.volo", reason="needs timm")
    torch.manual_seed(0)
    theirs = volo.OutlookAttention(24, 3, **named(window), qkv_bias=True).double()
    ours = OutlookAttention(24, 3, "split", **named(window), qkv_bias=True, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 7, 10, 24, dtype=torch.float64, requires_grad=True)
    expected, actual = theirs(x), ours(x)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    leaves = [(x, *module.parameters()) for module in (theirs, ours)]
    wanted, found = (
        torch.autograd.grad(out, wrt, grad) for out, wrt in zip((expected, actual), leaves)
    )
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b)


# --- What is refused ------------------------------------------------------------------------------


VALUE, LOGITS = tensors(dtype=torch.float32)
INT = torch.int32
FAR = torch.empty_strided((1, 2, 1, 1, 1), (1, 1 << 31, 1, 1, 1), device="meta")
FAR_LOGITS = torch.empty(1, 2, 1, 1, 1, 1, device="meta")
BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "value of four axes": (
        lambda: outlook_attention(VALUE[0], LOGITS, stride=2),
        r"value must be \(B, Y, X, H, D\), got \(7, 6, 3, 4\)",
    ),
    "logits of another stride": (
        lambda: outlook_attention(VALUE, LOGITS, stride=1),
        r"logits must be .* = \(2, 7, 6, 3, 9, 9\), got \(2, 4, 3, 3, 9, 9\)",
    ),
    "dtypes differ": (
        lambda: outlook_attention(VALUE, LOGITS.half(), stride=2),
        "logits must be torch.float32 on cpu as value is, got torch.float16 on cpu",
    ),
    "no pixels": (
        lambda: outlook_attention(VALUE[:, :0], LOGITS, stride=2),
        "a map of 0 x 6 contains no window",
    ),
    "last axis of logits strided": (
        lambda: outlook_attention(VALUE, LOGITS.mT, stride=2),
        "logits must be contiguous along its last axis",
    ),
    "a batch entry that is too far apart": (
        lambda: outlook_attention(FAR, FAR_LOGITS, kernel_size=1, padding=0),
        "value must have each batch entry within 2147483648 elements, got 2147483649",
    ),
    "an expanded map": (
        lambda: outlook_attention(
            FAR[:, :1].expand(1, 1 << 16, 1 << 15, 2, 1),
            FAR_LOGITS[:, :1].expand(1, 1 << 16, 1 << 15, 2, 1, 1),
            kernel_size=1,
            padding=0,
        ),
        "value must have each batch entry within 2147483648 elements, got 4294967296",
    ),
    "a map smaller than a window": (
        lambda: outlook_attention(VALUE[:, :1], LOGITS, kernel_size=5, padding=1),
        "a map of 1 x 6 contains no window: kernel_size=5, padding=1",
    ),
    "kernel size 8": (
        lambda: outlook_attention(VALUE, LOGITS, kernel_size=8),
        r"kernel_size must be a whole number in \[1, 7\], got 8",
    ),
    "stride of a half": (
        lambda: outlook_attention(VALUE, LOGITS, stride=0.5),
        r"stride must be a whole number in \[1, 4\], got 0.5",
    ),
    "stride over the kernel size": (
        lambda: outlook_attention(VALUE, LOGITS, stride=4),
        "stride <= kernel_size and padding < kernel_size, got kernel_size=3, stride=4, padding=1",
    ),
    "negative padding": (
        lambda: OutlookAttention(8, 2, 4, padding=-1),
        r"padding must be a whole number in \[0, 6\], got -1",
    ),
    "sample past the batch": (
        lambda: outlook_attention_with_stats(
            VALUE, LOGITS, stride=2, sample=torch.tensor([2], dtype=INT)
        ),
        "sample must be below 2, got 2",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_refused_in_one_line(name: str) -> None:
    call, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
