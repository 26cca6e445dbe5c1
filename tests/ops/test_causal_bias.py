"""PyTorch's CausalBias as a mask: a tensor that means its variant, and whose memory means nothing.

Wherever a mask is taken, and under every name that attention is called by.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import leaner_kernels as lk
from leaner_kernels.adapters import pytorch

SDPA = F.scaled_dot_product_attention
SIZES = (5, 5), (5, 9), (9, 5)
VARIANTS = {"upper left": causal_upper_left, "lower right": causal_lower_right}


def bias(variant: str, rows: int, cols: int) -> Tensor:
    """Return the bias, with memory that spoils whatever reads it."""
    made = VARIANTS[variant](rows, cols)
    with torch._C.DisableTorchFunctionSubclass():
        made.fill_(torch.nan)
    return made


def seen(variant: str, rows: int, cols: int) -> Tensor:
    """Return what it means: (rows, cols), True is seen."""
    past = cols - rows if variant == "lower right" else 0
    return torch.arange(cols) <= torch.arange(rows)[:, None] + past


def draw(rows: int, cols: int, *before: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (rows, 8), (cols, 8), (cols, 8)
    return [torch.randn(*(before or (2, 3)), *shape) for shape in shapes]


def statistics(*args: Any) -> Tensor:
    return lk.attention_with_stats(*args).out


def compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(call, fullgraph=True, backend="aot_eager")


CALLS: dict[str, Callable[..., Tensor]] = {
    "attention": lk.attention,
    "statistics": statistics,
    "under vmap": lambda *args: torch.vmap(lk.attention, (0, 0, 0, None))(*args),
    "statistics compiled": lambda *args: compiled(statistics)(*args),
}


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_causal_bias_hides_what_it_says(name: str, variant: str, size: tuple[int, int]) -> None:
    torch.compiler.reset()
    q, k, v = draw(*size)
    mask = seen(variant, *size)
    actual = CALLS[name](q, k, v, bias(variant, *size))
    expected = lk.attention(q, k, v, mask)
    torch.testing.assert_close(actual, expected)
    assert not actual[..., ~mask.any(-1), :].any()
    assert type(actual) is Tensor


def test_what_it_cannot_mean_is_refused() -> None:
    q, k, v = draw(5, 9)
    for call in (lk.attention, lk.attention_with_stats):
        for size in ((9, 9), (5, 8)):
            with pytest.raises(
                ValueError, match=r"\(N, M\) = \(5, 9\), got one of \(" + str(size[0])
            ):
                call(q, k, v, bias("lower right", *size))
        for variant in VARIANTS:
            with pytest.raises(ValueError, match="attn_mask and is_causal=True exclude"):
                call(q, k, v, bias(variant, 5, 9), is_causal=True)
    with pytest.raises(ValueError, match="query must be a tensor"):
        lk.attention(None, k, v, bias("lower right", 5, 9))  # pyright: ignore
    with pytest.raises(ValueError, match="query must be"):
        lk.attention(q.flatten(), k, v, bias("lower right", 5, 9))


@pytest.mark.parametrize("weights", [False, True])
def test_pytorchs_module_refuses_it(weights: bool) -> None:
    layer, x = pytorch.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 9, 12)
    with pytest.raises(ValueError, match="CausalBias"):
        layer(x, x, x, attn_mask=bias("upper left", 9, 9), need_weights=weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_of_timm_takes_it(dtype: torch.dtype) -> None:
    timm_layers = pytest.importorskip("timm.layers")
    adapter = pytest.importorskip("leaner_kernels.adapters.timm")
    torch.manual_seed(0)
    layer = timm_layers.Attention(12, 3).eval().to(dtype)
    x = torch.randn(2, 7, 12).to(dtype)
    expected = layer(x, attn_mask=seen("upper left", 7, 7))
    adapter.use(layer)
    torch.testing.assert_close(layer(x, attn_mask=bias("upper left", 7, 7)), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("call", [lk.attention, SDPA], ids=["ours", "PyTorch's"])
def test_the_monitor_measures_it(variant: str, call: Callable[..., Tensor]) -> None:
    q, k, v = (t.double() for t in draw(5, 9))

    class Calls(nn.Module):
        def forward(self, mask: Tensor) -> Tensor:
            return call(q, k, v, attn_mask=mask)

    rows = []
    for mask in (bias(variant, 5, 9), seen(variant, 5, 9)):
        monitor = lk.KappaMonitor(Calls(), every=1)
        monitor.begin(0)
        monitor.model(mask)
        rows += monitor.end()
    for name in ("kappa", "entropy", "prob_norm", "max_logit"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-6), name


def test_the_monitor_says_what_it_cannot_measure() -> None:
    """PyTorch takes a square bias of the lower right for one of the upper left, of any size."""
    q, k, v = draw(5, 9)

    class Calls(nn.Module):
        def forward(self) -> Tensor:
            return SDPA(q, k, v, attn_mask=bias("lower right", 9, 9))

    monitor = lk.KappaMonitor(Calls(), every=1)
    monitor.begin(0)
    torch.testing.assert_close(monitor.model(), SDPA(q, k, v, is_causal=True))
    with pytest.raises(RuntimeError, match="attn_mask must be a lower right bias"):
        monitor.end()
