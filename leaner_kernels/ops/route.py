"""The route of every operator: allocation, launches and their cache, autograd, registration.

An operator is a class that states its arguments, allocates its results, and names its reference and
its kernels. Three functions of PyTorch's dispatcher belong to it: ``NAME`` returns the output and
what the backward reads of each row of softmax; ``NAME_with_stats`` returns the statistics and the
heads of sampled batch entries, too; ``NAME_backward`` returns the gradients. A call goes through

    public function → checks → ``repeat``, or else ``compute`` → kernels or reference → autograd

and its tensors travel by name: as the operator's ``Arguments``, as the ``Call`` that kernels get,
as ``Results`` and as the operator's ``Gradients``.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from . import _tiles, dispatcher
from ._checks import check_device, check_sample
from ._launch_cache import (
    ALIGNMENT,
    MAX_CACHED,
    CachedLaunch,
    Signature,
    key_of,
    needs_no_dispatcher,
    on_current_device,
    residues,
    rows_contiguous,
)
from .dispatcher import upcast
from .statistics import STATISTICS, AttentionStats, attention_stats


class Results(NamedTuple):
    """The buffers that a forward fills.

    Attributes:
        out: the output, with the axes that the kernels expect.
        max_log_sum: (B, H, N, 2), of a varlen batch (H, T, 2), float32, for softmax attention: the
            largest score of each row, and the log of the sum of exponentials relative to it. For a
            row with a visible key, probabilities are exp(score - first - second);
            ``takes_scaled_maxima`` tells whether scores are scaled. The sum of the two would round
            away the second beside a large first, as in a row of -1e9 only. None for calls that
            save ``lse`` alone.
        lse: (B, H, N), (H, T), float32, in nats, of scaled scores. For a row without a visible key
            -inf, or, where it is saved alone, inf: the backward's probabilities are then 0.
        stats: (STATISTICS, B, H) float32; this and the following for calls with statistics.
        heads: (S, N, H * D) float32, of the S entries that ``sample`` names.
        sample: (S,) int32, contiguous.
    """

    out: Tensor
    max_log_sum: Tensor | None = None
    lse: Tensor | None = None
    stats: Tensor | None = None
    heads: Tensor | None = None
    sample: Tensor | None = None


class Shapes(NamedTuple):
    """Shapes of the results: output, rows of softmax, statistics (B, H), heads of one sample."""

    out: tuple[int, ...]
    rows: tuple[int, ...]
    per_head: tuple[int, int]
    heads: tuple[int, int]


class Products(NamedTuple):
    """FLOPs of a forward: of its last product, whose result is the output, and of all others."""

    last: int
    others: int


class Operator:
    """An operator's own part of the route.

    Attributes:
        name: in PyTorch's namespace ``leaner_kernels``.
        tensors: names and schema types of its tensors; those that may have a gradient come first.
        numbers: likewise of its numbers.
        Arguments: NamedTuple of the tensors and numbers, in this order.
        Gradients: NamedTuple of ``dNAME`` of each tensor that may have a gradient.
        optional_gradient: the tensor whose gradient is computed only if wanted, or None; the
            last of those with a gradient.
        saved: names of the results that a backward reads in addition to the tensors.
        kernels: module, or object in a module, with ``prepare_forward(call, results)``,
            ``prepare_capture(call, results)`` and ``prepare_backward(grad, call, saved,
            gradients)``, which return a ``Launch``; the last may return None, for the reference.
        pointers: for each pointer of a kernel, the name of a tensor, result or gradient.
        cast: how many tensors an autocast region casts.
    """

    name: str
    tensors: Mapping[str, str]
    numbers: Mapping[str, str]
    Arguments: Any
    Gradients: Any
    optional_gradient: str | None = None
    saved: Sequence[str] = ("lse",)
    kernels: str
    pointers: Mapping[str, str]
    cast: int = 1

    @staticmethod
    def call(arguments: Any) -> Any:
        """Return the call that kernels and the reference get."""
        return arguments

    @staticmethod
    def shapes(arguments: Any) -> Shapes:
        """Return the shapes of the results."""
        raise NotImplementedError

    @classmethod
    def new_out(cls, arguments: Any) -> Tensor:
        """Allocate the output, in the dtype of the first tensor."""
        first, *_ = arguments
        return first.new_empty(cls.shapes(arguments).out)

    @classmethod
    def allocate(
        cls,
        arguments: Any,
        with_stats: bool,
        sample: Tensor | None,
        *,
        lse_alone: bool = False,
    ) -> tuple[Any, Tensor, Results]:
        """Return the call of these arguments, the output, and the results that are filled.

        With ``lse_alone``, a backward gets only the output and the log-sum-exp.
        """
        call, out, shapes = cls.call(arguments), cls.new_out(arguments), cls.shapes(arguments)

        def float32(*shape: int) -> Tensor:
            return out.new_empty(shape, dtype=torch.float32)

        results = Results(cls.as_query(out))
        if "max_log_sum" in cls.saved and not lse_alone:
            results = results._replace(max_log_sum=float32(*shapes.rows, 2))
        if with_stats or results.max_log_sum is None:
            results = results._replace(lse=float32(*shapes.rows))
        if with_stats:
            slots = 0 if sample is None else sample.shape[0]
            results = results._replace(
                stats=float32(len(STATISTICS), *shapes.per_head),
                heads=float32(slots, *shapes.heads),
                sample=None if sample is None else sample.contiguous(),
            )
        return call, out, results

    @staticmethod
    def as_query(out: Tensor) -> Tensor:
        """Return an output, or its gradient, with the axes that the kernels expect."""
        return out

    @classmethod
    def new_gradients(cls, arguments: Any, optional: bool) -> Any:
        """Allocate the gradients; the optional one only if ``optional`` is set."""
        named = arguments._asdict()
        wanted = (named[name.removeprefix("d")] for name in cls.Gradients._fields)
        return cls.Gradients(*(t.new_empty(t.shape) for t in wanted))

    @staticmethod
    def bind_saved(saved: dict[str, Tensor]) -> Results:
        """Return by name the tensors that a forward left for its backward."""
        return Results(**{"out": None, **saved})  # pyright: ignore[reportArgumentType]

    @staticmethod
    def saved_of(results: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the ``saved`` of a forward's results."""
        _, lse, *_ = results
        return (lse,)

    @staticmethod
    def is_empty(call: Any) -> bool:
        """Return whether no kernel is launched."""
        return any(isinstance(t, Tensor) and 0 in t.shape for t in call)

    @classmethod
    def run_reference(cls, call: Any, results: Results) -> None:
        """Fill the results by the reference, with operations that PyTorch can differentiate."""
        a, row_lse, statistics = cls.reference_forward(upcast_call(call))
        results.out.copy_(a)
        assert results.lse is not None
        results.lse.copy_(row_lse)
        if results.stats is None or results.heads is None:
            return
        results.stats.copy_(statistics())
        if (sample := results.sample) is not None:
            wanted = sample >= 0
            captured = a[sample[wanted]].flatten(1, -3).flatten(2)
            results.heads[wanted] = captured.to(results.heads.dtype)

    @classmethod
    def run_reference_backward(
        cls, grad: Tensor, call: Any, saved: Results, gradients: Any
    ) -> None:
        """Fill the gradients by the reference."""
        computed = cls.reference_backward(upcast(grad), upcast_call(call))
        for slot, gradient in zip(gradients, computed, strict=True):
            slot.copy_(gradient)

    @staticmethod
    def reference_forward(call: Any) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        """Return output, lse and what computes the statistics (B, H)."""
        raise NotImplementedError

    @staticmethod
    def reference_backward(grad: Tensor, call: Any) -> tuple[Tensor, ...]:
        """Return the gradients."""
        raise NotImplementedError

    @staticmethod
    def flops(arguments: Any) -> Products:
        """Return the FLOPs of the products of a forward."""
        raise NotImplementedError

    @classmethod
    @cache
    def launcher(cls) -> Any:
        """Import and return the kernels, which imports Triton."""
        return resolve_name(f"{__package__}.{cls.kernels}")

    @classmethod
    @cache
    def keyed(cls) -> tuple[str, ...]:
        """Return the names of the tensors that set calls apart: all but the seed of dropout."""
        return tuple(name for name in cls.tensors if name != "seed")

    @classmethod
    @cache
    def backward_inputs(cls) -> tuple[str, ...]:
        """Return the names of what ``NAME_backward`` gets between ``grad`` and the numbers."""
        return *cls.tensors, *cls.saved


