"""κ of what was trained, on its own held-out items and on files."""

import json
from pathlib import Path

import pytest

from leaner_kernels import KappaMonitor
from tests.train.glue_files import write_task
from tests.train.hidden_files import write_hidden
from tests.train.line_ends import write_all
from tests.train.trained import bert, gpt, run, train_text, train_vit, write_pictures
from train import measure
from train.data.images import open_images
from train.export import load


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return train_vit(tmp_path_factory.mktemp("images") / "run")


def measured(folder: Path, *args: object) -> list[dict]:
    rows = folder / "rows.jsonl"
    measure.main([*map(str, args), "--json", str(rows)])
    return [json.loads(line) for line in rows.read_text().splitlines()]


def test_kappa_is_that_of_the_held_out_items_the_run_scored(images, tmp_path, capsys):
    rows = measured(tmp_path, images, "--samples", 5)
    model, _ = load(images)
    data = open_images("digits", size=8, channels=1, seed=0)
    pixels = data.prepare(data.held_out.images[:5])
    expected = KappaMonitor(model, samples=5).measure({"images": pixels}, step=2)
    assert rows == json.loads(json.dumps(expected))
    assert "mean κ of 2 layers" in capsys.readouterr().out


def test_files_are_measured_instead_and_drawn(images, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    write_pictures(tmp_path / "pictures")
    plot = tmp_path / "kappa.png"
    args = ["--data", tmp_path / "pictures", "--plot", plot, "--head-report"]
    rows = measured(tmp_path, images / "model.safetensors", *args)
    assert [row["layer"] for row in rows] == ["blocks.0.attn", "blocks.1.attn"]
    assert all(row["kappa"] and "isotropy" in row for row in rows)
    assert plot.stat().st_size > 1000


def test_hidden_files_are_not_measured(images, tmp_path):
    write_pictures(tmp_path / "pictures")
    expected = measured(tmp_path, images, "--data", tmp_path / "pictures")
    write_hidden(tmp_path / "pictures", "9.png", b"no picture")
    assert measured(tmp_path, images, "--data", tmp_path / "pictures") == expected


@pytest.mark.parametrize("script", [gpt, bert], ids=lambda script: script.PROGRAM)
def test_text_is_measured_on_its_held_out_part_and_on_files(script, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = train_text(script, tmp_path)
    (own,) = measured(tmp_path, out, "--samples", 4)
    assert (own["layer"], own["tokens"]) == ("blocks.0.attn", 16)
    (other,) = measured(tmp_path, out, "--samples", 4, "--data", Path(__file__))
    assert other["tokens"] == 16
    assert other["entropy"] != own["entropy"]


def test_line_ends_and_byte_order_marks_change_nothing(tmp_path):
    out = train_text(gpt, tmp_path)
    plain, *others = (
        measured(tmp_path, out, "--samples", 1, "--data", path)
        for path in write_all(tmp_path).values()
    )
    assert others == [plain] * 4


def test_sentences_are_measured_on_their_validation_split(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_task(tmp_path, "rte")
    pretrained = train_text(bert, tmp_path)
    glue = ["--finetune", "glue", "--glue", tmp_path, "--checkpoint", pretrained]
    short = ["--steps", 1, "--batch-size", 4, "--workers", 0, "--tasks", "rte"]
    run(bert, *glue, *short, "--context", 16, "--out", tmp_path / "tuned")
    (row,) = measured(tmp_path, tmp_path / "tuned" / "rte", "--samples", 4)
    assert row["layer"] == "blocks.0.attn"


def test_data_that_is_gone_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = train_text(gpt, tmp_path)
    (tmp_path / "letters.txt").unlink()
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        measure.main([str(out)])
    (line,) = capsys.readouterr().err.splitlines()
    assert "its held-out items cannot be opened, give --data FILES: --data " in line
