"""Launch the kernels that were chosen; the caller keeps what repeats a launch."""

from torch import Tensor

from .. import _tiles
from .._launch_cache import CachedLaunch
from . import dispatch
from .call import CALL_POINTERS, Call, Gradients, Results

# Names of pointers, in the order of the addresses that repeat a launch.
_FORWARD = (
    *CALL_POINTERS,
    *("out_view", "max_log_sum_ptr", "lse_ptr", "stats_ptr", "sample_ptr"),
)
_BACKWARD = (
    *CALL_POINTERS,
    *("do_view", "out_view", "max_log_sum_ptr", "lse_ptr"),
    *("dq_view", "dk_view", "dv_view", "ds_ptr"),
)


def forward(call: Call, results: Results) -> tuple[CachedLaunch | None, CachedLaunch | None]:
    """Fill the results; return what repeats the launch of the output, and that of the capture.

    There is nothing that repeats a launch in Triton's interpreter.

    Raises:
        ValueError: if Triton does not compile for the GPU.
    """
    _tiles.check_capability(call.query.device)
    kernel, tile = dispatch.choose_forward(call, with_stats=results.stats is not None)
    launch = dispatch.module_of(kernel).prepare_forward(tile, call, results)
    entry, captured = launch.first(_FORWARD, scratch="parts_ptr"), None
    if results.stats is not None:
        join_parts(launch.arguments.get("parts_ptr"), results.stats)
    if results.heads is not None and results.sample is not None and len(results.sample):
        tile, sample = dispatch.online_tile("online_forward", call, "capture"), results.sample
        kernels = dispatch.module_of("online_forward")
        capture = kernels.prepare_capture(tile, call, sample.contiguous(), results.heads)
        captured = capture.first(_FORWARD)
    return entry, captured


def backward(grad: Tensor, call: Call, saved: Results, gradients: Gradients) -> CachedLaunch | None:
    """Fill the gradients; return what repeats the launch."""
    kernel, tile = dispatch.choose_backward(call, grad, saved.out, *gradients[:3])
    launch = dispatch.module_of(kernel).prepare_backward(tile, grad, call, saved, gradients)
    return launch.first(_BACKWARD)


def join_parts(parts: Tensor | None, stats: Tensor) -> None:
    """Reduce the parts of statistics, where programs left some."""
    if parts is not None:
        from .._epilogue import join

        join(parts, stats)
