"""Attention of XCiT, DaViT, VOLO and Nyströmformer: cases, peers and the correctness gate.

Letters: B batch, N tokens, of vision those of a square map, H heads, D head dimension, K side of an
outlook's patch, m landmarks.

Layouts of the inputs and the output, which is (B, Y, X, H, D) or, of ``IN_A_ROW``,
(B, N, H, D): ``packed`` as a projection leaves them; ``windows`` qkv (B W, N, 3, H, D), cut into W
windows of N tokens beforehand, and the output left so, which spares a peer two copies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leaner_kernels
from bench.attention.cases import Case
from bench.attention.gate import checked_entries
from bench.attention.peers import every_sample
from bench.harness.gate import Inputs, Problem
from bench.harness.peers import Peer, compiled, found

CHANNELS = "cross_covariance", "channel"  # these attend over channels, the others over tokens
IN_A_ROW = *CHANNELS, "nystrom"  # for these, tokens do not form a map
ITERATIONS = 6  # iterations of the inverse in Nyström attention
# Products of the forward and of the backward, which recomputes the scores; the scores of an outlook
# come from a projection.
PRODUCTS = {"cross_covariance": (2, 5), "channel": (2, 5), "window": (2, 5), "outlook": (1, 2)}
GRADIENTS = {
    "cross_covariance": ("dqkv", "dtemperature"),
    "channel": ("dqkv",),
    "window": ("dqkv",),
    "outlook": ("dvalue", "dlogits"),
    "nystrom": ("dqkv",),
}
COLDEST, HOTTEST = 1.0, 8.0


@dataclass(frozen=True)
class OperatorCase(Case):
    """One operator on a batch; the counts below are of useful work.

    Attributes:
        name: an identifier; cases of the CPU begin with ``cpu_``.
        device: ``cuda`` or ``cpu``.
        op: ``cross_covariance``, ``channel``, ``window``, ``outlook`` or ``nystrom``.
        batch: B.
        size: side of the map, so N = size * size; of Nyström attention N, a multiple of m.
        heads: H.
        head_dim: D.
        dtype: dtype of every tensor.
        window: side of a window, which divides the map's.
        kernel: K.
        stride: stride of an outlook; its patches are padded by ``kernel // 2``.
        landmarks: m.
    """

    name: str
    device: str
    op: str
    batch: int
    size: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    window: int = 7
    kernel: int = 3
    stride: int = 2
    landmarks: int = 64

    @property
    def tokens(self) -> int:
        """N."""
        return self.size if self.op == "nystrom" else self.size**2

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def places(self) -> int:
        """Number of windows along a side of an outlook."""
        return (self.size + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1

    @property
    def patches(self) -> dict[str, int]:
        """The patches of an outlook, in the terms of PyTorch's unfold."""
        padding = self.kernel // 2
        return {"kernel_size": self.kernel, "stride": self.stride, "padding": padding}

    @property
    def params(self) -> dict[str, Any]:
        """Arguments of the public function besides tensors."""
        return {
            "window": {"window_size": self.window},
            "outlook": self.patches,
            "nystrom": {"num_landmarks": self.landmarks},
        }.get(self.op, {})

    @property
    def operator_params(self) -> tuple[Any, ...]:
        """Arguments of the operator below it besides tensors."""
        return {
            "cross_covariance": (1e-12,),
            "channel": (self.scale,),
            "window": (self.window, self.window, self.scale),
            "outlook": (*self.patches.values(), self.scale),
        }[self.op]

    @property
    def meta_inputs(self) -> tuple[Tensor, ...]:
        """The operator's inputs, without memory."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": "meta"}
        return tuple(torch.empty(shape, **options) for shape in self.input_shapes)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of the output."""
        place = (self.tokens,) if self.op in IN_A_ROW else (self.size, self.size)
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
    def least_bytes(self) -> tuple[int, int]:
        """Bytes of the forward and of the backward."""
        size = self.batch * self.tokens * self.width * self.dtype.itemsize
        if self.op != "outlook":
            return 4 * size, 7 * size  # q, k, v, out; q, k, v, dout, dq, dk, dv
        logits = self.scores * self.dtype.itemsize
        # value, out; value, dout, dvalue: the logits are read, and written as a gradient.
        return 2 * size + logits, 3 * size + 2 * logits

    @property
    def computed(self) -> tuple[int, int]:
        """Return the operations: two for each score and each element of a product."""
        if self.op == "nystrom":
            return self._computed_by_landmarks()
        product = 2 * self.scores * (self.tokens if self.op in CHANNELS else self.head_dim)
        forward, backward = PRODUCTS[self.op]
        return forward * product, backward * product

    def _computed_by_landmarks(self) -> tuple[int, int]:
        """Products of the forward, and of a backward that computes all but the output again.

        Long ones have N m D multiplications: two scores, and what the matrices of both multiply.
        The iterations have four of m m m each, and twice as many backward.
        """
        m, width = self.landmarks, self.head_dim
        long, square = self.tokens * m * width, m * m * width
        iterations = ITERATIONS * 4 * m**3
        forward = 4 * long + 2 * square + iterations
        # Scores and K3 V again; then each long product gives two.
        backward = (3 + 2 * 4) * long + (1 + 2 * 2) * square + 3 * iterations
        heads = self.batch * self.heads
        return 2 * heads * forward, 2 * heads * backward

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        tokens = self.tokens if self.op == "nystrom" else f"{self.size}²"
        size = f"{self.batch}·{self.heads}·{tokens}·{self.head_dim}"
        if self.op == "window":
            size += f", windows {self.window}×{self.window}"
        if self.op == "outlook":
            size += f", {self.kernel}×{self.kernel} around {self.places}² places"
        if self.op == "nystrom":
            size += f", {self.landmarks} landmarks"
        return {**super().facts(), "op": self.op, "size": size}


