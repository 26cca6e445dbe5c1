"""Score the held-out items so that each readable one counts once, on any number of ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist

from leaner_kernels.monitor import reshard
from train.data.loader import BadSamples, DataSet, TooManyBadSamplesError, loading
from train.data.sampler import held_out_share
from train.loop import Task
from train.loop.parallel import World


@torch.no_grad()
def score(
    task: Task,
    model: nn.Module,
    data: DataSet,
    world: World,
    *,
    batch: int,
    workers: int,
    bad_samples: BadSamples,
    before_batch: Callable[[], None],
    keep: Callable[[dict[str, np.ndarray]], None] | None = None,
) -> dict[str, float]:
    """Return the means of the task's scores, and what it derives from them. Collective.

    Args:
        task: what to score.
        model: sharded or not.
        data: the items.
        world: the processes.
        batch: items of a forward on one rank.
        workers: processes per rank that prepare them.
        bad_samples: is passed the items that cannot be read; they do not count.
        keep: is passed, on every rank, the number of each item, and what ``task.kept`` names.
        before_batch: called before each batch on every rank, in step; what it raises ends this.

    Raises:
        TooManyBadSamplesError: more items than allowed cannot be read, or none of these can.
    """
    share = held_out_share(len(data), batch, rank=world.rank, ranks=world.size)
    wanted = [keys for keys, _ in share]
    sums: dict[str, Tensor] = {}
    scored = 0
    own: dict[str, list[Any]] = {name: [] for name in ("item", *task.kept)}
    model.eval()
    try:
        with loading(data, wanted, workers=workers, device=world.device) as batches:
            for keys, valid in share:
                before_batch()
                fetched = next(batches)
                bad_samples.note(fetched.bad_samples)
                replacements = {place for bad in fetched.bad_samples for place in bad.places}
                read = [place for place in range(valid) if place not in replacements]
                tensors = tuple(t.to(world.device, non_blocking=True) for t in fetched.tensors)
                own["item"] += [keys[place][1] for place in read] if task.kept else []
                for name, each in task.score(model, tensors).items():
                    if name in task.kept:
                        own[name] += each[read].tolist()
                        continue
                    counted = each[:valid] if len(read) == valid else each[read]
                    sums[name] = sums.get(name, 0) + counted.double().sum()
                scored += len(read)
    finally:
        model.train()
        reshard(model)
    found = bad_samples.take()
    counts = torch.tensor([scored, len(found)], dtype=torch.float64)
    total = torch.stack([*sums.values(), *counts.to(world.device)])
    dist.all_reduce(total)
    *totals, scored, new = total.tolist()
    bad_samples.share(new, found)
    if not scored:
        raise TooManyBadSamplesError("no held-out item can be read: check --data")
    means = {name: value / scored for name, value in zip(sums, totals)}
    measures = means if task.derive is None else task.derive(means)
    if task.kept:
        items = _gathered(own, world)
        if task.measure is not None:
            measures |= task.measure(items)
        if keep is not None:
            keep(items)
    return measures


def _gathered(own: dict[str, list[Any]], world: World) -> dict[str, np.ndarray]:
    """Return what all ranks have, in the order of the items."""
    every: list[Any] = [None] * world.size
    # Not the group that a checkpoint uses, which may be on its way.
    dist.all_gather_object(every, own, group=world.agreement)
    whole = {name: np.array([v for rank in every for v in rank[name]]) for name in own}
    order = whole["item"].argsort()
    return {name: values[order] for name, values in whole.items()}
