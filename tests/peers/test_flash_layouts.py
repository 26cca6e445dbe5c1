"""FlashAttention's tests of packed projections, sequences of any length, caches and extremes."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from leaner_kernels import attention, attention_qkvpacked, attention_varlen
from leaner_kernels.ops.attention.op import draw_seed
from leaner_kernels.ops.attention.reference import keep_mask
from tests.peers.flash_grid import DIMS, DTYPES, HEADS, plain, random, results, seen
from tests.peers.test_flash_attention import SOURCE, Results, judge

FLAGS = (False, True)


def named(*axes: Any, step: int = 1) -> list[tuple[Any, ...]]:
    """Return each ``step``-th of a cross."""
    return [*product(*axes)][::step]


def marked_rows(rows: list[Any], short: Callable[[Any], bool]) -> list[Any]:
    return [pytest.param(*r, marks=[] if short(r) else pytest.mark.nightly) for r in rows]


def like(leaves: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    return [t.detach().to(dtype or t.dtype).requires_grad_() for t in leaves]


# --- One projection ------------------------------------------------------------------------------

PACKED = named(
    DTYPES, DIMS, (97, 128, 200, 384, 768, 1024, 1025), FLAGS, FLAGS, (0.0, 0.17), step=7
)


@pytest.mark.parametrize(
    ("dtype", "dim", "size", "causal", "local", "dropout_p"),
    marked_rows(PACKED, lambda case: case[1] in (40, 64, 192) and case[2] <= 200),
)
def test_qkvpacked(
    dtype: torch.dtype,
    dim: int,
    size: int,
    causal: bool,
    local: bool,
    dropout_p: float,
    settle: Any,
) -> None:
    leaf = random(1, size, 3, 2, dim, dtype=dtype, seed=0)
    mask = seen(size, size, 31 if local else -1, 0 if causal else 17 if local else -1)

    def ours() -> Results:
        torch.manual_seed(5)
        if not local:
            out = attention_qkvpacked(leaf, is_causal=causal, dropout_p=dropout_p)
            return results(out.transpose(1, 2), [leaf])
        query, key, value = (t.transpose(1, 2) for t in leaf.unbind(2))
        return results(attention(query, key, value, mask, dropout_p), [leaf])

    def plainly(dtype: torch.dtype | None, order: bool) -> Results:
        (packed,) = like([leaf], dtype)
        torch.manual_seed(5)
        query, key, value = (t.transpose(1, 2) for t in packed.unbind(2))
        out = plain(query, key, value, mask=mask, dropout_p=dropout_p, scale_keys=order)
        return results(out, [packed])

    settle(SOURCE, "qkvpacked", ours, judge(plainly))


# --- Sequences of any length ---------------------------------------------------------------------

SIZES = (1, 147), (113, 203), (108, 256), (256, 512), (512, 256), (1024, 1023)
VARLEN = named(
    *(DTYPES, DIMS, SIZES, tuple(HEADS), ("self", "cross"), ("", "causal", "local"), (0.0, 0.17)),
    step=23,
)


def starts(longest: int, seed: int) -> Tensor:
    """Return where three sequences start: one as long as can be, one of a token, any."""
    some = torch.randint(1, longest + 1, (1,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor([0, *accumulate((longest, 1, some.item()))], dtype=torch.int32)


class Ragged:
    """Sequences side by side, and the keys that each of their rows sees."""

    def __init__(self, dtype: torch.dtype, dim: int, size: Any, heads: str, kind: str, sees: str):
        self.same, self.sees, (count, groups) = kind == "self", sees, HEADS[heads]
        self.rows = starts(size[1] if self.same else size[0], 1)
        self.cols = self.rows if self.same else starts(size[1], 2)
        shapes = (self.rows[-1], count, dim), *((self.cols[-1], groups, dim),) * 2
        self.leaves = [random(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
        self.keywords = {"enable_gqa": count != groups}

    def mask(self, rows: int, cols: int) -> Tensor | None:
        left, right = {"": (-1, -1), "causal": (-1, 0), "local": (40, 25)}[self.sees]
        return seen(rows, cols, left, right) if self.sees else None

    def packed(self, dropout_p: float) -> Results:
        """As ``attention_varlen`` has them."""
        keywords: dict[str, Any] = dict(self.keywords)
        if not self.same:
            keywords |= {"cu_seqlens_k": self.cols, "max_seqlen_k": longest(self.cols)}
        if self.sees == "local" or (self.sees and not self.same):
            keywords["window_size"] = (-1, 0) if self.sees == "causal" else (40, 25)
        causal = self.sees == "causal" and self.same
        torch.manual_seed(5)
        return results(
            attention_varlen(
                *self.leaves,
                self.rows,
                longest(self.rows),
                is_causal=causal,
                dropout_p=dropout_p,
                **keywords,
            ),
            self.leaves,
        )

    def padded(self) -> Results:
        """As ``attention`` has them: filled up, and the filling hidden by a mask."""
        tensors = [
            torch.nn.utils.rnn.pad_sequence(
                [t[a:b] for a, b in pairwise(where.tolist())], batch_first=True
            ).transpose(1, 2)
            for t, where in zip(self.leaves, (self.rows, self.cols, self.cols))
        ]
        counts, limits = (where.diff().tolist() for where in (self.rows, self.cols))
        mask = torch.zeros(len(counts), 1, max(counts), max(limits), dtype=torch.bool)
        for entry, (n, m) in enumerate(zip(counts, limits)):
            here = self.mask(n, m)
            mask[entry, 0, :n, :m] = True if here is None else here
        out = attention(*tensors, mask, **self.keywords).transpose(1, 2)
        out = torch.cat([out[entry, :n] for entry, n in enumerate(counts)])
        return results(out, self.leaves)

    def plainly(self, dropout_p: float, dtype: torch.dtype | None, order: bool) -> Results:
        """One after the other."""
        leaves, parts = like(self.leaves, dtype), []
        torch.manual_seed(5)
        seed = draw_seed(dropout_p, leaves[0].device)
        limits = zip(pairwise(self.rows.tolist()), pairwise(self.cols.tolist()))
        for number, ((a, b), (c, d)) in enumerate(limits):
            alone = [t[None, start:stop].transpose(1, 2) for t, start, stop in
                     zip(leaves, (a, c, c), (b, d, d))]  # fmt: skip
            keep = None
            if seed is not None:
                size = leaves[0].shape[1], b - a, d - c
                keep = keep_mask(seed, 1, *size, dropout_p, first=number)
            given = {"mask": self.mask(b - a, d - c), "dropout_p": dropout_p, "keep": keep}
            parts.append(plain(*alone, **given, scale_keys=order)[0].transpose(0, 1))
        return results(torch.cat(parts), leaves)


def longest(where: Tensor) -> int:
    return int(where.diff().max())


@pytest.mark.parametrize(
    ("dtype", "dim", "size", "heads", "kind", "sees", "dropout_p"),
    marked_rows(VARLEN, lambda case: case[1] in (59, 160) and max(case[2]) <= 203),
)
def test_varlen(
    dtype: torch.dtype,
    dim: int,
    size: Any,
    heads: str,
    kind: str,
    sees: str,
    dropout_p: float,
    settle: Any,
) -> None:
    ragged = Ragged(dtype, dim, size, heads, kind, sees)
    expected = judge(partial(ragged.plainly, dropout_p))
    settle(SOURCE, "varlen", lambda: ragged.packed(dropout_p), expected)
    if dropout_p == 0:
        settle(SOURCE, "varlen, padded for a mask", ragged.padded, expected)


# --- A cache of keys and values ------------------------------------------------------------------

CACHES = (1, 128), (1, 339), (3, 1024), (64, 800), (3, 799), (64, 2048), (16, 20000), (128, 128)
CACHED = named(
    *(DTYPES, CACHES, (32, 59, 64, 128, 160), tuple(HEADS), FLAGS, FLAGS, (None, 16, 256), FLAGS),
    step=17,
)


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "size", "dim", "heads", "causal", "local", "page", "new"),
    marked_rows(CACHED, lambda case: case[2] in (59, 160) and case[1][1] <= 800),
)
def test_kvcache(
    dtype: torch.dtype,
    size: tuple[int, int],
    dim: int,
    heads: str,
    causal: bool,
    local: bool,
    page: int | None,
    new: bool,
    settle: Any,
) -> None:
    """A batch of two reads as much of a cache as it has filled; pages are gathered before that."""
    (rows, cols), (count, groups), batch = size, HEADS[heads], 2
    filled = torch.tensor([cols, max(rows, cols // 3)], dtype=torch.int32)
    query = random(batch, count, rows, dim, dtype=dtype, seed=0)
    cache = random(2, batch, cols, groups, dim, dtype=dtype, seed=1).detach()
    if page is not None:
        pages = -(-cols // page)
        pool = random(2, 3 * batch * pages, page, groups, dim, dtype=dtype, seed=2).detach()
        order = torch.randperm(len(pool[0]), generator=torch.Generator().manual_seed(3))
        cache = pool[:, order[: batch * pages].view(batch, pages)].flatten(2, 3)[:, :, :cols]
    if new:
        written = random(2, batch, rows, groups, dim, dtype=dtype, seed=4)
        for entry, stop in enumerate(filled.tolist()):
            cache[:, entry, stop - rows : stop] = written[:, entry]
    mask = torch.zeros(batch, 1, rows, cols, dtype=torch.bool)
    for entry, stop in enumerate(filled.tolist()):
        mask[entry, ..., :stop] = seen(rows, stop, 9 if local else -1, 0 if causal else -1)
    key, value = (t.transpose(1, 2) for t in cache)

    def ours() -> Results:
        keywords: dict[str, Any] = {"key_lengths": filled}
        if causal or local:
            keywords = {"attn_mask": mask}
        return {"out": attention(query, key, value, enable_gqa=count != groups, **keywords)}

    def plainly(dtype: torch.dtype | None, order: bool) -> Results:
        given = like([query, key, value], dtype)
        return {"out": plain(*given, mask=mask, scale_keys=order)}

    settle(SOURCE, "kvcache, paged", ours, judge(plainly))


# --- Extremes ------------------------------------------------------------------------------------


def three(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    return [random(*shape, dtype=dtype, seed=i) for i in range(3)]


def extreme(leaves: list[Tensor], settle: Any, group: str, **keywords: Any) -> None:
    causal = keywords.get("is_causal", False)
    mask = seen(leaves[0].shape[2], leaves[1].shape[2], -1, 0) if causal else None

    def joined(found: Results) -> Results:
        # Of one key the gradients of query and key are 0, and have no scale of their own.
        return {
            "out": found.pop("out"),
            "gradients": torch.cat([*map(torch.ravel, found.values())]),
        }

    def plainly(dtype: torch.dtype | None, order: bool) -> Results:
        given = like(leaves, dtype)
        return joined(results(plain(*given, mask=mask, scale_keys=order), given))

    def ours() -> Results:
        return joined(results(attention(*leaves, **keywords), leaves))

    settle(SOURCE, group, ours, judge(plainly))


@pytest.mark.parametrize("causal", FLAGS)
@pytest.mark.parametrize("dim", [16, 32, 64])
@pytest.mark.parametrize("size", [1, 2, 5, 17, 128])
def test_bwd_overflow(size: int, dim: int, causal: bool, settle: Any) -> None:
    query, key, value = three(torch.float16, 2, 5, size, dim)
    query, key = ((t.detach() * 5).requires_grad_() for t in (query, key))
    extreme([query, key, value], settle, "bwd overflow", is_causal=causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", FLAGS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("size", [97, 128, 200, 256])
def test_bwd_transpose(size: int, dim: int, causal: bool, dtype: torch.dtype, settle: Any) -> None:
    leaves = [
        t.detach().movedim(2, 0).contiguous().movedim(0, 2).requires_grad_()
        for t in three(dtype, 5, 2, size, dim)
    ]
    extreme(leaves, settle, "bwd transpose", is_causal=causal)


@pytest.mark.parametrize("causal", FLAGS)
@pytest.mark.parametrize("dim", [16, 32, 64])
def test_bwd_varlen_overflow(dim: int, causal: bool, settle: Any) -> None:
    where = torch.tensor([0, 3, 15, 30, 64], dtype=torch.int32)
    query, key, value = three(torch.float16, 64, 5, dim)
    leaves = [(query.detach() * 8).requires_grad_(), (key.detach() * 3).requires_grad_(), value]

    def plainly(dtype: torch.dtype | None, order: bool) -> Results:
        given, parts = like(leaves, dtype), []
        for a, b in pairwise(where.tolist()):
            mask = seen(b - a, b - a, -1, 0) if causal else None
            alone = (t[None, a:b].transpose(1, 2) for t in given)
            parts.append(plain(*alone, mask=mask, scale_keys=order)[0].transpose(0, 1))
        return results(torch.cat(parts), given)

    def ours() -> Results:
        return results(attention_varlen(*leaves, where, 15 + 19, is_causal=causal), leaves)

    settle(SOURCE, "bwd varlen overflow", ours, judge(plainly))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("causal", "local"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("size", [(1, 239), (239, 1), (113, 203), (108, 256), (512, 256)], ids=str)
def test_deterministic(
    size: tuple[int, int], causal: bool, local: bool, dtype: torch.dtype, settle: Any
) -> None:
    rows, cols = size
    query = random(2, 4, rows, 64, dtype=dtype, seed=0)
    leaves = [query, *(random(2, 4, cols, 64, dtype=dtype, seed=i) for i in (1, 2))]
    mask = seen(rows, cols, 40 if local else -1, 0 if causal else -1)

    def ours() -> list[Results]:
        return [results(attention(*leaves, mask), leaves) for _ in range(5)]

    def same(found: list[Results]) -> None:
        assert all(torch.equal(one[name], found[0][name]) for one in found for name in one)

    settle(SOURCE, "deterministic, race condition", ours, same)
