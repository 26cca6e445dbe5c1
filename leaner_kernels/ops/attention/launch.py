"""Which kernels run a call, by its shape.

``warp_multihead``: a warp owns several whole heads of up to 16 tokens. ``multihead``: a program
owns several of up to 64. ``short``, and ``hopper`` and ``ampere`` on GPUs of those architectures:
a program owns a head of up to a few hundred tokens.
``forward`` and ``backward``: programs own tiles and walk over any length. The data under ``tuned/``
says which shapes all but the last take; they are half precision.
"""

import torch
from torch import Tensor

from leaner_kernels.ops import _gluon
from leaner_kernels.ops._launch_cache import LARGEST_OFFSET, Launch, LaunchCache, unaligned
from leaner_kernels.ops.attention import tiles
from leaner_kernels.ops.attention.call import Call, counted, kind_of
from leaner_kernels.ops.attention.kernels import (
    multihead,
    online_backward,
    online_forward,
    short_backward,
    short_forward,
)

MAX_ENTRIES = 65_535  # of a grid's second axis
_INPUTS = "q_ptr", "k_ptr", "v_ptr", "mask_ptr", "lengths_ptr", "seed_ptr"
_STATISTICS = "lse_ptr", "max_logit_ptr", "entropy_ptr", "prob_norm_ptr", "head_norm_ptr"
_forward_cache = LaunchCache((*_INPUTS, "out_ptr", "max_log_sum_ptr", *_STATISTICS))
_backward_cache = LaunchCache(
    (*_INPUTS, "grad_ptr", "out_ptr", "max_log_sum_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "ds_ptr")
)


def forward(
    call: Call, out: Tensor, max_log_sum: Tensor, stats: list[Tensor] | None = None
) -> None:
    """Write out (B, H, N, D) and max_log_sum (B, H, N, 2), which the backward needs.

    With ``stats``, also lse (B, H, N) and the four statistics (B, H).
    """
    call = counted(call)
    tensors = *call[:6], out, max_log_sum, *(stats or ())
    kind = kind_of(call, len(tensors), out.stride())
    if _forward_cache.run(kind, tensors):
        return
    query, key, value, attn_mask, _, seed, *_ = call
    wanted = tiles.features(
        attn_mask, seed, query, key, value, softcap=call.softcap, scale=call.scale
    )
    name = "forward" if stats is None else "forward_statistics"
    if launch := _prepare_in_gluon(name, wanted, call, out, max_log_sum, stats):
        found = launch
    elif tile := tiles.multihead(f"multihead_{name}", query, key, wanted):
        found = multihead.prepare_forward(tile, call, out, max_log_sum, stats)
    elif tile := tiles.short(f"short_{name}", query, key.shape[2], wanted):
        found = short_forward.prepare(tile, call, out, max_log_sum, stats)
    elif stats is None:
        found = online_forward.prepare(call, out, max_log_sum)
    else:
        online_forward.launch(call, out, max_log_sum, stats)
        return
    _forward_cache.start(kind, found, tensors)


def _prepare_in_gluon(
    name: str,
    wanted: frozenset[str],
    call: Call,
    out: Tensor,
    max_log_sum: Tensor,
    stats: list[Tensor] | None,
) -> Launch | None:
    shape = call.query, call.key, wanted
    results = call, out, max_log_sum, stats
    in_pairs = _pairs_elements(call, out)
    if in_pairs and (tile := tiles.warp_multihead(f"warp_multihead_{name}", *shape)):
        from leaner_kernels.ops.attention.kernels import warp_multihead

        return warp_multihead.prepare_forward(tile, *results)
    if not _copies_whole_rows(call, out):
        return None
    if tile := tiles.hopper(f"hopper_{name}", *shape):
        from leaner_kernels.ops.attention.kernels import hopper_forward

        return hopper_forward.prepare(tile, *results)
    if tile := tiles.ampere(f"ampere_{name}", *shape):
        from leaner_kernels.ops.attention.kernels import ampere_forward

        return ampere_forward.prepare(tile, *results)
    return None


def capture(call: Call, sample: Tensor, heads_out: Tensor) -> None:
    """Write heads (S, N, H * D) float32 of the batch entries that ``sample`` (S,) int32 names."""
    online_forward.launch_capture(call, sample, heads_out)


def backward(
    grad: Tensor,
    call: Call,
    out: Tensor,
    max_log_sum: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dmask: Tensor | None,
) -> None:
    """Write dq (B, H, N, D), dk and dv (B, Hkv, M, D) and, where given, dmask."""
    call = counted(call)
    ds = None
    if dmask is not None:
        # Tiles that no row may see are not visited by every kernel.
        scores = *call.query.shape[:3], call.key.shape[2]
        ds = torch.zeros(scores, dtype=torch.float32, device=call.query.device)
    results = out, max_log_sum, dq, dk, dv, ds
    tensors = *call[:6], grad, *results
    strides = grad.stride(), out.stride(), dq.stride(), dk.stride(), dv.stride()
    kind = kind_of(call, *strides, grad.dtype, dmask is None)
    if not _backward_cache.run(kind, tensors):
        _backward_cache.start(kind, _prepare_backward(grad, call, *results), tensors)
    if dmask is not None and ds is not None:
        dmask.copy_(ds.sum_to_size(dmask.shape))


def _prepare_backward(
    grad: Tensor,
    call: Call,
    out: Tensor,
    max_log_sum: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    ds: Tensor | None,
) -> Launch:
    query, key, value, attn_mask, _, seed, *_ = call
    wanted = tiles.features(
        attn_mask, seed, query, key, value, grad, softcap=call.softcap, scale=call.scale
    )
    # A key head that several query heads share has no single owner.
    if query.shape[1] == key.shape[1]:
        tokens = max(query.shape[2], key.shape[2])
        results = out, max_log_sum, dq, dk, dv
        if launch := _prepare_backward_in_gluon(wanted, grad, call, *results, ds):
            return launch
        if tile := tiles.multihead("multihead_backward", query, key, wanted):
            return multihead.prepare_backward(tile, grad, call, dq, dk, dv, ds)
        if tile := tiles.short("short_backward", query, tokens, wanted):
            return short_backward.prepare(tile, grad, call, *results, ds)
    return online_backward.prepare(grad, call, out, max_log_sum, dq, dk, dv, ds)


def _prepare_backward_in_gluon(
    wanted: frozenset[str],
    grad: Tensor,
    call: Call,
    out: Tensor,
    max_log_sum: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    ds: Tensor | None,
) -> Launch | None:
    shape = call.query, call.key, wanted
    results = out, max_log_sum, dq, dk, dv
    if _pairs_elements(call, grad, dq, dk, dv) and (
        tile := tiles.warp_multihead("warp_multihead_backward", *shape)
    ):
        from leaner_kernels.ops.attention.kernels import warp_multihead

        return warp_multihead.prepare_backward(tile, grad, call, dq, dk, dv)
    if not _copies_whole_rows(call, grad, out, dq, dk, dv):
        return None
    fenced = _gluon.KEEPS_FENCES or "dropout" not in wanted
    if fenced and (tile := tiles.hopper("hopper_backward", *shape)):
        from leaner_kernels.ops.attention.kernels import hopper_backward

        return hopper_backward.prepare(tile, grad, call, *results, ds)
    if tile := tiles.ampere("ampere_backward", *shape):
        from leaner_kernels.ops.attention.kernels import ampere_backward

        return ampere_backward.prepare(tile, grad, call, *results, ds)
    return None


def _copies_whole_rows(call: Call, *others: Tensor) -> bool:
    """Whether a program in Gluon can own a head: rows that 16 bytes at a time are copied from."""
    return len(call.query) <= MAX_ENTRIES and _fits_gluon(call, *others)


def _pairs_elements(call: Call, *others: Tensor) -> bool:
    """Whether a warp can own heads: side by side, and of pairs that are words of 32 bits."""
    batch, heads, _, dim = call.query.shape
    tensors = *call[:3], *others
    words = dim % 2 == 0 and all(t.stride(0) % 2 == t.stride(2) % 2 == 0 for t in tensors)
    beside = all(t.stride(1) == dim for t in tensors) and batch * heads <= LARGEST_OFFSET // 2
    return words and beside and _fits_gluon(call, *others)


def _fits_gluon(call: Call, *others: Tensor) -> bool:
    """Whether tensors are as kernels in Gluon have them: with rows that 32 bits reach across."""
    tensors = *call[:3], *others
    tokens = call.query.shape[2]
    if not _gluon.AVAILABLE:
        return False
    alike = all(t.dtype == call.query.dtype for t in tensors)
    strides = [t.stride(2) for t in tensors]
    if call.attn_mask is not None:
        strides.append(sum(call.attn_mask.stride()[-2:]))
    reached = max(strides) * tokens <= LARGEST_OFFSET
    return alike and reached and not unaligned(tensors)
