"""The module of window attention."""

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.statistics import AttentionStats
from ..ops.window import check_window, window_attention, window_attention_with_stats
from .capture import Attends, Capturing


class WindowAttention(Capturing):
    """Self-attention inside the windows of a map of any size; zeros fill the last windows.

    Args:
        window_size: rows and columns of a window, or one number for both.

    Other arguments are those of ``ManyHeadAttention``.

    Raises:
        ValueError: if a count or width is not supported.

    ``Capturing`` describes the attributes for ``KappaMonitor``. Captured heads are those of the
    map's own tokens; entropy and norms include the filling, which attends as well. Parameters are
    named as in timm's DaViT (qkv, proj), so that its state dicts load unchanged.
    Source: arXiv:2204.03645; heads * head_dim != dim after arXiv:2505.20802.
    """

    attends: ClassVar[Attends] = "windows"

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        head_dim: int | Literal["split"] = 64,
        window_size: int | tuple[int, int] = 7,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, head_dim)
        self.window_size = check_window(window_size)
        self._set_projections(qkv_bias, proj_bias, proj_drop, device, dtype)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Compute attention inside each window and project.

        Args:
            x: (B, Y, X, dim), floating point. Zeros are added below and to the right of it, before
                the projection, up to whole windows; they are keys and values like any other.
            skip: (B, Y, X, dim), the residual stream to which the caller adds the result; read for
                ``captured``, never added here.

        Returns:
            (B, Y, X, dim), in the dtype of the projection.

        Raises:
            ValueError: if ``window_attention`` raises one, or ``skip`` differs from ``x`` in shape.
        """
        self._check_input(x, skip, "B, Y, X")
        _, rows, cols, _ = x.shape
        below, right = -rows % self.window_size[0], -cols % self.window_size[1]
        if below or right:
            x = F.pad(x, (0, 0, 0, right, 0, below))
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))

        def with_stats(*args: Any, **params: Any) -> AttentionStats:
            stats = window_attention_with_stats(*args, **params)
            if stats.heads is None:
                return stats
            heads = stats.heads.unflatten(1, (rows + below, cols + right))
            return stats._replace(heads=heads[:, :rows, :cols].flatten(1, 2))

        return self._run_operator(
            lambda a: self._project(a[:, :rows, :cols]),
            *(window_attention, with_stats, qkv, self.window_size),
            store={"skip": skip},
        )

    def columns(self, tokens: int) -> int:
        """Return how many entries a softmax row has: the tokens of a window."""
        return self.window_size[0] * self.window_size[1]

    def extra_repr(self) -> str:
        """Show the sizes in the printed module."""
        return f"{super().extra_repr()}, window_size={self.window_size}"
