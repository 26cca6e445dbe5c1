"""Streams that are closed or unread, empty paths, too little memory, names of odd letters."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from leaner_kernels.monitor import page
from tests.train.launch import ROOT, SCRIPT, TINY
from tests.train.trained import gpt
from train import vit
from train.data.loader import loading

RUN = [*TINY, "--steps", "2"]


def shell(line, tmp_path, **more):
    """Run a line of a shell in which $0 is Python; return what it left."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **more}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line, sys.executable],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=120,
    )


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_run_without_streams_is_whole(tmp_path, closed):
    done = shell(f'"$0" {SCRIPT} {" ".join(RUN)} --out run {closed}', tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    # Nothing that was to be shown is in a file of the run.
    for name in ("metrics.jsonl", "kappa.jsonl"):
        for line in (tmp_path / "run" / name).read_text().splitlines():
            assert isinstance(json.loads(line)["step"], int)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    # The reader is gone before anything is written.
    done = shell(f'"$0" {SCRIPT} --help | true', tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("main", "words"),
    [
        *((vit.main, [flag, ""]) for flag in ("--out", "--data", "--resume", "--model")),
        (gpt.main, ["--tokenizer", ""]),
        (page.main, ["x", "--out", ""]),
    ],
)
def test_no_path_or_name_is_empty(main, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "must not be empty" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


class Greedy:
    """Items of which one needs more memory than there is."""

    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 6

    def __getitems__(self, keys):
        if any(key[1] in self.bad for key in keys):
            np.empty(1 << 60, np.uint8)
        return (torch.tensor([key[1] for key in keys]),)


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_that_is_short_in_a_worker_is_a_bad_sample(workers):
    batches = [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    with loading(Greedy({1}), batches, workers=workers, device=torch.device("cpu")) as fetched:
        first, second = list(fetched)
    assert first.tensors[0].tolist() == [0, 2]
    assert [bad.places for bad in first.bad_samples] == [(1,)]
    assert "Unable to allocate" in first.bad_samples[0].message
    assert second.tensors[0].tolist() == [2, 3]


def test_names_of_classes_stay_on_their_lines(tmp_path, capsys):
    odd = ["a\nb", "\x1b[31mred", "κ", "\x9b"]
    for name in odd:
        (tmp_path / "data" / name).mkdir(parents=True)
        for place in range(3):
            pixels = np.random.default_rng(place).integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{place}.png")
    words = ["--model", "vit_digits", "--heads", "2", "--depth", "1", "--head-dim", "8"]
    words += ["--img-size", "16", "--patch-size", "4", "--steps", "1", "--batch-size", "2"]
    words += ["--workers", "0", "--out", str(tmp_path / "run"), "--data", str(tmp_path / "data")]
    vit.main(words)
    said = "".join(capsys.readouterr())
    names = (tmp_path / "run" / "classes.txt").read_text().splitlines()
    assert len(names) == 4
    assert r"a\nb" in names
    assert len((tmp_path / "run" / "held_out.txt").read_text().splitlines()) == 4
    assert "\x1b" not in said
    assert "\x9b" not in said
    assert "a\nb" not in said
