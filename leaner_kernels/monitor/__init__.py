"""KappaMonitor: the condition number of every attention block, while a model trains."""

import json
import os
import warnings
import weakref
from collections import deque
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from leaner_kernels.monitor.arm import Arms, can_capture
from leaner_kernels.monitor.beside import Arriving, AtOnce, SideStream
from leaner_kernels.monitor.measure import (
    CANCELLED,
    CHANGED,
    FAILED,
    MEASURED,
    NOT_RUN,
    REFUSED,
    Layout,
    gather,
)
from leaner_kernels.monitor.rows import WRITTEN, Layer, row
from leaner_kernels.monitor.trace import SAME_PASS, CallTrace, may_attend, may_be_compiled
from leaner_kernels.ops._checks import shown

__all__ = ["KappaMonitor"]

# Names that wrappers put between a module's and its parent's.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class _Report(NamedTuple):
    step: int
    kinds: list[tuple[torch.dtype, str]]
    arriving: Arriving


class KappaMonitor:
    """Samples the attention blocks of a model every few steps and reports one row per layer.

    It finds the modules of ``leaner_kernels.nn``; attention between windows, channels or
    neighbours has the same kappa: of all tokens of a sample by the heads side by side. In any other
    module it sees the calls of ``leaner_kernels.attention`` and of PyTorch's
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

    On a GPU nothing waits: ``end`` enqueues the measuring on a side stream and returns the rows
    that have arrived, usually those of an earlier step. On the CPU they are those of this step.

    A row holds

    - step, layer (as in ``model.named_modules()``, less the names that wrappers add; of a module of
      others, "#1" follows for its second call of attention, and so on), heads, head_dim (of the
      values), tokens (without padding: their mean, rounded), columns (entries of a softmax row: the
      keys, or those of a window, the channels of a head, or the pixels around one);
    - source: "same pass", or "recomputed" from the arguments of PyTorch's function, in float32 and
      without dropout; then all statistics are of the samples;
    - kappa (geometric mean over the samples; None where one of them was not resolved), sigma_max,
      sigma_min, resolved, kappa_gaussian (the theorem's prediction for independent Gaussian heads);
    - reason: why kappa is None, None where it is not. "not resolved" (past what float32 heads tell)
      and "not finite" are of the samples. Otherwise the row has no numbers: "not run" (as a layer
      that stochastic depth skips), and of others "no call of several queries", "other heads than in
      the first sampled step", "a call that cannot be looked at";
    - effective_rank and stable_rank of the block;
    - entropy (nats) and entropy_min, the mean over heads and the smallest; max_logit, the largest;
      prob_norm, head_norm, means over heads; head_norms, one per head;
    - kappa_before_skip, of what the module returned, and kappa_after_skip, of that plus the
      residual stream ``skip`` that the module was given. Both are None without one, and where a
      sample is past 4 / eps of the training precision (512 in bfloat16, 4096 in float16): unlike
      the heads, these two exist only as rounded to it, and past that kappa is the rounding's. So
      where heads * head_dim is below tokens and width, the output, of low rank, has none.

    Of several forwards in a step (accumulation, recomputed activations) the newest counts, but
    max_logit is the maximum over all. The statistics per head are of the whole batch, padding
    included; the others of the samples. A capture assigns to its module, which a block compiled
    with both fullgraph=True and activation checkpointing inside does not allow. Of modules of
    others, the calls that the thread of ``begin`` makes count. Layers of a step may lie on several
    GPUs; each is measured where it lies. Monitors of one model at a time share its captures, of as
    many samples as the one with the most wants. Modules that look like attention and give no row in
    the first sampled step are named in one warning.

    Under torch.distributed every rank constructs it, after ``init_process_group``, and calls
    ``begin`` and ``end``: the rows are joined over ranks in one collective in a process group of
    its own, equal on all of them, and written by rank 0; where some ranks skipped a layer, its row
    is that of the others. The layers are those that any rank saw in the first sampled step, in
    which there are two more collectives, which the host waits for.

    Args:
        model: any that attends; under FSDP2 or DDP if you like.
        every: steps between samples, at least 1.
        samples: batch entries captured in each sampled step, on each rank, at least 1.
        path: JSON lines are appended there, when the rows are returned.
        writer: one or several, of TensorBoard's SummaryWriter (anything with ``add_scalar(name,
            value, step)``) and Weights & Biases' run (anything with ``log(values, step=...)``). A
            run takes no value for an earlier step, so that rows go to the step at which they are
            returned, with their own as "kappa/step"; of several it keeps the last.

    Raises:
        ValueError: a count below 1, a path in no folder, a writer of another kind, or a model in
            nn.DataParallel on several devices.

    Source: arXiv:2505.20802, section 4: kappa of A = [A_1 ... A_h] before the output projection.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        samples: int = 4,
        path: str | Path | None = None,
        writer: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, got {shown(model)}")
        if any(not isinstance(n, Integral) or n < 1 for n in (every, samples)):
            raise ValueError(
                "every and samples must be whole numbers of at least 1, "
                f"got {shown(every)} and {shown(samples)}"
            )
        if path is not None and not isinstance(path, str | os.PathLike):
            raise ValueError(f"path must be a str or a path, got {shown(path)}")
        if any(isinstance(m, nn.DataParallel) and len(m.device_ids) > 1 for m in model.modules()):
            raise ValueError(
                "nn.DataParallel on several devices runs replicas, and what they capture is lost "
                "with them: use DistributedDataParallel"
            )
        self.model = model
        names = {module: _bare(model, name) for name, module in model.named_modules()}
        self.modules: dict[str, Any] = {names[m]: m for m in names if can_capture(m)}
        self._layers = {
            name: Layer(m.num_heads, m.head_dim, m.columns) for name, m in self.modules.items()
        }
        passed_over = {m for m in names if can_capture(m) or not getattr(m, "monitored", True)}
        inside = {part for module in passed_over for part in module.modules()}
        self._trace: CallTrace | None = CallTrace(names, passed_over, samples)
        self._arms = Arms(self.modules.values(), samples)
        # A monitor that is dropped between begin and end takes its hooks and captures along.
        for leave in (self._trace.stop, self._arms.disarm):
            weakref.finalize(self, leave).atexit = False
        # In a compiled model of ours a look at the others would cost a step that runs eagerly.
        self._worth_it = not self.modules or any(may_attend(m) for m in names.keys() - inside)
        self._agreed = False
        self.every, self.samples = every, samples
        self.path = None if path is None else Path(path)
        if self.path is not None and not self.path.parent.is_dir():
            raise ValueError(f"path must lie in a folder that exists, got {str(path)!r}")
        several = isinstance(writer, list | tuple)
        self.writers = list(writer) if several else [] if writer is None else [writer]
        for each in self.writers:
            if not (hasattr(each, "log") or hasattr(each, "add_scalar")):
                raise ValueError(f"writer must have add_scalar or log, got {type(each).__name__}")
        self._layout = Layout(tuple(layer.heads for layer in self._layers.values()))
        self._group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # In the step's own group a collective would make those of the step wait.
            self._group = dist.new_group(group_desc="KappaMonitor")
        # Where the numbers of all devices meet, and beside the steps of the others.
        self._side: AtOnce | SideStream | None = None
        self._sides: dict[torch.device, AtOnce | SideStream] = {}
        # As its newest call had them: precision of the output, and source.
        self._kinds: dict[str, tuple[torch.dtype, str]] = {}
        self._pending: Any = None
        self._warned, self._rows_to_come, self._warned_of_undo = False, True, False
        self._reports: deque[_Report] = deque()
        self._step: int | None = None
        self._now = 0

    @property
    def layers(self) -> list[str]:
        """Names of what is monitored, in the model's order; others' from the first sample on."""
        return list(self._layers)

    def begin(self, step: int) -> None:
        """Arm the capture if ``step`` is a multiple of ``every``; a step not ended is cancelled."""
        self.cancel()
        self._now = int(step)
        if step % self.every:
            return
        self._step = self._now
        self._warn_of_undo()
        self._arms.arm()
        if self._trace is not None and (self._worth_it or not may_be_compiled()):
            self._trace.start()

    def end(self) -> list[dict[str, Any]]:
        """Disarm the capture, measure what it has, and return the rows that have arrived.

        Returns:
            In step order. On the CPU the rows of this step, [] when it was not sampled; on a GPU
            those of steps that were, whose results have arrived since the last call. None of a step
            that any rank has cancelled.

        Raises:
            RuntimeError: in the first sampled step, if no attention was seen, or not the same on
                all ranks; later, when the rows of a step arrive whose measuring failed on another
                rank. Rows that arrived before are returned first, and the next call raises.
        """
        if self._step is not None:
            step, self._step = self._step, None
            found = {name: vars(m).get("captured") for name, m in self.modules.items()}
            self._arms.disarm()
            refused: set[str] = set()
            if self._trace is not None:
                self._trace.stop()
                try:
                    if not self._agreed and not self._agree(step):
                        return self._arrived(wait=False)
                    found |= self._trace.calls
                    refused = set(self._trace.refused)
                    self._warn(found)
                finally:
                    self._trace.forget()
                self._worth_it = len(self._layers) > len(self.modules)
                if not self._worth_it:
                    self._trace = None
            captured, status = self._sort(found, refused)
            arriving = self._measure(captured, status)
            for name, c in zip(self._layers, captured):
                if c is not None:
                    self._kinds[name] = c.dtype, getattr(c, "source", SAME_PASS)
            kinds = [self._kinds.get(name, (torch.float32, SAME_PASS)) for name in self._layers]
            self._reports.append(_Report(step, kinds, arriving))
        return self._arrived(wait=False)

    def cancel(self) -> None:
        """Leave a step that was begun and measure nothing of it; harmless after ``end``.

        For a training loop that an error ends: until then the model's calls of attention are
        looked at, and those of other models take the way that can be looked at too. Other ranks
        that go on to ``end`` do not wait for this one, and have no rows of the step.
        """
        begun, self._step = self._step is not None, None
        self._arms.disarm()
        if self._trace is not None:
            self._trace.stop()
            self._trace.forget()
        if begun and self._group is not None:
            if self._agreed:
                left = self._layout.blank([CANCELLED] * len(self._layers), self._device)
            else:
                left = torch.full((1,), -1, device=self._device)
            ranks = left.new_empty(self._group.size() * len(left))
            # Not waited for: the others may never come.
            self._pending = dist.all_gather_into_tensor(
                ranks, left, group=self._group, async_op=True
            )

    def flush(self) -> list[dict[str, Any]]:
        """Wait for the rows that ``end`` has not returned yet, and return them.

        Raises:
            RuntimeError: as ``end``.
        """
        return self._arrived(wait=True)

    def _agree(self, step: int) -> bool:
        """Take the layers that ranks saw in the first sampled step; False where one left it."""
        assert self._trace is not None
        layers = dict(self._layers)
        for name, call in self._trace.calls.items():
            layers[name] = Layer(len(call.max_logit), call.head_dim)
        problem = self._trace.problem
        if problem is None and not layers:
            problem = self._trace.nothing()
        mine = [[name, layer.heads, layer.head_dim] for name, layer in layers.items()]
        ranks = self._gather_objects((problem, mine, [*self._trace.names.values()]))
        if ranks is None:
            return False
        for rank, (theirs, _, _) in enumerate(ranks):
            if theirs is not None:
                where = f" on rank {rank}" if len(ranks) > 1 else ""
                raise RuntimeError(f"step {step}{where}: {theirs}")
        known = set.intersection(*(set(names) for _, _, names in ranks))
        first: dict[str, tuple[int, tuple[int, int]]] = {}
        for rank, (_, theirs, _) in enumerate(ranks):
            for name, *sizes in theirs:
                other, before = first.setdefault(name, (rank, (sizes[0], sizes[1])))
                if before != tuple(sizes) or name.partition("#")[0] not in known:
                    other = (
                        other if other != rank else next(r for r in range(len(ranks)) if r != rank)
                    )
                    raise RuntimeError(
                        f"all ranks must watch the same layers, but in step {step} ranks "
                        f"{min(rank, other)} and {max(rank, other)} differ in {name}"
                    )
        for name, (_, sizes) in first.items():
            layers.setdefault(name, Layer(*sizes))
        self._layers = {name: layers[name] for name in sorted(layers, key=self._trace.place)}
        self._layout = Layout(tuple(layer.heads for layer in self._layers.values()))
        self._agreed = True
        return True

    def _gather_objects(self, mine: Any) -> list[Any] | None:
        """Return what JSON can hold of all ranks, None where one has cancelled the step."""
        if self._group is None:
            return [mine]
        data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        size = torch.full((1,), len(data), device=self._device)
        sizes = size.new_empty(self._group.size())
        dist.all_gather_into_tensor(sizes, size, group=self._group)
        lengths = sizes.tolist()
        if min(lengths) < 0:
            return None
        padded = nn.functional.pad(data, (0, max(lengths) - len(data))).to(self._device)
        ranks = padded.new_empty(len(lengths) * len(padded))
        dist.all_gather_into_tensor(ranks, padded, group=self._group)
        rows = ranks.cpu().view(len(lengths), -1)
        return [json.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, lengths)]

    def _warn(self, found: dict[str, Any]) -> None:
        """Name, once, the modules that look like attention and give no row."""
        assert self._trace is not None
        if self._warned or (self._group is not None and self._group.rank() != 0):
            return
        new = [name for name in found if name not in self._layers]
        silent = self._trace.silent(self._layers) if self._rows_to_come else []
        self._rows_to_come = False
        if silent or new:
            self._warned = True
            names = ", ".join(silent + new)
            where = "; ".join([*self._trace.handed_on(silent), 'docs/kappa.md, "Not seen"'])
            warnings.warn(
                f"KappaMonitor has no rows of {names}, which look like attention: none that can be "
                f"looked at was called there in the first sampled step ({where})",
                stacklevel=3,
            )

    def _warn_of_undo(self) -> None:
        undone = [name or "the model" for name, m in self.modules.items() if not can_capture(m)]
        if undone and not self._warned_of_undo:
            self._warned_of_undo = True
            warnings.warn(
                f"KappaMonitor has no more rows of {', '.join(undone)}, whose swap was taken back "
                "by undo: construct it after that",
                stacklevel=3,
            )

    def _sort(self, found: dict[str, Any], refused: set[str]) -> tuple[list[Any], list[float]]:
        """Return what there is to measure of each layer, None if nothing, and why."""

        def why(name: str, layer: Layer) -> float:
            call = found.get(name)
            if name in refused:
                return REFUSED
            if call is None:
                return NOT_RUN
            if name in self.modules or (len(call.max_logit), call.head_dim) == layer[:2]:
                return MEASURED
            return CHANGED

        status = [why(name, layer) for name, layer in self._layers.items()]
        captured = [
            found[name] if reason == MEASURED else None
            for name, reason in zip(self._layers, status)
        ]
        return captured, status

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters(), torch.empty(0)).device

    def _beside(self, device: torch.device) -> AtOnce | SideStream:
        if device not in self._sides:
            self._sides[device] = SideStream(device) if device.type == "cuda" else AtOnce()
        return self._sides[device]

    def _measure(self, captured: list[Any], status: list[float]) -> Arriving:
        places: dict[torch.device, list[int]] = {}
        for place, c in enumerate(captured):
            if c is not None:
                places.setdefault(c.heads.device, []).append(place)
        device = next(iter(places), self._device)
        if self._side is None:
            self._side = self._beside(device)
        try:
            pieces = [self._pack(captured, of, on, device) for on, of in places.items()]
            missing = [place for place, c in enumerate(captured) if c is None]
            with self._side.after([]):
                if missing:
                    reasons = [status[place] for place in missing]
                    pieces.append((missing, self._layout.of(missing).blank(reasons, device)))
                packed = self._layout.merge(pieces) if len(pieces) > 1 else pieces[0][1]
        except Exception:
            # Known to the others only after the collective, in which they wait for this rank.
            self._join(self._layout.blank([FAILED] * len(captured), device))
            raise
        with self._side.after([packed]):
            return self._side.fetch(self._join(packed))

    def _pack(
        self, captured: list[Any], places: list[int], on: torch.device, device: torch.device
    ) -> tuple[list[int], Tensor]:
        """Measure the layers at these places, which lie on one device, and send that to another."""
        assert self._side is not None
        side = self._side if on == device else self._beside(on)
        gathered = gather([captured[place] for place in places])
        with side.after(gathered.tensors()):
            packed = self._layout.of(places).pack(gathered)
        if on != device:
            with side.after([]), self._side.after([]):
                packed = packed.to(device, non_blocking=True)
        return places, packed

    def _join(self, packed: Tensor) -> Tensor:
        if self._group is None:
            return packed
        ranks = packed.new_empty(self._group.size() * len(packed))
        dist.all_gather_into_tensor(ranks, packed, group=self._group)
        return self._layout.join(ranks.view(-1, len(packed)))

    def _arrived(self, wait: bool) -> list[dict[str, Any]]:
        rows = []
        while self._reports and (wait or self._reports[0].arriving.ready()):
            try:
                rows += self._rows(self._reports[0])
            except Exception:
                if rows:
                    # The next call raises it.
                    return rows
                self._reports.popleft()
                raise
            self._reports.popleft()
        return rows

    def _rows(self, report: _Report) -> list[dict[str, Any]]:
        report.arriving.wait()
        measured = self._layout.unpack(report.arriving.host)
        ended = {values["status"] for values in measured} & {FAILED, CANCELLED}
        if FAILED in ended:
            raise RuntimeError(f"step {report.step} could not be measured on another rank")
        if ended:
            return []
        layers = zip(self._layers.items(), measured, report.kinds, strict=True)
        rows = [row(report.step, *layer, values, *kind) for layer, values, kind in layers]
        self._write(rows)
        return rows

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if self._group is not None and self._group.rank() != 0:
            return
        if self.path is not None:
            with self.path.open("a") as file:
                file.writelines(json.dumps(each) + "\n" for each in rows)
        for writer in self.writers:
            values = {
                f"{key}/{each['layer']}": each[key]
                for each in rows
                for key in WRITTEN
                if each[key] is not None
            }
            step = rows[0]["step"]
            if hasattr(writer, "log"):
                writer.log({**values, "kappa/step": step}, step=self._now)
            else:
                for key, value in values.items():
                    writer.add_scalar(key, value, step)


def _bare(model: nn.Module, name: str) -> str:
    """Return a module's name without the parts that wrappers put there."""
    parts, module = [], model
    for part in name.split(".") if name else []:
        data_parallel = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
        if part not in _WRAPPERS and not (part == "module" and data_parallel):
            parts.append(part)
        # A ScriptModule has no ``get_submodule``.
        module = getattr(module, part)
    return ".".join(parts)
