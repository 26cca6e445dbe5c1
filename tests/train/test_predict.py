"""Predictions of what was trained: pictures, and text to go on with."""

import json
from pathlib import Path

import pytest
import torch

from tests.train.line_ends import TEXT, write_all
from tests.train.trained import gpt, train_text, train_vit, write_pictures
from train import predict
from train.data.images import open_images
from train.export import load


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return train_vit(tmp_path_factory.mktemp("images") / "run")


@pytest.fixture(scope="module")
def writer(tmp_path_factory) -> Path:
    return train_text(gpt, tmp_path_factory.mktemp("writer"))


def predicted(capsys, *args: object) -> list[dict]:
    capsys.readouterr()
    assert predict.main([*map(str, args), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refusal(capsys, *args: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        predict.main([str(arg) for arg in args])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_picture_gets_the_probabilities_that_its_pixels_had_in_training(images, tmp_path, capsys):
    paths = write_pictures(tmp_path / "pictures")
    model, info = load(images)
    data = open_images("digits", size=8, channels=1, seed=0)
    # The first digits of all are the first of their classes, so they are held out.
    pixels = data.prepare(data.held_out.images[:3])
    with torch.no_grad():
        expected = model(pixels).softmax(1)
    rows = predicted(capsys, images, tmp_path / "pictures", "--top", 10)
    assert [row["name"] for row in rows] == [str(path) for path in paths]
    for row, probabilities in zip(rows, expected):
        assert [each["label"] for each in row["labels"]] == [
            info.classes[place] for place in probabilities.argsort(descending=True)
        ]
        found = torch.tensor([each["probability"] for each in row["labels"]])
        # A picture has 256 levels for the digit's 17.
        assert torch.allclose(found, probabilities.sort(descending=True).values, atol=0.01)


def test_what_is_no_picture_is_named_and_the_others_go_on(images, tmp_path, capsys):
    write_pictures(tmp_path / "pictures")
    (tmp_path / "pictures" / "1.png").write_text("no picture")
    gone = tmp_path / "gone.png"
    assert predict.main([str(images), str(tmp_path / "pictures"), str(gone)]) == 1
    said = capsys.readouterr()
    _, first, second = said.err.splitlines()
    assert "1.png, which is no readable image" in first
    assert "gone.png cannot be read: No such file" in second
    assert [line for line in said.out.splitlines() if line.endswith("png")] == [
        str(tmp_path / "pictures" / name) for name in ("0.png", "2.png")
    ]
    assert "%" in said.out.splitlines()[1]


def test_what_cannot_be_used_is_refused_in_one_line(images, writer, tmp_path, capsys):
    assert "no files: give pictures" in refusal(capsys, images)
    assert "no text: give --prompt" in refusal(capsys, writer)
    assert "which takes pictures" in refusal(capsys, images, "--prompt", "x")
    assert "must be an intact checkpoint or a run with one" in refusal(capsys, tmp_path, "x")
    (tmp_path / "w").write_text("no weights")
    assert "is not a weights file of a run" in refusal(capsys, tmp_path / "w", "x")
    (tmp_path / "empty").mkdir()
    assert "holds no picture" in refusal(capsys, images, tmp_path / "empty")


def test_a_prompt_goes_on_by_the_seed(writer, tmp_path, capsys):
    run_with = [writer, "--prompt", "aaaa", "--tokens", 30]
    (first,) = predicted(capsys, *run_with, "--seed", 1)
    (again,) = predicted(capsys, *run_with, "--seed", 1)
    (other,) = predicted(capsys, *run_with, "--seed", 2)
    assert first == again != other
    assert first["text"].startswith("aaaa")
    (likeliest,) = predicted(capsys, *run_with, "--temperature", 0, "--seed", 1)
    assert predicted(capsys, *run_with, "--temperature", 0, "--seed", 2) == [likeliest]
    (tmp_path / "prompt.txt").write_text("aaaa")
    (read,) = predicted(capsys, writer, tmp_path / "prompt.txt", "--tokens", 30, "--seed", 1)
    assert read["text"] == first["text"]
    (tmp_path / "no text").write_bytes(b"\xff")
    assert predict.main([str(writer), str(tmp_path / "no text")]) == 1
    assert "is not text in UTF-8" in capsys.readouterr().err


def test_line_ends_and_byte_order_marks_change_nothing(writer, tmp_path, capsys):
    paths = write_all(tmp_path)
    prompts = [f"--prompt={path.read_bytes().decode('utf-8-sig')}" for path in paths.values()]
    plain, *others = predicted(capsys, writer, *paths.values(), *prompts, "--tokens", 9)
    assert [row["text"] for row in others] == [plain["text"]] * 9
    assert plain["text"].startswith(TEXT)
