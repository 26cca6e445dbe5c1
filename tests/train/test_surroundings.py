"""What a machine may lack: UTF-8 in names and on standard output, a home folder, docstrings."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import train
from leaner_kernels.monitor.page import main as page
from tests.train.image_files import photographs, write_folder, write_tars
from tests.train.launch import ROOT
from tests.train.trained import gpt, run, train_text, train_vit, vit
from train import compare, export, measure, predict
from train.data.images.sources import find_images

# As an old zip unpacks: Latin-1.
ODD = os.fsdecode(b"caf\xe9")
TRAIN = photographs("train", 12)


def python(*args: object, **environment: str) -> subprocess.CompletedProcess:
    """Run Python as a user does."""
    known = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    words = [sys.executable, *map(str, args)]
    return subprocess.run(words, env=known, capture_output=True, text=True, check=False)


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
    run(vit, "--data", odd, "--steps", 2, "--workers", 0, "--kappa-every", 1, "--out", out)
    assert {"summary.json", "page.html", "kappa.png"} <= {path.name for path in out.iterdir()}
    assert (out / "classes.txt").read_bytes() == b"caf\xe9\nn02102040\nn03445777\n"
    held_out = (out / "held_out.txt").read_bytes().splitlines()
    assert {os.fsdecode(name) for name in held_out} <= {str(path) for path in odd.rglob("*.JPEG")}
    assert len(held_out) == 3
    assert b"caf\\udce9 run" in stdout.getvalue()
    out = out.rename(tmp_path / "run")
    assert predict.main([str(out), str(odd), "--json"]) == 0
    rows = [json.loads(line) for line in stdout.getvalue().splitlines() if line[:1] == b"{"]
    assert {row["name"] for row in rows} == {str(path) for path in odd.rglob("*.JPEG")}
    measure.main([str(out), "--data", str(odd)])
    compare.main([str(out)])
    export.main([str(out), str(tmp_path / f"{ODD}.safetensors")])
    assert (tmp_path / f"{ODD}.safetensors").stat().st_size > 1000
    page([str(out), "--out", str(tmp_path / f"{ODD}.html")])
    assert f"written to {tmp_path}/caf\\udce9.html".encode() in stdout.getvalue()


def test_members_of_tars_need_no_utf8(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    for split in ("train", "val"):
        write_tars(tmp_path / "plain", split, TRAIN, shards=1)
        with tarfile.open(tmp_path / "plain" / f"{split}-0000.tar") as plain:
            (tmp_path / "odd").mkdir(exist_ok=True)
            with tarfile.open(
                tmp_path / "odd" / f"{split}.tar", "w", format=tarfile.GNU_FORMAT
            ) as tar:
                for member in plain.getmembers():
                    content = plain.extractfile(member)
                    member.name = f"{ODD}{member.name}"
                    tar.addfile(member, content)
    both = [find_images(str(tmp_path / name), 0).train for name in ("plain", "odd")]
    plain, other = ([part.read(index) for index in range(len(part))] for part in both)
    assert plain == other


def test_text_of_files_whose_names_are_not_utf8_is_learned(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / f"{ODD}.txt"
    file.write_bytes(Path(__file__).read_bytes())
    stdout = as_utf8(monkeypatch)
    out = tmp_path / "run"
    run(gpt, "--data", file, "--steps", 1, "--workers", 0, "--tokenizer", "bpe", "--out", out)
    shown = stdout.getvalue().decode()
    # A long path is broken at the width of its column.
    assert "caf\\udce9.txt" in "".join(c for c in shown if not c.isspace() and c != "│")
    assert (out / "summary.json").exists()


def test_a_prompt_that_is_not_utf8_is_refused_in_one_line(tmp_path, capsys):
    out = train_text(gpt, tmp_path)
    for start in (
        lambda: gpt.main(["--prompt", ODD]),
        lambda: predict.main([str(out), "--prompt", ODD]),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            start()
        assert stopped.value.code == 2
        assert "--prompt: must be text in UTF-8" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "koi8-r"])
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
    for command in (compare.main, measure.main):
        before = len(stdout.getvalue())
        command([str(out)])
        assert b"\\u03ba" in stdout.getvalue()[before:]


def test_help_is_shown_in_ascii():
    ended = python(ROOT / "train" / "vit.py", "--help", PYTHONIOENCODING="ascii")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (0, 1)
    assert "condition number \\u03ba" in ended.stdout


@pytest.mark.parametrize("name", ["vit.py", "compare", "predict"])
def test_scripts_run_without_docstrings(name, tmp_path):
    if name.endswith(".py"):
        words = [ROOT / "train" / name, "--dry-run", "--out", tmp_path / "run"]
    else:
        words = ["-m", f"train.{name}", "--help"]
    ended = python("-OO", *words, XDG_CACHE_HOME=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")


HOMELESS = """
import os, pwd, runpy, sys

def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")

pwd.getpwuid = unknown
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("home", [None, "/dev/null"])
def test_a_user_without_a_home_folder_trains(home, tmp_path, monkeypatch):
    for name in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "rows.jsonl"
    table.write_text('{"text": "some words to be learned"}\n' * 200)
    words = [ROOT / "train" / "gpt.py", "--data", table, "--steps", 1, "--samples", 0]
    more = {"TMPDIR": str(tmp_path)} | ({} if home is None else {"HOME": home})
    ended = python("-c", HOMELESS, *words, "--workers", 0, "--out", tmp_path / "run", **more)
    assert ended.returncode == 0, ended.stderr
    caches = tmp_path / f"leaner_kernels-{os.geteuid()}"
    said = f"caches are kept in {caches}: {home or '~'}/.cache cannot be written"
    assert ended.stderr.splitlines()[0] == said
    assert (tmp_path / "run" / "summary.json").exists()
    assert caches.stat().st_mode & 0o777 == 0o700
    assert not Path("~").exists()


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
