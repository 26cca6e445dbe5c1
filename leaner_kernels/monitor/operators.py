"""Capture attention calls inside compiled graphs, in the operators that our kernels replace.

A graph has no modules. Its calls get their names from a step that was traced eagerly, so both must
have equally many calls, in the same order and of the same sizes.
"""

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops import _hooks
from ..ops.statistics import AttentionStats, evenly_spaced

SAME_PASS, RECOMPUTED = "same pass", "recomputed"
NO_CALL = (
    "KappaMonitor saw no attention call of the compiled model in a sampled step, because replayed "
    "CUDA graphs and cpp_wrapper run no Python. Later sampled steps run eagerly"
)
OTHER_CALLS = (
    "KappaMonitor cannot match the attention calls of the compiled model with those of the eager "
    "step: it made {} instead of {}, or their sizes differ. The rows of this step are named by "
    "their order. Later sampled steps run eagerly"
)


class OperatorCall:
    """A call of an operator, and its known properties.

    Attributes:
        kind: heads and head_dim. Masks and key heads are left out, since they may differ from eager
            mode: some models check whether they are compiled.
        sizes: queries and keys.
        layer: the module's name, if the step is traced eagerly.
        head_dim: the head dimension before PyTorch padded it, likewise.
        stats: once captured, and their ``source``.
        stray: whether compiled code outside of the model made it, in a step traced eagerly.
    """

    def __init__(self, query: Tensor, key: Tensor) -> None:
        _, heads, queries, head_dim = query.shape
        self.kind = heads, head_dim
        self.sizes = queries, key.shape[2]
        self.dtype, self.head_dim = query.dtype, head_dim
        self.layer: str | None = None
        self.stats: AttentionStats | None = None
        self.source = SAME_PASS
        self.stray = False


class NamedStats(NamedTuple):
    """The capture of one layer's call."""

    layer: str
    stats: AttentionStats
    source: str
    dtype: torch.dtype
    columns: int
    head_dim: int


class OperatorCalls:
    """The calls of operators in the sampled steps of one ``CallTrace``.

    An eager step teaches their order, provided that ``torch.compile`` compiled one of them, every
    traced call reaches an operator, and the compiler cannot reorder two of them. In later steps the
    operators capture their calls as they run.

    Args:
        samples: batch entries captured.
        statistics: ``trace.attention_statistics``.
    """

    def __init__(self, samples: int, statistics: Callable[..., AttentionStats]) -> None:
        self.samples, self._statistics = samples, statistics
        self.capturing = False
        # Whether a traced call reached no operator of ours, or may be reordered in a graph.
        self.unfit = False
        self._calls: list[OperatorCall] = []
        self._thread = 0
        self._modules: dict[nn.Module, str] = {}
        self._alone = False
        # The running compiled function, and the results of its newest calls, by kind.
        self._compiled: FrameType | None = None
        self._results: dict[Hashable, Any] = {}
        self._only_eager = False  # set once calls could not be named
        # The learnt calls of one forward, and the modules of that step.
        self._order: list[OperatorCall] = []
        self._modules_then: dict[nn.Module, str] = {}

    def start(self, modules: dict[nn.Module, str], alone: bool) -> None:
        """Begin a step, and decide whether to capture; ``alone`` if no other trace is active."""
        self.clear()
        self._modules, self._thread = modules, threading.get_ident()
        learnt = self._order and self._modules_then == modules and not self._only_eager
        in_force = _hooks.replacements and not _replays_graphs()
        self._alone, self.capturing = alone, bool(alone and learnt and in_force)

    def clear(self) -> None:
        """Forget the calls of a step."""
        self._calls, self.capturing, self.unfit = [], False, False
        self._compiled, self._results = None, {}

    def give_way(self) -> bool:
        """Stop capturing because another trace begins; return whether no call was captured yet."""
        self._alone = False
        if self.capturing and self._calls:
            self._thread = 0  # without calls: those that follow belong to another model
        else:
            self.capturing = False
        return not self.capturing

    def __len__(self) -> int:
        return len(self._calls)

    def sample(self, call: OperatorCall, query: Tensor) -> Tensor | None:
        """Note a call, and return the batch entries to capture, (S,), or None."""
        if threading.get_ident() != self._thread:
            return None
        self._calls.append(call)
        call.stray = not self.capturing and _compiled_function() is not None
        # A single token gives a matrix of one row, whose kappa is always 1.
        if not self.capturing or call.sizes[0] == 1 or 0 in (*query.shape, *call.sizes):
            return None
        return evenly_spaced(len(query), self.samples, query.device)

    def capture(self, stats: AttentionStats, source: str = SAME_PASS) -> None:
        """Keep the statistics and heads of the newest call."""
        nothing = stats.max_logit.new_empty(0)
        self._calls[-1].stats = stats._replace(out=nothing, lse=nothing)
        self._calls[-1].source = source

    def recompute(self, *args: Any) -> None:
        """Recompute the newest call, which PyTorch's kernel computes, in float32."""
        self.capture(self._statistics(*args, self.samples), RECOMPUTED)

    def name(self, before: int, layer: str | None, inputs: list[Tensor], out: Tensor) -> None:
        """Name the only call after the first ``before`` ones; None if it is not measured."""
        if len(self._calls) != before + 1:
            self.unfit = self.unfit or layer is not None
            return
        call = self._calls[-1]
        call.layer, call.head_dim, call.stray = layer, out.shape[-1], False
        compiled = _compiled_function()
        if compiled is None:
            return
        if compiled is not self._compiled:
            self._compiled, self._results = compiled, {}
        # A compiler keeps the order of two calls if one depends on the other.
        if call.kind in self._results and not _needs(inputs, self._results[call.kind]):
            self.unfit = True
        self._results[call.kind] = out.grad_fn

    def take_calls(self, learn: bool) -> list[NamedStats]:
        """Return the captures of a step, or learn the order of its calls."""
        if not self.capturing:
            if self._alone:  # otherwise some calls may belong to another model
                kinds = {call.kind for call in self._calls if call.layer is not None}
                strays = {call.kind for call in self._calls if call.stray}
                learn = learn and self._compiled is not None and not self.unfit
                fits = learn and kinds.isdisjoint(strays)
                self._order = _one_forward(self._calls) if fits else []
                self._modules_then = self._modules
            return []
        count, expected = len(self._calls), len(self._order)
        parts = [self._calls[first : first + expected] for first in range(0, count, expected)]
        named: list[tuple[str | None, int, OperatorCall]]
        if parts and all(_are_alike(self._order, part) for part in parts):
            places = self._order * len(parts)
            named = [(place.layer, place.head_dim, c) for place, c in zip(places, self._calls)]
        else:
            # Matching may fail again: from now on, run eagerly to get the names.
            self._only_eager = True
            warnings.warn(OTHER_CALLS.format(count, expected) if parts else NO_CALL, stacklevel=5)
            named = [(f"call {n}", c.head_dim, c) for n, c in enumerate(self._calls)]
        return [
            NamedStats(layer, _narrowed(c, head_dim), c.source, c.dtype, c.sizes[1], head_dim)
            for layer, head_dim, c in named
            if layer is not None and c.stats is not None
        ]


