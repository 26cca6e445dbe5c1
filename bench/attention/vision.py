"""Attention of XCiT, DaViT and VOLO: its cases, its peers and its correctness gate.

Letters: B batch, N tokens of a square map, H heads, D head dimension, K side of an outlook's patch.

Layouts of the inputs and the output, which is (B, Y, X, H, D) or, of the operators over channels,
(B, N, H, D): ``packed`` as a projection leaves them; ``windows`` qkv (B W, N, 3, H, D), cut into W
windows of N tokens beforehand, and the output left so, which spares a peer two copies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leaner_kernels
from bench.attention.cases import Case
from bench.attention.peers import every_backend, operator_peers
from bench.harness.gate import Inputs, Problem
from bench.harness.peers import Peer, found

CHANNELS = "cross_covariance", "channel"  # these attend over channels, the others over tokens
# Products of the forward and of the backward, where the scores are computed again: those of an
# outlook come out of a projection.
PRODUCTS = {"cross_covariance": (2, 5), "channel": (2, 5), "window": (2, 5), "outlook": (1, 2)}
GRADIENTS = {
    "cross_covariance": ("dqkv", "dtemperature"),
    "channel": ("dqkv",),
    "window": ("dqkv",),
    "outlook": ("dvalue", "dlogits"),
}
COLDEST, HOTTEST = 1.0, 8.0


@dataclass(frozen=True)
class VisionCase(Case):
    """One operator on a batch of square maps; the counts below are of useful work.

    Attributes:
        name: an identifier; cases of the CPU begin with ``cpu_``.
        device: ``cuda`` or ``cpu``.
        op: ``cross_covariance``, ``channel``, ``window`` or ``outlook``.
        batch: B.
        side: of the map, so N = side * side.
        heads: H.
        head_dim: D.
        dtype: of every tensor.
        window: side of a window, which divides the map's.
        kernel: K.
        stride: of an outlook; its patches are padded by ``kernel // 2``.
    """

    name: str
    device: str
    op: str
    batch: int
    side: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    window: int = 7
    kernel: int = 3
    stride: int = 2

    @property
    def compiled_for(self) -> str:
        """Every case has kernels of its own."""
        return self.name

    @property
    def tokens(self) -> int:
        """N."""
        return self.side * self.side

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def places(self) -> int:
        """Places along a side that an outlook looks from."""
        return (self.side + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1

    @property
    def patches(self) -> dict[str, int]:
        """What describes the patches of an outlook, in PyTorch's words."""
        padding = self.kernel // 2
        return {"kernel_size": self.kernel, "stride": self.stride, "padding": padding}

    @property
    def params(self) -> dict[str, Any]:
        """What the public function takes beside tensors."""
        windows = {"window_size": self.window}
        return {"window": windows, "outlook": self.patches}.get(self.op, {})

    @property
    def operator_params(self) -> tuple[Any, ...]:
        """What the operator below it takes beside tensors."""
        return {
            "cross_covariance": (1e-12,),
            "channel": (self.scale,),
            "window": (self.window, self.window, self.scale),
            "outlook": (*self.patches.values(), self.scale),
        }[self.op]

    @property
    def meta_inputs(self) -> tuple[Tensor, ...]:
        """The operator's inputs."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": "meta"}
        return tuple(torch.empty(shape, **options) for shape in self.input_shapes)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of the output: channels see N tokens in a row, the others a map."""
        place = (self.tokens,) if self.op in CHANNELS else (self.side, self.side)
        return self.batch, *place, self.heads, self.head_dim

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of everything that is differentiated, in the order in which the function takes it."""
        *place, heads, dim = self.out_shape
        if self.op == "outlook":
            around = (self.batch, self.places, self.places, heads, *[self.kernel**2] * 2)
            return self.out_shape, around
        qkv = (*place, 3, heads, dim)
        return (qkv, (heads,)) if self.op == "cross_covariance" else (qkv,)

    @property
    def scores(self) -> int:
        """Scores over all heads and maps."""
        of_head = {
            "window": self.tokens * self.window**2,
            "outlook": self.places**2 * self.kernel**4,
        }.get(self.op, self.head_dim**2)
        return self.batch * self.heads * of_head

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes of the forward and of the backward."""
        size = self.batch * self.tokens * self.width * self.dtype.itemsize
        if self.op != "outlook":
            return 4 * size, 7 * size  # q, k, v, out; q, k, v, dout, dq, dk, dv
        logits = self.scores * self.dtype.itemsize
        # value, out; value, dout, dvalue: the logits are read, and written as a gradient.
        return 2 * size + logits, 3 * size + 2 * logits

    @property
    def computed(self) -> tuple[int, int]:
        """Operations: two for each score and what a product sums over or gives."""
        product = 2 * self.scores * (self.tokens if self.op in CHANNELS else self.head_dim)
        forward, backward = PRODUCTS[self.op]
        return forward * product, backward * product

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        size = f"{self.batch}·{self.heads}·{self.side}²·{self.head_dim}"
        if self.op == "window":
            size += f", windows {self.window}×{self.window}"
        if self.op == "outlook":
            size += f", {self.kernel}×{self.kernel} around {self.places}² places"
        return {**super().facts(), "op": self.op, "size": size}


