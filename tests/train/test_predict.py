"""``train/predict.py`` on runs of a few steps: pictures, text, and what it refuses."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.train import trained
from train import lra, predict, vit

PICTURES = ["--model", "vit_base_lean", "--width", "32", "--depth", "1", "--heads", "2"]
PICTURES += ["--img-size", "32", "--patch-size", "8", "--recipe", "small", "--batch-size", "8"]
PICTURES += ["--workers", "0", "--kappa-every", "0"]


def said(capsys, *args: object) -> str:
    """What the script prints."""
    capsys.readouterr()
    predict.main([str(arg) for arg in args])
    return capsys.readouterr().out


def refused(capsys, *args: object) -> str:
    """The one line with which it ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        predict.main([str(arg) for arg in args])
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("predict.py: error: ")
    return line


def write_pictures(root: Path, classes: dict[str, int], count: int) -> Path:
    """Write pictures whose class is the colour that is brightest."""
    draw = np.random.default_rng(count)
    for name, channel in classes.items():
        folder = root / name
        folder.mkdir(parents=True)
        for place in range(count):
            pixels = draw.integers(0, 60, (40, 50, 3), dtype=np.uint8)
            pixels[..., channel] += 150
            Image.fromarray(pixels).save(folder / f"{place}.png")
    return root


@pytest.fixture(scope="module")
def colours(tmp_path_factory) -> Path:
    """The folder of a run that learned three colours, beside its data."""
    folder = tmp_path_factory.mktemp("colours")
    names = {"red": 0, "grün": 1, "blue": 2}
    for split, count in (("train", 12), ("val", 5)):
        write_pictures(folder / "data" / split, names, count)
    out = folder / "run"
    flags = [*PICTURES, "--data", folder / "data", "--steps", "30", "--eval-every", "0"]
    vit.main([str(arg) for arg in (*flags, "--out", out)])
    return out


def test_a_folder_of_classes_gives_the_accuracy_of_the_run_and_a_confusion_matrix(colours, capsys):
    text = said(capsys, colours, colours.parent / "data" / "val")
    assert len(re.findall(r"^\S+\.png: \w+ \d+\.\d%, ", text, re.M)) == 15
    share = float(re.search(r"^accuracy ([\d.]+)% of 15 pictures$", text, re.M)[1])
    summary = json.loads((colours / "summary.json").read_text())
    assert share == pytest.approx(100 * summary["held_out_accuracy"], abs=0.01)
    rows = re.findall(r"^  (\w+): accuracy ([\d.]+)%; predicted (.*)$", text, re.M)
    assert [name for name, *_ in rows] == ["blue", "grün", "red"]
    for name, own, predicted in rows:
        counts = {k: int(v) for k, v in re.findall(r"(\w+) (\d+)", predicted)}
        assert sum(counts.values()) == 5
        assert counts.get(name, 0) / 5 == pytest.approx(float(own) / 100)


def test_pictures_are_classified_alike_in_batches_of_any_size(colours, capsys, monkeypatch):
    folder = colours.parent / "data" / "val"
    whole = said(capsys, colours, folder)
    monkeypatch.setattr(predict, "BATCH", 4)
    assert said(capsys, colours, folder) == whole


def test_pictures_alone_get_their_likeliest_classes(colours, capsys):
    picture = colours.parent / "data" / "val" / "red" / "0.png"
    line = said(capsys, colours, picture)
    assert line.startswith(f"{picture}: red ")
    shares = [float(share) for share in re.findall(r"([\d.]+)%", line)]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert said(capsys, colours / "model_best.safetensors", picture) == line
    assert said(capsys, colours, "--last", picture).startswith(f"{picture}: red ")


def test_folders_compare_by_their_names_in_any_order_and_form_of_unicode(colours, capsys, tmp_path):
    names = {"red": 0, "gru\N{COMBINING DIAERESIS}n": 1}
    text = said(capsys, colours, write_pictures(tmp_path / "some", names, 3))
    assert "accuracy 100.00% of 6 pictures" in text


def test_what_is_taken_for_another_class_counts_there(colours, capsys, tmp_path):
    folder = write_pictures(tmp_path / "some", {"red": 2, "blue": 2}, 4)
    text = said(capsys, colours, folder)
    assert "accuracy 50.00% of 8 pictures" in text
    assert (
        "  blue: accuracy 100.0%; predicted blue 4\n  red: accuracy 0.0%; predicted blue 4" in text
    )


def test_a_folder_with_another_class_is_refused(colours, capsys, tmp_path):
    folder = write_pictures(tmp_path / "some", {"red": 0, "yellow": 1}, 1)
    line = refused(capsys, colours, folder)
    assert line.endswith("some has the folder yellow, which is not a class of the model")


def test_folders_that_are_no_classes_are_pictures_without_an_accuracy(colours, capsys, tmp_path):
    folder = write_pictures(tmp_path / "years", {"2023": 0, "2024": 1}, 1)
    predict.main([str(colours), str(folder)])
    both = capsys.readouterr()
    assert len(both.out.splitlines()) == 2
    assert "has the folder 2023, which is not a class of the model: no accuracy" in both.err


