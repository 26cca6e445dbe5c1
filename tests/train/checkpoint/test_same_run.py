"""A run that goes on has the data and the tokeniser that it began with, or is refused."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.train.image_files import photographs, write_parquet
from train import bert, gpt, lra, vit
from train.data.text import tokenizers

QUICK = ["--batch-size", 4, "--eval-every", 0, "--kappa-every", 0, "--workers", 0]
SMALL = [*QUICK, "--heads", 2, "--depth", 1, "--head-dim", 8]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(script, *args: object) -> None:
    script.main([str(arg) for arg in args])


def refused(script, *args: object, capsys: pytest.CaptureFixture) -> str:
    """Run a script, which must stop with one line, and return that."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        run(script, *args)
    error = capsys.readouterr().err
    # The library for tables shows how far it is.
    (said,) = [line for line in error.splitlines() if line and "examples/s" not in line]
    return said


def sentences(count: int, word: str = "kite") -> str:
    return "\n\n".join(f"On day {i} Mia found a {word} near the hill." for i in range(count))


def text_run(script, folder: Path, *args: object) -> list[object]:
    """Write a text, and return the flags of a run on it."""
    (folder / "t.txt").write_text(sentences(60))
    own = ["--samples", 0] if script is gpt else []
    data = ["--data", folder / "t.txt", "--out", folder / "run"]
    return [*SMALL, "--context", 8, *own, *data, *args]


