"""Forwards and backwards of our kernels that share the output and the log-sum-exp alone."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from leaner_kernels.ops._launch_cache import key_of, rows_contiguous
from leaner_kernels.ops.attention import op
from leaner_kernels.ops.attention.call import score_factor, takes_scaled_maxima


def attend_with_lse(
    form: Any, tensors: Sequence[Any], numbers: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    """Launch a plain forward; return the output and the log-sum-exp.

    Args:
        form: says how query, key and value lie in memory.
        tensors: those of ``NAME``.
        numbers: the parameters of ``NAME``, which come after the tensors.

    Returns:
        The output, as ``NAME`` returns it, and (B, H, N) float32, of a varlen batch (H, T),
        contiguous: the natural logarithm of the sum of exponentials of scaled scores. It is inf for
        a row without a visible key, and undefined for tokens that no sequence owns.
    """
    inputs = *tensors, *numbers
    if op.KERNELS_SHARE_LSE:
        key, addresses, _ = key_of((*tensors, None), (form.name, "lse", *numbers))
        plan = op._plans.get(key)
        if plan is not None:
            return op._run(form, plan, addresses[: form.count], tensors[0])
        return op._launch_first(form, key, inputs, lse_alone=True)[1]
    out, pairs = op.attend_cuda(form, False, *inputs)
    call = form.call(*inputs)
    return out, op.lse_of(pairs, 1.0 if takes_scaled_maxima(call) else score_factor(call))


def differentiate_from_lse(
    form: Any,
    grad: Tensor,
    tensors: Sequence[Any],
    out: Tensor,
    lse: Tensor,
    numbers: Sequence[Any],
) -> tuple[Tensor, ...]:
    """Launch the backward of any forward that left its output and log-sum-exp.

    Float32 rounds away the log of the sum if a row's largest score is in the millions, such as a
    mask of -1e9. ``NAME_backward`` gets the two apart and keeps both.

    Args:
        form: says how query, key and value lie in memory.
        grad: the gradient of ``out``.
        tensors: those of ``NAME``; a mask gets no gradient.
        out: the output, in the shape that ``NAME`` returns.
        lse: (B, H, N) or (H, T) float32, as ``attend_with_lse`` returns it.
        numbers: the parameters of ``NAME``.

    Returns:
        dq, dk and dv.
    """
    scaled = takes_scaled_maxima(form.call(*tensors, *numbers))
    rows = op.rows_of(lse.contiguous(), hidden=True, scaled=scaled)
    saved = *tensors, rows_contiguous(out), rows
    launches = op._launches_like(form, saved, numbers)
    return op._launch_backward(form, launches, rows_contiguous(grad), saved, numbers, False)
