"""Score held-out items so that each readable one counts once, on any number of ranks."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch import distributed as dist

from leaner_kernels.monitor import reshard
from train.data.loader import BadSamples, DataSet, TooManyBadSamplesError, loading
from train.data.sampler import held_out_share
from train.loop import Task
from train.loop.parallel import DistributedContext


@torch.no_grad()
def score(
    task: Task,
    model: nn.Module,
    data: DataSet,
    world: DistributedContext,
    *,
    batch: int,
    workers: int,
    bad_samples: BadSamples,
    before_batch: Callable[[], None],
) -> dict[str, float]:
    """Return the means of the task's scores, and scores derived from them. Collective.

    Args:
        task: what to score.
        model: sharded or not.
        data: the items.
        world: the processes.
        batch: items of a forward on one rank.
        workers: processes per rank that prepare them.
        bad_samples: called with the items that cannot be read, which do not count.
        before_batch: called before each batch on every rank, in step; its exception ends the
            evaluation.

    Raises:
        TooManyBadSamplesError: more items than allowed cannot be read, or none of these can.
    """
    share = held_out_share(len(data), batch, rank=world.rank, ranks=world.size)
    wanted = [keys for keys, _ in share]
    sums: dict[str, Tensor] = {}
    scored = 0
    model.eval()
    try:
        with loading(data, wanted, workers=workers, device=world.device) as batches:
            for _, valid in share:
                before_batch()
                fetched = next(batches)
                bad_samples.note(fetched.bad_samples)
                replacements = {place for bad in fetched.bad_samples for place in bad.places}
                read = [place for place in range(valid) if place not in replacements]
                tensors = tuple(t.to(world.device, non_blocking=True) for t in fetched.tensors)
                for name, each in task.score(model, tensors).items():
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
    return means if task.derive is None else task.derive(means)
