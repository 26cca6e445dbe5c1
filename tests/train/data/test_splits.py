"""Names of folders, files and tables that are of a split, wherever data is kept."""

import shutil

import pytest

from tests.train.image_files import photographs, write_folder, write_parquet, write_tars
from train.data.images.sources import find_images
from train.data.splits import by_part, parts_of, split_of
from train.data.text import open_text
from train.data.text.sources import find_source
from train.data.text.tokenizers import GPT

TRAIN, HELD_OUT = photographs("train", 12), photographs("val", 5)
NAMES = [
    *(("Training", "Testing"), ("Train", "Test"), ("TRAIN", "VAL"), ("training_set", "test_set")),
    *(("training set", "validation set"), ("train-set", "test-set"), ("TrainingSet", "TestSet")),
    *(("train", "dev"), ("train", "Eval"), ("train", "valid"), ("Training", "validation")),
    *(("train2017", "val2017"), ("seg_train", "seg_test"), ("birds-train", "birds-test")),
    *(("train_images", "test_images"), ("0_train", "1_test")),
]


def sizes(root, form: str = "{}") -> tuple[int, int, int, bool]:
    """Return the numbers of classes, of images to train on and held out; if these were chosen."""
    sources = find_images(form.format(root), 0)
    return sources.classes, len(sources.train), len(sources.held_out), sources.made


@pytest.mark.parametrize(("train", "held_out"), NAMES)
def test_folders_of_class_folders_are_splits_by_any_usual_name(root, train, held_out):
    write_folder(root, train, TRAIN)
    write_folder(root, held_out, HELD_OUT)
    assert sizes(root) == (3, 12, 5, False)
    facts = find_images(str(root), 0).facts()
    assert facts["splits"] == f"trained on {train}, held out {held_out}"


def test_validation_measures_where_there_is_a_test_too(root):
    write_folder(root, "Training", TRAIN)
    write_folder(root, "Testing", TRAIN)
    write_folder(root, "Validation", HELD_OUT)
    assert sizes(root) == (3, 12, 5, False)
    shown = "trained on Training, held out Validation; not read: Testing"
    assert find_images(str(root), 0).splits == shown


def test_a_split_alone_is_divided(root):
    write_folder(root, "Training", TRAIN)
    assert sizes(root) == (3, 9, 3, True)


def test_a_split_may_lie_in_a_folder_of_its_name(root):
    write_folder(root / "seg_train", "seg_train", TRAIN)
    write_folder(root / "seg_test", "seg_test", HELD_OUT)
    assert sizes(root) == (3, 12, 5, False)


@pytest.mark.parametrize(("train", "held_out"), NAMES)
def test_splits_may_lie_in_the_folders_of_classes(root, train, held_out):
    for part, images in ((train, TRAIN), (held_out, HELD_OUT)):
        write_folder(root.parent / "other", part, images)
        for folder in (root.parent / "other" / part).iterdir():
            (root / folder.name).mkdir(parents=True, exist_ok=True)
            folder.rename(root / folder.name / part)
    assert sizes(root) == (3, 12, 5, False)
    assert find_images(str(root), 0).splits.endswith("of the folders of the paths")
    write_folder(root, "n01440764", [TRAIN[0]._replace(label=0)])
    assert sizes(root) == (3, 15, 3, True)


@pytest.mark.parametrize("name", ["train", "Test", "dev", "eval", "val", "training set"])
@pytest.mark.parametrize("inner", [(), ("steam", "electric")])
def test_a_folder_of_pictures_is_a_class_whatever_its_name(root, name, inner):
    for place in ("bus", "car", name, *(f"{name}/{deeper}" for deeper in inner)):
        write_folder(root, "", [photo._replace(label=0) for photo in TRAIN])
        (root / place).mkdir(parents=True, exist_ok=True)
        for file in (root / "n01440764").iterdir():
            file.rename(root / place / file.name)
            # No copies of one picture with several labels.
            (root / place / file.name).write_bytes(TRAIN[0].content + f"{place}{file}".encode())
        (root / "n01440764").rmdir()
    sources = find_images(str(root), 0)
    assert sorted(sources.names) == sorted(["bus", "car", name])
    assert sources.facts()["splits"] == f"none: {name} read as classes, as bus is"


