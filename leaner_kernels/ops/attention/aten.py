"""Computation of PyTorch's own attention operators by our kernels.

The fused operators of PyTorch (flash, cuDNN, memory-efficient) agree on what a backward gets from
its forward: the output, the log-sum-exp of each row of scaled scores in nats, and the state of
random numbers. ``attend`` and ``differentiate`` keep to this contract, so that a backward of ours
may follow a forward of PyTorch's, and the other way round. With dropout both directions must be of
one kind: then shapes alone decide. cuDNN's backward, too, cannot always follow a forward of ours:
it reads the log-sum-exp of some layouts in another order.

Results have the layouts that PyTorch's fake kernels promise to compiled graphs.
"""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _hooks, _tiles
from .._checks import MAX_HEAD_DIM, MAX_ROW_STRIDE
from .._launch_cache import MAX_CACHED, key_of, on_current_device, rows_contiguous
from ..statistics import attention_stats
from . import dispatch, op
from .call import LEAST_SCALE, Call
from .checks import MAX_MASK_STRIDE

HALF = torch.float16, torch.bfloat16
BIAS_ALIGNMENT = 16  # elements, of the rows of a bias gradient in the memory-efficient operator


class Fused(op.Dense):
    """(B, H, N, D) of the flash and cuDNN operators: results in the memory order of the inputs."""

    name = "aten_fused"

    @staticmethod
    def new_out(query: Tensor) -> Tensor:
        """Allocate the output."""
        return torch.empty_like(query)

    @staticmethod
    def new_gradients(tensors: Sequence[Tensor], mask_grad: bool) -> tuple[Tensor, ...]:
        """Allocate dq, dk and dv: these operators have no gradient of a mask."""
        return tuple(torch.empty_like(t) for t in tensors[:3])


class Efficient(op.Dense):
    """(B, H, N, D) of the memory-efficient operator: results in the memory order (B, N, H, D)."""

    name = "aten_efficient"

    @staticmethod
    def new_out(query: Tensor) -> Tensor:
        """Allocate the output."""
        batch, heads, rows, dim = query.shape
        return query.new_empty((batch, rows, heads, dim)).transpose(1, 2)

    @staticmethod
    def new_gradients(tensors: Sequence[Tensor], mask_grad: bool) -> tuple[Tensor, ...]:
        """Allocate dq, dk and dv, and the gradient of the mask where it is wanted."""
        three = tuple(Efficient.new_out(t) for t in tensors[:3])
        if not mask_grad:
            return three
        *sizes, cols = tensors[3].shape
        width = ceil(cols / BIAS_ALIGNMENT) * BIAS_ALIGNMENT
        return *three, tensors[3].new_empty((*sizes, width))[..., :cols]


class FusedVarlen(op.Varlen):
    """(T, H, D): results in the memory order of the inputs."""

    name = "aten_varlen"
    new_out = staticmethod(Fused.new_out)
    new_gradients = staticmethod(Fused.new_gradients)


class Attended(NamedTuple):
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


# Signatures of calls that PyTorch computes.
_left: set[Hashable] = set()
# Kinds of calls with dropout that our forward computed since the operators were replaced.
_dropped: set[Hashable] = set()
# The log-sum-exp of calls that only our backward can follow and none has, by address.
_unfinished: dict[int, StorageWeakRef] = {}


def forget() -> None:
    """Forget which calls were computed by whom, as other operators are in use from now on."""
    _left.clear()
    _dropped.clear()
    _unfinished.clear()


def unfinished() -> int:
    """Return how many calls still have a graph, had no backward, and need ours."""
    return sum(not kept.expired() for kept in list(_unfinished.values()))


def _remember(lse: Tensor) -> None:
    if len(_unfinished) >= MAX_CACHED:
        for address, kept in list(_unfinished.items()):
            if kept.expired():
                _unfinished.pop(address, None)  # another thread may be first
    _unfinished[lse.data_ptr()] = StorageWeakRef(lse.untyped_storage())


# --- Which calls are ours -------------------------------------------------------------------------


def takes(call: Call, backward: bool) -> bool:
    """Return whether our kernels compute a call of one of PyTorch's operators.

    The rule is that of ``attention`` (``dispatch.library_of``), within what our kernels support.
    """
    query, key, value, mask = call[:4]
    heads, dim = query.shape[1], query.shape[-1]
    if any(t.dtype not in HALF or t.dtype != query.dtype for t in call[:3]):
        return False
    if key.shape != value.shape or dim != key.shape[-1] or dim > MAX_HEAD_DIM:
        return False
    if op.is_empty(call) or call.batch < 1:
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
        return call.dropout_p < 1 and gpu >= dispatch.TUNED
    if not all(map(_in_reach, call[:3])) or not (mask is None or _mask_in_reach(mask)):
        return False
    return gpu >= _tiles.LEAST_CAPABILITY and dispatch.library_of(call, backward) is None


def _in_reach(t: Tensor) -> bool:
    return t.stride(-1) == 1 and t.stride(2 if t.dim() == 4 else 0) <= MAX_ROW_STRIDE


def _mask_in_reach(mask: Tensor) -> bool:
    return all(stride <= MAX_MASK_STRIDE for stride in mask.stride()[-2:])


