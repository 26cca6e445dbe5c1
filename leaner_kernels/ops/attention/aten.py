"""Computation of PyTorch's own attention operators by our kernels.

The fused operators of PyTorch (flash, cuDNN, memory-efficient) agree on what a backward gets from
its forward: the output, the log-sum-exp of each row of scaled scores in nats, and the state of
random numbers. ``forward`` and ``backward`` keep to this contract, so that a backward of ours
may follow a forward of PyTorch's, and the other way round. With dropout both directions must be of
one kind: then shapes alone decide. cuDNN's backward, too, cannot always follow a forward of ours:
it reads the log-sum-exp of some layouts in another order.

Results have the layouts that PyTorch's fake kernels promise to compiled graphs.
"""

import math
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import ceil
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _hooks, _tiles, route
from .._checks import MAX_HEAD_DIM, MAX_ROW_STRIDE
from .._launch_cache import MAX_CACHED, key_of, on_current_device, rows_contiguous
from ..gpus import LEAST_CAPABILITY, TUNED
from . import dispatch, op
from .call import LEAST_SCALE, Call
from .checks import MAX_MASK_STRIDE

HALF = torch.float16, torch.bfloat16
# Elements to which the memory-efficient operator aligns the rows of a bias gradient.
BIAS_ALIGNMENT = 16
# Whether kernels store and load the log-sum-exp themselves. Set this to True once measurements on a
# GPU show that they are as fast as kernels of pairs (maximum, log of the sum). Until then each
# direction launches a conversion between the two.
KERNELS_SHARE_LSE = False


class Numbers(NamedTuple):
    """The numbers of ``Fused`` and ``Efficient``, as in ``Call``."""

    dropout_p: float
    is_causal: bool
    scale: float | None
    softcap: float = 0.0
    window_left: int = -1
    window_right: int = -1


class VarlenNumbers(NamedTuple):
    """The numbers of ``FusedVarlen``, as in ``op.VarlenArguments``."""

    max_seqlen: int
    max_seqlen_k: int
    dropout_p: float
    is_causal: bool
    scale: float | None
    window_left: int = -1
    window_right: int = -1


class Fused(op.Dense):
    """(B, H, N, D) of the flash and cuDNN operators: results in the memory order of the inputs."""

    name = "aten_fused"

    @classmethod
    def new_out(cls, arguments: Any) -> Tensor:
        """Allocate the output."""
        return torch.empty_like(arguments.query)

    @classmethod
    def new_gradients(cls, arguments: Any, optional: bool) -> op.DenseGradients:
        """Allocate dq, dk and dv: these operators have no gradient of a mask."""
        return op.DenseGradients(*map(torch.empty_like, arguments.operands))


class Efficient(op.Dense):
    """(B, H, N, D) of the memory-efficient operator: results in the memory order (B, N, H, D)."""

    name = "aten_efficient"

    @classmethod
    def new_out(cls, arguments: Any) -> Tensor:
        """Allocate the output."""
        return _rows_before_heads(arguments.query)

    @classmethod
    def new_gradients(cls, arguments: Any, optional: bool) -> op.DenseGradients:
        """Allocate dq, dk and dv, and the gradient of the mask where it is wanted."""
        dattn_mask, mask = None, arguments.attn_mask
        if optional:
            *sizes, cols = mask.shape
            width = ceil(cols / BIAS_ALIGNMENT) * BIAS_ALIGNMENT
            dattn_mask = mask.new_empty((*sizes, width))[..., :cols]
        dq, dk, dv = map(_rows_before_heads, arguments.operands)
        return op.DenseGradients(dq, dk, dv, dattn_mask)


def _rows_before_heads(like: Tensor) -> Tensor:
    batch, heads, rows, dim = like.shape
    return like.new_empty((batch, rows, heads, dim)).transpose(1, 2)


class FusedVarlen(op.Varlen):
    """(T, H, D): results in the memory order of the inputs."""

    name = "aten_varlen"

    @classmethod
    def new_out(cls, arguments: Any) -> Tensor:
        """Allocate the output."""
        return torch.empty_like(arguments.query)

    @classmethod
    def new_gradients(cls, arguments: Any, optional: bool) -> op.VarlenGradients:
        """Allocate dq, dk and dv."""
        tensors = arguments.query, arguments.key, arguments.value
        return op.VarlenGradients(*map(torch.empty_like, tensors))


AtenOperator: TypeAlias = type[Fused] | type[Efficient] | type[FusedVarlen]


class Forward(NamedTuple):
    """The results of a forward.

    Attributes:
        out: as the query.
        lse: (B, H, N); in a varlen batch (H, T); float32, contiguous. Infinite for a row without a
            visible key. None if it is not wanted.
        seed: (2,) int64, the first of them read by kernels; None without dropout.
    """

    out: Tensor
    lse: Tensor | None
    seed: Tensor | None


