"""Where 32-bit numbers of kernels end: what is refused, laid out otherwise or never multiplied."""

import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

import triton
import triton.language as tl

from leaner_kernels.ops._checks import MAX_ROW_STRIDE
from leaner_kernels.ops._launch_cache import Launch
from leaner_kernels.ops._triton import keep_tile
from leaner_kernels.ops.attention import op
from leaner_kernels.ops.attention.call import Call, view_of
from leaner_kernels.ops.covariance import launch as covariance
from leaner_kernels.ops.operator import Results
from tests.interpreter import online
from tests.placement import without_wrapping

HALF, SINGLE = torch.float16, torch.float32


def nothing(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """Return a tensor of any size, without memory, all of whose elements are one."""
    return torch.empty(1, dtype=dtype, device="meta").expand(shape)


def test_an_output_of_very_many_heads_is_laid_out_head_after_head() -> None:
    few, many = nothing(2, 2**16 - 1, 64, 128), nothing(2, 2**19, 64, 128)
    assert op.new_out(few).stride(2) == (2**16 - 1) * 128 <= MAX_ROW_STRIDE
    assert op.new_out(many).is_contiguous()
    assert op.new_out(many).shape == many.shape
    # Its rows would have been further apart than a tile of them reaches.
    with pytest.raises(ValueError, match="rows of out must be at most 34087042 elements apart"):
        view_of("out", many.new_empty(many.shape).transpose(1, 2).contiguous().transpose(1, 2))


def test_a_packed_output_of_too_many_heads_is_refused() -> None:
    tensors = [nothing(64, 2**19, 128) for _ in range(3)]
    starts = torch.tensor([0, 64], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"rows of out must be at most \d+ elements apart"):
        op.attend_cuda(
            op.Varlen, False, *tensors, starts, starts, None, 64, 64, 0.0, False, 0.1, -1, -1
        )


def test_a_gradient_between_channels_of_too_many_heads_is_refused() -> None:
    qkv = nothing(1, 300, 3, 2**18, 32)
    with pytest.raises(ValueError, match="rows of qkv's gradient must be at most 8421504 el"):
        covariance.channel.forward((qkv,), (0.1,), Results(qkv[:, :, 0], qkv[:, 0, 0]))


def test_a_mask_of_too_many_keys_has_no_gradient() -> None:
    query, key, out = nothing(1, 1, 32, 16), nothing(1, 1, 2**27, 16), nothing(1, 1, 32, 16)
    call = Call(query, key, key, nothing(2**27), None, None, 0.0, False, 0.25)
    max_log_sum, ds = nothing(1, 1, 32, 2, dtype=SINGLE), nothing(1, 1, 32, 2**27, dtype=SINGLE)
    online.prepare_backward(out, call, out, max_log_sum, query, key, key, None)
    with pytest.raises(ValueError, match="rows of the mask's gradient must be at most 69273666"):
        online.prepare_backward(out, call, out, max_log_sum, query, key, key, ds)


def test_more_programs_than_a_launch_may_have_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 2147483647 programs of a launch, got 2147483648"):
        Launch(None, (2**31,), {}).start()


@triton.jit
def _keep_kernel(seed_ptr, out_ptr, row, col, head, threshold, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    kept = keep_tile(tl.load(seed_ptr), row + at, col + at, head, threshold)
    tl.store(out_ptr + at[:, None] * BLOCK + at[None, :], kept)


def philox(counter: tuple[int, int, int, int], seed: int) -> int:
    """Return the first word of Philox 4x32-10."""
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & low, a >> 32 ^ c3 ^ k1, a & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return c0


def test_dropout_has_a_place_of_its_own_for_every_score() -> None:
    """Row, column and head are counters of their own: no product of them is ever formed."""
    seed, threshold, block = 0x123456789ABCDEF, 2**30, 16
    row, col, head = 2**20, 2**24, 2**29
    assert row * col * head > 2**64
    out = torch.zeros(block, block, dtype=torch.bool)
    with without_wrapping():
        _keep_kernel[(1,)](torch.tensor([seed]), out, row, col, head, threshold, BLOCK=block)
    wanted = [
        [philox((col + j, row + i, head, 0), seed) >> 1 >= threshold for j in range(block)]
        for i in range(block)
    ]
    assert out.tolist() == wanted
    assert 0 < out.sum() < block * block
