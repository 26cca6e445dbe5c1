"""What Triton's interpreter computes otherwise than a GPU: bfloat16, and how floats are rounded.

The interpreter keeps bfloat16 as 16-bit integers and multiplies those; ``right_bfloat16`` mends
that for every test here. It also rounds every result to nearest and sums in numpy's order;
``like_a_gpu`` rounds as tensor cores and the special function units do.

Sources: tensor cores add the exact products of a step to the accumulator and truncate (Fasi,
Higham, Mikaitis, Pranesh 2021, "Numerical behavior of NVIDIA tensor cores"); ex2.approx, div.full
and sqrt.approx with the errors that the PTX ISA states.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Array = npt.NDArray[Any]
aten = torch.ops.aten

STEP = 16  # products that a tensor core sums before it truncates
EX2_ERROR = 2.0**-22.5
DIVISION_ERROR = 2.0**-23  # of 2 units in the last place
ROOT_ERROR = 2.0**-23
LOG2_E = np.float32(1.4426950408889634)


def widen(bits: Array) -> Array:
    """Return the float32 numbers that bfloat16 bit patterns stand for."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(numbers: Array) -> Array:
    """Return the bit patterns of float32 numbers rounded to bfloat16, ties to even."""
    bits = np.asarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    # Rounding could carry a nan's payload away.
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def _operand(handle: TensorHandle) -> Array:
    return widen(handle.data) if handle.dtype.scalar == tl.bfloat16 else handle.data


def _cast(self: InterpreterBuilder, src: TensorHandle, dst_type: Any) -> TensorHandle:
    source, target = src.dtype.scalar, dst_type.scalar
    if source == target:
        return src
    if source == tl.bfloat16:
        src = TensorHandle(widen(src.data), tl.float32)
    if target == tl.bfloat16:
        return TensorHandle(narrow(src.data.astype(np.float32)), tl.bfloat16)
    return _original_cast(self, src, dst_type)


def _binary(
    self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Array]
) -> TensorHandle:
    if lhs.dtype.scalar != tl.bfloat16:
        return _original_binary(self, lhs, rhs, op)
    found = op(_operand(lhs), _operand(rhs))
    is_float = found.dtype == np.float32
    return TensorHandle(narrow(found) if is_float else found, lhs.dtype.scalar)


def _dot(
    self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any
) -> TensorHandle:
    found = np.matmul(_operand(a), _operand(b), dtype=d.data.dtype) + d.data
    return TensorHandle(found, d.dtype.scalar)


_original_cast = InterpreterBuilder.cast_impl
_original_binary = InterpreterBuilder.binary_op


@contextmanager
def right_bfloat16() -> Iterator[None]:
    """Let the interpreter convert, multiply and add bfloat16 numbers as what they stand for."""
    with mock.patch.multiple(
        InterpreterBuilder,
        cast_impl=_cast,
        create_fp_to_fp=lambda self, src, dst_type, _: _cast(self, src, dst_type),
        binary_op=_binary,
        create_dot=_dot,
    ):
        yield


def truncate(numbers: Array) -> Array:
    """Return float64 numbers as float32, rounded towards zero."""
    found = numbers.astype(np.float32)
    past = np.abs(found.astype(np.float64)) > np.abs(numbers)
    return np.where(past, np.nextafter(found, np.float32(0)), found)


def _accumulate(a: TensorHandle, b: TensorHandle, d: TensorHandle) -> TensorHandle:
    """Return d + a b, summed as a GPU does."""
    left, right = (_operand(handle).astype(np.float64) for handle in (a, b))
    found = d.data.astype(np.float32)
    half = a.dtype.scalar in (tl.bfloat16, tl.float16)
    step = STEP if half else 1  # float32 products are a chain of fused multiply-adds
    with np.errstate(all="ignore"):
        for k in range(0, left.shape[-1], step):
            terms = np.matmul(left[..., k : k + step], right[..., k : k + step, :])
            total = found.astype(np.float64) + terms
            found = truncate(total) if half else total.astype(np.float32)
    return TensorHandle(found.astype(d.data.dtype), d.dtype.scalar)


def _gpu_dot(
    self: InterpreterBuilder,
    a: TensorHandle,
    b: TensorHandle,
    d: TensorHandle,
    _precision: Any,
    imprecise: int,
) -> TensorHandle:
    result = _accumulate(a, b, d)
    if imprecise == 0 and not d.data.any():
        result.factors = a, b
    return result


