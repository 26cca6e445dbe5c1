"""KappaMonitor: the condition number of every attention block, while a model trains."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from leaner_kernels.kappa import condition_number, gaussian_condition_number

# How each statistic is joined over ranks; kappa enters as its logarithm (a geometric mean).
_MEAN = ("log_kappa", "sigma_max", "sigma_min", "entropy", "prob_norm", "head_norm")
_MAX = ("unresolved", "max_logit", "missing")


class KappaMonitor:
    """Samples the attention blocks of a model every few steps and reports one row per layer.

    Call ``begin(step)`` before the forward of an optimizer step and ``end()`` after its backward:

        monitor = KappaMonitor(model, every=50, path="kappa.jsonl")
        for step, batch in enumerate(batches):
            monitor.begin(step)
            loss(model, batch).backward()
            for row in monitor.end():
                ...

    A row holds step, layer (as in ``model.named_modules()``), kappa (geometric mean over the
    samples; None where one of them was not resolved), kappa_gaussian (the theorem's prediction for
    independent Gaussian heads), sigma_max, sigma_min, resolved, entropy (nats), max_logit,
    prob_norm, head_norm, heads, head_dim and tokens. Of several forwards in a step (accumulation,
    recomputed activations) the newest counts. A capture assigns to its module, which a block
    compiled with both fullgraph=True and activation checkpointing inside does not allow.

    Under torch.distributed every rank must call both: the rows are joined over ranks in one
    collective, equal on all of them, and written by rank 0.

    Args:
        model: any module with ``ManyHeadAttention`` inside; wrapped by FSDP2 or DDP if you like.
        every: steps between samples, at least 1.
        samples: batch entries captured in each sampled step, on each rank, at least 1.
        path: JSON lines are appended there.
        writer: has ``add_scalar(name, value, step)``, as TensorBoard's SummaryWriter.

    Raises:
        ValueError: a count below 1, a path in no folder, or a model without attention modules that
            can be captured.

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
            name: m for name, m in model.named_modules() if "capture_samples" in vars(m)
        }
        if not self.modules:
            raise ValueError(
                f"{type(model).__name__} has no attention module that can be captured: "
                "use leaner_kernels.nn.ManyHeadAttention"
            )
        self.every, self.samples = every, samples
        self.path = None if path is None else Path(path)
        if self.path is not None and not self.path.parent.is_dir():
            raise ValueError(f"path must lie in a folder that exists, got {str(path)!r}")
        self.writer = writer
        self._step: int | None = None

    @property
    def layers(self) -> list[str]:
        """Names of the watched modules, in the model's order."""
        return list(self.modules)

    def begin(self, step: int) -> None:
        """Arm the capture if ``step`` is a multiple of ``every``."""
        self._step = int(step) if step % self.every == 0 else None
        for module in self.modules.values():
            module.capture_samples = 0 if self._step is None else self.samples
            module.captured = None

    def end(self) -> list[dict[str, Any]]:
        """Return the rows of this step, [] when it was not sampled, and disarm the capture.

        Raises:
            RuntimeError: a layer ran no forward since ``begin``.
        """
        if self._step is None:
            return []
        step, self._step = self._step, None
        measured, tokens = [], []
        for module in self.modules.values():
            if module.captured is None:
                measured.append(_missing(next(module.parameters()).device))
                tokens.append(0)
            else:
                measured.append(_measure(*module.captured))
                tokens.append(module.captured[-1].shape[-2])
            module.captured, module.capture_samples = None, 0
        joined = _join_over_ranks(torch.stack(measured)).tolist()
        # Known only after the collective, so that no rank waits in it for one that has raised.
        missing = [name for name, values in zip(self.modules, joined) if values[-1]]
        if missing:
            raise RuntimeError(
                f"{missing[0]} ran no forward between begin and end of step {step} on some rank"
            )
        rows = [
            self._row(step, name, num_tokens, values)
            for name, num_tokens, values in zip(self.modules, tokens, joined, strict=True)
        ]
        self._write(rows)
        return rows

    def _row(self, step: int, name: str, tokens: int, values: list[float]) -> dict[str, Any]:
        value = dict(zip(_MEAN + _MAX, values, strict=True))
        heads, head_dim = self.modules[name].num_heads, self.modules[name].head_dim
        resolved = value["unresolved"] == 0
        return {
            "step": step,
            "layer": name,
            "kappa": math.exp(value["log_kappa"]) if resolved else None,
            "kappa_gaussian": _finite(gaussian_condition_number(tokens, heads * head_dim)),
            "sigma_max": _finite(value["sigma_max"]),
            "sigma_min": _finite(value["sigma_min"]),
            "resolved": resolved,
            **{key: _finite(value[key]) for key in ("entropy", "max_logit", "prob_norm")},
            "head_norm": _finite(value["head_norm"]),
            "heads": heads,
            "head_dim": head_dim,
            "tokens": tokens,
        }

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        if self.path is not None:
            with self.path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        if self.writer is not None:
            for row in rows:
                for key in ("kappa", "entropy", "max_logit"):
                    if row[key] is not None:
                        self.writer.add_scalar(f"{key}/{row['layer']}", row[key], row["step"])


def _measure(
    max_logit: Tensor, entropy: Tensor, prob_norm: Tensor, head_norm: Tensor, heads: Tensor
) -> Tensor:
    """Return the columns _MEAN + _MAX of one layer, float64."""
    condition = condition_number(heads)
    return torch.stack(
        [
            condition.kappa.log().mean(),
            condition.sigma_max.mean(),
            condition.sigma_min.mean(),
            entropy.double().mean(),
            prob_norm.double().mean(),
            head_norm.double().mean(),
            (~condition.resolved).any().double(),
            max_logit.double().amax(),
            torch.zeros_like(condition.kappa[0]),
        ]
    )


def _missing(device: torch.device) -> Tensor:
    values = torch.full((len(_MEAN + _MAX),), math.nan, dtype=torch.float64, device=device)
    values[-1] = 1
    return values


def _join_over_ranks(measured: Tensor) -> Tensor:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return measured
    ranks = [torch.empty_like(measured) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, measured)
    stacked, means = torch.stack(ranks), len(_MEAN)
    return torch.cat([stacked[..., :means].mean(0), stacked[..., means:].amax(0)], dim=-1)


def _finite(value: float) -> float | None:
    # JSON has no infinity and no nan.
    return value if math.isfinite(value) else None