@pytest.mark.parametrize("name", ["train", "Test", "dev"])
def test_what_may_be_a_class_or_a_split_is_refused(root, name):
    write_folder(root, "", TRAIN)
    write_folder(root, name, TRAIN)
    with pytest.raises(ValueError, match=rf"{name}/n01440764/ beside .*a class or a split\?"):
        find_images(str(root), 0)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("train", "Training", "test"), "has two parts train, Training and train: keep one"),
        (("train", "val", "dev"), "has two parts validation, dev and val: keep one"),
        (("test",), "has test, and no train/ beside"),
        (("val", "test"), "has test, val, and no train/ beside"),
    ],
)
def test_splits_that_do_not_fit_are_refused(root, names, message):
    for name in names:
        write_folder(root, name, TRAIN)
    with pytest.raises(ValueError, match=message):
        find_images(str(root), 0)


def test_pictures_of_a_test_without_classes_are_not_read(root):
    write_folder(root, "train", TRAIN)
    write_folder(root, "test", TRAIN[:4])
    for file in [*(root / "test").glob("*/*")]:
        file.rename(root / "test" / file.name)
    (root / "train" / "preview.png").write_bytes(TRAIN[0].content)
    for folder in [path for path in (root / "test").iterdir() if path.is_dir()]:
        folder.rmdir()
    assert sizes(root) == (3, 9, 3, True)
    facts = find_images(str(root), 0).facts()
    assert facts["splits"] == "trained on train; not read: test"
    assert facts["left_out"] == f"1 of no class: {root / 'train' / 'preview.png'}"


@pytest.mark.parametrize("form", ["{}", "hf:{}"])
@pytest.mark.parametrize(("train", "held_out"), NAMES)
def test_archives_are_of_splits_by_any_usual_name(hub, root, form, train, held_out):
    write_tars(root, train, TRAIN, shards=2)
    write_tars(root, held_out, HELD_OUT, shards=1)
    assert sizes(root, form) == (3, 12, 5, False)


@pytest.mark.parametrize("form", ["{}", "hf:{}", "hf-stream:{}"])
@pytest.mark.parametrize(("train", "held_out"), NAMES[:6])
def test_tables_in_folders_are_of_splits_by_any_usual_name(hub, root, form, train, held_out):
    for name, images in ((train, TRAIN), (held_out, HELD_OUT)):
        write_parquet(root / name, "part", images, shards=1)
        (root / name / "data" / "part-00000-of-00001.parquet").rename(root / name / "0.parquet")
        (root / name / "data").rmdir()
    assert sizes(root, form) == (3, 12, 5, False)


def test_tables_of_no_split_are_left_out_and_said(hub, root):
    write_parquet(root, "Training", TRAIN, shards=1)
    write_parquet(root, "Testing", HELD_OUT, shards=1)
    shutil.copy(root / "data" / "Testing-00000-of-00001.parquet", root / "data" / "more.parquet")
    assert sizes(root) == (3, 12, 5, False)
    left_out = find_images(str(root), 0).facts()["left_out"]
    assert left_out == f"1 of no split: {root / 'data' / 'more.parquet'}"


def test_a_data_set_on_disk_has_splits_by_any_usual_name(hub, root):
    write_parquet(root, "train", TRAIN, shards=1)
    table = hub.Dataset.from_parquet(str(next(root.rglob("*.parquet"))), cache_dir=str(root))
    hub.DatasetDict({"Training": table, "Testing": table}).save_to_disk(root / "saved")
    assert sizes(root / "saved") == (3, 12, 12, False)


