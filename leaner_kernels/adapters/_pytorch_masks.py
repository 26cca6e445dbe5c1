"""The masks of nn.MultiheadAttention, in which True is hidden, as ``attention`` takes masks."""

import torch
import torch.nn.functional as F
from torch import Tensor


def one_mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    scores: tuple[int, int, int, int],
    appended: int,
    dtype: torch.dtype,
) -> tuple[Tensor | None, bool]:
    """Return one mask as ``attention`` takes it, or None, and whether to be causal instead.

    Args:
        attn_mask: (N, M) or (B * H, N, M): boolean (True is hidden) or added to the scores. It is
            not read where ``is_causal`` says what it is and there is no padding.
        key_padding_mask: (B, M), likewise; (M,) of a batch of one.
        is_causal: ``attn_mask`` hides the future.
        scores: (B, H, N, M), without what is appended.
        appended: keys after these, which every row sees.
        dtype: of the scores.

    Raises:
        ValueError: ``is_causal`` without a mask, or a mask of another shape or dtype.
    """
    batch, heads, rows, cols = scores
    if is_causal and attn_mask is None:
        raise ValueError("attn_mask must be given with is_causal=True, which says what it is")
    if is_causal and key_padding_mask is None:
        return None, True
    masks = []
    if attn_mask is not None:
        if attn_mask.shape not in ((rows, cols), (batch * heads, rows, cols)):
            raise ValueError(
                f"attn_mask must be {(rows, cols)} or {(batch * heads, rows, cols)}, "
                f"got {tuple(attn_mask.shape)}"
            )
        masks.append(attn_mask.unflatten(0, (batch, heads)) if attn_mask.dim() == 3 else attn_mask)
    if key_padding_mask is not None:
        if key_padding_mask.shape not in ((batch, cols), (cols,) if batch == 1 else ()):
            raise ValueError(
                f"key_padding_mask must be {(batch, cols)}, got {tuple(key_padding_mask.shape)}"
            )
        masks.append(key_padding_mask.view(batch, 1, 1, cols))
    for mask in masks:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"masks must be boolean or floating point, got {mask.dtype}")
    if appended:
        # 0 and False: seen.
        masks = [F.pad(mask, (0, appended)) for mask in masks]
    if not masks:
        return None, False
    if all(mask.dtype == torch.bool for mask in masks):
        hidden = masks[0] if len(masks) == 1 else masks[0] | masks[1]
        return ~hidden, False
    added = [_additive(mask, dtype) for mask in masks]
    return added[0] if len(added) == 1 else added[0] + added[1], False


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
