"""Image files of a data set: found in folders, a CSV, tar files or on Hugging Face, and divided."""

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from leaner_kernels.monitor.command_line import one_line
from leaner_kernels.monitor.files import files_below, is_hidden
from train.data.images import KINDS, hub
from train.data.images.files import ImageFiles, holds_image, open_csv, open_folder
from train.data.images.machine import once_per_machine
from train.data.images.photographs import ImageSource
from train.data.images.survey import SHARE, Part, split
from train.data.splits import parts_of

# Images of files, up to which copies are looked for and sizes distinguish a data set from another.
COMPARED = 50_000


@dataclass(frozen=True)
class Sources:
    """Where the image files of a data set are.

    Attributes:
        train: images to train on.
        held_out: images that measure.
        classes: how many there are.
        names: of the classes; None where they have none.
        made: what is held out was chosen here, from the training images.
        left_out: how many files are no images, or are hidden, and the first of them.
        splits: which parts of the data set they are, where it has names of splits.
        mislabelled: how many images are copies of one with another class, and the first.
        in_both: how many held-out images are trained on too, and the first, where files tell.
    """

    train: ImageSource
    held_out: ImageSource
    classes: int
    names: list[str] | None
    made: bool = False
    left_out: str = ""
    splits: str = ""
    in_both: str = ""
    mislabelled: str = ""

    def counts(self) -> list[int] | None:
        """Return how many training images each class has; None of a stream."""
        labels = getattr(self.train, "labels", None)
        return None if labels is None else np.bincount(labels, minlength=self.classes).tolist()

    def facts(self) -> dict[str, Any]:
        """Return what a plan says of them."""
        facts: dict[str, Any] = {}
        counts = self.counts()
        if counts is not None:
            labels = [counts.index(count) for count in (min(counts), max(counts))]
            named = [self.names[label] if self.names else str(label) for label in labels]
            fewest, most = (f"{counts[label]:,} ({n})" for label, n in zip(labels, named))
            alike = min(counts) == max(counts)
            shown = f"{counts[0]:,} each" if alike else f"{fewest} to {most}"
            facts["training images of a class"] = shown
        if self.splits:
            facts["splits"] = self.splits
        if self.mislabelled:
            facts["copies_with_another_label"] = self.mislabelled
        if self.in_both:
            facts["held_out_and_trained_on"] = self.in_both
        if self.made:
            facts["held_out"] = f"{SHARE:.0%} of each class, the same in every run"
        if self.left_out:
            facts["left_out"] = self.left_out
        return facts

    def identity(self, name: str) -> dict[str, str]:
        """Return digests of the names, sizes and classes of the images, by what they are in words.

        Of a stream nothing is known before it is read.

        Args:
            name: of the data set.
        """
        parts = {"the set of pictures": self.train, "the held-out set": self.held_out}
        return {
            f"{words} under {name}": _digest(part)
            for words, part in parts.items()
            if hasattr(part, "labels")
        }

    def files(self) -> dict[str, str]:
        """Return what a run keeps of them: names of classes, and of images chosen to measure."""
        files = {}
        if self.names is not None:
            files["classes.txt"] = "".join(f"{one_line(name)}\n" for name in self.names)
        if self.made:
            names = map(self.held_out.name, range(len(self.held_out)))
            files["held_out.txt"] = "".join(f"{one_line(name)}\n" for name in names)
        return files


def _digest(part: Any) -> str:
    of = [part.source.names, part.indices.tolist()] if isinstance(part, Part) else [part.names]
    source = part.source if isinstance(part, Part) else part
    sizes = source.sizes() if len(source) <= COMPARED else None
    labels = np.asarray(source.labels).tolist()
    about = [*of, labels, sizes, [source.name(index) for index in range(len(source))]]
    return hashlib.sha256(json.dumps(about).encode("utf-8", "surrogateescape")).hexdigest()


def find_images(name: str, seed: int) -> Sources:
    """Find the image files of a data set, files of a folder once on each machine.

    Args and errors are those of ``_find``.
    """
    if name.startswith(("hf:", "hf-stream:")) or _is_tables(Path(name)):
        return _find(name, seed)
    return once_per_machine(partial(_find, name, seed))


def _find(name: str, seed: int) -> Sources:
    """Find the image files of a data set; hold some out where it has no split for that.

    Args:
        name: a folder, a .csv, "hf:" or "hf-stream:" and a data set of Hugging Face.
        seed: of the order of a stream.

    Raises:
        ValueError: no such data set, or one that is not laid out as it must be.
    """
    path, held_out, splits = Path(name), None, ""
    if name.startswith("hf-stream:") and name != "hf-stream:":
        train, held_out, classes, splits = hub.open_streams(name.removeprefix("hf-stream:"), seed)
    elif (name.startswith("hf:") and name != "hf:") or _is_tables(path):
        train, held_out, classes, splits = hub.open_tables(name.removeprefix("hf:"))
    elif path.is_dir():
        train, held_out, splits = open_folder(path)
        classes = train.classes
    elif path.is_file() and path.suffix.lower() == ".csv":
        train, held_out, splits = open_csv(path)
        classes = train.classes
    else:
        end = " which is a file" if path.is_file() else " which is not there"
        end = "" if name.startswith("hf") else f",{end}"
        raise ValueError(f"--data must be {KINDS}, got {name!r}{end}")
    names, left_out = getattr(train, "names", None), getattr(train, "left_out", "")
    if classes == 1:
        shown = f", {names[0]}" if names else ""
        raise ValueError(f"--data {name} has one class{shown}: there is nothing to tell apart")
    if held_out is not None:
        twice = _in_both(train, held_out)
        wrong = getattr(train, "mislabelled", "")
        return Sources(train, held_out, classes, names, False, left_out, splits, twice, wrong)
    both = split(train)
    wrong = getattr(train, "mislabelled", "")
    return Sources(*both, classes, names, True, left_out, splits, mislabelled=wrong)


def _in_both(train: Any, held_out: Any) -> str:
    """Return how many held-out images are copies of training images, and the first of them."""
    if not isinstance(train, ImageFiles) or len(train) + len(held_out) > COMPARED:
        return ""
    files = train.files(held_out)
    known, measured = set(files[: len(train)]), files[len(train) :]
    twice = [index for index, file in enumerate(measured) if file in known]
    return f"{len(twice):,} of {len(held_out):,}: {held_out.name(twice[0])}" if twice else ""


def _is_tables(path: Path) -> bool:
    if not path.is_dir():
        return False
    names = [entry.name for entry in path.iterdir() if not is_hidden(entry.name)]
    folders = [path, *(path / name for name in (*parts_of(names), "data"))]
    files = (file for folder in folders if folder.is_dir() for file in folder.iterdir())
    if "dataset_dict.json" in names or any(map(_is_table, files)):
        return True
    below = list(files_below(path)) if not holds_image(path) else ()
    return any(map(_is_table, below))


def _is_table(file: Path) -> bool:
    return file.suffix.lower() in (".tar", ".parquet") and not is_hidden(file.name)
