"""Training on a GPU: bfloat16 through the kernels, and the same bits after a resume."""

import json
import shutil

import torch

from tests.train.launch import TINY, rows, run

RUN = [*TINY, "--steps", 6, "--ckpt-every", 3, "--deterministic"]


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


def test_a_gpu_learns_the_digits(tmp_path):
    short = ["--heads", 4, "--depth", 2, "--batch-size", 32, "--epochs", 4, "--lr", 2e-3]
    run(*short, "--out", tmp_path, gpu=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["held_out_accuracy"] > 0.7
