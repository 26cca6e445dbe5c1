"""The Long-Range Arena's tasks, read from tables and folders that the tests write."""

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from train.data import listops
from train.data.longrange import TASKS, open_task, padded

REVIEWS = [("neg", '"so" bad'), ("pos", 'a "good" one, NA'), ("neg", "NA"), ("pos", "007")] * 5
PAIRS = [(str(row % 2), f"first {row}", f"second {row}") for row in range(20)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def write(path: Path, rows: list[tuple[str, ...]], names: tuple[str, ...] = ()) -> None:
    """Write a table: .tsv with nothing quoted, .csv as the module csv does, or .parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        from datasets import Dataset

        Dataset.from_dict(dict(zip(names, zip(*rows)))).to_parquet(path)
    elif path.suffix == ".tsv":
        path.write_text("".join("\t".join(row) + "\n" for row in [names, *rows] if row))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([names, *rows] if names else rows)


def opened(task: str, data: object, length: int | None = None, **given):
    kind = TASKS[task]
    length = length or (16 if kind.text_columns else 1024)
    columns = {"text_columns": kind.text_columns or (), "label_column": kind.label_column} | given
    return open_task(task, str(data), length=length, **columns)


def text_of(tokens, length) -> str:
    """The text of a row of bytes, of which each token is one more than the byte."""
    return bytes((tokens[:length] - 1).tolist()).decode()


@pytest.mark.parametrize("kind", ["tsv", "csv", "parquet"])
def test_text_is_the_bytes_of_its_column_whatever_the_table(tmp_path, kind):
    for split, rows in (("train", REVIEWS), ("validation", REVIEWS[:4]), ("test", REVIEWS[:2])):
        write(tmp_path / f"{split}.{kind}", rows, ("label", "text"))
    items = opened("text", tmp_path)
    assert (items.classes, items.made) == (("neg", "pos"), ())
    assert [len(part) for part in (items.train, items.dev, items.test)] == [20, 4, 2]
    tokens, lengths, labels = items.train.__getitems__([(0, row) for row in range(4)])
    assert tokens.shape == (4, 16)
    assert [text_of(row, size) for row, size in zip(tokens, lengths)] == [t for _, t in REVIEWS[:4]]
    assert labels.tolist() == [0, 1, 0, 1]
    assert tokens[2, 2:].sum() == 0  # padding


def test_long_text_is_cut_and_padded_to_a_power_of_two(tmp_path):
    write(
        tmp_path / "train.csv", [("ab" * 50, str(row % 2)) for row in range(40)], ("text", "label")
    )
    items = opened("text", tmp_path, length=10)
    tokens, lengths, _ = items.train.__getitems__([(0, 0)])
    assert (tokens.shape, lengths.tolist()) == ((1, 16), [10])
    assert [padded(length) for length in (1000, 1024, 2000, 4000)] == [1024, 1024, 2048, 4096]


def test_pairs_are_two_sequences_also_of_the_published_file_without_names(tmp_path):
    for split in ("train", "eval", "test"):
        rows = [(f"{label}.0", "id", "id", *texts) for label, *texts in PAIRS]
        write(tmp_path / "aan" / f"new_aan_pairs.{split}.tsv", rows)
        write(tmp_path / "named" / f"{split}.tsv", PAIRS, ("label", "text1", "text2"))
    published = opened("retrieval", tmp_path / "aan", text_columns=("3", "4"), label_column="0")
    named = opened("retrieval", tmp_path / "named")
    assert published.classes == named.classes == ("0", "1")
    for items in (published, named):
        tokens, lengths, labels = items.dev.__getitems__([(0, 3), (0, 0)])
        assert (tokens.shape, lengths.tolist()) == ((2, 2, 16), [[7, 8], [7, 8]])
        assert [text_of(*pair) for pair in zip(tokens[0], lengths[0])] == ["first 3", "second 3"]
        assert labels.tolist() == [1, 0]


def test_lists_of_tables_have_the_tokens_of_generated_ones(tmp_path):
    rows = [(f"( ( ( [MAX {row % 10} ) 0 ) ] )", str(row % 10)) for row in range(100)]
    write(tmp_path / "basic_train.tsv", rows, ("Source", "Target"))
    items = opened("listops", tmp_path, length=2000)
    assert items.made == ("dev", "test")
    assert isinstance(items.train, listops.Lists)
    row = int(np.flatnonzero(items.train.labels == 7)[0])
    assert listops.decode(items.train[row]) == "[MAX 7 0 ]"
    assert set(items.train.first) == {listops.IDS["[MAX"]}
    rows[3] = ("[AVG 1 2 ]", "1")
    write(tmp_path / "basic_train.tsv", rows, ("Source", "Target"))
    with pytest.raises(ValueError, match=r"row 3 of the split train: lists must .*, got '\[AVG'"):
        opened("listops", tmp_path, length=2000)


def write_pictures(folder: Path, classes: str, count: int = 20, mode: str = "L") -> None:
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for place in range(count):
            pixels = np.full((32, 32), 10 * number + place, np.uint8)
            Image.fromarray(pixels).convert(mode).save(folder / name / f"{place:02}.png")


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_pictures_are_their_grey_pixels_and_black_ones_count(tmp_path, mode):
    write_pictures(tmp_path, "ab", mode=mode)
    items = opened("pathfinder", tmp_path)
    parts = (items.train, items.dev, items.test)
    assert [len(part) for part in parts] == [32, 4, 4]
    seen = []
    for part in parts:
        tokens, lengths, labels = part.__getitems__([(0, index) for index in range(len(part))])
        assert tokens.shape[1] == 1024
        assert set(lengths.tolist()) == {1024}
        assert (tokens == tokens[:, :1]).all()
        seen += [(int(row[0]), int(label)) for row, label in zip(tokens, labels)]
    expected = [(10 * number + place, number) for number in range(2) for place in range(20)]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("column", ["label", "cls", "fine"])
def test_tables_of_pictures_have_the_classes_of_their_label_column(tmp_path, column):
    import datasets

    names = {"label": ["cat", "dog"], "cls": ["x", "y"], "fine": ["a", "b", "c", "d"]}
    pictures = [Image.fromarray(np.full((32, 32), place, np.uint8)) for place in range(40)]
    cells = {"img": pictures}
    cells |= {name: [row % len(of) for row in range(40)] for name, of in names.items()}
    kinds = {name: datasets.ClassLabel(names=of) for name, of in names.items()}
    features = datasets.Features({"img": datasets.Image(), **kinds})
    datasets.Dataset.from_dict(cells, features).to_parquet(tmp_path / "train.parquet")
    items = opened("image", tmp_path, label_column=column)
    assert items.classes == tuple(names[column])
    for part in (items.train, items.dev, items.test):
        tokens, _, labels = part.__getitems__([(0, index) for index in range(len(part))])
        assert labels.tolist() == (tokens[:, 0] % len(items.classes)).tolist()
    with pytest.raises(ValueError, match=r"--label-column must be one of img, .*, got breed"):
        opened("image", tmp_path, label_column="breed")


@pytest.mark.parametrize("stray", ["labels.csv", "index.parquet"])
def test_a_table_beside_class_folders_is_not_the_data(tmp_path, stray):
    write_pictures(tmp_path, "ab")
    write(tmp_path / stray, REVIEWS, ("label", "text"))
    items = opened("image", tmp_path)
    assert (items.classes, len(items.train)) == (("a", "b"), 32)


@pytest.mark.parametrize(
    "names",
    [
        ("TRAIN.CSV", "Test.Csv"),
        ("train/0.csv", "test/0.csv"),
        ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
    ],
)
def test_tables_are_found_by_any_case_and_in_folders(tmp_path, names):
    for name, rows in zip(names, (REVIEWS, REVIEWS[:4])):
        path = (tmp_path / name).with_suffix(Path(name).suffix.lower())
        write(path, rows, ("label", "text"))
        path.rename(tmp_path / name)
    items = opened("text", tmp_path)
    assert (len(items.train), len(items.test), items.made) == (18, 4, ("dev",))


def test_test_pictures_without_classes_are_not_read(tmp_path):
    write_pictures(tmp_path / "train", "ab")
    write_pictures(tmp_path / "val", "ab", 3)
    (tmp_path / "test").mkdir()
    Image.new("L", (32, 32)).save(tmp_path / "test" / "0.png")
    items = opened("image", tmp_path)
    assert [len(part) for part in (items.train, items.dev, items.test)] == [36, 6, 4]
    assert items.made == ("test",)


def test_folders_of_splits_are_the_splits(tmp_path):
    for split, count in (("train", 6), ("val", 3), ("test", 2)):
        write_pictures(tmp_path / split, "abc", count)
    items = opened("image", tmp_path)
    assert [len(part) for part in (items.train, items.dev, items.test)] == [18, 9, 6]
    assert items.made == ()


def test_a_held_out_part_has_a_tenth_of_each_class_however_they_are_ordered(tmp_path):
    write(tmp_path / "train.csv", [("x", "ab"[row % 2]) for row in range(200)], ("text", "label"))
    items = opened("text", tmp_path)
    for part in (items.dev, items.test):
        assert np.bincount(part.labels).tolist() == [10, 10]
    assert items.dev.digest() != items.test.digest()


@pytest.mark.parametrize(
    ("rows", "names", "given", "message"),
    [
        (REVIEWS, ("label", "words"), {}, "--text-column must be one of label, words, .* got text"),
        (REVIEWS, ("kind", "text"), {}, "--label-column must be one of kind, text, .* got label"),
        ([("", "x")] * 9, ("label", "text"), {}, "no class in row 0 of its split train"),
        ([("1", "x")] * 9, ("label", "text"), {}, "at least two classes, got 1"),
    ],
)
def test_a_table_that_is_not_the_tasks_is_one_line(tmp_path, rows, names, given, message):
    write(tmp_path / "train.csv", rows, names)
    with pytest.raises(ValueError, match=message) as refused:
        opened("text", tmp_path, **given)
    assert "\n" not in str(refused.value)


def test_a_split_with_another_class_is_refused_by_its_name(tmp_path):
    write(tmp_path / "train.csv", REVIEWS, ("label", "text"))
    write(tmp_path / "test.csv", [("neutral", "x"), ("pos", "y")], ("label", "text"))
    with pytest.raises(
        ValueError, match="in its split test: unknown classes neutral; known are neg, pos"
    ):
        opened("text", tmp_path)


def test_classes_are_matched_by_name_where_a_split_lists_them_otherwise(tmp_path):
    from datasets import ClassLabel, Dataset, DatasetDict

    def part(names: list[str]) -> Dataset:
        table = Dataset.from_dict({"text": ["bad", "good"] * 5, "label": ["neg", "pos"] * 5})
        return table.cast_column("label", ClassLabel(names=names))

    splits = {"train": part(["neg", "pos"]), "test": part(["pos", "neg"])}
    DatasetDict(splits).save_to_disk(tmp_path / "set")
    items = opened("text", f"hf:{tmp_path / 'set'}")
    for part_ in (items.train, items.dev, items.test):
        tokens, lengths, labels = part_.__getitems__([(0, 0)])
        assert (text_of(tokens[0], lengths[0]) == "good") == bool(labels[0])


def test_an_empty_text_and_a_picture_of_another_size_are_bad_samples_with_a_name(tmp_path):
    write(tmp_path / "text" / "train.csv", [("", "a"), ("x", "b")] * 10, ("text", "label"))
    items = opened("text", tmp_path / "text")
    empty = int(np.flatnonzero(items.train.labels == 0)[0])
    with pytest.raises(ValueError, match=r"row \d+ of the split train must have text in text"):
        items.train.__getitems__([(0, empty)])
    write_pictures(tmp_path / "pictures", "ab")
    Image.new("L", (31, 32)).save(tmp_path / "pictures" / "a" / "00.png")
    items = opened("image", tmp_path / "pictures")
    parts = (items.train, items.dev, items.test)
    places = [(part, index) for part in parts for index in range(len(part))]
    with pytest.raises(ValueError, match=r"00\.png must be 32 x 32 pixels, got 31 x 32"):
        [part.__getitems__([(0, index)]) for part, index in places]


def test_other_data_has_another_digest_and_moved_data_the_same(tmp_path):
    digests = []
    for folder, first in (("a", "x"), ("b", "x"), ("c", "y")):
        write(
            tmp_path / folder / "train.csv", [(first, "0"), *[("z", "1")] * 30], ("text", "label")
        )
        digests.append(opened("text", tmp_path / folder).train.digest())
    assert digests[0] == digests[1] != digests[2]


def test_brackets_and_stars_in_the_name_of_a_folder_are_no_patterns(tmp_path):
    folder = tmp_path / "[2024] *"
    write(folder / "train.csv", REVIEWS, ("label", "text"))
    assert len(opened("text", folder).train) > 0


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_rows_with_more_cells_than_the_first_line_are_refused(tmp_path, kind):
    between = {"csv": ",", "tsv": "\t"}[kind]
    rows = ["text,label", *(f"good, or bad,{row % 2}" for row in range(20))]
    lines = [row.replace(",", between) for row in rows]
    (tmp_path / f"train.{kind}").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"as many cells in each row as in its first, 2, got 3"):
        opened("text", tmp_path)


def test_a_label_column_of_class_folders_is_refused(tmp_path):
    write_pictures(tmp_path, "ab")
    with pytest.raises(ValueError, match="--label-column is for tables, got kind"):
        opened("image", tmp_path, label_column="kind")
