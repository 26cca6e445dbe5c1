"""Trace the attention calls of modules of other libraries in a sampled step.

The result of PyTorch's function is rounded to the precision of the model, which hides kappa. Its
queries, keys and values are exact in float32, so the heads are recomputed from them.
"""

import inspect
import math
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn import functional

# Bound here, because PyTorch's name may be replaced by another function.
from torch.nn.functional import multi_head_attention_forward as _multi_head
from torch.nn.functional import scaled_dot_product_attention as _sdpa
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from ..ops import _hooks
from ..ops._checks import autocast
from ..ops.attention import reference
from ..ops.attention.checks import plain_mask
from ..ops.attention.sampled import sampled_attention
from ..ops.statistics import (
    STATISTICS,
    AttentionStats,
    evenly_spaced,
    newest_statistics,
    per_head,
    statistic_of,
)
from .operators import RECOMPUTED, SAME_PASS, OperatorCalls, OperatorHook

_SIGNATURE = inspect.signature(_multi_head)
# Number of scores in memory at a time, a block of rows; 64 MiB in float32.
MAX_SCORES = 2**24
IN_TRANSFORM = "it runs inside a transform of torch.func"
# Names that the code of an attention module calls.
_ATTENTION_FUNCTIONS = {
    *("attention", "attention_qkvpacked", "ALL_ATTENTION_FUNCTIONS"),
    *("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"),
    *("scaled_dot_product_attention", "multi_head_attention_forward"),
}


class TracedCall(NamedTuple):
    """The capture of one attention call, without gradients.

    Most fields are those of ``leaner_kernels.nn.Captured``. ``statistics`` cover the forwards since
    the step began, and are (S, H) if recomputed. ``columns`` counts the keys. ``source`` is
    ``SAME_PASS`` or ``RECOMPUTED``. ``residual`` is unknown to a call.
    """

    heads: Tensor
    lengths: Tensor | None
    statistics: dict[str, Tensor]
    dtype: torch.dtype
    head_dim: int
    columns: int
    source: str
    num_heads: int
    residual: None = None

    __getattr__ = statistic_of


