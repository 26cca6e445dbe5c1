"""Measure the condition number of every attention block while a model trains.

``begin`` starts the captures. ``end`` measures them (``measurement.py``) and passes the rows to the
writers (``writers.py``). A model is captured in four ways:

- Attributes of our modules (``nn.capture``). Only the module knows its output and residual, and
  compiled code keeps the attributes.
- A hook of ``leaner_kernels.attention`` (``ops._hooks``), for calls in modules of others.
  Activation checkpointing repeats calls in threads of the backward, where no mode is active.
- A function mode (``trace.py``), for calls of PyTorch's attention. Any module may have bound that
  function under another name.
- A hook of the operators below that function (``operators.py``), if our kernels compute them.
  Compiled code calls only the operators.
"""

import math
import os
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import distributed as dist
from torch import nn

from .. import removed
from ..ops._checks import is_mapped, shown
from .measurement import (
    CHANGED,
    MEASURED,
    NO_CALL,
    NOT_RUN,
    REFUSED,
    TAKEN,
    HostCopy,
    LayerSizes,
    SideStream,
    gather,
    layout,
    merge_ranks,
    row,
)
from .measurement import measure as measure_layers
from .run_files import JsonLines, layer_means
from .trace import IN_TRANSFORM, SAME_PASS, CallTrace, looks_like_attention
from .writers import TensorBoard, WandbRun

if TYPE_CHECKING:
    from .page import plot

__all__ = ["KappaMonitor", "layer_means", "measure", "plot"]


def __getattr__(name: str) -> Any:
    # Imported late, because most runs draw nothing.
    if name != "plot":
        removed.attribute(__name__, name)
    from .page import plot

    return plot


_CPU = torch.device("cpu")
# Parts that wrappers insert into the names of modules.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class _PendingRows(NamedTuple):
    step: int
    layers: dict[str, LayerSizes]
    kinds: dict[str, tuple[torch.dtype, str]]
    host_copy: HostCopy


def can_capture(module: nn.Module) -> bool:
    """Return whether a module is ``Capturing``; an adapter's module is so until ``undo``."""
    return "capture_samples" in vars(module)


# The capturing modules, each with the ``_capturing`` list of the monitor that samples it.
_samplers: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def _stop_capture(capturing: list[Any]) -> None:
    """Stop capturing, and drop the captures; a second call does nothing."""
    for module in filter(can_capture, capturing):
        if _samplers.get(module) is capturing:
            module.capture_samples, module.captured = 0, None
            del _samplers[module]
    capturing.clear()


