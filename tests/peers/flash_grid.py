"""What FlashAttention's tests vary, as data, and a plain attention that takes all of it.

After tests/test_flash_attn.py of Dao-AILab/flash-attention: its values, in a batch of one and few
heads. The cross of them all has too many cases for a CPU: each ``STEP``-th is taken, so that every
two values meet. Causality is aligned to the last row and key there, as ``causal_lower_right`` is.
"""

from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = torch.float16, torch.bfloat16
HEADS = {"mha": (2, 2), "mqa": (2, 1), "gqa": (4, 2)}
DIMS = 32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256
SIZES = (
    *((113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)),
    *((1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)),
)
GRID = {
    "size": SIZES,
    "dim": DIMS,
    "heads": tuple(HEADS),
    "dtype": DTYPES,
    "causal": (False, True),
    "local": (False, True),
    # Slopes are float32 there; of half precision, they are what is exact.
    "alibi": ("", "alibi", "alibi_half"),
    "softcap": (0.0, 50.0),
    "dropout_p": (0.0, 0.17),
}
STEP = 71


class FlashGridCase(NamedTuple):
    """One call, by the names of ``GRID``."""

    size: tuple[int, int]
    dim: int
    heads: str
    dtype: torch.dtype
    causal: bool
    local: bool
    alibi: str
    softcap: float
    dropout_p: float

    def __str__(self) -> str:
        rows, cols = self.size
        said = [self.alibi if n == "alibi" else n for n in self._fields[4:] if getattr(self, n)]
        return "-".join([f"{rows}x{cols}x{self.dim}", self.heads, str(self.dtype)[6:], *said])

    @property
    def small(self) -> bool:
        """Whether it is made in no time, and stands for the rest."""
        return max(self.size) <= 256 and self.dim in (32, 59, 64, 160)


CASES = [FlashGridCase(*values) for values in product(*GRID.values())][::STEP]


def window(case: FlashGridCase) -> tuple[int, int]:
    """Return how many keys to the left and to the right a row sees, -1 for all."""
    generator = torch.Generator().manual_seed(case.size[1] + case.dim)
    left, right = -1, -1
    if case.local:
        left, right = torch.randint(0, case.size[1], (2,), generator=generator).tolist()
    return left, 0 if case.causal else right


def seen(rows: int, cols: int, left: int, right: int) -> Tensor:
    """Return which keys a row sees in a window about its place, counted from the end: (N, M)."""
    apart = torch.arange(cols) - torch.arange(rows)[:, None] - (cols - rows)
    return (apart >= (-left if left >= 0 else -cols - rows)) & (
        apart <= (right if right >= 0 else cols + rows)
    )


def alibi(heads: int, rows: int, cols: int) -> Tensor:
    """Press et al. 2022: minus a slope times the distance, (1, H, N, M) float32."""
    slopes = torch.rand(1, heads, 1, 1, generator=torch.Generator().manual_seed(3)) * 0.3
    return -slopes * (torch.arange(cols) - torch.arange(rows)[:, None] - (cols - rows)).abs()


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return normal numbers of ``dtype`` that require a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
    scale_keys: bool = False,
) -> Tensor:
    """Attend with all scores in memory, in the dtype of ``query``; (B, H, N, D), keys of any group.

    Args:
        query: (B, H, N, D).
        key: (B, Hkv, M, D).
        value: (B, Hkv, M, D).
        bias: what is added to the scores.
        mask: True is seen; a row that sees nothing is zero.
        softcap: c tanh(s / c) stands for the score s.
        dropout_p: of PyTorch's generator, in order, unless ``keep`` holds what stays.
        keep: (B, H, N, M), True stays.
        scale_keys: scale the keys, not the queries: rounded elsewhere.
    """
    ratio, scale = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5
    key, value = (t.repeat_interleave(ratio, 1) for t in (key, value))
    scores = query @ (key * scale).mT if scale_keys else (query * scale) @ key.mT
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    if bias is not None:
        scores = (scores + bias).to(scores.dtype)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    shares = scores.softmax(-1)
    if mask is not None:
        shares = shares.masked_fill(~mask, 0)
    if keep is None:
        return F.dropout(shares, dropout_p) @ value
    return (shares * keep / (1 - dropout_p)) @ value


def results(out: Tensor, leaves: Any, seed: int = 9) -> dict[str, Tensor]:
    """Return the output and the gradients of ``leaves``, for one direction."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(out.shape, generator=generator).to(leaves[0].dtype).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, direction)
    return {"out": out.detach()} | {f"d{i}": grad for i, grad in enumerate(grads)}
