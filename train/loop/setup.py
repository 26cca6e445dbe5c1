"""Create the parts of a run in the order of their dependencies, and resume it."""

import os
import random
import shlex
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from train.checkpoint.best import BestWeights
from train.checkpoint.checkpointer import Checkpointer, read_train_state
from train.checkpoint.run_folder import (
    check_compatible,
    check_ranks_agree,
    choose_folder,
    lock_folder,
)
from train.config.flags import Settings
from train.data.loader import BadSamples
from train.data.sampler import seed_of
from train.logs.alarms import Alarms
from train.logs.report import Report
from train.loop import Task, parallel
from train.loop.interrupt import Interrupt
from train.loop.kappa import Kappa
from train.loop.optimizer import ShardAdamW, WeightAverage, make_optimizer
from train.loop.parallel import BatchNorms, DistributedContext, Passes
from train.loop.schedule import Schedule

# Numbers of GPUs that share the weights, for which a dry run predicts memory. Each of several
# machines of eight holds all weights.
GPUS = {"one_GPU": 1, "8_GPUs": 8, "64_GPUs_(8_x_8)": 8}
ROOM = 80 * 10**9  # memory of a GPU, if none is present


@dataclass
class Progress:
    """The progress of a run; with the tensors, the contents of a checkpoint.

    Attributes:
        step: optimizer steps done.
        metrics_step: step whose values were read last, or are being read.
        skipped: number of consecutive steps until now that were skipped.
        resumed_at: numbers of steps at which the run was resumed.
        unfinished: row of the newest step, if its evaluation is still due.
    """

    step: int = 0
    metrics_step: int = 0
    skipped: int = 0
    resumed_at: list[int] = field(default_factory=list)
    unfinished: dict[str, Any] | None = None


@dataclass(frozen=True)
class Run:
    """The parts of a run; only ``progress`` and the contents of the parts change."""

    task: Task
    settings: Settings
    world: DistributedContext
    schedule: Schedule
    model: nn.Module
    norms: BatchNorms
    passes: Passes
    optimizer: ShardAdamW
    average: WeightAverage
    best: BestWeights
    checkpointer: Checkpointer
    report: Report
    alarms: Alarms
    kappa: Kappa
    bad_samples: BadSamples
    interrupt: Interrupt
    progress: Progress


def set_up(
    task: Task, settings: Settings, world: DistributedContext, closing: ExitStack
) -> Run | None:
    """Show the plan, and create the parts of the run; return None after a dry run.

    Args:
        task: what to train.
        settings: how; all values filled in.
        world: the processes.
        closing: exit stack of the run; releases its folder and restores its process.

    Raises:
        ValueError: settings that do not fit each other, the data or the checkpoint.
    """
    check_ranks_agree(task.identity, world)
    schedule = Schedule(task, settings, world)
    folder = choose_folder(task.name, settings, world)
    if not settings.dry_run:
        closing.enter_context(lock_folder(folder, world))
    report = Report(folder, settings, is_main_process=world.rank == 0)
    plan = _plan(task, settings, world, schedule)
    if settings.dry_run and world.rank == 0:
        plan |= _memory(task, settings, world, schedule.batch_split.micro_batch)
    report.plan(plan | {"folder": folder})
    if settings.dry_run:
        filled = replace(settings, dry_run=False)
        report.log(f"as flags: {shlex.join(filled.as_flags())}")
        return None
    _seed(settings, world)
    if world.device.type == "cuda":
        # Of an earlier run in this process.
        torch.cuda.reset_peak_memory_stats()
    mode = parallel.data_parallel_mode(settings.shard, world)
    model = parallel.make_model(
        task.build,
        world,
        seed=settings.seed,
        bf16=parallel.uses_bf16(settings.precision, world),
        mode=mode,
        activation_checkpointing=settings.ac,
        compile=settings.compile,
    )
    if settings.compile:
        closing.enter_context(parallel.all_blocks_compiled(model))
    optimizer = make_optimizer(
        model,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        betas=settings.betas,
        eps=settings.eps,
    )
    norms = BatchNorms(model)
    average = WeightAverage(model, norms, settings.ema)
    best = BestWeights(model, folder, world, task.best_of, report.log)
    checkpointer = Checkpointer(folder / "checkpoints", world, keep=settings.keep, log=report.log)
    progress = Progress()

    def report_bad_sample(message: str) -> None:
        report.alarm([{"step": progress.metrics_step, "kind": "data", "message": message}])

    bad_samples = BadSamples(settings.bad_data_limit, world.agreement, report_bad_sample)
    alarms = Alarms(settings)
    interrupt = Interrupt()
    path = checkpointer.find(settings.resume)
    if path is None:
        if task.start is not None:
            task.start(model)
        average.restart()
        report.open(0)
        best.forget()
        report.begin_anew()
    else:
        saved = read_train_state(path)
        check_compatible(path, saved, settings, task.identity)
        if saved["step"] > schedule.steps:
            raise ValueError(
                f"--resume {path} must have at most the {schedule.steps} steps of this run, got "
                f"{saved['step']}"
            )
        checkpointer.load(path, model, optimizer, average.weights)
        best.take_up(path, saved["step"])
        bad_samples.messages = set(saved.get("bad_samples", ()))
        progress.step, progress.skipped = saved["step"], saved.get("skipped", 0)
        progress.resumed_at = [*saved.get("resumed_at", ()), progress.step]
        _take_up(saved.get("unfinished"), progress, schedule, report, alarms)
        report.log(f"resumed from {path}")
    report.keep(task.files)
    last = schedule.steps - 1
    kappa = Kappa(model, task, settings, world, report, alarms, last)
    return Run(
        passes=Passes(model, mode, world),
        norms=norms,
        task=task,
        settings=settings,
        world=world,
        schedule=schedule,
        model=model,
        optimizer=optimizer,
        average=average,
        best=best,
        checkpointer=checkpointer,
        report=report,
        alarms=alarms,
        kappa=kappa,
        bad_samples=bad_samples,
        interrupt=interrupt,
        progress=progress,
    )


