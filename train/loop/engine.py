"""Start a run from the command line."""

import atexit
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from train.config import flags
from train.config.flags import Settings
from train.data.loader import DataError, TooManyBadSamplesError
from train.loop import Task, parallel
from train.loop.interrupt import ignore_signals
from train.loop.setup import set_up
from train.loop.train import DivergedError, train

MakeTask = Callable[[Any], tuple[Task, Settings]]


def main(program: str, settings: Settings, make_task: MakeTask) -> None:
    """Run a script; an error in what the user gave is one line.

    Args:
        program: name of the script, for messages.
        settings: from the command line.
        make_task: returns the task, and the settings with every value filled in.
    """
    with ExitStack() as closing:
        with flags.one_line_errors(program):
            world = closing.enter_context(parallel.world(settings.timeout))
            task, settings = make_task(settings)
            run = set_up(task, settings, world, closing)
        try:
            if run is not None:
                train(run)
        except (DivergedError, TooManyBadSamplesError) as error:
            flags.stop(program, error)
        except DataError as error:
            # Raised only on the ranks that were to have these items.
            flags.stop(program, error, every_rank=True)
        atexit.register(ignore_signals)
