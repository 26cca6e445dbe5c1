"""Images that are files of their own: class folders, or a CSV of paths and labels."""

import csv
import os
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

from leaner_kernels.monitor.files import files_below, identity, is_hidden

# Names of a folder of held-out images, beside train/; the first that is there is taken.
HELD_OUT = ("val", "validation", "valid", "test")
# Of names of images, in small letters.
ENDINGS = (
    *(".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff"),
    ".webp",
)


class ImageFiles:
    """Images of one split, a file each.

    Args:
        samples: path and class of each.
        names: of the classes.
        left_out: how many files are none of them, and the first.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], names: list[str], left_out: str = ""):
        self.samples, self.names, self.left_out = samples, names, left_out
        self.labels = [label for _, label in samples]
        self.classes = len(names)

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes of an image, and its class."""
        path, label = self.samples[index]
        return Path(path).read_bytes(), label

    def name(self, index: int) -> str:
        """Return which image this is."""
        return self.samples[index][0]

    def files(self) -> list[Hashable]:
        """Return what identifies the file of each image, by whatever path or link it is named.

        Raises:
            ValueError: one file has two classes.
        """
        files = [identity(path) for path, _ in self.samples]
        firsts: dict[Hashable, tuple[str, int]] = {}
        for file, (path, label) in zip(files, self.samples):
            first, other = firsts.setdefault(file, (path, label))
            if other != label:
                both = f"{self.names[other]} and {self.names[label]}"
                also = "" if path == first else f", which is {first} too"
                raise ValueError(f"--data has the labels {both} of one image, {path}{also}")
        return files


def open_folder(root: Path) -> tuple[ImageFiles, ImageFiles | None]:
    """Return the training images of a folder, and those held out where it has a folder for them.

    Args:
        root: holds ``CLASS/IMAGE``, or ``train/CLASS/IMAGE`` and maybe ``val/CLASS/IMAGE``.

    Raises:
        ValueError: no images, a class without any, or other classes among those held out.
    """
    if not (root / "train").is_dir():
        return _class_folders(root, root), None
    train = _class_folders(root, root / "train")
    part = next((part for part in HELD_OUT if (root / part).is_dir()), None)
    if part is None:
        return train, None
    held_out = _class_folders(root, root / part)
    if train.names != held_out.names:
        unmatched = sorted(set(train.names) ^ set(held_out.names))[0]
        raise ValueError(
            f"--data {root} must have the same classes in train/ and {part}/, not {unmatched}"
        )
    return train, held_out


def _class_folders(root: Path, part: Path) -> ImageFiles:
    inside = sorted(os.scandir(part), key=lambda entry: entry.name)
    names = [entry.name for entry in inside if entry.is_dir() and not is_hidden(entry.name)]
    if not names:
        found = f"{len(inside):,} files and no folder" if inside else "nothing"
        shown = "" if part == root else f"{part.name}/"
        raise ValueError(f"--data {root} must hold {shown}CLASS/IMAGE, found {found} in {part}")
    samples, left_out = [], []
    for label, name in enumerate(names):
        # The order of the split: the files of a folder, then those of its folders.
        for path in sorted(map(str, files_below(part / name)), key=os.path.split):
            if path.lower().endswith(ENDINGS):
                samples.append((path, label))
            else:
                left_out.append(path)
    filled = {label for _, label in samples}
    empty = [name for label, name in enumerate(names) if label not in filled]
    if empty:
        more = f", and {len(empty) - 1} more classes hold none" if len(empty) > 1 else ""
        raise ValueError(f"--data: {part / empty[0]} holds no image: fill or remove it{more}")
    shown = f"{len(left_out):,} of other endings: {left_out[0]}" if left_out else ""
    return ImageFiles(samples, names, shown)


def open_csv(path: Path) -> ImageFiles:
    """Return the images that a CSV names: columns ``path``, relative to it, and ``label``.

    Spaces around labels and names of columns are no part of them. Rows of hidden files are left
    out.

    Raises:
        ValueError: other columns, an empty cell, no rows, or a file that is not there.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            columns = [(name or "").strip() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            missing = {"path", "label"} - set(columns)
            if missing:
                raise ValueError(
                    f"--data {path} must have columns path and label, got {', '.join(columns)}"
                )
            rows = [
                (reader.line_num, row["path"] or "", (row["label"] or "").strip()) for row in reader
            ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"--data {path} is no CSV in UTF-8: {error}") from None
    if not rows:
        raise ValueError(f"--data {path} has no rows")
    for line, image, label in rows:
        if not image.strip() or not label:
            missing = "label" if image.strip() else "path"
            raise ValueError(f"--data {path} has no {missing} in line {line}")
    # The name of a file may end in a space, but seldom does.
    rows = [
        (line, image if (path.parent / image).is_file() else image.strip(), label)
        for line, image, label in rows
    ]
    hidden = [image for _, image, _ in rows if not os.path.isabs(image) and is_hidden(image)]
    unseen = set(hidden)
    rows = [row for row in rows if row[1] not in unseen]
    if not rows:
        raise ValueError(f"--data {path} has rows of hidden files alone, such as {hidden[0]}")
    files = [(line, path.parent / image) for line, image, _ in rows]
    lost = [(line, file) for line, file in files if not file.is_file()]
    if lost:
        more = f", nor are {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ValueError(f"--data {path}: {lost[0][1]} of line {lost[0][0]} is no file{more}")
    names = _in_order({label for *_, label in rows})
    numbers = {name: number for number, name in enumerate(names)}
    labels = (numbers[label] for *_, label in rows)
    samples = [(str(file), number) for (_, file), number in zip(files, labels)]
    shown = f"{len(hidden):,} rows of hidden files: {hidden[0]}" if hidden else ""
    return ImageFiles(samples, names, shown)


def _in_order(names: Iterable[str]) -> list[str]:
    """Return names in alphabetical order, whole numbers by their value."""
    names = sorted(names)
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names
