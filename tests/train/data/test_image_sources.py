"""Photographs in a folder, in tar files, in parquet files and in a stream are the same data."""

import gzip
import io
import re
import shutil
import struct
import sys
import tarfile
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from zlib import compress, crc32

import numpy as np
import pytest
import torch
from PIL import Image

from leaner_kernels.monitor.pictures import decode
from tests.train.image_files import photographs, write_folder, write_parquet, write_tars
from tests.train.launch import TINY, rows
from train import vit
from train.data.images import hub as hub_module
from train.data.images import open_images
from train.data.images.augment import Augment, EvaluationView
from train.data.images.hub import HubStream
from train.data.loader import Fetched, loading
from train.data.sampler import (
    BatchSampler,
    Split,
    make_sampler,
)

CPU = torch.device("cpu")
TRAIN, HELD_OUT = photographs("train", 12), photographs("val", 5)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of images, beside which other formats come."""
    root = tmp_path_factory.mktemp("images")
    for split, images in {"train": TRAIN, "val": HELD_OUT}.items():
        write_folder(root / "folder", split, images)
    return root


@pytest.fixture(scope="module")
def hub(root):
    """Hugging Face's datasets, with a cache of its own and no network."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", root / "hf")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        # It waits some seconds after each pass over several files.
        patch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)
        yield datasets


@pytest.fixture(scope="module")
def parquet(root, hub):
    """Parquet files: four of training, so that 2 ranks share files and 3 share items."""
    write_parquet(root / "parquet", "train", TRAIN, shards=4)
    write_parquet(root / "parquet", "validation", HELD_OUT, shards=1)
    return root / "parquet"


@pytest.fixture(scope="module")
def tars(root, hub):
    """Tar files as WebDataset has them."""
    for split, images in {"train": TRAIN, "val": HELD_OUT}.items():
        write_tars(root / "tars", split, images, shards=2)
    return root / "tars"


# What README.md of a folder of tars says, so that they can be streamed.
DECLARATION = """---
dataset_info:
  features:
  - {name: jpg, dtype: image}
  - {name: cls, dtype: {class_label: {names: {"0": a, "1": b, "2": c}}}}
  splits:
  - {name: train, num_examples: 12}
  - {name: validation, num_examples: 5}
---
"""


def opened(name: object, seed: int = 0, augment: Augment | None = None):
    return open_images(str(name), size=16, channels=3, seed=seed, augment=augment)


def fetched(data, order, workers: int = 0) -> list[Fetched]:
    with loading(data, order, workers=workers, device=CPU) as batches:
        return list(batches)


