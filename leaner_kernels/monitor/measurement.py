"""Turn captured heads into rows: measure on a side stream, and join the ranks.

All measurements are columns of one matrix, which the host reads only after an asynchronous copy.
Sizes: L layers, S samples, N tokens, M columns, H heads of a layer.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kappa import condition_number, condition_report, gaussian_condition_number, head_report
from ..ops.statistics import COLUMNS, STATISTICS

# The matrices of a layer: its heads side by side, its output, and the output plus the residual.
HEADS, BEFORE, AFTER = range(3)
# The status of a layer: measured, or the reason why its row has no numbers.
MEASURED, NOT_RUN, NO_CALL, CHANGED, REFUSED, TAKEN = map(float, range(6))
_REASONS = {
    NOT_RUN: "not run",
    NO_CALL: "no call of several queries",
    CHANGED: "other heads than in the first sampled step",
    REFUSED: "a call that cannot be traced",
    TAKEN: "sampled by another monitor",
}
# Measurements of each matrix, means over the samples; of the heads; and of each head.
_OF_MATRIX = "log_kappa", "sigma_max", "sigma_min", "tokens"
_OF_HEADS = "effective_rank", "stable_rank", "rank", "log_kappa_to_rank"
# With ``head_report``: means over the samples, and over pairs of heads or heads.
_OF_PAIRS = "head_correlation", "isotropy", "mean_share"
_MEANS = [s.name for s in STATISTICS if s.over_samples == "mean"]
_MAXIMA = [s.name for s in STATISTICS if s.over_samples == "max"]


def layout(heads: int, with_report: bool = False) -> dict[str, slice]:
    """Return the columns of each measurement of a layer, with places for that many heads.

    ``with_report`` adds those of ``head_report``.

    Over ranks, columns before "worst_kappa" are averaged; of the others the largest is taken.
    """
    widths = {
        **dict.fromkeys(_OF_MATRIX, 3),
        **dict.fromkeys((*_OF_HEADS, "columns"), 1),
        **dict.fromkeys(_OF_PAIRS if with_report else (), 1),
        **dict.fromkeys(_MEANS, heads),
        "worst_kappa": 3,  # inf where one sample is not resolved
        **dict.fromkeys(_MAXIMA, heads),
        "status": 1,
    }
    ends = accumulate(widths.values())
    return {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends)}


class MatrixBatch(NamedTuple):
    """G matrices of one shape, either all heads or none."""

    places: list[tuple[int, int]]  # (HEADS, BEFORE or AFTER; layer) of each
    a: Tensor  # (G, S, N, M), float32, or float64 of a model that is
    lengths: Tensor | None  # (G, S), int32, number of valid rows; None if all are


class GatheredCaptures(NamedTuple):
    """Copies of the modules' captures, which no later forward overwrites."""

    batches: list[MatrixBatch]  # one for each shape
    statistics: dict[int, Tensor]  # of each layer, (len(STATISTICS), H): means, then maxima
    columns: dict[int, float]  # entries of a softmax row of each layer; nan for its tokens

    def tensors(self) -> list[Tensor]:
        """Return all of them."""
        batched = [t for batch in self.batches for t in (batch.a, batch.lengths) if t is not None]
        return [*batched, *self.statistics.values()]


def gather(
    captured: Sequence[Any], columns: Mapping[int, float], device: torch.device
) -> GatheredCaptures:
    """Copy the captures (``Captured``, ``TracedCall`` or None) of all layers into few batches.

    ``columns`` are as in ``GatheredCaptures``.
    """
    captures = {layer: _moved(c, device) for layer, c in enumerate(captured) if c is not None}
    # Launch few kernels: they run on the stream of the training step.
    alike: dict[Any, list[int]] = {}
    for layer, c in captures.items():
        kind = True, c.heads.shape, c.lengths is None, c.heads.dtype
        alike.setdefault(kind, []).append(layer)
        if c.residual is not None:
            kind = False, c.output.shape, c.lengths is None, c.output.dtype
            alike.setdefault(kind, []).append(layer)
    batches = []
    for (of_heads, _, whole, _), layers in alike.items():
        own = [captures[layer] for layer in layers]
        lengths = None if whole else torch.stack([c.lengths for c in own])
        if of_heads:
            places = [(HEADS, layer) for layer in layers]
            a = torch.stack([c.heads for c in own])
        else:
            places = [(kind, layer) for kind in (BEFORE, AFTER) for layer in layers]
            before = torch.stack([c.output for c in own])
            a = torch.cat([before, before + torch.stack([c.residual for c in own])])
            lengths = None if lengths is None else torch.cat([lengths, lengths])
        batches.append(MatrixBatch(places, a, lengths))
    statistics = {}
    for layer, c in captures.items():
        means = torch.stack([c.statistics[name] for name in _MEANS]).mean(dim=1)
        statistics[layer] = torch.cat([means, *(c.statistics[name][None] for name in _MAXIMA)])
    return GatheredCaptures(batches, statistics, dict(columns))


