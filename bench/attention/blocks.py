"""Whole attention blocks of XCiT, DaViT and VOLO, projections included, against timm's modules.

What a model gets out of the operators: timm also cuts its windows and makes its copies here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bench.attention.vision_cases import VISION_CASES, VisionCase
from bench.attention.vision_peers import cross_covariance
from bench.harness.gate import Problem
from bench.harness.peers import Peer, compiled, found
from leaner_kernels import nn as ours


@dataclass(frozen=True)
class BlockCase:
    """A module on a batch of maps, its weights in the dtype of the case.

    Attributes:
        inner: the attention between its projections.
        dim: width of a token, where heads widen it.
    """

    inner: VisionCase
    dim: int

    @property
    def name(self) -> str:
        """An identifier; cases of the CPU begin with ``cpu_``."""
        return f"{self.inner.name}_block"

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return self.inner.device

    @property
    def dtype(self) -> torch.dtype:
        """Of every tensor."""
        return self.inner.dtype

    @property
    def key_rows(self) -> int:
        """Tokens of all maps."""
        return self.inner.key_rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the input and of the output."""
        return *self.inner.out_shape[:-2], self.dim

    @cached_property
    def weights(self) -> dict[str, torch.Size]:
        """Shapes of the parameters, by name."""
        return {name: weight.shape for name, weight in leaner_module(self).named_parameters()}

    def bytes(self, direction: str) -> int:
        """Least traffic: input, output, weights and their gradients, each read or written once."""
        size = self.key_rows * self.dim
        weights = sum(shape.numel() for shape in self.weights.values())
        forward, backward = 2 * size + weights, 3 * size + 2 * weights
        elements = {"forward": forward, "backward": backward, "both": forward + backward}
        return elements[direction] * self.dtype.itemsize

    def flops(self, direction: str) -> int:
        """Those of the attention, and of the projections: twice as many in the backward."""
        rows = dict.fromkeys(self.weights, self.key_rows)
        if self.inner.op == "outlook":
            rows["attn.weight"] = self.inner.batch * self.inner.places**2
        matrices = {name: shape for name, shape in self.weights.items() if len(shape) == 2}
        forward = sum(2 * rows[name] * shape.numel() for name, shape in matrices.items())
        times = {"forward": 1, "backward": 2, "both": 3}[direction]
        return self.inner.flops(direction) + times * forward

    def exps(self, direction: str) -> int:
        """Those of the attention."""
        return self.inner.exps(direction)

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        facts = self.inner.facts()
        return facts | {
            "op": f"{self.inner.op}_block",
            "size": f"{facts['size']}, width {self.dim}",
        }


def leaner_module(case: BlockCase) -> nn.Module:
    """Return our module, without values."""
    inner, sizes = case.inner, {"num_heads": case.inner.heads, "head_dim": case.inner.head_dim}
    kind = {
        "cross_covariance": ours.CrossCovarianceAttention,
        "channel": ours.ChannelAttention,
        "window": ours.WindowAttention,
        "outlook": ours.OutlookAttention,
    }[inner.op]
    return kind(case.dim, **sizes, **inner.params, device="meta")


class WideXCA(nn.Module):
    """XCiT's attention with heads of any width, as timm computes it between its projections."""

    def __init__(self, like: nn.Module, dim: int, heads: int, head_dim: int):
        """Take the temperature of timm's own module."""
        super().__init__()
        self.sizes = 3, heads, head_dim
        self.temperature = like.temperature
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, N, dim) of (B, N, dim)."""
        out = cross_covariance(self.qkv(x).unflatten(-1, self.sizes), self.temperature[:, 0, 0])
        return self.proj(out.flatten(2))


def timm_module(case: BlockCase) -> nn.Module:
    """Return timm's module, without values.

    Raises:
        AbsentError: timm is not installed.
    """
    inner = case.inner
    sizes = case.dim, inner.heads
    with torch.device("meta"):
        if inner.op == "outlook":
            return found("timm.models.volo", "OutlookAttention")(*sizes, **inner.params)
        if inner.op == "channel":
            return found("timm.models.davit", "ChannelAttention")(*sizes, qkv_bias=True)
        if inner.op == "window":
            return _on_map(case)
        module = found("timm.models.xcit", "XCA")(*sizes, qkv_bias=True)
        wide = inner.width != case.dim
        return WideXCA(module, case.dim, inner.heads, inner.head_dim) if wide else module


def _on_map(case: BlockCase) -> nn.Module:
    """Return timm's window attention with what its block does before and after."""
    sides = case.inner.window, case.inner.window
    attention = found("timm.models.davit", "WindowAttention")
    partition = found("timm.models.davit", "window_partition")
    reverse = found("timm.models.davit", "window_reverse")

    class OnMap(attention):
        def forward(self, x: Tensor) -> Tensor:
            windows = super().forward(partition(x, sides).flatten(1, 2))
            return reverse(windows.unflatten(1, sides), sides, *x.shape[1:3])

    return OnMap(case.dim, sides, case.inner.heads)


Module = Callable[[BlockCase], nn.Module]


def _function(module: nn.Module, case: BlockCase) -> Callable[..., Tensor]:
    """Return a module as a function of its input and its weights."""

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return functional_call(module, dict(zip(case.weights, weights, strict=True)), (x,))

    return run


def _peer(build: Module, is_compiled: bool = False, is_ours: bool = False) -> Peer:
    def function(case: BlockCase, device: torch.device) -> Callable[..., Tensor]:
        run = _function(build(case), case)
        return compiled(run, device) if is_compiled else run

    return Peer(function, "packed", ours=is_ours)


BLOCK_PEERS = {
    "leaner": _peer(leaner_module, is_ours=True),
    "timm": _peer(timm_module),
    "leaner_compiled": _peer(leaner_module, is_compiled=True, is_ours=True),
    "timm_compiled": _peer(timm_module, is_compiled=True),
}


class BlockProblem(Problem):
    """Tensors of a ``BlockCase`` with the truth about them: timm's module in float64."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the results that are compared."""
        return "out", "dx", *(f"d{name}" for name in self.case.weights)

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        case = self.case

        def draw(shape: Sequence[int], name: str = "") -> Tensor:
            drawn = torch.randn(shape, device=self.device, generator=generator)
            if name.endswith("weight"):
                drawn *= shape[1] ** -0.5
            return (drawn.abs() + 1 if name == "temperature" else drawn).to(case.dtype)

        weights = (draw(shape, name) for name, shape in case.weights.items())
        return draw(case.shape), *weights, draw(case.shape)

    def _reference(self, *leaves: Tensor) -> Tensor:
        return BLOCK_PEERS["timm"].build(self.case, self.device)(*leaves)


def blocks() -> list[BlockCase]:
    """Return the blocks of the first case of each operator, of its lean one, and of a CPU."""
    by_name = {case.name: case for case in VISION_CASES}
    widths = {
        "xcit_m": 512,
        "volo_d3_outlook": 256,
        "davit_channel3": 512,
        "davit_window3": 512,
        "xcit_m_lean": 512,
        "volo_d3_outlook_lean": 256,
        "davit_channel3_lean": 512,
        "davit_window3_lean": 512,
        "davit_channel1": 128,
        "davit_window1": 128,
        "cpu_xca": 64,
        "cpu_channel": 64,
        "cpu_window": 64,
        "cpu_outlook": 64,
    }
    return [BlockCase(by_name[name], dim) for name, dim in widths.items()]


BLOCK_CASES = tuple(blocks())
