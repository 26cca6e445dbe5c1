"""Which folders and tables train, which measure, and which files are no part of a data set."""

import tarfile
import unicodedata

import numpy as np
import pytest
from PIL import Image

from tests.train.image_files import (
    CLASSES,
    photographs,
    write_folder,
    write_parquet,
    write_tars,
)
from train.data.images.sources import find_images
from train.data.splits import splits_of

TRAIN, HELD_OUT = photographs("train", 12), photographs("val", 5)
NAMES = [
    *(("Training", "Testing"), ("Train", "Test"), ("TRAIN", "VAL"), ("training_set", "test_set")),
    *(("training set", "validation set"), ("train-set", "test-set"), ("TrainingSet", "TestSet")),
    *(("train", "dev"), ("train", "Eval"), ("train", "valid"), ("Training", "validation")),
    *(("train2017", "val2017"), ("seg_train", "seg_test"), ("birds-train", "birds-test")),
    *(("train_images", "test_images"), ("0_train", "1_test")),
]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Hugging Face's datasets, with a cache of its own and no network."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)
    return datasets


@pytest.fixture
def root(tmp_path):
    return tmp_path / "set"


def sizes(root, form: str = "{}") -> tuple[int, int, int, bool]:
    """Return the numbers of classes, of images to train on and held out; if these were chosen."""
    sources = find_images(form.format(root))
    return sources.classes, len(sources.train), len(sources.held_out), sources.made


def write_class(folder, count: int = 4) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.full((9, 9, 3), number, np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


@pytest.mark.parametrize(("train", "held_out"), NAMES)
def test_folders_of_class_folders_are_splits_by_any_usual_name(root, train, held_out):
    write_folder(root, train, TRAIN)
    write_folder(root, held_out, HELD_OUT)
    assert sizes(root) == (3, 12, 5, False)
    sources = find_images(str(root))
    assert sources.names == list(CLASSES)
    assert sources.facts() == {"splits": f"trained on {train}, held out {held_out}"}


def test_validation_measures_where_there_is_a_test_too(root):
    write_folder(root, "Training", TRAIN)
    write_folder(root, "Testing", TRAIN)
    write_folder(root, "Validation", HELD_OUT)
    assert sizes(root) == (3, 12, 5, False)
    shown = "trained on Training, held out Validation; not read: Testing"
    assert find_images(str(root)).splits == shown


def test_a_split_alone_is_divided(root):
    write_folder(root, "Training", TRAIN)
    assert sizes(root) == (3, 9, 3, True)


def test_a_split_may_lie_in_a_folder_of_its_name(root):
    write_folder(root / "training_set", "training_set", TRAIN)
    write_folder(root / "test_set", "test_set", HELD_OUT)
    assert sizes(root) == (3, 12, 5, False)


def test_splits_in_class_folders_are_refused_and_not_mixed(root):
    for name in ("cat", "dog"):
        write_class(root / name / "train")
        write_class(root / name / "test")
    with pytest.raises(ValueError, match=r"cat has the splits test, train in a class: give a fold"):
        find_images(str(root))


@pytest.mark.parametrize("name", ["train", "Test", "dev", "eval", "val", "training set"])
@pytest.mark.parametrize("inner", [(), ("steam", "electric")])
def test_a_folder_of_pictures_is_a_class_whatever_its_name(root, name, inner):
    for place in ("bus", "car", name, *(f"{name}/{deeper}" for deeper in inner)):
        write_class(root / place)
    sources = find_images(str(root))
    assert sorted(sources.names) == sorted(["bus", "car", name])
    assert sources.splits == ""


def test_classes_may_be_called_valid_and_invalid(root):
    for name in ("valid", "invalid"):
        for year in ("2023", "2024"):
            write_class(root / name / year)
    assert find_images(str(root)).names == ["invalid", "valid"]


@pytest.mark.parametrize("name", ["train", "Test", "dev"])
def test_what_may_be_a_class_or_a_split_is_refused(root, name):
    write_folder(root, "", TRAIN)
    write_folder(root, name, TRAIN)
    with pytest.raises(ValueError, match=rf"{name}/n01440764/ beside .*a class or a split\?"):
        find_images(str(root))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("train", "Training", "test"), "has two folders for train, Training and train: keep one"),
        (("train", "val", "dev"), "has two folders for validation, dev and val: keep one"),
        (("test",), "has test but no train/"),
        (("val", "test"), "has test, val but no train/"),
    ],
)
def test_splits_that_do_not_fit_are_refused(root, names, message):
    for name in names:
        write_folder(root, name, TRAIN)
    with pytest.raises(ValueError, match=message):
        find_images(str(root))


def test_pictures_of_a_test_without_classes_are_not_read(root):
    write_folder(root, "train", TRAIN)
    write_class(root / "test")
    assert sizes(root) == (3, 9, 3, True)
    assert find_images(str(root)).splits == "trained on train; not read: test"


def test_other_words_are_no_splits():
    names = ["bullet train", "crash test", "trained", "contest", "valley", "train_test", "device"]
    assert splits_of(names) == {}


