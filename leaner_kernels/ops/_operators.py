"""Making operators of implementations: schemas, devices, fakes and autograd.

``define`` and ``impl`` with a thin autograd Function cost less than half of what ``custom_op`` with
``register_autograd`` costs a call; short-sequence kernels are launch-bound, so that is what users
would feel.

``register`` serves the operators whose forward takes a few tensors and numbers and gives an output,
the log-sum-exp of each softmax row and, when asked, ``AttentionStats``.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

# The autograd Function of operators: transforms of torch.func have been dealt with above them.
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction

from leaner_kernels.ops import _vmap
from leaner_kernels.ops._checks import autocast

library = torch.library.Library("leaner_kernels", "FRAGMENT")


class Shapes(NamedTuple):
    """Shapes of what an operator returns.

    Attributes:
        out: of the output, which is contiguous and has the dtype of the first input.
        lse: of the log-sum-exp of each softmax row, float32.
        per_head: (B, H), of each statistic.
        heads: (tokens, H * D), of one captured sample.
    """

    out: tuple[int, ...]
    lse: tuple[int, ...]
    per_head: tuple[int, int]
    heads: tuple[int, int]


class Axes(NamedTuple):
    """The axis of each tensor that vmap folds the mapped one into.

    Attributes:
        inputs: of each input, and of its gradient.
        params: of the leading parameters that are tensors.
        out: of the output.
        lse: of the log-sum-exp.
        per_head: of each statistic.
        heads: of the captured heads.
        sample: of the indices of what is captured.
    """

    inputs: tuple[int, ...]
    params: tuple[int, ...] = ()
    out: int = 0
    lse: int = 0
    per_head: int = 0
    heads: int = 0
    sample: _vmap.Axis = _vmap.ENTRIES


class Implementation(Protocol):
    """How one device computes an operator: every result goes into a tensor that it is given."""

    def forward(
        self,
        inputs: tuple[Tensor, ...],
        params: tuple[Any, ...],
        out: Tensor,
        lse: Tensor,
        stats: list[Tensor] | None,
        sample: Tensor | None,
    ) -> None:
        """Fill ``out``, ``lse`` and, unless None, ``stats``.

        ``stats`` are max_logit, entropy, prob_norm and head_norm, (B, H), then heads (S, tokens,
        H * D), where S is 0 without ``sample`` (S,) int32. All are float32 and uninitialised.
        """
        ...

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, ...],
        params: tuple[Any, ...],
        lse: Tensor,
        grads: tuple[Tensor, ...],
    ) -> None:
        """Fill ``grads``, contiguous, one of each input, from ``grad`` of the output.

        ``grad`` is contiguous along its last axis.
        """
        ...


def register(
    name: str,
    *,
    inputs: Sequence[str],
    params: str,
    shapes: Callable[..., Shapes],
    cpu: Implementation,
    cuda: Callable[[], Implementation],
    narrow: int | None = None,
    axes: Axes | None = None,
    apart: Callable[[tuple[Any, ...]], bool] | None = None,
) -> None:
    """Define ``leaner_kernels::NAME``, ``NAME_with_stats`` and ``NAME_backward``.

    In Python ``torch.ops.leaner_kernels.NAME(*inputs, *params)`` returns (out, lse), and
    ``NAME_with_stats(*inputs, sample, *params)`` returns (out, lse, max_logit, entropy, prob_norm,
    head_norm, heads), with ``sample`` None or (S,) int32. Each has the derivatives of every input;
    what is kept for them is the inputs and lse.

    Args:
        name: of the operator.
        inputs: names of its tensors, all differentiable.
        params: its numbers, as in a schema: ``"int window, float scale"``.
        shapes: gives ``Shapes`` of ``(*inputs, *params)``.
        cpu: computes it on the CPU, and by operations that PyTorch can differentiate.
        cuda: imports, at the first call, what computes it on a GPU.
        narrow: how many leading inputs a region of autocast narrows; all when omitted.
        axes: what vmap folds its axis into; the first axis of every input when omitted.
        apart: whether, of these arguments, vmap must compute each example by itself.
    """
    count = len(inputs)
    tensors = ", ".join(f"Tensor {each}" for each in inputs)
    result = "(Tensor out, Tensor lse"
    stats = "Tensor max_logit, Tensor entropy, Tensor prob_norm, Tensor head_norm, Tensor heads"
    grads = ", ".join(f"Tensor d{each}" for each in inputs)
    grads = f"({grads})" if count > 1 else "Tensor"
    library.define(f"{name}({tensors}, {params}) -> {result})")
    library.define(f"{name}_with_stats({tensors}, Tensor? sample, {params}) -> {result}, {stats})")
    library.define(f"{name}_backward(Tensor grad, {tensors}, Tensor lse, {params}) -> {grads}")

    def new_results(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        shape, first = shapes(*args), args[0]
        return first.new_empty(shape.out), _float32(first, shape.lse)

    def new_stats(args: tuple[Any, ...], sample: Tensor | None) -> list[Tensor]:
        shape, slots = shapes(*args), 0 if sample is None else sample.shape[0]
        per_head = [_float32(args[0], shape.per_head) for _ in range(4)]
        return [*per_head, _float32(args[0], (slots, *shape.heads))]

    def new_gradients(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty_like(each, memory_format=torch.contiguous_format) for each in args[:count]
        )

    def one_or_all(gradients: tuple[Tensor, ...]) -> Any:
        return gradients if count > 1 else gradients[0]

    def runs(find: Callable[[], Implementation]) -> Iterator[tuple[str, Callable[..., Any]]]:
        def fitting(args: tuple[Any, ...]) -> Implementation:
            # Nothing can be launched of nothing.
            return cpu if any(each.numel() == 0 for each in args[:count]) else find()

        def run(*args):
            out, lse = new_results(args)
            fitting(args).forward(args[:count], args[count:], out, lse, None, None)
            return out, lse

        def run_with_stats(*args):
            sample, args = args[count], args[:count] + args[count + 1 :]
            out, lse = new_results(args)
            stats = new_stats(args, sample)
            fitting(args).forward(args[:count], args[count:], out, lse, stats, sample)
            return out, lse, *stats

        def run_backward(grad, *args):
            lse, args = args[count], args[:count] + args[count + 1 :]
            gradients = new_gradients(args)
            fitting(args).backward(grad, args[:count], args[count:], lse, gradients)
            return one_or_all(gradients)

        yield name, run
        yield f"{name}_with_stats", run_with_stats
        yield f"{name}_backward", run_backward

    for each, run in runs(cuda):
        library.impl(each, on_device(run), "CUDA")
    decomposition = dict(runs(lambda: cpu))
    for each, run in decomposition.items():
        library.impl(each, on_cpu(run), "CPU")

    @torch.library.register_fake(f"leaner_kernels::{name}", lib=library)
    def _(*args):
        return new_results(args)

    @torch.library.register_fake(f"leaner_kernels::{name}_with_stats", lib=library)
    def _(*args):
        sample, args = args[count], args[:count] + args[count + 1 :]
        return *new_results(args), *new_stats(args, sample)

    @torch.library.register_fake(f"leaner_kernels::{name}_backward", lib=library)
    def _(_grad, *args):
        return one_or_all(new_gradients(args))

    with_stats, backward = (
        getattr(torch.ops.leaner_kernels, name + suffix).default
        for suffix in ("_with_stats", "_backward")
    )

    class Function(SingleLevelFunction):
        """Runs the operator with or without statistics: everything after ``out`` is one."""

        @staticmethod
        def forward(ctx, op, keyset, *args):
            out, lse, *stats = below_autograd(op, keyset, args)
            ctx.save_for_backward(*args[:count], lse)
            ctx.num_args = len(args)
            ctx.params = args[count + (op is with_stats) :]
            ctx.mark_non_differentiable(lse, *stats)
            # Zeros for the statistics would be a launch each.
            ctx.set_materialize_grads(False)
            return out, lse, *stats

        @staticmethod
        def backward(ctx, grad, *_):
            gradients = (None,) * count
            if grad is not None:
                # A gradient that was expanded (a sum's, say) has stride 0 along its last axis.
                grad = grad if grad.stride(-1) == 1 else grad.contiguous()
                gradients = backward(grad, *ctx.saved_tensors, *ctx.params)
                gradients = gradients if count > 1 else (gradients,)
            return None, None, *gradients, *(None,) * (ctx.num_args - count)

    for op in (name, f"{name}_with_stats"):
        differentiable(op, Function, decomposition[op])
        autocast_rule(op, narrow or count)
    differentiable_backward(backward, decomposition[f"{name}_backward"], 1 + count)

    into, param_axes, *found = axes or Axes((0,) * count)
    out_axis, lse_axis, stat_axis, heads_axis, sample_axis = found
    results = out_axis, lse_axis, *(stat_axis,) * 4, heads_axis
    for op, given, found in (
        (name, (*into, *param_axes), results[:2]),
        (f"{name}_with_stats", (*into, sample_axis, *param_axes), results),
        (f"{name}_backward", (out_axis, *into, lse_axis, *param_axes), into),
    ):
        _vmap.register(library, op, given, found, apart)


def _float32(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def upcast(t: Tensor) -> Tensor:
    """Return half precision as float32, anything else as it is."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def on_cpu(run: Callable[..., Any]) -> Callable[..., Any]:
    """Compute as written: a region of autocast reaches into implementations, and would round."""

    def call(*args: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return run(*args)

    return call


def on_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Launch on the GPU of the first tensor: Triton launches on the current one."""

    def call(tensor: Tensor, *args: Any) -> Any:
        if on_current_device(tensor):  # which costs less than entering and leaving it
            return launch(tensor, *args)
        with torch.cuda.device(tensor.device):
            return launch(tensor, *args)

    return call


def on_current_device(t: Tensor) -> bool:
    """Whether a tensor on a GPU lies where Triton launches."""
    return t.device.index == torch.cuda.current_device()


def direct(
    name: str,
    cuda: Callable[..., Any],
    count: int,
    function: Any = None,
) -> Callable[..., Any]:
    """Return the operator as this package calls it: on a GPU mostly without the dispatcher.

    That enters Python once for autograd and once for the implementation, and converts all arguments
    for each, which takes longer than a short kernel runs.

    Args:
        name: of the operator, which is called wherever anything but autograd may see the call.
        cuda: its implementation on a GPU.
        count: how many leading arguments are of floating point, or None.
        function: as of ``differentiable``; without one the operator is called for derivatives.
    """
    op = getattr(torch.ops.leaner_kernels, name).default
    run = on_device(cuda)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or intercepted(args):
            return op(*args)
        wanted = False
        for t in args[:count]:
            if t is not None:
                if t.is_neg():  # a view to be negated when it is read, which the dispatcher does
                    return op(*args)
                wanted = wanted or t.requires_grad
        if not wanted or not torch.is_grad_enabled() or below_other_operator():
            return run(*args)
        return op(*args) if function is None else function.apply(run, None, *args)

    return call


# No subclass of a tensor, and no number that a trace follows.
TENSORS = {Tensor, torch.nn.Parameter}
NUMBERS = {type(None), bool, int, float}
PLAIN = TENSORS | NUMBERS
_AUTOGRAD = torch._C.DispatchKey.AutogradCUDA


def below_other_operator() -> bool:
    """Whether this is part of an operator's implementation, in which autograd records nothing."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)


def intercepted(args: tuple[Any, ...]) -> bool:
    """Whether more than autograd may have a part in a call, or it is not on a GPU."""
    return not args[0].is_cuda or not PLAIN.issuperset(map(type, args)) or observed()


def observed() -> bool:
    """Whether a mode, a transform, a trace or a profiler is active."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
        or _profiler_enabled()
    )


def differentiable(
    name: str, function: type[SingleLevelFunction], decomposition: Callable[..., Any]
) -> None:
    """Register the derivative of an operator: ``function`` where a gradient is wanted.

    Args:
        name: of the operator, whose first result alone is differentiable.
        function: takes the operator, the keys to dispatch it to, and its arguments.
        decomposition: computes the operator by operations that PyTorch can differentiate, for
            derivatives in forward mode.
    """
    op = getattr(torch.ops.leaner_kernels, name).default

    def call(keyset, *args):
        if _in_forward_mode():
            out, *others = _without_autocast(decomposition, args)
            return out, *(t.detach() for t in others)
        below = keyset & torch._C._after_autograd_keyset
        if _wants_gradient(args):
            return _apply(function, op, below, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(below, *args)

    library.impl(name, call, "Autograd", with_keyset=True)


def differentiable_backward(op: Any, decomposition: Callable[..., Any], count: int) -> None:
    """Register the derivatives of a backward: those of ``decomposition`` in its leading arguments.

    Args:
        op: the backward.
        decomposition: computes it by operations that PyTorch can differentiate, with all scores in
            memory.
        count: how many of its arguments count as variables; others are functions of these.
    """

    def call(keyset, *args):
        if _in_forward_mode():
            return _without_autocast(decomposition, args)
        below = keyset & torch._C._after_autograd_keyset
        if _wants_gradient(args):
            return _apply(_Second, op, below, decomposition, count, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(below, *args)

    library.impl(op, call, "Autograd", with_keyset=True)


class _Second(SingleLevelFunction):
    """Runs a backward; its derivatives are those of what it is composed of."""

    @staticmethod
    def forward(ctx, op, keyset, decomposition, count, *args):
        ctx.save_for_backward(*(a if isinstance(a, Tensor) else None for a in args))
        ctx.others = [None if isinstance(a, Tensor) else a for a in args]
        ctx.decomposition, ctx.count = decomposition, count
        return below_autograd(op, keyset, args)

    @staticmethod
    def backward(ctx, *grads):
        args = [b if a is None else a for a, b in zip(ctx.saved_tensors, ctx.others)]
        wanted = [i for i in range(ctx.count) if ctx.needs_input_grad[4 + i]]

        def compute(*variables):
            given = list(args)
            for i, variable in zip(wanted, variables):
                given[i] = variable
            return _without_autocast(ctx.decomposition, given)

        # Of a function, not of the graph around: the gradient may itself depend on the inputs.
        _, pull, *_ = torch.func.vjp(compute, *(args[i] for i in wanted))
        found = dict(zip(wanted, pull(grads[0] if len(grads) == 1 else grads)))
        return None, None, None, None, *(found.get(i) for i in range(len(args)))


def _in_forward_mode() -> bool:
    """Whether there may be tangents, which ride on tensors that require no gradient."""
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    # Compiled code enters a jvp without the level above.
    return any(each.key() == TransformType.Jvp for each in get_interpreter_stack() or ())


def _without_autocast(run: Callable[..., Any], args: Sequence[Any]) -> Any:
    if torch._C._are_functorch_transforms_active():
        args = _mapped_alike(args)
    with torch.autocast(args[0].device.type, enabled=False):
        return run(*args)


def _mapped_alike(args: Sequence[Any]) -> list[Any]:
    """Map every floating-point tensor over what any tensor is mapped over.

    vmap refuses to write what is mapped to what is not, and results are allocated like an input.
    """
    zero = sum(a.new_zeros((), dtype=args[0].dtype) for a in args if isinstance(a, Tensor))
    assert isinstance(zero, Tensor)
    return [
        a + zero.to(a.dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    ]


def below_autograd(op: Any, keyset: Any, args: Sequence[Any]) -> Any:
    """Run an operator inside the forward of a Function, or, without keys, its implementation."""
    if keyset is None:
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        if not torch._C._are_functorch_transforms_active():
            return op.redispatch(keyset, *args)
        # The Function turned gradients off for all levels of transforms, and this is but one.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return op.redispatch(keyset, *args)


def _apply(function: Any, *args: Any) -> Any:
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return function.apply(*args)


def _wants_gradient(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)


def autocast_rule(name: str, count: int) -> None:
    """Let a region of autocast narrow the first ``count`` arguments of an operator."""
    op = getattr(torch.ops.leaner_kernels, name).default

    def register_for(key: str) -> None:
        after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))

        def call(keyset, *args):
            return op.redispatch(keyset & after, *autocast(*args[:count]), *args[count:])

        library.impl(name, call, key, with_keyset=True)

    register_for("AutocastCPU")
    register_for("AutocastCUDA")