def batches(data, order, workers: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    loaded = fetched(data, order, workers)
    assert [batch.bad_samples for batch in loaded] == [()] * len(loaded)
    return [batch.tensors for batch in loaded]


def assert_same(some, others) -> None:
    for (one, labels), (other, other_labels) in zip(some, others, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(labels, other_labels)


def assert_as_in_the_folder(images, root: Path) -> None:
    folder = opened(root / "folder")
    assert (images.classes, len(images.train), len(images.held_out)) == (3, 12, 5)
    for split in ("train", "held_out"):
        ours, theirs = getattr(images, split), getattr(folder, split)
        keys = [(1, i) for i in range(len(theirs))]
        assert_same([ours.__getitems__(keys)], [theirs.__getitems__(keys)])


def test_tar_files_hold_what_the_folder_holds(root, tars):
    assert_as_in_the_folder(opened(tars), root)
    assert_as_in_the_folder(opened(f"hf:{tars}"), root)


def test_tar_files_whose_classes_are_declared_are_streamed(tars, root, tmp_path, capsys):
    shutil.copytree(tars, tmp_path / "tars")
    with pytest.raises(ValueError, match="must declare the classes of cls"):
        opened(f"hf-stream:{tmp_path / 'tars'}")
    (tmp_path / "tars" / "README.md").write_text(DECLARATION)
    assert_as_in_the_folder(opened(f"hf-stream:{tmp_path / 'tars'}"), root)
    assert "split train: 2 files are read once to count" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["{}", "hf-stream:{}"])
def test_hidden_members_of_tar_files_are_no_images(root, hub, tmp_path, form):
    def with_hidden(images):
        """Add members before, between and after the images, each of a sample of its own."""
        extra = [
            *("._0", ".ipynb_checkpoints/0", "./.ipynb_checkpoints/1", "__MACOSX/._0"),
            *("a/@eaDir/0", "a/.hidden/b/0", "__MACOSX/deep/0"),
        ]
        hidden = [images[0]._replace(key=key) for key in extra]
        return [*hidden[:3], *images[:2], *hidden[3:5], *images[2:], *hidden[5:]]

    for split, images in {"train": TRAIN, "val": HELD_OUT}.items():
        write_tars(tmp_path, split, with_hidden(images), shards=1)
    (tmp_path / "._train-0000.tar").write_bytes(b"no archive")
    if form != "{}":
        (tmp_path / "README.md").write_text(DECLARATION)
    train = opened(form.format(tmp_path)).train
    if form == "{}":
        assert_as_in_the_folder(opened(tmp_path), root)
    else:
        contents = [train.source.read(index)[0] for index in range(len(train))]
        assert sorted(contents) == sorted(image.content for image in TRAIN)


def test_parquet_files_hold_what_the_folder_holds(root, parquet):
    assert_as_in_the_folder(opened(f"hf:{parquet}"), root)
    assert_as_in_the_folder(opened(f"hf-stream:{parquet}"), root)


def test_parquet_files_need_not_say_what_their_columns_mean(root, parquet, tmp_path):
    for split, images in {"train": TRAIN, "validation": HELD_OUT}.items():
        write_parquet(tmp_path, split, images, shards=1, declare=False)
    assert_as_in_the_folder(opened(f"hf:{tmp_path}"), root)
    with pytest.raises(ValueError, match="must declare the classes of label"):
        opened(f"hf-stream:{tmp_path}")


def test_a_data_set_saved_to_disk_holds_what_the_folder_holds(root, hub, parquet, tmp_path):
    hub.load_dataset(str(parquet)).save_to_disk(str(tmp_path / "saved"))
    assert_as_in_the_folder(opened(f"hf:{tmp_path / 'saved'}"), root)


@pytest.mark.parametrize("name", ["[2024]", "a*", "w?at", "[!a]", "odd[1]*"])
@pytest.mark.parametrize("form", ["{}", "hf:{}", "hf-stream:{}"])
def test_a_path_is_no_pattern(root, parquet, tmp_path, name, form):
    for folder in (tmp_path / name, tmp_path / "2", tmp_path / "ab", tmp_path / "what"):
        write = partial(write_parquet, shards=1)
        images = TRAIN if folder.name == name else TRAIN[:6]
        write(folder, "train", images)
        write(folder, "validation", HELD_OUT)
    images = opened(form.format(tmp_path / name))
    assert (len(images.train), len(images.held_out), images.classes) == (12, 5, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train-0.tar", r"--data holds .*train-0\.tar, a tar without a file$"),
        (
            "train-0.parquet",
            r"--data .*: .*train-0\.parquet has no rows: it is empty, blank or a header$",
        ),
    ],
)
def test_empty_archives_are_named(hub, tmp_path, name, message):
    if name.endswith("tar"):
        tarfile.open(tmp_path / name, "w").close()
    else:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        opened(tmp_path)


def test_tables_in_system_folders_are_not_read(root, hub, tmp_path):
    for folder, images in ((tmp_path, TRAIN), (tmp_path / "@eaDir", TRAIN[:6])):
        write_parquet(folder, "train", images, shards=1)
        write_parquet(folder, "validation", HELD_OUT, shards=1)
        for path in (folder / "data").iterdir():
            path.rename(folder / path.name)
        (folder / "data").rmdir()
    assert_as_in_the_folder(opened(tmp_path), root)


def test_shards_are_found_apart_by_their_names(hub, tmp_path):
    for name, images in {
        "imagenet1k-train-0000": TRAIN,
        "imagenet1k-validation-00": HELD_OUT,
    }.items():
        write_tars(tmp_path, name, images, shards=1)
    found = opened(tmp_path)
    assert (len(found.train), len(found.held_out)) == (12, 5)