class KappaMonitor:
    """Sample the attention blocks of a model every few steps, and report one row per layer.

    It finds the modules of ``leaner_kernels.nn``; attention between windows, channels or neighbours
    has the same kappa, that of the matrix of all tokens of a sample by the heads side by side. In
    any other module it traces the calls of ``leaner_kernels.attention`` and of PyTorch's
    ``scaled_dot_product_attention``; docs/kappa.md says which count ("Models of others").

    Call ``begin(step)`` before the forward of an optimizer step, ``end()`` after its backward and
    ``flush()`` after the last step:

        monitor = KappaMonitor(model, every=50, path="kappa.jsonl")
        for step, batch in enumerate(batches):
            monitor.begin(step)
            loss(model, batch).backward()
            for row in monitor.end():
                ...
        monitor.flush()

    On a GPU the step does not wait: ``end`` enqueues the measurement on a side stream and returns
    the rows that have arrived, usually those of an earlier step. On the CPU it returns those of
    this step.

    docs/kappa.md, "During training", says what a row holds and when kappa is None. If a step has
    several forwards (accumulation, recomputed activations), the newest counts, but max_logit is the
    maximum over all. The statistics per head are of the whole batch, padding included; the other
    columns are of the samples. A capture assigns to its module, which a block compiled with both
    fullgraph=True and activation checkpointing inside does not allow. In modules of other
    libraries, only calls in the thread of ``begin`` count. Modules that look like attention and
    give no row in the first sampled step are named in one warning. Modules of ours are sampled by
    one monitor at a time, the one that began last. A row has the sizes of its step: modules may be
    pruned, replaced, added and swapped between steps.

    Under torch.distributed every rank constructs it, after ``init_process_group``, and calls
    ``begin`` and ``end``, or ``cancel``: one collective joins the rows, which are then equal on all
    ranks, and rank 0 writes them.

    Args:
        model: any model with attention; FSDP2 and DDP are supported.
        every: steps between samples, at least 1.
        samples: batch entries captured in each sampled step, on each rank, at least 1.
        path: file to which the rows are appended as JSON lines when they are returned; or an open
            ``JsonLines``.
        writer: one writer or several: TensorBoard's SummaryWriter (anything with ``add_scalar(name,
            value, step)``) or a run of Weights & Biases (anything with ``log(values)``), to which
            other code may log too. In a run the rows have an axis of their own, "kappa/step". A
            writer also gets the means of ``layer_means``.
        head_report: add the means of ``leaner_kernels.head_report`` to each row: the correlation of
            pairs of heads, their isotropy and ``mean_share``.

    Raises:
        ValueError: if a count is below 1, the folder of the path does not exist, a writer is of
            another kind, or the model is in nn.DataParallel on several devices.

    Source: arXiv:2505.20802, section 4: kappa of A = [A_1 ... A_h] before the output projection.
    """

    @removed.refuse_removed_arguments
    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        samples: int = 4,
        path: str | Path | JsonLines | None = None,
        writer: Any = None,
        head_report: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, got {shown(model)}")
        if any(not isinstance(n, Integral) or n < 1 for n in (every, samples)):
            raise ValueError(
                "every and samples must be whole numbers of at least 1, "
                f"got {shown(every)} and {shown(samples)}"
            )
        if path is not None and not isinstance(path, str | os.PathLike | JsonLines):
            raise ValueError(f"path must be a str or a path, got {shown(path)}")
        if any(isinstance(m, nn.DataParallel) and len(m.device_ids) > 1 for m in model.modules()):
            raise ValueError(
                "nn.DataParallel on several devices discards its replicas with all that they "
                "capture: use DistributedDataParallel"
            )
        self.model = model
        self._trace = CallTrace({}, set(), samples)
        weakref.finalize(self, self._trace.stop).atexit = False
        self.modules: dict[str, Any] = {}
        self._layers: dict[str, LayerSizes] = {}
        self._find_modules()
        # When a monitor is dropped between begin and end, its hooks and captures are removed too.
        self._capturing: list[Any] = []
        weakref.finalize(self, _stop_capture, self._capturing).atexit = False
        self._agreed = False
        self.head_report = bool(head_report)
        self.every, self.samples = every, samples
        file = path if path is None or isinstance(path, JsonLines) else JsonLines(path)
        if file is not None and not file.path.parent.is_dir():
            raise ValueError(f"path must lie in a folder that exists, got {str(path)!r}")
        several = isinstance(writer, list | tuple)
        writers = list(writer) if several else [] if writer is None else [writer]
        for one in writers:
            if not (hasattr(one, "log") or hasattr(one, "add_scalar")):
                raise ValueError(f"writer must have add_scalar or log, got {type(one).__name__}")
        self.writers: list[JsonLines | TensorBoard | WandbRun] = [
            *([] if file is None else [file]),
            *(WandbRun(one) if hasattr(one, "log") else TensorBoard(one) for one in writers),
        ]
        self._group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # In the default group the collectives of the training step would wait for this one.
            self._group = dist.new_group(group_desc="KappaMonitor")
        # The stream of the device on which all layers are measured.
        self._side_stream: SideStream | None = None
        # For each layer's newest call, the dtype of its output and its source.
        self._kinds: dict[str, tuple[torch.dtype, str]] = {}
        self._pending_rows: deque[_PendingRows] = deque()
        self._step: int | None = None
        self._traces = False  # whether calls of the step are traced
        self._begun = False

    def _find_modules(self) -> None:
        """Find the modules to monitor in the current model."""
        model = self.model
        names = {module: _without_wrappers(model, name) for name, module in model.named_modules()}
        self.modules = {names[m]: m for m in names if can_capture(m)}
        self._layers |= {n: LayerSizes(m.num_heads, m.head_dim) for n, m in self.modules.items()}
        excluded = {m for m in names if can_capture(m) or not getattr(m, "monitored", True)}
        self._trace.names, self._trace.excluded = names, excluded

    @property
    def sampling(self) -> bool:
        """Whether a step is being sampled: between ``begin`` and ``end``."""
        return self._step is not None

    @property
    def layers(self) -> list[str]:
        """Names of the monitored layers in the model's order; traced ones after a first sample."""
        return list(self._layers)

    def __repr__(self) -> str:
        layers = ", ".join(self._layers) or "none before the first sampled step"
        return f"KappaMonitor(every={self.every}, samples={self.samples}, layers: {layers})"

    @property
    def has_attention(self) -> bool:
        """Whether a layer is known, or the current sampled step has called attention."""
        return bool(self._layers or self._trace.calls or self._trace.refused)

    @contextmanager
    def step(self, step: int) -> Iterator[list[dict[str, Any]]]:
        """Call ``begin`` and ``end`` around a block, or ``cancel`` if it raises.

            with monitor.step(i) as rows:
                loss(model, batch).backward()

        The list ``rows`` receives the rows of ``end`` when the block ends.
        """
        rows: list[dict[str, Any]] = []
        self.begin(step)
        try:
            yield rows
        except BaseException:
            self.cancel()
            raise
        rows += self.end()

    if not TYPE_CHECKING:  # where it would hide misspelt names

        def __getattr__(self, name: str) -> NoReturn:
            removed.attribute(f"{__name__}.KappaMonitor", name)

    def begin(self, step: int, *, due: bool | None = None) -> None:
        """Start capturing if ``step`` is a multiple of ``every``; cancel a step not ended.

        Args:
            step: step of the rows.
            due: whether to sample the step regardless of ``every``, for loops that do not count
                every step; must be equal on all ranks.
        """
        self.cancel()
        self._begun = True
        if step % self.every == 0 if due is None else due:
            self._start(int(step))

    def measure(
        self, batch: Any, *, forward: Callable[[nn.Module, Any], Any] | None = None, step: int = 0
    ) -> list[dict[str, Any]]:
        """Return the rows of one forward, as ``leaner_kernels.measure`` does.

        The rows are neither written nor returned by ``end``. Under torch.distributed a loop that
        measures repeatedly needs this method, because it creates no process group.
        """
        sampled = (getattr(module, "capture_samples", 0) for module in self.model.modules())
        if self.sampling or any(sampled):
            raise RuntimeError(
                "measure was called inside a sampled step: call it before begin or after end"
            )
        pending, self._pending_rows = self._pending_rows, deque()
        try:
            with _undisturbed(self.model), torch.no_grad():
                self._start(int(step))
                (forward or _call)(self.model, batch)
                self._finish()
            return self._arrived(wait=True, write=False)
        finally:
            self.cancel()
            self._pending_rows = pending

    def _start(self, step: int) -> None:
        self._find_modules()
        self._step = step
        self._capturing += self.modules.values()
        for module in self._capturing:
            module.capture_samples, module.captured = self.samples, None
            _samplers[module] = self._capturing
        others = {name.partition("#")[0] for name in self._layers.keys() - self.modules.keys()}
        has_foreign_layers = not others.isdisjoint(self._trace.names.values())
        may_find_layers = not self._agreed and (not _compiles() or self._has_foreign_attention())
        if has_foreign_layers or may_find_layers:
            self._traces = True
            self._trace.start()

    def _has_foreign_attention(self) -> bool:
        """Return whether a module of another library seems to attend, or none of ours exists."""
        # Tracing makes compiled code run eagerly, so it is avoided if all attention seems to be
        # ours.
        names, excluded = self._trace.names, self._trace.excluded
        inside = {part for module in excluded for part in module.modules()}
        return not self.modules or any(looks_like_attention(m) for m in names.keys() - inside)

    def end(self) -> list[dict[str, Any]]:
        """Stop the capture, measure it, and return the rows that have arrived.

        Returns:
            Rows in the order of steps. On the CPU these are the rows of this step, or [] if it was
            not sampled; on a GPU those whose results have arrived since the last call.

        Raises:
            RuntimeError: if ``begin`` was never called; or if, in the first sampled step, no
                attention was traced or the ranks traced different layers.
        """
        if not self._begun:
            raise RuntimeError("end was called without begin: call begin(step) before the forward")
        self._finish()
        return self._arrived(wait=False)

    def _finish(self) -> None:
        """Stop the capture and enqueue its measurement."""
        if self._step is None:
            return
        step, self._step = self._step, None
        calls, refused = dict[str, Any](), dict[str, str]()
        if self._traces:
            self._trace.stop()
            refused |= self._trace.refused
        for name, module in self.modules.items():
            if _samplers.get(module) is not self._capturing:
                continue
            calls[name] = vars(module).get("captured")
            if calls[name] is not None and is_mapped(calls[name].heads):
                refused[name] = IN_TRANSFORM
        _stop_capture(self._capturing)
        try:
            if not self._agreed:
                self._agree_on_layers(step, refused)
            if self._traces:
                self._trace.take_operator_calls()
                calls |= self._trace.calls
            captured, status = self._select(calls, refused)
        finally:
            if self._traces:
                self._clear_trace()
        host_copy = self._measure(captured, status)
        for name, c in zip(self._layers, captured):
            if c is not None:
                self._kinds[name] = c.dtype, getattr(c, "source", SAME_PASS)
        pending = step, dict(self._layers), dict(self._kinds), host_copy
        self._pending_rows.append(_PendingRows(*pending))

    def cancel(self) -> None:
        """Abandon a step without measuring it; after ``end`` this does nothing.

        Call this if an error ends a training loop: until then calls of attention are traced, and
        compiled code runs eagerly. Under torch.distributed call it on all ranks, or on none.
        """
        self._step = None
        _stop_capture(self._capturing)
        if self._traces:
            self._trace.stop()
            self._clear_trace()

    def flush(self) -> list[dict[str, Any]]:
        """Wait for the rows that ``end`` has not returned yet, and return them."""
        return self._arrived(wait=True)

    def _clear_trace(self) -> None:
        self._trace.clear()
        self._traces = False

    def _agree_on_layers(self, step: int, refused: Mapping[str, str]) -> None:
        """Adopt the layers that any rank traced in the first sampled step."""
        layers = dict(self._layers)
        for name, call in self._trace.calls.items():
            layers[name] = LayerSizes(call.num_heads, call.head_dim)
        named = refused.items()
        reasons = (f"{n or 'the model'} cannot be measured: {why}" for n, why in named)
        problem = next(reasons, None)
        if problem is None and not layers:
            problem = self._trace.no_calls_message()
        sizes_of = {name: (layer.heads, layer.head_dim) for name, layer in layers.items()}
        mine = problem, sizes_of, {*self._trace.names.values()}
        ranks: list[Any] = [mine]
        if self._group is not None:
            ranks *= self._group.size()
            device = next(self.model.parameters(), torch.empty(0)).device
            # Objects are sent through the current GPU, which must differ between ranks.
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                dist.all_gather_object(ranks, mine, group=self._group)
        for rank, (problem, *_) in enumerate(ranks):
            if problem is not None:
                where = f" on rank {rank}" if len(ranks) > 1 else ""
                raise RuntimeError(f"step {step}{where}: {problem}")
        everywhere = set.intersection(*(names for *_, names in ranks))
        for name, sizes in (item for _, theirs, _ in ranks for item in theirs.items()):
            is_everywhere = name.partition("#")[0] in everywhere
            if not is_everywhere or layers.setdefault(name, LayerSizes(*sizes)) != sizes:
                raise RuntimeError(
                    f"all ranks must trace the same layers, but they differ in {name} in the first "
                    f"sampled step, {step}"
                )
        self._layers = self._sorted(layers)
        self._agreed = True
        untraced = self._trace.untraced(self._layers)
        if untraced and (self._group is None or self._group.rank() == 0):
            warnings.warn(
                f"KappaMonitor has no rows of {', '.join(untraced)}, which look like attention but "
                "made no traceable call in the first sampled step "
                '(docs/kappa.md, "Not traced")',
                stacklevel=4,
            )

    def _sorted(self, layers: dict[str, LayerSizes]) -> dict[str, LayerSizes]:
        """Return layers in the model's order, with removed ones last."""
        places = {name: place for place, name in enumerate(self._trace.names.values())}

        def order(layer: str) -> tuple[int, int]:
            name, _, number = layer.partition("#")
            return places.get(name, len(places)), int(number or 0)

        return {name: layers[name] for name in sorted(layers, key=order)}

    def _select(
        self, calls: dict[str, Any], refused: Mapping[str, str]
    ) -> tuple[list[Any], list[float]]:
        """Return the capture of each layer, or None, and its status."""
        if self._group is None:
            # With several ranks, all must have the same layers.
            self._layers |= {n: _sizes_of(c) for n, c in calls.items() if c and n not in refused}
        self._layers = self._sorted(self._layers)
        captured, status = [], []
        for name, layer in self._layers.items():
            call = calls.get(name)
            if name in refused:
                reason = REFUSED
            elif call is not None:
                reason = MEASURED if _sizes_of(call) == layer else CHANGED
            elif name in self.modules:
                reason = NOT_RUN if name in calls else TAKEN
            else:
                reason = NO_CALL
            captured.append(call if reason == MEASURED else None)
            status.append(reason)
        return captured, status

    def _columns_of(self, name: str, call: Any) -> float:
        """Return the number of entries in a softmax row of a call, nan if it equals the lengths."""
        if name not in self.modules:
            return call.columns
        rows = call.heads.shape[1]
        columns = self.modules[name].columns(rows)
        return math.nan if call.lengths is not None and columns == rows else columns

    def _measure(self, captured: list[Any], status: list[float]) -> HostCopy:
        on = (tensor.device for tensor in self.model.parameters())
        device = next((c.heads.device for c in captured if c is not None), next(on, _CPU))
        if self._side_stream is None or self._side_stream.device != device:
            self._side_stream = SideStream(device)
        columns = {
            number: self._columns_of(name, call)
            for number, (name, call) in enumerate(zip(self._layers, captured))
            if call is not None
        }
        gathered = gather(captured, columns, device)
        with self._side_stream.after(gathered.tensors()):
            sizes = _most_heads(self._layers), device, self.head_report
            matrix = measure_layers(gathered, status, *sizes)
        with self._side_stream.after([matrix]):
            if self._group is not None:
                ranks = matrix.new_empty(self._group.size(), *matrix.shape)
                dist.all_gather_into_tensor(ranks.flatten(), matrix.flatten(), group=self._group)
                matrix = merge_ranks(ranks, layout(_most_heads(self._layers), self.head_report))
            return self._side_stream.copy_to_host(matrix)

    def _arrived(self, wait: bool, write: bool = True) -> list[dict[str, Any]]:
        rows = []
        while self._pending_rows and (wait or self._pending_rows[0].host_copy.ready()):
            step, layers, kinds, host_copy = self._pending_rows.popleft()
            host_copy.wait()
            columns, of_step = layout(_most_heads(layers), self.head_report), []
            for (name, layer), measured in zip(layers.items(), host_copy.host):
                values = {key: measured[place] for key, place in columns.items()}
                kind = kinds.get(name, (torch.float32, SAME_PASS))
                of_step.append(row(step, name, layer, values, *kind))
            if write and (self._group is None or self._group.rank() == 0):
                for writer in self.writers:
                    writer.append(of_step)
            rows += of_step
        return rows


