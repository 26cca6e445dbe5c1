"""Define the attention shapes to measure, and the least work that each needs.

Letters: B batch, H heads, R query rows, N tokens (keys), D head dimension, T rows of all sequences.
"""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

_PASSES = {"forward": slice(0, 1), "backward": slice(1, 2), "both": slice(0, 2)}
DIRECTIONS = tuple(_PASSES)


class Case:
    """Base class of the cases of attention; counts are of useful work.

    Attributes:
        least_bytes: bytes of the forward and of the backward if each tensor is read or written
            once; a backward may recompute the rest.
        computed: operations of the products of the forward and of the backward.
    """

    device: str
    head_dim: int
    dtype: torch.dtype
    least_bytes: tuple[int, int]
    computed: tuple[int, int]

    def bytes(self, direction: str) -> int:
        """Return the least bytes that one of ``DIRECTIONS`` moves."""
        return sum(self.least_bytes[_PASSES[direction]])

    def flops(self, direction: str) -> int:
        """Return the operations of one of ``DIRECTIONS``."""
        return sum(self.computed[_PASSES[direction]])

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        return {"device": self.device, "dtype": str(self.dtype).removeprefix("torch.")}

    @property
    def scale(self) -> float:
        """The factor of the scores, except in ``cross_covariance``, which learns a temperature."""
        return self.head_dim**-0.5


@dataclass(frozen=True)
class AttentionCase(Case):
    """Attention over B sequences of N tokens in H heads of width D.

    Attributes:
        name: an identifier; cases of the CPU begin with ``cpu_``.
        device: ``cuda`` or ``cpu``.
        batch: B.
        heads: H.
        tokens: N, the longest sequence where they differ.
        head_dim: D.
        dtype: dtype of every tensor.
        causal: row i sees columns 0 to i.
        queries: R if it differs from N.
        lengths: B lengths, the longest N, of sequences packed end to end: rows past a length do not
            count. Empty if every sequence has N tokens.
        window: number of keys before its own that a row of a causal case sees; 0 for all.
    """

    name: str
    device: str
    batch: int
    heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    causal: bool = False
    queries: int | None = None
    lengths: tuple[int, ...] = ()
    window: int = 0

    @property
    def window_size(self) -> tuple[int, int]:
        """The window as flash-attention states it, (left, right)."""
        return (self.window, 0) if self.window else (-1, -1)

    @property
    def rows(self) -> int:
        """R, the query rows of a sequence, or of the longest."""
        return self.tokens if self.queries is None else self.queries

    @property
    def crossed(self) -> bool:
        """Whether there are not as many query rows as keys."""
        return self.rows != self.tokens

    @property
    def ragged(self) -> bool:
        """Whether sequences of different lengths lie end to end."""
        return bool(self.lengths)

    @property
    def query_rows(self) -> int:
        """Query rows of all sequences that count."""
        return sum(self.lengths) or self.batch * self.rows

    @property
    def key_rows(self) -> int:
        """Keys of all sequences, including hidden ones, which get a gradient too."""
        return sum(self.lengths) or self.batch * self.tokens

    def key_lengths(self, device: torch.device) -> Tensor | None:
        """Return (B,) int32, or None if every key counts."""
        if not self.ragged:
            return None
        return torch.tensor(self.lengths, dtype=torch.int32, device=device)

    def offsets(self, device: torch.device, queries: bool = False) -> Tensor:
        """Return (B + 1,) int32: where each sequence begins end to end, and where the last ends.

        Args:
            device: device of the result.
            queries: count query rows instead of keys.
        """
        equal = [self.rows if queries else self.tokens] * self.batch
        ends = torch.tensor((0, *(self.lengths or equal)), device=device).cumsum(0)
        return ends.to(torch.int32)

    def visible(self, device: torch.device) -> Tensor | None:
        """Return the boolean (1 or B, 1, 1 or R, N) of scores that count, or None for all."""
        seen = None
        if self.causal:
            ones = torch.ones(self.rows, self.tokens, dtype=torch.bool, device=device)
            seen = (ones.tril().triu(-self.window) if self.window else ones.tril())[None, None]
        lengths = self.key_lengths(device)
        if lengths is not None:
            inside = torch.arange(self.tokens, device=device) < lengths[:, None, None, None]
            seen = inside if seen is None else seen & inside
        return seen

    @property
    def scores(self) -> int:
        """Visible scores over all heads and sequences."""
        lengths = self.key_lengths(torch.device("cpu"))
        keys = [self.tokens] * self.batch if lengths is None else lengths.tolist()
        rows = self.lengths or [self.rows] * self.batch
        pairs = zip(rows, keys, strict=True)
        outside = max(self.tokens - self.window - 1, 0) if self.window else 0
        before = self.batch * outside * (outside + 1) // 2  # scores before the window of a row
        return self.heads * (sum(_seen(r, k, self.causal) for r, k in pairs) - before)

    @property
    def least_bytes(self) -> tuple[int, int]:
        """Bytes of the forward and of the backward."""
        rows, keys = (n * self.heads for n in (self.query_rows, self.key_rows))
        queries, keys = (n * self.head_dim * self.dtype.itemsize for n in (rows, keys))
        forward = 2 * queries + 2 * keys + 4 * rows  # q, out; k, v; the float32 log-sum-exp
        return forward, 3 * queries + 4 * keys  # q, dout, dq; k, v, dk, dv

    @property
    def computed(self) -> tuple[int, int]:
        """Two products in the forward; five in the backward, which recomputes the scores."""
        product = 2 * self.scores * self.head_dim
        return 2 * product, 5 * product

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        names = "batch", "heads", "rows", "tokens", "head_dim", "causal"
        facts = super().facts() | {name: getattr(self, name) for name in names}
        facts["lengths"] = list(self.lengths)
        return facts | ({"window": self.window} if self.window else {})


