"""Launches of the kernels that were chosen for a call of softmax attention."""

from typing import Any

import torch
from torch import Tensor

from .._launch_cache import Launch, Scratch
from ..route import Results
from . import dispatch
from .call import Call, Gradients


def prepare_forward(call: Call, results: Results) -> Launch:
    """Return what fills the output and any statistics."""
    kernel, tile = dispatch.choose_forward(call, with_stats=results.stats is not None)
    launch: Launch = dispatch.module_of(kernel).prepare_forward(tile, call, results)
    if launch.arguments.get("parts_ptr") is None:
        return launch
    from .._epilogue import join

    return launch._replace(scratch=Scratch("parts_ptr", "stats", join))


def prepare_capture(call: Call, results: Results) -> Launch:
    """Return what fills the heads of sampled entries."""
    kernel, tile = dispatch.choose_capture(call)
    prepare = dispatch.module_of(kernel).prepare_capture
    return prepare(tile, call, results.sample, results.heads)


def prepare_backward(grad: Tensor, call: Call, saved: Results, gradients: Any) -> Launch:
    """Return what fills the gradients."""
    dq, dk, dv = gradients.separate()
    kernel, tile = dispatch.choose_backward(call, grad, saved.out, (dq, dk, dv))
    ds = scratch = None
    if getattr(gradients, "dattn_mask", None) is not None:
        # Tiles that no row may see are not visited by every kernel.
        shape = call.batch, call.query.shape[1], call.rows, call.cols
        ds = grad.new_zeros(shape, dtype=torch.float32)
        scratch = Scratch("ds_ptr", "dattn_mask", _sum_over_broadcast, zero=True)
    prepare = dispatch.module_of(kernel).prepare_backward
    launch: Launch = prepare(tile, grad, call, saved, Gradients(dq, dk, dv, ds))
    return launch._replace(scratch=scratch)


def _sum_over_broadcast(ds: Tensor, dattn_mask: Tensor) -> None:
    """Sum the gradient of scores over what a mask was broadcast along."""
    dattn_mask.copy_(ds.sum_to_size(dattn_mask.shape))