def measure(
    model: nn.Module,
    batch: Any,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    samples: int = 16,
    step: int = 0,
) -> list[dict[str, Any]]:
    """Return the rows of ``KappaMonitor`` of one forward in eval mode, between training steps.

        rows = measure(model, held_out[:16])

    No bit of the training changes: the modes of modules, the states of random generators and the
    logits that ``QKClip`` tracks are restored. Under torch.distributed every rank calls it with its
    own batch. A loop constructs a monitor once and calls its ``measure`` instead.

    Args:
        model: any that attends.
        batch: the arguments of the model: one, several in a tuple or list, or keyword arguments in
            a mapping.
        forward: called with the model and the batch instead.
        samples: batch entries captured, evenly spaced, at least 1.
        step: step of the rows.

    Returns:
        One row per layer.

    Raises:
        RuntimeError: if a step is being sampled, between ``begin`` and ``end`` of a monitor; or if
            no attention was traced.
    """
    return KappaMonitor(model, samples=samples).measure(batch, forward=forward, step=step)


def _compiles() -> bool:
    """Return whether compiled code may exist, which tracing would run eagerly."""
    return "torch._dynamo" in sys.modules


def _most_heads(layers: Mapping[str, LayerSizes]) -> int:
    return max(layer.heads for layer in layers.values())