def _take_up(
    unfinished: dict[str, Any] | None,
    progress: Progress,
    schedule: Schedule,
    report: Report,
    alarms: Alarms,
) -> None:
    """Continue the files of a run, and its alarms."""
    report.open(progress.step, last_again=unfinished is not None)
    last = [] if unfinished is None else [unfinished]
    if schedule.evaluation_is_due(progress.step):
        progress.unfinished = unfinished
    elif report.is_main_process:
        # The run has been extended, and continues without an evaluation here.
        report.metrics.append(last)
    if report.is_main_process:
        alarms.replay(report.metrics.rows + last, report.kappa.rows)
    if progress.step < schedule.steps:
        report.begin_anew()


def _plan(
    task: Task, settings: Settings, world: DistributedContext, schedule: Schedule
) -> dict[str, Any]:
    batch_split, steps = schedule.batch_split, schedule.steps
    return {
        **task.facts,
        "data": settings.data,
        f"training_{task.unit}": len(task.train),
        f"held-out_{task.unit}": 0 if task.held_out is None else len(task.held_out),
        "batch_size": f"{settings.batch_size} = {world.size} ranks x {batch_split.accum} passes x "
        f"{batch_split.micro_batch}",
        "steps": f"{steps:,} = {steps / schedule.steps_per_epoch:.4g} epochs",
        "device": parallel.device_name(world),
        "precision": "bf16" if parallel.uses_bf16(settings.precision, world) else "fp32",
        **_spread(settings, world, task.facts["params"]),
    }


def _spread(settings: Settings, world: DistributedContext, params: int) -> dict[str, Any]:
    """Return how and why the model is spread over ranks, and the size of a rank's part."""
    mode = parallel.data_parallel_mode(settings.shard, world)
    plain = "each rank has the whole model (DDP)" if world.size > 1 else "plain parameters"
    shown = f"FSDP2, {world.shape[-1]} shards" if mode == "fsdp" else plain
    asked = settings.shard != "auto"
    why = f"--shard {settings.shard}" if asked else f"{world.size} rank{'s'[: world.size > 1]}"
    shares = world.shape[-1] if mode == "fsdp" else 1
    return {
        "sharding": f"{shown}: {why}",
        # Weight, gradient and two moments in float32; activations come on top.
        "model state": f"{16 * params / shares / 1e6:.1f} MB per rank",
    }


def _memory(
    task: Task, settings: Settings, world: DistributedContext, batch: int
) -> dict[str, Any]:
    """Return the predicted memory of a step on GPUs, and whether it fits."""
    from models import memory  # imported late: only dry runs need it

    if settings.ac == "selective":
        return {"memory_of_GPUs": "not predicted with --ac selective"}
    bf16 = settings.precision != "fp32"
    try:
        peak = memory.predict(
            task.build,
            batch,
            precision="bf16" if bf16 else "fp32",
            recompute=settings.ac == "full",
        )
    except (ValueError, NotImplementedError) as error:
        return {"memory_of_GPUs": f"not predicted: {error}"}
    with torch.device("meta"):
        model = task.build()
    on_gpu = world.device.type == "cuda"
    room = torch.cuda.get_device_properties(world.device).total_memory if on_gpu else ROOM
    found = {}
    # Each of several machines holds a whole model, as in ``DistributedContext.shape``.
    for gpus, shards in GPUS.items():
        shards = 1 if settings.shard == "none" else shards
        taken = memory.sharded(peak, model, shards, bf16=bf16)
        if settings.ema:
            taken += 4 * model.num_params() // shards
        fits = "fits" if taken < room else "does not fit"
        said = f"{taken / 1e9:.1f} of {room / 1e9:.0f} GB, predicted: {fits}"
        found[f"memory_of_{gpus}"] = said
    return found


def _seed(settings: Settings, world: DistributedContext) -> None:
    """Seed the global generators, and request deterministic kernels if the settings do."""
    if settings.deterministic:
        # cuBLAS reads this when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # For other random draws, such as dropout: every rank differs.
    own_seed = seed_of(settings.seed, world.rank)
    torch.manual_seed(own_seed)
    random.seed(own_seed)
    np.random.seed(own_seed % 2**32)
