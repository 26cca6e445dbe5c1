"""KappaMonitor: the condition number of every attention block, while a model trains."""

import json
import math
from collections import deque
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


class _Report(NamedTuple):
    step: int
    dtypes: list[torch.dtype]
    arriving: Arriving


class KappaMonitor:
    """Samples the attention blocks of a model every few steps and reports one row per layer.

    It finds the modules of ``leaner_kernels.nn``; attention between windows, channels or
    neighbours has the same kappa: of all tokens of a sample by the heads side by side.

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

    - step, layer (as in ``model.named_modules()``, less the names that wrappers add), heads,
      head_dim, tokens (without padding: their mean, rounded), columns (entries of a softmax row:
      the tokens, or those of a window, the channels of a head, or the pixels around one);
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
    its own, equal on all of them, and written by rank 0. All ranks must watch the same layers.

    Args:
        model: any with modules of ``leaner_kernels.nn`` inside; under FSDP2 or DDP if you like.
        every: steps between samples, at least 1.
        samples: batch entries captured in each sampled step, on each rank, at least 1.
        path: JSON lines are appended there, when the rows are returned.
        writer: one or several, of TensorBoard's SummaryWriter (anything with ``add_scalar(name,
            value, step)``) and Weights & Biases' run (anything with ``log(values, step=...)``). A
            run takes no value for an earlier step, so that rows go to the step at which they are
            returned, with their own as "kappa/step"; of several it keeps the last.

    Raises:
        ValueError: a count below 1, a path in no folder, a writer of another kind, or a model
            without attention modules that can be captured.

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
        if every < 1 or samples < 1:
            raise ValueError(f"every and samples must be at least 1, got {every} and {samples}")
        self.modules: dict[str, Any] = {
            _bare(model, name): m for name, m in model.named_modules() if _can_be_captured(m)
        }
        if not self.modules:
            raise ValueError(
                f"{type(model).__name__} has no attention module that can be captured: "
                "use those of leaner_kernels.nn"
            )
        self.every, self.samples = every, samples
        self.path = None if path is None else Path(path)
        if self.path is not None and not self.path.parent.is_dir():
            raise ValueError(f"path must lie in a folder that exists, got {str(path)!r}")
        several = isinstance(writer, list | tuple)
        self.writers = list(writer) if several else [] if writer is None else [writer]
        for each in self.writers:
            if not (hasattr(each, "log") or hasattr(each, "add_scalar")):
                raise ValueError(f"writer must have add_scalar or log, got {type(each).__name__}")
        self._layout = Layout(tuple(m.num_heads for m in self.modules.values()))
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
        """Names of the watched modules, in the model's order."""
        return list(self.modules)

    def begin(self, step: int) -> None:
        """Arm the capture if ``step`` is a multiple of ``every``."""
        self._now = int(step)
        self._step = self._now if step % self.every == 0 else None
        for module in self.modules.values():
            module.capture_samples = 0 if self._step is None else self.samples
            module.captured = None

    def end(self) -> list[dict[str, Any]]:
        """Disarm the capture, measure what it has, and return the rows that have arrived.

        Returns:
            In step order. On the CPU the rows of this step, [] when it was not sampled; on a GPU
            those of steps that were, whose results have arrived since the last call.

        Raises:
            RuntimeError: when the rows of a step arrive in which a layer ran no forward since
                ``begin``, or measuring failed on another rank.
        """
        if self._step is not None:
            step, self._step = self._step, None
            captured = [module.captured for module in self.modules.values()]
            for module in self.modules.values():
                module.captured, module.capture_samples = None, 0
            arriving = self._measure(captured)
            dtypes = [torch.float32 if c is None else c.dtype for c in captured]
            self._reports.append(_Report(step, dtypes, arriving))
        return self._arrived(wait=False)

    def flush(self) -> list[dict[str, Any]]:
        """Wait for the rows that ``end`` has not returned yet, and return them.

        Raises:
            RuntimeError: as ``end``.
        """
        return self._arrived(wait=True)

    def _measure(self, captured: list[Any]) -> Arriving:
        devices = [c.heads.device for c in captured if c is not None]
        devices.append(next(next(iter(self.modules.values())).parameters()).device)
        device = devices[0]
        if self._side is None:
            self._side = SideStream(device) if device.type == "cuda" else AtOnce()
        try:
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
            for name, values in zip(self.modules, measured):
                if values["status"] == NO_FORWARD:
                    raise RuntimeError(
                        f"{name} ran no forward between begin and end of step {report.step} on "
                        "some rank"
                    )
                if values["status"] == FAILED:
                    raise RuntimeError(f"step {report.step} could not be measured on another rank")
            of_step = [
                self._row(report.step, *layer)
                for layer in zip(self.modules, measured, report.dtypes, strict=True)
            ]
            self._write(of_step)
            rows += of_step
        return rows

    def _row(
        self, step: int, name: str, values: dict[str, Any], dtype: torch.dtype
    ) -> dict[str, Any]:
        heads, head_dim = self.modules[name].num_heads, self.modules[name].head_dim
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
            "columns": self.modules[name].columns(tokens),
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
