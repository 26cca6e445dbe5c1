"""Copies of one content, and files that hold nothing, are no further data."""

import shutil

import pytest
from PIL import Image

from tests.train.image_files import photographs, write_folder, write_parquet, write_tars
from train.data.copies import contents
from train.data.images.sources import find_images
from train.data.text import open_text
from train.data.text.sources import find_source
from train.data.text.tokenizers import GPT

TRAIN, HELD_OUT = photographs("train", 12), photographs("val", 5)


def test_equal_bytes_have_equal_contents(tmp_path):
    texts = {
        "a": b"x" * 9000,
        "b": b"y" + b"x" * 8999,
        "c": b"x" * 9000,
        "d": b"",
        "e": b"",
        "f": b"z",
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "g").symlink_to(tmp_path / "f")
    names = [*texts, "g", "none"]
    found = contents(tmp_path / name for name in names)
    alike = [[found.index(file) for file in found]]
    assert alike == [[0, 1, 0, 3, 3, 5, 5, 7]]


@pytest.mark.parametrize("form", ["folder", "csv"])
def test_copies_of_a_picture_are_on_one_side(root, form):
    write_folder(root, "", TRAIN)
    for path in list(root.glob("*/*")):
        for number in range(3):
            shutil.copy(path, path.with_name(f"{path.stem} copy {number}.jpg"))
    name = root
    if form == "csv":
        name = root / "labels.csv"
        rows = (f"{p.relative_to(root)},{p.parent.name}\n" for p in root.glob("*/*"))
        name.write_text("path,label\n" + "".join(rows))
    sources = find_images(str(name), 0)
    train, held_out = (
        {part.read(index)[0] for index in range(len(part))}
        for part in (sources.train, sources.held_out)
    )
    assert (len(train), len(held_out)) == (9, 3)
    assert not train & held_out
    assert len(sources.train) + len(sources.held_out) == 48


@pytest.mark.parametrize("split", ["", "train", "val"])
def test_a_copy_with_another_label_is_named_in_the_plan(root, split):
    write_folder(root, split and "train", TRAIN)
    if split:
        write_folder(root, "val", HELD_OUT)
    first, other = sorted((root / (split and "train")).iterdir())[:2]
    other = root / split / other.name
    picture = next(first.iterdir())
    assert "copies_with_another_label" not in find_images(str(root), 0).facts()
    shutil.copy(picture, other / "again.jpg")
    sources = find_images(str(root), 0)
    said = f"1: {other / 'again.jpg'} is n02102040, {picture} n01440764"
    assert sources.facts()["copies_with_another_label"] == said
    sides = [
        {part.name(index) for index in range(len(part))}
        for part in (sources.train, sources.held_out)
    ]
    pair = {str(picture), str(other / "again.jpg")}
    assert split == "val" or any(pair <= side for side in sides)
    picture.unlink()
    picture.symlink_to(other / "again.jpg")
    with pytest.raises(ValueError, match="labels n01440764 and n02102040 of one image"):
        find_images(str(root), 0)


def test_pictures_of_one_size_and_end_are_told_apart(root):
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for number in range(9):
            image = Image.new("RGB", (200, 200))
            image.putpixel((0, 199), (number, ord(name), 0))  # the first row of a BMP's file
            image.save(root / name / f"{number}.bmp")
    sources = find_images(str(root), 0)
    assert (len(sources.train), len(sources.held_out)) == (16, 2)


def test_copies_in_both_splits_are_counted_in_the_plan(root):
    write_folder(root, "train", TRAIN)
    write_folder(root, "val", HELD_OUT)
    assert "held_out_and_trained_on" not in find_images(str(root), 0).facts()
    copy = next((root / "val").glob("*/*"))
    copy.write_bytes(TRAIN[-1].content)
    assert find_images(str(root), 0).facts()["held_out_and_trained_on"] == f"1 of 5: {copy}"


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_copies_of_a_text_are_read_once(request, root, ending):
    if ending == "jsonl":
        request.getfixturevalue("hub")
    for folder in ("one", "two"):
        (root / folder).mkdir(parents=True)
        for number in range(4):
            row = '{"text": "text %d"}' if ending == "jsonl" else "text %d"
            (root / folder / f"{number}.{ending}").write_text(row % number)
    assert sorted(find_source(str(root)).documents()) == [f"text {i}" for i in range(4)]


def emptied(path) -> None:
    from pyarrow import parquet

    parquet.write_table(parquet.read_table(path).slice(0, 0), path)


