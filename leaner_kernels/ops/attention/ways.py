"""The short ways of ``attention`` and ``attention_qkvpacked``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from leaner_kernels.ops._operators import rows_contiguous
from leaner_kernels.ops.attention import operators
from leaner_kernels.ops.attention.repeat import Way


def _pointers(tensors):
    query, key, value = tensors
    return [query.data_ptr(), key.data_ptr(), value.data_ptr(), 0, 0, 0]


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return where each tensor begins."""
    return [t.data_ptr() for t in tensors]


def _packed_addresses(tensors):
    (qkv,) = tensors
    address, step = qkv.data_ptr(), qkv.stride(2) * qkv.element_size()
    return [address, address + step, address + 2 * step]


def _new_packed_rows(qkv):
    batch, rows, _, heads, _ = qkv.shape
    return qkv.new_empty((batch, heads, rows, 2), dtype=torch.float32)


def _backward_by_operator(grad, tensors, out, rows, *, is_causal, scale, softcap):
    nothing = None, None, None
    saved = *tensors, *nothing, out, rows
    params = 0.0, is_causal, scale, float(softcap)
    return operators.ATTENTION.backward(grad, *saved, *params, False)[:3]


def _packed_backward_by_operator(grad, tensors, out, rows, *, is_causal, scale):
    saved = *tensors, None, None, out, rows
    return (operators.QKVPACKED.backward(grad, *saved, 0.0, is_causal, scale),)


ATTENTION = Way(
    count=3,
    rank=4,
    pointers=_pointers,
    new_rows=operators.new_max_log_sum,
    new_gradients=lambda tensors: tuple(map(operators.new_out, tensors)),
    gradient_pointers=addresses,
    rows_contiguous=rows_contiguous,
    backward=_backward_by_operator,
)
PACKED = Way(
    count=1,
    rank=5,
    pointers=lambda tensors: [*_packed_addresses(tensors), 0, 0, 0],
    new_rows=_new_packed_rows,
    new_gradients=lambda tensors: (
        torch.empty_like(tensors[0], memory_format=torch.contiguous_format),
    ),
    gradient_pointers=_packed_addresses,
    rows_contiguous=rows_contiguous,
    backward=_packed_backward_by_operator,
)
