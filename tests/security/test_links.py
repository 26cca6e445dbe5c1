"""A run folder from somebody else: what a run writes there changes no other file."""

import os
import shutil
import stat

import pytest
import torch
from safetensors.torch import load_file

from leaner_kernels.monitor import page
from leaner_kernels.monitor.files import check_folder, open_own, write_file
from leaner_kernels.monitor.run_log import RunLog
from tests.train.launch import TINY
from tests.train.trained import train_vit
from train import export, vit
from train.checkpoint import formats

PRECIOUS = "export PRECIOUS=1\n"
# What a run writes, and the names that versions before this one wrote first.
NAMES = [
    *("metrics.jsonl", "kappa.jsonl", "alarms.jsonl", "kappa_probe.jsonl", "summary.json"),
    *("model.safetensors", "page.html", "loss.png", "launch", "wandb_id.txt", "tokenizer.json"),
    *("stacks-rank0.txt", ".lock", ".launch", ".metrics.jsonl", ".kappa.jsonl", ".alarms.jsonl"),
    *(".summary.json", ".model.safetensors", ".page.html", ".metrics.jsonl.partial"),
    *(".summary.json.partial", ".page.html.partial", "checkpoints/latest", "checkpoints/.latest"),
    *("checkpoints/.latest.partial", "checkpoints/.step-00000004", "tensorboard/events"),
    *("checkpoints/.step-00000004/state.json", "checkpoints/.step-00000004/.state.json.partial"),
    "checkpoints/step-00000004",
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


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_folders_of_a_run_are_no_links_either(trained, tmp_path, precious, capsys, name):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    plant(run / name, precious.parent)
    with pytest.raises(SystemExit):
        go_on(run)
    assert "is a symbolic link" in capsys.readouterr().err
    assert os.listdir(precious.parent) == [precious.name]


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", "checkpoints/pipe"])
def test_a_pipe_is_refused_and_not_waited_for(trained, tmp_path, capsys, name):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(SystemExit):
        go_on(run)
    assert "neither a file nor a folder" in capsys.readouterr().err


def test_a_new_run_takes_no_folder_with_links_either(tmp_path, precious, capsys):
    plant(tmp_path / "run" / "metrics.jsonl", precious)
    with pytest.raises(SystemExit):
        vit.main([*TINY, "--steps", "1", "--out", str(tmp_path / "run")])
    assert "is a symbolic link" in capsys.readouterr().err
    assert precious.read_text() == PRECIOUS


def test_a_callback_takes_no_folder_with_links(tmp_path, precious):
    plant(tmp_path / "run" / "kappa.jsonl", precious)
    with pytest.raises(ValueError, match="is a symbolic link"):
        RunLog(torch.nn.MultiheadAttention(8, 2), tmp_path / "run")
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("name", ["page.html", ".page.html", ".page.html.partial"])
def test_a_page_is_written_through_no_link(trained, tmp_path, precious, name):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    plant(run / name, precious)
    page.main([str(run)])
    assert precious.read_text() == PRECIOUS
    assert (run / "page.html").read_text().startswith("<!")
    assert not (run / "page.html").is_symlink()


@pytest.mark.parametrize("name", ["w.safetensors", ".w.safetensors", ".w.safetensors.partial"])
def test_an_export_is_written_through_no_link(trained, tmp_path, precious, name):
    plant(tmp_path / "shared" / name, precious)
    export.main([str(trained), str(tmp_path / "shared" / "w.safetensors")])
    assert precious.read_text() == PRECIOUS
    assert load_file(tmp_path / "shared" / "w.safetensors")


def test_an_export_removes_no_folder_of_another_name(trained, tmp_path):
    keys = tmp_path / ".ssh"
    keys.mkdir()
    (keys / "id").write_text("key")
    model, info = export.load(trained)
    with pytest.raises(ValueError, match="timm has no attention of another width"):
        formats.write("timm", model, info, tmp_path / "ssh")
    assert (keys / "id").read_text() == "key"
    assert os.listdir(tmp_path) == [".ssh"]


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(TypeError):
        write_file(path, None)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]
    write_file(path, "é\n")
    assert path.read_bytes() == b"\xc3\xa9\n"


def test_a_file_has_the_mode_of_the_umask(tmp_path):
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            write_file(tmp_path / "file", "")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_link_is_not_opened_to_append(tmp_path, precious):
    (tmp_path / "link").symlink_to(precious)
    with pytest.raises(OSError, match="link"):
        open_own(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    for mode in ("ab", "r+b"):
        with pytest.raises(OSError, match="pipe"):
            open_own(tmp_path / "pipe", mode)
    with open_own(tmp_path / "rows") as file:
        file.write(b"1\n")
    with open_own(tmp_path / "rows") as file:
        file.write(b"2\n")
    assert (tmp_path / "rows").read_bytes() == b"1\n2\n"


def test_links_elsewhere_in_a_folder_are_the_users_own(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "data").symlink_to("/")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "latest-run").symlink_to("run-1")
    check_folder(tmp_path)
