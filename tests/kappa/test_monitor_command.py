"""Kappa of saved models by one command: folders of timm and of transformers, without a network."""

import json
import socket
import time

import pytest
import torch

from leaner_kernels import measure
from leaner_kernels.monitor.__main__ import main

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def asked(monkeypatch) -> list:
    def refuse(*_args, **_kwargs):
        asked.append(_args)
        raise OSError("Network is unreachable")

    asked: list = []
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # the command sets it
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)  # before the Hub is asked again
    return asked


@pytest.fixture
def photographs(tmp_path):
    folder = tmp_path / "photographs"
    folder.mkdir()
    draw = torch.Generator().manual_seed(0)
    for name, mode in (("a.png", "RGB"), ("b.png", "L"), ("c.jpg", "CMYK")):
        bands = len(Image.new(mode, (1, 1)).getbands())
        pixels = torch.randint(0, 256, (40, 50, bands), generator=draw, dtype=torch.uint8)
        Image.fromarray(pixels.squeeze(-1).numpy(), mode).save(folder / name)
    (folder / "notes.txt").write_text("not an image")
    return folder


@pytest.fixture
def vit(tmp_path):
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 32, "num_classes": 3}
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    folder = tmp_path / "vit"
    timm.models.save_for_hf(model, folder, model_args=sizes)
    return folder, model.eval()


@pytest.fixture
def bert(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=32,
    )  # fmt: skip
    folder = tmp_path / "bert"
    model = transformers.BertModel(config)
    model.save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(["[UNK]", *alphabet])}
    characters = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="[UNK]"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, unk_token="[UNK]", model_max_length=24
    ).save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("Leaner transformers have more heads and less depth. " * 4)
    return folder, model.eval(), text


def test_a_folder_of_timm_is_measured_on_its_own_pictures(
    vit, photographs, tmp_path, capsys, asked
):
    folder, model = vit
    rows_file, picture = tmp_path / "rows.jsonl", tmp_path / "kappa.png"
    arguments = [str(folder), "--data", str(photographs), "--json", str(rows_file)]
    assert main([*arguments, "--plot", str(picture)]) == 0
    rows = [json.loads(line) for line in rows_file.read_text("utf-8").splitlines()]
    assert [row["layer"] for row in rows] == ["blocks.0.attn", "blocks.1.attn"]
    shape = {"input_size": (3, 32, 32)}
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model) | shape)
    images = [Image.open(path).convert("RGB") for path in sorted(photographs.glob("[abc].*"))]
    expected = measure(model, torch.stack([transform(image) for image in images]), samples=8)
    assert rows == expected
    printed = capsys.readouterr().out
    assert printed.startswith("layer ")
    assert "blocks.1.attn" in printed
    assert picture.stat().st_size > 5000
    assert asked == []


def test_a_folder_of_transformers_is_measured_on_text(bert, capsys, asked):
    folder, model, text = bert
    assert main([str(folder), "--data", str(text), "--samples", "3", "--head-report"]) == 0
    printed = capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(text.read_text())["input_ids"])[: 3 * 24].view(3, 24)
    rows = measure(model, {"input_ids": ids}, samples=3)
    assert all(row["layer"] in printed for row in rows)
    assert "mean share" in printed
    geometric = torch.tensor([row["kappa"] for row in rows]).log().mean().exp().item()
    assert f"geometric {geometric:,.0f}" in printed
    assert asked == []


SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2
}  # fmt: skip
TEXT = SIZES | {"vocab_size": 300, "max_position_embeddings": 32}
PICTURE = SIZES | {"image_size": 32, "patch_size": 16}


def test_a_model_that_needs_text_and_pictures_at_once_is_one_line(bert, capsys):
    folder, _, text = bert
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=PICTURE)
    transformers.CLIPModel(config).save_pretrained(folder)
    capsys.readouterr()
    assert main([str(folder), "--data", str(text)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    needs = "cannot be run with input_ids alone, it also takes pixel_values: call leaner_kernels"
    assert line.startswith(f"error: CLIPModel {needs}.measure(model, inputs)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["BERT", "--data", "PHOTOGRAPHS/a.png"], "takes text, and there is none among 1 files"),
        (["VIT", "--data", "TEXT"], "takes images, and there are none among 1 files"),
        (["VIT", "--data", "nothing"], "nothing is no file and no folder"),
        (["VIT/config.json", "--data", "TEXT"], "is a file: give the folder"),
        (["PHOTOGRAPHS", "--data", "TEXT"], "has no config.json"),
        (["VIT", "--data", "TEXT", "--samples", "0"], "--samples must be at least 1"),
        (["BERT", "--data", "PHOTOGRAPHS/bytes.txt"], "is not text in UTF-8"),
        (["resnet18", "--random-weights", "--data", "PHOTOGRAPHS"], "attention"),
        (["no_such", "--random-weights", "--data", "PHOTOGRAPHS"], "timm has no model"),
        (["vit_tiny_patch16_224", "--data", "PHOTOGRAPHS"], "cannot be had"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments, message, vit, bert, photographs, capsys):
    (photographs / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    places = {"VIT": vit[0], "BERT": bert[0], "TEXT": bert[2], "PHOTOGRAPHS": photographs}
    for place, path in places.items():
        arguments = [each.replace(place, str(path)) for each in arguments]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
