"""The loop: prepare a run, train it, sum it up. A script brings a ``Task``; the rest is here."""

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist

from leaner_kernels import KappaMonitor
from train import flags, parallel
from train.budget import budget_of
from train.checkpoint import Checkpoints, read_details
from train.data import (
    DataError,
    DataSet,
    DataSetInTurn,
    HeldOutTurns,
    Order,
    Split,
    Turns,
    held_out_share,
    loading,
    order_of,
    seed_of,
)
from train.flags import Settings
from train.folders import choose_folder
from train.interrupt import Interrupt
from train.meter import Meter
from train.optimizer import Average, Best, first_beta, learning_rate, make_optimizer
from train.parallel import World
from train.report import Report
from train.task import Task

# What a resumed run must share with the one that was saved: the tensors' shapes, and which items
# a step takes.
_SAME_AFTER_RESUME = (
    *("model", "heads", "depth", "head_dim", "mlp_ratio"),
    *("data", "batch_size", "ramp", "seed", "ema"),
)
# Steps of different sizes: which items one takes follows from the length of the run too.
_SAME_IN_A_RAMP = ("accum", "epochs", "tokens")


class DivergedError(Exception):
    """The loss or the gradient is no longer finite."""


MakeTask = Callable[[Any], tuple[Task, Settings]]


def main(program: str, settings: Settings, make_task: MakeTask) -> None:
    """Run a script; an error in what the user gave is one line.

    Args:
        program: name of the script, for messages.
        settings: from the command line.
        make_task: returns the task, and the settings with every value filled in.
    """
    with ExitStack() as stack:
        with flags.one_line_errors(program):
            world = stack.enter_context(parallel.world())
        _run(program, settings, make_task, world)


def several(
    program: str,
    runs: Mapping[str, Settings],
    make_task: MakeTask,
    *,
    name: str,
    sum_up: Callable[[dict[str, dict[str, Any]], Path], None],
) -> None:
    """Do several runs of a script one after another, each in a folder of its own.

    A run that is already finished there, as ``--resume auto`` may find, is not repeated.

    Args:
        program: name of the script, for messages.
        runs: settings of each by the name of its folder; all with the same ``out`` and ``resume``.
        make_task: as in ``main``.
        name: of the whole, for its folder where no ``out`` is given.
        sum_up: called on rank 0 with the summary of each run and the folder of all when the last
            is over; not after a signal.
    """
    summaries: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        with flags.one_line_errors(program):
            world = stack.enter_context(parallel.world())
            common = next(iter(runs.values()))
            parent = choose_folder(name, common, world)
        for part, settings in runs.items():
            settings = replace(settings, out=str(parent / part))
            done = _run(program, settings, make_task, world, again=False)
            if done is None:
                return
            summaries[part] = done
        if world.rank == 0 and not common.dry_run:
            sum_up(summaries, parent)


def _run(
    program: str, settings: Settings, make_task: MakeTask, world: World, *, again: bool = True
) -> dict[str, Any] | None:
    """Do one run and return its summary: empty for a dry run, None where a signal ended it.

    Unless ``again``, one that ``--resume auto`` finds finished only gives its summary.
    """
    with flags.one_line_errors(program):
        task, settings = make_task(settings)
        if not again and settings.resume == "auto":
            done = _finished(settings)
            if done is not None:
                return done
        run = Run(task, settings, world)
    if settings.dry_run:
        return {}
    try:
        return run.train()
    except DivergedError as error:
        flags.stop(program, error)
    except DataError as error:
        # Only the ranks that were to have these items know of it.
        flags.stop(program, error, every_rank=True)


