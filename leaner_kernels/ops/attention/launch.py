"""Launch the kernels that were chosen: what repeats a launch goes back to the caller, who keeps it."""

from torch import Tensor

from .._launch_cache import CachedLaunch, Launch
from . import dispatch
from .call import CALL_POINTERS, Call, Plan, Results
from .kernels import multihead, online_backward, online_forward, short_backward, short_forward

_STATISTICS = "max_logit_ptr", "entropy_ptr", "prob_norm_ptr", "head_norm_ptr"
# Names of pointers, in the order of the addresses that repeat a launch.
_FORWARD = *CALL_POINTERS, "out_view", "max_log_sum_ptr", "lse_ptr", *_STATISTICS, "sample_ptr"
_BACKWARD = (
    *CALL_POINTERS,
    *("grad_view", "out_view", "max_log_sum_ptr", "dq_view", "dk_view", "dv_view", "ds_ptr"),
)


def forward(call: Call, results: Results) -> tuple[CachedLaunch | None, CachedLaunch | None]:
    """Fill the results; return what repeats the launch of the output, and that of the capture.

    There is nothing that repeats a launch in Triton's interpreter.
    """
    call = _counted(call)
    with_stats = results.stats is not None
    kernel, tile = dispatch.choose_forward(call, with_stats)
    family = kernel.partition("_forward")[0]
    stats = None
    if results.stats is not None:
        stats = [results.lse, *results.stats.unbind()]
    inputs = tile, call, results.out, results.max_log_sum, stats
    if family == "warp_multihead":
        from .kernels import warp_multihead

        launch = warp_multihead.prepare_forward(*inputs)
    elif family == "hopper":
        from .kernels import hopper_forward

        launch = hopper_forward.prepare(*inputs)
    elif family == "ampere":
        from .kernels import ampere_forward

        launch = ampere_forward.prepare(*inputs)
    elif family == "multihead":
        launch = multihead.prepare_forward(*inputs)
    elif family == "short":
        launch = short_forward.prepare(*inputs)
    else:
        launch = online_forward.prepare(call, results)
    entry, captured = launch.first(_FORWARD, scratch="partial_ptr"), None
    if results.stats is not None:
        online_forward.join(launch.arguments.get("partial_ptr"), results.stats)
        if results.sample is not None and len(results.sample):
            captured = online_forward.prepare_capture(call, results).first(_FORWARD)
    return entry, captured


def repeat_with_stats(
    plan: Plan,
    pointers: list[int],
    lse: Tensor,
    stats: Tensor,
    heads: Tensor,
    sample: Tensor | None,
) -> None:
    """Launch again what ``forward`` did; ``pointers`` are those up to ``max_log_sum_ptr``."""
    beside = lse.data_ptr(), *(s.data_ptr() for s in stats.unbind())
    partial = plan.forward.run([*pointers, *beside])
    online_forward.join(partial, stats)
    if plan.capture is not None and sample is not None:
        operands = pointers[: len(CALL_POINTERS)]
        nothing = (0,) * (len(_FORWARD) - len(CALL_POINTERS) - 2)
        plan.capture.run([*operands, heads.data_ptr(), *nothing, sample.data_ptr()])


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
    return prepare_backward(grad, _counted(call), saved, dq, dk, dv, ds).first(_BACKWARD)


def prepare_backward(
    grad: Tensor,
    call: Call,
    saved: Results,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    ds: Tensor | None,
) -> Launch:
    """Return the launch that writes the gradients."""
    out, max_log_sum = saved.out, saved.max_log_sum
    kernel, tile = dispatch.choose_backward(call, grad, out, dq, dk, dv)
    family = kernel.partition("_backward")[0]
    results = out, max_log_sum, dq, dk, dv, ds
    if family == "warp_multihead":
        from .kernels import warp_multihead

        return warp_multihead.prepare_backward(tile, grad, call, dq, dk, dv)
    if family == "hopper":
        from .kernels import hopper_backward

        return hopper_backward.prepare(tile, grad, call, *results)
    if family == "ampere":
        from .kernels import ampere_backward

        return ampere_backward.prepare(tile, grad, call, *results)
    if family == "multihead":
        return multihead.prepare_backward(tile, grad, call, dq, dk, dv, ds)
    if family == "short":
        return short_backward.prepare(tile, grad, call, *results)
    return online_backward.prepare(grad, call, *results, call.sequences)


def _counted(call: Call) -> Call:
    """Return the call with lengths that lie side by side, as the kernels count them."""
    lengths = call.key_lengths
    return call if lengths is None else call._replace(key_lengths=lengths.contiguous())
