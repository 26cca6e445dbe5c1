"""From captured heads to one packed tensor of measurements, with no value read by the host.

Sizes: L layers, S samples, N tokens, M columns, H heads of one layer, T heads of all layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leaner_kernels.kappa import condition_number, condition_report

# The matrices of a layer: its heads side by side, its output, and the output plus the stream.
HEADS, BEFORE, AFTER = range(3)
# What a layer's place in the packed status says: a row, a row without numbers, or of the whole step
# that measuring it raised, or that a rank left it.
MEASURED, NOT_RUN, CHANGED, REFUSED, FAILED, CANCELLED = map(float, range(6))


class Batch(NamedTuple):
    """Matrices of one shape, either all heads or none.

    Attributes:
        places: of each of the G matrices: (HEADS, BEFORE or AFTER; layer).
        a: (G, S, N, M), float32, or float64 of a model that is.
        lengths: (G, S), int32, rows that count; None where all do.
    """

    places: list[tuple[int, int]]
    a: Tensor
    lengths: Tensor | None


class Gathered(NamedTuple):
    """Copies of what the modules captured, which no later forward overwrites.

    Attributes:
        batches: the matrices, as few batches as shapes.
        per_head: (3, T), float32: entropy, prob_norm and head_norm, means over the batch.
        max_logit: (T,), float32, maxima over the batch.
        columns: keys of each layer's softmax, nan where the module knows.
    """

    batches: list[Batch]
    per_head: Tensor
    max_logit: Tensor
    columns: list[float]

    def tensors(self) -> list[Tensor]:
        """Return all of them."""
        batched = [t for batch in self.batches for t in (batch.a, batch.lengths) if t is not None]
        return [*batched, self.per_head, self.max_logit]


def gather(captured: Sequence[Any]) -> Gathered:
    """Copy the captures of all layers into batches of matrices of one shape.

    Args:
        captured: ``nn.Captured`` or ``watch.Call`` of each layer.

    Returns:
        ``Gathered``.
    """
    # Few launches: they are on the stream of the step.
    alike: dict[Any, list[int]] = {}
    for layer, c in enumerate(captured):
        kind = True, c.heads.shape, c.lengths is None, c.heads.dtype
        alike.setdefault(kind, []).append(layer)
        if c.stream is not None:
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
            after = before + torch.stack([captured[layer].stream for layer in layers])
            a = torch.cat([before, after])
            lengths = None if lengths is None else torch.cat([lengths, lengths])
        batches.append(Batch(places, a, lengths))
    statistics = [(c.entropy, c.prob_norm, c.head_norm) for c in captured]
    if len({c.entropy.shape[0] for c in captured}) == 1:
        per_head = torch.stack([torch.cat(each, dim=1) for each in zip(*statistics)]).mean(dim=1)
    else:
        per_head = torch.cat([torch.stack(each).mean(dim=1) for each in statistics], dim=1)
    columns = [float(getattr(c, "columns", torch.nan)) for c in captured]
    return Gathered(batches, per_head, torch.cat([c.max_logit for c in captured]), columns)


@dataclass(frozen=True)
class Layout:
    """Where each measurement lies in the packed tensor: first means over ranks, then maxima.

    Attributes:
        heads: number of heads of each layer.
    """

    heads: tuple[int, ...]

    @property
    def _means(self) -> list[tuple[int, ...]]:
        # log kappa, sigma_max, sigma_min and tokens; effective and stable rank; Gathered.per_head
        # and columns.
        layers = len(self.heads)
        return [(3, layers, 4), (layers, 2), (3, sum(self.heads)), (layers,)]

    @property
    def _maxima(self) -> list[tuple[int, ...]]:
        # kappa, inf where one was not resolved; max_logit; status.
        return [(3, len(self.heads)), (sum(self.heads),), (len(self.heads),)]

    def pack(self, gathered: Gathered) -> Tensor:
        """Measure every matrix.

        Returns:
            One axis, float64, on the device of the captures; nan and, for kappa, inf where a layer
            has no output and stream to measure.
        """
        num_layers, device = len(self.heads), gathered.per_head.device
        blank = torch.full((4,), torch.nan, dtype=torch.float64, device=device)
        spectra = {(m, layer): blank for m in range(3) for layer in range(num_layers)}
        unknown = torch.full((), torch.inf, dtype=torch.float64, device=device)
        worst = dict.fromkeys(spectra, unknown)
        rank: dict[int, Tensor] = {}
        for places, a, lengths in gathered.batches:
            if places[0][0] == HEADS:
                # All singular values: they cost more, and only the heads are reported in full.
                found = condition_report(a, lengths=lengths)
                both = torch.stack([found.effective_rank, found.stable_rank], dim=-1).mean(dim=1)
                rank.update(zip((layer for _, layer in places), both.unbind()))
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
            torch.stack([rank[layer] for layer in range(num_layers)]),
            gathered.per_head.double(),
            keys,
            torch.stack(list(worst.values())),
            gathered.max_logit.double(),
            torch.full((num_layers,), MEASURED, dtype=torch.float64, device=device),
        ]
        return torch.cat([part.flatten() for part in parts])

    def blank(self, status: Sequence[float], device: torch.device) -> Tensor:
        """Return what stands for ``pack`` where there is nothing to measure, with the reasons."""
        size = sum(torch.Size(shape).numel() for shape in self._means + self._maxima)
        # On the device: a copy from the host might wait for it.
        like = torch.full((size - len(status),), torch.nan, dtype=torch.float64, device=device)
        return torch.cat([like, *(like.new_full((1,), reason) for reason in status)])

    def of(self, layers: Sequence[int]) -> "Layout":
        """Return the layout of some of the layers."""
        return Layout(tuple(self.heads[layer] for layer in layers))

    def merge(self, pieces: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
        """Return the packed tensor of all layers.

        Args:
            pieces: layers, each in one of them, and their packed tensor by ``of``; on one device.
        """
        parts: dict[int, list[Tensor]] = {}
        for layers, packed in pieces:
            layout = self.of(layers)
            spectra, rank, per_head, columns, worst, max_logit, status = layout._split(packed)
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

    def join(self, ranks: Tensor) -> Tensor:
        """Return the packed tensor of all ranks, of those of each, (ranks, ...).

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

    def _split(self, packed: Tensor) -> tuple[Tensor, ...]:
        shapes = self._means + self._maxima
        parts = packed.split([torch.Size(shape).numel() for shape in shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))

    def unpack(self, packed: Tensor) -> list[dict[str, Any]]:
        """Name the values of each layer.

        Args:
            packed: from ``pack`` or ``join``, on the CPU.

        Returns:
            For each layer: status, tokens, columns (nan where the module knows), the statistics of
            a row by their names there, head_norms a list; kappa and worst, lists over (HEADS,
            BEFORE, AFTER) of the geometric mean and the largest.
        """
        spectra, rank, per_head, columns, worst, max_logit, status = self._split(packed)
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
                "effective_rank": rank[layer, 0],
                "stable_rank": rank[layer, 1],
            }
            layers.append({name: value.tolist() for name, value in values.items()})
        return layers
