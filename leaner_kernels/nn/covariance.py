"""The modules of attention between channels, as in XCiT and DaViT."""

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..ops.covariance import (
    channel_attention,
    channel_attention_with_stats,
    cross_covariance_attention,
    cross_covariance_attention_with_stats,
)
from ..ops.statistics import AttentionStats
from .capture import Attends, Capturing


class _BetweenChannels(Capturing):
    attends: ClassVar[Attends] = "channels"

    def columns(self, tokens: int) -> int:
        """Return how many entries a softmax row has: the channels of a head."""
        return self.head_dim

    def _attend(
        self,
        x: Tensor,
        skip: Tensor | None,
        attend: Callable[..., Tensor],
        attend_with_stats: Callable[..., AttentionStats],
        *weights: Tensor,
        layer_scale: Tensor | None = None,
    ) -> Tensor:
        self._check_input(x, skip, "B, N")
        qkv = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, self.head_dim)
        store = {"skip": skip, "layer_scale": layer_scale}
        operators = attend, attend_with_stats
        return self._run_operator(self._project, *operators, qkv, *weights, store=store)


class CrossCovarianceAttention(_BetweenChannels):
    """XCiT's attention between channels, whose width may differ from the width of its input.

    Arguments are those of ``ManyHeadAttention`` but ``attn_drop``; ``head_dim``, the channels of a
    head, is up to 64 on a GPU.

    Raises:
        ValueError: if a count or width is not supported.

    ``Capturing`` describes the attributes for ``KappaMonitor``. Parameters are named as in timm's
    XCA (qkv, temperature, proj), so that its state dicts load unchanged.
    Source: arXiv:2106.09681, section 3.2.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        head_dim: int | Literal["split"] = 64,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, head_dim)
        self._set_projections(qkv_bias, proj_bias, proj_drop, device, dtype)
        self.temperature: nn.Parameter = nn.Parameter(
            torch.ones(num_heads, 1, 1, device=device, dtype=dtype)
        )

    def forward(
        self, x: Tensor, skip: Tensor | None = None, layer_scale: Tensor | None = None
    ) -> Tensor:
        """Compute attention between channels and project.

        Args:
            x: (B, N, dim), floating point.
            skip: (B, N, dim), the residual stream to which the caller adds the result; read for
                ``captured``, never added here.
            layer_scale: (dim,), by which the caller multiplies the result first; likewise.

        Returns:
            (B, N, dim), in the dtype of the projection.

        Raises:
            ValueError: if ``cross_covariance_attention`` raises one, or a shape differs.
        """
        return self._attend(
            x,
            skip,
            cross_covariance_attention,
            cross_covariance_attention_with_stats,
            self.temperature,
            layer_scale=layer_scale,
        )


class ChannelAttention(_BetweenChannels):
    """DaViT's attention between channels, whose width may differ from the width of its input.

    Arguments are those of ``CrossCovarianceAttention``; DaViT calls heads groups.

    Raises:
        ValueError: if a count or width is not supported.

    ``Capturing`` describes the attributes for ``KappaMonitor``. Parameters are named as in timm's
    ChannelAttention (qkv, proj), so that its state dicts load unchanged.
    Source: arXiv:2204.03645, section 3.3.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        head_dim: int | Literal["split"] = 32,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, head_dim)
        self._set_projections(qkv_bias, proj_bias, proj_drop, device, dtype)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Compute attention between channels and project.

        Args:
            x: (B, N, dim), floating point.
            skip: as in ``CrossCovarianceAttention``.

        Returns:
            (B, N, dim), in the dtype of the projection.

        Raises:
            ValueError: if ``channel_attention`` raises one, or a shape differs.
        """
        return self._attend(x, skip, channel_attention, channel_attention_with_stats)