def _moved(capture: Any, device: torch.device) -> Any:
    """Return a capture on a device, copied if its layer is on another."""
    if capture.heads.device == device:
        return capture

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    values = {name: move(value) for name, value in capture._asdict().items()}
    values["statistics"] = {name: move(value) for name, value in capture.statistics.items()}
    return capture._replace(**values)


def measure(
    gathered: GatheredCaptures,
    status: Sequence[float],
    most_heads: int,
    device: torch.device,
    with_report: bool = False,
) -> Tensor:
    """Measure every matrix of L layers, each with a status, and ``most_heads`` heads at most.

    Returns (L, width), float64, on the device: columns as in ``layout``, nan without a measurement.
    """
    columns = layout(most_heads, with_report)
    size = len(status), columns["status"].stop
    matrix = torch.full(size, torch.nan, dtype=torch.float64, device=device)
    # On the device: a copy from the host might wait for it.
    for layer, reason in enumerate(status):
        matrix[layer, columns["status"]].fill_(reason)
    for layer, count in gathered.columns.items():
        matrix[layer, columns["columns"]].fill_(count)
    for layer, values in gathered.statistics.items():
        for name, per_head in zip((*_MEANS, *_MAXIMA), values):
            matrix[layer, columns[name]][: len(per_head)] = per_head
    of_heads = slice(columns[_OF_HEADS[0]].start, columns[_OF_HEADS[-1]].stop)
    for places, a, lengths in gathered.batches:
        if places[0][0] == HEADS:
            # Only the heads are reported with all singular values, which cost more.
            report = condition_report(a, lengths=lengths)
            log_to_rank = report.kappa_to_rank.log()
            by_sample = report.effective_rank, report.stable_rank, report.rank, log_to_rank
            ranks = torch.stack(by_sample, dim=-1).mean(dim=1)
            for place, ((_, layer), values) in enumerate(zip(places, ranks)):
                matrix[layer, of_heads] = values
                if with_report:
                    counts = None if lengths is None else lengths[place]
                    heads = gathered.statistics[layer].shape[1]
                    for name, value in zip(_OF_PAIRS, _report_heads(a[place], counts, heads)):
                        matrix[layer, columns[name]] = value
        else:
            report = condition_number(a, lengths=lengths)
        tokens = torch.full_like(report.kappa, a.shape[-2]) if lengths is None else lengths
        by_sample = report.kappa.log(), report.sigma_max, report.sigma_min, tokens.double()
        means = torch.stack(by_sample, dim=-1).mean(dim=1)
        worst = report.kappa.masked_fill(~report.resolved, torch.inf).amax(dim=1)
        for (kind, layer), values, largest in zip(places, means, worst):
            matrix[layer, kind : columns[_OF_MATRIX[-1]].stop : 3] = values
            matrix[layer, columns["worst_kappa"]][kind] = largest
    return matrix


def _report_heads(a: Tensor, lengths: Tensor | None, heads: int) -> tuple[Tensor, ...]:
    """Return ``_OF_PAIRS`` for the heads (S, N, M) of a layer, without rows past a length (S,)."""
    a = a.double()
    tokens = a.new_full((len(a),), a.shape[1]) if lengths is None else lengths
    inside = (torch.arange(a.shape[1], device=a.device) < tokens[:, None])[..., None]
    a = a.masked_fill(~inside, 0)
    mean = a.sum(dim=1, keepdim=True) / tokens[:, None, None]
    # Centred over the valid tokens; rows of zeros do not change the sums.
    report = head_report((a - mean).masked_fill(~inside, 0), heads)
    others = ~torch.eye(heads, dtype=torch.bool, device=a.device)
    correlation = report.correlation.masked_fill(~others, 0).sum(dim=(-2, -1)) / others.sum()
    share = tokens * mean.square().sum(dim=(1, 2)) / a.square().sum(dim=(1, 2))
    return correlation.mean(), report.isotropy.mean(), share.mean()


def merge_ranks(ranks: Tensor, columns: Mapping[str, slice]) -> Tensor:
    """Reduce (ranks, L, width) to (L, width), over the ranks that measured a layer."""
    end = columns["worst_kappa"].start
    status = ranks[..., -1:]
    ran = status == MEASURED
    mean = torch.where(ran, ranks[..., :end], 0).sum(dim=0) / ran.sum(dim=0)
    largest = torch.where(ran, ranks[..., end:-1], -torch.inf).amax(dim=0)
    return torch.cat([mean, largest, status.amin(dim=0)], dim=1)


