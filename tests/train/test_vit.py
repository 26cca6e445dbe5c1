"""The script as users call it: what it prints, keeps, and refuses."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.train.launch import SCRIPT, TINY, rows, run, torchrun, whole_tensors
from tests.wandb_runs import FakeRun
from train import vit
from train.config import flags
from train.vit import ImageSettings


def train_here(*args: object) -> None:
    """Run the script in this process."""
    vit.main([str(arg) for arg in args])


def task_of(*args: str) -> tuple:
    return vit.make_task(flags.parse("vit.py", "", args, ImageSettings))


def test_the_command_of_the_demo_shortened(tmp_path):
    done = run(
        *("--heads", 16, "--depth", 7, "--steps", 3, "--batch-size", 16, "--kappa-every", 2),
        *("--out", tmp_path),
        torchrun=torchrun(1),
    )
    assert "2,430,922" in done.stdout
    assert "vit_digits" in done.stdout
    assert "condition number κ" in done.stdout
    assert re.search(r"step 0/3  loss 2\.303  [\d,]+ images/s", done.stdout)
    assert re.search(r"throughput +│ [\d,.]+ images/s", done.stdout)
    assert re.search(r"peak memory +│ \d+\.\d\d GiB", done.stdout)

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["params"], summary["head_convention"]) == (2_430_922, "widen")
    assert (summary["heads"], summary["head_dim"], summary["depth"]) == ([16] * 7, [16] * 7, 7)
    assert 0 <= summary["held_out_accuracy"] <= 1
    assert summary["throughput"] > 0
    assert 0 <= summary["data_wait_share"] < 1
    assert summary["peak_memory_bytes"] > 1e7
    assert [row["layer"] for row in summary["kappa"]] == [f"blocks.{i}.attn" for i in range(7)]
    assert all(
        row["kappa_gaussian"] == pytest.approx((16 + 4) / (16 - 4)) for row in summary["kappa"]
    )
    if not torch.cuda.is_available():
        assert (summary["mfu"], summary["energy_joules"]) == (None, None)

    metrics = rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    # The classifier starts at zero: every class is as likely.
    assert metrics[0]["loss"] == pytest.approx(math.log(10), rel=1e-5)
    assert metrics[-1]["held_out_accuracy"] == summary["held_out_accuracy"]
    assert [row["step"] for row in rows(tmp_path / "kappa.jsonl")] == [0] * 7 + [2] * 7
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h2>κ of every layer</h2>" in page
    assert f"{summary['params']:,}" in page


def test_openmp_is_told_to_wait_without_spinning_before_torch_loads_it(tmp_path):
    (tmp_path / "torch.py").write_text("import os, sys; sys.exit(os.environ['OMP_WAIT_POLICY'])")
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True)
    assert done.stderr == "PASSIVE\n"


@pytest.mark.slow
def test_training_learns_the_digits(tmp_path):
    short = ["--heads", 4, "--depth", 2, "--batch-size", 32, "--epochs", 4, "--lr", 2e-3]
    train_here(*short, "--eval-every", 2, "--out", tmp_path)
    metrics = rows(tmp_path / "metrics.jsonl")
    accuracies = [row["held_out_accuracy"] for row in metrics if "held_out_accuracy" in row]
    assert len(accuracies) == 2
    assert accuracies[-1] > 0.7


def test_every_layer_can_have_its_own_heads(tmp_path):
    layers = ["--heads", "4,2,3", "--head-dim", "8,split,16"]
    train_here(*TINY, "--depth", 3, *layers, "--steps", 1, "--out", tmp_path)
    kappa = rows(tmp_path / "kappa.jsonl")
    assert [(row["heads"], row["head_dim"]) for row in kappa] == [(4, 8), (2, 96), (3, 16)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["heads"], summary["head_dim"]) == ([4, 2, 3], [8, 96, 16])
    assert summary["head_convention"] == "mixed"


@pytest.mark.parametrize(
    ("args", "params", "convention"),
    [
        (["--model", "vit_base"], 85_806_346, "widen"),
        (["--model", "vit_base", "--heads", "16", "--head-dim", "split"], 85_806_346, "split"),
        (["--data", "synthetic"], 86_567_656, "widen"),
        (
            ["--data", "synthetic", "--heads", "16", "--depth", "7", "--mlp-ratio", "2"],
            40_112_872,
            "widen",
        ),
        ([], 2_430_922, "widen"),
    ],
)
def test_the_model_follows_the_data_unless_it_is_named(args, params, convention):
    # vit_base has 1,000 classes on synthetic data, and 10 on digits.
    task, _ = task_of(*args)
    assert (task.facts["params"], task.facts["head_convention"]) == (params, convention)


def test_a_dry_run_shows_the_plan_and_leaves_nothing(tmp_path, capsys):
    args = ["--data", "synthetic", "--batch-size", 96, "--accum", 3, "--steps", 10]
    train_here(*args, "--dry-run", "--out", tmp_path / "run")
    said = capsys.readouterr().out
    for text in ("vit_base", "86,567,656", "96 = 1 ranks x 3 passes x 32", "197"):
        assert text in said
    assert list(tmp_path.iterdir()) == []


def test_the_average_of_the_weights_follows_its_decay(tmp_path):
    train_here(*TINY, "--steps", 3, "--ckpt-every", 1, "--ema", 0.75, "--out", tmp_path)
    one, two, three = (tensors_of(tmp_path, step) for step in (1, 2, 3))
    for before, after in ((one, two), (two, three)):
        for name, weight in after["model"].items():
            expected = 0.75 * before["average"][name] + 0.25 * weight
            torch.testing.assert_close(after["average"][name], expected)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["held_out_ema_loss"] != summary["held_out_loss"]


def tensors_of(out: Path, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a checkpoint, whole."""
    return whole_tensors(out / "checkpoints" / f"step-{step:08d}")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "nowhere"], r"--data must be digits, synthetic, a folder .* got 'nowhere'"),
        (
            ["--model", "vit_huge"],
            r"--model must be one of vit_digits, .* row of the paper .* got 'vit_huge'",
        ),
        (["--heads", "0"], r"--heads: must be a whole number at least 1, got '0'"),
        (["--heads", "4,4,4", "--depth", "2"], r"--heads must be one value or 2 .* got 3"),
        (["--head-dim", "129"], r"--head-dim: must be a whole number in \[1, 128\], got '129'"),
        (["--heads", "300", "--head-dim", "split"], r"heads must be at most 192 .* got 300"),
        (["--accum", "3"], r"must be a multiple of ranks x --accum = 1 x 3 = 3, got 64"),
        (["--batch-size", "2000"], r"at most the 1433 training items, got 2000"),
        (["--lr", "nan"], r"--lr: must be a number at least 0, got 'nan'"),
        (["--precision", "fp8"], r"--precision: invalid choice: 'fp8' .*fp32"),
        (
            ["--epochs", "1", "--steps", "2"],
            r"give only one of --epochs, .*got --epochs 1 and --steps 2",
        ),
        (["--out", "/dev/null/run"], r"--out /dev/null/run cannot be used: Not a directory: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_that_names_it_and_what_is_allowed(args, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_here(*args)
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith("vit.py: error: ")
    assert said.err.count("\n") == 1
    assert re.search(message, said.err), said.err


def test_runs_get_folders_of_their_own_and_auto_takes_up_the_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        train_here(*TINY, "--steps", 1)
    folders = [Path("runs") / f"vit_digits-digits-{i}" for i in (1, 2)]
    assert sorted(Path("runs").iterdir()) == folders
    train_here(*TINY, "--steps", 2, "--resume", "auto")
    assert sorted(Path("runs").iterdir()) == folders
    assert [len(rows(folder / "metrics.jsonl")) for folder in folders] == [1, 2]


@pytest.mark.parametrize("finished", [False, True])
def test_a_new_run_in_the_folder_of_another_keeps_its_rows(tmp_path, capsys, finished):
    train_here(*TINY, "--steps", 3, "--out", tmp_path)
    before = rows(tmp_path / "metrics.jsonl"), rows(tmp_path / "kappa.jsonl")
    shutil.rmtree(tmp_path / "checkpoints")
    if not finished:
        (tmp_path / "summary.json").unlink()
    capsys.readouterr()
    train_here(*TINY, "--steps", 2, "--out", tmp_path, "--resume", "auto" if finished else "none")
    assert "files of an earlier run were renamed to metrics.1.jsonl, kappa.1.jsonl" in (
        capsys.readouterr().out
    )
    assert before == (rows(tmp_path / "metrics.1.jsonl"), rows(tmp_path / "kappa.1.jsonl"))
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1]
    assert (tmp_path / "summary.1.json").exists() == finished