def _gpu_add(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
    """Add; a product that started at zero starts at the other operand, as the compiler has it."""
    for product, other in ((lhs, rhs), (rhs, lhs)):
        if (factors := getattr(product, "factors", None)) is not None:
            return _accumulate(*factors, other)
    return self.binary_op(lhs, rhs, np.add)


def _gpu_multiply(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
    """Multiply; a factor of 1 is gone before the compiler looks for products that are added."""
    is_product = getattr(lhs, "factors", None) is not None
    return lhs if is_product and np.all(rhs.data == 1) else self.binary_op(lhs, rhs, np.multiply)


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """Let products, exponentials, divisions and roots be as inexact as a GPU's, from a seed."""
    generator = np.random.default_rng(0)

    def off(exact: Array, error: float) -> Array:
        factors = 1 + error * generator.uniform(-1, 1, np.shape(exact))
        found = (exact * factors).astype(np.float32)
        # Powers of two, a softmax's 1 above all, come out exact.
        is_power = np.abs(np.frexp(np.where(np.isfinite(exact), exact, 1.0))[0]) == 0.5
        return np.where(is_power, exact.astype(np.float32), found)

    def approximate(op: Callable[..., Array], error: float) -> Callable[..., TensorHandle]:
        def method(self: InterpreterBuilder, *handles: TensorHandle) -> TensorHandle:
            assert all(handle.data.dtype == np.float32 for handle in handles)
            with np.errstate(all="ignore"):
                exact = op(*(np.asarray(h.data, np.float64) for h in handles))
                return TensorHandle(off(exact, error), handles[0].dtype.scalar)

        return method

    def exp(numbers: Array) -> Array:
        # e^x is computed as 2^(x log2 e), whose product is rounded.
        return np.exp2((numbers.astype(np.float32) * LOG2_E).astype(np.float64))

    with (
        right_bfloat16(),
        mock.patch.multiple(
            InterpreterBuilder,
            create_dot=_gpu_dot,
            create_fadd=_gpu_add,
            create_fmul=_gpu_multiply,
            create_exp2=approximate(np.exp2, EX2_ERROR),
            create_exp=approximate(exp, EX2_ERROR),
            create_fdiv=approximate(np.divide, DIVISION_ERROR),
            create_sqrt=approximate(np.sqrt, ROOT_ERROR),
        ),
    ):
        yield


class LibraryProducts(TorchDispatchMode):
    """Let PyTorch's batched float32 products be chains of multiply-adds, as cuBLAS has them.

    What a BLAS makes of them on a CPU depends on the processor.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[-1], Tensor) and args[-1].dtype == torch.float32:
            if func is aten.bmm.default:
                return self._chain(*args)
            if func is aten.baddbmm.default:
                return args[0] + self._chain(*args[1:])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _chain(a: Tensor, b: Tensor) -> Tensor:
        total = a.new_zeros(*a.shape[:2], b.shape[2])
        left, right = a.double(), b.double()
        for k in range(a.shape[2]):
            total = torch.addcmul(total.double(), left[..., k, None], right[:, k, None]).float()
        return total


@contextmanager
def contracted() -> Iterator[None]:
    """Let a product that is added to or subtracted from round once, with the sum.

    So does compiled code, wherever the product goes straight into the sum.
    """
    select = InterpreterBuilder.create_select

    def multiply(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        found = self.binary_op(lhs, rhs, np.multiply)
        if found.data.dtype == np.float32:
            # Of two float32 numbers a float64 holds the product.
            found.product = lhs.data.astype(np.float64) * rhs.data
        return found

    def joined(op: Any) -> Any:
        def method(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
            products = [getattr(handle, "product", None) for handle in (lhs, rhs)]
            if products[0] is not None:
                return TensorHandle(op(products[0], rhs.data).astype(np.float32), lhs.dtype.scalar)
            if products[1] is not None:
                return TensorHandle(op(lhs.data, products[1]).astype(np.float32), lhs.dtype.scalar)
            return self.binary_op(lhs, rhs, op)

        return method

    def choose(self: InterpreterBuilder, cond: Any, lhs: Any, rhs: Any) -> TensorHandle:
        # A mask that hides nothing is known when compiling, and gone.
        return lhs if np.all(cond.data) else select(self, cond, lhs, rhs)

    with mock.patch.multiple(
        InterpreterBuilder,
        create_fmul=multiply,
        create_fadd=joined(np.add),
        create_fsub=joined(np.subtract),
        create_select=choose,
    ):
        yield