@pytest.mark.parametrize(("script", "tokenizer"), [(gpt, "bytes"), (bert, "wordpiece")])
def test_a_text_with_other_contents_is_refused(tmp_path, capsys, script, tokenizer):
    args = text_run(script, tmp_path, "--tokenizer", tokenizer)
    run(script, *args, "--steps", 1)
    kept = (tmp_path / "run" / "tokenizer.json").read_text()
    before = (tmp_path / "t.txt").stat()
    for changed in (sentences(60, "boat"), sentences(400), sentences(50)):
        (tmp_path / "t.txt").write_text(changed)
        # As long as before, and as old by the time that programs may set.
        os.utime(tmp_path / "t.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
        error = refused(script, *args, "--steps", 2, "--resume", "auto", capsys=capsys)
        assert "the text of --data has changed since the run began: restore it, or give" in error
        assert (tmp_path / "run" / "tokenizer.json").read_text() == kept


def test_the_own_tokeniser_goes_on_where_one_would_be_trained(tmp_path, cache, monkeypatch, capsys):
    args = text_run(gpt, tmp_path, "--tokenizer", "bpe", "--vocab-size", 280)
    run(gpt, *args, "--steps", 1)
    kept = (tmp_path / "run" / "tokenizer.json").read_text()
    shutil.rmtree(cache)
    # As a version of the library does that settles a draw in another way.
    monkeypatch.setattr(tokenizers, "_trained", None)
    os.utime(tmp_path / "t.txt")
    run(gpt, *args, "--steps", 2, "--resume", "auto")
    assert "resumed from" in capsys.readouterr().out
    assert (tmp_path / "run" / "tokenizer.json").read_text() == kept
    newest = tmp_path / "run" / "checkpoints" / "step-00000002"
    run(gpt, *args, "--steps", 3, "--out", tmp_path / "other", "--resume", newest)
    assert (tmp_path / "other" / "tokenizer.json").read_text() == kept


def picture(path: Path, side: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(side).integers(0, 256, (side, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def test_pictures_with_other_names_or_sizes_are_refused(tmp_path, capsys):
    root = tmp_path / "pictures"
    for i in range(12):
        picture(root / ("ant", "bee")[i % 2] / f"{i:02d}.png", 40 + i)
    args = [*QUICK, "--heads", 2, "--depth", 1, "--data", root, "--out", tmp_path / "run"]
    run(vit, *args, "--steps", 1)
    for path in root.rglob("*.png"):
        os.utime(path)
    run(vit, *args, "--steps", 2, "--resume", "auto")
    assert "resumed from" in capsys.readouterr().out
    picture(root / "bee" / "11.png", 90)
    error = refused(vit, *args, "--steps", 3, "--resume", "auto", capsys=capsys)
    assert "the set of pictures of --data has changed since the run began" in error


def ways_to(folder: Path, monkeypatch) -> list[str]:
    """Return a path, as one may write it, and one of a copy elsewhere."""
    monkeypatch.chdir(folder.parent)
    copy = folder.parent / "scratch" / "of a job" / "copy"
    shutil.copytree(folder, copy)
    return [str(folder), f"{folder.name}/", f"./{folder.name}", f"x/../{folder.name}", str(copy)]


@pytest.mark.parametrize("kind", ["folders", "splits", "table", "table of files"])
def test_pictures_may_lie_elsewhere(tmp_path, monkeypatch, capsys, kind):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    (tmp_path / "x").mkdir()
    root = tmp_path / "data"
    if kind == "table":
        write_parquet(root, "train", photographs("train", 12), shards=2)
    else:
        for i in range(12):
            picture(root / ("ant", "bee")[i % 2] / f"{i:02d}.png", 40 + i)
    if kind == "splits":
        (tmp_path / "flat").mkdir()
        root.rename(tmp_path / "flat" / "train")
        (tmp_path / "flat").rename(root)
    form = "hf:{}" if "table" in kind else "{}"
    args = [*QUICK, "--heads", 2, "--depth", 1, "--out", tmp_path / "run", "--resume", "auto"]
    for step, name in enumerate(ways_to(root, monkeypatch), start=1):
        run(vit, *args, "--data", form.format(name), "--steps", step)
        assert ("resumed from" in capsys.readouterr().out) == (step > 1)
    file = next(path for path in sorted(root.rglob("*.*")) if path.is_file())
    if kind == "table":
        write_parquet(root, "train", photographs("val", 12), shards=2)
    else:
        file.rename(file.with_name("renamed.png"))
    error = refused(vit, *args, "--data", root, "--steps", 9, capsys=capsys)
    assert "the set of pictures of --data has changed since the run began" in error


@pytest.mark.parametrize(("script", "tokenizer"), [(gpt, "t.json"), (bert, "wordpiece")])
def test_text_and_its_tokeniser_may_lie_elsewhere(tmp_path, monkeypatch, capsys, script, tokenizer):
    (tmp_path / "x").mkdir()
    root = tmp_path / "data"
    for name, count in (("a", 60), ("b/c", 20), ("held/out", 30)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.txt").write_text(sentences(count))
    specials = tokenizers.GPT if script is gpt else tokenizers.BERT
    whole = tokenizers.Tokenizer(tokenizers._bytes(specials), "bytes")
    (root / "t.json").write_text(whole.files()["tokenizer.json"])
    args = [*SMALL, "--context", 8, "--out", tmp_path / "run", "--resume", "auto"]
    args += ["--samples", 0] if script is gpt else []
    for step, name in enumerate(ways_to(root, monkeypatch), start=1):
        data = ["--data", name, "--validation", f"{name}/held", "--steps", step]
        if tokenizer == "t.json":
            data += ["--tokenizer", f"{name}/t.json"]
        else:
            data += ["--tokenizer", tokenizer]
        run(script, *args, *data)
        assert ("resumed from" in capsys.readouterr().out) == (step > 1)
    (root / "held" / "out.txt").write_text(sentences(31))
    data[data.index("--validation") + 1] = root / "held"
    error = refused(script, *args, *data, "--steps", 9, capsys=capsys)
    assert "the text of --validation has changed since the run began" in error
    data = [*data[:2], *data[4:]]
    error = refused(script, *args, *data, "--steps", 9, capsys=capsys)
    assert "was saved with --validation" in error


def test_classes_that_were_renamed_are_refused(tmp_path, capsys):
    root = tmp_path / "pictures"
    for i in range(12):
        picture(root / ("ant", "bee")[i % 2] / f"{i:02d}.png", 40 + i)
    args = [*QUICK, "--heads", 2, "--depth", 1, "--data", root, "--out", tmp_path / "run"]
    run(vit, *args, "--steps", 1)
    (root / "ant").rename(root / "wasp")
    error = refused(vit, *args, "--steps", 3, "--resume", "auto", capsys=capsys)
    assert "the list of classes of --data has changed since the run began" in error


def test_other_kinds_of_data_are_refused(tmp_path, capsys):
    args = [*QUICK, "--heads", 2, "--depth", 1, "--model", "vit_digits", "--head-dim", 16]
    args += ["--out", tmp_path / "run", "--resume", "auto"]
    run(vit, *args, "--data", "digits", "--steps", 1)
    for i in range(12):
        picture(tmp_path / "data" / ("ant", "bee")[i % 2] / f"{i:02d}.png", 40 + i)
    error = refused(vit, *args, "--data", tmp_path / "data", "--steps", 3, capsys=capsys)
    assert "was saved with --data digits" in error


def test_lists_with_other_contents_are_refused(tmp_path, cache, capsys):
    args = [*SMALL, "--sizes", "20,8,8", "--out", tmp_path / "run"]
    run(lra, *args, "--steps", 1)
    (file,) = cache.rglob("listops*.npz")
    with np.load(file) as arrays:
        changed = dict(arrays)
    changed["dev_labels"][0] ^= 1
    np.savez(file, **changed)
    error = refused(lra, *args, "--steps", 2, "--resume", "auto", capsys=capsys)
    assert "the dev set of lists has changed since the run began" in error
