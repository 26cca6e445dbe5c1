"""What the forward and the backward kernels share: one tile of scores, and how tiles are chosen."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from leaner_kernels.ops._triton import PRECISION


class Tiles(NamedTuple):
    """Query rows and key columns of a tile, and the launch options that go with them.

    ``maxnreg`` set to all 255 registers keeps ptxas from spilling a few of them to fit one more
    program beside.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


@triton.jit
def score_tile(
    q,
    k,
    row_start,
    col_start,
    limit,
    mask_ptr,
    stride_mask_n,
    stride_mask_m,
    N,
    M,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
):
    """Return (BLOCK_M, BLOCK_N) scaled scores; -inf where ``limit`` or a mask hides."""
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    seen = (col_start + cols < limit)[None, :]
    if CAUSAL:
        seen = seen & (col_start + cols[None, :] <= row_start + rows[:, None])
    if MASK != "none":
        mask_ptr += tl.cast(row_start, tl.int64) * stride_mask_n
        mask_ptr += tl.cast(col_start, tl.int64) * stride_mask_m
        ptrs = mask_ptr + rows[:, None] * stride_mask_n + cols[None, :] * stride_mask_m
        inside = (row_start + rows < N)[:, None] & (col_start + cols < M)[None, :]
        tile = tl.load(ptrs, mask=inside, other=0)
        if MASK == "boolean":
            seen = seen & (tile != 0)
        else:
            # The most negative finite number hides, as -inf does: the lse of a row of nothing else
            # could not hold the count of its keys.
            bias = tile.to(tl.float32)
            s += tl.where(bias < -1e38, float("-inf"), bias)
    return tl.where(seen, s, float("-inf"))


def shared_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> dict[str, Any]:
    """Return the arguments by name that every attention kernel takes."""
    batch, heads, rows, dim = query.shape
    mask, mask_kind = None, "none"
    if attn_mask is not None:
        mask = attn_mask.expand(batch, heads, rows, key.shape[2])
        mask_kind = "boolean" if mask.dtype == torch.bool else "additive"
        mask = mask.view(torch.uint8) if mask_kind == "boolean" else mask
    return {
        "q_ptr": query,
        "k_ptr": key,
        "v_ptr": value,
        "mask_ptr": mask,
        # Free unless strided: the kernels count along it.
        "lengths_ptr": None if key_lengths is None else key_lengths.contiguous(),
        "seed_ptr": seed,
        **strides("q", query),
        **strides("k", key),
        **strides("v", value),
        **dict(zip(MASK_STRIDES, mask.stride() if mask is not None else (0,) * 4, strict=True)),
        "H": heads,
        "GROUP": heads // key.shape[1],
        "N": rows,
        "M": key.shape[2],
        "scale": scale,
        "keep_scale": 1 / (1 - dropout_p),
        "threshold": int(dropout_p * 2**31),
        "D": dim,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "CAUSAL": is_causal,
        "MASK": mask_kind,
        # Triton 3.10 turns multiply-add fusion off by default.
        "enable_fp_fusion": True,
    }


def choose_tiles(
    tiles: dict[tuple[int, int], Tiles],
    small: dict[tuple[int, int], Tiles],
    arguments: dict[str, Any],
) -> Tiles:
    """Return the tiles by bytes of an element and BLOCK_D.

    A mask, dropout and a head dimension that does not fill its tile take registers: they get the
    ``small`` ones.
    """
    crowded = (
        arguments["MASK"] != "none"
        or arguments["seed_ptr"] is not None
        or arguments["D"] != arguments["BLOCK_D"]
    )
    key = arguments["q_ptr"].element_size(), arguments["BLOCK_D"]
    return small[key] if crowded else tiles[key]


MASK_STRIDES = "stride_mask_b", "stride_mask_h", "stride_mask_n", "stride_mask_m"


def strides(name: str, t: Tensor) -> dict[str, int]:
    """Return the strides of batch, head and row under the names the kernels give them."""
    b, h, n, _ = t.stride()
    return {f"stride_{name}_b": b, f"stride_{name}_h": h, f"stride_{name}_n": n}
