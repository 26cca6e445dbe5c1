"""Registers operators: schemas, devices, fakes, autograd, autocast, vmap, FLOPs, sharding.

``define`` and ``impl`` with a thin autograd Function cost less than half of what ``custom_op`` with
``register_autograd`` costs a call; short-sequence kernels are launch-bound, so that is what users
would feel.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

# The autograd Function of operators: transforms of torch.func have been dealt with above them.
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction

from .._ops import add_op_namespace_prefix, ops
from . import _vmap
from ._checks import MAX_ROW_STRIDE, autocast, check_device, check_sample
from ._flops import PRODUCTS, Products
from ._sharding import SHARDINGS, Sharding
from ._vmap import VmapAxes
from .statistics import AttentionStats

library = torch.library.Library(ops.name, "FRAGMENT")


class Shapes(NamedTuple):
    """Shapes of what an operator returns.

    Attributes:
        out: of the output, which has the dtype of the first input.
        lse: of the log-sum-exp of each softmax row, float32.
        per_head: (B, H), of each statistic.
        heads: (tokens, H * D), of one captured sample.
        max_log_sum: float32, of what the backward of an operator with ``save_out`` needs of rows.
    """

    out: tuple[int, ...]
    lse: tuple[int, ...]
    per_head: tuple[int, int]
    heads: tuple[int, int]
    max_log_sum: tuple[int, ...] = ()


class Implementation(Protocol):
    """How one device computes an operator: every result goes into a tensor that it is given.

    ``rows`` is lse or, of an operator with ``save_out``, max_log_sum.
    """

    def forward(
        self,
        inputs: tuple[Any, ...],
        params: tuple[Any, ...],
        out: Tensor,
        rows: Tensor,
        stats: list[Tensor] | None,
        sample: Tensor | None,
        /,
    ) -> None:
        """Fill ``out``, ``rows`` and, unless None, ``stats``.

        ``stats`` are, with ``save_out``, lse; then max_logit, entropy, prob_norm and head_norm,
        (B, H), then heads (S, tokens, H * D), where S is 0 without ``sample`` (S,) int32. All are
        float32 and uninitialised.
        """
        ...

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Any, ...],
        params: tuple[Any, ...],
        saved: Any,
        grads: tuple[Tensor, ...],
        /,
    ) -> None:
        """Fill ``grads``, one of each differentiable input, from ``grad`` of the output.

        ``saved`` is lse or, with ``save_out``, (out, max_log_sum). ``grad`` is contiguous along its
        last axis. There is none of an optional input whose gradient is not wanted.
        """
        ...


class ByReference:
    """An ``Implementation`` by a reference, in float32 for half-precision inputs.

    Args:
        attend: gives of ``(*inputs, *params)`` the output, the lse and what computes the four
            statistics, (B, H) each.
        differentiate: gives of ``(grad, *inputs, *params)`` the gradient of each input.
    """

    def __init__(
        self,
        attend: Callable[..., tuple[Tensor, Tensor, Callable[[], tuple[Tensor, ...]]]],
        differentiate: Callable[..., tuple[Tensor, ...]],
    ) -> None:
        self._attend = attend
        self._differentiate = differentiate

    def forward(self, inputs, params, out, lse, stats, sample, /) -> None:
        """Fill what there is, heads from the output before it is rounded."""
        a, lse_of_rows, statistics = self._attend(*map(upcast, inputs), *params)
        out.copy_(a)
        lse.copy_(lse_of_rows)
        if stats is None:
            return
        for slot, statistic in zip(stats[:4], statistics(), strict=True):
            slot.copy_(statistic)
        if sample is not None:
            wanted = sample >= 0
            stats[4][wanted] = a[sample[wanted]].flatten(1, -3).flatten(2).to(stats[4].dtype)

    def backward(self, grad, inputs, params, lse, grads, /) -> None:
        """Fill ``grads``."""
        found = self._differentiate(*map(upcast, (grad, *inputs)), *params)
        for slot, gradient in zip(grads, found, strict=True):
            slot.copy_(gradient)


def run_with_stats(
    operator: Callable[..., Any], inputs: tuple[Tensor, ...], sample: Tensor | None, *params: Any
) -> AttentionStats:
    """Return what ``NAME_with_stats`` gives of checked inputs, batches first, and a sample."""
    first = inputs[0]
    if sample is not None:
        check_sample(sample, first.shape[0], first.device)
    check_device(first.device)
    stats = AttentionStats(*operator(*inputs, sample, *params))
    return stats if sample is not None else stats._replace(heads=None)


def at_first_call(package: str | None, name: str = "") -> Callable[[], Any]:
    """Return what imports ``launch`` of a package, once: the module, or what it has by a name."""

    @cache
    def load() -> Any:
        launch = importlib.import_module(".launch", package)
        return getattr(launch, name) if name else launch

    return load


class Passes(NamedTuple):
    """One way to compute ``NAME``, ``NAME_with_stats`` and ``NAME_backward`` of ``register``."""

    forward: Callable[..., Any]
    with_stats: Callable[..., Any]
    backward: Callable[..., Any]


class Operator(NamedTuple):
    """``Passes`` as this package calls them, on a GPU mostly without the dispatcher.

    ``cuda`` are the implementations on a GPU themselves.
    """

    forward: Callable[..., Any]
    with_stats: Callable[..., Any]
    backward: Callable[..., Any]
    cuda: Passes


def register(
    name: str,
    *,
    inputs: str,
    others: str = "",
    params: str,
    shapes: Callable[..., Shapes],
    cpu: Implementation,
    cuda: Callable[[], Implementation],
    flops: Callable[..., Products],
    sharding: Sharding,
    vmap: VmapAxes | None = None,
    vmap_loop: str = "",
    autocast: int | None = None,
    save_out: bool = False,
    new: Callable[[Tensor, Any], Tensor] = Tensor.new_empty,
    gradients: Sequence[str] = (),
) -> Operator:
    """Define ``leaner_kernels::NAME``, ``NAME_with_stats`` and ``NAME_backward``.

    In Python ``torch.ops.leaner_kernels.NAME(*inputs, *others, *params)`` returns (out, lse), and
    ``NAME_with_stats(*inputs, *others, sample, *params)`` returns (out, lse, max_logit, entropy,
    prob_norm, head_norm, heads), with ``sample`` None or (S,) int32. With ``save_out`` the first
    returns (out, max_log_sum), and the second max_log_sum last. Each has the derivatives of every
    input; what is saved for them is inputs, others and lse, or with ``save_out`` out and
    max_log_sum.

    Args:
        name: of the operator.
        inputs: its differentiable tensors, as in a schema: ``"Tensor query, Tensor? attn_mask"``.
            The last may be optional; ``NAME_backward`` then takes ``mask_grad`` last, whether its
            gradient is wanted, which is empty where it is not.
        others: tensors that are not, and numbers beside one another.
        params: its numbers, ``"int window, float scale"``.
        shapes: gives ``Shapes`` of ``(*inputs, *others, *params)``.
        cpu: computes it on the CPU, and by operations that PyTorch can differentiate.
        cuda: imports, at the first call, what computes it on a GPU.
        flops: gives ``Products`` of ``(*inputs, *others, ...)``.
        sharding: the axes along which DTensor may split it.
        vmap: what vmap folds its axis into; the first axis of every input when omitted.
        vmap_loop: an argument with which vmap must compute each example by itself.
        autocast: how many leading inputs a region of autocast casts; all when omitted.
        save_out: whether the backward needs the output.
        new: allocates, like a tensor, the output and gradients, of a shape.
        gradients: names of the results of ``NAME_backward``; ``d`` and the input's when omitted.
    """
    kinds, names = zip(*(each.split() for each in inputs.split(", ")))
    other_kinds = [each.split()[0] for each in others.split(", ")] if others else []
    count, given = len(names), len(names) + len(other_kinds)
    optional = kinds[-1] == "Tensor?"  # the gradient of the mask
    required = count - optional
    # Numbers among the others, which autograd saves beside the tensors.
    number, numbers_end = given, given
    if numbers := [i for i, kind in enumerate(other_kinds, count) if "Tensor" not in kind]:
        number, numbers_end = numbers[0], numbers[-1] + 1
    kept, num_params = given + 1 + save_out, len(params.split(", "))

    arguments = f"{inputs}, {others}" if others else inputs
    saved = "Tensor out, Tensor max_log_sum" if save_out else "Tensor lse"
    flag = ", bool mask_grad" if optional else ""
    stats = "Tensor max_logit, Tensor entropy, Tensor prob_norm, Tensor head_norm, Tensor heads"
    stats = f"lse, {stats}, Tensor max_log_sum" if save_out else f"lse, {stats}"
    grads = ", ".join(f"Tensor {each}" for each in gradients or [f"d{each}" for each in names])
    grads = f"({grads})" if count > 1 else "Tensor"
    rows = "max_log_sum" if save_out else "lse"
    library.define(f"{name}({arguments}, {params}) -> (Tensor out, Tensor {rows})")
    library.define(
        f"{name}_with_stats({arguments}, Tensor? sample, {params}) -> (Tensor out, Tensor {stats})"
    )
    library.define(f"{name}_backward(Tensor grad, {arguments}, {saved}, {params}{flag}) -> {grads}")

    def new_results(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        shape, first = shapes(*args), args[0]
        return new(first, shape.out), _float32(first, shape.max_log_sum if save_out else shape.lse)

    def new_stats(args: tuple[Any, ...], sample: Tensor | None) -> list[Tensor]:
        shape, first = shapes(*args), args[0]
        slots = 0 if sample is None else sample.shape[0]
        of_each = (shape.lse,) * save_out + (shape.per_head,) * 4
        return [_float32(first, each) for each in (*of_each, (slots, *shape.heads))]

    def new_gradients(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        found = []
        for each in args[:required]:  # a comprehension is a call
            found.append(new(each, each.shape))  # noqa: PERF401
        if optional and args[-1] and (mask := args[required]) is not None:
            found.append(mask.new_empty(mask.shape))
        return tuple(found)

    def returned(grads: tuple[Tensor, ...]) -> Any:
        if len(grads) < count:
            return *grads, grads[0].new_empty(0)
        return grads if count > 1 else grads[0]

    def in_order(out: Tensor, rows: Tensor, stats: list[Tensor]) -> tuple[Tensor, ...]:
        return (out, *stats, rows) if save_out else (out, rows, *stats)

    def cuda_or_nothing(args: tuple[Any, ...]) -> Implementation:
        # Nothing can be launched of nothing.
        for each in args[:required]:
            if 0 in each.shape:
                return cpu
        return cpu if 0 in args[number:numbers_end] else cuda()

    def passes(chosen: Callable[[tuple[Any, ...]], Implementation]) -> Passes:
        def forward(*args):
            out, rows = new_results(args)
            chosen(args).forward(args[:given], args[given:], out, rows, None, None)
            return out, rows

        def with_stats(*args):
            sample, args = args[given], args[:given] + args[given + 1 :]
            out, rows = new_results(args)
            stats = new_stats(args, sample)
            chosen(args).forward(args[:given], args[given:], out, rows, stats, sample)
            return in_order(out, rows, stats)

        def backward(grad, *args):
            grads = new_gradients(args)
            saved = args[given:kept] if save_out else args[given]
            params = args[kept : kept + num_params]
            chosen(args).backward(grad, args[:given], params, saved, grads)
            return returned(grads)

        return Passes(forward, with_stats, backward)

    overloads = name, f"{name}_with_stats", f"{name}_backward"
    decompositions, on_gpu = passes(lambda args: cpu), passes(cuda_or_nothing)
    for overload, decomposition, run in zip(overloads, decompositions, on_gpu):
        library.impl(overload, on_cpu(decomposition), "CPU")
        library.impl(overload, _on_device(run), "CUDA")

    @torch.library.register_fake(add_op_namespace_prefix(name), lib=library)
    def _(*args):
        return new_results(args)

    @torch.library.register_fake(add_op_namespace_prefix(f"{name}_with_stats"), lib=library)
    def _(*args):
        sample, args = args[given], args[:given] + args[given + 1 :]
        return in_order(*new_results(args), new_stats(args, sample))

    @torch.library.register_fake(add_op_namespace_prefix(f"{name}_backward"), lib=library)
    def _(_grad, *args):
        return returned(new_gradients(args))

    run_backward = _without_dispatcher(overloads[2], on_gpu.backward, 1 + count)

    class Function(SingleLevelFunction):
        """Runs the operator with or without statistics: everything after ``out`` is one."""

        @staticmethod
        def forward(ctx, op, keyset, *args):
            out, *stats = below_autograd(op, keyset, args)
            ctx.num_args, ctx.params = len(args), args[-num_params:]
            saved = (out, stats[-1]) if save_out else stats[:1]
            if numbers:
                ctx.numbers = args[number:numbers_end]
                ctx.save_for_backward(*args[:number], *args[numbers_end:given], *saved)
            else:
                ctx.save_for_backward(*args[:given], *saved)
            ctx.mark_non_differentiable(*stats)
            # Zeros for the statistics would be a launch each.
            ctx.set_materialize_grads(False)
            return out, *stats

        @staticmethod
        def backward(ctx, grad, *_):
            if grad is None:
                return None, None, *(None,) * ctx.num_args
            saved, params = ctx.saved_tensors, ctx.params
            if numbers:
                saved = *saved[:number], *ctx.numbers, *saved[number:]
            if optional:
                params = *params, ctx.needs_input_grad[1 + count]
            grads = run_backward(rows_contiguous(grad), *saved, *params)
            grads = grads if count > 1 else (grads,)
            if optional and not params[-1]:
                grads = *grads[:required], None
            return None, None, *grads, *(None,) * (ctx.num_args - count)

    for overload, decomposition in zip(overloads[:2], decompositions):
        _register_autograd(overload, Function, decomposition)
        _register_autocast(overload, count if autocast is None else autocast)
    _register_double_backward(overloads[2], decompositions.backward, 1 + count)

    vmap = vmap or VmapAxes((0,) * count)
    results = vmap.out, vmap.lse, *(vmap.per_head,) * 4, vmap.heads, *(vmap.lse,) * save_out
    saved_axes = (vmap.out, vmap.lse) if save_out else (vmap.lse,)
    for overload, axes, found in (
        (overloads[0], (*vmap.inputs, *vmap.params), (vmap.out, vmap.lse)),
        (overloads[1], (*vmap.inputs, vmap.sample, *vmap.params), results),
        (overloads[2], (vmap.out, *vmap.inputs, *saved_axes, *vmap.params), vmap.inputs[:count]),
    ):
        _vmap.register(library, overload, axes, found, vmap_loop)
    PRODUCTS[name], SHARDINGS[name] = flops, sharding
    forward, with_stats = (
        _without_dispatcher(overload, run, count, Function)
        for overload, run in zip(overloads[:2], on_gpu)
    )
    return Operator(forward, with_stats, run_backward, on_gpu)


def rows_contiguous(grad: Tensor) -> Tensor:
    """Return a gradient of an output as the kernels take it."""
    # A gradient that was expanded (a sum's, say) has stride 0 along the axis the kernels load by,
    # and one of another layout may have its rows too far apart.
    *rows, last = grad.stride()[grad.dim() > 3 :]  # the first axis of four is the batch's
    return grad.contiguous() if last != 1 or max(rows) > MAX_ROW_STRIDE else grad


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


def _on_device(launch: Callable[..., Any]) -> Callable[..., Any]:
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


def _without_dispatcher(
    name: str,
    cuda: Callable[..., Any],
    count: int,
    function: Any = None,
) -> Callable[..., Any]:
    """Return what calls an operator on a GPU mostly without the dispatcher.

    That enters Python once for autograd and once for the implementation, and converts all arguments
    for each, which takes longer than a short kernel runs.

    Args:
        name: of the operator, which is called wherever anything but autograd may see the call.
        cuda: its implementation on a GPU.
        count: how many leading arguments are of floating point, or None.
        function: as of ``_register_autograd``; without one the operator is called for derivatives.
    """
    op = getattr(ops, name).default
    run = _on_device(cuda)

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


def _register_autograd(
    name: str, function: type[SingleLevelFunction], decomposition: Callable[..., Any]
) -> None:
    """Register the derivative of an operator: ``function`` where a gradient is wanted.

    Args:
        name: of the operator, whose first result alone is differentiable.
        function: takes the operator, the keys to dispatch it to, and its arguments.
        decomposition: computes the operator by operations that PyTorch can differentiate, for
            derivatives in forward mode.
    """
    op = getattr(ops, name).default

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


def _register_double_backward(name: str, decomposition: Callable[..., Any], count: int) -> None:
    """Register the derivatives of a backward: those of ``decomposition`` in its leading arguments.

    Args:
        name: of the backward.
        decomposition: computes it by operations that PyTorch can differentiate, with all scores in
            memory.
        count: how many of its arguments count as variables; others are functions of these.
    """
    op = getattr(ops, name).default

    def call(keyset, *args):
        if _in_forward_mode():
            return _without_autocast(decomposition, args)
        below = keyset & torch._C._after_autograd_keyset
        if _wants_gradient(args):
            return _apply(_DoubleBackward, op, below, decomposition, count, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(below, *args)

    library.impl(name, call, "Autograd", with_keyset=True)


class _DoubleBackward(SingleLevelFunction):
    """Runs a backward; its derivatives are those of its decomposition."""

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


def _register_autocast(name: str, count: int) -> None:
    """Let a region of autocast narrow the first ``count`` arguments of an operator."""
    op = getattr(ops, name).default

    def register_for(key: str) -> None:
        after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))

        def call(keyset, *args):
            return op.redispatch(keyset & after, *autocast(*args[:count]), *args[count:])

        library.impl(name, call, key, with_keyset=True)

    register_for("AutocastCPU")
    register_for("AutocastCUDA")