# Marks, in ``route.plans``, calls that PyTorch computes.
PYTORCHS = "PyTorch's"
# Kinds of calls with dropout that our forward computed since the operators were replaced.
_dropped: set[Hashable] = set()
# The log-sum-exp of calls that still need our backward, by address.
_unfinished: dict[int, StorageWeakRef] = {}


def forget() -> None:
    """Forget who computed which calls, because other operators are used from now on."""
    route.plans.clear()
    _dropped.clear()
    _unfinished.clear()


def unfinished() -> int:
    """Return how many calls still have a graph, had no backward, and need ours."""
    return sum(not kept.expired() for kept in list(_unfinished.values()))


def _remember(lse: Tensor) -> None:
    if len(_unfinished) >= MAX_CACHED:
        for address, kept in list(_unfinished.items()):
            if kept.expired():
                _unfinished.pop(address, None)  # another thread may have removed it
    _unfinished[lse.data_ptr()] = StorageWeakRef(lse.untyped_storage())


# --- Which calls are ours -------------------------------------------------------------------------


def takes(call: Call, backward: bool) -> bool:
    """Return whether our kernels compute a call of one of PyTorch's operators.

    The rule is that of ``attention`` (``dispatch.library_of``), within what our kernels support.
    """
    (query, key, value), mask = call.operands, call.attn_mask
    heads, dim = query.shape[1], query.shape[-1]
    if any(t.dtype not in HALF or t.dtype != query.dtype for t in call.operands):
        return False
    if key.shape != value.shape or dim != key.shape[-1] or dim > MAX_HEAD_DIM:
        return False
    if op.Dense.is_empty(call) or call.batch < 1:
        return False
    if heads % key.shape[1] or (call.sequences is None and query.shape[0] != key.shape[0]):
        return False
    if call.scale is not None and call.scale < LEAST_SCALE:
        return False  # the maximum of a row would be that of scaled scores
    # PyTorch's flash operator aligns its causal mask to the last key, ours to the first.
    if call.is_causal and (
        mask is not None or (call.sequences is None and query.shape[2] != key.shape[2])
    ):
        return False
    if mask is not None and (mask.dtype not in (query.dtype, torch.float32) or mask.dim() > 4):
        return False
    gpu = _tiles.capability(query.device)
    if call.dropout_p:
        # Strides may differ between forward and backward: tensors out of reach are copied.
        return call.dropout_p < 1 and gpu >= TUNED
    if not all(map(_in_reach, call.operands)) or not (mask is None or _mask_in_reach(mask)):
        return False
    return gpu >= LEAST_CAPABILITY and dispatch.library_of(call, backward) is None


def _in_reach(t: Tensor) -> bool:
    return t.stride(-1) == 1 and t.stride(2 if t.dim() == 4 else 0) <= MAX_ROW_STRIDE


def _mask_in_reach(mask: Tensor) -> bool:
    return all(stride <= MAX_MASK_STRIDE for stride in mask.stride()[-2:])


