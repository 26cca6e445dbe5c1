"""Jagged nested tensors: ``attention`` of them is PyTorch's, sequence by sequence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leaner_kernels import attention, attention_with_stats
from tests.error_budget import assert_within_budget

# PyTorch itself has the prototype of nested tensors warn.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
ROWS, COLS = (5, 1, 9), (4, 7, 2)


def jagged(rows: list[Tensor]) -> Tensor:
    """Return (B, H, j, D) of sequences (n, H, D)."""
    return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


def sequences(
    lengths: tuple[int, ...], heads: int = 3, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [torch.randn(n, heads, 8).to(dtype) for n in lengths]


def one_by_one(
    q: list[Tensor], k: list[Tensor], v: list[Tensor], dtype: torch.dtype, **params: Any
) -> list[Tensor]:
    """Return (T, H, D), and its gradients: PyTorch's function on each sequence."""
    leaves = [torch.cat(t).to(dtype).requires_grad_() for t in (q, k, v)]
    split = [leaf.split([len(t) for t in of]) for leaf, of in zip(leaves, (q, k, v))]
    parts = [
        F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in each), **params)
        for each in zip(*split)
    ]
    out = torch.cat([part[0].transpose(0, 1) for part in parts])
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cols", [None, COLS], ids=["self", "crossed"])
@pytest.mark.parametrize(
    "params",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "enable_gqa": True}],
    ids=str,
)
def test_each_sequence_attends_as_by_pytorchs_function(
    params: dict[str, Any], cols: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    q = sequences(ROWS, 6 if "enable_gqa" in params else 3, dtype)
    k, v = sequences(cols or ROWS, dtype=dtype), sequences(cols or ROWS, dtype=dtype)
    leaves = [jagged(t).detach().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves, **params)
    assert out.is_nested
    assert (out.shape, out.dtype, out.layout) == (leaves[0].shape, dtype, torch.jagged)
    found = [out, *torch.autograd.grad(out.values().square().sum(), leaves)]
    peers = one_by_one(q, k, v, dtype, **params)
    exact = one_by_one(q, k, v, torch.float64, **params)
    for nested, peer, truth in zip(found, peers, exact, strict=True):
        actual = nested.values().transpose(0, 1)
        if dtype == torch.float64:
            torch.testing.assert_close(actual, truth)
        else:
            assert_within_budget(actual, peer, truth)


def test_statistics_are_those_of_each_sequence() -> None:
    torch.manual_seed(0)
    q, k, v = (sequences(ROWS) for _ in range(3))
    sample = torch.tensor([2], dtype=torch.int32)
    x = jagged(q)
    key, value = (
        torch.nested.nested_tensor_from_jagged(torch.cat(t), x.offsets()).transpose(1, 2)
        for t in (k, v)
    )
    stats = attention_with_stats(x, key, value, is_causal=True, sample=sample)
    assert stats.out.shape == x.shape
    assert stats.lse.shape == x.shape[:-1]
    for i, each in enumerate(zip(q, k, v)):
        dense = attention_with_stats(*(t.transpose(0, 1)[None] for t in each), is_causal=True)
        torch.testing.assert_close(stats.out[i], dense.out[0])
        torch.testing.assert_close(stats.lse[i], dense.lse[0])
        for name in ("max_logit", "entropy", "prob_norm", "head_norm"):
            torch.testing.assert_close(getattr(stats, name)[i], getattr(dense, name)[0])
    assert stats.heads is not None
    torch.testing.assert_close(stats.heads[0], stats.out[2].transpose(0, 1).flatten(1))


def test_they_compile_into_one_graph() -> None:
    torch.manual_seed(0)
    x = jagged(sequences(ROWS))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x).values(), attention(x, x, x).values())


X = torch.nested.nested_tensor([torch.randn(n, 3, 8) for n in ROWS], layout=torch.jagged)
J, DENSE = X.transpose(1, 2), torch.randn(3, 3, 4, 8)
HOLES = torch.nested.narrow(
    torch.randn(3, 9, 3, 8), 1, torch.tensor([0, 1, 2]), torch.tensor((*ROWS[:2], 4)),
    layout=torch.jagged,
).transpose(1, 2)  # fmt: skip
BAD_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "a dense key": ((J, DENSE, DENSE), {}, "key must be a jagged nested tensor as query is"),
    "a dense query": ((DENSE, J, J), {}, "key must not be nested"),
    "a dense value": ((J, J, DENSE), {}, "value must be a jagged nested tensor as query is"),
    "no key": ((J, None, J), {}, "key must be a jagged nested tensor as query is, got NoneType"),
    "tokens before heads": ((X, X, X), {}, r"query must be .*\(B, H, j, D\)"),
    "no heads": ((torch.nested.nested_tensor([torch.ones(2, 8)], layout=torch.jagged),) * 3, {},
                 r"query must be .*\(B, H, j, D\)"),
    "a mask": ((J, J, J, torch.ones(1, 1).bool()), {}, "attn_mask must be left out beside"),
    "lengths": ((J, J, J), {"key_lengths": [1, 2, 3]}, "key_lengths must be left out beside"),
    "a softcap": ((J, J, J), {"softcap": 2.0}, "softcap must be left out beside"),
    "values of other lengths": ((J, J, jagged(sequences((9, 1, 5)))), {},
                                "key and value must have the same sequences"),
    "other sequences": ((J, *[jagged(sequences((9, 1)))] * 2), {}, "cu_seqlens_k must have 4"),
    "heads differ": ((J, *[jagged(sequences(ROWS, 2))] * 2), {}, "key has 2 heads for 3 query"),
    "holes": ((HOLES,) * 3, {}, "query must have no holes: call .contiguous"),
    "strided": ((torch.nested.nested_tensor(list(DENSE), layout=torch.strided),) * 3, {},
                "query must not be nested: attention_varlen"),
    "no flag": ((J, J, J), {"is_causal": "yes"}, "is_causal must be True or False"),
}  # fmt: skip


@pytest.mark.parametrize("function", [attention, attention_with_stats])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_what_sequences_cannot_do_is_refused_in_one_line(
    name: str, function: Callable[..., Any]
) -> None:
    arguments, params, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message) as caught:
        function(*arguments, **params)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
