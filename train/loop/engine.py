"""Start one run, or several one after another, from the command line."""

import atexit
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from train.checkpoint.run_folder import choose_folder, summary_if_finished
from train.config import flags
from train.config.flags import Settings
from train.data.loader import DataError, TooManyBadSamplesError
from train.loop import Task, parallel, summary
from train.loop.interrupt import ignore_signals
from train.loop.parallel import World
from train.loop.setup import set_up
from train.loop.train import DivergedError, train

MakeTask = Callable[[Any], tuple[Task, Settings]]


def main(program: str, settings: Settings, make_task: MakeTask) -> None:
    """Run a script, once or with several seeds; an error in what the user gave is one line.

    Args:
        program: name of the script, for messages.
        settings: from the command line.
        make_task: returns the task, and the settings with every value filled in.
    """
    if settings.seeds > 1:
        name = f"{settings.model or program.removesuffix('.py')}-seeds"
        seeds = range(settings.seed, settings.seed + settings.seeds)
        runs = {f"seed-{seed}": replace(settings, seed=seed) for seed in seeds}
        several(program, runs, make_task, name=name, sum_up=summary.sum_up)
        return
    with ExitStack() as stack:
        with flags.one_line_errors(program):
            world = stack.enter_context(parallel.world(_timeout(settings)))
        _run(program, settings, make_task, world)
        atexit.register(ignore_signals)


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
            common = next(iter(runs.values()))
            world = stack.enter_context(parallel.world(_timeout(common)))
            parent = choose_folder(name, common, world)
        for part, settings in runs.items():
            settings = replace(settings, out=str(parent / part))
            done = _run(program, settings, make_task, world, again=False)
            if done is None:
                return
            summaries[part] = done
        if world.rank == 0 and not common.dry_run:
            sum_up(summaries, parent)
        atexit.register(ignore_signals)


def _run(
    program: str,
    settings: Settings,
    make_task: MakeTask,
    world: World,
    *,
    again: bool = True,
) -> dict[str, Any] | None:
    """Do one run and return its summary: empty for a dry run, None where a signal ended it.

    Unless ``again``, one that ``--resume auto`` finds finished only gives its summary.
    """
    with ExitStack() as closing:
        with flags.one_line_errors(program):
            task, settings = make_task(settings)
            if not again and settings.resume == "auto":
                done = summary_if_finished(settings, task.identity, world)
                if done is not None:
                    return done
            run = set_up(task, settings, world, closing)
        if run is None:
            return {}
        try:
            return train(run)
        except (DivergedError, TooManyBadSamplesError) as error:
            flags.stop(program, error)
        except DataError as error:
            # Raised only on the ranks that were to have these items.
            flags.stop(program, error, every_rank=True)


def _timeout(settings: Settings) -> float:
    """Return how long one rank waits for another: longer than the watchdog, which reports more."""
    return settings.timeout + 60 if settings.timeout else 86_400.0