def _brought_in_reach(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the operands of a call with dropout, copied if kernels cannot reach them."""
    *three, mask_or_starts, other = tensors
    if mask_or_starts is not None and not _mask_in_reach(mask_or_starts):
        mask_or_starts = mask_or_starts.contiguous()
    return *(t if _in_reach(t) else t.contiguous() for t in three), mask_or_starts, other


def _kind_of(operator: AtenOperator, query: Tensor, dropout_p: float) -> Hashable:
    return operator.name, query.shape[1], query.shape[-1], dropout_p


# --- The log-sum-exp, and the pairs of our kernels ------------------------------------------------


def lse_of(max_log_sum: Tensor, factor: float) -> Tensor:
    """Return the log-sum-exp of scaled scores.

    Args:
        max_log_sum: (..., 2) float32, the pairs that a forward writes.
        factor: multiplies the maximum: the scale, or 1 if the maximum is of scaled scores.
    """
    return torch.add(max_log_sum[..., 1], max_log_sum[..., 0], alpha=factor)


def rows_of(lse: Tensor, *, hidden: bool, scaled: bool) -> Tensor:
    """Return the row statistics that a backward reads.

    This is the log-sum-exp itself, or pairs (..., 2) of 0 and the log-sum-exp, or of these two in
    the other order: a probability is exp(score - first - second).

    Args:
        lse: float32, contiguous.
        hidden: whether a row may see no key. Its log-sum-exp is infinite, of either sign by the
            kernel that wrote it, and its probabilities must be zero.
        scaled: whether the first of a pair is in units of scaled scores (``takes_scaled_maxima``).
    """
    # Not inf in pairs: the real part of inf * 1j is nan.
    sharing = KERNELS_SHARE_LSE and not scaled
    largest = math.inf if sharing else torch.finfo(torch.float32).max
    if hidden:
        lse = lse.nan_to_num(nan=math.nan, posinf=largest, neginf=largest)
    if sharing:
        return lse
    # One launch. No zero tensor is cached for it: memory must not outlive the pool of a CUDA graph.
    # Kernels convert the second to base 2, which overflows for a row of a mask's lowest numbers.
    return torch.view_as_real(lse.to(torch.complex64) if scaled else lse * 1j)


# --- Both directions ------------------------------------------------------------------------------


def forward(
    operator: AtenOperator,
    tensors: Sequence[Any],
    numbers: Numbers | VarlenNumbers,
    backward: bool,
    *,
    with_lse: bool = True,
    paired: bool = False,
) -> Forward | None:
    """Launch a forward, or return None if PyTorch computes the call.

    Args:
        operator: whose layouts the results have.
        tensors: those of the operator, without the seed.
        numbers: those of the operator.
        backward: whether a backward is expected; a wrong guess costs time alone.
        with_lse: whether anything reads the log-sum-exp.
        paired: whether PyTorch's backward may want the log-sum-exp in other memory, so that it
            cannot follow this forward.
    """
    dropout_p = numbers.dropout_p
    if dropout_p:
        tensors, backward = _brought_in_reach(tensors), True
    query, key, value, mask, _ = tensors
    hook = None if operator is FusedVarlen else _hooks.operators
    sample = None if hook is None else hook.sample(query, key)
    masked = operator is not FusedVarlen and mask is not None
    sharing = KERNELS_SHARE_LSE and not masked
    kind = operator.name, backward, sharing, *numbers
    signature, addresses, _ = key_of((*tensors, None), kind)
    plan = route.plans.get(signature)
    if plan is None and not takes(
        operator.call(operator.Arguments(*tensors, None, *numbers)), backward
    ):
        plan = route.remember(signature, PYTORCHS)
    if plan is PYTORCHS:
        if hook is not None and sample is not None:
            hook.recompute(query, key, value, mask, numbers.is_causal, numbers.scale)
        return None
    with _device_of(query):
        seed = None
        if dropout_p:
            seed = torch.randint(torch.iinfo(torch.int64).max, (2,), device=query.device)
            _dropped.add(_kind_of(operator, query, dropout_p))
        if hook is not None and sample is not None:
            inputs = *tensors, seed, sample, *numbers
            results = route.forward_on_gpu(operator, True, *inputs)
            hook.capture(route.stats_of(results, sample))
            sharing = False
        elif plan is None:
            allocate = partial(operator.allocate, with_stats=False, sample=None, lse_alone=sharing)
            arguments = operator.Arguments(*tensors, seed, *numbers)
            _, results = route.launch_first(operator, signature, arguments, None, allocate)
        else:
            results = route.run_plan(plan, query, addresses, seed, None)
        out, *_, rows = results
        lse = None
        if with_lse:
            factor = query.shape[-1] ** -0.5 if numbers.scale is None else numbers.scale
            lse = rows if sharing else lse_of(rows, 1.0 if masked else factor)
            if dropout_p or paired:
                _remember(lse)
        return Forward(out, lse, seed)


def backward(
    operator: AtenOperator,
    grad: Tensor,
    tensors: Sequence[Any],
    numbers: Numbers | VarlenNumbers,
    *,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    mask_grad: bool = False,
) -> tuple[Tensor, ...] | None:
    """Launch a backward, or return None if PyTorch computes it.

    Args:
        operator: whose layouts the gradients have.
        grad: of ``out``.
        tensors: those of the operator, without the seed.
        numbers: those of the operator.
        seed: int64, that of ``Forward``; None without dropout.
        out: of ``Forward``, or of PyTorch's forward.
        lse: likewise.
        mask_grad: whether the gradient of an additive mask is wanted.

    Returns:
        dq, dk, dv, and the gradient of the mask if wanted.
    """
    query, _, _, mask_or_starts, _ = tensors
    if numbers.dropout_p:
        if _kind_of(operator, query, numbers.dropout_p) not in _dropped:
            return None  # the forward was PyTorch's, before the operators were replaced
        tensors = _brought_in_reach(tensors)
    # Launches are cached by the layouts of all tensors below this.
    signature, *_ = key_of(tensors, (operator.name, "backward", *numbers))
    cached = route.plans.get(signature)
    if cached is None:
        ours = takes(operator.call(operator.Arguments(*tensors, seed, *numbers)), True)
        cached = route.remember(signature, {} if ours else PYTORCHS)
    if cached is PYTORCHS:
        return None
    lse = lse.contiguous()
    _unfinished.pop(lse.data_ptr(), None)
    with _device_of(query):
        # Of a varlen batch, some sequences may have no keys.
        hidden = mask_or_starts is not None
        rows = rows_of(lse, hidden=hidden, scaled=hidden and operator is not FusedVarlen)
        inputs, grad = (*tensors, seed, out, rows), rows_contiguous(grad)
        return tuple(route.launch_backward(operator, cached, grad, inputs, numbers, mask_grad))


def _device_of(query: Tensor) -> AbstractContextManager[Any]:
    # Triton launches on the current device, and PyTorch sets no device for operators in Python.
    if not query.is_cuda or on_current_device(query):
        return nullcontext()
    return torch.cuda.device(query.device)