def _finished(settings: Settings) -> dict[str, Any] | None:
    """Return the summary of a run that was as long, of the same model on the same data."""
    try:
        done = json.loads((Path(settings.out) / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    now = json.loads(json.dumps(settings.as_json()))
    same = (*flags.BUDGETS, *_SAME_AFTER_RESUME, *settings.SAME_AFTER_RESUME)
    return done if all(done["settings"].get(name) == now[name] for name in same) else None


class Run:
    """One run: everything that lives while it trains.

    Args:
        task: what to train.
        settings: how; all values filled in.
        world: the processes.

    Raises:
        ValueError: settings that do not fit each other, the data or the checkpoint.
    """

    def __init__(self, task: Task, settings: Settings, world: World):
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
        self.report = Report(self.folder, settings, speaks=world.rank == 0)
        self.report.plan(self._plan())
        if not settings.dry_run:
            self._build()

    def _order(self, first: int, last: int) -> Order | Turns:
        if not self.settings.ramp:
            return self._whole_batches(first, last)
        # Steps of different sizes: the epoch is cut into passes, and a step takes some of them.
        one_pass = Split(self.split.micro_batch * self.world.size, self.world.size, 1)
        return self._batches(one_pass, *(self.budget.passes_before[step] for step in (first, last)))

    def _whole_batches(self, first: int, last: int) -> Order | Turns:
        return self._batches(self.split, first, last)

    def _batches(self, split: Split, first: int, last: int) -> Order | Turns:
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
        if settings.deterministic:
            # cuBLAS reads this when it is first used.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        # For what a model or data set draws besides, such as dropout: every rank differs.
        own_seed = seed_of(settings.seed, self.world.rank)
        torch.manual_seed(own_seed)
        random.seed(own_seed)
        np.random.seed(own_seed % 2**32)
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
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", self.world, keep=settings.keep, say=self.report.say
        )
        self.first = self._resume()
        self.report.open(self.first)
        self.report.keep(self.task.files)
        self.monitor = None
        if settings.kappa_every:
            writers = [w for w in (self.report.tensorboard, self.report.wandb) if w is not None]
            self.monitor = KappaMonitor(self.model, every=settings.kappa_every, writer=writers)

    def _resume(self) -> int:
        """Load the checkpoint asked for, if there is one, and return the step to start with."""
        path = self.checkpoints.find(self.settings.resume)
        if path is None:
            if self.task.start is not None:
                self.task.start(self.model)
                self.average.restart()
            return 0
        saved = read_details(path)
        now = json.loads(json.dumps(self.settings.as_json()))
        same = _SAME_AFTER_RESUME + self.settings.SAME_AFTER_RESUME
        if self.settings.ramp:
            same += _SAME_IN_A_RAMP
        for name in same:
            if name not in saved["settings"]:  # saved before there was such a flag
                continue
            if saved["settings"][name] != now[name]:
                raise ValueError(
                    f"--resume {path} needs --{name.replace('_', '-')} "
                    f"{saved['settings'][name]} as it was saved with, got {now[name]}"
                )
        kept = self.average.weights | self.best.weights
        self.checkpoints.load(path, self.model, self.optimizer, kept)
        self.best.value = saved.get("best", self.best.value)
        self.report.say(f"resumed from {path}")
        return saved["step"]

    def train(self) -> dict[str, Any] | None:
        """Train to the last step or until a signal, and sum up.

        Returns:
            The summary, or None after a signal.

        Raises:
            DivergedError: a loss or gradient that is not finite. No checkpoint holds such weights.
            DataError: items that cannot be read.
        """
        order = self._order(self.first, self.steps)
        meter = Meter(self.world, flops_per_item=3 * self.task.flops_per_item, bf16=self.bf16)
        held_out: dict[str, float] = {}
        done, stop = self.first, False
        chooses = self.task.best_of is not None
        if chooses and 0 < done < self.steps and self._evaluation_is_due(done):
            # The signal that stopped the run may have come before it.
            self._evaluate()
        with (
            Interrupt() as interrupt,
            self._loading(self.task.train, order) as batches,
            self.report.progress(self.first, self.steps),
            self.checkpoints,
        ):
            while done < self.steps and not stop:
                try:
                    with meter.step(self._items(done)) as timing:
                        row, stop = self._step(done, batches, timing, interrupt)
                        if self.monitor:
                            self.report.kappa_rows(self.monitor.end())
                except DivergedError:
                    self._write_late_kappa()
                    raise
                done += 1
                if self.task.tokens_per_item is not None:
                    timing["tokens_per_second"] = timing["throughput"] * self.task.tokens_per_item
                if done == self.steps or (self._evaluation_is_due(done) and not stop):
                    held_out = self._evaluate()
                    row |= held_out
                self.report.step(row | timing)
                if stop or done == self.steps or _divides(self.settings.ckpt_every, done):
                    # A resume starts after this step, and would never write them.
                    self._write_late_kappa()
                    self._save(done)
        if done < self.steps:
            self._say_where_it_stopped(done, interrupt)
            return None
        return self._summarize(held_out or self._evaluate(), meter)

    def _items(self, step: int) -> int:
        return self.budget.passes_of(step) * self.split.micro_batch * self.world.size

    def _step(
        self, step: int, batches: Iterator, timing: dict[str, float], interrupt: Interrupt
    ) -> tuple[dict[str, float], bool]:
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
        if self.monitor:
            self.monitor.begin(step)
        loss = torch.zeros((), device=self.world.device)
        for micro in range(passes):
            waiting = time.perf_counter()
            batch = next(batches)
            timing["data_wait"] += time.perf_counter() - waiting
            model.set_requires_gradient_sync(micro + 1 == passes)
            seed = seed_of(settings.seed, step, self.world.rank, micro)
            part = self.task.loss(model, self._on_device(batch), seed) / passes
            part.backward()
            loss += part.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        parallel.share_statistics(model, self.world)
        self.average.update()
        # The host waits for the device here, once, when all of the step is under way; so bad
        # weights are noticed after they were made, but before anything saves them.
        stop = torch.tensor(float(interrupt.received is not None), device=self.world.device)
        shared = torch.stack([loss, stop])
        dist.all_reduce(shared)
        loss, stop, norm = torch.stack([*shared / self.world.size, norm.full_tensor()]).tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(
                f"step {step}: loss {loss}, gradient norm {norm}, no longer finite: stopped; a "
                "lower --lr or --clip-grad may help, and earlier checkpoints are untouched"
            )
        epoch = self._epochs_before(step)
        row = {"step": step, "epoch": epoch, "loss": loss, "lr": rate, "grad_norm": norm}
        return row, stop > 0

    def _loading(self, data: Any, batches: Iterable[list]) -> AbstractContextManager[Iterator]:
        return loading(data, batches, workers=self.workers, device=self.world.device)

    def _on_device(self, batch: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return tuple(t.to(self.world.device, non_blocking=True) for t in batch)

    def _epochs_before(self, step: int) -> float:
        return self.budget.passes_before[step] / (self.split.accum * self.steps_per_epoch)

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
        own = self._score(self.task.held_out)
        self.best.offer(own)
        scores = {f"held_out_{name}": value for name, value in own.items()}
        if self.average.weights:
            with self.average.in_place():
                averaged = self._score(self.task.held_out)
            scores |= {f"held_out_ema_{name}": value for name, value in averaged.items()}
        return scores

    def _test(self) -> dict[str, float]:
        """Return the scores of the test items, with the best weights if any were chosen."""
        if self.task.test is None:
            return {}
        with self.best.in_place():
            scores = self._score(self.task.test)
        return {f"test_{name}": value for name, value in scores.items()}

    @torch.no_grad()
    def _score(self, data: DataSet | DataSetInTurn) -> dict[str, float]:
        world = self.world
        share = held_out_share(len(data), self.split.micro_batch, rank=world.rank, ranks=world.size)
        self.model.eval()
        sums: dict[str, Tensor] = {}
        in_turn = hasattr(data, "in_turn")
        wanted = HeldOutTurns(data, share) if in_turn else [keys for keys, _ in share]
        with self._loading(data, wanted) as batches:
            for batch, (_, valid) in zip(batches, share):
                for name, each in self.task.score(self.model, self._on_device(batch)).items():
                    sums[name] = sums.get(name, 0) + each[:valid].double().sum()
        self.model.train()
        # Without a backward the root's parameters stay gathered: copies, which would go stale.
        self.model.reshard()
        total = torch.stack(list(sums.values()))
        dist.all_reduce(total)
        means = dict(zip(sums, (total / len(data)).tolist()))
        return means if self.task.derive is None else self.task.derive(means)

    def _write_late_kappa(self) -> None:
        """Write the rows of steps already done that are still on their way from the device."""
        if self.monitor:
            self.report.kappa_rows(self.monitor.flush())

    def _save(self, done: int) -> None:
        details: dict[str, Any] = {"settings": self.settings.as_json()}
        if self.best.weights:
            details["best"] = self.best.value
        kept = self.average.weights | self.best.weights
        self.checkpoints.save(done, self.model, self.optimizer, kept, details)

    def _say_where_it_stopped(self, done: int, interrupt: Interrupt) -> None:
        cause = interrupt.received or "another rank's signal"
        if self.world.rank == 0 and self.checkpoints.saved_step != done:
            raise SystemExit(f"stopped at step {done} by {cause}, not saved")
        self.report.say(f"stopped at step {done} by {cause}; --resume auto continues")

    def _summarize(self, held_out: dict[str, float], meter: Meter) -> dict[str, Any]:
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
        self.report.summarize(summary)
        return summary

    @torch.no_grad()
    def _finish(self) -> dict[str, Any]:
        self.model.eval()
        finished = self.task.finish(self.model)
        self.model.train()
        self.model.reshard()
        return finished


def _divides(every: int, done: int) -> bool:
    return every > 0 and done % every == 0


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads per rank"