class CallTrace:
    """Trace the attention calls of a model's modules between ``start`` and ``stop``.

    Only calls of the thread that called ``start``, and of the backward in any thread, are traced.
    Calls of ``leaner_kernels.attention`` get their statistics from the same pass. Calls of
    PyTorch's ``scaled_dot_product_attention`` return their usual result, and are computed a second
    time. Meanwhile compiled code runs eagerly, because calls inside it cannot be intercepted. The
    exception is compiled code whose attention operators our kernels replace: from the second step
    on, ``operators`` captures its calls as they run.

    ``calls`` has the newest call of each layer by the name of its module, with "#1" appended for a
    second call. ``refused`` has the reasons why calls could not be traced. Calls inside
    ``excluded`` modules do not count.
    """

    def __init__(self, names: dict[nn.Module, str], excluded: set[nn.Module], samples: int) -> None:
        self.names, self.excluded, self.samples = names, excluded, samples
        self.calls: dict[str, TracedCall] = {}
        self.refused: dict[str, str] = {}
        self.ran = False
        self._thread = 0
        # Per thread: a backward on a GPU recomputes activations in its own thread.
        self._local = threading.local()
        self._counts: dict[str, int] = {}
        self._handles: list[Any] = []
        self._mode = _TraceMode(self)
        self.operators = OperatorCalls(samples, attention_statistics)

    def __reduce__(self) -> tuple[Any, ...]:
        # A model that is copied or saved between start and stop keeps its hooks. Nothing would stop
        # the trace of the copy, so it gets no modules.
        return CallTrace, ({}, set(), self.samples)

    def start(self) -> None:
        """Start tracing calls, in addition to those since ``clear``."""
        self._thread = threading.get_ident()
        # Calls in a graph do not tell which model they belong to.
        for other in _ACTIVE:
            if other.operators.give_way():
                other._trace_eagerly()
        self.operators.start(self.names, alone=not _ACTIVE)
        _ACTIVE.append(self)
        if self.operators.capturing:
            _set_hooks()
        else:
            self._trace_eagerly()

    def _trace_eagerly(self) -> None:
        """Trace by hooks of the modules and a function mode, in eager mode."""
        if self._handles:
            return
        for module in self.names:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it accepts no hooks, and its calls cannot be intercepted
            self._handles += [
                module.register_forward_pre_hook(self._before_forward),
                module.register_forward_hook(self._after_forward, prepend=True, always_call=True),
            ]
        _set_hooks()

    def stop(self) -> None:
        """Remove all hooks and modes, and keep the calls; without ``start`` this does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._local = [], threading.local()
        self._mode.leave()
        if self in _ACTIVE:
            _ACTIVE.remove(self)
        _set_hooks()

    def take_operator_calls(self) -> None:
        """Name the captures of operators, or learn the order of their calls, after ``stop``."""
        # Compiled, our own modules may make calls that they do not make in eager mode.
        learn = not self.refused and not self.excluded
        for call in self.operators.take_calls(learn):
            described = call.source, call.dtype, call.columns, call.head_dim
            self._record(call.layer, call.stats, None, *described)

    def clear(self) -> None:
        """Drop all traced calls."""
        self.calls, self.refused, self.ran = {}, {}, False
        self.operators.clear()

    def no_calls_message(self) -> str:
        """Return an error message of one line: no call was traced, and which calls can be."""
        model = type(next(iter(self.names))).__name__
        if not self.ran:
            return f"{model} ran no forward between begin and end"
        return (
            f"{model} made no attention call that can be traced: only calls of several queries of "
            "leaner_kernels.attention and torch.nn.functional.scaled_dot_product_attention can. In "
            "transformers use attn_implementation='sdpa' or 'leaner', in timm set_fused_attn"
        )

    def untraced(self, layers: Collection[str]) -> list[str]:
        """Return the names of modules that look like attention, with no layer in or around them.

        Of nested ones only the innermost is returned.
        """
        inside = {part for module in self.excluded for part in module.modules()}
        traced = {layer.partition("#")[0] for layer in layers}
        untraced = [
            name
            for module, name in self.names.items()
            if module not in inside
            and looks_like_attention(module)
            and not any(_within(name, other) or _within(other, name) for other in traced)
        ]
        return [n for n in untraced if not any(_within(o, n) for o in untraced if o != n)]

    @property
    def recording(self) -> bool:
        """Whether a call made now is traced."""
        return bool(self._running) and self.excluded.isdisjoint(self._running)

    @property
    def _running(self) -> list[nn.Module]:
        """The modules whose forwards are running in this thread, innermost last."""
        return vars(self._local).setdefault("running", [])

    def attend(
        self,
        owner: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *params: Any,
        key_lengths: Tensor | None = None,
        **named: Any,
    ) -> Tensor | None:
        """Compute and trace ``leaner_kernels.attention`` with the same arguments.

        Return its result, or None if this call is not traced and the caller must compute it.
        ``owner`` is the calling module; None means the innermost module whose forward is running.
        """
        device, batch = query.device, len(query)
        if (
            _hooks.is_untraced()
            or device.type not in ("cpu", "cuda")
            or batch == 0
            or not _wants_statistics()
        ):
            # No statistics, for the same bits as in any other step.
            return None
        # The samples of all monitors are concatenated, since each has its own number.
        layers, samples = dict[CallTrace, str](), list[Tensor]()
        for trace in _ACTIVE:
            layer = trace._layer_of_call(owner, query, key, value) if trace.recording else None
            if layer is not None:
                layers[trace] = layer
                trace.operators.unfit = True
                samples.append(evenly_spaced(batch, trace.samples, device))
        sample = torch.cat(samples or [evenly_spaced(batch, self.samples, device)])
        # Its own calls are not traced again.
        with _hooks.untraced():
            named |= {"key_lengths": key_lengths, "sample": sample}
            stats = sampled_attention(query, key, value, *params, **named)
        assert stats.heads is not None
        # With as many queries as keys this is self-attention: padded keys are padded tokens too.
        lengths = key_lengths if query.shape[2] == key.shape[2] else None
        heads = stats.heads.split([len(s) for s in samples] or len(sample))
        for (trace, layer), own, of_trace in zip(layers.items(), samples, heads):
            of_sample = None if lengths is None else lengths.index_select(0, own)
            own_stats = stats._replace(heads=of_trace)
            trace._record(layer, own_stats, of_sample, SAME_PASS, query.dtype, *value.shape[-2:])
        return stats.out

    def recompute(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> str | None:
        """Recompute a traced call of PyTorch's function in float32, and return its layer."""
        layer = self._layer_of_call(None, query, key, value) if self.recording else None
        if layer is None:
            return None
        try:
            attn_mask, is_causal = plain_mask(attn_mask, is_causal, query, key)
        except ValueError as error:
            self.refused[layer] = str(error)
            return None
        params = attn_mask, is_causal, scale, self.samples
        stats = attention_statistics(query, key, value, *params)
        self._record(layer, stats, None, RECOMPUTED, query.dtype, *value.shape[-2:])
        return layer

    def _layer_of_call(self, owner: nn.Module | None, *tensors: Tensor) -> str | None:
        """Return the layer of a call, or None if it is not traced."""
        name = self.names[owner if owner in self.names else self._running[-1]]
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        layer = f"{name}#{number}" if number else name
        kinds = {type(t).__name__ for t in tensors} - {"Tensor", "Parameter"}
        if kinds or any(t.is_nested for t in tensors):
            kind = kinds.pop() if kinds else "nested tensor"
            self.refused[layer] = f"it is given a {kind}, and only plain tensors can be traced"
            return None
        if _functorch.peek_interpreter_stack() is not None:
            self.refused[layer] = IN_TRANSFORM
            return None
        # A single token gives a matrix of one row, whose kappa is always 1.
        return None if tensors[0].shape[-2] == 1 or any(0 in t.shape for t in tensors) else layer

    def _record(
        self,
        layer: str,
        stats: AttentionStats,
        lengths: Tensor | None,
        source: str,
        dtype: torch.dtype,
        columns: int,
        head_dim: int,
    ) -> None:
        assert stats.heads is not None
        before = self.calls.get(layer)
        self.calls[layer] = TracedCall(
            heads=stats.heads,
            lengths=lengths,
            statistics=newest_statistics(stats, None if before is None else before.statistics),
            dtype=dtype,
            head_dim=head_dim,
            columns=columns,
            source=source,
            num_heads=stats.heads.shape[-1] // head_dim,
        )

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        # Copies (see ``__reduce__``) and replicas of nn.DataParallel are not in ``names``.
        backward = _in_backward()
        if module not in self.names or not (threading.get_ident() == self._thread or backward):
            return
        running = self._running
        # The forward has traced this call already; the backward recomputes it.
        if not running and not backward:
            self._mode.__enter__()
        running.append(module)
        self._counts[self.names[module]] = 0
        self.ran = True

    def _after_forward(self, module: nn.Module, _args: Any, output: Any) -> None:
        running = self._running
        if module not in running:
            return
        while running.pop() is not module:
            pass
        if not running and not _in_backward():
            self._mode.leave()


