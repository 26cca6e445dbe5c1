"""Register operators with PyTorch's dispatcher; no particular operator is named here.

A call through ``define`` and ``impl`` with a thin autograd Function costs less than half of one
through ``custom_op`` with ``register_autograd``. Kernels for short sequences are launch-bound, so
users would notice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from .._ops import add_op_namespace_prefix, ops
from ._checks import autocast
from ._launch_cache import on_current_device

library = torch.library.Library(ops.name, "FRAGMENT")
# The autograd Function of operators, below the transforms of torch.func.
SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction


def register(
    name: str,
    schemas: Sequence[str],
    *,
    reference: Sequence[Callable[..., Any]],
    on_gpu: Sequence[Callable[..., Any]],
    fake: Sequence[Callable[..., Any]],
    record: Callable[[Sequence[Tensor], Sequence[Any]], Any],
    cast: int,
    differentiable: int,
) -> None:
    """Register ``NAME``, ``NAME_with_stats`` and ``NAME_backward`` for every device and autograd.

    Args:
        name: name of the operator, whose first result alone has derivatives.
        schemas: schemas of the three, without their names.
        reference: functions that compute the three by operations that PyTorch can differentiate.
        on_gpu: functions that launch the three on the current GPU.
        fake: functions that allocate the results of the three.
        record: puts results on the graph; called with the results and the operator's arguments.
        cast: how many leading arguments a region of autocast casts.
        differentiable: how many may have a gradient.
    """
    names = name, f"{name}_with_stats", f"{name}_backward"
    for op, schema, cpu, cuda, meta in zip(names, schemas, reference, on_gpu, fake, strict=True):
        library.define(op + schema)
        library.impl(op, on_cpu(cpu), "CPU")
        library.impl(op, on_device(cuda), "CUDA")
        torch.library.register_fake(add_op_namespace_prefix(op), meta, lib=library)
    *forwards, backward = reference
    for op, decomposition in zip(names, forwards):
        _register_autograd(op, record, decomposition, cast)
    # The gradient of the output comes first.
    _register_double_backward(f"{name}_backward", backward, 1 + differentiable)


def on_cpu(run: Callable[..., Any]) -> Callable[..., Any]:
    """Disable autocast, which would reach into this implementation and round."""

    def compute(*args: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return run(*args)

    return compute


def on_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Launch on the GPU of the first tensor, because Triton launches on the current one."""

    def launch_there(tensor: Tensor, *args: Any) -> Any:
        if on_current_device(tensor):  # this check costs less than entering and leaving a context
            return launch(tensor, *args)
        with torch.cuda.device(tensor.device):
            return launch(tensor, *args)

    return launch_there


def _register_autograd(
    name: str, record: Callable[..., Any], decomposition: Callable[..., Any], count: int
) -> None:
    """Register the derivatives of a forward; ``decomposition`` gives those of forward mode."""
    op = getattr(ops, name).default

    def differentiable(keyset: Any, *args: Any) -> Any:
        if in_forward_mode():
            out, *others = without_autocast(decomposition, args)
            return out, *(t.detach() for t in others)
        with torch._C._AutoDispatchBelowAutograd():
            results = op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        return record(tuple(results), args) if wants_gradient(args) else results

    library.impl(name, differentiable, "Autograd", with_keyset=True)
    for key in ("AutocastCPU", "AutocastCUDA"):
        after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))

        def cast(keyset: Any, *args: Any, after: Any = after) -> Any:
            return op.redispatch(keyset & after, *autocast(*args[:count]), *args[count:])

        library.impl(name, cast, key, with_keyset=True)


def _register_double_backward(name: str, decomposition: Callable[..., Any], variables: int) -> None:
    """Let ``decomposition`` give the derivatives of a backward, with all scores in memory."""
    op = getattr(ops, name).default

    def differentiable(keyset: Any, *args: Any) -> Any:
        if in_forward_mode():
            return without_autocast(decomposition, args)
        with torch._C._AutoDispatchBelowAutograd():
            results = op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        if not wants_gradient(args):
            return results
        one = isinstance(results, Tensor)
        results = (results,) if one else tuple(results)
        recorded = apply(_DoubleBackward, decomposition, variables, results, *args)
        return recorded[0] if one else recorded

    library.impl(name, differentiable, "Autograd", with_keyset=True)


class _DoubleBackward(SingleLevelFunction):
    """Put the results of a backward on the graph; the decomposition provides their derivatives."""

    @staticmethod
    def forward(ctx, decomposition, variables, results, *args):
        ctx.save_for_backward(*(a if isinstance(a, Tensor) else None for a in args))
        ctx.others = [None if isinstance(a, Tensor) else a for a in args]
        ctx.decomposition, ctx.variables = decomposition, variables
        return results

    @staticmethod
    def backward(ctx, *grads):
        args = [b if a is None else a for a, b in zip(ctx.saved_tensors, ctx.others)]
        wanted = [i for i in range(ctx.variables) if ctx.needs_input_grad[3 + i]]

        def compute(*variables):
            filled = list(args)
            for i, variable in zip(wanted, variables):
                filled[i] = variable
            return without_autocast(ctx.decomposition, filled)

        # Differentiate a function, not the surrounding graph: the gradient may depend on the
        # inputs.
        _, pull, *_ = torch.func.vjp(compute, *(args[i] for i in wanted))
        gradients = dict(zip(wanted, pull(grads[0] if len(grads) == 1 else grads)))
        return None, None, None, *(gradients.get(i) for i in range(len(args)))


def apply(function: Any, *args: Any) -> Any:
    """Apply a Function at one level of the transforms of torch.func."""
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return function.apply(*args)


def wants_gradient(args: Sequence[Any]) -> bool:
    """Return whether autograd records an operator that is called with these arguments."""
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)


def upcast(t: Tensor) -> Tensor:
    """Return half precision as float32, anything else as it is."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def in_forward_mode() -> bool:
    """Return whether tensors may carry tangents, which need no ``requires_grad``."""
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    # Compiled code enters a jvp without setting this level.
    levels = get_interpreter_stack() or ()
    return any(level.key() == TransformType.Jvp for level in levels)


def without_autocast(run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Compute without autocast, at every level of torch.func."""
    if torch._C._are_functorch_transforms_active():
        args = _mapped_alike(args)
    with no_autocast(args[0]):
        return run(*args)


def no_autocast(t: Tensor) -> torch.autocast:
    """Return a context without autocast, in which products keep the dtypes of their factors."""
    # PyTorch has no autocast on meta.
    return torch.autocast("cpu" if t.is_meta else t.device.type, enabled=False)


def _mapped_alike(args: Sequence[Any]) -> list[Any]:
    """Map every floating-point tensor over what any tensor is mapped over.

    vmap refuses to write a mapped tensor into an unmapped one, and results are allocated like an
    input.
    """
    zero = sum(a.new_zeros((), dtype=args[0].dtype) for a in args if isinstance(a, Tensor))
    assert isinstance(zero, Tensor)
    return [
        a + zero.to(a.dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    ]
