"""Pipes, devices, sockets and files of holes, wherever a file is read: refused by name, or counted.

Each test would hang, or fill the memory, where one is read as a file is; a link to a file is one.
"""

import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from leaner_kernels.monitor import __main__ as monitor
from leaner_kernels.monitor.files import check_file, lines_of, open_file, read_file
from tests.security.refusals import refusal
from tests.train.trained import bert, gpt, letters, train_text, train_vit
from train import vit
from train.export import load

SMALL = ["--depth", 1, "--batch-size", 2, "--steps", 1, "--eval-every", 0]
HEADS = ["--heads", 2, "--head-dim", 8]
SIZES = ["--model", "vit_digits", *HEADS, "--img-size", 16, "--patch-size", 4]
QUICK = [*SMALL, "--workers", 0, "--kappa-every", 0]
TEXT = ["--context", 16, "--dry-run", *SMALL]
LONG = ["--recipe", "paper", *HEADS, "--landmarks", 4, "--dry-run", *SMALL]
KINDS = ["pipe", "device", "socket", "endless"]


def plant(path, kind):
    """Put what is no regular file, or is absurdly large, under a name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        here = Path.cwd()
        with socket.socket(socket.AF_UNIX) as listener:
            os.chdir(path.parent)  # the name of a socket is short
            try:
                listener.bind(path.name)
            finally:
                os.chdir(here)
    else:
        with path.open("wb") as file:
            file.truncate(1 << 42)
    return path


@pytest.fixture(autouse=True)
def no_waiting():
    """End a test that waits."""

    def hung(*_):
        raise AssertionError("hung")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(100)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    train_vit(root / "vit")
    for script, name in ((gpt, "gpt"), (bert, "bert")):
        train_text(script, root / name)
    letters(root)
    return root


def out(tmp_path):
    return ["--out", tmp_path / "out"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_a_regular_file_is_opened(tmp_path, kind):
    path = plant(tmp_path / "file", kind)
    for read in (open_file, check_file, lambda path: read_file(path, 100)):
        with pytest.raises(OSError, match="file"):
            read(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="link"):
        check_file(tmp_path / "link")


def test_a_link_that_leads_out_of_the_folder_is_a_file(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"1\n2")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to("../elsewhere")
    assert read_file(tmp_path / "data" / "link", 3) == b"1\n2"
    with pytest.raises(OSError, match="more than 2 bytes"):
        read_file(tmp_path / "data" / "link", 2)
    with open_file(tmp_path / "data" / "link") as file:
        assert list(lines_of(file, 2)) == [b"1\n", b"2"]
    with open_file(tmp_path / "data" / "link") as file, pytest.raises(OSError, match="longer"):
        list(lines_of(file, 1))


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_among_pictures_they_are_bad_samples(runs, tmp_path, capsys, kind):
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        for place in range(4):
            pixels = np.random.default_rng(place).integers(0, 256, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{place}.png")
    bad = plant(tmp_path / "data" / "a" / "bad.png", kind)
    words = ["--data", tmp_path / "data", *SIZES, *QUICK, "--bad-data-limit", 1, *out(tmp_path)]
    vit.main(list(map(str, [*words, "--steps", 6])))
    assert f"{bad}: " in capsys.readouterr().out
    monitored = ["test_vit", "--random-weights", "--data", bad]
    assert "bad.png" in refusal(capsys, monitor.main, *monitored)


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_weights_are_a_file(runs, tmp_path, capsys, kind):
    for name in ("w.safetensors", "w.pt"):
        bad = plant(tmp_path / name, kind)
        words = ["--data", "digits", "--dry-run", "--pretrained", bad, *out(tmp_path)]
        assert bad.name in refusal(capsys, vit.main, *words)
        with pytest.raises(ValueError, match=bad.name):
            load(bad)