@dataclass(frozen=True)
class HostCopy:
    """A copy to the host that may still be under way: valid once its event, if any, is over."""

    host: Tensor
    event: torch.cuda.Event | None

    def ready(self) -> bool:
        """Whether the copy is over; does not wait."""
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Wait for the copy."""
        if self.event is not None:
            self.event.synchronize()


def copy_to_host(values: Tensor) -> HostCopy:
    """Enqueue a copy to the host on the current stream; a tensor on the host is returned as is."""
    if values.device.type != "cuda":
        return HostCopy(values, None)
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return HostCopy(host, event)


class SideStream:
    """A CUDA stream for work that the training step does not wait for; on the CPU, no stream."""

    def __init__(self, device: torch.device):
        self.device = device
        # The lowest priority, which the default stream has too: this work never precedes the step.
        self.stream = torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None

    @contextmanager
    def after(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Enqueue the work of the block here, after all work enqueued on the current stream.

        ``inputs`` are tensors that the current stream made and the block reads.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in inputs:
            # Their memory must not be reused by a later tensor of the step before it has been read.
            tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            yield

    def copy_to_host(self, values: Tensor) -> HostCopy:
        """Enqueue a copy to the host; within ``after``."""
        return copy_to_host(values)


class LayerSizes(NamedTuple):
    """The sizes of a layer in the newest step that measured it."""

    heads: int
    head_dim: int


_OVER_HEADS: dict[str, Callable[[Tensor], Any]] = {
    "mean": Tensor.mean,
    "min": Tensor.amin,
    "max": Tensor.amax,
    "each": lambda values: values,
}


def row(
    step: int,
    name: str,
    layer: LayerSizes,
    measured: dict[str, Tensor],
    dtype: torch.dtype,
    source: str,
) -> dict[str, Any]:
    """Return the row of one layer and step, as ``KappaMonitor`` documents it.

    ``measured`` are the layer's measurements, on the CPU, ``dtype`` is that of its output.
    """
    heads, head_dim = layer
    values = {name: tensor.tolist() for name, tensor in measured.items()}
    (status,) = values["status"]
    worst, sigma_max = values["worst_kappa"], values["sigma_max"][HEADS]
    resolved = math.isfinite(worst[HEADS])
    limit = 4 / torch.finfo(dtype).eps
    reason = _REASONS.get(status)
    tokens = places = gaussian = None
    if status == MEASURED:
        tokens = round(values["tokens"][HEADS])
        places = tokens if math.isnan(values["columns"][0]) else round(values["columns"][0])
        gaussian = _finite(gaussian_condition_number(tokens, heads * head_dim))
        if not resolved:
            reason = "not resolved" if math.isfinite(sigma_max) else "not finite"

    def kappa(matrix: int) -> float:
        return math.exp(values["log_kappa"][matrix])

    def near_skip(matrix: int) -> float | None:
        return kappa(matrix) if 0 <= worst[matrix] <= limit else None

    def over_heads(each: bool) -> dict[str, Any]:
        reduced = {}
        for column in COLUMNS:
            if (column.over_heads == "each") == each:
                per_head = measured[column.statistic][:heads]
                reduced[column.name] = _finite(_OVER_HEADS[column.over_heads](per_head).tolist())
        return reduced

    report = {name: _finite(values[name][0]) for name in _OF_PAIRS if name in values}
    if report:
        measured_tokens = tokens is not None
        report["head_correlation_gaussian"] = (
            head_dim / (tokens + head_dim) if measured_tokens else None
        )
        report["isotropy_gaussian"] = (
            (tokens - 1) / (tokens + head_dim) if measured_tokens else None
        )
    return {
        "step": step,
        "layer": name,
        "kappa": kappa(HEADS) if resolved else None,
        "reason": reason,
        "kappa_gaussian": gaussian,
        "resolved": resolved,
        "sigma_max": _finite(sigma_max),
        "sigma_min": _finite(values["sigma_min"][HEADS]),
        **over_heads(each=False),
        **{key: _finite(values[key][0]) for key in ("effective_rank", "stable_rank", "rank")},
        **over_heads(each=True),
        "kappa_to_rank": _finite(math.exp(values["log_kappa_to_rank"][0])),
        "kappa_before_skip": near_skip(BEFORE),
        "kappa_after_skip": near_skip(AFTER),
        "heads": heads,
        "head_dim": head_dim,
        "tokens": tokens,
        "columns": places,
        "source": source,
        **report,
    }


def _finite(value: Any) -> Any:
    """Return a number, or a list of them, with None for infinity and nan, which JSON lacks."""
    if isinstance(value, list):
        return [*map(_finite, value)]
    return value if math.isfinite(value) else None
