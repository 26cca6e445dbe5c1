"""Photographs in a folder, in tar files and in parquet files are the same data."""

import io
import shutil
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from PIL import Image

from tests.train.image_files import decode, photographs, write_folder, write_parquet, write_tars
from tests.train.launch import TINY, rows
from train import vit
from train.data.images import open_images
from train.data.images.augment import Augment, EvaluationView
from train.data.loader import Fetched, loading
from train.data.sampler import BatchSampler, BatchSplit

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


def test_tables_hold_what_the_folder_holds(root, hub, tars, parquet, tmp_path):
    hub.load_dataset(str(parquet)).save_to_disk(str(tmp_path / "saved"))
    folder = opened(root / "folder")
    for name in (tars, f"hf:{tars}", f"hf:{parquet}", f"hf:{tmp_path / 'saved'}"):
        images = opened(name)
        assert (images.classes, len(images.train), len(images.held_out)) == (3, 12, 5)
        for split in ("train", "held_out"):
            ours, theirs = getattr(images, split), getattr(folder, split)
            keys = [(1, i) for i in range(len(theirs))]
            assert_same([ours.__getitems__(keys)], [theirs.__getitems__(keys)])


def test_repeats_take_an_image_several_times_each_changed_otherwise(tars):
    train = opened(tars).train
    which = {"seed": 0, "rank": 0, "first": 0, "last": 4, "repeats": 3}
    steps = list(BatchSampler(12, BatchSplit(6, 1, 1), **which))
    assert [len({index for _, index in keys}) for keys in steps] == [2] * 4
    draws = [key for keys in steps for key in keys]
    assert len(set(draws)) == len(draws)
    assert {draw for draw, _ in steps[0]} == {0, 1, 2}
    # The second epoch starts at step 2; copies are spread over the batch, and over ranks.
    assert {draw for draw, _ in steps[2]} == {3, 4, 5}
    assert [index for _, index in steps[0]] == [index for _, index in steps[0][:2]] * 3
    ranks = [
        next(iter(BatchSampler(12, BatchSplit(6, 3, 1), **which | {"rank": r}))) for r in range(3)
    ]
    assert [*chain(*ranks)] == steps[0]
    pixels, _ = train.__getitems__(steps[0])
    assert len(np.unique(pixels.flatten(1), axis=0)) == 6


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (["validation"], r"must have a split train, got validation$"),
        (["train", "validation"], r"one image column and a column label .* got text, label"),
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
def test_sixteen_bits_are_refused_and_not_read_as_white(kind):
    deep = Image.fromarray(GREY.astype(np.uint16) * 257)
    with pytest.raises(ValueError, match="save them with 8 bits a colour"):
        decode(file_of(deep, kind), str)


def clear(mode: str, kind: str) -> bytes:
    """Return a drawing of 8 x 4 pixels, black on transparent ground on the left, grey right."""
    pixels = np.zeros((4, 8, 4), np.uint8)
    pixels[1:3, 1:3, 3] = 255
    pixels[:, 4:] = 96, 96, 96, 255
    image = Image.fromarray(pixels)
    if mode == "P":
        return file_of(image.quantize(8), kind)
    if mode in ("1", "L", "RGB"):
        key = {"1": 0, "L": 7, "RGB": (7, 7, 7)}[mode]
        ground = np.where(pixels[..., 3] == 0, 7, pixels[..., 0])
        return file_of(Image.fromarray(ground).convert(mode), kind, transparency=key)
    return file_of(image.convert(mode), kind, **({"lossless": True} if kind == "WEBP" else {}))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *(("RGBA", "PNG"), ("RGBA", "WEBP"), ("RGBA", "TIFF"), ("LA", "PNG"), ("LA", "TIFF")),
        *(("P", "PNG"), ("L", "PNG"), ("RGB", "PNG"), ("RGBA", "GIF")),
    ],
)
def test_what_is_transparent_is_white(mode, kind):
    rgb = np.asarray(decode(clear(mode, kind), str))
    expected = np.full((4, 8, 3), 255, np.uint8)
    expected[1:3, 1:3] = 0
    expected[:, 4:] = 96
    assert np.array_equal(rgb, expected)


JPEG = TRAIN[0].content
DAMAGED = {
    "empty": b"",
    "text": b"not a picture",
    "truncated": JPEG[: len(JPEG) // 2],
    "header": JPEG[:20],
    "zeros": JPEG[:2] + bytes(len(JPEG) - 2),
    "long": file_of(Image.new("L", (5000, 1)), "PNG"),
    "float": file_of(Image.fromarray(GREY.astype(np.float32)), "TIFF"),
    "unknown numbers": b"P6\n-3 4\n255\n",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_is_no_image_is_named_in_one_line_that_is_always_the_same(damage):
    found = set()
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"holds it, which is not a readable image: .+"
        ) as error:
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
            assert said is None or "which is not a readable image" in said
            refused += said is not None
        assert refused > 5, kind


@pytest.mark.parametrize("source", ["folder", "tars", "hf"])
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
    order = BatchSampler(len(train), BatchSplit(6, 1, 1), seed=0, rank=0, first=0, last=4)
    runs = [fetched(train, order, workers) for workers in (0, 2)]
    assert_same(*([batch.tensors for batch in run] for run in runs))
    bad_samples = [[batch.bad_samples for batch in run] for run in runs]
    assert bad_samples[0] == bad_samples[1]
    # Each in each of two epochs, in the same words.
    found = [t for batch in bad_samples[0] for t in batch]
    assert (len(found), len({t.message for t in found})) == (4, 2)
    assert all("which is not a readable image" in t.message and t.places for t in found)


def test_an_error_of_an_augmentation_is_no_bad_image(root):
    class Broken(EvaluationView):
        def __call__(self, pixels):
            raise ValueError("bits must be between or equal to 1 and 8")

    data = opened(root / "folder").train
    data.view = Broken(8)
    for workers in (0, 1):
        with pytest.raises(
            RuntimeError, match=r"was read, but could not be augmented: bits must be"
        ):
            fetched(data, [[(0, 0), (0, 1)]], workers)


def test_a_run_with_every_augmentation_resumes_to_the_same_bits(tars, tmp_path):
    name, repeats = tars, 2
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
