"""Forwards and backwards of our kernels that share the output and the log-sum-exp alone."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from leaner_kernels.ops import route
from leaner_kernels.ops._launch_cache import key_of, rows_contiguous
from leaner_kernels.ops.attention import aten
from leaner_kernels.ops.attention.call import score_factor, takes_scaled_maxima


def forward_with_lse(
    operator: Any, tensors: Sequence[Any], numbers: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    """Launch a plain forward; return the output and the log-sum-exp.

    Args:
        operator: says how query, key and value lie in memory.
        tensors: those of ``NAME``, the seed last.
        numbers: the parameters of ``NAME``, which come after the tensors.

    Returns:
        The output, as ``NAME`` returns it, and (B, H, N) float32, of a varlen batch (H, T),
        contiguous: the natural logarithm of the sum of exponentials of scaled scores. It is inf for
        a row without a visible key, and undefined for tokens that no sequence owns.
    """
    arguments = operator.Arguments(*tensors, *numbers)
    if aten.KERNELS_SHARE_LSE:
        *keyed, seed = tensors
        first, *_ = tensors
        key, addresses, _ = key_of((*keyed, None), (operator.name, "lse", *numbers))
        plan = route.plans.get(key)
        if plan is not None:
            out, lse = route.run_plan(plan, first, addresses, seed, None)
            return out, lse
        allocate = partial(operator.allocate, with_stats=False, sample=None, lse_alone=True)
        _, (out, lse) = route.launch_first(operator, key, arguments, None, allocate)
        return out, lse
    out, pairs = route.forward_on_gpu(operator, False, *tensors, *numbers)
    call = operator.call(arguments)
    return out, aten.lse_of(pairs, 1.0 if takes_scaled_maxima(call) else score_factor(call))


def backward_from_lse(
    operator: Any,
    grad: Tensor,
    tensors: Sequence[Any],
    numbers: Sequence[Any],
    *,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, ...]:
    """Launch the backward of any forward that left its output and log-sum-exp.

    Float32 rounds away the log of the sum if a row's largest score is in the millions, such as a
    mask of -1e9. ``NAME_backward`` gets the two apart and keeps both.

    Args:
        operator: says how query, key and value lie in memory.
        grad: the gradient of ``out``.
        tensors: those of ``NAME``; a mask gets no gradient.
        numbers: the parameters of ``NAME``.
        out: the output, in the shape that ``NAME`` returns.
        lse: (B, H, N) or (H, T) float32, as ``forward_with_lse`` returns it.

    Returns:
        dq, dk and dv.
    """
    call = operator.call(operator.Arguments(*tensors, *numbers))
    rows = aten.rows_of(lse.contiguous(), hidden=True, scaled=takes_scaled_maxima(call))
    inputs = *tensors, rows_contiguous(out), rows
    cached = route.cached_backwards(operator, inputs, numbers)
    grad = rows_contiguous(grad)
    return tuple(route.launch_backward(operator, cached, grad, inputs, numbers, False))
