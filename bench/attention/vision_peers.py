"""Peers of the attention of XCiT, DaViT and VOLO, as data, and their correctness gate.

Layouts of the inputs and the output, which is (B, Y, X, H, D) or, of the operators over channels,
(B, N, H, D): ``packed`` as a projection leaves them; ``windows`` qkv (B W, N, 3, H, D), cut into W
windows of N tokens beforehand, and the output left so, which spares a peer two copies.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leaner_kernels
from bench.attention.peers import Build, every_backend, every_sample
from bench.attention.vision_cases import VisionCase
from bench.harness.gate import Inputs, Problem
from bench.harness.peers import Peer, compiled, found


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


def eager(case: VisionCase, *leaves: Tensor) -> Tensor:
    """The operator as its paper's code writes it, in the dtype and on the device of the inputs."""
    return EAGER[case.op](case, *leaves)


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
    area, places, padding = case.kernel**2, case.places, case.kernel // 2
    patches = {"kernel_size": case.kernel, "stride": case.stride, "padding": padding}
    channels = value.flatten(3).permute(0, 3, 1, 2)
    v = F.unfold(channels, **patches).unflatten(1, (case.heads, case.head_dim, area))
    v = v.permute(0, 1, 4, 3, 2)
    p = torch.softmax(logits.flatten(1, 2).transpose(1, 2) * case.scale, dim=-1)
    out = (p @ v).permute(0, 1, 4, 3, 2).reshape(case.batch, -1, places**2)
    out = F.fold(out, (case.side, case.side), **patches)
    return out.permute(0, 2, 3, 1).unflatten(3, (case.heads, case.head_dim))


EAGER = {
    "cross_covariance": lambda _, *leaves: cross_covariance(*leaves),
    "channel": _channel,
    "window": _window,
    "outlook": _outlook,
}


def _eager(case: VisionCase, device: torch.device) -> Callable[..., Tensor]:
    return partial(eager, case)


def _public(case: VisionCase, suffix: str = "") -> Callable[..., Any]:
    name = f"{case.op}_attention{suffix}"
    return partial(getattr(leaner_kernels, name), **case.params)


def _leaner(case: VisionCase, device: torch.device) -> Callable[..., Tensor]:
    return _public(case)


def _leaner_stats(
    case: VisionCase, device: torch.device, sample: Tensor | None
) -> Callable[..., Tensor]:
    function = partial(_public(case, "_with_stats"), sample=sample)
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


def _timm_module(module: str, name: str, *args: Any, **kwargs: Any) -> tuple[nn.Module, Given]:
    """Return timm's attention between its projections, and what stands for the first."""
    built = found(f"timm.models.{module}", name)(*args, **kwargs)
    built.qkv, built.proj = Given(), nn.Identity()
    return built, built.qkv


def _replacement(like: Tensor, *shape: int) -> Tensor:
    """Return what only lends its shape to a module whose projection is given."""
    return like.new_empty(1).expand(shape)


def _timm_cross_covariance(case: VisionCase, device: torch.device) -> Callable[..., Tensor]:
    run = _timm_channels("xcit", "XCA", case, device)
    module = run.keywords["module"]
    del module.temperature

    def with_temperature(qkv: Tensor, temperature: Tensor) -> Tensor:
        module.temperature = temperature[:, None, None]
        return run(qkv)

    return with_temperature


def _timm_channels(name: str, kind: str, case: VisionCase, device: torch.device) -> Any:
    module, given = _timm_module(name, kind, case.width, case.heads)

    def run(qkv: Tensor, module: nn.Module) -> Tensor:
        given.value = qkv
        out = module(_replacement(qkv, case.batch, case.tokens, case.width))
        return out.unflatten(2, (case.heads, case.head_dim))

    return partial(run, module=module)


def _timm_window(case: VisionCase, device: torch.device) -> Callable[..., Tensor]:
    """Cuts all of qkv; inside timm's model the windows are cut before its projection."""
    sides = case.window, case.window
    module, given = _timm_module("davit", "WindowAttention", case.width, sides, case.heads)
    partition = found("timm.models.davit", "window_partition")
    reverse = found("timm.models.davit", "window_reverse")

    def run(qkv: Tensor) -> Tensor:
        given.value = partition(qkv.flatten(3), sides).flatten(1, 2)
        count = len(given.value)
        out = module(_replacement(qkv, count, case.window**2, case.width))
        out = reverse(out.unflatten(1, sides), sides, case.side, case.side)
        return out.unflatten(3, (case.heads, case.head_dim))

    return run


def _timm_outlook(case: VisionCase, device: torch.device) -> Callable[..., Tensor]:
    patches = {"kernel_size": case.kernel, "stride": case.stride, "padding": case.kernel // 2}
    module, _ = _timm_module("volo", "OutlookAttention", case.width, case.heads, **patches)
    module.v, module.attn, module.pool = Given(), Given(), nn.Identity()

    def run(value: Tensor, logits: Tensor) -> Tensor:
        module.v.value, module.attn.value = value.flatten(3), logits
        out = module(_replacement(value, case.batch, case.side, case.side, case.width))
        return out.unflatten(3, (case.heads, case.head_dim))

    return run


def operator_peers(
    leaner: Build, leaner_stats: Callable[..., Any], eager: Build, others: dict[str, Peer]
) -> dict[str, Peer]:
    """Return the peers of an operator: ours, with statistics too, the paper's code, and others."""
    return {
        "leaner": Peer(leaner, "packed", ours=True),
        **every_sample(leaner_stats, "packed"),
        "eager": Peer(eager, "packed"),
        **others,
        "eager_compiled": Peer(
            lambda case, device: compiled(eager(case, device), device), "packed"
        ),
    }


def _peers(timm: Build, sdpa: dict[str, Peer]) -> dict[str, Peer]:
    others = {"timm": Peer(timm, "packed"), **sdpa}
    return operator_peers(_leaner, _leaner_stats, _eager, others)


# Its fused kernels want tokens to lie side by side in memory, which channels do here.
_CHANNELS = {"sdpa": Peer(_sdpa_channels, "packed")}
VISION_PEERS = {
    "cross_covariance": _peers(_timm_cross_covariance, _CHANNELS),
    "channel": _peers(partial(_timm_channels, "davit", "ChannelAttention"), _CHANNELS),
    "window": _peers(_timm_window, every_backend(_sdpa_windows, "windows")),
    "outlook": _peers(_timm_outlook, {}),
}

GRADIENTS = {
    "cross_covariance": ("dqkv", "dtemperature"),
    "channel": ("dqkv",),
    "window": ("dqkv",),
    "outlook": ("dvalue", "dlogits"),
}
COLDEST, HOTTEST = 1.0, 8.0


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

    def _reference(self, *leaves: Tensor) -> Tensor:
        return eager(self.case, *leaves)

    def _results(self, layout: str, out: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
        results = [out, *grads]
        return [join(self.case, t) for t in results] if layout == "windows" else results
