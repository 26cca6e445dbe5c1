"""One call of attention, as the operators hand it to the kernels."""

from typing import NamedTuple

from torch import Tensor


class Call(NamedTuple):
    """The operands and knobs of one call, checked.

    Attributes:
        query: (B, H, N, D); in a packed batch (T, H, D).
        key: (B, Hkv, M, D); in a packed batch (Tk, Hkv, D).
        value: as ``key``.
        attn_mask: boolean or additive, broadcastable to (B, H, N, M).
        key_lengths: (B,) int32.
        seed: (1,) int64, where there is dropout.
        dropout_p: probability of dropping a probability.
        is_causal: row i sees columns 0 to i.
        scale: multiplies the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    key_lengths: Tensor | None
    seed: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float
