"""The modules of attention in vision: between channels, inside windows, and to neighbours."""

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import outlook, window
from ..ops.covariance import (
    channel_attention,
    channel_attention_with_stats,
    cross_covariance_attention,
    cross_covariance_attention_with_stats,
)
from ..ops.statistics import AttentionStats
from .capture import Attends, Capturing


class ChannelAttention(Capturing):
    """DaViT's attention between channels, whose width may differ from the width of its input.

    Arguments are those of ``ManyHeadAttention`` but ``attn_drop``; ``head_dim``, the channels of a
    head, is up to 64 on a GPU. DaViT calls heads groups.

    Raises:
        ValueError: if a count or width is not supported.

    ``Capturing`` describes the attributes for ``KappaMonitor``. Parameters are named as in timm's
    ChannelAttention (qkv, proj), so that its state dicts load unchanged.
    Source: arXiv:2204.03645, section 3.3.
    """

    attends: ClassVar[Attends] = "channels"

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        head_dim: int | Literal["split"] = 32,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, head_dim)
        self._set_projections(qkv_bias, proj_bias, proj_drop, device, dtype)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Compute attention between channels and project.

        Args:
            x: (B, N, dim), floating point.
            skip: (B, N, dim), the residual stream to which the caller adds the result; read for
                ``captured``, never added here.

        Returns:
            (B, N, dim), in the dtype of the projection.

        Raises:
            ValueError: if ``channel_attention`` raises one, or a shape differs.
        """
        self._check_input(x, skip, "B, N")
        qkv = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, self.head_dim)
        operators = channel_attention, channel_attention_with_stats
        return self._run_operator(self._project, *operators, qkv, store={"skip": skip})

    def columns(self, tokens: int) -> int:
        """Return how many entries a softmax row has: the channels of a head."""
        return self.head_dim


class CrossCovarianceAttention(ChannelAttention):
    """XCiT's attention between channels: that of ``ChannelAttention`` by cosines.

    Arguments are those of ``ChannelAttention``; ``head_dim`` is 64 when omitted.

    Raises:
        ValueError: if a count or width is not supported.

    Parameters are named as in timm's XCA (qkv, temperature, proj), so that its state dicts load
    unchanged.
    Source: arXiv:2106.09681, section 3.2.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        head_dim: int | Literal["split"] = 64,
        *args: Any,
        **options: Any,
    ) -> None:
        super().__init__(dim, num_heads, head_dim, *args, **options)
        ones = self.qkv.weight.new_ones(num_heads, 1, 1)
        self.temperature: nn.Parameter = nn.Parameter(ones)

    def forward(
        self, x: Tensor, skip: Tensor | None = None, layer_scale: Tensor | None = None
    ) -> Tensor:
        """Compute attention between channels and project.

        Args:
            x: (B, N, dim), floating point.
            skip: as in ``ChannelAttention``.
            layer_scale: (dim,), by which the caller multiplies the result before it adds it to
                ``skip``; read for ``captured`` too.

        Returns:
            (B, N, dim), in the dtype of the projection.

        Raises:
            ValueError: if ``cross_covariance_attention`` raises one, or a shape differs.
        """
        self._check_input(x, skip, "B, N")
        qkv = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, self.head_dim)
        operators = cross_covariance_attention, cross_covariance_attention_with_stats
        store = {"skip": skip, "layer_scale": layer_scale}
        return self._run_operator(self._project, *operators, qkv, self.temperature, store=store)


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
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, head_dim)
        self.window_size = window.check_window(window_size)
        self._set_projections(qkv_bias, proj_bias, proj_drop, device, dtype)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Compute attention inside each window and project.

        Args:
            x: (B, Y, X, dim), floating point. Zeros are added below and to the right of it, before
                the projection, up to whole windows; they are keys and values like any other.
            skip: (B, Y, X, dim), as in ``ChannelAttention``.

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
            stats = window.window_attention_with_stats(*args, **params)
            if stats.heads is None:
                return stats
            heads = stats.heads.unflatten(1, (rows + below, cols + right))
            return stats._replace(heads=heads[:, :rows, :cols].flatten(1, 2))

        return self._run_operator(
            lambda a: self._project(a[:, :rows, :cols]),
            *(window.window_attention, with_stats, qkv, self.window_size),
            store={"skip": skip},
        )

    def columns(self, tokens: int) -> int:
        """Return how many entries a softmax row has: the tokens of a window."""
        return self.window_size[0] * self.window_size[1]


class OutlookAttention(Capturing):
    """VOLO's outlook attention, whose width may differ from the width of its input.

    The probabilities of a window are a projection of the mean over the ``stride`` x ``stride``
    pixels where it starts, without queries and keys.

    Args:
        kernel_size: pixels along the side of a window, 1 to 7.
        padding: pixels by which the first window is outside the map.
        stride: pixels from a window to the next, 1 to 4.

    Other arguments are those of ``ManyHeadAttention``; ``qkv_bias`` adds a bias to the projection
    of the values, the only one of the three.

    Raises:
        ValueError: if a count or width is not supported.

    ``Capturing`` describes the attributes for ``KappaMonitor``. Parameters are named as in timm's
    OutlookAttention (v, attn, proj), so that its state dicts load unchanged.
    Source: arXiv:2106.13112, section 3.1; heads * head_dim != dim after arXiv:2505.20802.
    """

    attends: ClassVar[Attends] = "neighbours"

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        head_dim: int | Literal["split"] = 32,
        kernel_size: int = 3,
        padding: int = 1,
        stride: int = 2,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        *,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, head_dim)
        self.kernel_size, self.stride, self.padding = outlook.check_window(
            kernel_size, stride, padding
        )
        width = self.num_heads * self.head_dim
        self.v: nn.Linear = nn.Linear(dim, width, bias=qkv_bias, device=device, dtype=dtype)
        self.attn: nn.Linear = nn.Linear(
            dim, kernel_size**4 * num_heads, device=device, dtype=dtype
        )
        self.proj: nn.Linear = nn.Linear(width, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop: nn.Dropout = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Compute attention inside the windows, sum over them and project.

        Args:
            x: (B, Y, X, dim), floating point. The number of windows must equal the number of
                pixels of the pooled map, ``ceil(Y / stride)`` by ``ceil(X / stride)``.
            skip: (B, Y, X, dim), as in ``ChannelAttention``.

        Returns:
            (B, Y, X, dim), in the dtype of the projection.

        Raises:
            ValueError: if ``outlook_attention`` raises one, or ``skip`` is not shaped as ``x``.
        """
        self._check_input(x, skip, "B, Y, X")
        value = self.v(x).unflatten(-1, (self.num_heads, self.head_dim))
        pooled = F.avg_pool2d(x.permute(0, 3, 1, 2), self.stride, ceil_mode=True)
        places = self.kernel_size**2
        logits = self.attn(pooled.permute(0, 2, 3, 1))
        logits = logits.unflatten(-1, (self.num_heads, places, places))
        return self._run_operator(
            self._project,
            *(outlook.outlook_attention, outlook.outlook_attention_with_stats, value, logits),
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            store={"skip": skip},
        )

    def columns(self, tokens: int) -> int:
        """Return how many entries a softmax row has: the pixels of a window."""
        return self.kernel_size**2
