"""Training on a GPU: bfloat16 through the kernels, and the same bits after a resume."""

import json
import shutil

import pytest
import torch

from tests.train.launch import (
    TINY,
    assert_same_run,
    finish,
    rows,
    run,
    start,
    wait_for,
    whole_tensors,
)

RUN = [*TINY, "--steps", 6, "--ckpt-every", 3, "--deterministic"]
# Everything that a resume must bring back: dropout's generator, the average, evaluations.
LONG = [*TINY, "--steps", 60, "--ckpt-every", 4, "--deterministic", "--ema", 0.9]
LONG += ["--dropout", 0.1, "--drop-path", 0.1, "--eval-every", 0.25]


def test_a_gpu_trains_in_bf16_and_a_resume_continues_with_the_same_bits(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(*RUN, "--out", whole, gpu=True)
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["precision"] == "bf16"
    assert summary["device"] == torch.cuda.get_device_name()
    assert summary["peak_memory_kind"] == "allocated on the GPU"
    assert all(row["kappa"] is not None for row in summary["kappa"])

    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    run(*RUN, "--out", resumed, "--resume", "auto", gpu=True)
    for name in ("metrics.jsonl", "kappa.jsonl"):
        assert rows(resumed / name) == rows(whole / name)


def test_a_run_killed_on_a_gpu_resumes_to_the_same_bits(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(*LONG, "--out", whole, gpu=True)
    for step in (4, 24):
        process = start(*LONG, "--out", killed, "--resume", "auto", gpu=True)
        wait_for((killed / "checkpoints" / f"step-{step:08d}").exists, process)
        process.kill()
        finish(process)
    run(*LONG, "--out", killed, "--resume", "auto", gpu=True)
    assert_same_run(killed, whole, "step-00000060")


# The loss of the second step is not finite.
POISON = """
from torch.nn import functional
cross_entropy, calls = functional.cross_entropy, []
def poisoned(*args, **kwargs):
    calls.append(None)
    return cross_entropy(*args, **kwargs) * (float("nan") if len(calls) == 2 else 1.0)
functional.cross_entropy = poisoned
"""


def test_a_step_that_is_not_finite_leaves_the_weights_of_a_gpu_alone(tmp_path):
    steps = [*TINY, "--steps", 2, "--ckpt-every", 1, "--deterministic"]
    run(*steps, "--out", tmp_path, gpu=True, before=f"exec({POISON!r})")
    first, second = (tmp_path / "checkpoints" / f"step-{n:08d}" for n in (1, 2))
    assert [row.get("skipped") for row in rows(tmp_path / "metrics.jsonl")] == [None, True]
    assert torch.equal(weights(first), weights(second))


# In later steps it is an error to wait for the GPU.
WATCHED = """
import torch
from train.loop import train as loop
step = loop.optimizer_step
def watched(run, batches, timing):
    torch.cuda.set_sync_debug_mode("error" if run.progress.step > 1 else "default")
    try:
        return step(run, batches, timing)
    finally:
        torch.cuda.set_sync_debug_mode("default")
loop.optimizer_step = watched
"""


@pytest.mark.parametrize("shard", ["none", "fsdp"])
def test_a_step_does_not_wait_for_the_gpu(tmp_path, shard):
    recipe = ["--mixup", 0.8, "--cutmix", 1.0, "--drop-path", 0.1, "--ema", 0.9, "--accum", 2]
    steps = [*TINY, *recipe, "--shard", shard, "--steps", 5, "--out", tmp_path]
    run(*steps, gpu=True, before=f"exec({WATCHED!r})")
    assert len(rows(tmp_path / "metrics.jsonl")) == 5


def weights(checkpoint) -> torch.Tensor:
    return torch.cat([t.flatten() for t in whole_tensors(checkpoint)["model"].values()])


def test_a_gpu_learns_the_digits(tmp_path):
    short = ["--heads", 4, "--depth", 2, "--batch-size", 32, "--epochs", 4, "--lr", 2e-3]
    run(*short, "--out", tmp_path, gpu=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["held_out_accuracy"] > 0.7
