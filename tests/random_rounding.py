"""Monte Carlo arithmetic: float64 whose every operation is off by a random rounding of a dtype.

What a correct implementation may make of a computation in float16, bfloat16 or float32 depends on
the order in which it sums, on what it fuses, and, for the plain computation of PyTorch, on the
routine that a BLAS picks for the processor. Here the errors are drawn instead, from a seed, so that
they are the same everywhere.

Source: Parker, Monte Carlo Arithmetic, UCLA CSD-970002 (1997).
"""

from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# A sum is off by roundings of its partial sums, which its result does not bound where terms cancel:
# the same call on absolute values does.
SUMS = {
    aten.addmm,
    aten.baddbmm,
    aten.bmm,
    aten.col2im,
    aten.convolution,
    aten.convolution_backward,
    aten.linalg_vector_norm,
    aten.mean,
    aten.mm,
    aten.sum,
    aten.var_mean,
}
# What only moves or picks numbers rounds nothing; neither do views.
MOVES = {
    aten._to_copy,
    aten._unsafe_view,
    aten.amax,
    aten.amin,
    aten.cat,
    aten.clamp_max,
    aten.clamp_min,
    aten.clone,
    aten.constant_pad_nd,
    aten.copy_,
    aten.embedding,
    aten.empty_like,
    aten.eye,
    aten.fill_,
    aten.flip,
    aten.full,
    aten.full_like,
    aten.gather,
    aten.im2col,
    aten.index,
    aten.index_select,
    aten.masked_fill,
    aten.masked_fill_,
    aten.max,
    aten.maximum,
    aten.min,
    aten.minimum,
    aten.neg,
    aten.new_empty,
    aten.new_empty_strided,
    aten.new_full,
    aten.new_zeros,
    aten.ones,
    aten.ones_like,
    aten.relu,
    aten.repeat,
    aten.roll,
    aten.scalar_tensor,
    aten.select_backward,
    aten.slice_backward,
    aten.stack,
    aten.threshold_backward,
    aten.where,
    aten.zeros,
    aten.zeros_like,
}
# What rounds between its steps, in terms of its steps.
STEPS = get_decompositions(
    [
        aten._log_softmax,
        aten._log_softmax_backward_data,
        aten._safe_softmax,
        aten._softmax,
        aten._softmax_backward_data,
        aten.gelu,
        aten.gelu_backward,
        aten.native_batch_norm,
        aten.native_batch_norm_backward,
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
    ]
)


class RandomRounding(TorchDispatchMode):
    """Move what every float64 operation on the CPU returns by up to half a unit in the last place.

    That is right of arithmetic; functions of a library may be off by a unit or two.

    Products and sums are moved besides by up to a unit in float32 of the sum of their terms' sizes:
    low-precision units accumulate in float32, and truncate.

    Args:
        dtype: the floating-point format whose roundings are drawn.
        seed: of the draws.
        units: in the last place by which an operation is off at most.
    """

    def __init__(self, dtype: torch.dtype, seed: int, units: float = 0.5) -> None:
        super().__init__()
        self.eps = 2 * units * torch.finfo(dtype).eps
        self.sum_eps = 2 * min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if func in STEPS:
            with self:
                return STEPS[func](*args, **kwargs)
        sizes = None
        if packet in SUMS:
            sizes = func(*(_size(argument) for argument in args), **kwargs)
        out = func(*args, **kwargs)
        if func.is_view or packet in MOVES or out is None:
            return out
        for i, t in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
            if isinstance(t, Tensor) and t.dtype == torch.float64:
                if sizes is not None:
                    size = sizes[i] if isinstance(sizes, (tuple, list)) else sizes
                    off = self.sum_eps * size * self._draw(t)
                    t.add_(off.nan_to_num(0, 0, 0))  # infinite where a term is
                t.mul_(1 + self.eps * self._draw(t))
        return out

    def _draw(self, like: Tensor) -> Tensor:
        """Return uniform numbers in [-1/2, 1/2)."""
        return torch.rand(like.shape, generator=self.generator, dtype=torch.float64) - 0.5


def _size(argument: Any) -> Any:
    is_number = isinstance(argument, Tensor) and argument.is_floating_point()
    return argument.abs() if is_number else argument
