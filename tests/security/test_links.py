"""A run folder from somebody else: what a run writes there changes no other file."""

import os
import shutil

import pytest
import torch

from leaner_kernels.monitor import page
from leaner_kernels.monitor.run_log import RunLog
from tests.train.launch import TINY
from tests.train.trained import train_vit
from train import vit

PRECIOUS = "export PRECIOUS=1\n"
# Of what a run writes.
NAMES = [
    *("metrics.jsonl", "summary.json", "model.safetensors", ".lock", ".page.html.partial"),
    *("checkpoints", "checkpoints/.step-00000004/state.json"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_vit(tmp_path_factory.mktemp("runs") / "run", "--ckpt-every", "2")


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "home" / ".bashrc"
    path.parent.mkdir()
    path.write_text(PRECIOUS)
    return path


def go_on(run):
    vit.main([*TINY, "--steps", "4", "--ckpt-every", "2", "--out", str(run), "--resume", "auto"])


def plant(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_in_no_folder_with_links(trained, tmp_path, precious, capsys, name):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    plant(run / name, precious)
    with pytest.raises(SystemExit):
        go_on(run)
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("vit.py: error: ")
    assert f"{run / name} is a symbolic link" in line
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/pipe"])
def test_a_pipe_is_refused_and_not_waited_for(trained, tmp_path, capsys, name):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(SystemExit):
        go_on(run)
    assert "neither a file nor a folder" in capsys.readouterr().err


def test_a_callback_takes_no_folder_with_links(tmp_path, precious):
    plant(tmp_path / "run" / "kappa.jsonl", precious)
    with pytest.raises(ValueError, match="is a symbolic link"):
        RunLog(torch.nn.MultiheadAttention(8, 2), tmp_path / "run")
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("name", ["page.html", ".page.html.partial"])
def test_a_page_is_written_through_no_link(trained, tmp_path, precious, name):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    plant(run / name, precious)
    page.main([str(run)])
    assert precious.read_text() == PRECIOUS
    assert (run / "page.html").read_text().startswith("<!")
    assert not (run / "page.html").is_symlink()
