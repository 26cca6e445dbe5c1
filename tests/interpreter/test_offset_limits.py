"""Where 32-bit numbers of kernels end: what is refused, laid out otherwise or never multiplied."""

import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs with --backend interpreter", allow_module_level=True)


from leaner_kernels.ops import route
from leaner_kernels.ops._checks import MAX_ROW_STRIDE
from leaner_kernels.ops._launch_cache import Launch
from leaner_kernels.ops.attention import op
from leaner_kernels.ops.attention.call import Call, view_of
from leaner_kernels.ops.covariance import ChannelCall
from leaner_kernels.ops.covariance import kernels as covariance
from leaner_kernels.ops.route import Results
from tests.interpreter import online

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
        route.forward_on_gpu(
            op.Varlen, False, *tensors, starts, starts, None, 64, 64, 0.0, False, 0.1, -1, -1
        )


def test_a_gradient_between_channels_of_too_many_heads_is_refused() -> None:
    qkv = nothing(1, 300, 3, 2**18, 32)
    results = Results(qkv[:, :, 0], lse=qkv[:, 0, 0])
    with pytest.raises(ValueError, match="rows of qkv's gradient must be at most 8421504 el"):
        covariance.channel.prepare_forward(ChannelCall(qkv, 0.1), results)


def test_a_mask_of_too_many_keys_has_no_gradient() -> None:
    query, key, out = nothing(1, 1, 32, 16), nothing(1, 1, 2**27, 16), nothing(1, 1, 32, 16)
    call = Call(query, key, key, nothing(2**27), None, None, 0.0, False, 0.25)
    max_log_sum, ds = nothing(1, 1, 32, 2, dtype=SINGLE), nothing(1, 1, 32, 2**27, dtype=SINGLE)
    online.prepare_backward(out, call, out, max_log_sum, query, key, key, None)
    with pytest.raises(ValueError, match="rows of the mask's gradient must be at most 69273666"):
        online.prepare_backward(out, call, out, max_log_sum, query, key, key, ds)


def test_more_programs_than_a_launch_may_have_are_refused() -> None:
    with pytest.raises(
        ValueError, match="at most 2147483647 programs, each head counted, got 2147483648"
    ):
        Launch(None, (2**31,), {}).start()
