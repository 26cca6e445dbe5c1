"""The attention shapes that are measured, and how much work each of them is at the least.

Letters: B batch, H heads, N tokens, D head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True)
class Case:
    """Self-attention over B sequences of N tokens in H heads of width D.

    ``padded`` sequences have lengths spread evenly from N / 2 to N; keys past a length are hidden,
    but every query row counts. The counts below are of useful work, nothing padded to a tile.
    """

    name: str
    device: str
    batch: int
    heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    causal: bool = False
    padded: bool = False

    @property
    def dtype_name(self) -> str:
        """The dtype without ``torch.``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def scale(self) -> float:
        """What multiplies the scores."""
        return self.head_dim**-0.5

    def key_lengths(self, device: torch.device) -> Tensor | None:
        """Return (B,) int32, or None where every key counts."""
        if not self.padded:
            return None
        half = self.tokens // 2
        spread = torch.linspace(half, self.tokens, self.batch, device=device)
        return spread.to(torch.int32)

    def visible(self, device: torch.device) -> Tensor | None:
        """Return the boolean (1 or B, 1, 1 or N, N) of scores that count, or None for all."""
        seen = None
        if self.causal:
            ones = torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=device)
            seen = ones.tril()[None, None]
        lengths = self.key_lengths(device)
        if lengths is not None:
            inside = torch.arange(self.tokens, device=device) < lengths[:, None, None, None]
            seen = inside if seen is None else seen & inside
        return seen

    @property
    def scores(self) -> int:
        """Visible scores over all heads and sequences."""
        every = self.batch * self.tokens**2
        seen = self.visible(torch.device("cpu"))
        if seen is None:
            return self.heads * every
        return self.heads * int(seen.sum()) * (every // seen.numel())

    def bytes(self, direction: str) -> int:
        """Least traffic: each tensor read or written once; a backward may recompute the rest."""
        rows = self.batch * self.heads * self.tokens
        tensor = rows * self.head_dim * self.dtype.itemsize
        forward = 4 * tensor + 4 * rows  # q, k, v, out; the float32 log-sum-exp
        backward = 7 * tensor  # q, k, v, dout, dq, dk, dv
        return {"forward": forward, "backward": backward, "both": forward + backward}[direction]

    def flops(self, direction: str) -> int:
        """Two products forward; five backward, where the scores are computed again."""
        products = {"forward": 2, "backward": 5, "both": 7}[direction]
        return 2 * products * self.scores * self.head_dim

    def exps(self, direction: str) -> int:
        """One exponential for each score, in each direction."""
        return self.scores * {"forward": 1, "backward": 1, "both": 2}[direction]

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        return {
            "device": self.device,
            "batch": self.batch,
            "heads": self.heads,
            "tokens": self.tokens,
            "head_dim": self.head_dim,
            "dtype": self.dtype_name,
            "causal": self.causal,
            "padded": self.padded,
        }


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32

# The most telling first: a run on borrowed time may end anywhere.
CASES = (
    Case("vit_base", "cuda", 128, 16, 197, 64, _BF16),
    Case("bert", "cuda", 128, 24, 128, 32, _BF16),
    Case("gpt2_64", "cuda", 128, 16, 64, 32, _BF16, causal=True),
    Case("vit_large", "cuda", 64, 30, 197, 64, _BF16),
    Case("gpt2_512", "cuda", 128, 16, 512, 32, _BF16, causal=True),
    Case("vit_base_fp16", "cuda", 128, 16, 197, 64, _FP16),
    Case("cpu_digits", "cpu", 2, 4, 64, 16, _FP32),
    Case("cpu_vit", "cpu", 2, 4, 197, 64, _FP32),
    Case("cpu_causal", "cpu", 2, 4, 64, 32, _BF16, causal=True),
    Case("cpu_padded", "cpu", 2, 4, 128, 32, _BF16, padded=True),
)