# ---- the papers' code ----


def window_partition(case: OperatorCase, t: Tensor) -> Tensor:
    """Return (B, Y, X, ...) as windows, (B W, N, ...)."""
    side, count = case.window, case.size // case.window
    t = t.unflatten(2, (count, side)).unflatten(1, (count, side))
    return t.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def window_reverse(case: OperatorCase, t: Tensor) -> Tensor:
    """Return windows (B W, N, ...) as the map (B, Y, X, ...)."""
    side, count = case.window, case.size // case.window
    t = t.unflatten(1, (side, side)).unflatten(0, (case.batch, count, count))
    return t.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def cross_covariance(qkv: Tensor, temperature: Tensor) -> Tensor:
    """XCiT's attention as its code writes it: (B, N, 3, H, D) and (H,) to (B, N, H, D)."""
    q, k, v = qkv.permute(2, 0, 3, 4, 1)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    p = torch.softmax((q @ k.mT) * temperature[:, None, None], dim=-1)
    return (p @ v).permute(0, 3, 1, 2)


def _channel(case: OperatorCase, qkv: Tensor) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    p = torch.softmax((k * case.scale).mT @ v, dim=-1)
    return (p @ q.mT).mT.transpose(1, 2)


def _window(case: OperatorCase, qkv: Tensor) -> Tensor:
    q, k, v = window_partition(case, qkv).permute(2, 0, 3, 1, 4)
    p = torch.softmax((q * case.scale) @ k.mT, dim=-1)
    return window_reverse(case, (p @ v).transpose(1, 2))


def _outlook(case: OperatorCase, value: Tensor, logits: Tensor) -> Tensor:
    channels = value.flatten(3).permute(0, 3, 1, 2)
    v = F.unfold(channels, **case.patches)
    v = v.unflatten(1, (case.heads, case.head_dim, case.kernel**2)).permute(0, 1, 4, 3, 2)
    p = torch.softmax(logits.flatten(1, 2).transpose(1, 2) * case.scale, dim=-1)
    out = (p @ v).permute(0, 1, 4, 3, 2).reshape(case.batch, -1, case.places**2)
    out = F.fold(out, (case.size, case.size), **case.patches)
    return out.permute(0, 2, 3, 1).unflatten(3, (case.heads, case.head_dim))