# ---- the papers' code ----


def cut(case: VisionCase, t: Tensor) -> Tensor:
    """Return (B, Y, X, ...) as windows, (B W, N, ...)."""
    side, count = case.window, case.side // case.window
    t = t.unflatten(2, (count, side)).unflatten(1, (count, side))
    return t.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def join(case: VisionCase, t: Tensor) -> Tensor:
    """Return windows (B W, N, ...) as the map (B, Y, X, ...)."""
    side, count = case.window, case.side // case.window
    t = t.unflatten(1, (side, side)).unflatten(0, (case.batch, count, count))
    return t.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def cross_covariance(qkv: Tensor, temperature: Tensor) -> Tensor:
    """XCiT's attention as its code writes it: (B, N, 3, H, D) and (H,) to (B, N, H, D)."""
    q, k, v = qkv.permute(2, 0, 3, 4, 1)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    p = torch.softmax((q @ k.mT) * temperature[:, None, None], dim=-1)
    return (p @ v).permute(0, 3, 1, 2)


def _channel(case: VisionCase, qkv: Tensor) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    p = torch.softmax((k * case.scale).mT @ v, dim=-1)
    return (p @ q.mT).mT.transpose(1, 2)


def _window(case: VisionCase, qkv: Tensor) -> Tensor:
    q, k, v = cut(case, qkv).permute(2, 0, 3, 1, 4)
    p = torch.softmax((q * case.scale) @ k.mT, dim=-1)
    return join(case, (p @ v).transpose(1, 2))


def _outlook(case: VisionCase, value: Tensor, logits: Tensor) -> Tensor:
    channels = value.flatten(3).permute(0, 3, 1, 2)
    v = F.unfold(channels, **case.patches)
    v = v.unflatten(1, (case.heads, case.head_dim, case.kernel**2)).permute(0, 1, 4, 3, 2)
    p = torch.softmax(logits.flatten(1, 2).transpose(1, 2) * case.scale, dim=-1)
    out = (p @ v).permute(0, 1, 4, 3, 2).reshape(case.batch, -1, case.places**2)
    out = F.fold(out, (case.side, case.side), **case.patches)
    return out.permute(0, 2, 3, 1).unflatten(3, (case.heads, case.head_dim))


EAGER = {
    "cross_covariance": lambda _, *leaves: cross_covariance(*leaves),
    "channel": _channel,
    "window": _window,
    "outlook": _outlook,
}


def eager(case: VisionCase, *leaves: Tensor) -> Tensor:
    """The operator as its paper's code writes it, in the dtype and on the device of the inputs."""
    return EAGER[case.op](case, *leaves)


# ---- peers ----


def _eager(case: VisionCase, device: torch.device) -> Callable[..., Tensor]:
    return partial(eager, case)


def _public(case: VisionCase, suffix: str = "", **more: Any) -> Callable[..., Any]:
    function = getattr(leaner_kernels, f"{case.op}_attention{suffix}")
    return partial(function, **case.params, **more)


