"""KappaMonitor: the condition number of every attention block, while a model trains."""

import json
import math
import os
import weakref
from collections import deque
from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from leaner_kernels.kappa import gaussian_condition_number
from leaner_kernels.monitor.beside import Arriving, AtOnce, SideStream
from leaner_kernels.monitor.measure import (
    AFTER,
    BEFORE,
    FAILED,
    HEADS,
    MEASURED,
    NO_FORWARD,
    Layout,
    gather,
)
from leaner_kernels.monitor.watch import SAME_PASS, Watch, may_attend, may_be_compiled
from leaner_kernels.ops._checks import shown

__all__ = ["KappaMonitor"]

# Names that wrappers put between a module's and its parent's.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# What a row has as it was measured.
_COPIED = (
    *("sigma_max", "sigma_min", "entropy", "entropy_min", "max_logit", "prob_norm", "head_norm"),
    *("effective_rank", "stable_rank"),
)
# What a writer is given of each row.
_WRITTEN = (
    *("kappa", "kappa_before_skip", "kappa_after_skip", "entropy", "entropy_min", "max_logit"),
    *("head_norm", "effective_rank", "stable_rank"),
)


class _Layer(NamedTuple):
    heads: int
    head_dim: int
    columns: Callable[[int], int] | None = None


class _Report(NamedTuple):
    step: int
    dtypes: list[torch.dtype]
    sources: list[str]
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
    with both fullgraph=True and activation checkpointing inside does not allow.

    Under torch.distributed every rank constructs it, after ``init_process_group``, and calls
    ``begin`` and ``end``: the rows are joined over ranks in one collective in a process group of
    its own, equal on all of them, and written by rank 0. All ranks must watch the same layers, on
    which they agree in the first sampled step, in one more collective that the host waits for.

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
        ValueError: a count below 1, a path in no folder, or a writer of another kind.

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
        self.model = model
        names = {module: _bare(model, name) for name, module in model.named_modules()}
        self.modules: dict[str, Any] = {names[m]: m for m in names if _can_be_captured(m)}
        self._layers = {
            name: _Layer(m.num_heads, m.head_dim, m.columns) for name, m in self.modules.items()
        }
        passed_over = {m for m in names if _can_be_captured(m) or not getattr(m, "watched", True)}
        inside = {part for module in passed_over for part in module.modules()}
        self._watch: Watch | None = Watch(names, passed_over, samples)
        # A monitor that is dropped between begin and end takes its hooks along.
        weakref.finalize(self, self._watch.stop).atexit = False
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
        self._side: AtOnce | SideStream | None = None
        self._reports: deque[_Report] = deque()
        self._step: int | None = None
        self._now = 0

    @property
    def layers(self) -> list[str]:
        """Names of what is watched, in the model's order; others' from the first sample on."""
        return list(self._layers)

    def begin(self, step: int) -> None:
        """Arm the capture if ``step`` is a multiple of ``every``."""
        self._now = int(step)
        self._step = self._now if step % self.every == 0 else None
        for module in self.modules.values():
            module.capture_samples = 0 if self._step is None else self.samples
            module.captured = None
        if self._watch is not None:
            self._watch.stop()
            if self._step is not None and (self._worth_it or not may_be_compiled()):
                self._watch.start()

    def end(self) -> list[dict[str, Any]]:
        """Disarm the capture, measure what it has, and return the rows that have arrived.

        Returns:
            In step order. On the CPU the rows of this step, [] when it was not sampled; on a GPU
            those of steps that were, whose results have arrived since the last call.

        Raises:
            RuntimeError: when the rows of a step arrive in which a layer ran no forward since
                ``begin``, or measuring failed on another rank; in the first sampled step, if no
                attention was seen, or not the same on all ranks; in a later one, if other layers
                attended than in that.
        """
        if self._step is not None:
            step, self._step = self._step, None
            found = {name: module.captured for name, module in self.modules.items()}
            for module in self.modules.values():
                module.captured, module.capture_samples = None, 0
            problem = None
            if self._watch is not None:
                self._watch.stop()
                found |= self._watch.calls
                problem = self._watch.problem
                if not self._agreed:
                    self._agree(step, problem)
                self._watch.forget()
                problem = problem or self._change(found)
                self._worth_it = len(self._layers) > len(self.modules)
                if not self._worth_it:
                    self._watch = None
            captured = [found.get(name) for name in self._layers]
            arriving = self._measure(captured, problem)
            dtypes = [torch.float32 if c is None else c.dtype for c in captured]
            sources = [getattr(c, "source", SAME_PASS) for c in captured]
            self._reports.append(_Report(step, dtypes, sources, arriving))
        return self._arrived(wait=False)

    def cancel(self) -> None:
        """Leave a step that was begun and measure nothing of it; harmless after ``end``.

        For a training loop that an error ends: until then the model's calls of attention are
        looked at, and those of other models take the way that can be looked at too.
        """
        self._step = None
        for module in self.modules.values():
            module.captured, module.capture_samples = None, 0
        if self._watch is not None:
            self._watch.stop()
            self._watch.forget()

    def flush(self) -> list[dict[str, Any]]:
        """Wait for the rows that ``end`` has not returned yet, and return them.

        Raises:
            RuntimeError: as ``end``.
        """
        return self._arrived(wait=True)

    def _agree(self, step: int, problem: str | None) -> None:
        """Take the layers that the first sampled step has shown, the same ones on all ranks."""
        assert self._watch is not None
        layers = dict(self._layers)
        for name, call in self._watch.calls.items():
            layers[name] = _Layer(len(call.max_logit), call.head_dim)
        layers = {name: layers[name] for name in sorted(layers, key=self._watch.place)}
        if problem is None and not layers:
            problem = self._watch.nothing()
        mine = problem, [(name, layer.heads, layer.head_dim) for name, layer in layers.items()]
        ranks: list[Any] = [mine]
        if self._group is not None:
            ranks *= self._group.size()
            dist.all_gather_object(ranks, mine, group=self._group)
        for rank, (theirs, _) in enumerate(ranks):
            if theirs is not None:
                where = f" on rank {rank}" if len(ranks) > 1 else ""
                raise RuntimeError(f"step {step}{where}: {theirs}")
        for rank, (_, theirs) in enumerate(ranks):
            if theirs != ranks[0][1]:
                name, *_ = min(set(theirs) ^ set(ranks[0][1]))
                raise RuntimeError(
                    f"all ranks must watch the same layers, but in step {step} ranks 0 and {rank} "
                    f"differ in {name}"
                )
        self._layers, self._agreed = layers, True
        self._layout = Layout(tuple(layer.heads for layer in layers.values()))

    def _change(self, found: dict[str, Any]) -> str | None:
        """Return what is not as in the first sampled step, in one line."""
        for name, call in found.items():
            if name not in self._layers:
                return f"{name} called no attention in the first sampled step, and now does"
            if name in self.modules:
                continue
            heads, head_dim, _ = self._layers[name]
            if (len(call.max_logit), call.head_dim) != (heads, head_dim):
                return (
                    f"{name} had {heads} heads of {head_dim} in the first sampled step, and has "
                    f"{len(call.max_logit)} of {call.head_dim}"
                )
        return None

    def _measure(self, captured: list[Any], problem: str | None) -> Arriving:
        devices = [c.heads.device for c in captured if c is not None]
        devices.append(next(self.model.parameters(), torch.empty(0)).device)
        device = devices[0]
        if self._side is None:
            self._side = SideStream(device) if device.type == "cuda" else AtOnce()
        try:
            if problem is not None:
                raise RuntimeError(problem)
            if any(c is None for c in captured):
                # Known to the others only after the collective, in which they wait for this rank.
                status = [NO_FORWARD if c is None else MEASURED for c in captured]
                packed = self._layout.blank(status, device)
            else:
                gathered = gather(captured)
                with self._side.after(gathered.tensors()):
                    packed = self._layout.pack(gathered)
        except Exception:
            # Likewise: answer them before failing here.
            self._join(self._layout.blank([FAILED] * len(captured), device))
            raise
        with self._side.after([packed]):
            return self._side.fetch(self._join(packed))

    def _join(self, packed: Tensor) -> Tensor:
        if self._group is None:
            return packed
        ranks = packed.new_empty(self._group.size() * len(packed))
        dist.all_gather_into_tensor(ranks, packed, group=self._group)
        return self._layout.join(ranks.view(-1, len(packed)))

    def _arrived(self, wait: bool) -> list[dict[str, Any]]:
        rows = []
        while self._reports and (wait or self._reports[0].arriving.ready()):
            report = self._reports.popleft()
            report.arriving.wait()
            measured = self._layout.unpack(report.arriving.host)
            for name, values in zip(self._layers, measured):
                if values["status"] == NO_FORWARD:
                    raise RuntimeError(
                        f"{name} ran no forward between begin and end of step {report.step} on "
                        "some rank"
                    )
                if values["status"] == FAILED:
                    raise RuntimeError(f"step {report.step} could not be measured on another rank")
            of_step = [
                self._row(report.step, *layer)
                for layer in zip(self._layers, measured, report.dtypes, report.sources, strict=True)
            ]
            self._write(of_step)
            rows += of_step
        return rows

    def _row(
        self, step: int, name: str, values: dict[str, Any], dtype: torch.dtype, source: str
    ) -> dict[str, Any]:
        heads, head_dim, columns = self._layers[name]
        tokens = round(values["tokens"])
        resolved = math.isfinite(values["worst"][HEADS])
        limit = 4 / torch.finfo(dtype).eps

        def near_skip(matrix: int) -> float | None:
            return values["kappa"][matrix] if values["worst"][matrix] <= limit else None

        return {
            "step": step,
            "layer": name,
            "kappa": values["kappa"][HEADS] if resolved else None,
            "kappa_gaussian": _finite(gaussian_condition_number(tokens, heads * head_dim)),
            "resolved": resolved,
            **{key: _finite(values[key]) for key in _COPIED},
            "head_norms": [_finite(norm) for norm in values["head_norms"]],
            "kappa_before_skip": near_skip(BEFORE),
            "kappa_after_skip": near_skip(AFTER),
            "heads": heads,
            "head_dim": head_dim,
            "tokens": tokens,
            "columns": round(values["columns"]) if columns is None else columns(tokens),
            "source": source,
        }

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if self._group is not None and self._group.rank() != 0:
            return
        if self.path is not None:
            with self.path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        for writer in self.writers:
            values = {
                f"{key}/{row['layer']}": row[key]
                for row in rows
                for key in _WRITTEN
                if row[key] is not None
            }
            step = rows[0]["step"]
            if hasattr(writer, "log"):
                writer.log({**values, "kappa/step": step}, step=self._now)
            else:
                for key, value in values.items():
                    writer.add_scalar(key, value, step)


def _can_be_captured(module: nn.Module) -> bool:
    return "capture_samples" in vars(module)


def _bare(model: nn.Module, name: str) -> str:
    """Return a module's name without the parts that wrappers put there."""
    parts, module = [], model
    for part in name.split(".") if name else []:
        data_parallel = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
        if part not in _WRAPPERS and not (part == "module" and data_parallel):
            parts.append(part)
        module = module.get_submodule(part)
    return ".".join(parts)


def _finite(value: float) -> float | None:
    # JSON has no infinity and no nan.
    return value if math.isfinite(value) else None
