"""Run the training loop: step, row, checkpoint and evaluation, in this order.

A checkpoint from before an evaluation holds the incomplete row of its step, and a resumed run
evaluates first. So nothing is lost if the run ends during an evaluation.
"""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from leaner_kernels.monitor import reshard
from leaner_kernels.monitor.measurement import HostCopy, copy_to_host
from leaner_kernels.monitor.run_files import finite
from train.checkpoint.weights import about, export_weights, metadata
from train.data.loader import DataSet, Fetched, default_workers, loading
from train.data.sampler import seed_of
from train.logs.meter import Meter
from train.loop import evaluation, parallel
from train.loop.optimizer import clip, norm_of
from train.loop.schedule import first_beta, learning_rate
from train.loop.setup import Run
from train.loop.summary import summary_of

# Prefix of the scores of averaged weights.
_AVERAGED = "held_out_ema_"


class DivergedError(Exception):
    """The loss or the gradient was not finite in too many consecutive steps."""


class StoppedError(Exception):
    """A signal asks this rank or another to stop."""


def train(run: Run) -> None:
    """Train to the last step or until a signal, and sum up.

    Raises:
        DivergedError: too many steps in a row with a loss or gradient that is not finite.
        DataError: items that cannot be read.
    """
    with run.interrupt:
        bf16 = parallel.uses_bf16(run.settings.precision, run.world)
        meter = Meter(run.world, flops_per_item=3 * run.task.flops_per_item, bf16=bf16)
        try:
            held_out = train_steps(run, meter) or evaluate(run)
            finish(run, meter, held_out)
        except StoppedError:
            report_stop(run)
        finally:
            run.kappa.cancel()


@dataclass
class PendingMetrics:
    """A step whose values are being copied from the device.

    Attributes:
        row: the known part of its metrics.
        values: loss, gradient norm and kappa penalty, and with several ranks the number of ranks
            with a signal and of bad samples; all but the norm are sums over ranks.
        bad_samples: bad samples that this rank found.
        waiting: share of the time of the newest steps spent waiting for data.
    """

    row: dict[str, Any]
    values: HostCopy
    bad_samples: set[str]
    waiting: float = 0.0


def train_steps(run: Run, meter: Meter) -> dict[str, float]:
    """Run the remaining steps; return the held-out scores after the last, if any.

    The values of a step are read while the next one runs, so that the device stays busy. Before a
    checkpoint or an evaluation they are read at once.
    """
    settings, schedule, progress, report = run.settings, run.schedule, run.progress, run.report
    held_out: dict[str, float] = {}
    before: PendingMetrics | None = None
    first = progress.step
    loader = loading(
        run.task.train,
        schedule.sampler(progress.step, schedule.steps),
        workers=data_workers(run),
        device=run.world.device,
    )
    bar = report.progress(progress.step, schedule.steps, run.task.unit)
    with run.checkpointer, loader as batches, bar:
        if progress.unfinished is not None:
            held_out = evaluate_and_report(run, progress.unfinished)
        while progress.step < schedule.steps:
            step = progress.step
            # Kappa of the held-out items of --kappa-probe, and a sample of this step.
            run.kappa.begin(step)
            with meter.step(schedule.items(step)) as timing:
                newest = optimizer_step(run, batches, timing)
                stop = before is not None and log_metrics(run, before)
                run.kappa.end()
            progress.step = done = step + 1
            if step == first and settings.ckpt_every:
                # The state now has its final size, and the next steps hide the allocation.
                run.checkpointer.prepare(run.model, run.optimizer, run.average.weights)
            newest.row |= timing
            newest.waiting = meter.waiting
            if run.task.tokens_per_item is not None:
                newest.row["tokens_per_second"] = timing["throughput"] * run.task.tokens_per_item
            # With one process, a signal takes effect at once.
            stop |= run.world.size == 1 and run.interrupt.received is not None

            evaluation_is_due = schedule.evaluation_is_due(done)
            every = settings.ckpt_every
            checkpoint_is_due = (every and done % every == 0) or done == schedule.steps
            if not (stop or checkpoint_is_due or evaluation_is_due):
                before = newest
                continue
            before = None
            stop |= log_metrics(run, newest, unfinished=evaluation_is_due)
            # While steps are skipped, the weights do not change, and the previous checkpoint may be
            # the last good one.
            good = not progress.skipped or done == schedule.steps
            if stop or (checkpoint_is_due and good):
                save(run, newest.row if evaluation_is_due else None)
            if stop:
                raise StoppedError
            if evaluation_is_due:
                held_out = evaluate_and_report(run, newest.row)
    return held_out