class OperatorHook:
    """The hook of the operators: every trace notes a call, and at most one captures it."""

    def __init__(self, traces: Sequence[OperatorCalls]) -> None:
        self._traces = traces
        capturing = [calls for calls in traces if calls.capturing]
        if capturing:
            self.capture, self.recompute = capturing[0].capture, capturing[0].recompute

    def sample(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the batch entries to capture in a call, or None if it is not sampled."""
        # Skip a recomputation in a backward: the forward captured the call. Skip a recording of
        # CUDA graphs: tensors allocated there belong to the graphs.
        if _hooks.is_untraced() or torch._C._current_graph_task_id() != -1 or _replays_graphs():
            return None
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        samples = [calls.sample(OperatorCall(query, key), query) for calls in self._traces]
        return next((sample for sample in samples if sample is not None), None)


def _one_forward(calls: list[OperatorCall]) -> list[OperatorCall]:
    """Return the calls of one of a step's forwards; [] if no call has a layer."""
    places = [(call.layer, call.head_dim, call.kind) for call in calls]
    count = len(calls)
    for length in range(1, count + 1):
        if count % length == 0 and places == places[:length] * (count // length):
            named = any(call.layer is not None for call in calls)
            return calls[:length] if named else []
    return []


def _are_alike(expected: list[OperatorCall], calls: list[OperatorCall]) -> bool:
    """Return whether calls match those of a forward; all sequences may have become longer."""
    if [call.kind for call in calls] != [call.kind for call in expected]:
        return False
    before = [size for call in expected for size in call.sizes]
    now = [size for call in calls for size in call.sizes]
    return len(set(zip(before, now))) == len(set(before)) == len(set(now))


def _narrowed(call: OperatorCall, head_dim: int) -> AttentionStats:
    """Return the statistics of a call; cut the columns that PyTorch padded from its heads."""
    stats, heads = call.stats, call.kind[0]
    assert stats is not None
    assert stats.heads is not None
    per_head = stats.heads.unflatten(-1, (heads, -1))
    return stats._replace(heads=per_head[..., :head_dim].flatten(-2))


def _compiled_function() -> FrameType | None:
    """Return the outermost frame of compiled code, even if it runs eagerly, or None."""
    frame, outermost = sys._getframe(1) if "torch._dynamo" in sys.modules else None, None
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and "_dynamo" in frame.f_code.co_filename:
            outermost = frame
        frame = frame.f_back
    return outermost


def _needs(inputs: list[Tensor], result: Any) -> bool:
    """Return whether autograd shows that tensors depend on the result of a node."""
    nodes = deque(t.grad_fn for t in inputs if result is not None)
    met = set()
    while nodes:
        node = nodes.popleft()
        if node is not None and node is result:
            return True
        if node is not None and node not in met:
            met.add(node)
            nodes.extend(before for before, _ in node.next_functions)
    return False


def _replays_graphs() -> bool:
    """Return whether ``torch.compile`` records or replays CUDA graphs in this thread."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    containers = getattr(getattr(trees, "local", None), "tree_manager_containers", {})
    return any(container.tree_manager is not None for container in containers.values())
