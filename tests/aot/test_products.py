"""What the compiler makes of the two device helpers that exist because of what it would make."""

import os
import re

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("runs without TRITON_INTERPRET=1, on backend cpu", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.resources import SUPPORTED
from leaner_kernels.ops._triton import product_apart, scaled


@triton.jit
def _summed(x_ptr, out_ptr, count, DTYPE: tl.constexpr, APART: tl.constexpr):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    total = tl.zeros([64, 64], tl.float32)
    for i in range(count):
        x = tl.load(x_ptr + i * 4096 + at).to(DTYPE)
        total += product_apart(x, x) if APART else tl.dot(x, x, input_precision="ieee")
    tl.store(out_ptr + at, total)


@triton.jit
def _centred(x_ptr, out_ptr, factor, SCALED: tl.constexpr):
    at = tl.arange(0, 128)
    x = tl.load(x_ptr + at)
    s = scaled(x, factor) if SCALED else x * factor
    tl.store(out_ptr + at, s - tl.max(s, axis=0))


def compiled(kernel: triton.JITFunction, gpu: int, **constants: object) -> dict[str, str]:
    pointers = {"x_ptr": "*fp32", "out_ptr": "*fp32", "count": "i32", "factor": "fp32"}
    signature = {name: pointers.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    options = {"enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", gpu, 32), options=options).asm


def accumulators(intermediate: str) -> set[str]:
    """Return the names of what products are added to: constants are called ``cst``."""
    products = r"tt\.dot %\w+, %\w+, (%[a-z]+)"
    return set(re.findall(products, intermediate))


@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.float32], ids=str)
def test_products_of_tiles_stay_apart(dtype: tl.dtype) -> None:
    apart, joined = (
        accumulators(compiled(_summed, SUPPORTED[-1], DTYPE=dtype, APART=apart)["ttir"])
        for apart in (True, False)
    )
    assert apart == {"%cst"}
    # What the helper is there for: without it they are one chain.
    assert "%cst" not in joined


@pytest.mark.parametrize("gpu", SUPPORTED)
def test_a_scaled_score_is_rounded_before_its_maximum_is_subtracted(gpu: int) -> None:
    rounded, joined = (compiled(_centred, gpu, SCALED=each)["ptx"] for each in (True, False))
    # Each thread subtracts the maximum in an operation of its own ...
    assert "sub.f32" in rounded or "sub.rn.f32" in rounded
    # ... which without the helper is joined with the multiplication.
    assert "sub" not in re.findall(r"\b(sub|fma)(?:\.rn)?\.f32", joined)