def _brought_in_reach(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the operands of a call with dropout, copied where kernels do not reach them."""
    *three, mask_or_starts, other = tensors
    if mask_or_starts is not None and not _mask_in_reach(mask_or_starts):
        mask_or_starts = mask_or_starts.contiguous()
    return *(t if _in_reach(t) else t.contiguous() for t in three), mask_or_starts, other


def _kind_of(form: Any, query: Tensor, dropout_p: float) -> Hashable:
    return form.name, query.shape[1], query.shape[-1], dropout_p


def _is_left(
    signature: Hashable, form: Any, tensors: Sequence[Any], numbers: Sequence[Any], backward: bool
) -> bool:
    """Return whether PyTorch computes a forward, and remember it if so."""
    if signature in _left:
        return True
    if takes(form.call(*tensors, None, *numbers), backward):
        return False
    _leave(signature)
    return True


def _leave(signature: Hashable) -> None:
    if len(_left) >= MAX_CACHED:
        _left.clear()
    _left.add(signature)


# --- Both directions ------------------------------------------------------------------------------


def attend(
    form: Any,
    tensors: Sequence[Any],
    numbers: Sequence[Any],
    backward: bool,
    with_lse: bool = True,
    paired: bool = False,
) -> Attended | None:
    """Launch a forward, or return None if PyTorch computes the call.

    Args:
        form: ``Fused``, ``Efficient`` or ``FusedVarlen``.
        tensors: those of the form, without the seed.
        numbers: those of the form.
        backward: whether a backward is expected; a wrong guess costs time alone.
        with_lse: whether anything reads the log-sum-exp.
        paired: whether PyTorch's backward may want the log-sum-exp in other memory, so that it
            cannot follow this forward.
    """
    query, dropout_p, scale = tensors[0], numbers[form.dropout], numbers[form.dropout + 2]
    if dropout_p:
        tensors, backward = _brought_in_reach(tensors), True
    watch = None if form is FusedVarlen else _hooks.operators
    sample = None if watch is None else watch.sample(*tensors[:2])
    masked = form is not FusedVarlen and tensors[3] is not None
    sharing = op.KERNELS_SHARE_LSE and not masked
    signature, addresses, _ = key_of(tensors, (form.name, backward, sharing, *numbers))
    plan = op._plans.get(signature)
    if plan is None and _is_left(signature, form, tensors, numbers, backward):
        if watch is not None and sample is not None:
            watch.recompute(*tensors[:4], *numbers[1:3])
        return None
    with _device_of(query):
        seed = None
        if dropout_p:
            seed = torch.randint(torch.iinfo(torch.int64).max, (2,), device=query.device)
            _dropped.add(_kind_of(form, query, dropout_p))
        if watch is not None and sample is not None:
            inputs = *tensors, seed, sample, *numbers
            out, lse, stats, heads, rows = op.attend_cuda(form, True, *inputs)
            watch.capture(attention_stats(out, lse, stats, heads))
            sharing = False
        elif plan is None:
            inputs = *tensors, seed, *numbers
            _, (out, rows) = op._launch_first(form, signature, inputs, lse_alone=sharing)
        else:
            addresses = [*addresses, 0 if seed is None else seed.data_ptr()]
            out, rows = op._run(form, plan, addresses, query)
        lse = None
        if with_lse:
            factor = query.shape[-1] ** -0.5 if scale is None else scale
            lse = rows if sharing else op.lse_of(rows, 1.0 if masked else factor)
            if dropout_p or paired:
                _remember(lse)
        return Attended(out, lse, seed)


def differentiate(
    form: Any,
    grad: Tensor,
    tensors: Sequence[Any],
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    numbers: Sequence[Any],
    mask_grad: bool = False,
) -> tuple[Tensor, ...] | None:
    """Launch a backward, or return None if PyTorch computes it.

    Args:
        form: ``Fused``, ``Efficient`` or ``FusedVarlen``.
        grad: of ``out``.
        tensors: those of the form, without the seed.
        seed: int64, that of ``Attended``; None without dropout.
        out: of ``Attended``, or of PyTorch's forward.
        lse: likewise.
        numbers: those of the form.
        mask_grad: whether the gradient of an additive mask is wanted.

    Returns:
        dq, dk, dv, and the gradient of the mask if wanted.
    """
    query, dropout_p = tensors[0], numbers[form.dropout]
    if dropout_p:
        if _kind_of(form, query, dropout_p) not in _dropped:
            return None  # the forward was PyTorch's, before the operators were replaced
        tensors = _brought_in_reach(tensors)
    # Launches are cached by the layouts of all tensors below this.
    signature, *_ = key_of(tensors, (form.name, "backward", *numbers))
    launches = op._backwards.get(signature)
    if launches is None:
        if signature in _left:
            return None
        if not takes(form.call(*tensors, seed, *numbers), True):
            _leave(signature)
            return None
        if len(op._backwards) >= MAX_CACHED:
            op._backwards.clear()
        launches = op._backwards[signature] = {}
    lse = lse.contiguous()
    _unfinished.pop(lse.data_ptr(), None)
    with _device_of(query):
        # The fourth tensor is a mask, or the starts of sequences, of which some may have no keys.
        hidden = tensors[3] is not None
        rows = op.rows_of(lse, hidden, scaled=hidden and form is not FusedVarlen)
        saved = *tensors, seed, out, rows
        grad = rows_contiguous(grad)
        return op._launch_backward(form, launches, grad, saved, numbers, mask_grad)


def _device_of(query: Tensor) -> AbstractContextManager[Any]:
    # Triton launches on the current device, and operators in Python are not guarded.
    if not query.is_cuda or on_current_device(query):
        return nullcontext()
    return torch.cuda.device(query.device)
