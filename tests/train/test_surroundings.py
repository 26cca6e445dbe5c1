"""What a machine may lack: UTF-8 in names and on standard output, a home folder."""

import io
import os
import subprocess
import sys

import pytest

import train
from leaner_kernels.monitor.page import main as page
from tests.train.image_files import photographs, write_folder
from tests.train.launch import ROOT
from tests.train.trained import SMALL, gpt, letters, run, train_vit, vit

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
    line = f"vit.py: the output encoding, {encoding}, has no kappa; \\u03ba stands for it\n"
    assert capsys.readouterr().err.count(line) == 1


HOMELESS = """
import os, pwd, runpy, sys

def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")

pwd.getpwuid = unknown
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("home", [None, "/dev/null"])
def test_a_user_without_a_home_folder_trains(home, tmp_path):
    args = [ROOT / "train" / "gpt.py", *SMALL, "--data", letters(tmp_path), "--samples", 0]
    unset = ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, "-c", HOMELESS, *map(str, args), "--out", str(tmp_path / "run")],
        env=env if home is None else env | {"HOME": home},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    caches = tmp_path / f"leaner_kernels-{os.geteuid()}"
    said = f"caches are kept in {caches}: {home or '~'}/.cache cannot be written"
    assert ended.stderr.splitlines()[0] == said
    assert (tmp_path / "run" / "summary.json").exists()
    assert caches.stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("kind", ["another user's", "a link"])
def test_caches_are_in_no_folder_of_others(kind, tmp_path, monkeypatch, capsys):
    folder = tmp_path / f"leaner_kernels-{os.geteuid()}"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if kind == "a link":
        (tmp_path / "other").mkdir()
        folder.symlink_to(tmp_path / "other")
    else:
        folder.mkdir()
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
        folder.rename(tmp_path / f"leaner_kernels-{user}")
    train._keep_caches()
    assert "XDG_CACHE_HOME" not in os.environ
    assert capsys.readouterr().err == ""
