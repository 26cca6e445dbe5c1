"""Tiny files in the formats of the Long-Range Arena's published data."""

import hashlib
import io
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image


def write_lists(folder: Path, rows: list[tuple[str, int]]) -> None:
    """Write ListOps tables; the last two rows are held out."""
    parts = {"train": rows[:-2], "val": rows[-2:-1], "test": rows[-1:]}
    for part, held in parts.items():
        lines = [f"( {source} )\t{target}" for source, target in held]
        (folder / f"basic_{part}.tsv").write_text("\r\n".join(["Source\tTarget", *lines, ""]))


def write_reviews(folder: Path, count: int) -> None:
    """Write IMDB's folders with ``count`` reviews in each."""
    for part in ("train", "test"):
        for name in ("neg", "pos"):
            place = folder / "aclImdb" / part / name
            place.mkdir(parents=True)
            for i in range(count):
                text = f"{part} {i} " + ("good " if name == "pos" else "bad ") * (3 + i)
                (place / f"{i}_7.txt").write_text(text)


def write_pairs(folder: Path, texts: list[str]) -> None:
    """Write the tables of pairs, each text with the next one and labels that alternate."""
    for name in ("train", "eval", "test"):
        lines = [
            f"{i % 2}.0\tid{i}\tid{i + 1}\t{one}\t{other}"
            for i, (one, other) in enumerate(pairwise(texts))
        ]
        (folder / f"new_aan_pairs.{name}.tsv").write_text("\n".join(lines) + "\n")


def cifar(seed: int, count: int) -> tuple[np.ndarray, list[int]]:
    """Return images (count, 3072) as CIFAR-10 stores them, and their classes."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), rng.integers(0, 10, count).tolist()


def write_cifar(folder: Path, count: int) -> dict[str, str]:
    """Write CIFAR-10's pickles, ``count`` images in each; return their MD5 by name."""
    (folder / "cifar-10-batches-py").mkdir(parents=True)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    contents = {"batches.meta": {"label_names": [f"class {i}" for i in range(10)]}}
    for seed, name in enumerate(names):
        images, labels = cifar(seed, count)
        contents[name] = {"batch_label": name, "labels": labels, "data": images}
    sums = {}
    for name, content in contents.items():
        written = pickle.dumps(content, protocol=2)
        (folder / "cifar-10-batches-py" / name).write_bytes(written)
        sums[name] = hashlib.md5(written).hexdigest()
    return sums


def write_pathfinder(folder: Path, count: int) -> list[np.ndarray]:
    """Write PNG files and their list; the second one is empty, as some of the published are."""
    (folder / "metadata").mkdir(parents=True)
    (folder / "imgs" / "0").mkdir(parents=True)
    images, lines = [], []
    for i in range(count):
        image = np.random.default_rng(i).integers(0, 256, (32, 32), dtype=np.uint8)
        content = io.BytesIO()
        Image.fromarray(image).save(content, "PNG")
        path = folder / "imgs" / "0" / f"sample_{i}.png"
        path.write_bytes(b"" if i == 1 else content.getvalue())
        images.append(image)
        lines.append(f"imgs/0 sample_{i}.png {i} {i % 2} 1.0 14 4 2 0.5 1 1")
    (folder / "metadata" / "0.npy").write_text("\n".join(lines) + "\n")
    return images
