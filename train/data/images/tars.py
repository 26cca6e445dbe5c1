"""Images in WebDataset's tar files, read by their place in the file and not streamed.

A sample is two members of one name: ``n01440764_10026.jpg`` and ``n01440764_10026.cls``, which is
the number of its class in digits. Shards are named for what they hold, ``train-0000.tar`` and
``val-0000.tar``. They are read through once, for where each image begins; then any image is one
seek away, so order, sharding and resume are those of a folder.
"""

import hashlib
import itertools
import json
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

IMAGES = ("jpg", "jpeg", "png", "webp")
# In "imagenet1k-train-0003.tar" and "val-0003.tar".
_SPLIT = re.compile(r"(?:^|[-_.])(train|val(?:id(?:ation)?)?)(?=[-_.0-9]|$)")


class Tars:
    """The samples of one split: their bytes and classes.

    Args:
        shards: of the split, in order.

    Attributes:
        labels: class of each sample.

    Raises:
        ValueError: a shard that is no uncompressed tar file, or a sample without image or class.
    """

    def __init__(self, shards: list[Path]):
        self.shards = shards
        self.places = _read_index(shards)
        self.labels = self.places[:, 3]

    def __len__(self) -> int:
        return len(self.places)

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes of an image, and its class.

        Raises:
            ValueError, OSError: the shard is no longer as it was; the message names it.
        """
        shard, offset, size, label = self.places[index].tolist()
        with self.shards[shard].open("rb") as file:
            file.seek(offset)
            content = file.read(size)
        if len(content) < size:
            raise ValueError(f"--data holds {self.name(index)}, of which a part is gone")
        return content, label

    def name(self, index: int) -> str:
        """Return which image this is."""
        shard, offset, *_ = self.places[index].tolist()
        return f"an image at byte {offset} of {self.shards[shard]}"


def find_shards(name: str) -> dict[str, list[Path]]:
    """Return the shards of "train" and "val" of a folder, or of a pattern with braces.

    Args:
        name: a folder, or a path such as ``DIR/{train,val}-{0000..0146}.tar``.

    Raises:
        ValueError: no shards of one of them, or a shard of the pattern that is not there.
    """
    folder = Path(name)
    paths = sorted(folder.glob("*.tar")) if folder.is_dir() else [Path(p) for p in _expand(name)]
    found: dict[str, list[Path]] = {"train": [], "val": []}
    for path in paths:
        split = _SPLIT.search(path.stem)
        if split is not None:
            found["train" if split[1] == "train" else "val"].append(path)
    for split, shards in found.items():
        if not shards:
            raise ValueError(
                f"--data {name} must name shards {split}-0000.tar and so on, found none of {split}"
            )
    return found


def _expand(pattern: str) -> Iterator[str]:
    """Write out braces: ``{a,b}`` and ``{000..146}``."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[part] if place % 2 == 0 else _choices(part) for place, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _choices(inside: str) -> list[str]:
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", inside)
    if numbers is None:
        return inside.split(",")
    first, last = numbers.groups()
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def _read_index(shards: list[Path]) -> np.ndarray:
    """Return (samples, 4): shard, first byte, bytes and class; remembered between runs."""
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in shards]
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    kept = home / "leaner_kernels" / f"tars-{digest}.npy"
    with suppress(OSError, ValueError, EOFError):  # not there, or damaged: it is made again
        return np.load(kept, allow_pickle=False)
    index = np.array([row for at, path in enumerate(shards) for row in _scan(at, path)])
    # Every rank may do this at once: whichever comes last replaces equal by equal.
    partial = kept.with_name(f".{kept.name}.{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.save(file, index)
        partial.replace(kept)
    except OSError:
        # Nowhere to remember it: it is read again the next time.
        partial.unlink(missing_ok=True)
    return index


def _scan(at: int, path: Path) -> Iterator[tuple[int, int, int, int]]:
    """Yield shard, first byte, bytes and class of every sample of one shard."""
    images: dict[str, tuple[int, int]] = {}
    classes: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, _, file = member.name.rpartition("/")
                key, _, kind = file.partition(".")
                key = f"{folder}/{key}"
                if member.isfile() and kind.lower() in IMAGES:
                    images[key] = (member.offset_data, member.size)
                elif member.isfile() and kind == "cls":
                    classes[key] = int(tar.extractfile(member).read())
                # tarfile keeps every member that it has seen.
                tar.members.clear()
            tar.fileobj.seek(tar.offset)
            # tarfile takes the middle of a header, and the end of a file, for that of the archive.
            if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise ValueError(f"it was cut off after {path.stat().st_size:,} bytes")
    except (tarfile.TarError, ValueError) as error:
        raise ValueError(f"--data holds {path}, which is no tar of samples: {error}") from None
    unpaired = sorted(images.keys() ^ classes.keys())
    if unpaired or not images:
        lacks = f"sample {unpaired[0].lstrip('/')} has not both" if unpaired else "has no sample of"
        raise ValueError(f"--data holds {path}: {lacks} an image ({', '.join(IMAGES)}) and a .cls")
    for key, (offset, size) in images.items():
        yield at, offset, size, classes[key]