def _sizes_of(call: Any) -> LayerSizes:
    """Return the sizes of a ``Captured`` or ``TracedCall``."""
    heads = call.head_norm.shape[-1]
    return LayerSizes(heads, call.heads.shape[-1] // heads)


def _without_wrappers(model: nn.Module, name: str) -> str:
    """Return a module's name without the parts that wrappers insert."""
    parts, module = [], model
    for part in name.split(".") if name else []:
        data_parallel = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
        if part not in _WRAPPERS and not (part == "module" and data_parallel):
            parts.append(part)
        # A ScriptModule has no ``get_submodule``.
        module = getattr(module, part)
    return ".".join(parts)


def _call(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch, as ``measure`` describes it."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Run in eval mode, and restore the model and the random generators."""
    modes = [(module, module.training) for module in model.modules()]
    peaks = [(m, m.peak_logit) for m in model.modules() if hasattr(m, "peak_logit")]
    used = {t.device for t in (*model.parameters(), *model.buffers())}
    devices = [device for device in used if device.type == "cuda"]
    with torch.random.fork_rng(devices):
        model.eval()
        try:
            yield
        finally:
            # Do not call train(), which would also change children that are in eval mode.
            for module, training in modes:
                module.training = training
            for module, peak in peaks:
                module.peak_logit = peak
            reshard(model)


def reshard(model: Any) -> None:
    """Free the parameters that FSDP2 gathered: without a backward the root keeps stale copies."""
    # Look up the method by name: importing FSDP takes long, and only sharded models need it.
    if any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__):
        model.reshard()
