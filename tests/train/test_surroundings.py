"""What a machine may lack: UTF-8 in names and on standard output."""

import io
import os
import sys

import pytest

from leaner_kernels.monitor.page import main as page
from tests.train.image_files import photographs, write_folder
from tests.train.trained import gpt, run, train_vit, vit

# As an old zip unpacks: Latin-1.
ODD = os.fsdecode(b"caf\xe9")
TRAIN = photographs("train", 12)


@pytest.fixture
def odd(tmp_path):
    """A folder, a class and pictures with names that are not UTF-8."""
    write_folder(tmp_path, ODD, TRAIN)
    folder = tmp_path / ODD
    (folder / "n01440764").rename(folder / ODD)
    for path in list(folder.glob("n*/*")):
        path.rename(path.with_name(f"{ODD}{path.name}"))
    return folder


def as_utf8(monkeypatch, encoding: str = "utf-8") -> io.BytesIO:
    """Let standard output be strict; return what is written."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, write_through=True))
    return written


def test_names_that_are_not_utf8_are_trained_on_and_kept(odd, tmp_path, monkeypatch):
    out = tmp_path / f"{ODD} run"
    stdout = as_utf8(monkeypatch)
    run(vit, "--data", odd, "--steps", 2, "--batch-size", 8, "--workers", 0, "--out", out)
    assert {"summary.json", "page.html"} <= {path.name for path in out.iterdir()}
    assert (out / "classes.txt").read_bytes() == b"caf\xe9\nn02102040\nn03445777\n"
    held_out = (out / "held_out.txt").read_bytes().splitlines()
    assert {os.fsdecode(name) for name in held_out} <= {str(path) for path in odd.rglob("*.JPEG")}
    assert len(held_out) == 3
    assert b"caf\\udce9 run" in stdout.getvalue()
    out = out.rename(tmp_path / "run")
    page([str(out), "--out", str(tmp_path / f"{ODD}.html")])
    assert f"written to {tmp_path}/caf\\udce9.html".encode() in stdout.getvalue()


def test_a_prompt_that_is_not_utf8_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        gpt.main(["--prompt", ODD])
    assert "--prompt: must be text in UTF-8" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_an_output_stream_that_cannot_show_kappa_ends_no_run(
    encoding, tmp_path, monkeypatch, capsys
):
    stdout = as_utf8(monkeypatch, encoding)
    out = train_vit(tmp_path / "run")
    assert (out / "summary.json").exists()
    shown = stdout.getvalue().decode(encoding)
    assert "condition number \\u03ba of the concatenated heads" in shown
    assert f"written to {out}" in shown
    line = f"vit.py: the output is in {encoding}: \\u03ba is kappa\n"
    assert capsys.readouterr().err.count(line) == 1