@pytest.fixture
def wandb(monkeypatch):
    """W&B's module, with runs that send nothing."""
    module = mock.MagicMock()
    module.init.side_effect = lambda **_: module.runs.append(FakeRun()) or module.runs[-1]
    module.runs = []
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_the_metrics_and_kappa(tmp_path, wandb):
    train_here(*TINY, "--steps", 3, "--wandb", "lean", "--out", tmp_path)
    assert wandb.init.call_args.kwargs["project"] == "lean"
    (run,) = wandb.runs
    assert [row["loss"] for row in run.rows] == losses(tmp_path)
    assert [row["step"] for row in run.rows] == [0, 1, 2]
    assert [row.get("kappa/step") for row in run.rows] == [0, None, 2]
    assert ["kappa/blocks.0.attn" in row for row in run.rows] == [True, False, True]
    assert (run.lost, run.finished) == (0, 1)
    assert (run.axes["*"], run.axes["kappa/blocks.0.attn"]) == ("step", "kappa/step")


def losses(folder):
    return [row["loss"] for row in rows(folder / "metrics.jsonl")]


def test_wandb_goes_on_with_its_run_after_a_resume(tmp_path, wandb):
    run = [*TINY, "--wandb", "lean", "--out", tmp_path, "--resume", "auto"]
    train_here(*run, "--steps", 1)
    train_here(*run, "--steps", 2)
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first["id"] == second["id"]
    assert first["resume"] == second["resume"] == "allow"
    train_here(*TINY, "--wandb", "lean", "--steps", 1, "--out", tmp_path / "other")
    assert wandb.init.call_args.kwargs["id"] != first["id"]