def test_a_picture_that_cannot_be_read_is_named_and_the_others_go_on(colours, capsys, tmp_path):
    good = colours.parent / "data" / "val" / "red" / "0.png"
    (tmp_path / "bad.png").write_bytes(b"no picture")
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        predict.main([str(colours), str(tmp_path / "bad.png"), str(tmp_path / "none"), str(good)])
    both = capsys.readouterr()
    assert both.out.startswith(f"{good}: red ")
    assert "bad.png, which is not a readable image" in both.err
    assert "No such file or directory" in both.err
    assert "2 pictures cannot be read" in both.err.splitlines()[-1]


def test_a_digit_is_read_as_the_bundled_ones(tmp_path, capsys):
    run = trained.train_vit(tmp_path / "run")
    Image.new("L", (8, 8)).save(tmp_path / "digit.png")
    assert re.match(r".*digit\.png: \d [\d.]+%, ", said(capsys, run, tmp_path / "digit.png"))


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> dict[str, Path]:
    """Runs of a GPT and a BERT on letters."""
    return {
        script.__name__.rpartition(".")[2]: trained.train_text(
            script, tmp_path_factory.mktemp(script.__name__.replace(".", "-"))
        )
        for script in (trained.gpt, trained.bert)
    }


def test_text_is_continued_as_the_flags_say(letters, capsys):
    run = letters["gpt"]
    greedy = said(capsys, run, "aa bb", "--tokens", 5, "--temperature", 0)
    assert greedy.startswith("aa bb")
    assert greedy == said(capsys, run, "aa bb", "--tokens", 5, "--temperature", 0, "--seed", 7)
    drawn = {said(capsys, run, "aa bb", "--tokens", 40, "--seed", seed) for seed in (1, 2)}
    assert len(drawn) == 2
    assert greedy == said(capsys, run, "aa bb", "--tokens", 5, "--top-k", 1)
    longest = said(capsys, run, "aa bb", "--tokens", 40, "--temperature", 0)
    assert len(longest) >= len(greedy)


def test_a_score_is_the_loss_of_all_tokens_and_of_the_bytes(letters, capsys, tmp_path):
    (tmp_path / "book.txt").write_text("abcé " * 20)  # é is two bytes, and two tokens
    line = said(capsys, letters["gpt"], tmp_path / "book.txt", "--score")
    found = re.search(
        r": 120 tokens, loss ([\d.]+) nats a token, ([\d.]+) bits per byte, perplexity ([\d.]+)",
        line,
    )
    loss, bits, perplexity = map(float, found.groups())
    assert bits == pytest.approx(loss / math.log(2), rel=1e-3)
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    assert 3 < loss < 7  # little was learned: near the logarithm of 257 tokens


def test_no_mask_is_filled_with_a_token_that_stands_for_no_text(letters, capsys, monkeypatch):
    monkeypatch.setattr(predict, "TOP", 1000)
    text = said(capsys, letters["bert"], "aa [MASK]b")
    assert ", [MASK] 0.0%" in text
    assert not re.search(r"\[MASK\] 0\.[1-9]", text)


def test_masks_are_filled_in(letters, capsys):
    lines = said(capsys, letters["bert"], "aa [MASK]b [MASK]").splitlines()
    assert len(lines) == 2
    assert all(len(re.findall(r"[\d.]+%", line)) == 5 for line in lines)
    assert "must have a [MASK] and at most 16 tokens" in refused(capsys, letters["bert"], "a b")


def test_text_that_cannot_be_meant_is_refused(letters, capsys, tmp_path):
    run = letters["gpt"]
    assert "--score is for runs of train/gpt.py" in refused(capsys, letters["bert"], "a", "--score")
    assert "missing.txt: no such file" in refused(capsys, run, "missing.txt")
    assert "some/where: no such file" in refused(capsys, run, "some/where")
    (tmp_path / "latin.txt").write_bytes("für".encode("latin1"))
    assert "latin.txt is not text in UTF-8" in refused(capsys, run, tmp_path / "latin.txt")
    assert "must have at least one token" in refused(capsys, run, "", "--score")
    assert f"is not a regular file: '{tmp_path}'" in refused(capsys, run, tmp_path)


def test_text_longer_than_the_name_of_a_file_may_be_is_text(letters, capsys):
    text = "слово " * 40  # fewer than 256 characters, and more than 255 bytes
    assert said(capsys, letters["gpt"], text, "--tokens", 0) == f"{text}\n"


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", ""])
def test_a_device_that_is_not_there_is_refused(letters, capsys, device):
    line = refused(capsys, letters["gpt"], "a b", "--device", device)
    assert "--device: must be cpu or one of the" in line
    assert f"got '{device}'" in line


def test_what_is_no_run_is_refused(capsys, tmp_path):
    assert "manifest.json: No such file" in refused(capsys, tmp_path / "nowhere", "a b")


@pytest.mark.parametrize(("setting", "value"), [("length", "many"), ("task", "chess")])
def test_forged_settings_of_a_long_range_run_are_one_line(setting, value, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        flags = ["--sizes", "32,8,8", "--batch-size", "8", "--steps", "1", "--kappa-every", "0"]
        lra.main([*flags, "--workers", "0", "--out", str(tmp_path / "run")])
    assert re.match(r"\[MAX 1 2 \]: \d [\d.]+%", said(capsys, tmp_path / "run", "[MAX 1 2 ]"))
    path = tmp_path / "run" / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    settings = json.loads(metadata["settings"]) | {setting: value}
    save_file(load_file(path), path, metadata | {"settings": json.dumps(settings)})
    line = refused(capsys, path, "[MAX 1 2 ]")
    assert line.endswith("does not name its task and length of the Long-Range Arena")