def upcast_call(call: Any) -> Any:
    """Return a call with half precision as float32, anything else as it is."""
    return type(call)(*(upcast(t) if isinstance(t, Tensor) else t for t in call))


class _Plan(NamedTuple):
    """The record that repeats a call: its launches and allocations.

    Attributes:
        forward: fills the output and statistics, or parts of these.
        capture: fills the heads, if some are sampled.
        layouts: shape, strides and dtype of each result. Allocating with strides is faster.
        takes_seed: whether the operator has dropout.
        dropout_p: probability for which each call draws a seed.
        numbers: those of the operator.
        backward: launches, by the layouts of the inputs of a backward.
    """

    forward: CachedLaunch
    capture: CachedLaunch | None
    layouts: Sequence[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    takes_seed: bool
    dropout_p: float
    numbers: Sequence[Any]
    backward: dict[Hashable, Any]


class LibraryCall(NamedTuple):
    """The record of a call that a library computes: ``run`` gets its tensors without the seed.

    ``run`` returns None if the library no longer computes such calls.
    """

    run: Callable[[Sequence[Any]], Tensor | None]


class _BackwardPlan(NamedTuple):
    """The record that repeats a backward: its launch, and the layouts of the gradients."""

    launch: CachedLaunch
    layouts: Sequence[tuple[torch.Size, tuple[int, ...], torch.dtype]]


# What repeats a call, by its signature: ``_Plan``; ``LibraryCall``; of a backward that came through
# the dispatcher, the dictionary of its ``_BackwardPlan``; and ``attention.aten.PYTORCHS``.
plans: dict[Hashable, Any] = {}


def remember(key: Hashable, plan: Any) -> Any:
    """Keep what repeats the calls of a signature, and return it."""
    if len(plans) >= MAX_CACHED:
        plans.clear()
    plans[key] = plan
    return plan


def _layouts(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    return [(t.shape, t.stride(), t.dtype) for t in tensors]


# --- Forward --------------------------------------------------------------------------------------


def run_plan(
    plan: _Plan, first: Tensor, addresses: list[int], seed: Tensor | None, sample: Tensor | None
) -> list[Tensor]:
    """Return the results of a call, by the launches of an earlier one.

    Args:
        plan: of a call with this signature.
        first: the first tensor of the call.
        addresses: addresses of the ``keyed`` tensors and the sample; 0 for None.
        seed: seed of dropout.
        sample: batch entries whose heads are captured.
    """
    addresses.append(0 if seed is None else seed.data_ptr())
    results = []
    for shape, strides, dtype in plan.layouts:  # Python 3.11 would call two list comprehensions
        result = first.new_empty_strided(shape, strides, dtype=dtype)
        results.append(result)
        addresses.append(result.data_ptr())
    if plan.capture is None or sample is None:
        plan.forward.run(addresses, results)
    else:
        forward = partial(plan.forward.run, addresses, results)
        _launch_both(forward, partial(plan.capture.run, addresses, results), first.device)
    return results


# Whether a capture runs concurrently with its forward. No GPU has shown yet that it is faster.
CAPTURES_BESIDE = False


def _launch_both(
    forward: Callable[[], Any], capture: Callable[[], Any], device: torch.device
) -> tuple[Any, Any]:
    """Launch a forward and a capture, and return the results of both functions.

    The capture starts first, on a stream of its own, because its few programs would otherwise wait
    for those of the forward. That stream waits for all earlier work, and the current stream waits
    for the capture. So no tensor is freed before its last use, also in a CUDA graph.
    """
    side = _side_stream(device)
    if side is None:
        return forward(), capture()
    current = torch.cuda.current_stream(device)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            captured = capture()
        return forward(), captured
    finally:
        current.wait_stream(side)


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream of captures on a GPU, or None if they follow their forward."""
    if not CAPTURES_BESIDE or not torch.cuda.is_available():
        return None
    return _stream_of(device.index)


@cache
def _stream_of(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


def launch_first(
    operator: type[Operator],
    key: Hashable,
    arguments: Any,
    sample: Tensor | None,
    allocate: Callable[[Any], tuple[Any, Tensor, Results]],
) -> tuple[_Plan | None, list[Tensor]]:
    """Return the results of a call, and the plan that it leaves for others of this key."""
    call, out, results = allocate(arguments)
    buffers = {"out": out, **_filled(results)}
    if operator.is_empty(call):  # an empty batch launches no kernel
        operator.run_reference(call, results)
        return None, list(buffers.values())
    _tiles.check_capability(out.device)
    named = arguments._asdict()
    operands = {name: named[name] for name in operator.keyed()}
    operands |= {"sample": sample, "seed": named.get("seed")}
    kernels, capture = operator.launcher(), None
    launch = kernels.prepare_forward(call, results)
    start = partial(launch.first, operator.pointers, operands, buffers)
    if results.heads is None or results.sample is None or not len(results.sample):
        forward = start()
    else:
        to_heads = {**operator.pointers, "out_view": "heads", "out_ptr": "heads"}
        launch = kernels.prepare_capture(call, results)
        start_capture = partial(launch.first, to_heads, operands, buffers)
        forward, capture = _launch_both(start, start_capture, out.device)
        if capture is None:
            forward = None
    plan = None
    if forward is not None:
        plan = _Plan(
            forward,
            capture,
            layouts=_layouts(list(buffers.values())),
            takes_seed="seed" in operator.tensors,
            dropout_p=named.get("dropout_p", 0.0),
            numbers=tuple(named[name] for name in operator.numbers),
            backward={},
        )
        remember(key, plan)
    return plan, list(buffers.values())


def _filled(results: Results) -> dict[str, Tensor]:
    """Return the results by name, in the order in which operators return them, less the output."""
    named = results._asdict()
    return {name: named[name] for name in _RETURNED if named[name] is not None}


_RETURNED = "lse", "stats", "heads", "max_log_sum"


def forward_on_gpu(operator: type[Operator], with_stats: bool, *args: Any) -> tuple[Tensor, ...]:
    """Launch ``NAME`` or ``NAME_with_stats``."""
    arguments, sample = _bind(operator, with_stats, args)
    named = arguments._asdict()
    seed = named.get("seed")
    tensors = [named[name] for name in operator.keyed()]
    numbers = (named[name] for name in operator.numbers)
    key, addresses, _ = key_of((*tensors, sample, seed), (operator.name, with_stats, *numbers))
    if (plan := plans.get(key)) is not None:
        addresses.pop()  # the seed's
        first, *_ = tensors
        return tuple(run_plan(plan, first, addresses, seed, sample))
    allocate = partial(operator.allocate, with_stats=with_stats, sample=sample)
    _, results = launch_first(operator, key, arguments, sample, allocate)
    return tuple(results)


def _forward(
    operator: type[Operator], reference: Callable[..., Any] | None, with_stats: bool, *args: Any
) -> tuple[Tensor, ...]:
    """Compute ``NAME`` or ``NAME_with_stats``; without ``reference``, only allocate."""
    arguments, sample = _bind(operator, with_stats, args)
    call, out, results = operator.allocate(arguments, with_stats, sample)
    if reference is not None:
        reference(call, results)
    return out, *_filled(results).values()


def _bind(
    operator: type[Operator], with_stats: bool, args: Sequence[Any]
) -> tuple[Any, Tensor | None]:
    """Return the arguments of a forward by name, and the sample, which follows the tensors."""
    if not with_stats:
        return operator.Arguments(*args), None
    names = *operator.tensors, "sample", *operator.numbers
    named = dict(zip(names, args, strict=True))
    sample = named.pop("sample")
    return operator.Arguments(**named), sample


# --- Backward -------------------------------------------------------------------------------------


def launch_backward(
    operator: type[Operator],
    cached: dict[Hashable, Any],
    grad: Tensor,
    inputs: Sequence[Any],
    numbers: Sequence[Any],
    optional: bool,
) -> Sequence[Tensor]:
    """Return the gradients.

    Args:
        operator: of the forward.
        cached: backwards of like calls, by layouts; this one is added.
        grad: of the output, with rows that ``rows_contiguous`` accepts.
        inputs: ``operator.backward_inputs``.
        numbers: those of the operator.
        optional: whether the optional gradient is wanted.
    """
    # Saved tensors are part of the key: hooks may have replaced them by tensors of other layouts.
    low_bits = grad.data_ptr()
    addresses = [low_bits]
    first, *_ = inputs
    layouts: list[Any] = [optional, grad.dtype, first.dtype, grad.stride()]
    for t in inputs:
        if t is None:
            addresses.append(0)
            continue
        address = t.data_ptr()
        addresses.append(address)
        low_bits |= address
        layouts.append(t.stride())
    if low_bits % ALIGNMENT:
        layouts.append(residues(addresses))
    key = tuple(layouts)
    plan = cached.get(key)
    if plan is None:
        return _backward_first(operator, cached, key, grad, inputs, numbers, optional)
    gradients = [
        grad.new_empty_strided(shape, strides, dtype=dtype)
        for shape, strides, dtype in plan.layouts
    ]
    addresses += [t.data_ptr() for t in gradients]
    plan.launch.run(addresses, gradients)
    return gradients


def _backward_first(
    operator: type[Operator],
    cached: dict[Hashable, Any],
    key: Hashable,
    grad: Tensor,
    inputs: Sequence[Any],
    numbers: Sequence[Any],
    optional: bool,
) -> Sequence[Tensor]:
    """Return the gradients, and leave what repeats their launch."""
    call, saved, gradients = _bind_backward(operator, inputs, numbers, optional)
    wanted = {name: t for name, t in gradients._asdict().items() if t is not None}
    grad_of_query, launch = operator.as_query(grad), None
    if not operator.is_empty(call):
        prepare = operator.launcher().prepare_backward
        launch = prepare(grad_of_query, call, saved, gradients)
    if launch is None:
        # A region of autocast around the backward would round the products.
        with dispatcher.no_autocast(grad):
            operator.run_reference_backward(grad_of_query, call, saved, gradients)
        return list(wanted.values())
    read = [name for name, t in saved._asdict().items() if t is not None]
    operands = dict(zip(("grad", *operator.tensors, *read), (grad, *inputs), strict=True))
    cached_launch = launch.first(operator.pointers, operands, wanted)
    if cached_launch is not None:
        cached[key] = _BackwardPlan(cached_launch, _layouts(list(wanted.values())))
    return list(wanted.values())


def _bind_backward(
    operator: type[Operator], inputs: Sequence[Any], numbers: Sequence[Any], optional: bool
) -> tuple[Any, Results, Any]:
    """Return the call of a backward, the results that it reads, and its gradients, allocated."""
    named = dict(zip(operator.backward_inputs(), inputs, strict=True))
    tensors = (named[name] for name in operator.tensors)
    arguments = operator.Arguments(*tensors, *numbers)
    saved = operator.bind_saved({name: named[name] for name in operator.saved})
    if saved.out is not None:
        saved = saved._replace(out=operator.as_query(saved.out))
    return operator.call(arguments), saved, operator.new_gradients(arguments, optional)


def _backward_args(
    operator: type[Operator], args: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any], bool]:
    """Return the inputs and numbers of ``NAME_backward``, and whether an optional one is wanted."""
    names = *operator.backward_inputs(), *operator.numbers
    if operator.optional_gradient is not None:
        names = *names, "optional"
    named = dict(zip(names, args, strict=True))
    inputs = [named[name] for name in operator.backward_inputs()]
    numbers = [named[name] for name in operator.numbers]
    return inputs, numbers, named.get("optional", False)


def backward_on_gpu(operator: type[Operator], grad: Tensor, *args: Any) -> Any:
    """Launch ``NAME_backward``."""
    inputs, numbers, optional = _backward_args(operator, args)
    cached = cached_backwards(operator, inputs, numbers)
    grad = rows_contiguous(grad)
    gradients = launch_backward(operator, cached, grad, inputs, numbers, optional)
    return _returned(operator, gradients)


def cached_backwards(
    operator: type[Operator], inputs: Sequence[Any], numbers: Sequence[Any]
) -> dict[Hashable, Any]:
    """Return the launches of backwards with such inputs and numbers."""
    key, *_ = key_of(inputs, (operator.name, "backward", *numbers))
    cached = plans.get(key)
    return remember(key, {}) if cached is None else cached


def _backward(
    operator: type[Operator], reference: Callable[..., Any] | None, grad: Tensor, *args: Any
) -> Any:
    """Compute ``NAME_backward``; only allocate its results if without reference."""
    inputs, numbers, optional = _backward_args(operator, args)
    call, saved, gradients = _bind_backward(operator, inputs, numbers, optional)
    if reference is not None:
        reference(operator.as_query(grad), call, saved, gradients)
    return _returned(operator, [t for t in gradients if t is not None])


def _returned(operator: type[Operator], gradients: Sequence[Tensor]) -> Any:
    """Return gradients as in the schema: a single one alone, an unwanted one as an empty tensor."""
    first, *others = gradients
    if len(operator.Gradients._fields) == 1:
        return first
    missing = len(operator.Gradients._fields) > len(gradients)
    return (first, *others, first.new_empty(0)) if missing else tuple(gradients)


class _Attention(dispatcher.SingleLevelFunction):
    """Put results on the graph that were computed already, and differentiate them."""

    @staticmethod
    def forward(ctx, operator, plan, numbers, results, *tensors):
        ctx.operator, ctx.plan, ctx.numbers = operator, plan, numbers
        ctx.save_for_backward(*tensors, *operator.saved_of(results))
        # Zeros for the others would be a launch each.
        ctx.set_materialize_grads(False)
        out, *others = results
        if plan is not None and len(others) == 1:
            return out  # a plain call wants no more
        ctx.mark_non_differentiable(*others)
        return tuple(results)

    @staticmethod
    def backward(ctx, grad, *_):
        operator, inputs, numbers = ctx.operator, ctx.saved_tensors, ctx.numbers
        wanted = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(wanted)
        place = optional_place(operator)
        optional = place is not None and wanted[place]
        grad = rows_contiguous(grad)
        if (
            not torch.is_grad_enabled()
            and not grad.is_neg()
            and needs_no_dispatcher((grad, *inputs))
            and on_current_device(grad)
        ):
            plan = ctx.plan
            cached = cached_backwards(operator, inputs, numbers) if plan is None else plan.backward
            gradients = launch_backward(operator, cached, grad, inputs, numbers, optional)
        else:
            args = *inputs, *numbers
            if place is not None:
                args = *args, optional
            gradients = getattr(ops, f"{operator.name}_backward").default(grad, *args)
            if isinstance(gradients, Tensor):
                gradients = (gradients,)
            elif place is not None and not optional:
                *gradients, _ = gradients
        before = (None,) * _BEFORE_TENSORS
        after = (None,) * (len(wanted) - _BEFORE_TENSORS - len(gradients))
        return *before, *gradients, *after


_BEFORE_TENSORS = 4  # arguments of ``_Attention.forward``


@cache
def optional_place(operator: type[Operator]) -> int | None:
    """Return the place of the optional gradient among the inputs of ``_Attention``, or None."""
    if operator.optional_gradient is None:
        return None
    return _BEFORE_TENSORS + list(operator.tensors).index(operator.optional_gradient)


# --- Calls of public functions, which mostly need no dispatcher -----------------------------------


def repeat(
    operator: type[Operator],
    signature: Signature,
    tensors: Sequence[Any],
    sample: Tensor | None = None,
) -> Sequence[Tensor] | None:
    """Return the results of a call whose signature an earlier one had, or else None.

    Args:
        operator: the operator that is called.
        signature: of ``tensors`` and the sample.
        tensors: those of the operator, in its order, without the seed.
        sample: batch entries whose heads are captured.
    """
    key, addresses, recorded = signature
    plan = plans.get(key)
    if plan is None:
        return None
    if type(plan) is LibraryCall:
        out = plan.run(tensors)
        return None if out is None else (out,)
    first, seed = tensors[0], None
    if plan.dropout_p:
        seed = draw_seed(plan.dropout_p, first.device)
    results = run_plan(plan, first, addresses, seed, sample)
    if not recorded:
        return results
    if plan.takes_seed:
        tensors = *tensors, seed
    out = _Attention.apply(operator, plan, plan.numbers, results, *tensors)
    return (out,) if isinstance(out, Tensor) else out


def compute(
    operator: type[Operator],
    signature: Signature | None,
    arguments: Any,
    with_stats: bool = False,
    sample: Tensor | None = None,
) -> Sequence[Tensor]:
    """Return the results of a checked call; one with a signature is repeated from then on.

    ``arguments`` have no seed yet. A user's call with other integers may have been converted to
    one of this signature, so that it is repeated here.
    """
    named = arguments._asdict()
    if signature is not None:
        tensors = [named[name] for name in operator.keyed()]
        results = repeat(operator, signature, tensors, sample)
        if results is not None:
            return results
    if named.get("dropout_p"):
        first, *_ = arguments
        arguments = arguments._replace(seed=draw_seed(arguments.dropout_p, first.device))
    if signature is None:
        named = {**arguments._asdict(), "sample": sample}
        if not with_stats:
            names = *operator.tensors, *operator.numbers
            return getattr(ops, operator.name).default(*(named[name] for name in names))
        names = *operator.tensors, "sample", *operator.numbers
        with_stats_op = getattr(ops, f"{operator.name}_with_stats").default
        return with_stats_op(*(named[name] for name in names))
    key, _, recorded = signature
    allocate = partial(operator.allocate, with_stats=with_stats, sample=sample)
    plan, results = launch_first(operator, key, arguments, sample, allocate)
    if recorded:
        named = arguments._asdict()
        tensors = [named[name] for name in operator.tensors]
        numbers = tuple(named[name] for name in operator.numbers)
        out = _Attention.apply(operator, plan, numbers, results, *tensors)
        return (out,) if isinstance(out, Tensor) else out
    return results


def compute_stats(
    operator: type[Operator],
    signature: Signature | None,
    arguments: Any,
    sample: Tensor | None,
) -> AttentionStats:
    """Return the statistics of a checked call."""
    first, *_ = arguments
    check_device(first.device)
    if sample is not None:
        check_sample(sample, operator.shapes(arguments).per_head[0], first.device)
    results = compute(operator, signature, arguments, with_stats=True, sample=sample)
    return stats_of(results, sample)


def stats_of(results: Sequence[Tensor], sample: Tensor | None) -> AttentionStats:
    """Return the results of ``NAME_with_stats`` by name."""
    out, lse, stats, heads, *_ = results
    return attention_stats(out, lse, stats, None if sample is None else heads)


def draw_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """Return (1,) int64 from PyTorch's generator of the device, or None without dropout."""
    if dropout_p == 0:
        return None
    return torch.randint(torch.iinfo(torch.int64).max, (1,), device=device)


# --- Registration ---------------------------------------------------------------------------------

OPERATORS: dict[str, type[Operator]] = {}


def _result_names(operator: type[Operator], with_stats: bool) -> Sequence[str]:
    returned = [name for name in _RETURNED if with_stats or name in operator.saved]
    if "max_log_sum" not in operator.saved:
        returned = [name for name in returned if name != "max_log_sum"]
    return ["out", *returned]


def register(operator: type[Operator]) -> None:
    """Register an operator for every device, autograd, autocast and transform."""
    OPERATORS[operator.name] = operator

    def typed(named: Mapping[str, str]) -> list[str]:
        return [f"{kind} {name}" for name, kind in named.items()]

    def returned(names: Sequence[str]) -> str:
        return ", ".join(f"Tensor {name}" for name in names)

    def schema(*arguments: str, returns: Sequence[str]) -> str:
        return f"({', '.join(arguments)}) -> ({returned(returns)})"

    tensors, numbers = typed(operator.tensors), typed(operator.numbers)
    saved = [f"Tensor {name}" for name in operator.saved]
    optional = ["bool optional"] if operator.optional_gradient is not None else []
    plain, with_stats = (_result_names(operator, stats) for stats in (False, True))
    schemas = (
        schema(*tensors, *numbers, returns=plain),
        schema(*tensors, "Tensor? sample", *numbers, returns=with_stats),
        schema(
            *("Tensor grad", *tensors, *saved, *numbers, *optional),
            returns=operator.Gradients._fields,
        ),
    )

    def computed_by(forward: Any, backward: Any) -> Sequence[Callable[..., Any]]:
        forwards = (partial(_forward, operator, forward, stats) for stats in (False, True))
        return *forwards, partial(_backward, operator, backward)

    def record(results: Sequence[Tensor], args: Sequence[Any]) -> Any:
        # The sample is no input of the backward.
        arguments, _ = _bind(operator, len(results) > len(plain), args)
        named = arguments._asdict()
        tensors = (named[name] for name in operator.tensors)
        numbers = tuple(named[name] for name in operator.numbers)
        return dispatcher.apply(_Attention, operator, None, numbers, results, *tensors)

    dispatcher.register(
        operator.name,
        schemas,
        reference=computed_by(operator.run_reference, operator.run_reference_backward),
        on_gpu=launchers(operator),
        fake=computed_by(None, None),
        record=record,
        cast=operator.cast,
        differentiable=len(operator.Gradients._fields),
    )


def launchers(operator: type[Operator]) -> Sequence[Callable[..., Any]]:
    """Return what launches ``NAME``, ``NAME_with_stats`` and ``NAME_backward`` on a GPU."""
    forwards = (partial(forward_on_gpu, operator, stats) for stats in (False, True))
    return *forwards, partial(backward_on_gpu, operator)


# --- FLOPs, which PyTorch's counters read ---------------------------------------------------------


def register_flops() -> None:
    """Register all with ``torch.utils.flop_counter``, which this imports.

    Only products count, 2 per multiply-add, whatever a mask hides, less those that give a captured
    head its precision. A backward has every product of the forward but the last, and two gradients
    of each.
    """
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in flop_formulas().items():
        register_flop_formula(getattr(ops, name), get_raw=True)(formula)


def flop_formulas() -> dict[str, Callable[..., int]]:
    """Return the FLOPs of each operator by name, functions of the arguments of its calls."""
    formulas: dict[str, Callable[..., int]] = {}
    for name, operator in OPERATORS.items():

        def forward(
            *args: Any, out_val: Any = None, operator: Any = operator, with_stats: bool = False
        ) -> int:
            return sum(operator.flops(_bind(operator, with_stats, args)[0]))

        def backward(
            grad: Tensor, *args: Any, out_val: Any = None, operator: Any = operator
        ) -> int:
            inputs, numbers, _ = _backward_args(operator, args)
            named = dict(zip(operator.backward_inputs(), inputs, strict=True))
            tensors = (named[name] for name in operator.tensors)
            last, others = operator.flops(operator.Arguments(*tensors, *numbers))
            return 2 * last + 3 * others

        formulas[name] = forward
        formulas[f"{name}_with_stats"] = partial(forward, with_stats=True)
        formulas[f"{name}_backward"] = backward
    return formulas