def _leaner(case: VisionCase, device: torch.device) -> Callable[..., Tensor]:
    return _public(case)


def _leaner_stats(
    case: VisionCase, device: torch.device, sample: Tensor | None
) -> Callable[..., Tensor]:
    function = _public(case, "_with_stats", sample=sample)
    return lambda *leaves: function(*leaves).out


def _sdpa_channels(case: VisionCase, device: torch.device) -> Callable[..., Tensor]:
    """D channels attend to D channels, with the tokens as head dimension."""

    def cosines(qkv: Tensor, temperature: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 4, 1)
        q, k = F.normalize(q, dim=-1) * temperature[:, None, None], F.normalize(k, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        return out.permute(0, 3, 1, 2)

    def channel(qkv: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 4, 1)
        out = F.scaled_dot_product_attention(k, v, q, scale=case.scale)
        return out.permute(0, 3, 1, 2)

    return cosines if case.op == "cross_covariance" else channel


def _sdpa_windows(case: VisionCase, device: torch.device) -> Callable[..., Tensor]:
    def run(windows: Tensor) -> Tensor:
        q, k, v = windows.permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return run


class Given(nn.Module):
    """Stands where a module has its projection, and returns ``value``."""

    value: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return ``value``."""
        return self.value


def _timm_module(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """Return timm's attention between its projections, of which ``Given`` is the first."""
    built = found(f"timm.models.{module}", name)(*args, **kwargs)
    built.qkv, built.proj = Given(), nn.Identity()
    return built


def _run_given(case: VisionCase, module: nn.Module, like: Tensor, *shape: int) -> Tensor:
    """Run a module whose projection is given on what only lends its shape; split the heads."""
    out = module(like.new_empty(1).expand(*shape, case.width))
    return out.unflatten(-1, (case.heads, case.head_dim))


def _timm_cross_covariance(case: VisionCase, device: torch.device) -> Callable[..., Tensor]:
    module = _timm_module("xcit", "XCA", case.width, case.heads)
    del module.temperature

    def run(qkv: Tensor, temperature: Tensor) -> Tensor:
        module.qkv.value, module.temperature = qkv, temperature[:, None, None]
        return _run_given(case, module, qkv, case.batch, case.tokens)

    return run


def _timm_channel(case: VisionCase, device: torch.device) -> Callable[..., Tensor]:
    module = _timm_module("davit", "ChannelAttention", case.width, case.heads)

    def run(qkv: Tensor) -> Tensor:
        module.qkv.value = qkv
        return _run_given(case, module, qkv, case.batch, case.tokens)

    return run


def _timm_window(case: VisionCase, device: torch.device) -> Callable[..., Tensor]:
    """Cuts all of qkv; inside timm's model the windows are cut before its projection."""
    sides = case.window, case.window
    module = _timm_module("davit", "WindowAttention", case.width, sides, case.heads)
    partition = found("timm.models.davit", "window_partition")
    reverse = found("timm.models.davit", "window_reverse")

    def run(qkv: Tensor) -> Tensor:
        module.qkv.value = windows = partition(qkv.flatten(3), sides).flatten(1, 2)
        out = _run_given(case, module, qkv, len(windows), case.window**2).flatten(2)
        out = reverse(out.unflatten(1, sides), sides, case.side, case.side)
        return out.unflatten(3, (case.heads, case.head_dim))

    return run


def _timm_outlook(case: VisionCase, device: torch.device) -> Callable[..., Tensor]:
    module = _timm_module("volo", "OutlookAttention", case.width, case.heads, **case.patches)
    module.v, module.attn, module.pool = Given(), Given(), nn.Identity()

    def run(value: Tensor, logits: Tensor) -> Tensor:
        module.v.value, module.attn.value = value.flatten(3), logits
        return _run_given(case, module, value, case.batch, case.side, case.side)

    return run


# Its fused kernels want tokens to lie side by side in memory, which channels do here.
_CHANNELS = {"sdpa": Peer(_sdpa_channels, "packed")}
PEERS = {
    op: operator_peers(_leaner, _leaner_stats, _eager, {"timm": Peer(timm, "packed"), **others})
    for op, timm, others in (
        ("cross_covariance", _timm_cross_covariance, _CHANNELS),
        ("channel", _timm_channel, _CHANNELS),
        ("window", _timm_window, every_backend(_sdpa_windows, "windows")),
        ("outlook", _timm_outlook, {}),
    )
}


# ---- the gate ----


class VisionProblem(Problem):
    """The tensors of a ``VisionCase`` and the truth about them: every entry is checked."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the results that are compared."""
        return "out", *GRADIENTS[self.case.op]

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        case, options = self.case, {"dtype": self.case.dtype, "device": self.device}

        def draw(shape: tuple[int, ...]) -> Tensor:
            if len(shape) > 1:
                drawn = torch.randn(shape, device=self.device, generator=generator)
                return drawn.to(case.dtype)
            # Temperatures: cosines of random channels are small, so some heads make them differ.
            return torch.linspace(COLDEST, HOTTEST, *shape, **options)

        return tuple(map(draw, (*case.input_shapes, case.out_shape)))

    def _lay_out(self, tensors: Sequence[Tensor], layout: str) -> Inputs:
        if layout == "windows":
            tensors = [cut(self.case, t).contiguous() for t in tensors]
        return super()._lay_out(tensors, layout)

    def _reference(self, apart: bool, *leaves: Tensor) -> Tensor:
        return eager(self.case, *leaves)

    def _results(self, layout: str, out: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
        results = [out, *grads]
        return [join(self.case, t) for t in results] if layout == "windows" else results


PROBLEM = VisionProblem
_BF16, _FP32 = torch.bfloat16, torch.float32

# The most telling of each operator first, at the paper's batch for one of 8 GPUs.
CASES = (
    VisionCase("xcit_m", "cuda", "cross_covariance", 128, 14, 8, 64, _BF16),
    VisionCase("volo_d3_outlook", "cuda", "outlook", 128, 28, 8, 32, _BF16),
    # DaViT-B, third stage, where 9 of its 12 pairs of blocks are.
    VisionCase("davit_channel3", "cuda", "channel", 128, 14, 16, 32, _BF16),
    VisionCase("davit_window3", "cuda", "window", 128, 14, 16, 32, _BF16),
    VisionCase("xcit_m_lean", "cuda", "cross_covariance", 128, 14, 16, 64, _BF16),
    VisionCase("volo_d3_outlook_lean", "cuda", "outlook", 128, 28, 16, 16, _BF16),
    VisionCase("davit_channel3_lean", "cuda", "channel", 128, 14, 32, 16, _BF16),
    VisionCase("davit_window3_lean", "cuda", "window", 128, 14, 32, 16, _BF16),
    VisionCase("davit_channel1", "cuda", "channel", 128, 56, 4, 32, _BF16),
    VisionCase("davit_window1", "cuda", "window", 128, 56, 4, 32, _BF16),
    VisionCase("xcit_l", "cuda", "cross_covariance", 64, 14, 16, 48, _BF16),
    VisionCase("xcit_l_lean", "cuda", "cross_covariance", 64, 14, 24, 32, _BF16),
    VisionCase("volo_d4_outlook", "cuda", "outlook", 64, 28, 12, 32, _BF16),
    VisionCase("volo_d4_outlook_lean", "cuda", "outlook", 64, 28, 24, 16, _BF16),
    VisionCase("davit_channel2", "cuda", "channel", 128, 28, 8, 32, _BF16),
    VisionCase("davit_window2", "cuda", "window", 128, 28, 8, 32, _BF16),
    VisionCase("davit_channel4", "cuda", "channel", 128, 7, 32, 32, _BF16),
    VisionCase("davit_window4", "cuda", "window", 128, 7, 32, 32, _BF16),
    VisionCase("cpu_xca", "cpu", "cross_covariance", 2, 14, 4, 16, _FP32),
    VisionCase("cpu_channel", "cpu", "channel", 2, 14, 4, 16, _FP32),
    VisionCase("cpu_window", "cpu", "window", 2, 14, 4, 16, _FP32),
    VisionCase("cpu_outlook", "cpu", "outlook", 2, 14, 4, 16, _FP32),
)