def test_a_shard_that_changes_is_read_again(hub, tmp_path):
    write_tars(tmp_path, "train", TRAIN, shards=1)
    write_tars(tmp_path, "val", HELD_OUT, shards=1)
    assert len(opened(tmp_path).train) == 12
    write_tars(tmp_path, "train", TRAIN[:7], shards=1)
    assert len(opened(tmp_path).train) == 7


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no train", r"must have a split train and one of validation, .* got validation$"),
        ("no class", r"has no cls in row 1 of its split train$"),
        ("a class in words", r"--data .*: invalid literal .*'cat'$"),
        ("compressed", r"train-0000\.tar, no tar or cut off after [\d,]+ bytes$"),
        ("cut off", r"train-0000\.tar, no tar or cut off after [\d,]+ bytes$"),
        ("no picture", r"row 0 of the split train, which is no readable image"),
    ],
)
def test_tar_files_that_cannot_be_used_are_refused(hub, tmp_path, damage, message):
    images = TRAIN[:1]
    if damage == "no picture":
        images = [images[0]._replace(content=b"not a picture")]
    if damage != "no train":
        write_tars(tmp_path, "train", images, shards=1)
    write_tars(tmp_path, "val", HELD_OUT, shards=1)
    shard = tmp_path / "train-0000.tar"
    if damage == "compressed":
        shard.write_bytes(gzip.compress(shard.read_bytes()))
    elif damage == "cut off":  # where the second sample would begin
        with tarfile.open(shard) as tar:
            *_, last = tar
        shard.write_bytes(shard.read_bytes()[: last.offset_data + tarfile.BLOCKSIZE])
    elif damage in ("no class", "a class in words"):
        members = {"a.jpg": TRAIN[0].content, "a.cls": b"0", "b.jpg": TRAIN[1].content}
        if damage == "a class in words":
            members["b.cls"] = b"cat"
        with tarfile.open(shard, "w") as tar:
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    with pytest.raises(ValueError, match=message):
        opened(tmp_path).train.__getitems__([(0, 0)])


@pytest.mark.parametrize("source", ["tars", "hf", "hf-stream"])
def test_workers_change_nothing(request, source):
    name = request.getfixturevalue("tars")
    if source != "tars":
        name = f"{source}:{request.getfixturevalue('parquet')}"
    augment = Augment("rand-m9-mstd0.5", erase=0.5)
    train = opened(name, augment=augment).train
    order = make_sampler(train, Split(4, 1, 1), seed=0, rank=0, first=0, last=6)
    assert_same(batches(train, order), batches(train, order, workers=2))


def labelled(train, **which) -> list[list[bytes]]:
    """The files of every batch of a stream, by their bytes."""
    batches = make_sampler(train, seed=0, **which)
    return [[train.source.read(index)[0] for _, index in keys] for keys in batches]


def test_a_stream_has_an_order_for_each_seed_and_epoch(parquet):
    which = {"split": Split(4, 1, 1), "rank": 0, "first": 0, "last": 6}
    train = opened(f"hf-stream:{parquet}").train
    whole = labelled(train, **which)
    epochs = [[*chain(*whole[:3])], [*chain(*whole[3:])]]
    for epoch in epochs:
        assert sorted(epoch) == sorted(image.content for image in TRAIN)
    assert epochs[0] != epochs[1]
    assert labelled(opened(f"hf-stream:{parquet}").train, **which) == whole
    assert labelled(opened(f"hf-stream:{parquet}", seed=1).train, **which) != whole


def test_a_stream_resumes_in_the_middle_of_an_epoch(parquet):
    train = opened(f"hf-stream:{parquet}").train
    which = {"split": Split(4, 1, 2), "rank": 0, "last": 6}
    assert labelled(train, first=4, **which) == labelled(train, first=0, **which)[8:]


class Counted(HubStream):
    """A stream of files of which nothing but the number of rows is there; counts what is read."""

    def __init__(self, counts: list[int]):
        self.first, self.seed, self.classes = [0, *np.cumsum(counts).tolist()], 0, None
        self.files, self.split, self.image, self.label = counts, "train", "image", "label"
        self._process, self._reading, self._passed = 0, {}, {}
        self.opened = self.rows = 0

    def _rows(self, file, first):
        self.opened += 1
        for row in range(first, self.files[file]):
            self.rows += 1
            content = f"{self.first[file] + row}".encode()
            yield {"image": {"bytes": content, "path": None}, "label": 0}


