"""The kernels of softmax attention for any length, launched apart from the operators."""

from typing import Any

import torch
from torch import Tensor

from leaner_kernels.ops._epilogue import join
from leaner_kernels.ops._launch_cache import Launch
from leaner_kernels.ops.attention import dispatch, op
from leaner_kernels.ops.attention.call import Call, Gradients
from leaner_kernels.ops.attention.kernels import online as kernels
from leaner_kernels.ops.route import Results
from tests.attention_cases import STATISTICS, Inputs, new_gradients, new_stats


def new_max_log_sum(query: Tensor) -> Tensor:
    """Allocate (B, H, N, 2)."""
    return query.new_empty((*query.shape[:3], 2), dtype=torch.float32)


def side_by_side(call: Call) -> Call:
    """Return the call with lengths as the kernels count them, as ``launch`` passes it on."""
    lengths = call.key_lengths
    return call if lengths is None else call._replace(key_lengths=lengths.contiguous())


def prepare(
    call: Call,
    out: Tensor,
    max_log_sum: Tensor,
    lse: Tensor | None = None,
    stats: Tensor | None = None,
) -> Launch:
    call, tile = side_by_side(call), dispatch.online_tile("online_forward", call)
    return kernels.prepare_forward(tile, call, Results(out, max_log_sum, lse, stats))


def forward(
    call: Call,
    out: Tensor,
    max_log_sum: Tensor,
    lse: Tensor | None = None,
    stats: Tensor | None = None,
) -> None:
    """Fill the output and, where given, the statistics (statistics, B, H)."""
    launch = prepare(call, out, max_log_sum, lse, stats)
    launch.start()
    if stats is not None:
        join(launch.arguments["parts_ptr"], stats)


def capture(call: Call, sample: Tensor, heads: Tensor) -> None:
    """Fill the heads of the entries that are sampled."""
    tile = dispatch.online_tile("online_forward", call, "capture")
    kernels.prepare_capture(tile, side_by_side(call), sample.contiguous(), heads).start()


def prepare_backward(
    grad: Tensor, call: Call, out: Tensor, max_log_sum: Tensor, *gradients: Any
) -> Launch:
    call, tile = side_by_side(call), dispatch.online_tile("online_backward", call)
    saved = Results(out, max_log_sum)
    return kernels.prepare_backward(tile, grad, call, saved, Gradients(*gradients))


def backward(grad: Tensor, call: Call, out: Tensor, max_log_sum: Tensor, *gradients: Any) -> None:
    """Fill dq, dk, dv and any ds."""
    prepare_backward(grad, call, out, max_log_sum, *gradients).start()


def run(inputs: Inputs) -> dict[str, Tensor]:
    """Launch forward with statistics, capture and backward as the CUDA operators do."""
    query, key, value, mask = *inputs[:3], inputs.attn_mask
    out, max_log_sum = op.new_out(query), new_max_log_sum(query)
    lse, stats, heads = new_stats(query, inputs.sample)
    forward(inputs.call, out, max_log_sum, lse, stats)
    capture(inputs.call, inputs.sample, heads)
    mask_grad = mask is not None and mask.is_floating_point()
    *grads, _ = new_gradients(query, key, value, mask, False)
    ds = torch.zeros(*query.shape[:3], key.shape[2]) if mask_grad else None
    backward(inputs.grad, inputs.call, out, max_log_sum, *grads, ds)
    unwritten = heads[inputs.sample < 0]
    assert unwritten.isnan().all(), "a slot with a negative index was written"
    names = "out", "lse", *STATISTICS, "dq", "dk", "dv"
    results = dict(zip(names, (out, lse, *stats, *grads), strict=True))
    results["heads"] = heads[inputs.sample >= 0]
    if mask is not None and ds is not None:
        results["dmask"] = ds.sum_to_size(mask.shape).to(mask.dtype)
    return results
