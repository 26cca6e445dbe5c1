"""Start a run from the command line, or from a notebook, whose process is left unchanged."""

import atexit
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from train.config import flags
from train.config.flags import Settings
from train.data.loader import DataError, TooManyBadSamplesError
from train.loop import Task, parallel
from train.loop.interrupt import ignore_signals, signals_ignored
from train.loop.setup import set_up
from train.loop.train import DivergedError, train

MakeTask = Callable[[Any], tuple[Task, Settings]]

# Environment variables that a run sets.
_VARIABLES = "CUBLAS_WORKSPACE_CONFIG", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@contextmanager
def restored() -> Iterator[None]:
    """Restore what a run changes in its process, even after an error; decorates a script's main.

    These are PyTorch's choice of deterministic kernels, the global random generators, warning
    filters, variables of the environment, output streams and the handler of SIGCHLD.
    """
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    streams = sys.stdout, sys.stderr
    encoding_errors = [getattr(stream, "errors", None) for stream in streams]
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    seed = torch.initial_seed()
    # Python can change handlers only in the main thread.
    in_main_thread = threading.current_thread() is threading.main_thread()
    on_child = signal.getsignal(signal.SIGCHLD)
    with warnings.catch_warnings():
        try:
            yield
        finally:
            for name, value in variables.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            _put_back_streams(streams, encoding_errors)
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            random.setstate(generators[0])
            np.random.set_state(generators[1])
            torch.set_rng_state(generators[2])
            if on_gpus is not None:
                torch.cuda.set_rng_state_all(on_gpus)
            elif torch.cuda.is_initialized():
                # On first use, PyTorch seeds a GPU with the seed of the CPU.
                torch.cuda.manual_seed_all(seed)
            if in_main_thread and on_child is not None:
                signal.signal(signal.SIGCHLD, on_child)


def _put_back_streams(streams: tuple[Any, Any], encoding_errors: list[str | None]) -> None:
    for name, stream, errors in zip(("stdout", "stderr"), streams, encoding_errors):
        now = getattr(sys, name)
        if now is stream and getattr(stream, "errors", None) == errors:
            continue
        now.flush()  # the stream of the run drops output that is no longer read
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)
        setattr(sys, name, stream)


def main(program: str, settings: Settings, make_task: MakeTask) -> None:
    """Run a script; errors in user input become one line.

    Args:
        program: name of the script, for messages.
        settings: from the command line.
        make_task: returns the task, and the settings with every value filled in.
    """
    with ExitStack() as last, ExitStack() as closing:
        with flags.one_line_errors(program):
            world = closing.enter_context(parallel.init_distributed(settings.timeout))
            task, settings = make_task(settings)
            run = set_up(task, settings, world, closing)
        try:
            if run is not None:
                train(run)
                last.enter_context(signals_ignored())
        except (DivergedError, TooManyBadSamplesError) as error:
            flags.stop(program, error)
        except DataError as error:
            # Raised only on the ranks that needed these items.
            flags.stop(program, error, every_rank=True)
        atexit.register(ignore_signals)
