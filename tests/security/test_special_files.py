"""Pipes, devices and sockets, wherever a file is read: refused by name, or counted.

Each test would hang where one is read as a file is; a link to a file is one.
"""

import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.security.refusals import refusal
from tests.train.trained import bert, gpt, letters, train_text, train_vit
from train import vit
from train.data.files import read_file
from train.export import load

SMALL = ["--depth", 1, "--batch-size", 2, "--steps", 1, "--eval-every", 0]
HEADS = ["--heads", 2, "--head-dim", 8]
SIZES = ["--model", "vit_digits", *HEADS, "--img-size", 16, "--patch-size", 4]
QUICK = [*SMALL, "--workers", 0, "--kappa-every", 0]
TEXT = ["--context", 16, "--dry-run", *SMALL]
LONG = ["--recipe", "paper", *HEADS, "--landmarks", 4, "--dry-run", *SMALL]
KINDS = ["pipe", "device", "socket"]


def plant(path, kind):
    """Put what is no regular file under a name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        here = Path.cwd()
        with socket.socket(socket.AF_UNIX) as listener:
            os.chdir(path.parent)  # the name of a socket is short
            try:
                listener.bind(path.name)
            finally:
                os.chdir(here)
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
    (tmp_path / "link").symlink_to(path)
    for name in ("file", "link"):
        with pytest.raises(OSError, match=name):
            read_file(tmp_path / name)


def test_a_link_that_leads_out_of_the_folder_is_a_file(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"1\n2")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to("../elsewhere")
    assert read_file(tmp_path / "data" / "link") == b"1\n2"


def test_among_pictures_they_are_bad_samples(runs, tmp_path, capsys):
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        for place in range(4):
            pixels = np.random.default_rng(place).integers(0, 256, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{place}.png")
    bad = plant(tmp_path / "data" / "a" / "bad.png", "pipe")
    words = ["--data", tmp_path / "data", *SIZES, *QUICK, "--bad-data-limit", 1, *out(tmp_path)]
    vit.main(list(map(str, [*words, "--steps", 6])))
    assert f"{bad}: " in capsys.readouterr().out


def test_weights_are_a_file(runs, tmp_path, capsys):
    for name in ("w.safetensors", "w.pt"):
        bad = plant(tmp_path / name, "pipe")
        words = ["--data", "digits", "--dry-run", "--pretrained", bad, *out(tmp_path)]
        assert bad.name in refusal(capsys, vit.main, *words)
        with pytest.raises(ValueError, match=bad.name):
            load(bad)
