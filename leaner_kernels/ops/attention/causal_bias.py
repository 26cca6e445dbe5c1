"""PyTorch's ``torch.nn.attention.bias.CausalBias``: a mask by its name, whose memory means nothing.

It is recognised by its attributes: importing its class imports a compiler.
"""

from typing import Any

import torch
from torch import Tensor

from .._checks import ArgumentError
from .call import MASK_AND_CAUSAL


def is_causal_bias(attn_mask: object) -> bool:
    """Whether a mask is a CausalBias."""
    return hasattr(attn_mask, "seq_len_q")


def plain_mask(
    attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, bool]:
    """Return the mask and whether to be causal, without a CausalBias.

    Args:
        attn_mask: a CausalBias, or anything else, which is returned as it is.
        is_causal: row i sees columns 0 to i; not together with a CausalBias.
        query: (..., N, D).
        key: (..., M, D).

    Returns:
        Nothing and True where row i sees columns 0 to i: of a bias of the upper left, whose size
        does not matter, and of the lower right where N = M. Otherwise (N, M), True is seen, on
        the device of ``query`` and, where that is a DTensor, on every rank.

    Raises:
        ValueError: a bias of the lower right of another size, or with ``is_causal``.
    """
    if not is_causal_bias(attn_mask):
        return attn_mask, is_causal
    if is_causal:
        raise ArgumentError(MASK_AND_CAUSAL)
    bias: Any = attn_mask
    if not all(isinstance(t, Tensor) and not t.is_nested and t.dim() > 1 for t in (query, key)):
        return None, False  # The checks that follow say what is wrong with these.
    rows, cols = query.shape[-2], key.shape[-2]
    if bias.variant.name == "UPPER_LEFT":
        return None, True
    if (bias.seq_len_q, bias.seq_len_kv) != (rows, cols):
        raise ArgumentError(
            f"attn_mask must be a lower right bias of (N, M) = {(rows, cols)}, "
            f"got one of {(bias.seq_len_q, bias.seq_len_kv)}"
        )
    if rows == cols:
        return None, True
    seen = _triangle(rows, cols, cols - rows, query.device)
    mesh = getattr(query, "device_mesh", None)
    if mesh is not None:
        from torch.distributed.tensor import DTensor, Replicate

        seen = DTensor.from_local(seen, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return seen, False


def boolean_mask(attn_mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a CausalBias as (N, M), True is seen; arguments and errors as of ``plain_mask``."""
    seen, _ = plain_mask(attn_mask, False, query, key)
    return _triangle(query.shape[-2], key.shape[-2], 0, query.device) if seen is None else seen


def _triangle(rows: int, cols: int, past: int, device: torch.device) -> Tensor:
    """Return (rows, cols), in which row i sees columns 0 to i + past."""
    return torch.ones(rows, cols, dtype=torch.bool, device=device).tril(past)
