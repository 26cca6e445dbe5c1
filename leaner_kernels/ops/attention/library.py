"""PyTorch's fused attention, for devices that the kernels do not run on."""

import torch
from torch import Tensor

# Bound here, so that attention may itself be put in the place of PyTorch's function.
from torch.nn.functional import scaled_dot_product_attention as _sdpa

from leaner_kernels.ops.attention.reference import visible


def library_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
    key_lengths: Tensor | None,
) -> Tensor:
    """Return (B, H, N, D): the arguments of ``attention``, lengths and causality as one mask."""
    seen = None
    if key_lengths is not None:
        shape = query.shape[2], key.shape[2]
        seen = visible(*shape, key_lengths, is_causal, query.device)
    if seen is not None:
        if attn_mask is None:
            attn_mask = seen
        elif attn_mask.dtype == torch.bool:
            attn_mask = attn_mask & seen
        else:
            attn_mask = attn_mask.masked_fill(~seen, float("-inf"))
        is_causal = False
    if attn_mask is not None:
        attn_mask = torch.atleast_2d(attn_mask)
    return _sdpa(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