def _seen(rows: int, keys: int, causal: bool) -> int:
    """Count the scores of one head of one sequence that its rows may see."""
    if not causal:
        return rows * keys
    square = min(rows, keys)
    return square * (square + 1) // 2 + (rows - square) * keys


def image_lengths(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Return patches per image as native-resolution training packs them: spread evenly, mixed."""
    step = (longest - shortest) / (count - 1)
    lengths = [round(shortest + i * step) for i in range(count)]
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


def text_lengths(count: int, median: int, longest: int) -> tuple[int, ...]:
    """Return tokens per document: quantiles of a log-normal with sigma 1, cut off, mixed.

    The longest is always ``longest``.
    """
    normal = NormalDist()
    quantiles = ((i + 0.5) / count for i in range(count - 1))
    lengths = [round(median * math.exp(normal.inv_cdf(q))) for q in quantiles]
    lengths = [max(1, min(n, longest)) for n in lengths] + [longest]
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_IMAGES, _TEXTS = image_lengths(128, 49, 256), text_lengths(128, 128, 1024)

# The most informative first, because a run on a rented GPU may end at any time.
CASES = (
    AttentionCase("vit_base", "cuda", 128, 16, 197, 64, _BF16),
    AttentionCase("bert", "cuda", 128, 24, 128, 32, _BF16),
    AttentionCase("gpt2_64", "cuda", 128, 16, 64, 32, _BF16, causal=True),
    AttentionCase("vit_large", "cuda", 64, 30, 197, 64, _BF16),
    AttentionCase("gpt2_512", "cuda", 128, 16, 512, 32, _BF16, causal=True),
    # NaViT: images of 49 to 256 patches in one row of tokens.
    AttentionCase("navit", "cuda", 128, 16, 256, 64, _BF16, lengths=_IMAGES),
    # ViT-B/16 at 384 pixels.
    AttentionCase("vit_384", "cuda", 64, 16, 577, 64, _BF16),
    # DaViT-T, first stage: 64 windows of 7 x 7 in each of 128 images.
    AttentionCase("davit_stage1", "cuda", 8192, 3, 49, 32, _BF16),
    # TNT-B, inner: 16 pixels of each of 196 patches of 128 images.
    AttentionCase("tnt", "cuda", 25088, 4, 16, 10, _BF16),
    AttentionCase("long_1024", "cuda", 32, 16, 1024, 64, _BF16),
    # ViT-H/14: 257 tokens, heads of width 80.
    AttentionCase("vit_huge", "cuda", 64, 16, 257, 80, _BF16),
    # XCiT-M, class attention: one query and 197 keys.
    AttentionCase("xcit_class", "cuda", 128, 16, 197, 32, _BF16, queries=1),
    AttentionCase("lra_1024", "cuda", 16, 2, 1024, 32, _BF16),
    AttentionCase("long_2048", "cuda", 16, 16, 2048, 64, _BF16),
    AttentionCase("long_2048_wide", "cuda", 8, 16, 2048, 128, _BF16, causal=True),
    AttentionCase("long_2048_sliding", "cuda", 16, 16, 2048, 64, _BF16, causal=True, window=256),
    AttentionCase("text", "cuda", 128, 16, 1024, 64, _BF16, causal=True, lengths=_TEXTS),
    # DaViT-B, third stage, where 9 of its 12 blocks are: 4 windows in each image.
    AttentionCase("davit_stage3", "cuda", 512, 16, 49, 32, _BF16),
    AttentionCase("vit_base_fp16", "cuda", 128, 16, 197, 64, _FP16),
    AttentionCase("lra_2048", "cuda", 16, 2, 2048, 32, _BF16),
    AttentionCase("lra_4096", "cuda", 16, 2, 4096, 32, _BF16),
    AttentionCase("cpu_digits", "cpu", 2, 4, 64, 16, _FP32),
    AttentionCase("cpu_vit", "cpu", 2, 4, 197, 64, _FP32),
    AttentionCase("cpu_causal", "cpu", 2, 4, 64, 32, _BF16, causal=True),
    AttentionCase("cpu_sliding", "cpu", 2, 4, 128, 32, _FP32, causal=True, window=24),
    AttentionCase("cpu_tnt", "cpu", 64, 4, 16, 10, _FP32),
    AttentionCase("cpu_class", "cpu", 8, 4, 197, 32, _FP32, queries=1),
    AttentionCase("cpu_ragged", "cpu", 4, 4, 128, 32, _FP32, lengths=(49, 128, 16, 81)),
)
