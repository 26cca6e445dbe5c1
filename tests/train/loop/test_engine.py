"""A run in a notebook leaves its process as it was, and half an environment ends in one line."""

import io
import os
import random
import signal
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

from tests.train.image_files import photographs, write_folder
from tests.train.launch import TINY
from tests.train.trained import SMALL, letters
from train import bert, gpt, lra, vit
from train.loop import parallel, setup

QUICK = [*TINY, "--steps", 2]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
JOBS = ("SLURM_NTASKS", "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE")


def of_process() -> dict[str, Any]:
    """Return what a run might change in its process."""
    umask = os.umask(0)
    os.umask(umask)
    backends = torch.backends
    return {
        "environment": {n: v for n, v in os.environ.items() if n != "PYTEST_CURRENT_TEST"},
        "process": (os.getcwd(), umask, [*sys.argv], [*sys.path], sys.excepthook),
        "streams": (sys.stdout, sys.stderr, sys.stdout.errors, sys.stderr.errors),
        "signals": {n: signal.getsignal(n) for n in signal.valid_signals()},
        "warnings": [*warnings.filters],
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "backends": (
            *(backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
            *(backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32),
            torch.get_float32_matmul_precision(),
        ),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "modes": (torch.is_anomaly_enabled(), torch.is_grad_enabled()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch's generator": torch.get_rng_state().tolist(),
        "numpy's generator": str(np.random.get_state()),
        "python's generator": random.getstate(),
        "process groups": dist.is_initialized(),
        "compiler": torch._dynamo.config.recompile_limit,
    }


def assert_as_it_was(before: dict[str, Any]) -> None:
    after = of_process()
    assert [name for name, value in before.items() if after[name] != value] == []


@pytest.fixture
def before(monkeypatch, tmp_path) -> dict[str, Any]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *LAUNCHER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.use_deterministic_algorithms(False)
    # A run seeds all of them with 0.
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    return of_process()


def run(script, out, *args: object) -> None:
    script.main([*map(str, args), "--out", str(out)])


@pytest.mark.parametrize("script", [vit, gpt, bert, lra])
def test_a_run_leaves_its_process_as_it_was(before, tmp_path, script):
    text = [*SMALL, "--data", letters(tmp_path), "--tokenizer", "bytes"]
    args = {vit: QUICK, gpt: text, bert: text, lra: ["--sizes", "64,16,16", "--steps", 2]}
    run(script, tmp_path / "run", *args[script], "--deterministic")
    assert_as_it_was(before)


def test_a_run_with_workers_and_pictures_leaves_its_process_as_it_was(before, tmp_path):
    write_folder(tmp_path, "pictures", photographs("train", 12))
    args = ["--data", tmp_path / "pictures", "--batch-size", 4, "--steps", 2]
    for workers in (0, 1):
        run(vit, tmp_path / f"run{workers}", *args, "--workers", workers, "--eval-every", 0)
    assert_as_it_was(before)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_the_process_as_it_was(before, tmp_path, monkeypatch, error):
    def fail(*_args: object, **_named: object) -> None:
        raise error("stop")

    monkeypatch.setattr(setup, "make_optimizer", fail)
    with pytest.raises((SystemExit, error)):
        run(vit, tmp_path / "run", *QUICK, "--deterministic", "--compile")
    assert_as_it_was(before)


def test_a_run_that_diverges_leaves_the_process_as_it_was(before, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        run(vit, tmp_path / "run", *QUICK, "--lr", 1e30, "--skip-limit", 0, "--deterministic")
    assert_as_it_was(before)
    with pytest.raises(SystemExit, match="2"):
        run(vit, tmp_path / "run", "--lr", "nan")
    assert_as_it_was(before)


def test_the_streams_of_a_process_stay_as_they_were(tmp_path, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii", errors="strict", write_through=True)
    for name in ("stdout", "__stdout__"):
        monkeypatch.setattr(sys, name, stream)
    run(vit, tmp_path / "run", *QUICK)
    assert sys.stdout is stream
    assert stream.errors == "strict"


def test_what_a_user_chose_stays_in_use(before, tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = of_process()
    run(vit, tmp_path / "run", *QUICK, "--deterministic")
    assert_as_it_was(before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_comes_when_all_is_saved_does_nothing(tmp_path, monkeypatch, number):
    received, leave = [], dist.destroy_process_group

    def leave_late() -> None:
        os.kill(os.getpid(), number)
        leave()

    monkeypatch.setattr(dist, "destroy_process_group", leave_late)
    before = signal.signal(number, lambda *_: received.append(number))
    try:
        run(vit, tmp_path / "run", *QUICK)
    finally:
        signal.signal(number, before)
    assert received == []


@pytest.fixture
def no_launcher(monkeypatch):
    for name in (*LAUNCHER, *JOBS):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE=x"),
        ({"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3"}, "LOCAL_WORLD_SIZE=8"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "SLURM_NTASKS=2"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, "OMPI_COMM_WORLD_SIZE=4"),
        ({"PMI_SIZE": "2", "WORLD_SIZE": "2"}, "WORLD_SIZE=2, PMI_SIZE=2"),
        ({"LOCAL_RANK": "3"}, ""),
        ({"WORLD_SIZE": "1", "SLURM_NTASKS": "1", "RANK": ""}, ""),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, ""),
    ],
)
def test_without_a_rank_a_process_trains_alone_and_says_so(no_launcher, capsys, variables, told):
    for name, value in variables.items():
        no_launcher.setenv(name, value)
    with parallel.init_distributed() as world:
        assert (world.rank, world.size, world.local_size) == (0, 1, 1)
    line = f"{told} is ignored without RANK: one process trains alone; torchrun starts several\n"
    assert capsys.readouterr().err == (line if told else "")


@pytest.mark.parametrize("more", [[], ["--shard", "none"], ["--shard", "fsdp"]])
def test_a_size_without_a_rank_trains_and_saves(no_launcher, tmp_path, more):
    no_launcher.setenv("WORLD_SIZE", "2")
    run(vit, tmp_path / "run", *QUICK, *more)
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


PLACE = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "0"}, "RANK is '0', but WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set"),
        ({"RANK": "3"}, "RANK is '3', but WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is '0', but MASTER_ADDR, MASTER_PORT must be"),
        ({"RANK": "x", **PLACE}, "RANK must be a whole number at least 0, got 'x'"),
        ({"RANK": "2", **PLACE}, "RANK must be below WORLD_SIZE, got 2 and 2"),
        ({"RANK": "0", **PLACE, "WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number at least 1"),
        ({"RANK": "0", **PLACE, "LOCAL_RANK": "-1"}, "LOCAL_RANK must be a whole number at least"),
    ],
)
def test_half_an_environment_is_refused_in_one_line(no_launcher, capsys, variables, told, tmp_path):
    for name, value in variables.items():
        no_launcher.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        run(vit, tmp_path / "run", *QUICK)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vit.py: error: ")
    assert told in line
