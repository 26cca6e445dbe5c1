"""Which kernels run a call, by its shape.

``warp_multihead``: a warp owns one head or several, of up to 16 tokens. ``short``, and ``hopper``
and ``ampere`` on GPUs of those architectures: a program owns a head of up to a few hundred tokens.
``online``: programs own tiles and walk over any length. The table in each kernel's file holds
which calls it takes; those of all but the last are half precision.
"""

from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _gluon, _tiles
from .._launch_cache import LARGEST_OFFSET, Launch, LaunchCache, unaligned
from .._tiles import Tile, Tiles
from .call import Call, counted, features, find_rule, kind_of, online_tile
from .kernels import (
    online_backward,
    online_forward,
    short_backward,
    short_forward,
)

LEAST_TOKENS = 64  # above them programs in Gluon own a head
SHORT_TOKENS = 256  # the most that a backward has which spreads no head over programs
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
    """The kernel that runs a call, as its table names it, and its tile."""

    kernel: str
    tile: Tile


def choose_forward(call: Call, out: Tensor, with_stats: bool = False) -> Choice:
    """Return what computes ``out``; of several kernels that take a call, the first here."""
    query, key, value, attn_mask, _, seed, *_ = call
    wanted = features(attn_mask, seed, query, key, value, softcap=call.softcap, scale=call.scale)
    gpu, shape = _tiles.capability(query.device), (query, key, wanted)
    table = "STATISTICS_TILES" if with_stats else "TILES"
    if _pairs_elements(call, out):
        from .kernels import warp_multihead

        tiles = getattr(warp_multihead, table)
        if tile := warp_multihead_tile(tiles, *shape):
            return Choice(tiles.name, tile)
    if _copies_whole_rows(call, out):
        tiles = getattr(_in_gluon(gpu, "forward"), table)
        if tile := gluon_tile(tiles, *shape, backward=False):
            return Choice(tiles.name, tile)
    tiles = getattr(short_forward, table)
    if gpu >= 80 and (tile := short_tile(tiles, query, key, wanted)):
        return Choice(tiles.name, tile)
    tiles = online_forward.TILES
    return Choice(tiles.name, online_tile(tiles, call, varlen=False))


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
    gpu = _tiles.capability(query.device)
    # A key head that several query heads share has no single owner.
    if query.shape[1] == key.shape[1]:
        shape = query, key, wanted
        if _pairs_elements(call, grad, dq, dk, dv):
            from .kernels import warp_multihead

            tiles = warp_multihead.BACKWARD_TILES
            if tile := warp_multihead_tile(tiles, *shape):
                return Choice(tiles.name, tile)
        if _copies_whole_rows(call, grad, out, dq, dk, dv):
            tiles = _in_gluon(gpu, "backward").TILES
            fenced = gpu != 90 or _gluon.KEEPS_FENCES or "dropout" not in wanted
            if fenced and (tile := gluon_tile(tiles, *shape, backward=True)):
                return Choice(tiles.name, tile)
        tiles = short_backward.TILES
        if gpu >= 80 and (tile := short_tile(tiles, *shape)):
            return Choice(tiles.name, tile)
    tiles = online_backward.TILES
    return Choice(tiles.name, online_tile(tiles, call, varlen=False))


def _in_gluon(gpu: int, way: str) -> ModuleType:
    """Return the kernel whose programs own a head on a GPU: with wgmma on Hopper, else with mma."""
    family = "hopper" if gpu == 90 else "ampere"
    return import_module(f"{__package__}.kernels.{family}_{way}")


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
    if not _gluon.AVAILABLE or _tiles.capability(call.query.device) < 80:
        return False
    alike = all(t.dtype == call.query.dtype for t in tensors)
    strides = [t.stride(2) for t in tensors]
    if call.attn_mask is not None:
        strides.append(sum(call.attn_mask.stride()[-2:]))
    reached = max(strides) * tokens <= LARGEST_OFFSET
    return alike and reached and not unaligned(tensors)


# --- The tile of a kernel, None where no rule takes the call --------------------------------------


def short_tile(tiles: Tiles, query: Tensor, key: Tensor, features: frozenset[str]) -> Tile | None:
    """Return the tile of a short-sequence kernel, with the most tokens that its rule takes."""
    rows, cols = query.shape[2], key.shape[2]
    if rows != cols and max(rows, cols) > LEAST_TOKENS:
        return None  # a class token's row, say: most of what is on chip would be padding
    rule = find_rule(tiles, query, max(rows, cols), features)
    return None if rule is None else rule.tile.replace(tokens=rule.tokens)


def gluon_tile(
    tiles: Tiles, query: Tensor, key: Tensor, features: frozenset[str], *, backward: bool
) -> Tile | None:
    """Return the tile of a kernel for Hopper or Ampere whose programs own a head."""
    batch, heads, tokens, _ = query.shape
    if key.shape[2] != tokens or tokens <= LEAST_TOKENS:
        return None
    # A program each, a few heads would leave most of a GPU idle. The kernels for any length spread
    # a head over several.
    few = batch * heads < _tiles.ENOUGH_PROGRAMS
    if few and (tokens > SHORT_TOKENS or not backward):
        return None
    if key.shape[1] != heads:
        features |= {"shared"}
    rule = find_rule(tiles, query, tokens, features)
    return None if rule is None else rule.tile


def warp_multihead_tile(
    tiles: Tiles, query: Tensor, key: Tensor, features: frozenset[str]
) -> Tile | None:
    """Return the tile of a kernel whose warps own heads, at most ``HEADS`` of them."""
    if key.shape != query.shape:
        return None
    rule = find_rule(tiles, query, query.shape[2], features)
    return None if rule is None else rule.tile