def nystrom(case: OperatorCase, qkv: Tensor) -> Tensor:
    """Nyström attention as its authors' code writes it: (B, N, 3, H, D) to (B, N, H, D)."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    q_land, k_land = (t.unflatten(2, (case.landmarks, -1)).mean(dim=3) for t in (q, k))
    k1 = torch.softmax(case.scale * (q @ k_land.mT), dim=-1)
    k2 = torch.softmax(case.scale * (q_land @ k_land.mT), dim=-1)
    k3 = torch.softmax(case.scale * (q_land @ k.mT), dim=-1)
    one = torch.eye(case.landmarks, dtype=k2.dtype, device=k2.device)
    z = k2.mT / k2.sum(dim=-2, keepdim=True).amax(dim=-1, keepdim=True)
    for _ in range(ITERATIONS):
        a = k2 @ z
        z = 0.25 * z @ (13 * one - a @ (15 * one - a @ (7 * one - a)))
    return (k1 @ z @ (k3 @ v)).transpose(1, 2)


EAGER = {
    "cross_covariance": lambda _, *leaves: cross_covariance(*leaves),
    "channel": _channel,
    "window": _window,
    "outlook": _outlook,
    "nystrom": nystrom,
}


def eager(case: OperatorCase, *leaves: Tensor) -> Tensor:
    """The operator as its paper's code writes it, in the dtype and on the device of the inputs."""
    return EAGER[case.op](case, *leaves)


# ---- peers ----


def _eager(case: OperatorCase, device: torch.device) -> Callable[..., Tensor]:
    return partial(eager, case)