@pytest.mark.parametrize("form", ["{}", "hf:{}"])
@pytest.mark.parametrize(("train", "held_out"), NAMES)
def test_archives_are_of_splits_by_any_usual_name(hub, root, form, train, held_out):
    write_tars(root, train, TRAIN, shards=2)
    write_tars(root, held_out, HELD_OUT, shards=1)
    assert sizes(root, form) == (3, 12, 5, False)


@pytest.mark.parametrize(("train", "held_out"), NAMES[:6])
def test_tables_in_folders_are_of_splits_by_any_usual_name(hub, root, train, held_out):
    for name, images in ((train, TRAIN), (held_out, HELD_OUT)):
        write_parquet(root / name, "part", images, shards=1)
        (root / name / "data" / "part-00000-of-00001.parquet").rename(root / name / "0.parquet")
        (root / name / "data").rmdir()
    assert sizes(root) == (3, 12, 5, False)


def test_a_data_set_on_disk_has_splits_by_any_usual_name(hub, root):
    write_parquet(root, "train", TRAIN, shards=1)
    table = hub.Dataset.from_parquet(str(next(root.rglob("*.parquet"))), cache_dir=str(root))
    for names in (("Training", "Testing"), ("train", "val", "dev"), ("train", "dev", "test")):
        hub.DatasetDict(dict.fromkeys(names, table)).save_to_disk(root / "-".join(names))
        assert sizes(root / "-".join(names)) == (3, 12, 12, False)


# Files that are no part of a data set.


def classes_of(root, layout: str) -> None:
    """Write pictures of cats and dogs in one of the layouts of folders."""
    for name in ("cat", "dog"):
        if layout == "flat":
            write_class(root / name)
        elif layout == "nested":
            write_class(root / name / "2023")
            write_class(root / name / "2024")
        else:
            write_class(root / "train" / name)
            write_class(root / "test" / name)


def stray(root, kind: str) -> None:
    """Write a file or a folder that is no part of the pictures."""
    if kind == "archive":
        with tarfile.open(root.parent / "x.tar", "w") as tar:
            tar.add(root, "p")
        (root.parent / "x.tar").rename(root / "pictures.tar")
    elif kind == "table":
        write_parquet(root, "train", TRAIN, shards=1)
        (root / "data" / "train-00000-of-00001.parquet").rename(root / "train.parquet")
        (root / "data").rmdir()
    elif kind == "hidden":
        write_class(root / ".thumbnails")
        write_class(root / "__MACOSX" / "cat")
        for name in (".DS_Store", "Thumbs.db", "desktop.ini"):
            for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
                (folder / name).write_bytes(b"\0")
        (root / ".cache").mkdir()
        (root / ".cache" / "x.parquet").write_bytes(b"PAR1")
    else:
        for name in ("labels.csv", "README.md", "classes.txt", "pictures.zip", "train.json"):
            (root / name).write_bytes(b"1")
        Image.new("RGB", (9, 9)).save(root / "preview.png")


@pytest.mark.parametrize("layout", ["flat", "nested", "split"])
@pytest.mark.parametrize("kind", ["archive", "table", "hidden", "files"])
def test_a_stray_file_changes_neither_classes_nor_labels(hub, root, layout, kind):
    classes_of(root, layout)
    before = find_images(str(root))
    stray(root, kind)
    after = find_images(str(root))
    assert after.names == before.names == ["cat", "dog"]
    assert after.identity() == before.identity()
    named = {"archive": "pictures.tar", "table": "train.parquet"}.get(kind)
    said = named and f"{named}, beside class folders; --data hf:{root} reads tables"
    assert after.facts().get("left_out") == said


def test_files_that_are_no_pictures_are_counted(root):
    classes_of(root, "flat")
    (root / "cat" / "1.heic").write_bytes(b"\0")
    (root / "dog" / "a").mkdir()
    (root / "dog" / "a" / "1.mp4").write_bytes(b"\0")
    said = f"2 files that are not pictures, such as {root / 'cat' / '1.heic'}"
    assert find_images(str(root)).facts()["left_out"] == said


