"""PyTorch's CausalBias as a mask: a tensor that means its variant, and whose memory means nothing.

Wherever a mask is taken, and under every name that attention is called by.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import leaner_kernels as lk
from leaner_kernels.adapters import pytorch
from leaner_kernels.nn import ManyHeadAttention
from leaner_kernels.ops.attention import sdpa as sdpa_module

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


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def statistics(*args: Any) -> Tensor:
    return lk.attention_with_stats(*args).out


def compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(call, fullgraph=True, backend="aot_eager")


CALLS: dict[str, Callable[..., Tensor]] = {
    "attention": lk.attention,
    "statistics": statistics,
    "under vjp": lambda q, *rest: torch.func.vjp(lambda q: lk.attention(q, *rest), q)[0],
    "under vmap": lambda *args: torch.vmap(lk.attention, (0, 0, 0, None))(*args),
    "statistics under vmap": lambda *qkv_mask: torch.vmap(
        lambda q, k, v, mask: statistics(q[None], k[None], v[None], mask)[0], (0, 0, 0, None)
    )(*qkv_mask),
    "compiled": lambda *args: compiled(lk.attention)(*args),
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


@pytest.mark.parametrize("shape", [(), (3,), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_of_fewer_axes_and_of_more(variant: str, shape: tuple[int, ...]) -> None:
    q, k, v = draw(5, 9, *shape) if shape else (t[0, 0] for t in draw(5, 9))
    actual = lk.attention(q, k, v, bias(variant, 5, 9))
    torch.testing.assert_close(actual, lk.attention(q, k, v, seen(variant, 5, 9)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_lengths_and_autocast_go_with_it(variant: str) -> None:
    lengths = torch.tensor([7, 9], dtype=torch.int32)
    found = []
    for mask in (bias(variant, 5, 9), seen(variant, 5, 9)):
        leaves = [t.requires_grad_() for t in draw(5, 9)]
        with torch.autocast("cpu", torch.bfloat16):
            out = lk.attention(*leaves, mask, key_lengths=lengths)
        assert out.dtype == torch.bfloat16
        found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_the_place_of_pytorchs_function(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(5, 9)
    expected = SDPA(q, k, v, seen(variant, 5, 9))
    monkeypatch.setattr(F, "scaled_dot_product_attention", lk.attention)
    actual = F.scaled_dot_product_attention(q, k, v, attn_mask=bias(variant, 5, 9))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("call", [("upper left", 5, 9), ("lower right", 7, 7)], ids=str)
def test_what_is_causal_alone_reads_no_mask(
    call: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, rows, cols = call
    given: list[tuple[Any, Any]] = []

    def sdpa(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout_p: float, is_causal: bool, **_: Any
    ) -> Tensor:
        given.append((mask, is_causal))
        return q

    monkeypatch.setattr(sdpa_module, "_sdpa", sdpa)
    lk.attention(*draw(rows, cols), bias(variant, rows, cols))
    assert given == [(None, True)]


def test_an_upper_left_one_may_be_of_another_size() -> None:
    """As in PyTorch: where it starts, all sizes agree."""
    q, k, v = draw(5, 9)
    actual = lk.attention(q, k, v, bias("upper left", 32, 32))
    torch.testing.assert_close(actual, lk.attention(q, k, v, is_causal=True))


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sharded_call_takes_it(variant: str, one_rank: DeviceMesh) -> None:
    q, k, v = draw(5, 9)
    parts = [DTensor.from_local(t, one_rank, [Shard(1)]) for t in (q, k, v)]
    for call in (lk.attention, statistics):
        out = call(*parts, bias(variant, 5, 9))
        assert isinstance(out, DTensor)
        expected = lk.attention(q, k, v, seen(variant, 5, 9))
        torch.testing.assert_close(out.full_tensor(), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("capture_samples", [0, 2])
def test_our_module_takes_it(variant: str, capture_samples: int) -> None:
    torch.manual_seed(0)
    layer = ManyHeadAttention(12, 3)
    layer.capture_samples = capture_samples
    x = torch.randn(2, 7, 12)
    actual = layer(x, attn_mask=bias(variant, 7, 7))
    torch.testing.assert_close(actual, layer(x, is_causal=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_captured_with_dropout_are_those_of_the_step(variant: str) -> None:
    torch.manual_seed(0)
    layer = ManyHeadAttention(12, 3, attn_drop=0.3)
    layer.capture_samples = 2
    layer(torch.randn(2, 7, 12), attn_mask=bias(variant, 7, 7))
    assert layer.captured is not None
    torch.testing.assert_close(layer.proj(layer.captured.heads), layer.captured.output)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("appended", [False, True])
def test_pytorchs_module_takes_it(
    variant: str, need_weights: bool, padded: bool, appended: bool
) -> None:
    """There True is hidden, and of what is appended nothing is."""
    torch.manual_seed(0)
    layer = pytorch.MultiheadAttention(12, 3, add_zero_attn=appended, batch_first=True).eval()
    q, k = torch.randn(2, 5, 12), torch.randn(2, 9, 12)
    options: dict[str, Any] = {"need_weights": need_weights}
    if padded:
        options["key_padding_mask"] = torch.arange(9) >= torch.tensor([[8], [9]])
    expected = layer(q, k, k, attn_mask=~seen(variant, 5, 9), **options)
    actual = layer(q, k, k, attn_mask=bias(variant, 5, 9), **options)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("variant", "rows", "options", "causal"),
    [
        ("upper left", 9, {}, True),
        ("upper left", 5, {}, True),
        ("lower right", 9, {}, True),
        ("lower right", 5, {}, False),
        ("upper left", 9, {"key_padding_mask": torch.arange(9) > torch.tensor([[8], [6]])}, False),
    ],
    ids=str,
)
def test_pytorchs_module_hands_it_on_as_causal_without_a_mask(
    variant: str, rows: int, options: dict[str, Any], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, given = pytorch.MultiheadAttention(12, 3, batch_first=True).eval(), []

    def noted(*tensors: Tensor | None, is_causal: bool, **params: Any) -> Tensor:
        given.append((is_causal, [t.shape for t in tensors[3:] if t is not None]))
        return lk.attention(*tensors, is_causal=is_causal, **params)

    monkeypatch.setattr(pytorch, "attention", noted)
    k = torch.randn(2, 9, 12)
    q, mask = k[:, :rows].clone(), bias(variant, rows, 9)
    actual, _ = layer(q, k, k, attn_mask=mask, need_weights=False, is_causal=True, **options)
    assert [is_causal for is_causal, _ in given] == [causal]
    assert (given[0][1] == []) == causal
    plain = ~seen(variant, rows, 9)
    expected, _ = layer(q, k, k, attn_mask=plain, need_weights=False, **options)
    torch.testing.assert_close(actual, expected)


def test_pytorchs_layers_take_it() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(12, 3, 24, batch_first=True).eval()
    pytorch.use(layer)
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 9, 12)
    masks = [
        {"tgt_mask": of("upper left", 5, 5), "memory_mask": of("lower right", 5, 9)}
        for of in (bias, lambda *args: ~seen(*args))
    ]
    torch.testing.assert_close(*(layer(x, memory, **each) for each in masks))


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
def test_attention_of_transformers_takes_it(variant: str) -> None:
    adapter = pytest.importorskip("leaner_kernels.adapters.transformers")
    q, k, v = draw(5, 9)
    for others in ({}, {"position_bias": torch.randn(1, 3, 5, 9)}, {"s_aux": torch.randn(3)}):
        actual, expected = (
            adapter.attention_forward(nn.Module(), q, k, v, mask, **others)[0]
            for mask in (bias(variant, 5, 9), seen(variant, 5, 9))
        )
        torch.testing.assert_close(actual, expected)


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