def _of_projection(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of q, k and v, (B, H, N, D), that takes them as one projection."""
    return lambda qkv: function(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2)


def _leaner(case: OperatorCase, device: torch.device) -> Callable[..., Tensor]:
    function = partial(getattr(leaner_kernels, f"{case.op}_attention"), **case.params)
    return _of_projection(function) if case.op == "nystrom" else function


def _leaner_stats(
    case: OperatorCase, device: torch.device, sample: Tensor | None
) -> Callable[..., Tensor]:
    function = getattr(leaner_kernels, f"{case.op}_attention_with_stats")

    def run(*leaves: Tensor) -> Tensor:
        return function(*leaves, **case.params, sample=sample).out

    return _of_projection(run) if case.op == "nystrom" else run


def _sdpa_channels(case: OperatorCase, device: torch.device) -> Callable[..., Tensor]:
    """D channels attend to D channels, with the tokens as head dimension."""

    def run(qkv: Tensor, *temperature: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 4, 1)
        if temperature:  # cross-covariance: cosines
            q, k = F.normalize(q, dim=-1) * temperature[0][:, None, None], F.normalize(k, dim=-1)
            out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        else:
            out = F.scaled_dot_product_attention(k, v, q, scale=case.scale)
        return out.permute(0, 3, 1, 2)

    return run


def _sdpa_windows(case: OperatorCase, device: torch.device) -> Callable[..., Tensor]:
    return _of_projection(F.scaled_dot_product_attention)


class Given(nn.Module):
    """Replaces the projection of a module, and returns ``value``."""

    value: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return ``value``."""
        return self.value


def _timm_module(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """Return timm's attention between its projections, of which ``Given`` is the first."""
    built = found(f"timm.models.{module}", name)(*args, **kwargs)
    built.qkv, built.proj = Given(), nn.Identity()
    return built


def _run_given(case: OperatorCase, module: nn.Module, like: Tensor, *shape: int) -> Tensor:
    """Run a module whose projection is given on what only lends its shape; split the heads."""
    out = module(like.new_empty(1).expand(*shape, case.width))
    return out.unflatten(-1, (case.heads, case.head_dim))


def _timm_channels(case: OperatorCase, device: torch.device) -> Callable[..., Tensor]:
    learns = case.op == "cross_covariance"  # its temperature
    names = ("xcit", "XCA") if learns else ("davit", "ChannelAttention")
    module = _timm_module(*names, case.width, case.heads)
    if learns:
        del module.temperature

    def run(qkv: Tensor, *temperature: Tensor) -> Tensor:
        module.qkv.value = qkv
        if learns:
            module.temperature = temperature[0][:, None, None]
        return _run_given(case, module, qkv, case.batch, case.tokens)

    return run


def _timm_outlook(case: OperatorCase, device: torch.device) -> Callable[..., Tensor]:
    module = _timm_module("volo", "OutlookAttention", case.width, case.heads, **case.patches)
    module.v, module.attn, module.pool = Given(), Given(), nn.Identity()

    def run(value: Tensor, logits: Tensor) -> Tensor:
        module.v.value, module.attn.value = value.flatten(3), logits
        return _run_given(case, module, value, case.batch, case.size, case.size)

    return run


# timm cuts windows before its projection, so cutting them afterwards would not measure timm.
_TIMM = {
    "cross_covariance": _timm_channels,
    "channel": _timm_channels,
    "outlook": _timm_outlook,
}
_SDPA_CHANNELS = Peer(
    _sdpa_channels, "packed", about="PyTorch's scaled_dot_product_attention between channels"
)
_SDPA = {
    # Its fused kernels require contiguous tokens in memory, as channels are here.
    "cross_covariance": _SDPA_CHANNELS,
    "channel": _SDPA_CHANNELS,
    "window": Peer(
        _sdpa_windows,
        "windows",
        about="PyTorch's scaled_dot_product_attention on windows that were cut before",
    ),
}


def peers_of(case: OperatorCase) -> dict[str, Peer]:
    """Return the peers of a case: ours, with statistics too, the paper's code, timm, PyTorch's."""
    timm, sdpa = _TIMM.get(case.op), _SDPA.get(case.op)
    return {
        "leaner": Peer(_leaner, "packed", ours=True, about="This project's public function"),
        **every_sample(_leaner_stats, "packed"),
        "eager": Peer(_eager, "packed", about="The paper's formula in separate PyTorch operators"),
        **(
            {"timm": Peer(timm, "packed", about="timm's own module without its projections")}
            if timm
            else {}
        ),
        **({"sdpa": sdpa} if sdpa else {}),
        "eager_compiled": Peer(
            lambda case, device: compiled(_eager(case, device), device),
            "packed",
            about="The paper's formula through torch.compile",
        ),
    }


# ---- the gate ----


class OperatorProblem(Problem):
    """The tensors of an ``OperatorCase`` and the truth about them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the results that are compared."""
        return "out", *GRADIENTS[self.case.op]

    @cached_property
    def entries(self) -> Any:
        """All batch entries, but only some for Nyström attention, whose sequences are long."""
        if self.case.op != "nystrom":
            return ...
        scores = self.case.heads * self.case.tokens**2
        return checked_entries(self.case.batch, scores, self.device)

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        case, device = self.case, self.device

        def draw(shape: tuple[int, ...]) -> Tensor:
            if len(shape) > 1:
                return torch.randn(shape, device=device, generator=generator)
            # Temperatures: cosines of random channels are small, so some heads make them differ.
            return torch.linspace(COLDEST, HOTTEST, *shape, device=device)

        drawn = [*map(draw, (*case.input_shapes, case.out_shape))]
        if case.op == "nystrom":
            # The tokens of a segment share a component: otherwise all landmarks would be near the
            # global mean.
            share = draw((case.batch, case.landmarks, 3, case.heads, case.head_dim))
            repeated = share.repeat_interleave(case.tokens // case.landmarks, dim=1)
            drawn[0] = repeated + 0.5 * drawn[0]
        return tuple(t.to(case.dtype) for t in drawn)

    def _lay_out(self, tensors: Sequence[Tensor], layout: str) -> Inputs:
        if layout == "windows":
            tensors = [window_partition(self.case, t).contiguous() for t in tensors]
        return super()._lay_out(tensors, layout)

    def _reference(self, *leaves: Tensor) -> Tensor:
        return eager(self.case, *leaves)

    def _results(self, layout: str, out: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
        if layout == "windows":
            out, *grads = (window_reverse(self.case, t) for t in (out, *grads))
        return super()._results(layout, out, grads)


_BF16, _FP32 = torch.bfloat16, torch.float32

# The most informative case of each operator first, at the paper's batch for one of 8 GPUs.
CASES = (
    OperatorCase("xcit_m", "cuda", "cross_covariance", 128, 14, 8, 64, _BF16),
    OperatorCase("volo_d3_outlook", "cuda", "outlook", 128, 28, 8, 32, _BF16),
    # DaViT-B, third stage, where 9 of its 12 pairs of blocks are.
    OperatorCase("davit_channel3", "cuda", "channel", 128, 14, 16, 32, _BF16),
    OperatorCase("davit_window3", "cuda", "window", 128, 14, 16, 32, _BF16),
    OperatorCase("xcit_m_lean", "cuda", "cross_covariance", 128, 14, 16, 64, _BF16),
    OperatorCase("volo_d3_outlook_lean", "cuda", "outlook", 128, 28, 16, 16, _BF16),
    OperatorCase("davit_channel3_lean", "cuda", "channel", 128, 14, 32, 16, _BF16),
    OperatorCase("davit_window3_lean", "cuda", "window", 128, 14, 32, 16, _BF16),
    OperatorCase("davit_channel1", "cuda", "channel", 128, 56, 4, 32, _BF16),
    OperatorCase("davit_window1", "cuda", "window", 128, 56, 4, 32, _BF16),
    OperatorCase("xcit_l", "cuda", "cross_covariance", 64, 14, 16, 48, _BF16),
    OperatorCase("xcit_l_lean", "cuda", "cross_covariance", 64, 14, 24, 32, _BF16),
    OperatorCase("volo_d4_outlook", "cuda", "outlook", 64, 28, 12, 32, _BF16),
    OperatorCase("volo_d4_outlook_lean", "cuda", "outlook", 64, 28, 24, 16, _BF16),
    OperatorCase("davit_channel2", "cuda", "channel", 128, 28, 8, 32, _BF16),
    OperatorCase("davit_window2", "cuda", "window", 128, 28, 8, 32, _BF16),
    OperatorCase("davit_channel4", "cuda", "channel", 128, 7, 32, 32, _BF16),
    OperatorCase("davit_window4", "cuda", "window", 128, 7, 32, 32, _BF16),
    # The rows of the Long-Range Arena at the batches of their recipes; Retrieval has two of a kind.
    OperatorCase("nystrom_listops", "cuda", "nystrom", 32, 2048, 2, 32, _BF16),
    OperatorCase("nystrom_listops_lean", "cuda", "nystrom", 32, 2048, 4, 32, _BF16),
    OperatorCase("nystrom_retrieval", "cuda", "nystrom", 64, 4096, 2, 32, _BF16),
    OperatorCase("nystrom_image_lean", "cuda", "nystrom", 256, 1024, 4, 32, _BF16),
    OperatorCase("nystrom_listops_m128", "cuda", "nystrom", 32, 2048, 2, 32, _BF16, landmarks=128),
    OperatorCase("nystrom_listops_m256", "cuda", "nystrom", 32, 2048, 2, 32, _BF16, landmarks=256),
    OperatorCase("cpu_xca", "cpu", "cross_covariance", 2, 14, 4, 16, _FP32),
    OperatorCase("cpu_channel", "cpu", "channel", 2, 14, 4, 16, _FP32),
    OperatorCase("cpu_window", "cpu", "window", 2, 14, 4, 16, _FP32),
    OperatorCase("cpu_outlook", "cpu", "outlook", 2, 14, 4, 16, _FP32),
    OperatorCase("cpu_nystrom", "cpu", "nystrom", 2, 128, 2, 16, _FP32, landmarks=16),
)
