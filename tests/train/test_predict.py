"""Predictions of what was trained: pictures, text to go on with, masked tokens, sentences."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.glue_files import write_task
from tests.train.hidden_files import write_hidden
from tests.train.line_ends import TEXT, write_all
from tests.train.published import write_lists, write_pairs, write_pathfinder, write_reviews
from tests.train.trained import bert, gpt, run, train_text, train_vit, write_pictures
from train import lra, predict
from train.data.images import open_images
from train.data.longrange.listops import IDS
from train.export import load


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return train_vit(tmp_path_factory.mktemp("images") / "run")


@pytest.fixture(scope="module")
def writer(tmp_path_factory) -> Path:
    return train_text(gpt, tmp_path_factory.mktemp("writer"))


@pytest.fixture(scope="module")
def filler(tmp_path_factory) -> Path:
    return train_text(bert, tmp_path_factory.mktemp("filler"))


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


def test_linked_folders_and_files_are_followed(images, tmp_path, capsys):
    paths = write_pictures(tmp_path / "pictures")
    (tmp_path / "links" / "deep").mkdir(parents=True)
    (tmp_path / "links" / "folder").symlink_to(tmp_path / "pictures")
    (tmp_path / "links" / "deep" / "file.png").symlink_to(paths[0])
    (tmp_path / "links" / "deep" / "around").symlink_to(tmp_path / "links")
    rows = predicted(capsys, images, tmp_path / "links")
    names = [row["name"].removeprefix(f"{tmp_path}/links/") for row in rows]
    assert names == ["deep/file.png", *(f"folder/{path.name}" for path in paths)]


def test_hidden_files_of_a_folder_are_no_pictures(images, tmp_path, capsys):
    paths = write_pictures(tmp_path / "pictures")
    for folder in (tmp_path / "pictures", tmp_path / "pictures" / "deep"):
        folder.mkdir(exist_ok=True)
        write_hidden(folder, "9.png", paths[0].read_bytes())
    rows = predicted(capsys, images, tmp_path / "pictures")
    assert [row["name"] for row in rows] == [str(path) for path in paths]
    # One that is named is read.
    (row,) = predicted(capsys, images, tmp_path / "pictures" / "._9.png")
    assert row["name"].endswith("._9.png")


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
    assert "takes pictures, and no --prompt" in refusal(capsys, images, "--prompt", "x")
    assert "must be an intact checkpoint or a run with one" in refusal(capsys, tmp_path, "x")
    (tmp_path / "w").write_text("no weights")
    assert "is no file of weights of a run" in refusal(capsys, tmp_path / "w", "x")
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
    assert "is no text in UTF-8" in capsys.readouterr().err


def test_line_ends_and_byte_order_marks_change_nothing(writer, tmp_path, capsys):
    paths = write_all(tmp_path)
    prompts = [f"--prompt={path.read_bytes().decode('utf-8-sig')}" for path in paths.values()]
    plain, *others = predicted(capsys, writer, *paths.values(), *prompts, "--tokens", 9)
    assert [row["text"] for row in others] == [plain["text"]] * 9
    assert plain["text"].startswith(TEXT)


def test_a_mask_is_filled_with_the_likeliest_token_that_stands_for_text(filler, capsys):
    (row,) = predicted(capsys, filler, "--prompt", "aa[MASK]aa[MASK]", "--top", 3)
    assert len(row["masks"]) == 2
    model, info = load(filler)
    tokenizer = predict.tokenizer_of(info)
    tokens = torch.tensor([tokenizer.encode("aa[MASK]aa[MASK]")])
    with torch.no_grad():
        best = model(tokens)[0, [2, 5], :256].argmax(1).tolist()
    assert [m[0]["label"] for m in row["masks"]] == [
        predict.legible(tokenizer.decode([t])) for t in best
    ]
    for text, said in (("aaa", "there is no [MASK]"), ("[MASK]" + "a" * 99, "the model takes 16")):
        assert predict.main([str(filler), "--prompt", text]) == 1
        weights, line = capsys.readouterr().err.splitlines()
        assert weights.startswith(f"weights: {filler / 'model_best.safetensors'}, step 2, held-out")
        assert said in line


def test_sentences_get_the_names_of_their_tasks_classes(filler, tmp_path, capsys):
    write_task(tmp_path, "mrpc")
    write_task(tmp_path, "stsb")
    glue = ["--finetune", "glue", "--glue", tmp_path, "--checkpoint", filler / "model.safetensors"]
    short = ["--steps", 1, "--batch-size", 4, "--context", 16, "--workers", 0]
    run(bert, *glue, *short, "--tasks", "mrpc,stsb", "--out", tmp_path / "tuned")
    pair = "the cat ||| a dog"
    (row,) = predicted(capsys, tmp_path / "tuned" / "mrpc", "--prompt", pair)
    assert {each["label"] for each in row["labels"]} == {"equivalent", "different"}
    (row,) = predicted(capsys, tmp_path / "tuned" / "stsb", "--prompt", pair)
    assert isinstance(row["value"], float)
    assert predict.main([str(tmp_path / "tuned" / "mrpc"), "--prompt", "one"]) == 1
    assert "2 sentences, with ||| between, got 1" in capsys.readouterr().err


def test_sentences_and_prompts_that_are_cut_or_lost_are_said(writer, filler, tmp_path, capsys):
    write_task(tmp_path, "cola")
    glue = ["--finetune", "glue", "--glue", tmp_path, "--checkpoint", filler / "model.safetensors"]
    short = ["--steps", 1, "--batch-size", 4, "--context", 16, "--workers", 0]
    run(bert, *glue, *short, "--tasks", "cola", "--out", tmp_path / "tuned")
    capsys.readouterr()
    assert predict.main([str(tmp_path / "tuned" / "cola"), "--prompt", "the cat " * 9]) == 0
    assert "cut to the 16 tokens that the model sees" in capsys.readouterr().err
    assert predict.main([str(tmp_path / "tuned" / "cola"), "--prompt", "the cat"]) == 0
    assert "cut to" not in capsys.readouterr().err
    assert predict.main([str(writer), "--prompt", "ab" * 20, "--tokens", "1"]) == 0
    assert "the model sees the last 16 of 40 tokens" in capsys.readouterr().err


def test_items_of_long_range_tasks_get_the_names_of_their_classes(tmp_path, capsys):
    flags = [*("--heads", 2, "--depth", 1, "--head-dim", 8, "--kappa-every", 0, "--workers", 0)]
    flags += ["--steps", 1, "--batch-size", 4, "--landmarks", 4]
    write_lists(tmp_path, [("[MAX 1 2 ]", 2), ("[MIN 3 4 ]", 3)] * 8)
    lists, out = ["--task", "listops", "--data", tmp_path, "--length", 16], tmp_path / "lists"
    run(lra, *flags, *lists, "--out", out)
    capsys.readouterr()
    (row,) = predicted(capsys, out, "--prompt", "[MAX 2 9 [MIN 4 7 ] ]", "--top", 10)
    assert {each["label"] for each in row["labels"]} == set("0123456789")
    model, _ = load(out)
    ids = [IDS[word] for word in ["[MAX", "2", "9", "[MIN", "4", "7", "]", "]"]]
    tokens = torch.tensor([ids + [0] * (16 - len(ids))])
    with torch.no_grad():
        expected = model(tokens, torch.tensor([len(ids)]).int())[0].softmax(0)
    for each in row["labels"]:
        assert each["probability"] == pytest.approx(expected[int(each["label"])].item(), abs=1e-6)
    assert predict.main([str(out), "--prompt", "[MAX 2 nine ]"]) == 1
    assert "is no list such as [MAX 2 9 [MIN 4 7 ] ]" in capsys.readouterr().err
    assert predict.main([str(out), "--prompt", "[SM " + "1 " * 20 + "]"]) == 0
    assert "cut to the 16 tokens that the model sees" in capsys.readouterr().err

    write_reviews(tmp_path, 12)
    text = ["--task", "text", "--data", tmp_path, "--length", 60, "--model", "nystromformer_text"]
    run(lra, *flags, *text, "--out", tmp_path / "text")
    file = tmp_path / "aclImdb" / "test" / "pos" / "11_7.txt"
    rows = predicted(capsys, tmp_path / "text", file, "--prompt", "good")
    names = [{each["label"] for each in row["labels"]} for row in rows]
    assert names == [{"negative", "positive"}] * 2
    done = json.loads((tmp_path / "text" / "summary.json").read_text())
    long = sum(path.stat().st_size > 60 for path in (tmp_path / "aclImdb" / "test").rglob("*.txt"))
    assert done["test_items_cut"] == f"{long} of 24"
    assert 0 < long < 24

    write_pairs(tmp_path, [f"text {i}" for i in range(9)])
    pairs = ["--task", "retrieval", "--data", tmp_path, "--length", 30]
    run(lra, *flags, *pairs, "--model", "nystromformer_retrieval", "--out", tmp_path / "pairs")
    (row,) = predicted(capsys, tmp_path / "pairs", "--prompt", "one ||| two")
    assert {each["label"] for each in row["labels"]} == {"citation", "no citation"}
    write_pathfinder(tmp_path / "images", 20)
    images = ["--task", "pathfinder", "--data", tmp_path / "images", "--landmarks", 64]
    run(lra, *flags, *images, "--model", "nystromformer_pathfinder", "--out", tmp_path / "paths")
    image = next((tmp_path / "images").rglob("*.png"))
    (row,) = predicted(capsys, tmp_path / "paths", image)
    assert {each["label"] for each in row["labels"]} == {"connected", "not connected"}


@pytest.mark.slow
def test_it_runs_as_a_module(images, tmp_path):
    write_pictures(tmp_path / "pictures")
    command = [sys.executable, "-m", "train.predict", str(images), str(tmp_path / "pictures")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1)
    assert done.stdout.count("%") == 15
