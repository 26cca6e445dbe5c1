"""One call of attention, as the operators hand it to the kernels."""

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from leaner_kernels.ops._launch_cache import layout


class Call(NamedTuple):
    """The operands and parameters of one call, checked.

    Attributes:
        query: (B, H, N, D); in a varlen batch (T, H, D).
        key: (B, Hkv, M, D); in a varlen batch (Tk, Hkv, D).
        value: as ``key``.
        attn_mask: boolean or additive, broadcastable to (B, H, N, M).
        key_lengths: (B,) int32.
        seed: (1,) int64, where there is dropout.
        dropout_p: probability of dropping a probability.
        is_causal: row i sees columns 0 to i.
        scale: multiplies the scores.
        softcap: bounds the scores; 0 for none.
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
    softcap: float = 0.0


def new_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    softcap: float = 0.0,
) -> Call:
    """Return the call of these, with the default of a scale of None."""
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    tensors = query, key, value, attn_mask, key_lengths, seed
    return Call(*tensors, dropout_p, is_causal, factor, softcap)


def counted(call: Call) -> Call:
    """Return the call with lengths that lie side by side, as the kernels count them."""
    lengths = call.key_lengths
    return call if lengths is None else call._replace(key_lengths=lengths.contiguous())


def kind_of(call: Call, *others: Hashable) -> Hashable:
    """Return what sets calls apart, for the launch cache, beside the addresses of their tensors."""
    query = call.query
    return (
        query.device.index,
        query.dtype,
        query.shape,
        call.key.shape,
        query.stride(),
        call.key.stride(),
        call.value.stride(),
        layout(call.attn_mask),
        call.key_lengths is None,
        call.seed is None,
        *call[6:],
        *others,
    )
