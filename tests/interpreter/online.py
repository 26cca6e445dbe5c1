"""The kernels of softmax attention for any length, launched apart from the operators."""

from typing import Any

import torch
from torch import Tensor

from leaner_kernels.ops._epilogue import join
from leaner_kernels.ops._launch_cache import Launch
from leaner_kernels.ops.attention import dispatch
from leaner_kernels.ops.attention.call import Call, Gradients
from leaner_kernels.ops.attention.kernels import online as kernels
from leaner_kernels.ops.route import Results


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
