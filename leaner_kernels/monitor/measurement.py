"""From captured heads to rows: measured on a side stream into one matrix, joined over ranks.

The host reads no value until the copy of that matrix is over.
Sizes: L layers, S samples, N tokens, M columns, H heads of a layer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..kappa import condition_number, condition_report, gaussian_condition_number
from ..ops.statistics import COLUMNS, STATISTICS

# The matrices of a layer: its heads side by side, its output, and the output plus the residual.
HEADS, BEFORE, AFTER = range(3)
# The status of a layer: measured, or a row without numbers, for three reasons.
MEASURED, NOT_RUN, CHANGED, REFUSED = map(float, range(4))
_REASONS = {
    NOT_RUN: "no call of several queries",
    CHANGED: "other heads than in the first sampled step",
    REFUSED: "a call that cannot be traced",
}


class Field(NamedTuple):
    """A measurement of every layer: columns of the matrix that ranks exchange."""

    name: str
    over_ranks: Literal["mean", "max"]  # reduction over the ranks that measured the layer
    size: Literal["layer", "matrix", "head"] = "layer"  # one number of each


# Means over the samples, and the largest kappa: inf where one was not resolved.
_SPECTRUM = (
    *(Field(name, "mean", "matrix") for name in ("log_kappa", "sigma_max", "sigma_min", "tokens")),
    Field("worst_kappa", "max", "matrix"),
)
_RANKS = "effective_rank", "stable_rank", "rank", "log_kappa_to_rank"
# The columns of the matrix in order: means over ranks, maxima, and last the status.
FIELDS = sorted(
    (
        *_SPECTRUM,
        *(Field(name, "mean") for name in (*_RANKS, "columns")),
        *(Field(statistic.name, statistic.over_ranks, "head") for statistic in STATISTICS),
    ),
    key=lambda field: field.over_ranks == "max",
)


def width_of(heads: int) -> int:
    """Return how many columns a matrix has with places for so many heads, the status among them."""
    sizes = {"layer": 1, "matrix": 3, "head": heads}
    return sum(sizes[field.size] for field in FIELDS) + 1


@cache
def columns_of(width: int) -> dict[str, slice]:
    """Return the columns of each field in a matrix of this width."""
    sizes = {"layer": 1, "matrix": 3, "head": (width - width_of(0)) // len(STATISTICS)}
    columns, end = {}, 0
    for field in FIELDS:
        columns[field.name] = slice(end, end + sizes[field.size])
        end += sizes[field.size]
    return columns


class MatrixBatch(NamedTuple):
    """G matrices of one shape, either all heads or none."""

    places: list[tuple[int, int]]  # (HEADS, BEFORE or AFTER; layer) of each
    a: Tensor  # (G, S, N, M), float32, or float64 of a model that is
    lengths: Tensor | None  # (G, S), int32, rows that count; None where all do


class GatheredCaptures(NamedTuple):
    """Copies of what the modules captured, which no later forward overwrites."""

    batches: list[MatrixBatch]  # as few as shapes
    heads: list[int]  # of each layer
    statistics: dict[str, Tensor]  # reduced over the batch, the heads of one layer after another
    columns: list[float]  # keys of each layer's softmax, nan where the module has ``columns``

    def tensors(self) -> list[Tensor]:
        """Return all of them."""
        batched = [t for batch in self.batches for t in (batch.a, batch.lengths) if t is not None]
        return [*batched, *self.statistics.values()]


def gather(captured: Sequence[Any], device: torch.device) -> GatheredCaptures:
    """Copy the captures of all layers (``Captured`` or ``TracedCall``) into few batches."""
    captured = [_moved(capture, device) for capture in captured]
    # Few launches: they are on the stream of the step.
    alike: dict[Any, list[int]] = {}
    for layer, c in enumerate(captured):
        kind = True, c.heads.shape, c.lengths is None, c.heads.dtype
        alike.setdefault(kind, []).append(layer)
        if c.residual is not None:
            kind = False, c.output.shape, c.lengths is None, c.output.dtype
            alike.setdefault(kind, []).append(layer)
    batches = []
    for (of_heads, _, whole, _), layers in alike.items():
        lengths = None if whole else torch.stack([captured[layer].lengths for layer in layers])
        if of_heads:
            places = [(HEADS, layer) for layer in layers]
            a = torch.stack([captured[layer].heads for layer in layers])
        else:
            places = [(kind, layer) for kind in (BEFORE, AFTER) for layer in layers]
            before = torch.stack([captured[layer].output for layer in layers])
            after = before + torch.stack([captured[layer].residual for layer in layers])
            a = torch.cat([before, after])
            lengths = None if lengths is None else torch.cat([lengths, lengths])
        batches.append(MatrixBatch(places, a, lengths))
    statistics = {}
    means = [s.name for s in STATISTICS if s.over_samples == "mean"]
    per_layer = [[c.statistics[name] for c in captured] for name in means]
    if len({values.shape[0] for values in per_layer[0]}) == 1:
        joined = torch.stack([torch.cat(values, dim=1) for values in per_layer]).mean(dim=1)
    else:
        joined = torch.cat([torch.stack(of).mean(dim=1) for of in zip(*per_layer)], dim=1)
    statistics = dict(zip(means, joined.unbind()))
    for statistic in STATISTICS:
        if statistic.over_samples == "max":
            largest = [c.statistics[statistic.name] for c in captured]
            statistics[statistic.name] = torch.cat(largest)
    heads = [values.shape[1] for values in per_layer[0]]
    columns = [float(getattr(c, "columns", torch.nan)) for c in captured]
    return GatheredCaptures(batches, heads, statistics, columns)


def _moved(capture: Any, device: torch.device) -> Any:
    """Return a capture on a device, of a layer that may be on another."""
    if capture.heads.device == device:
        return capture

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    values = {name: move(value) for name, value in capture._asdict().items()}
    values["statistics"] = {name: move(value) for name, value in capture.statistics.items()}
    return capture._replace(**values)


def measure(gathered: GatheredCaptures, most_heads: int) -> Tensor:
    """Measure every matrix of L layers, with places for ``most_heads`` heads.

    Returns (L, width), float64, on the device of the captures: columns as in ``columns_of``, the
    status last; nan and, for kappa, inf where a layer has no output and residual to measure.
    """
    num_layers, device = len(gathered.heads), next(iter(gathered.statistics.values())).device
    blank = torch.full((len(_SPECTRUM),), torch.nan, dtype=torch.float64, device=device)
    blank[-1].fill_(torch.inf)
    spectra = dict.fromkeys(((layer, m) for layer in range(num_layers) for m in range(3)), blank)
    ranks: dict[int, Tensor] = {}
    for places, a, lengths in gathered.batches:
        if places[0][0] == HEADS:
            # All singular values: they cost more, and only the heads are reported in full.
            report = condition_report(a, lengths=lengths)
            log_to_rank = report.kappa_to_rank.log()
            by_sample = report.effective_rank, report.stable_rank, report.rank, log_to_rank
            means = torch.stack(by_sample, dim=-1).mean(dim=1)
            ranks.update(zip((layer for _, layer in places), means.unbind()))
        else:
            report = condition_number(a, lengths=lengths)
        tokens = torch.full_like(report.kappa, a.shape[-2]) if lengths is None else lengths
        by_sample = report.kappa.log(), report.sigma_max, report.sigma_min, tokens.double()
        means = torch.stack(by_sample, dim=-1).mean(dim=1)
        worst = report.kappa.masked_fill(~report.resolved, torch.inf).amax(dim=1)
        spectrum = torch.cat([means, worst[:, None]], dim=1)
        spectra.update(zip(((layer, m) for m, layer in places), spectrum.unbind()))
    columns = blank.new_full((num_layers,), torch.nan)
    for layer, count in enumerate(gathered.columns):
        if not math.isnan(count):
            # On the device: a copy from the host might wait for it.
            columns[layer].fill_(count)
    by_matrix = torch.stack([*spectra.values()]).view(num_layers, 3, len(_SPECTRUM))
    by_layer = torch.stack([ranks[layer] for layer in range(num_layers)])
    values = {
        **dict(zip((field.name for field in _SPECTRUM), by_matrix.unbind(dim=-1))),
        **dict(zip(_RANKS, by_layer.split(1, dim=1))),
        "columns": columns[:, None],
        **{
            name: _padded(per_head.double(), gathered.heads, most_heads)
            for name, per_head in gathered.statistics.items()
        },
    }
    status = torch.full((num_layers, 1), MEASURED, dtype=torch.float64, device=device)
    return torch.cat([*(values[field.name] for field in FIELDS), status], dim=1)


def _padded(per_head: Tensor, heads: Sequence[int], most_heads: int) -> Tensor:
    """Return (L, most_heads) of the heads of all layers one after another."""
    if set(heads) == {most_heads}:
        return per_head.view(-1, most_heads)
    padded = per_head.new_full((len(heads), most_heads), torch.nan)
    for row, values in zip(padded, per_head.split(heads)):
        row[: len(values)] = values
    return padded


def unmeasured(status: Sequence[float], most_heads: int, device: torch.device) -> Tensor:
    """Return the matrix of layers without measurements, with the status of each."""
    size = len(status), width_of(most_heads)
    matrix = torch.full(size, torch.nan, dtype=torch.float64, device=device)
    for row, reason in zip(matrix, status):
        # On the device: a copy from the host might wait for it.
        row[-1].fill_(reason)
    return matrix


def merge_ranks(ranks: Tensor) -> Tensor:
    """Return the matrix (L, width) of (ranks, L, width): of the ranks that measured a layer."""
    first = next(field.name for field in FIELDS if field.over_ranks == "max")
    end = columns_of(ranks.shape[-1])[first].start
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
    """Enqueue a copy to the host on the current stream; of a tensor on the host it is that."""
    if values.device.type != "cuda":
        return HostCopy(values, None)
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return HostCopy(host, event)


class SideStream:
    """A CUDA stream for work that the training step does not wait for; on the CPU it does."""

    def __init__(self, device: torch.device):
        self.device = device
        # The lowest priority there is, which the default stream has too: never before the step.
        self.stream = torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None

    @contextmanager
    def after(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Enqueue what the block does here, after all that the current stream has been given.

        ``inputs`` are tensors that the current stream made and the block reads.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in inputs:
            # Their memory must not be given to a later tensor of the step before it is read.
            tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            yield

    def copy_to_host(self, values: Tensor) -> HostCopy:
        """Enqueue a copy to the host; within ``after``."""
        return copy_to_host(values)


class LayerSizes(NamedTuple):
    """What the rows of a layer have in common; ``columns`` is a method of modules of ours."""

    heads: int
    head_dim: int
    columns: Callable[[int], int] | None = None


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
    measured: Tensor,
    dtype: torch.dtype,
    source: str,
) -> dict[str, Any]:
    """Return the row of one layer and step, as ``KappaMonitor`` documents it.

    ``measured`` is the layer's row of measurements, on the CPU, ``dtype`` that of its output.
    """
    heads, head_dim, columns = layer
    slices, status = columns_of(len(measured)), measured[-1].item()

    def of(field: str) -> Any:
        values = measured[slices[field]].tolist()
        return values if len(values) > 1 else values[0]

    def over_heads(each: bool) -> dict[str, Any]:
        reduced = {}
        for column in COLUMNS:
            if (column.over_heads == "each") == each:
                per_head = measured[slices[column.statistic]][:heads]
                reduced[column.name] = _finite(_OVER_HEADS[column.over_heads](per_head).tolist())
        return reduced

    kappa = measured[slices["log_kappa"]].exp().tolist()
    worst, sigma_max = of("worst_kappa"), of("sigma_max")
    resolved = math.isfinite(worst[HEADS])
    limit = 4 / torch.finfo(dtype).eps
    reason = _REASONS.get(status)
    if columns is not None and status == NOT_RUN:
        reason = "not run"
    tokens = places = gaussian = None
    if status == MEASURED:
        tokens = round(of("tokens")[HEADS])
        places = round(of("columns")) if columns is None else columns(tokens)
        gaussian = _finite(gaussian_condition_number(tokens, heads * head_dim))
        if not resolved:
            reason = "not resolved" if math.isfinite(sigma_max[HEADS]) else "not finite"

    def near_skip(matrix: int) -> float | None:
        return kappa[matrix] if worst[matrix] <= limit else None

    return {
        "step": step,
        "layer": name,
        "kappa": kappa[HEADS] if resolved else None,
        "reason": reason,
        "kappa_gaussian": gaussian,
        "resolved": resolved,
        "sigma_max": _finite(sigma_max[HEADS]),
        "sigma_min": _finite(of("sigma_min")[HEADS]),
        **over_heads(each=False),
        **{key: _finite(of(key)) for key in ("effective_rank", "stable_rank", "rank")},
        **over_heads(each=True),
        "kappa_to_rank": _finite(math.exp(of("log_kappa_to_rank"))),
        "kappa_before_skip": near_skip(BEFORE),
        "kappa_after_skip": near_skip(AFTER),
        "heads": heads,
        "head_dim": head_dim,
        "tokens": tokens,
        "columns": places,
        "source": source,
    }


def _finite(value: Any) -> Any:
    """Return a number, or a list of them, with None for infinity and nan, which JSON lacks."""
    if isinstance(value, list):
        return [*map(_finite, value)]
    return value if math.isfinite(value) else None
