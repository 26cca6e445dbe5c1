"""The same few photographs as files of each format that can be trained on."""

import io
import json
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from train.data.pictures import decoded, opened

CLASSES = ("n01440764", "n02102040", "n03445777")


class Photograph(NamedTuple):
    """One image: its class by number, its name without an ending, and its JPEG."""

    label: int
    key: str
    content: bytes


def photographs(split: str, count: int) -> list[Photograph]:
    """Return JPEGs of different sizes, sorted by class as a folder is."""
    made = []
    for i in range(count):
        label = i * len(CLASSES) // count
        draw = np.random.default_rng((split == "train", i))
        coarse = Image.fromarray(draw.integers(0, 256, (4, 5, 3), dtype=np.uint8))
        file = io.BytesIO()
        coarse.resize((30 + i, 24), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        made.append(Photograph(label, f"{CLASSES[label]}_{i:02d}", file.getvalue()))
    return made


def decode(content: bytes, name) -> Image.Image:
    """Return a picture as training sees it."""
    return decoded(opened(content, name), name)


def dealt(images: list[Photograph], shards: int) -> list[list[Photograph]]:
    """Return the images of each shard, one after another."""
    cuts = [len(images) * shard // shards for shard in range(shards + 1)]
    return [images[begin:end] for begin, end in pairwise(cuts)]


def write_folder(root: Path, split: str, images: list[Photograph]) -> None:
    """``root/train/n01440764/n01440764_00.JPEG``, as ImageNet unpacks."""
    for label, key, content in images:
        path = root / split / CLASSES[label] / f"{key}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_tars(root: Path, prefix: str, images: list[Photograph], shards: int) -> None:
    """``root/train-0000.tar`` and so on, as WebDataset's writer does."""
    root.mkdir(parents=True, exist_ok=True)
    for shard, samples in enumerate(dealt(images, shards)):
        with tarfile.open(root / f"{prefix}-{shard:04d}.tar", "w") as tar:
            for label, key, content in samples:
                about = {"filename": f"{key}.JPEG", "label": label}
                members = {"cls": str(label).encode(), "json": json.dumps(about).encode()}
                for kind, data in {"jpg": content, **members}.items():
                    member = tarfile.TarInfo(f"{key}.{kind}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def write_parquet(root: Path, split: str, images: list[Photograph], shards: int) -> None:
    """``root/data/train-00000-of-00002.parquet``, in the schema of ILSVRC/imagenet-1k."""
    import pyarrow as pa
    from pyarrow import parquet

    features = {
        "image": {"_type": "Image"},
        "label": {"names": list(CLASSES), "_type": "ClassLabel"},
    }
    file = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    schema = pa.schema({"image": file, "label": pa.int64()}).with_metadata(about)
    (root / "data").mkdir(parents=True, exist_ok=True)
    for shard, samples in enumerate(dealt(images, shards)):
        rows = [
            {"image": {"bytes": content, "path": f"{key}.JPEG"}, "label": label}
            for label, key, content in samples
        ]
        table = pa.Table.from_pylist(rows, schema)
        path = root / "data" / f"{split}-{shard:05d}-of-{shards:05d}.parquet"
        parquet.write_table(table, path, row_group_size=2)