def test_a_tar_that_was_cut_off_is_refused(hub, root):
    write_tars(root, "train", TRAIN, shards=2)
    tar = root / "train-0001.tar"
    whole = tar.read_bytes()
    for size in (len(whole) // 1024 * 512, 3072, 700, 0):
        tar.write_bytes(whole[:size])
        message = rf"train-0001\.tar is no tar, or was cut off after {size:,} bytes"
        with pytest.raises(ValueError, match=message):
            find_images(str(root))


@pytest.mark.parametrize("write", [write_parquet, write_tars])
def test_pictures_beside_tables_are_no_data(hub, root, write):
    write(root, "train", TRAIN, shards=1)
    write_class(root / "assets", count=9)
    for form in ("{}", "hf:{}"):
        assert sizes(root, form) == (3, 9, 3, True)


@pytest.mark.parametrize("name", ["[2024]", "a*b", "what?", "{x}"])
def test_the_name_of_a_folder_is_no_pattern(hub, root, name):
    for write in (write_parquet, write_tars, write_folder):
        folder = root / write.__name__ / name
        shards = {} if write is write_folder else {"shards": 1}
        write(folder, "train", TRAIN, **shards)
        write(folder, "test", HELD_OUT, **shards)
        assert sizes(folder) == (3, 12, 5, False)
    table = root / "write_parquet" / name / "data" / "train-00000-of-00001.parquet"
    named = table.rename(table.with_name(f"train {name}.parquet"))
    write_parquet(root / "write_parquet" / name, "train 2024", TRAIN[:3], shards=1)
    assert named.is_file()
    assert sizes(root / "write_parquet" / name) == (3, 15, 5, False)


# Names of classes.

CAFE, FROM_A_MAC = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


def test_one_name_in_two_forms_of_unicode_is_one_class(root):
    for name in ("cafz", CAFE, "dog"):
        write_class(root / "train" / name)
    for name in ("cafz", FROM_A_MAC, "dog"):
        write_class(root / "val" / name, count=2)
    sources = find_images(str(root))
    assert sources.names == ["cafz", CAFE, "dog"]
    assert sources.held_out.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert FROM_A_MAC in sources.held_out.name(2)
    # Within one split too: the folders of a Mac and of another machine were copied together.
    write_class(root / "train" / FROM_A_MAC)
    sources = find_images(str(root))
    assert np.bincount(sources.train.labels).tolist() == [4, 8, 4]


def test_data_copied_through_a_mac_is_the_same_data(tmp_path):
    for root, form in ((tmp_path / "a", "NFC"), (tmp_path / "b", "NFD")):
        for name in ("cafz", "café", "dog"):
            write_class(root / unicodedata.normalize(form, name))
    one, other = (find_images(str(tmp_path / name)) for name in "ab")
    assert one.identity() == other.identity()


def table_of(hub, names: list[str] | None, labels: list[str]):
    """Return a table of pictures, of which each row is labelled with one of some names."""
    kind = hub.Value("int64") if names is None else hub.ClassLabel(names=names)
    features = hub.Features({"image": hub.Image(), "label": kind})
    names = names or sorted(set(labels))
    rows = [
        {"image": {"bytes": TRAIN[i].content, "path": None}, "label": names.index(label)}
        for i, label in enumerate(labels)
    ]
    return hub.Dataset.from_list(rows, features=features)


def write_tables(hub, root, form: str, **tables) -> None:
    """Write a table for each split, as ``datasets`` saves them or in Parquet files."""
    if form == "saved":
        hub.DatasetDict(tables).save_to_disk(root)
    else:
        root.mkdir()
        for split, table in tables.items():
            table.to_parquet(root / f"{split}.parquet")


@pytest.mark.parametrize("form", ["saved", "parquet"])
@pytest.mark.parametrize("names", [["dog", "cat", CAFE], [FROM_A_MAC, "dog"]])
def test_the_classes_of_a_held_out_table_are_numbered_as_those_to_train_on(hub, root, form, names):
    train = table_of(hub, ["cat", CAFE, "dog"], ["cat", "dog", CAFE])
    held_out = table_of(hub, names, ["dog", names[-1]])
    write_tables(hub, root, form, train=train, test=held_out)
    sources = find_images(str(root))
    assert sources.names == ["cat", CAFE, "dog"]
    last = sources.names.index(unicodedata.normalize("NFC", names[-1]))
    assert [sources.held_out.read(i)[1] for i in (0, 1)] == list(sources.held_out.labels)
    assert list(sources.held_out.labels) == [2, last]


@pytest.mark.parametrize("form", ["saved", "parquet"])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["ant", "bee"], "splits train and test: unknown classes ant, bee; known are cat, dog"),
        (None, "splits train and test: only one of them names its classes"),
    ],
)
def test_a_held_out_table_of_other_classes_is_refused(hub, root, form, names, message):
    train = table_of(hub, ["cat", "dog"], ["cat", "dog"])
    held_out = table_of(hub, names, names or ["cat", "dog"])
    write_tables(hub, root, form, train=train, test=held_out)
    with pytest.raises(ValueError, match=message):
        find_images(str(root))


def test_a_table_with_two_classes_of_one_name_is_refused(hub, root):
    table = table_of(hub, [CAFE, FROM_A_MAC], [CAFE, FROM_A_MAC])
    hub.DatasetDict({"train": table}).save_to_disk(root)
    with pytest.raises(ValueError, match="must have a name of its own for each class, got two"):
        find_images(str(root))


def test_shards_that_number_their_classes_differently_are_refused(hub, root):
    root.mkdir()
    for shard, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        table_of(hub, names, ["cat", "dog", "dog"]).to_parquet(root / f"train-{shard}.parquet")
    message = r"0\.parquet and .*1\.parquet must have the same .*, got cat, dog and dog, cat$"
    with pytest.raises(ValueError, match=message):
        find_images(str(root))