@pytest.mark.parametrize("counts", [[3000], [7, 0, 1000, 1, 2500], [1] * 600, [40, 50] * 40])
@pytest.mark.parametrize(("ranks", "accum"), [(1, 1), (2, 2), (3, 1)])
def test_an_epoch_of_a_stream_takes_each_image_once(counts, ranks, accum):
    stream = Counted(counts)
    split = Split(12, ranks, accum)
    steps = len(stream) // 12
    shares = [stream.order(1, split, rank) for rank in range(ranks)]
    assert all(share.shape == (steps, 12 // ranks) for share in shares)
    taken = np.concatenate([share.ravel() for share in shares])
    assert len({*taken.tolist()}) == len(taken) == steps * 12
    assert taken.min() >= 0
    assert taken.max() < len(stream)
    # It depends on the batch and not on how a batch is divided into passes.
    for rank in range(ranks):
        assert (stream.order(1, Split(12, ranks, 1), rank) == shares[rank]).all()
    assert (stream.order(2, split, 0) != shares[0]).any()


@pytest.mark.parametrize("workers", [1, 6, 24, 48])
@pytest.mark.parametrize("counts", [[40_000], [90, 110] * 200, [1000] * 40])
def test_workers_read_on_in_the_files_of_a_stream(monkeypatch, workers, counts):
    data = Counted(counts)
    monkeypatch.setattr(hub_module, "get_worker_info", lambda: SimpleNamespace(num_workers=workers))
    order = data.order(0, Split(64, 1, 1), 0)
    begun = 200  # what a run that is resumed has behind it
    opened = rows = 0
    for worker in range(workers):
        own = Counted(counts)
        for step in range(begun + worker, len(order), workers):
            for index in order[step].tolist():
                assert own.read(index) == (str(index).encode(), 0)
        assert len(own._passed) <= 2 * own.BLOCK * -(-own.LANES // workers)
        opened, rows = opened + own.opened, rows + own.rows
    # Each lane begins in some places, and passes a file's rows once; workers that share a lane,
    # each once.
    sharing = max(1, workers // data.LANES)
    wanted = (len(order) - begun) * 64
    assert rows < 1.1 * sharing * wanted + sharing * data.LANES * data.BLOCK
    places = data.LANES * data.PLACES
    assert opened <= sharing * 3 * (places + len(counts))


def test_rows_of_a_stream_are_counted_once(parquet, monkeypatch):
    first = opened(f"hf-stream:{parquet}")
    monkeypatch.setattr(HubStream, "_rows_in", None)
    again = opened(f"hf-stream:{parquet}")
    assert (len(again.train), len(again.held_out)) == (len(first.train), 5)


def test_any_row_of_a_parquet_file_is_read_without_those_before(tmp_path, hub, monkeypatch):
    from pyarrow import parquet as library

    write_parquet(tmp_path, "train", TRAIN, shards=1)
    write_parquet(tmp_path, "validation", HELD_OUT, shards=1)
    (file,) = tmp_path.rglob("train*.parquet")
    library.write_table(library.read_table(file), file, row_group_size=5)
    stream = opened(f"hf-stream:{tmp_path}").train.source
    for index in (11, 0, 7, 6, 4, 5, 10):
        assert stream.read(index)[0] == TRAIN[index].content
    # The last group alone has no damage.
    monkeypatch.setattr(HubStream, "BLOCK", 4)
    size = file.stat().st_size
    damaged = bytearray(file.read_bytes())
    damaged[4:200] = bytes(196)
    file.write_bytes(damaged)
    assert file.stat().st_size == size
    stream = opened(f"hf-stream:{tmp_path}").train.source
    assert stream.read(11)[0] == TRAIN[11].content


def test_a_stream_whose_file_lost_rows_names_it(parquet):
    train = opened(f"hf-stream:{parquet}").train
    train.source.first[-1] += 1
    (batch,) = fetched(train, [[(0, 0), (0, 12)]])
    assert [bad.places for bad in batch.bad_samples] == [(1,)]
    assert "image 12 of the split train is no longer in" in batch.bad_samples[0].message


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_a_stream(parquet, ranks):
    train = opened(f"hf-stream:{parquet}").train
    which = {"split": Split(6, ranks, 1), "first": 0, "last": 2}
    shares = [[*chain(*labelled(train, rank=rank, **which))] for rank in range(ranks)]
    assert all(len(share) == 12 // ranks for share in shares)
    assert sorted(chain(*shares)) == sorted(image.content for image in TRAIN)


def test_repeats_take_an_image_several_times_each_changed_otherwise(tars):
    train = opened(tars).train
    which = {"seed": 0, "rank": 0, "first": 0, "last": 4, "repeats": 3}
    steps = list(BatchSampler(12, Split(6, 1, 1), **which))
    assert [len({index for _, index in keys}) for keys in steps] == [2] * 4
    draws = [key for keys in steps for key in keys]
    assert len(set(draws)) == len(draws)
    assert {draw for draw, _ in steps[0]} == {0, 1, 2}
    # The second epoch starts at step 2; copies are spread over the batch, and over ranks.
    assert {draw for draw, _ in steps[2]} == {3, 4, 5}
    assert [index for _, index in steps[0]] == [index for _, index in steps[0][:2]] * 3
    ranks = [next(iter(BatchSampler(12, Split(6, 3, 1), **which | {"rank": r}))) for r in range(3)]
    assert [*chain(*ranks)] == steps[0]
    pixels, _ = train.__getitems__(steps[0])
    assert len(np.unique(pixels.flatten(1), axis=0)) == 6


def test_a_stream_does_not_repeat_and_says_so(parquet):
    train = opened(f"hf-stream:{parquet}").train
    with pytest.raises(ValueError, match="--repeats needs --data of which any item can be read"):
        make_sampler(train, Split(4, 1, 1), seed=0, rank=0, first=0, last=1, repeats=3)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (["validation"], r"must have a split train and one of validation, .* got validation$"),
        (["train", "validation"], r"one column of images and one named label .* got text, label"),
    ],
)
def test_other_splits_and_columns_are_refused(parquet, tmp_path, splits, message):
    import pyarrow as pa
    from pyarrow import parquet as files

    for split in splits:
        files.write_table(
            pa.table({"text": ["a"], "label": [0]}), tmp_path / f"{split}-00000-of-00001.parquet"
        )
    with pytest.raises(ValueError, match=message):
        opened(f"hf:{tmp_path}")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_read_ends_a_run_in_one_line(root, tmp_path, capfd, workers):
    shutil.copytree(root / "folder", tmp_path / "images")
    for path in (tmp_path / "images" / "train").glob("*/*.*"):
        path.write_bytes(b"not a picture")
    words = ["--model", "vit_digits", *TINY, "--batch-size", 4, "--workers", workers, "--steps", 1]
    words += ["--data", tmp_path / "images", "--recipe", "paper", "--out", tmp_path / "run"]
    with pytest.raises(SystemExit, match="2"):
        vit.main([str(word) for word in words])
    error = capfd.readouterr().err
    assert re.fullmatch(r"vit\.py: error: --data holds .*, which is no readable image: .*\n", error)


def file_of(image: Image.Image, kind: str, **how: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


GREY = np.linspace(0, 255, 40 * 48).astype(np.uint8).reshape(40, 48)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("L", "PNG"), ("P", "PNG"), ("CMYK", "JPEG"), ("RGBA", "WEBP"), ("LA", "PNG"), ("1", "PNG")],
)
def test_every_mode_of_pixels_is_read_as_colours(mode, kind):
    image = Image.fromarray(GREY).convert(mode)
    rgb = decode(file_of(image, kind, quality=95), str)
    assert (rgb.mode, rgb.size) == ("RGB", (48, 40))
    assert np.abs(np.asarray(rgb)[..., 0].astype(int) - np.asarray(image.convert("L"))).max() < 9


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_become_eight_and_not_white(kind):
    deep = Image.fromarray(GREY.astype(np.uint16) * 257)
    rgb = decode(file_of(deep, kind), str)
    assert np.array_equal(np.asarray(rgb)[..., 2], GREY)


def clear(mode: str, kind: str) -> bytes:
    """Return a drawing of 8 x 4 pixels, black on transparent ground on the left, grey right."""
    pixels = np.zeros((4, 8, 4), np.uint8)
    pixels[1:3, 1:3, 3] = 255
    pixels[:, 4:] = 96, 96, 96, 255
    image = Image.fromarray(pixels)
    if mode == "P":
        return file_of(image.quantize(8), kind)
    if mode in ("1", "L", "I;16", "RGB"):
        key = {"1": 0, "L": 7, "I;16": 7 * 257, "RGB": (7, 7, 7)}[mode]
        ground = np.where(pixels[..., 3] == 0, 7, pixels[..., 0])
        image = Image.fromarray(ground.astype(np.uint16) * 257 if mode == "I;16" else ground)
        image = image if mode == "I;16" else image.convert(mode)
        return file_of(image, kind, transparency=key)
    return file_of(image.convert(mode), kind, **({"lossless": True} if kind == "WEBP" else {}))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *(("RGBA", "PNG"), ("RGBA", "WEBP"), ("RGBA", "TIFF"), ("LA", "PNG"), ("LA", "TIFF")),
        *(
            ("P", "PNG"),
            ("L", "PNG"),
            ("I;16", "PNG"),
            ("RGB", "PNG"),
            ("RGBA", "GIF"),
        ),
    ],
)
def test_what_is_transparent_is_white(mode, kind):
    rgb = np.asarray(decode(clear(mode, kind), str))
    expected = np.full((4, 8, 3), 255, np.uint8)
    expected[1:3, 1:3] = 0
    expected[:, 4:] = 96
    assert np.array_equal(rgb, expected)


