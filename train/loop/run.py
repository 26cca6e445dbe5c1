"""One run: prepare it, train it, survive what happens meanwhile, sum it up."""

import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from train.checkpoint.folders import choose_folder, held, resume_of
from train.checkpoint.resume import check_that_it_fits
from train.checkpoint.save import Checkpoints, read_details
from train.config.flags import Settings
from train.data.bad_samples import FetchFailures
from train.data.order import Fetched, Order, Split, StreamOrder, loading, order_of, seed_of
from train.export import describe, export_all
from train.logs.alarms import Alarms
from train.logs.meter import Meter
from train.logs.report import Report, finite
from train.loop import determinism, parallel
from train.loop.budget import budget_of
from train.loop.evaluation import Evaluation, StoppedError
from train.loop.interrupt import Interrupt
from train.loop.kappa import Kappa
from train.loop.optimizer import Average, Best, first_beta, learning_rate, make_optimizer
from train.loop.parallel import World
from train.loop.task import Task
from train.loop.watchdog import Watchdog


class DivergedError(Exception):
    """The loss or the gradient is no longer finite, step after step."""


class Run:
    """One run: everything that lives while it trains.

    A step ends in this order: its row, a checkpoint if one is due, an evaluation if one is due. A
    checkpoint from before an evaluation holds the row as far as it is known; a resume evaluates
    first. So nothing is lost by what happens during an evaluation.

    Args:
        task: what to train.
        settings: how; all values filled in.
        world: the processes.
        closing: ends with the run; lets go of its folder.

    Raises:
        ValueError: settings that do not fit each other, the data or the checkpoint.
    """

    def __init__(self, task: Task, settings: Settings, world: World, closing: ExitStack):
        self.task, self.settings, self.world = task, settings, world
        self.bf16 = settings.precision == "bf16" or (
            settings.precision == "auto" and world.device.type == "cuda"
        )
        self.split = Split(settings.batch_size, world.size, settings.accum)
        self.steps_per_epoch = self._whole_batches(0, 0).steps_per_epoch
        self.budget = budget_of(
            settings, steps_per_epoch=self.steps_per_epoch, tokens_per_item=task.tokens_per_item
        )
        self.steps = self.budget.steps
        self.workers = settings.workers
        if self.workers is None:
            self.workers = min(8, (os.cpu_count() or 1) // world.local_size)
        self.folder = choose_folder(task.name, settings, world)
        self.resume = resume_of(settings, self.folder, world)
        if not settings.dry_run:
            closing.enter_context(held(self.folder, world))
        self.report = Report(self.folder, settings, is_main_process=world.rank == 0)
        self.report.plan(self._plan())
        if not settings.dry_run:
            self._build()

    def _order(self, first: int, last: int) -> Order | StreamOrder:
        if not self.settings.ramp:
            return self._whole_batches(first, last)
        # Steps of different sizes: the epoch is cut into passes, and a step takes some of them.
        one_pass = Split(self.split.micro_batch * self.world.size, self.world.size, 1)
        return self._batches(one_pass, *(self.budget.passes_before[step] for step in (first, last)))

    def _whole_batches(self, first: int, last: int) -> Order | StreamOrder:
        return self._batches(self.split, first, last)

    def _batches(self, split: Split, first: int, last: int) -> Order | StreamOrder:
        own = {"seed": self.settings.seed, "rank": self.world.rank, "repeats": self.task.repeats}
        return order_of(self.task.train, split, first=first, last=last, **own)

    def _plan(self) -> dict[str, Any]:
        held_out, params = self.task.held_out, self.task.facts["params"]
        return {
            **self.task.facts,
            "data": self.settings.data,
            f"training_{self.task.unit}": len(self.task.train),
            f"held-out_{self.task.unit}": 0 if held_out is None else len(held_out),
            "batch_size": f"{self.settings.batch_size} = {self.world.size} ranks x "
            f"{self.split.accum} passes x {self.split.micro_batch}",
            "steps": f"{self.steps:,} = {self.steps / self.steps_per_epoch:.4g} epochs",
            "device": _device_name(self.world.device),
            "precision": "bf16" if self.bf16 else "fp32",
            # Weight, gradient and two moments in float32; activations come on top.
            "model state": f"{16 * params / self.world.mesh.size(-1) / 1e6:.1f} MB per rank",
            "folder": self.folder,
        }

    def _build(self) -> None:
        settings = self.settings
        determinism.begin(settings, self.world)
        if self.world.device.type == "cuda":
            # Of an earlier run in this process.
            torch.cuda.reset_peak_memory_stats()
        self.model = parallel.shard(
            self.task.build,
            self.world,
            seed=settings.seed,
            bf16=self.bf16,
            recompute=settings.ac,
            compile=settings.compile,
        )
        self.optimizer = make_optimizer(
            self.model,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            betas=settings.betas,
            eps=settings.eps,
        )
        self.average = Average(self.model, settings.ema)
        self.best = Best(self.model, self.task.best_of)
        self.norm_buffers = parallel.norm_buffers(self.model)
        self.skipped = 0  # steps without a break until now
        self.kept = True  # whether the end of the run is on disk
        self.held_out: dict[str, float] = {}
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", self.world, keep=settings.keep, say=self.report.say
        )
        self.failures = FetchFailures(
            settings.bad_data_limit, self.world.agreement, self._report_failures
        )
        self.alarms = Alarms(settings)
        self.interrupt, self.watchdog = Interrupt(), Watchdog(settings.timeout, self.folder)
        self.evaluation = Evaluation(
            self.task,
            self.model,
            self.world,
            batch=self.split.micro_batch,
            workers=self.workers,
            failures=self.failures,
            between=self._between_batches,
        )
        self._resume()
        self.report.keep(self.task.files)
        self.kappa = Kappa(self.model, self.task, settings, self.world, self.report, self.alarms)

    def _resume(self) -> None:
        """Load the checkpoint asked for, if there is one, and take up the files of the run."""
        self.done, self.unfinished, self.resumed_at = 0, None, []
        # The newest step that a checkpoint of this folder was begun of.
        self.saved = None
        path = self.checkpoints.find(self.resume)
        if path is None:
            if self.task.start is not None:
                self.task.start(self.model)
                self.average.restart()
            self.report.open(0)
            self.report.begin_anew()
            return
        saved = read_details(path)
        check_that_it_fits(path, saved["settings"], self.settings)
        if saved["step"] > self.steps:
            raise ValueError(
                f"--resume {path} has done {saved['step']} steps: this run is of {self.steps}"
            )
        kept = self.average.weights | self.best.weights
        self.checkpoints.load(path, self.model, self.optimizer, kept)
        self.best.value = saved.get("best", self.best.value)
        self.skipped = saved.get("skipped", 0)
        self.failures.known = set(saved.get("bad_samples", ()))
        self.done, self.unfinished = saved["step"], saved.get("unfinished")
        self.resumed_at = [*saved.get("resumed_at", ()), self.done]
        if path.parent == self.checkpoints.folder:
            self.saved = self.done
        if self.unfinished is not None and not self._is_evaluated(self.done):
            # The run is to be longer than it was, and goes on without an evaluation here.
            self.report.open(self.done, known=self.unfinished)
            self.unfinished = None
        else:
            self.report.open(self.done, unfinished=self.unfinished)
        if self.report.is_main_process:
            last = [] if self.unfinished is None else [self.unfinished]
            self.alarms.replay(self.report.metrics.rows + last, self.report.kappa.rows)
        if self.done < self.steps:
            self.report.begin_anew()
        self.report.say(f"resumed from {path}")

    def train(self) -> dict[str, Any] | None:
        """Train to the last step or until a signal, and sum up.

        Returns:
            The summary, or None after a signal.

        Raises:
            DivergedError: too many steps in a row with a loss or gradient that is not finite.
            DataError: items that cannot be read.
        """
        with self.interrupt, self.watchdog:
            meter = Meter(self.world, flops_per_item=3 * self.task.flops_per_item, bf16=self.bf16)
            try:
                self._train(meter)
                summary = self._summarize(meter)
            except StoppedError:
                self._say_where_it_stopped()
                return None
            finally:
                self.kappa.cancel()
            # One that came too late to stop this run still stops what would follow it.
            stopped = self._told_to_stop()
            if self.world.rank == 0 and not self.kept:
                raise SystemExit(f"finished at step {self.done}, but nothing of it could be saved")
            return None if stopped else summary

    def _train(self, meter: Meter) -> None:
        order = self._order(self.done, self.steps)
        with (
            self.checkpoints,
            self._loading(order) as batches,
            self.report.progress(self.done, self.steps),
        ):
            if self.unfinished is not None:
                self._finish_row(self.unfinished)
            while self.done < self.steps:
                try:
                    self.watchdog.progress("step", self.done)
                    self.kappa.begin(self.done)
                    with meter.step(self._items(self.done)) as timing:
                        row, stop = self._step(self.done, batches, timing)
                        self.kappa.end()
                except DivergedError:
                    self.kappa.flush()
                    raise
                self.done += 1
                self._end_step(row | timing, stop)

    def _end_step(self, row: dict[str, Any], stop: bool) -> None:
        """Record a step that is done, save and evaluate where it is time to."""
        done, settings = self.done, self.settings
        if self.task.tokens_per_item is not None:
            row["tokens_per_second"] = row["throughput"] * self.task.tokens_per_item
        if self.report.is_main_process:
            self.report.alarm(self.alarms.step(row))
        evaluate = self._is_evaluated(done)
        # While steps are skipped the weights are those of the checkpoint before, which may be the
        # last one that is any good.
        due = settings.ckpt_every and done % settings.ckpt_every == 0 and not self.skipped
        if not evaluate:
            self.report.step(row)
        if stop or due or done == self.steps:
            self._save(done, row if evaluate else None)
        if stop:
            raise StoppedError
        if evaluate:
            self._finish_row(row)

    def _finish_row(self, row: dict[str, Any]) -> None:
        """Evaluate after a step, and write its row."""
        try:
            self.held_out = self._evaluate()
        except StoppedError:
            if self.saved != self.done:
                self._save(self.done, row)
            raise
        self.report.step(row | self.held_out)

    def _between_batches(self) -> None:
        """Raise StoppedError on all ranks when one of them was told to stop."""
        self.watchdog.progress("evaluation after step", self.done)
        if self._told_to_stop():
            raise StoppedError

    def _told_to_stop(self) -> bool:
        """Return whether any rank was."""
        stop = self.interrupt.received is not None
        if self.world.size > 1:
            flag = torch.tensor(float(stop))
            dist.all_reduce(flag, group=self.world.agreement)
            stop = flag.item() > 0
        return stop

    def _report_failures(self, message: str) -> None:
        self.report.alarm([{"step": self.done, "kind": "data", "message": message}])

    def _items(self, step: int) -> int:
        return self.budget.passes_of(step) * self.split.micro_batch * self.world.size

    def _step(
        self, step: int, batches: Iterator[Fetched], timing: dict[str, float]
    ) -> tuple[dict[str, Any], bool]:
        """Do one optimizer step; return its metrics, and whether any rank was told to stop."""
        settings, model, optimizer = self.settings, self.model, self.optimizer
        position, passes = self.budget.position(step), self.budget.passes_of(step)
        rate = learning_rate(
            position,
            self.steps,
            peak=settings.lr,
            warmup=settings.warmup,
            start=settings.warmup_lr,
            end=settings.min_lr,
            schedule=settings.schedule,
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
            if settings.cycle_momentum:
                beta = first_beta(position, self.steps, warmup=settings.warmup)
                group["betas"] = beta, settings.betas[1]
        norms = [buffer.clone() for buffer in self.norm_buffers]
        loss, penalties = torch.zeros(2, device=self.world.device)
        for micro in range(passes):
            waiting = time.perf_counter()
            batch, failures = next(batches)
            timing["data_wait"] += time.perf_counter() - waiting
            self.failures.note(failures)
            model.set_requires_gradient_sync(micro + 1 == passes)
            seed = seed_of(settings.seed, step, self.world.rank, micro)
            part = self.task.loss(model, self._on_device(batch), seed) / passes
            loss += part.detach()
            penalty = self.kappa.penalty()
            if penalty is not None:
                penalties += penalty.detach() / passes
                part = part + penalty / passes
            part.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad or math.inf)
        # The host waits for the device here, once, when all but the update is under way: a loss or
        # gradient that is not finite on any rank is known on all of them before it does harm.
        told = [float(self.interrupt.received is not None), float(self.failures.new)]
        shared = torch.stack([loss, penalties, *torch.tensor(told, device=loss.device)])
        dist.all_reduce(shared)
        loss, penalty, stop, new, norm = torch.stack([*shared, norm.full_tensor()]).tolist()
        loss /= self.world.size
        self.failures.share(new)
        row = {"step": step, "epoch": self._epochs_before(step), "loss": loss, "lr": rate}
        row["grad_norm"] = norm
        if settings.kappa_penalty:
            row["kappa_penalty"] = penalty / self.world.size
        if math.isfinite(loss) and math.isfinite(norm):
            self.skipped = 0
            optimizer.step()
            parallel.share_statistics(model, self.world)
            self.average.update()
        else:
            self._skip(row, norms)
        optimizer.zero_grad()
        return row, stop > 0

    def _skip(self, row: dict[str, Any], norms: list[Tensor]) -> None:
        """Leave a step without effect; batch norms are again as before it."""
        self.skipped += 1
        row["skipped"] = True
        for buffer, before in zip(self.norm_buffers, norms):
            buffer.copy_(before)
        if self.skipped > self.settings.skip_limit:
            raise DivergedError(
                f"step {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}: "
                f"{self.skipped} steps in a row not finite, --skip-limit allows "
                f"{self.settings.skip_limit}: stopped; a lower --lr or --clip-grad may help, and "
                "earlier checkpoints are untouched"
            )

    def _loading(self, batches: Iterable[list]) -> AbstractContextManager[Iterator[Fetched]]:
        return loading(
            self.task.train,
            batches,
            workers=self.workers,
            device=self.world.device,
            tolerant=True,
        )

    def _on_device(self, batch: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return tuple(t.to(self.world.device, non_blocking=True) for t in batch)

    def _epochs_before(self, step: int) -> float:
        return self.budget.passes_before[step] / (self.split.accum * self.steps_per_epoch)

    def _is_evaluated(self, done: int) -> bool:
        """Return whether an evaluation follows when so many steps are done."""
        if self.task.held_out is None:
            return False
        return done == self.steps or self._evaluation_is_due(done)

    def _evaluation_is_due(self, done: int) -> bool:
        every = self.settings.eval_every
        if not every:
            return False
        before, after = (self._epochs_before(step) / every for step in (done - 1, done))
        # As many whole multiples lie between, whatever the rounding of each.
        return math.floor(after + 1e-9) > math.floor(before + 1e-9)

    def _evaluate(self) -> dict[str, float]:
        """Return the scores of the held-out items; with an average of the weights, its too."""
        if self.task.held_out is None:
            return {}
        own = self.evaluation.score(self.task.held_out)
        scores = {f"held_out_{name}": value for name, value in own.items()}
        if self.average.weights:
            with self.average.in_place():
                averaged = self.evaluation.score(self.task.held_out)
            scores |= {f"held_out_ema_{name}": value for name, value in averaged.items()}
        self.best.offer(own)
        return scores

    def _test(self) -> dict[str, float]:
        """Return the scores of the test items, with the best weights if any were chosen."""
        if self.task.test is None:
            return {}
        with self.best.in_place():
            scores = self.evaluation.score(self.task.test)
        return {f"test_{name}": value for name, value in scores.items()}

    def _save(self, done: int, unfinished: dict[str, Any] | None) -> None:
        details: dict[str, Any] = {
            "settings": self.settings.as_json(),
            "skipped": self.skipped,
            "bad_samples": sorted(self.failures.known),
            "resumed_at": self.resumed_at,
            "unfinished": None if unfinished is None else finite(unfinished),
        }
        if self.best.weights:
            details["best"] = self.best.value
        kept = self.average.weights | self.best.weights
        self.watchdog.progress("checkpoint of step", done)
        # A resume starts after this step, and would never write them.
        self.kappa.flush()
        self.report.sync()
        self.checkpoints.save(done, self.model, self.optimizer, kept, details)
        self.saved = done

    def _say_where_it_stopped(self) -> None:
        cause = self.interrupt.received or "another rank's signal"
        if self.world.rank == 0 and self.checkpoints.saved_step != self.done:
            raise SystemExit(f"stopped at step {self.done} by {cause}, not saved")
        self.report.say(f"stopped at step {self.done} by {cause}; --resume auto continues")

    def _summarize(self, meter: Meter) -> dict[str, Any]:
        held_out = self.held_out or self._evaluate()
        self.kappa.probe(self.done)
        totals = meter.totals()
        if self.task.tokens_per_item is not None and totals["throughput"] is not None:
            totals["tokens_per_second"] = totals["throughput"] * self.task.tokens_per_item
        finished = {} if self.task.finish is None else self._finish()
        facts = {
            **self.task.facts,
            "data": self.settings.data,
            "steps": self.steps,
            "epochs": self._epochs_before(self.steps),
            "batch_size": self.settings.batch_size,
            "ranks": self.world.size,
            "device": _device_name(self.world.device),
            "precision": "bf16" if self.bf16 else "fp32",
            "torch": torch.__version__,
        }
        summary = facts | totals | {"unit": self.task.unit} | held_out | self._test() | finished
        summary |= {"bad_samples": len(self.failures.known), "resumed_at": self.resumed_at}
        kinds = {
            "model": {},
            "model_ema": self.average.weights,
            "model_best": {k.removeprefix(Best.PREFIX): v for k, v in self.best.weights.items()},
        }
        about = describe(self.settings.as_json(), self.steps)
        exported = export_all(self.model, self.folder, self.world, kinds, about, self.report.say)
        self.kept = exported or self.checkpoints.saved_step == self.done
        if self.kept:
            self.report.summarize(summary)
        return summary

    @torch.no_grad()
    def _finish(self) -> dict[str, Any]:
        self.model.eval()
        finished = self.task.finish(self.model)
        self.model.train()
        self.model.reshard()
        return finished


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads per rank"
