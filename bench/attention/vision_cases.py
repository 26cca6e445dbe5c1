"""Attention cases of XCiT, DaViT and VOLO, and the least work that each of them needs.

Letters: B batch, N tokens of a square map, H heads, D head dimension, K side of an outlook's patch.
"""

from dataclasses import dataclass
from typing import Any

import torch

from bench.attention.cases import Scores

# Products of the forward and of the backward, where the scores are computed again: those of an
# outlook come out of a projection.
PRODUCTS = {"cross_covariance": (2, 5), "channel": (2, 5), "window": (2, 5), "outlook": (1, 2)}


@dataclass(frozen=True)
class VisionCase(Scores):
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
    def tokens(self) -> int:
        """N."""
        return self.side * self.side

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def key_rows(self) -> int:
        """Tokens of all maps."""
        return self.batch * self.tokens

    @property
    def places(self) -> int:
        """Places along a side that an outlook looks from."""
        return (self.side + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1

    @property
    def params(self) -> dict[str, Any]:
        """What the public function takes beside tensors."""
        outlook = {
            "kernel_size": self.kernel,
            "stride": self.stride,
            "padding": self.kernel // 2,
        }
        return {"window": {"window_size": self.window}, "outlook": outlook}.get(self.op, {})

    @property
    def operator_params(self) -> tuple[Any, ...]:
        """What the operator below it takes beside tensors."""
        of_op = {
            "cross_covariance": (1e-12,),
            "channel": (self.scale,),
            "window": (self.window, self.window, self.scale),
            "outlook": (self.kernel, self.stride, self.kernel // 2, self.scale),
        }
        return of_op[self.op]

    @property
    def meta_inputs(self) -> tuple[torch.Tensor, ...]:
        """The operator's inputs."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": "meta"}
        return tuple(torch.empty(shape, **options) for shape in self.input_shapes)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of the output: channels see N tokens in a row, the others a map."""
        covariance = self.op in ("cross_covariance", "channel")
        place = (self.tokens,) if covariance else (self.side, self.side)
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
            "cross_covariance": self.head_dim**2,
            "channel": self.head_dim**2,
            "window": self.tokens * self.window**2,
            "outlook": self.places**2 * self.kernel**4,
        }
        return self.batch * self.heads * of_head[self.op]

    def bytes(self, direction: str) -> int:
        """Least traffic: each tensor read or written once; a backward may recompute the rest."""
        size = self.key_rows * self.width * self.dtype.itemsize
        if self.op == "outlook":
            logits = self.scores * self.dtype.itemsize
            # value, out; value, dout, dvalue: the logits are read, and written as a gradient.
            forward, backward = 2 * size + logits, 3 * size + 2 * logits
        else:
            forward, backward = 4 * size, 7 * size  # q, k, v, out; q, k, v, dout, dq, dk, dv
        return {"forward": forward, "backward": backward, "both": forward + backward}[direction]

    def flops(self, direction: str) -> int:
        """Each product takes two operations for each score and what it sums over or gives."""
        forward, backward = PRODUCTS[self.op]
        products = {"forward": forward, "backward": backward, "both": forward + backward}
        covariance = self.op in ("cross_covariance", "channel")
        other = self.tokens if covariance else self.head_dim
        return 2 * products[direction] * self.scores * other

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        size = f"{self.batch}·{self.heads}·{self.side}²·{self.head_dim}"
        of_op = {
            "window": f"windows {self.window}×{self.window}",
            "outlook": f"{self.kernel}×{self.kernel} around {self.places}² places",
        }
        return {
            "device": self.device,
            "dtype": self.dtype_name,
            "op": self.op,
            "size": ", ".join([size, *([of_op[self.op]] if self.op in of_op else [])]),
        }


_BF16, _FP32 = torch.bfloat16, torch.float32

# The most telling of each operator first, at the paper's batch for one of 8 GPUs.
VISION_CASES = (
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
