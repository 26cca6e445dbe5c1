"""FlashAttention's tests, put to ours: its sizes, masks, layouts, caches and its own criterion.

Twice the error of a plain attention in the same dtype, against one in float64. Where it counts
causality from the last row and key, ours is passed ``causal_lower_right``; ``attention_varlen``
counts from the first, which is the same where a sequence has as many rows as keys.
"""

from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from leaner_kernels import attention
from leaner_kernels.adapters import flash_attn
from leaner_kernels.ops.attention.reference import keep_mask
from leaner_kernels.ops.route import draw_seed
from tests.error_budget import assert_within_budget
from tests.peers.flash_grid import (
    CASES,
    GRID,
    HEADS,
    FlashGridCase,
    alibi,
    plain,
    random,
    results,
    seen,
    window,
)
from tests.peers.outcomes import settle

Results = dict[str, Tensor]


def judge(plainly: Callable[..., Results]) -> Callable[[Results], None]:
    """Hold results to what a plain attention makes in two orders, ``plainly(dtype, order)``."""

    def judged(found: Results) -> None:
        exact = plainly(torch.float64, False)
        peers = [plainly(None, order) for order in (False, True)]
        for name, result in found.items():
            assert_within_budget(result, tuple(peer[name] for peer in peers), exact[name])

    return judged


def marked(cases: list[Any], short: Callable[[Any], bool]) -> list[Any]:
    return [
        pytest.param(c, marks=[] if short(c) else pytest.mark.nightly, id=str(c)) for c in cases
    ]


def test_every_two_values_of_the_grid_meet() -> None:
    for (i, a), (j, b) in combinations(enumerate(GRID.values()), 2):
        assert {(case[i], case[j]) for case in CASES} == set(product(a, b))


def inputs(case: FlashGridCase) -> list[Tensor]:
    """Return query (B, N, H, D) and keys with values in one, as a projection leaves them."""
    (rows, cols), (heads, groups) = case.size, HEADS[case.heads]
    shapes = (1, rows, heads, case.dim), (1, cols, 2, groups, case.dim)
    return [random(*s, dtype=case.dtype, seed=i) for i, s in enumerate(shapes)]


def attend(function: Callable[..., Tensor], leaves: list[Tensor], **keywords: Any) -> Results:
    query, (key, value) = leaves[0], leaves[1].unbind(2)
    out = function(*(t.transpose(1, 2) for t in (query, key, value)), **keywords)
    return results(out, leaves)


def masked(case: FlashGridCase) -> tuple[Tensor | None, Tensor | None]:
    """Return what is added to the scores, and what is seen of them."""
    left, right = window(case)
    bias = alibi(HEADS[case.heads][0], *case.size) if case.alibi else None
    if case.alibi == "alibi_half":
        bias = bias.to(case.dtype)
    return bias, None if left == right == -1 else seen(*case.size, left, right)


def ours(case: FlashGridCase) -> Results:
    (rows, cols), (bias, mask) = case.size, masked(case)
    keywords: dict[str, Any] = {"enable_gqa": case.heads != "mha", "dropout_p": case.dropout_p}
    if bias is not None:
        keywords["attn_mask"] = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    elif case.local:
        keywords["attn_mask"] = mask
    elif case.causal:
        causal = {"is_causal": True}
        keywords |= causal if rows == cols else {"attn_mask": causal_lower_right(rows, cols)}
    if case.softcap:
        keywords["softcap"] = case.softcap
    torch.manual_seed(5)
    return attend(attention, inputs(case), **keywords)


def plainly(case: FlashGridCase, dtype: torch.dtype | None, order: bool) -> Results:
    bias, mask = masked(case)
    leaves = [t.detach().to(dtype or case.dtype).requires_grad_() for t in inputs(case)]
    torch.manual_seed(5)
    given: dict[str, Any] = {"bias": bias, "mask": mask, "softcap": case.softcap}
    given["dropout_p"] = case.dropout_p
    # No function of PyTorch computes a softcap: ours does, whose dropout is a function of a seed.
    if case.softcap and (drawn := draw_seed(case.dropout_p, torch.device("cpu"))) is not None:
        given["keep"] = keep_mask(drawn, 1, HEADS[case.heads][0], *case.size, case.dropout_p)
    return attend(plain, leaves, **given, scale_keys=order)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("case", marked(CASES, lambda case: case.small))
def test_output(case: FlashGridCase) -> None:
    settle(lambda: ours(case), judge(partial(plainly, case)))


def by_its_name(case: FlashGridCase) -> Results:
    """Call what our adapter has under FlashAttention's name, as its own test does."""
    query, packed = leaves = inputs(case)
    left, right = window(case._replace(causal=False))
    slopes = torch.ones(HEADS[case.heads][0]) if case.alibi else None
    torch.manual_seed(5)
    out = flash_attn.flash_attn_kvpacked_func(
        query,
        packed,
        case.dropout_p,
        causal=case.causal,
        window_size=(left, right),
        softcap=case.softcap,
        alibi_slopes=slopes,
    )
    return results(out.transpose(1, 2), leaves)


@pytest.mark.parametrize("case", marked(CASES, lambda case: case.small))
def test_output_by_flash_attentions_name(case: FlashGridCase) -> None:
    settle(lambda: by_its_name(case), judge(partial(plainly, case)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [16, 32, 64])
@pytest.mark.parametrize("size", [1, 2, 5, 17, 128])
def test_gradients_of_large_scores_do_not_overflow(
    size: int,
    dim: int,
    causal: bool,
) -> None:
    shape = 2, 5, size, dim
    leaves = [random(*shape, dtype=torch.float16, seed=i) for i in range(3)]
    leaves[:2] = [(5 * t.detach()).requires_grad_() for t in leaves[:2]]
    mask = seen(size, size, -1, 0) if causal else None

    def joined(found: Results) -> Results:
        # Of one key the gradients of query and key are 0, and have no scale of their own.
        return {"out": found.pop("out"), "d": torch.cat([*map(torch.ravel, found.values())])}

    def plainly(dtype: torch.dtype | None, order: bool) -> Results:
        operands = [t.detach().to(dtype or t.dtype).requires_grad_() for t in leaves]
        return joined(results(plain(*operands, mask=mask, scale_keys=order), operands))

    def ours() -> Results:
        return joined(results(attention(*leaves, is_causal=causal), leaves))

    settle(ours, judge(plainly))