@pytest.mark.parametrize(("train", "held_out"), NAMES)
def test_a_column_of_a_csv_names_splits(root, train, held_out):
    for part, images in ((train, TRAIN), (held_out, HELD_OUT)):
        write_folder(root / "all", part, images)
    rows = [(path.relative_to(root), path.parts[-3:-1]) for path in root.rglob("*.JPEG")]
    lines = [f"{path},{label}, {part} \n" for path, (part, label) in rows]
    table = root / "labels.csv"
    table.write_text("path,label,subset\n" + "".join(lines))
    assert sizes(table) == (3, 12, 5, False)
    assert find_images(str(table), 0).splits.endswith("of the column subset")
    table.write_text("path,label,fold\n" + "".join(f"{p},{label},1\n" for p, (_, label) in rows))
    assert sizes(table) == (3, 12, 5, False)
    assert find_images(str(table), 0).splits.endswith("of the folders of the paths")


def test_a_column_of_anything_else_is_no_split(root):
    write_folder(root, "all", TRAIN)
    rows = [(path.relative_to(root), path.parent.name) for path in root.rglob("*.JPEG")]
    for cell in ("train", "", "3"):
        lines = [f"{p},{label},{cell if i else 'test'}\n" for i, (p, label) in enumerate(rows)]
        lines = [line.replace("test", "why") for line in lines]
        (root / "labels.csv").write_text("path,label,split\n" + "".join(lines))
        assert sizes(root / "labels.csv") == (3, 9, 3, True)


@pytest.mark.parametrize(("train", "held_out"), NAMES)
@pytest.mark.parametrize("form", ["{}.txt", "{}/1.txt", "{}/deep/1.md", "corpus.{}.txt"])
def test_texts_are_of_splits_by_any_usual_name(root, monkeypatch, train, held_out, form):
    monkeypatch.setenv("XDG_CACHE_HOME", str(root.parent))
    for name, words in ((train, "to learn"), (held_out, "to measure")):
        path = root / form.format(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words)
    (root / "README.md").write_text("about")
    text = open_text(str(root), "bytes", specials=GPT)
    assert text.tokenizer.decode(text.train.read().tolist()) == "to learn<|endoftext|>"
    assert text.tokenizer.decode(text.held_out.read().tolist()) == "to measure<|endoftext|>"
    assert text.validation.endswith("; not read: README.md")
    other = root.parent / "other.txt"
    other.write_text("other")
    text = open_text(str(other), "bytes", specials=GPT, validation=str(root))
    assert text.tokenizer.decode(text.held_out.read().tolist()) == "to measure<|endoftext|>"


def test_texts_beside_others_are_no_splits(root):
    root.mkdir()
    for name in ("training", "testing", "install"):
        (root / f"{name}.md").write_text(f"on {name}")
    source = find_source(str(root))
    assert sorted(source.documents()) == ["on install", "on testing", "on training"]
    assert source.held_out is None


def test_rows_of_text_are_of_splits_by_any_usual_name(hub, root):
    root.mkdir()
    for name in ("Training", "Testing"):
        (root / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    (root / "README.md").write_text("about")
    source = find_source(str(root))
    assert [*source.documents()] == ["Training"]
    assert [*source.held_out.documents()] == ["Testing"]
    assert [*find_source(f"hf:{root}").documents()] == ["Training"]


def test_other_words_are_no_splits():
    names = ["bullet train", "crash test", "trained", "contest", "valley", "train_test", "device"]
    assert parts_of(names) == {}
    assert split_of(["a", "b"], "") == (None, None, ("a", "b"))


def test_the_folder_of_a_file_comes_before_its_name(tmp_path):
    files = [tmp_path / name for name in ("train/test.txt", "test/train.txt", "other/train.txt")]
    parts = by_part(tmp_path, files)
    assert parts == {"train": [files[2], files[0]], "test": [files[1]]}
