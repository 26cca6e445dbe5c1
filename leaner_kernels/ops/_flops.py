"""FLOPs of the operators for PyTorch's ``FlopCounterMode``, counted as it counts its own attention.

Only products count, 2 per multiply-add, and all of them: what a mask or causality hides is not
subtracted, nor are the further products by which a captured head gets its precision added. A
backward computes every product of the forward but the last again, and two gradients of each.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Products(NamedTuple):
    """FLOPs of a forward: of its last product, whose result is the output, and of all others."""

    last: int
    others: int


def _softmax(query: Tensor, key: Tensor, *rest: Any) -> Products:
    batch, heads, rows, dim = query.shape
    product = 2 * batch * heads * rows * key.shape[2] * dim
    return Products(product, product)


def _packed(qkv: Tensor, *rest: Any) -> Products:
    batch, tokens, _, heads, dim = qkv.shape
    product = 2 * batch * heads * tokens**2 * dim
    return Products(product, product)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    max_seqlen_k: int,
    *rest: Any,
) -> Products:
    _, heads, dim = query.shape
    lengths = zip(_lengths(cu_seqlens, max_seqlen), _lengths(cu_seqlens_k, max_seqlen_k))
    product = 2 * heads * dim * sum(rows * cols for rows, cols in lengths)
    return Products(product, product)


def _lengths(starts: Tensor, longest: int) -> list[int]:
    """Return the tokens of each sequence, all of the longest where values cannot be read."""
    if starts.device.type == "meta" or isinstance(starts, torch._subclasses.FakeTensor):
        return [longest] * (starts.shape[0] - 1)
    return starts.diff().clamp(max=longest).tolist()


def _channels(qkv: Tensor, *rest: Any) -> Products:
    batch, tokens, _, heads, dim = qkv.shape
    product = 2 * batch * heads * dim**2 * tokens
    return Products(product, product)


def _window(qkv: Tensor, *others: Any) -> Products:
    batch, y, x, _, heads, dim = qkv.shape
    rows, cols, _ = others[-3:]
    product = 2 * batch * heads * y * x * rows * cols * dim
    return Products(product, product)


def _outlook(value: Tensor, logits: Tensor, *rest: Any) -> Products:
    return Products(2 * logits.numel() * value.shape[-1], 0)


def _nystrom(query: Tensor, *others: Any) -> Products:
    batch, heads, tokens, dim = query.shape
    m, _, iterations, _ = others[-4:]
    tall = 2 * batch * heads * tokens * m * dim
    square = 2 * batch * heads * m**2
    # Two scores and K3 V are tall; one score and Z (K3 V) square; four products in an iteration.
    return Products(tall, 3 * tall + square * (2 * dim + 4 * iterations * m))


PRODUCTS: dict[str, Callable[..., Products]] = {
    "attention": _softmax,
    "attention_qkvpacked": _packed,
    "attention_varlen": _varlen,
    "cross_covariance_attention": _channels,
    "channel_attention": _channels,
    "window_attention": _window,
    "outlook_attention": _outlook,
    "nystrom_attention": _nystrom,
}


def formulas() -> Iterator[tuple[str, Callable[..., int]]]:
    """Yield each operator's name and FLOPs, a function of the arguments that it is called with."""
    for name, products in PRODUCTS.items():

        def forward(*args: Any, out_val: Any = None, products=products) -> int:
            return sum(products(*args))

        def backward(grad: Tensor, *args: Any, out_val: Any = None, products=products) -> int:
            last, others = products(*args)
            return 2 * last + 3 * others

        yield name, forward
        yield f"{name}_with_stats", forward
        yield f"{name}_backward", backward


def register() -> None:
    """Tell ``torch.utils.flop_counter``, which this imports."""
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in formulas():
        operator = getattr(torch.ops.leaner_kernels, name)
        register_flop_formula(operator, get_raw=True)(formula)
