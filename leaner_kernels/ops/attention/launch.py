"""Launch the kernels that were chosen; the caller keeps what repeats a launch."""

from torch import Tensor

from .._launch_cache import CachedLaunch, Launch
from . import dispatch
from .call import CALL_POINTERS, Call, Results

# Names of pointers, in the order of the addresses that repeat a launch.
_FORWARD = (
    *CALL_POINTERS,
    *("out_view", "max_log_sum_ptr", "lse_ptr", "stats_ptr", "sample_ptr"),
)
_BACKWARD = (
    *CALL_POINTERS,
    *("do_view", "out_view", "max_log_sum_ptr", "dq_view", "dk_view", "dv_view", "ds_ptr"),
)


def forward(call: Call, results: Results) -> tuple[CachedLaunch | None, CachedLaunch | None]:
    """Fill the results; return what repeats the launch of the output, and that of the capture.

    There is nothing that repeats a launch in Triton's interpreter.
    """
    kernel, tile = dispatch.choose_forward(call, with_stats=results.stats is not None)
    module = dispatch.module_of(kernel)
    warps = kernel.startswith("warp_multihead")
    prepare = module.prepare_forward if warps else module.prepare
    launch = prepare(tile, call, *results[:4])
    entry, captured = launch.first(_FORWARD, scratch="parts_ptr"), None
    if results.stats is not None:
        join_parts(launch.arguments.get("parts_ptr"), results.stats)
    if results.heads is not None and results.sample is not None and len(results.sample):
        tile, sample = dispatch.online_tile("online_forward", call, "capture"), results.sample
        kernels = dispatch.module_of("online_forward")
        capture = kernels.prepare_capture(tile, call, sample.contiguous(), results.heads)
        captured = capture.first(_FORWARD)
    return entry, captured


def backward(
    grad: Tensor,
    call: Call,
    saved: Results,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    ds: Tensor | None,
) -> CachedLaunch | None:
    """Write dq (B, H, N, D), dk and dv (B, Hkv, M, D) and any ds; return what repeats the launch.

    ds (B, H, N, M) float32, the gradient of the scores under an additive mask, is zero on entry.
    """
    out, max_log_sum = saved.out, saved.max_log_sum
    kernel, tile = dispatch.choose_backward(call, grad, out, dq, dk, dv)
    module = dispatch.module_of(kernel)
    if kernel == "warp_multihead_backward":
        launch: Launch = module.prepare_backward(tile, grad, call, dq, dk, dv)
    else:
        launch = module.prepare(tile, grad, call, out, max_log_sum, dq, dk, dv, ds)
    return launch.first(_BACKWARD)


def join_parts(parts: Tensor | None, stats: Tensor) -> None:
    """Reduce the parts of statistics, where programs left some."""
    if parts is not None:
        from .._epilogue import join

        join(parts, stats)
