"""From captured heads to rows: measured on a side stream into one flat tensor, joined over ranks.

The host reads no value until the copy of that tensor is over.
Sizes: L layers, S samples, N tokens, M columns, H heads of one layer, T heads of all layers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kappa import (
    condition_number,
    condition_report,
    gaussian_condition_number,
    reference,
)

# The matrices of a layer: its heads side by side, its output, and the output plus the residual.
HEADS, BEFORE, AFTER = range(3)
# The status of a layer in the flat tensor: a row; a row without numbers, three reasons; and of the
# whole step: measuring raised, or a rank cancelled.
MEASURED, NOT_RUN, CHANGED, REFUSED, FAILED, CANCELLED = map(float, range(6))
# The fields of a row that are as measured.
_COPIED = (
    *("sigma_max", "sigma_min", "entropy", "entropy_min", "max_logit", "prob_norm", "head_norm"),
    *("effective_rank", "stable_rank", "rank"),
)
# The fields of a row that go to a writer.
WRITER_FIELDS = (
    *("kappa", "kappa_before_skip", "kappa_after_skip", "entropy", "entropy_min", "max_logit"),
    *("head_norm", "effective_rank", "stable_rank"),
)
# Of one layer, means over the samples; the latter are asked for.
_RANKS = "effective_rank", "stable_rank", "rank", "log_kappa_to_rank"
_EXTRAS = "head_correlation", "isotropy", "mean_share"
_REASONS = {
    NOT_RUN: "no call of several queries",
    CHANGED: "other heads than in the first sampled step",
    REFUSED: "a call that cannot be traced",
}


class MatrixBatch(NamedTuple):
    """Matrices of one shape, either all heads or none.

    Attributes:
        places: of each of the G matrices: (HEADS, BEFORE or AFTER; layer).
        a: (G, S, N, M), float32, or float64 of a model that is.
        lengths: (G, S), int32, rows that count; None where all do.
    """

    places: list[tuple[int, int]]
    a: Tensor
    lengths: Tensor | None


class GatheredCaptures(NamedTuple):
    """Copies of what the modules captured, which no later forward overwrites.

    Attributes:
        batches: the matrices, as few batches as shapes.
        per_head: (3, T), float32: entropy, prob_norm and head_norm, means over the batch.
        max_logit: (T,), float32, maxima over the batch.
        columns: keys of each layer's softmax, nan where the module has ``columns``.
    """

    batches: list[MatrixBatch]
    per_head: Tensor
    max_logit: Tensor
    columns: list[float]

    def tensors(self) -> list[Tensor]:
        """Return all of them."""
        batched = [t for batch in self.batches for t in (batch.a, batch.lengths) if t is not None]
        return [*batched, self.per_head, self.max_logit]


def gather(captured: Sequence[Any]) -> GatheredCaptures:
    """Copy the captures of all layers into batches of matrices of one shape.

    Args:
        captured: ``nn.capture.Captured`` or ``trace.TracedCall`` of each layer.

    Returns:
        ``GatheredCaptures``.
    """
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
    statistics = [(c.entropy, c.prob_norm, c.head_norm) for c in captured]
    if len({c.entropy.shape[0] for c in captured}) == 1:
        per_head = torch.stack([torch.cat(each, dim=1) for each in zip(*statistics)]).mean(dim=1)
    else:
        per_head = torch.cat([torch.stack(each).mean(dim=1) for each in statistics], dim=1)
    columns = [float(getattr(c, "columns", torch.nan)) for c in captured]
    return GatheredCaptures(batches, per_head, torch.cat([c.max_logit for c in captured]), columns)


@dataclass(frozen=True)
class FlatLayout:
    """Where each measurement lies in the flat tensor: first means over ranks, then maxima.

    Attributes:
        heads: number of heads of each layer.
        head_report: whether to measure what ``KappaMonitor`` adds to a row for it.
    """

    heads: tuple[int, ...]
    head_report: bool = False

    @property
    def _means(self) -> list[tuple[int, ...]]:
        # log kappa, sigma_max, sigma_min and tokens; _RANKS and _EXTRAS; per_head and columns of
        # GatheredCaptures.
        layers, ranks = len(self.heads), len(_RANKS + _EXTRAS)
        return [(3, layers, 4), (layers, ranks), (3, sum(self.heads)), (layers,)]

    @property
    def _maxima(self) -> list[tuple[int, ...]]:
        # kappa, inf where one was not resolved; max_logit; status.
        return [(3, len(self.heads)), (sum(self.heads),), (len(self.heads),)]

    def measure(self, gathered: GatheredCaptures) -> Tensor:
        """Measure every matrix.

        Returns:
            One axis, float64, on the device of the captures; nan and, for kappa, inf where a layer
            has no output and residual to measure.
        """
        num_layers, device = len(self.heads), gathered.per_head.device
        blank = torch.full((4,), torch.nan, dtype=torch.float64, device=device)
        spectra = {(m, layer): blank for m in range(3) for layer in range(num_layers)}
        unknown = torch.full((), torch.inf, dtype=torch.float64, device=device)
        worst = dict.fromkeys(spectra, unknown)
        rank: dict[int, Tensor] = {}
        extras = dict.fromkeys(range(num_layers), blank.new_full((len(_EXTRAS),), torch.nan))
        for places, a, lengths in gathered.batches:
            if places[0][0] == HEADS:
                # All singular values: they cost more, and only the heads are reported in full.
                found = condition_report(a, lengths=lengths)
                log_to_rank = found.kappa_to_rank.log()
                ranks = found.effective_rank, found.stable_rank, found.rank, log_to_rank
                each = torch.stack(ranks, dim=-1).mean(dim=1)
                for place, ((_, layer), means) in enumerate(zip(places, each.unbind())):
                    rank[layer] = means
                    if self.head_report:
                        counts = None if lengths is None else lengths[place]
                        extras[layer] = self._extras(self.heads[layer], a[place], counts)
            else:
                found = condition_number(a, lengths=lengths)
            tokens = torch.full_like(found.kappa, a.shape[-2]) if lengths is None else lengths
            columns = found.kappa.log(), found.sigma_max, found.sigma_min, tokens.double()
            means = torch.stack(columns, dim=-1).mean(dim=1)
            kappa = found.kappa.masked_fill(~found.resolved, torch.inf).amax(dim=1)
            spectra.update(zip(places, means.unbind()))
            worst.update(zip(places, kappa.unbind()))
        keys = unknown.new_full((num_layers,), torch.nan)
        for layer, count in enumerate(gathered.columns):
            if not math.isnan(count):
                # On the device: a copy from the host might wait for it.
                keys[layer].fill_(count)
        parts = [
            torch.stack(list(spectra.values())),
            torch.cat(
                [
                    torch.stack([rank[layer] for layer in range(num_layers)]),
                    torch.stack([*extras.values()]),
                ],
                dim=1,
            ),
            gathered.per_head.double(),
            keys,
            torch.stack(list(worst.values())),
            gathered.max_logit.double(),
            torch.full((num_layers,), MEASURED, dtype=torch.float64, device=device),
        ]
        return torch.cat([part.flatten() for part in parts])

    @staticmethod
    def _extras(heads: int, a: Tensor, lengths: Tensor | None) -> Tensor:
        """Return what ``_EXTRAS`` names of a layer's heads, (S, N, M)."""
        inside: Tensor | int = 1
        tokens = a.new_full((len(a),), a.shape[1]) if lengths is None else lengths
        if lengths is not None:
            inside = (torch.arange(a.shape[1], device=a.device) < lengths[:, None])[..., None]
            a = a * inside
        a = a.double()
        mean = a.sum(dim=1, keepdim=True) / tokens[:, None, None]
        within = (a - mean) * inside
        pairs = reference.head_correlation(within, heads)
        others = ~torch.eye(heads, dtype=torch.bool, device=a.device)
        correlation = torch.where(others, pairs, 0).sum(dim=(-2, -1)).mean() / others.sum()
        shares = tokens * mean.square().sum(dim=(1, 2)) / a.square().sum(dim=(1, 2))
        isotropy = reference.head_isotropy(within, heads).mean()
        return torch.stack([correlation, isotropy, shares.mean()])

    def unmeasured(self, status: Sequence[float], device: torch.device) -> Tensor:
        """Return the flat tensor of layers without measurements, with their status."""
        size = sum(torch.Size(shape).numel() for shape in self._means + self._maxima)
        # On the device: a copy from the host might wait for it.
        like = torch.full((size - len(status),), torch.nan, dtype=torch.float64, device=device)
        return torch.cat([like, *(like.new_full((1,), reason) for reason in status)])

    def subset(self, layers: Sequence[int]) -> "FlatLayout":
        """Return the layout of some of the layers."""
        heads = tuple(self.heads[layer] for layer in layers)
        return FlatLayout(heads, self.head_report)

    def merge_devices(self, pieces: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
        """Return the flat tensor of all layers.

        Args:
            pieces: layers, each in one of them, and their flat tensor by ``subset``; on one device.
        """
        parts: dict[int, list[Tensor]] = {}
        for layers, flat in pieces:
            layout = self.subset(layers)
            spectra, rank, per_head, columns, worst, max_logit, status = layout._split(flat)
            single = [1] * len(layers)
            split = zip(
                spectra.split(single, dim=1),
                rank.split(single),
                per_head.split(layout.heads, dim=1),
                columns.split(single),
                worst.split(single, dim=1),
                max_logit.split(layout.heads),
                status.split(single),
            )
            parts.update(zip(layers, map(list, split)))
        ordered = zip(*(parts[layer] for layer in range(len(self.heads))))
        axes = 1, 0, 1, 0, 1, 0, 0
        return torch.cat([torch.cat(of, dim=axis).flatten() for of, axis in zip(ordered, axes)])

    def merge_ranks(self, ranks: Tensor) -> Tensor:
        """Return the flat tensor of all ranks, of those of each, (ranks, ...).

        Each layer's is of the ranks that measured it, where any did.
        """
        *each, status = (torch.stack(of) for of in zip(*map(self._split, ranks)))
        ran = status == MEASURED
        counts = torch.cat(
            [ran[:, i : i + 1].expand(-1, heads) for i, heads in enumerate(self.heads)], dim=1
        )
        masks = (
            *(ran[:, None, :, None], ran[:, :, None], counts[:, None], ran),
            *(ran[:, None], counts),
        )
        joined = []
        for place, (values, mask) in enumerate(zip(each, masks, strict=True)):
            if place < len(self._means):
                found = torch.where(mask, values, 0).sum(dim=0) / mask.sum(dim=0)
            else:
                found = torch.where(mask, values, -torch.inf).amax(dim=0)
            joined.append(found.flatten())
        ended = (status >= FAILED).any(dim=0)
        joined.append(torch.where(ended, status.amax(dim=0), status.amin(dim=0)))
        return torch.cat(joined)

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        shapes = self._means + self._maxima
        parts = flat.split([torch.Size(shape).numel() for shape in shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))

    def unflatten(self, flat: Tensor) -> list[dict[str, Any]]:
        """Name the values of each layer.

        Args:
            flat: from ``measure`` or ``merge_ranks``, on the CPU.

        Returns:
            For each layer: status, tokens, columns (nan where the module has ``columns``), the
            statistics of
            a row by their names there, head_norms a list; kappa and worst, lists over (HEADS,
            BEFORE, AFTER) of the geometric mean and the largest.
        """
        spectra, rank, per_head, columns, worst, max_logit, status = self._split(flat)
        layers = []
        split = zip(per_head.split(self.heads, dim=1), max_logit.split(self.heads))
        for layer, ((entropy, prob_norm, head_norm), logits) in enumerate(split):
            log_kappa, sigma_max, sigma_min, tokens = spectra[:, layer].unbind(dim=1)
            values = {
                "status": status[layer],
                "kappa": log_kappa.exp(),
                "worst": worst[:, layer],
                "tokens": tokens[HEADS],
                "columns": columns[layer],
                "sigma_max": sigma_max[HEADS],
                "sigma_min": sigma_min[HEADS],
                "entropy": entropy.mean(),
                "entropy_min": entropy.amin(),
                "max_logit": logits.amax(),
                "prob_norm": prob_norm.mean(),
                "head_norm": head_norm.mean(),
                "head_norms": head_norm,
                **dict(zip(_RANKS + _EXTRAS, rank[layer])),
            }
            layers.append({name: value.tolist() for name, value in values.items()})
        return layers


@dataclass(frozen=True)
class HostCopy:
    """A copy to the host that may still be under way.

    Attributes:
        host: valid once ``ready`` returned True or ``wait`` returned.
        event: recorded after the copy; None where nothing is to wait for.
    """

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


class SynchronousStream:
    """The CPU has no side stream: work is done when its call returns."""

    @contextmanager
    def after(self, _inputs: Sequence[Tensor]) -> Iterator[None]:
        """Work within the block."""
        yield

    def copy_to_host(self, values: Tensor) -> HostCopy:
        """Return the values themselves."""
        return HostCopy(values, None)


class SideStream:
    """A CUDA stream for work that the training step does not wait for.

    Args:
        device: of the stream.
    """

    def __init__(self, device: torch.device):
        self.device = device
        # The lowest priority there is, which the default stream has too: never before the step.
        self.stream = torch.cuda.Stream(device, priority=0)

    @contextmanager
    def after(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Enqueue what the block does here, after all that the current stream has been given.

        Args:
            inputs: tensors that the current stream made and the block reads.
        """
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


def row(
    step: int,
    name: str,
    layer: LayerSizes,
    values: dict[str, Any],
    dtype: torch.dtype,
    source: str,
    head_report: bool = False,
) -> dict[str, Any]:
    """Return the row of one layer and step, as ``KappaMonitor`` documents it."""
    heads, head_dim, columns = layer
    resolved = math.isfinite(values["worst"][HEADS])
    limit = 4 / torch.finfo(dtype).eps
    reason = _REASONS.get(values["status"])
    if columns is not None and values["status"] == NOT_RUN:
        reason = "not run"
    tokens = places = gaussian = None
    if values["status"] == MEASURED:
        tokens = round(values["tokens"])
        places = round(values["columns"]) if columns is None else columns(tokens)
        gaussian = _finite(gaussian_condition_number(tokens, heads * head_dim))
        if not resolved:
            reason = "not resolved" if math.isfinite(values["sigma_max"]) else "not finite"

    def near_skip(matrix: int) -> float | None:
        return values["kappa"][matrix] if values["worst"][matrix] <= limit else None

    return {
        "step": step,
        "layer": name,
        "kappa": values["kappa"][HEADS] if resolved else None,
        "reason": reason,
        "kappa_gaussian": gaussian,
        "resolved": resolved,
        **{key: _finite(values[key]) for key in _COPIED},
        "head_norms": [_finite(norm) for norm in values["head_norms"]],
        "kappa_to_rank": _finite(math.exp(values["log_kappa_to_rank"])),
        "kappa_before_skip": near_skip(BEFORE),
        "kappa_after_skip": near_skip(AFTER),
        "heads": heads,
        "head_dim": head_dim,
        "tokens": tokens,
        "columns": places,
        "source": source,
        **(_head_report(values, heads, head_dim, tokens) if head_report else {}),
    }


def _head_report(
    values: dict[str, Any], heads: int, head_dim: int, tokens: int | None
) -> dict[str, float | None]:
    found = {name: _finite(values[name]) for name in ("head_correlation", "isotropy", "mean_share")}
    if heads == 1:
        found["head_correlation"] = None
    known = tokens is not None
    found["head_correlation_gaussian"] = head_dim / (tokens + head_dim) if known else None
    found["isotropy_gaussian"] = (tokens - 1) / (tokens + head_dim) if known else None
    return found


def _finite(value: float) -> float | None:
    # JSON has no infinity and no nan.
    return value if math.isfinite(value) else None