def optimizer_step(
    run: Run, batches: Iterator[Fetched], timing: dict[str, float]
) -> PendingMetrics:
    """Run an optimizer step; the host waits only for data, never for the device.

    If the loss or gradient is not finite on any rank, nothing changes on any rank.

    Args:
        run: the run.
        batches: the next micro-batches.
        timing: the wait for data is added to its "data_wait".
    """
    task, settings, world, step = run.task, run.settings, run.world, run.progress.step
    optimizer, budget, norms = run.optimizer, run.schedule.budget, run.norms
    position, passes = budget.position(step), budget.passes_of(step)
    rate = learning_rate(
        position,
        budget.steps,
        peak=settings.lr,
        warmup=settings.warmup,
        start=settings.warmup_lr,
        end=settings.min_lr,
        schedule=settings.schedule,
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
        if settings.cycle_momentum:
            beta = first_beta(position, budget.steps, warmup=settings.warmup)
            group["betas"] = beta, settings.betas[1]
    norms_before = norms.copies()

    loss, penalties = torch.zeros(2, device=world.device)
    for micro, (batch, share) in enumerate(micro_batches(run, batches, passes, timing)):
        with run.passes.one(last=micro + 1 == passes):
            seed = seed_of(settings.seed, step, world.rank, micro)
            part = task.loss(run.passes.called, batch, seed) * share
            loss += part.detach()
            penalty = run.kappa.penalty()
            if penalty is not None:
                penalties += penalty.detach() / passes
                part = part + penalty / passes
            part.backward()
    grads = optimizer.take_gradients()

    bad_samples = run.bad_samples.take()
    values = torch.stack([loss, norm_of(grads), penalties])
    if world.size > 1:
        flags = [float(run.interrupt.received is not None), float(len(bad_samples))]
        values = run.passes.sum_over_ranks(values, flags)
    skipped = ~values[:2].isfinite().all()
    if settings.clip_grad:
        clip(grads, values[1], settings.clip_grad)
    optimizer.found_inf = skipped.float()
    optimizer.step()
    run.kappa.clip(skipped)
    norms.share(world)
    norms.restore(norms_before, skipped)
    run.average.update(optimizer.found_inf)
    optimizer.zero_grad()
    row = {"step": step, "epoch": run.schedule.epochs_before(step), "loss": math.nan, "lr": rate}
    row["grad_norm"] = math.nan
    return PendingMetrics(row, copy_to_host(values), bad_samples)


def log_metrics(run: Run, pending: PendingMetrics, *, unfinished: bool = False) -> bool:
    """Read the values of a step, complete its row, and write it unless it is ``unfinished``.

    Collective.

    Returns:
        Whether a rank must stop.

    Raises:
        DivergedError: if more steps than allowed were not finite.
        TooManyBadSamplesError: more items than allowed cannot be read.
    """
    row, size = pending.row, run.world.size
    pending.values.wait()
    loss, norm, penalty, *flags = pending.values.host.tolist()
    stop, new = flags or (0.0, float(len(pending.bad_samples)))
    run.progress.metrics_step = row["step"]
    run.bad_samples.share(new, pending.bad_samples)
    row |= {"loss": loss / size, "grad_norm": norm}
    if run.settings.kappa_penalty:
        row["kappa_penalty"] = penalty / size
    if math.isfinite(loss) and math.isfinite(norm):
        run.progress.skipped = 0
    else:
        run.progress.skipped += 1
        row["skipped"] = True
    if run.report.is_main_process:
        run.report.alarm(run.alarms.step(row))
    diverged = run.progress.skipped > run.settings.skip_limit
    if diverged or not unfinished:
        run.report.step(row, pending.waiting)
    if diverged:
        # Kappa of the last steps may still be on its way.
        run.kappa.flush()
        raise DivergedError(
            f"step {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}: "
            f"{run.progress.skipped} steps in a row were not finite, --skip-limit allows "
            f"{run.settings.skip_limit}: try a lower --lr or --clip-grad; earlier checkpoints are "
            "untouched"
        )
    return stop > 0


def micro_batches(
    run: Run, batches: Iterator[Fetched], passes: int, timing: dict[str, float]
) -> Iterator[tuple[tuple[Tensor, ...], Tensor | float]]:
    """Yield the micro-batches of a step on the device, and the factor of each one's loss.

    The sum of a rank's products, averaged over ranks, is then the mean over all terms. With
    ``task.weight`` all micro-batches of the step are fetched before the first is used.
    """

    def fetch() -> tuple[Tensor, ...]:
        waiting = time.perf_counter()
        batch, bad_samples = next(batches)
        timing["data_wait"] += time.perf_counter() - waiting
        run.bad_samples.note(bad_samples)
        return tuple(t.to(run.world.device, non_blocking=True) for t in batch)

    if run.task.weight is None:
        for _ in range(passes):
            yield fetch(), 1 / passes
        return
    fetched = [fetch() for _ in range(passes)]
    weights = torch.stack([run.task.weight(batch) for batch in fetched]).float()
    total = weights.sum()
    if run.world.size > 1:
        dist.all_reduce(total)
    yield from zip(fetched, weights * run.world.size / total.clamp(min=torch.finfo().tiny))


def evaluate_and_report(run: Run, row: dict[str, Any]) -> dict[str, float]:
    """Evaluate after a step, write its row, and return the scores."""
    try:
        held_out = evaluate(run)
    except StoppedError:
        if run.checkpointer.begun_step != run.progress.step:
            save(run, row)
        raise
    run.report.step(row | held_out)
    return held_out


def evaluate(run: Run) -> dict[str, float]:
    """Return the scores of the held-out items, also with averaged weights if there are any."""
    data = run.task.held_out
    if data is None:
        return {}
    run.progress.metrics_step = run.progress.step
    own = score(run, data)
    scores = {f"held_out_{name}": value for name, value in own.items()}
    if run.average.weights:
        with run.average.in_place():
            averaged = score(run, data)
        scores |= {f"held_out_ema_{name}": value for name, value in averaged.items()}
    save_if_best(
        run, {name: value for name, value in scores.items() if not name.startswith(_AVERAGED)}
    )
    return scores


def save_if_best(run: Run, scores: dict[str, float]) -> None:
    """Write the weights as the best ones if their scores are the best so far."""
    if run.best.is_beaten_by(scores):
        step = run.progress.step - 1  # the step of the row with these scores
        run.best.keep(step, scores, metadata_of(run, step, scores))


def score(run: Run, data: DataSet) -> dict[str, float]:
    """Return the scores of a data set; raises StoppedError on all ranks when one must stop."""
    return evaluation.score(
        run.task,
        run.model,
        data,
        run.world,
        batch=run.schedule.batch_split.micro_batch,
        workers=data_workers(run),
        bad_samples=run.bad_samples,
        before_batch=partial(raise_if_stopped, run),
    )


def raise_if_stopped(run: Run) -> None:
    """Raise StoppedError on all ranks when one of them must stop."""
    if any_rank_must_stop(run):
        raise StoppedError


def any_rank_must_stop(run: Run) -> bool:
    """Return whether any rank has received a signal. Collective."""
    stop = run.interrupt.received is not None
    if run.world.size > 1:
        flag = torch.tensor(float(stop))
        dist.all_reduce(flag, group=run.world.agreement)
        stop = flag.item() > 0
    return stop


def save(run: Run, unfinished: dict[str, Any] | None) -> None:
    """Save a checkpoint; ``unfinished`` is the row of a step that has not been evaluated yet."""
    progress = run.progress
    train_state: dict[str, Any] = {
        "settings": run.settings.as_json(),
        "skipped": progress.skipped,
        "bad_samples": sorted(run.bad_samples.messages),
        "resumed_at": progress.resumed_at,
        "unfinished": None if unfinished is None else finite(unfinished),
        "about": about(run.task),
        "identity": dict(run.task.identity),
    }
    # A resumed run starts after this step, and would never write them.
    run.kappa.flush()
    run.report.sync()
    run.checkpointer.save(progress.step, run.model, run.optimizer, run.average.weights, train_state)


def report_stop(run: Run) -> None:
    """Print where a signal stopped the run; raise SystemExit if that step is not saved."""
    step = run.progress.step
    cause = run.interrupt.received or "another rank's signal"
    if run.report.is_main_process and run.checkpointer.saved_step != step:
        raise SystemExit(f"stopped at step {step} by {cause}; that step is not saved")
    run.report.log(f"stopped at step {step} by {cause}; --resume auto continues")


def finish(run: Run, meter: Meter, held_out: dict[str, float]) -> None:
    """Test and export the weights, and summarize; raise SystemExit if nothing could be saved."""
    task, model = run.task, run.model
    run.kappa.probe(run.progress.step)
    totals = meter.totals()
    finished: dict[str, Any] = {}
    if task.finish is not None:
        model.eval()
        with torch.no_grad():
            finished = task.finish(model)
        model.train()
        reshard(model)
    test: dict[str, float] = {}
    if task.test is not None:
        best = run.best
        with best.in_place():
            test = {f"test_{name}": value for name, value in score(run, task.test).items()}
            if best.step is not None:
                best.keep(best.step, best.scores, metadata_of(run, best.step, best.scores | test))
    summary = summary_of(run, totals, held_out, test, finished)
    exported = export(run, held_out, test)
    is_saved = exported or run.checkpointer.saved_step == run.progress.step
    if is_saved:
        run.report.summarize(summary)
        if run.best.step is not None:
            reached = _reached(run.best.step, run.best.scores)
            run.report.log(f"best weights ({run.best.path.name}): {reached}")
        last = _reached(run.progress.step - 1, held_out)
        run.report.log(f"last weights (model.safetensors): {last}")
    elif run.report.is_main_process:
        step = run.progress.step
        raise SystemExit(
            f"finished at step {step}, but neither weights nor a checkpoint could be saved"
        )


def _reached(step: int, held_out: dict[str, float]) -> str:
    loss, accuracy = (held_out.get(f"held_out_{name}") for name in ("loss", "accuracy"))
    said = f"step {step}" if loss is None else f"step {step}, held-out loss {loss:.4g}"
    return said if accuracy is None else f"{said}, accuracy {accuracy:.1%}"


def export(run: Run, held_out: dict[str, float], test: dict[str, float]) -> bool:
    """Write the last weights and their average; return whether all are on disk."""
    # Store the scores of each file's own weights; if there are best weights, only they were tested.
    own = {name: value for name, value in held_out.items() if not name.startswith(_AVERAGED)}
    averaged = {n.replace("_ema_", "_"): v for n, v in held_out.items() if n.startswith(_AVERAGED)}
    files = {"model": own if run.best.step is not None else own | test}
    if run.average.weights:
        files["model_ema"] = averaged
    whole = True
    for name, scores in files.items():
        try:
            with run.average.in_place() if name == "model_ema" else nullcontext():
                path = run.report.folder / f"{name}.safetensors"
                export_weights(run.model, path, metadata_of(run, run.progress.step - 1, scores))
        except OSError as error:
            run.report.log(f"weights not exported: {error}")
            whole = False
    return whole


def metadata_of(run: Run, step: int, scores: dict[str, float]) -> dict[str, str]:
    """Return the metadata of a file of the weights after a step."""
    tokenizer = run.task.files.get("tokenizer.json")
    return metadata(run.settings.as_json(), step, about(run.task), tokenizer, scores)


def data_workers(run: Run) -> int:
    """Return the number of data workers of this rank."""
    workers = run.settings.workers
    return default_workers(run.world.local_size) if workers is None else workers