def test_what_is_half_transparent_is_mixed_with_white():
    image = Image.new("RGBA", (3, 2), (100, 0, 255, 51))
    assert np.all(np.asarray(decode(file_of(image, "PNG"), str)) == (224, 204, 255))


def test_a_transparent_colour_of_sixteen_bits_is_white():
    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc32(name + data))

    rows = b"\0" + struct.pack(">6H", 4660, 1, 2, 25700, 0, 65535)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0),
        b"tRNS": struct.pack(">3H", 4660, 1, 2),
        b"IDAT": compress(rows),
        b"IEND": b"",
    }
    content = b"\x89PNG\r\n\x1a\n" + b"".join(part(*both) for both in parts.items())
    assert np.asarray(decode(content, str)).tolist() == [[[255, 255, 255], [100, 0, 255]]]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_exif_data_that_make_no_sense_do_no_harm():
    image = Image.fromarray(GREY)
    odd = file_of(image, "JPEG", exif=b"Exif\0\0MM\0*" + b"\xff" * 900)
    assert np.array_equal(decode(odd, str), decode(file_of(image, "JPEG"), str))


JPEG = TRAIN[0].content
DAMAGED = {
    "empty": b"",
    "text": b"not a picture",
    "truncated": JPEG[: len(JPEG) // 2],
    "header": JPEG[:20],
    "zeros": JPEG[:2] + bytes(len(JPEG) - 2),
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
    "bomb": b"P6\n40000 40000\n255\n",
    "long": file_of(Image.new("L", (5000, 1)), "PNG"),
    "float": file_of(Image.fromarray(GREY.astype(np.float32)), "TIFF"),
    "unknown numbers": b"P6\n-3 4\n255\n",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_is_no_image_is_named_in_one_line_that_is_always_the_same(damage):
    found = set()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"holds it, which is no readable image: .+") as error:
            decode(DAMAGED[damage], lambda: "it")
        found.add(str(error.value))
    assert len(found) == 1
    assert "\n" not in found.pop()


def refusal(content: bytes) -> str | None:
    try:
        assert decode(content, str).mode == "RGB"
    except ValueError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_damaged_files_of_every_format_are_read_or_refused():
    draw = np.random.default_rng(0)
    image = Image.fromarray(draw.integers(0, 256, (20, 24, 3), dtype=np.uint8))
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM"):
        whole = file_of(image, kind)
        refused = 0
        for _ in range(60):
            content = bytearray(
                whole[: draw.integers(len(whole))] if draw.random() < 0.3 else whole
            )
            for place in draw.integers(0, len(content), 4) if content else ():
                content[place] = draw.integers(256)
            said = refusal(bytes(content))
            assert said is None or "which is no readable image" in said
            refused += said is not None
        assert refused > 5, kind


@pytest.mark.parametrize("source", ["folder", "tars", "hf", "hf-stream"])
def test_what_cannot_be_read_is_replaced_wherever_images_are_kept(root, request, tmp_path, source):
    bad = {4: b"not a picture", 7: TRAIN[7].content[:300]}
    images = [im._replace(content=bad.get(i, im.content)) for i, im in enumerate(TRAIN)]
    write = {"folder": write_folder, "tars": partial(write_tars, shards=2)}.get(source)
    if source != "folder":
        request.getfixturevalue("hub")
    write = write or partial(write_parquet, shards=1)
    write(tmp_path, "train", images)
    write(tmp_path, "val" if source in ("folder", "tars") else "validation", HELD_OUT)
    name = tmp_path if source in ("folder", "tars") else f"{source}:{tmp_path}"
    train = opened(name).train
    order = make_sampler(train, Split(6, 1, 1), seed=0, rank=0, first=0, last=4)
    runs = [fetched(train, order, workers) for workers in (0, 2)]
    assert_same(*([batch.tensors for batch in run] for run in runs))
    bad_samples = [[batch.bad_samples for batch in run] for run in runs]
    assert bad_samples[0] == bad_samples[1]
    # Each in each of two epochs, in the same words.
    found = [t for batch in bad_samples[0] for t in batch]
    assert (len(found), len({t.message for t in found})) == (4, 2)
    assert all("which is no readable image" in t.message and t.places for t in found)


def test_the_deit_recipe_reads_each_image_once(root, monkeypatch):
    augment = Augment(rand_augment="rand-m9-mstd0.5-inc1", erase=0.25)
    train = opened(root / "folder", augment=augment).train
    reads, read = [], train.source.read
    monkeypatch.setattr(train.source, "read", lambda index: reads.append(index) or read(index))
    order = make_sampler(train, Split(12, 1, 1), seed=0, rank=0, first=0, last=60)
    assert not any(batch.bad_samples for batch in fetched(train, order))
    assert len(reads) == 12 * 60


@pytest.mark.parametrize("source", ["folder", "hf-stream"])
@pytest.mark.parametrize("part", ["train", "held_out"])
@pytest.mark.parametrize("error", [ValueError, OSError])
def test_an_error_of_an_augmentation_is_no_bad_image(root, request, source, part, error):
    class Broken(EvaluationView):
        def __call__(self, pixels):
            raise error("bits must be between or equal to 1 and 8")

    name = root / "folder"
    if source == "hf-stream":
        name = f"hf-stream:{request.getfixturevalue('parquet')}"
    data = getattr(opened(name), part)
    data.pixels.view = Broken(8)
    for workers in (0, 1):
        with pytest.raises(RuntimeError, match=r"was read, but not changed: bits must be"):
            fetched(data, [[(0, 0), (0, 1)]], workers)


@pytest.mark.parametrize("fate", ["deleted", "cut off"])
def test_files_that_change_while_they_are_read_are_named(tmp_path, fate):
    write_folder(tmp_path, "train", TRAIN)
    write_folder(tmp_path, "val", HELD_OUT)
    train = opened(tmp_path).train
    lost = sorted(tmp_path.rglob("train*/*/*.JPEG"))[-1]
    if fate == "deleted":
        lost.unlink()
    else:
        lost.write_bytes(lost.read_bytes()[:700])
    ((_, bad_samples),) = fetched(train, [[(0, i) for i in range(12)]])
    assert {place for t in bad_samples for place in t.places} == {11}
    assert all(str(lost) in t.message for t in bad_samples)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="--data hf: needs the package datasets"):
        opened("hf:imagenet-1k")


@pytest.mark.parametrize("source", ["tars", "hf-stream"])
def test_a_run_with_every_augmentation_resumes_to_the_same_bits(request, tmp_path, source):
    name, repeats = request.getfixturevalue("tars"), 2
    if source == "hf-stream":
        name, repeats = f"hf-stream:{request.getfixturevalue('parquet')}", 1
    train = ["--model", "vit_digits", *TINY, "--batch-size", 4, "--data", name, "--kappa-every", 0]
    train += ["--recipe", "deit", "--repeats", repeats, "--erase", 0.5, "--deterministic"]
    train += ["--out", tmp_path, "--resume", "auto", "--ckpt-every", 3]
    # Steps 3 and on are in the second epoch and, resumed, begin in the middle of it.
    vit.main([str(word) for word in [*train, "--steps", 7]])
    whole = rows(tmp_path / "metrics.jsonl")
    for path in (tmp_path / "checkpoints").glob("step-0000000[67]"):
        shutil.rmtree(path)
    vit.main([str(word) for word in [*train, "--steps", 7]])
    assert rows(tmp_path / "metrics.jsonl") == whole
    assert len({row["loss"] for row in whole}) == 7
