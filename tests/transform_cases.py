"""Small calls of every operator, in float64, for tests of what transforms make of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import leaner_kernels  # noqa: F401 - registers the operators

OPS = torch.ops.leaner_kernels
EXAMPLES = 3


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


LENGTHS = integers(3, 4)


def calls() -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Operators without ``_with_stats``, and arguments for one example, in float64."""
    torch.manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    q, k, v = randn(2, 4, 3, 2), randn(2, 2, 4, 2), randn(2, 2, 4, 2)
    mask = randn(4, 3, 4)
    unseen = mask.where(torch.arange(3)[:, None] != 1, float("-inf"))
    packed, seed = randn(2, 4, 3, 2, 3), torch.tensor([5])
    tokens, starts = randn(5, 3, 4, 2).unbind(1), integers(0, 2, 2, 4)
    tokens = tokens[0], tokens[1][:, :2], tokens[2][:, :2]
    starts = starts, integers(1, 3, 4, 4)
    return {
        "attention": ("attention", (q, k, v, mask, LENGTHS, None, 0.0, False, 0.4, 0.0, -1, -1)),
        "row without keys": (
            "attention",
            (q, k, v, unseen, None, None, 0.0, False, 0.4, 0.0, -1, -1),
        ),
        "boolean mask": (
            "attention",
            (q, k, v, randn(2, 1, 3, 1) > 0, None, None, 0.0, False, 1.0, 0.0, -1, -1),
        ),
        "causal": ("attention", (q, k, v, None, None, None, 0.0, True, 0.4, 0.0, -1, -1)),
        "dropout": ("attention", (q, k, v, None, None, seed, 0.4, False, 0.4, 0.0, -1, -1)),
        "softcap": ("attention", (q, k, v, mask, LENGTHS, None, 0.0, False, 0.4, 0.7, -1, -1)),
        "packed": ("attention_qkvpacked", (packed, LENGTHS, None, 0.0, True, 0.4, -1, -1)),
        "varlen": ("attention_varlen", (*tokens, *starts, None, 3, 3, 0.0, False, 0.4, -1, -1)),
        "varlen, dropout": (
            "attention_varlen",
            (*tokens, *starts, seed, 3, 3, 0.3, True, 0.4, -1, -1),
        ),
        "cross-covariance": ("cross_covariance_attention", (packed, randn(2).exp(), 1e-12)),
        "channel": ("channel_attention", (packed, 0.4)),
        "window": ("window_attention", (randn(2, 2, 4, 3, 2, 3), 1, 2, 0.4)),
        "outlook": (
            "outlook_attention",
            (randn(2, 3, 3, 2, 2), randn(2, 2, 2, 2, 9, 9), 3, 2, 1, 1.0),
        ),
    }


def floating(args: tuple[Any, ...]) -> list[int]:
    return [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()]


def to_float(a: Any) -> Any:
    return a.float() if isinstance(a, Tensor) and a.is_floating_point() else a


def of_floats(
    name: str, args: tuple[Any, ...], result: Callable[[Any], Any] = lambda r: r[0]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return the operator as a function of its floating-point tensors, and these."""
    places = floating(args)

    def function(*tensors: Tensor) -> Any:
        given = list(args)
        for i, t in zip(places, tensors):
            given[i] = t
        return result(getattr(OPS, name)(*given))

    return function, [args[i] for i in places]


def several(t: Tensor, dim: int) -> Tensor:
    """Stack different examples along ``dim``, the first one as it is."""
    return torch.stack([t * (1 + i) for i in range(EXAMPLES)], dim)