def test_wandb_that_cannot_begin_is_one_line(tmp_path, monkeypatch, capsys):
    wandb = mock.MagicMock()
    wandb.init.side_effect = RuntimeError("no API key\nconfigured")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(SystemExit, match="2"):
        train_here(*TINY, "--steps", 1, "--wandb", "lean", "--out", tmp_path)
    assert capsys.readouterr().err == (
        "vit.py: error: --wandb failed to start: no API key configured\n"
    )


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("x"), None])
def test_a_page_that_cannot_be_written_takes_nothing_else_along(
    tmp_path, monkeypatch, capsys, error
):
    if error is None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    else:
        monkeypatch.setattr("leaner_kernels.monitor.page._svg", mock.Mock(side_effect=error))
    train_here(*TINY, "--steps", 1, "--out", tmp_path)
    said = capsys.readouterr().out
    assert "page not written: " in said
    assert ("a page needs the package matplotlib: pip install 'leaner-kernels[plot]'" in said) == (
        error is None
    )
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1
    assert not [*tmp_path.glob("*.html"), *tmp_path.glob(".page*")]


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys, name):
    for module in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    flag = ["--wandb", "lean"] if name == "wandb" else ["--tensorboard"]
    with pytest.raises(SystemExit, match="2"):
        train_here(*TINY, "--steps", 1, *flag, "--out", tmp_path)
    said = capsys.readouterr().err
    assert said == f"vit.py: error: --{name} needs the package {name}: pip install {name}\n"


def test_tensorboard_gets_the_metrics_and_kappa(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_here(*TINY, "--steps", 3, "--tensorboard", "--out", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("loss")) == 3
    assert [event.step for event in events.Scalars("kappa/blocks.0.attn")] == [0, 2]