@pytest.mark.parametrize("form", ["{}", "hf:{}", "hf-stream:{}"])
@pytest.mark.parametrize("kind", ["no rows", "no bytes"])
def test_parquet_files_without_rows_are_named(hub, root, form, kind):
    write_parquet(root, "train", TRAIN, shards=2)
    write_parquet(root, "validation", HELD_OUT, shards=1)
    files = sorted((root / "data").iterdir())
    for path in files[:1]:
        emptied(path) if kind == "no rows" else path.write_bytes(b"")
    sources = find_images(form.format(root), 0)
    assert (len(sources.train), len(sources.held_out)) == (6, 5)
    assert sources.facts()["left_out"] == f"1 without rows: {files[0]}"
    for path in files[1:]:
        emptied(path)
    message = rf"{files[0]} has no rows: .*, nor have 2 more$"
    with pytest.raises(ValueError, match=message) as error:
        find_images(form.format(root), 0)
    assert str(error.value).count("--data") == 1


EMPTY = {
    "header.csv": "text,id\n",
    "header and blank lines.csv": '\ufeff"text"\r\n\r\n',
    "blank.csv": "\n\n",
    "nothing.csv": "",
    "nothing.jsonl": "",
    "blank.jsonl": "\n \n",
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("form", ["{0}/{1}", "{0}", "hf:{0}"])
def test_tables_of_text_without_rows_are_named(hub, root, monkeypatch, name, form):
    monkeypatch.setenv("XDG_CACHE_HOME", str(root.parent))
    root.mkdir()
    (root / name).write_bytes(EMPTY[name].encode())
    with pytest.raises(ValueError, match=f"{name} h.* no .*: it is empty, blank or a header$"):
        open_text(form.format(root, name), "bytes", specials=GPT)
    ending = name.rpartition(".")[2]
    row = '{"text": "a row"}\n' if ending == "jsonl" else "text,id\na row,1\n"
    (root / f"filled.{ending}").write_text(row)
    if form != "{0}/{1}":
        assert [*find_source(form.format(root, name)).documents()] == ["a row"]


@pytest.mark.parametrize("form", ["{}", "hf:{}", "hf-stream:{}"])
@pytest.mark.parametrize("name", ["data", "part", "[part]*", "Train"])
def test_linked_folders_of_parquet_files_are_read(hub, root, form, name):
    write_parquet(root / "store", "train", TRAIN, shards=2)
    write_parquet(root / "store", "validation", HELD_OUT, shards=1)
    (root / "linked").mkdir()
    (root / "linked" / "around").symlink_to(root / "linked")
    if name == "Train":
        for part, of in (("Train", "train"), ("Val", "validation")):
            (root / part).mkdir()
            for file in (root / "store" / "data").glob(f"{of}*"):
                (root / part / file.name).symlink_to(file)
            (root / "linked" / part).symlink_to(root / part)
    else:
        (root / "linked" / name).symlink_to(root / "store" / "data")
        (root / "linked" / "again").symlink_to(root / "store" / "data")
    sources = find_images(form.format(root / "linked"), 0)
    assert (len(sources.train), len(sources.held_out)) == (12, 5)


@pytest.mark.parametrize("form", ["{}", "hf:{}"])
def test_linked_folders_of_tars_are_read(hub, root, form):
    write_tars(root / "store", "train", TRAIN, shards=2)
    write_tars(root / "store", "val", HELD_OUT, shards=1)
    (root / "linked").mkdir()
    (root / "linked" / "shards").symlink_to(root / "store")
    sources = find_images(form.format(root / "linked"), 0)
    assert (len(sources.train), len(sources.held_out)) == (12, 5)
    for tar in (root / "store").glob("train*"):
        tar.write_bytes(tar.read_bytes()[:1000])
    with pytest.raises(ValueError, match="no tar or cut off after 1,000 bytes"):
        find_images(form.format(root / "linked"), 0)


def test_linked_folders_of_rows_of_text_are_read(hub, root):
    (root / "store").mkdir(parents=True)
    (root / "store" / "rows.jsonl").write_text('{"text": "a row"}\n')
    (root / "linked").mkdir()
    (root / "linked" / "part").symlink_to(root / "store")
    for form in ("{}", "hf:{}"):
        assert [*find_source(form.format(root / "linked")).documents()] == ["a row"]


def test_downloads_that_failed_are_no_copies(root):
    write_folder(root, "", TRAIN)
    for folder in root.iterdir():
        for number in range(6):
            (folder / f"failed {number}.jpg").write_bytes(b"404 Not Found")
    sources = find_images(str(root), 0)
    assert len(sources.train) + len(sources.held_out) == 30
