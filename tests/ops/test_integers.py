"""Lengths and starts of sequences: any integers, and lists of ints, mean what int32 means."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import leaner_kernels

DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)
LENGTHS, STARTS, KEY_STARTS = (5, 8), (0, 3, 8), (1, 2, 8)
Q, T = torch.randn(2, 3, 8, 4), torch.randn(8, 3, 4)
QKV = Q.new_ones(2, 8, 3, 3, 4).normal_()
# What takes integers: the call, and whether they are lengths.
CALLS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "attention": (lambda n: leaner_kernels.attention(Q, Q, Q, key_lengths=n), True),
    "attention_with_stats": (
        lambda n: leaner_kernels.attention_with_stats(Q, Q, Q, key_lengths=n),
        True,
    ),
    "attention_qkvpacked": (lambda n: leaner_kernels.attention_qkvpacked(QKV, key_lengths=n), True),
    "attention_qkvpacked_with_stats": (
        lambda n: leaner_kernels.attention_qkvpacked_with_stats(QKV, key_lengths=n),
        True,
    ),
    "nystrom_attention": (
        lambda n: leaner_kernels.nystrom_attention(Q, Q, Q, 4, key_lengths=n),
        True,
    ),
    "nystrom_attention_with_stats": (
        lambda n: leaner_kernels.nystrom_attention_with_stats(Q, Q, Q, 4, key_lengths=n),
        True,
    ),
    "attention_varlen": (lambda n: leaner_kernels.attention_varlen(T, T, T, n, 6), False),
    "attention_varlen, keys": (
        lambda n: leaner_kernels.attention_varlen(
            T, T, T, list(STARTS), 6, cu_seqlens_k=n, max_seqlen_k=6
        ),
        False,
    ),
    "attention_varlen_with_stats": (
        lambda n: leaner_kernels.attention_varlen_with_stats(T, T, T, n, 6),
        False,
    ),
}
every_call = pytest.mark.parametrize("name", CALLS)


def values_of(name: str) -> tuple[int, ...]:
    return LENGTHS if CALLS[name][1] else KEY_STARTS if "keys" in name else STARTS


def int32(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_same(actual: Any, expected: Any) -> None:
    pairs = [(actual, expected)] if isinstance(actual, Tensor) else zip(actual, expected)
    for one, other in pairs:
        assert one is other is None or torch.equal(one, other)


@every_call
def test_any_integers_mean_what_int32_means(name: str) -> None:
    call, values = CALLS[name][0], values_of(name)
    expected = call(int32(values))
    for given in (list(values), values, *(int32(values).to(dtype) for dtype in DTYPES)):
        assert_same(call(given), expected)


@every_call
def test_what_is_no_integer_or_does_not_fit_is_refused_in_one_line(name: str) -> None:
    call, values = CALLS[name][0], values_of(name)
    argument = "key_lengths" if CALLS[name][1] else "cu_seqlens"
    past, below = (*values[:-1], 2**32 + values[-1]), (*values[:-1], values[-1] - 2**32)
    wrong = [
        torch.tensor(past),
        torch.tensor(below),
        *(torch.tensor(values).to(dtype) for dtype in (torch.bool, torch.float32)),
        list(past),
        below,
        [2**80, *values[1:]],
        [float(value) for value in values],
        [True] * len(values),
        [int32(values)],
        [list(values)],
        [values[0] + 50, *values[1:]],
        list(values)[:0],
        "58",
        None if argument == "cu_seqlens" and "keys" not in name else 3,
    ]
    for given in wrong:
        with pytest.raises(ValueError, match=argument) as caught:
            call(given)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 250


def test_values_of_a_list_are_checked_wherever_the_queries_are() -> None:
    """They are on the host: no device is waited for."""
    q, t = Q.to("meta"), T.to("meta")
    assert leaner_kernels.attention(q, q, q, key_lengths=[5, 8]).device.type == "meta"
    with pytest.raises(ValueError, match=r"key_lengths must be in \[1, 8\], got 9"):
        leaner_kernels.attention(q, q, q, key_lengths=[5, 9])
    with pytest.raises(ValueError, match="cu_seqlens must not decrease"):
        leaner_kernels.attention_varlen(t, t, t, [0, 5, 3], 8)


@pytest.mark.parametrize("given", [torch.tensor(LENGTHS), list(LENGTHS)], ids=["int64", "list"])
def test_they_compile_into_one_graph(given: Any) -> None:
    call, _ = CALLS["attention_with_stats"]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same(compiled(given), call(int32(LENGTHS)))
