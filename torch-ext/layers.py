"""Layers for ``kernels.kernelize``: only a forward, which uses what the adopting class holds."""

import torch
from torch import nn

from .ops.attention import attention, attention_qkvpacked


class ScaledDotProductAttention(nn.Module):
    """Softmax attention with the arguments of PyTorch's function of this name."""

    can_torch_compile: bool = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attend: (B, H, N, D) in and out, as ``attention`` documents."""
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


class SelfAttention(nn.Module):
    """Attention between tokens in a class with projections ``qkv`` and ``proj``, and ``num_heads``.

    Nothing stands between the projections: a class that normalises q and k or drops out keeps its
    own forward.
    """

    can_torch_compile: bool = True

    num_heads: int
    qkv: nn.Module
    proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend: (B, N, C) in and out."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        return self.proj(attention_qkvpacked(qkv).flatten(2))
