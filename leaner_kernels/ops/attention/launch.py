"""Which kernels run a call, by its shape.

``warp_multihead``: a warp owns one head or several, of up to 16 tokens. ``short``, and ``hopper``
and ``ampere`` on GPUs of those architectures: a program owns a head of up to a few hundred tokens.
``forward`` and ``backward``: programs own tiles and walk over any length. The data under ``tuned/``
holds which shapes all but the last take; they are half precision.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _gluon, _tiles
from .._launch_cache import LARGEST_OFFSET, Launch, LaunchCache, unaligned
from .._tiles import Tile
from .call import Call, counted, features, find_rule, kind_of, online_tile
from .kernels import (
    online_backward,
    online_forward,
    short_backward,
    short_forward,
)

HOPPER, AMPERE = (90,), (80, 86, 87, 89)  # what the kernels in Gluon are written for
SHORT_TOKENS = 256  # the most that a backward has whose programs own a head
MAX_ENTRIES = 65_535  # of a grid's second axis
_INPUTS = "q_view", "k_view", "v_view", "mask_view", "lengths_ptr", "seed_ptr"
_STATISTICS = "lse_ptr", "max_logit_ptr", "entropy_ptr", "prob_norm_ptr", "head_norm_ptr"
_forward_cache = LaunchCache((*_INPUTS, "out_view", "max_log_sum_ptr", *_STATISTICS))
_backward_cache = LaunchCache(
    (
        *_INPUTS,
        "grad_view",
        "out_view",
        "max_log_sum_ptr",
        "dq_view",
        "dk_view",
        "dv_view",
        "ds_ptr",
    )
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
    kernel, tile = choose_forward(call, out, stats is not None)
    family = kernel.partition("_forward")[0]
    results = call, out, max_log_sum, stats
    if family == "warp_multihead":
        from .kernels import warp_multihead

        launch = warp_multihead.prepare_forward(tile, *results)
    elif family == "hopper":
        from .kernels import hopper_forward

        launch = hopper_forward.prepare(tile, *results)
    elif family == "ampere":
        from .kernels import ampere_forward

        launch = ampere_forward.prepare(tile, *results)
    elif family == "short":
        launch = short_forward.prepare(tile, *results)
    elif stats is None:
        launch = online_forward.prepare(call, out, max_log_sum)
    else:
        online_forward.launch(*results)
        return
    _forward_cache.start(kind, launch, tensors)


class Choice(NamedTuple):
    """The kernel that runs a call, as the rules under ``tuned/`` name it, and its tile."""

    kernel: str
    tile: Tile


def choose_forward(call: Call, out: Tensor, with_stats: bool = False) -> Choice:
    """Return what computes ``out``; of several kernels that take a call, the first here."""
    query, key, value, attn_mask, _, seed, *_ = call
    wanted = features(attn_mask, seed, query, key, value, softcap=call.softcap, scale=call.scale)
    name, shape = "forward_statistics" if with_stats else "forward", (query, key, wanted)
    if _pairs_elements(call, out) and (
        tile := warp_multihead_tile(f"warp_multihead_{name}", *shape)
    ):
        return Choice(f"warp_multihead_{name}", tile)
    if _copies_whole_rows(call, out):
        if tile := hopper_tile(f"hopper_{name}", *shape):
            return Choice(f"hopper_{name}", tile)
        if tile := ampere_tile(f"ampere_{name}", *shape):
            return Choice(f"ampere_{name}", tile)
    if tile := short_tile(f"short_{name}", query, key.shape[2], wanted):
        return Choice(f"short_{name}", tile)
    return Choice("online_forward", online_tile("online_forward", call, varlen=False))


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
    kernel, tile = choose_backward(call, grad, out, dq, dk, dv)
    family = kernel.partition("_backward")[0]
    results = out, max_log_sum, dq, dk, dv, ds
    if family == "warp_multihead":
        from .kernels import warp_multihead

        return warp_multihead.prepare_backward(tile, grad, call, dq, dk, dv)
    if family == "hopper":
        from .kernels import hopper_backward

        return hopper_backward.prepare(tile, grad, call, *results)
    if family == "ampere":
        from .kernels import ampere_backward

        return ampere_backward.prepare(tile, grad, call, *results)
    if family == "short":
        return short_backward.prepare(tile, grad, call, *results)
    return online_backward.prepare(grad, call, *results)


def choose_backward(
    call: Call, grad: Tensor, out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> Choice:
    """Return what computes the gradients; of several kernels that take a call, the first here."""
    query, key, value, attn_mask, _, seed, *_ = call
    wanted = features(
        attn_mask, seed, query, key, value, grad, softcap=call.softcap, scale=call.scale
    )
    # A key head that several query heads share has no single owner.
    if query.shape[1] == key.shape[1]:
        shape, tokens = (query, key, wanted), max(query.shape[2], key.shape[2])
        if _pairs_elements(call, grad, dq, dk, dv) and (
            tile := warp_multihead_tile("warp_multihead_backward", *shape)
        ):
            return Choice("warp_multihead_backward", tile)
        if _copies_whole_rows(call, grad, out, dq, dk, dv):
            fenced = _gluon.KEEPS_FENCES or "dropout" not in wanted
            if fenced and (tile := hopper_tile("hopper_backward", *shape)):
                return Choice("hopper_backward", tile)
            if tile := ampere_tile("ampere_backward", *shape):
                return Choice("ampere_backward", tile)
        if tile := short_tile("short_backward", query, tokens, wanted):
            return Choice("short_backward", tile)
    return Choice("online_backward", online_tile("online_backward", call, varlen=False))


def _copies_whole_rows(call: Call, *others: Tensor) -> bool:
    """Whether a program in Gluon can own a head: rows that 16 bytes at a time are copied from."""
    return len(call.query) <= MAX_ENTRIES and _fits_gluon(call, *others)


def _pairs_elements(call: Call, *others: Tensor) -> bool:
    """Return whether a warp can own heads: their rows are words of 32 bits."""
    batch, heads, _, dim = call.query.shape
    strides = (stride for t in (*call[:3], *others) for stride in t.stride()[:3])
    words = dim % 2 == 0 and all(stride % 2 == 0 for stride in strides)
    return words and batch * heads <= LARGEST_OFFSET // 2 and _fits_gluon(call, *others)


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


# --- The tile of a kernel, None where no rule takes the call --------------------------------------


def short_tile(kernel: str, query: Tensor, tokens: int, features: frozenset[str]) -> Tile | None:
    """Return the tile of a short-sequence kernel; ``tokens`` is the longer of rows and keys.

    ``BLOCK`` is rows of a tile in the forward and keys of a tile in the backward. What stays on
    chip is cut into segments of at most ``largest_segment`` for the most ``tokens`` that the rule
    takes, so that a rule is one kernel to compile and not one for each length.
    """
    rule = find_rule(kernel, query, tokens, features)
    return None if rule is None else rule["tile"].replace(tokens=rule["tokens"])


def hopper_tile(kernel: str, query: Tensor, key: Tensor, features: frozenset[str]) -> Tile | None:
    """Return the tile of a kernel that is written for Hopper alone, whose tiles are 64 rows.

    ``IN_REGISTERS`` keeps a tile of Q in the backward, then of K, in registers, so that more
    programs fit on an SM; with a tail in columns it stays in shared memory. ``PAIRED``
    passes two tiles of rows over the keys together in the forward; without a tail in
    columns, mask or dropout.
    """
    return _in_gluon(kernel, HOPPER, query, key, features)


def ampere_tile(kernel: str, query: Tensor, key: Tensor, features: frozenset[str]) -> Tile | None:
    """Return the tile of a kernel that is written for Ampere and Ada alone.

    ``BLOCK`` is the rows of a tile, or its keys, 16 or 32 of a warp; ``STEP`` how many keys, or
    rows, it sees at a time.
    """
    return _in_gluon(kernel, AMPERE, query, key, features)


def _in_gluon(
    kernel: str, gpus: tuple[int, ...], query: Tensor, key: Tensor, features: frozenset[str]
) -> Tile | None:
    batch, heads, tokens, _ = query.shape
    if _tiles.capability(query.device) not in gpus or key.shape[2] != tokens:
        return None
    # A program each, a few heads would leave most of a GPU idle. Other kernels spread a head over
    # several, all but the backward of short ones.
    spread = tokens > SHORT_TOKENS or not kernel.endswith("backward")
    if spread and batch * heads < _tiles.ENOUGH_PROGRAMS:
        return None
    if key.shape[1] != heads:
        features |= {"shared"}
    rule = find_rule(kernel, query, tokens, features)
    return None if rule is None else rule["tile"]


def warp_multihead_tile(
    kernel: str, query: Tensor, key: Tensor, features: frozenset[str]
) -> Tile | None:
    """Return the tile of a kernel whose warps own heads, at most ``HEADS`` of them."""
    if _tiles.capability(query.device) < 80 or key.shape != query.shape:
        return None
    rule = find_rule(kernel, query, query.shape[2], features)
    return None if rule is None else rule["tile"]