class _TraceMode(TorchFunctionMode):
    """Pass calls of PyTorch's functions to a ``CallTrace``, under whichever name they are bound."""

    def __init__(self, trace: CallTrace) -> None:
        super().__init__()
        self.trace = trace

    def leave(self) -> None:
        # Modes form a stack: another mode left on top of this one must not be removed here.
        if _get_current_function_mode() is self:
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (_sdpa, _multi_head) or _hooks.is_untraced() or not self.trace.recording:
            return func(*args, **kwargs)
        if func is _sdpa:
            return self._attend(_sdpa, *args, **kwargs)
        given = _SIGNATURE.bind(*args, **kwargs).arguments
        if not given.get("need_weights", True):
            with _calling(self._attend):
                return func(*args, **kwargs)
        # With ``need_weights`` it computes the weights itself. Without them it makes a traceable
        # call, in which the mask expresses causality, as it does here.
        result = func(*args, **kwargs)
        with torch.no_grad(), _hooks.untraced(), _calling(self._record):
            func(**{**given, "need_weights": False, "is_causal": False, "training": False})
        return result

    def _attend(self, attends: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        operators = self.trace.operators
        before = len(operators)
        out = attends(*args, **kwargs)
        layer = self.trace.recompute(*args, **kwargs)
        inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        operators.name(before, layer, inputs, out)
        return out

    def _record(self, _: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.trace.recompute(query, *args, **kwargs)
        self.trace.operators.unfit = True  # which consists of plain products
        return torch.zeros_like(query)  # the result is not read


@contextmanager
def _calling(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Make PyTorch's modules call ``attend``, with the original function as its first argument.

    A mode does not intercept its own calls.
    """
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = partial(attend, before)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


# The traces between start and stop; each monitor traces the calls of its own model.
_ACTIVE: list[CallTrace] = []
_stance: list[Any] = []


def _set_hooks() -> None:
    """Set the hooks of ``leaner_kernels``; while a trace is eager, force eager mode."""
    eager = [trace for trace in _ACTIVE if not trace.operators.capturing]
    # Compiled code reads ``current``: a change would compile it again.
    _hooks.current = eager[-1] if eager else None
    _hooks.operators = OperatorHook([trace.operators for trace in _ACTIVE]) if _ACTIVE else None
    # If the compiler was never imported, nothing is compiled; the import would take seconds.
    if eager and not _stance and "torch._dynamo" in sys.modules:
        _stance.append(torch.compiler.set_stance("force_eager"))
    elif not eager and _stance:
        _stance.pop().__exit__(None, None, None)


def _wants_statistics() -> bool:
    """Return whether a call of ``leaner_kernels.attention`` made now gets statistics."""
    if any(trace.recording for trace in _ACTIVE):
        return True
    # Activation checkpointing repeats calls of the forward, perhaps outside of any module.
    return _in_backward() and not any(trace._running for trace in _ACTIVE)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _within(name: str, other: str) -> bool:
    """Return whether a module, by name, is another one or inside it; "" is the model."""
    return not other or f"{name}.".startswith(f"{other}.")


def looks_like_attention(module: nn.Module) -> bool:
    """Whether a class is called attention, or its code names an attention function."""
    if "attention" in type(module).__name__.lower():
        return True
    classes = [c for c in type(module).__mro__ if c not in (nn.Module, object)]
    functions = [f for c in classes for f in vars(c).values() if isinstance(f, FunctionType)]
    return any(not _ATTENTION_FUNCTIONS.isdisjoint(f.__code__.co_names) for f in functions)


@torch.no_grad()
def attention_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    samples: int,
) -> AttentionStats:
    """Attend as PyTorch's function does, for at most ``samples`` batch entries, without dropout.

    Returns heads (S, N, H * E), float32, or float64 of float64, and statistics (S, H); out and lse
    are empty. An autocast region rounds the inputs, as for PyTorch's function. The rest is computed
    in float32, without TF32 even if it is allowed.
    """
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    if query.dim() < 4:
        query, key, value = (t.unsqueeze(-3) for t in (query, key, value))
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(-3)
    batch = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    heads = max(t.shape[-3] for t in (query, key, value))
    query = query.expand(*batch, heads, -1, -1)
    key, value = (t.expand(*batch, -1, -1, -1) for t in (key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*batch, heads, query.shape[-2], key.shape[-2])
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    descriptions = []
    with torch.autocast(query.device.type, enabled=False), _whole_products():
        for number in evenly_spaced(math.prod(batch), samples, torch.device("cpu")):
            place = tuple(int(i) for i in torch.unravel_index(number, batch))
            mask = None if attn_mask is None else attn_mask[place]
            descriptions.append(
                _attend_one(query[place], key[place], value[place], mask, is_causal, factor)
            )
    heads, *per_head = map(torch.stack, zip(*descriptions, strict=True))
    nothing = heads.new_empty(0)
    return AttentionStats._make((nothing, nothing, *(t.float() for t in per_head), heads))


def _attend_one(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Return the heads (N, H * E) of one entry, then each of ``STATISTICS``, (H,)."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, key, value = (t.to(dtype)[None] for t in (query, key, value))
    _, heads, rows, _ = query.shape
    cols = key.shape[2]
    columns = torch.arange(cols, device=query.device)
    step = max(1, MAX_SCORES // (heads * cols))
    outputs, blocks = [], []
    for first in range(0, rows, step):
        block = slice(first, min(first + step, rows))
        seen = None if mask is None else mask[None, :, block]
        if seen is not None and seen.dtype != torch.bool:
            seen = seen.to(dtype)
        elif is_causal:
            past = columns <= torch.arange(block.start, block.stop, device=query.device)[:, None]
            seen = past if seen is None else seen & past
        p, _, s = reference.probabilities(query[:, :, block], key, seen, None, scale=scale)
        a = reference.forward(p, value, None, 0.0)
        blocks.append((block.stop - block.start, *per_head(p, s, a)))
        outputs.append(a[0].transpose(0, 1).flatten(1))
    counts, *per_block = zip(*blocks)
    joined = []
    for statistic, values in zip(STATISTICS, per_block, strict=True):
        if statistic.over_rows == "max":
            joined.append(torch.cat(values).amax(dim=0))
        elif statistic.over_rows == "mean":
            parts = [count / rows * mean for count, mean in zip(counts, values)]
            joined.append(torch.cat(parts).sum(dim=0))
        else:
            joined.append(torch.cat(values).square().sum(dim=0).sqrt())
    return torch.cat(outputs), *joined


@contextmanager
def _whole_products() -> Iterator[None]:
    # TF32 and bfloat16 products trade precision for speed; kappa would be rounding noise.
    mkldnn: Any = torch.backends.mkldnn
    backends = torch.backends.cuda.matmul, mkldnn.matmul
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before):
            backend.fp32_precision = precision
