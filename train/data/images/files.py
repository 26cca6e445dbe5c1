"""Images that are files of their own: class folders, or a CSV of paths and labels."""

import csv
import os
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache
from io import TextIOWrapper
from pathlib import Path

import numpy as np

from leaner_kernels.monitor.files import (
    DATA,
    files_below,
    identity,
    is_folder,
    is_hidden,
    open_file,
    read_file,
)
from leaner_kernels.monitor.pictures import PICTURES, decode
from train.data.copies import contents
from train.data.splits import HELD_OUT, Split, parts_of, split_of


class Paths(Sequence[str]):
    """Paths of files, as one array of bytes, which the processes forked later share.

    Reading a string would write its reference count, and copy its page of memory.
    """

    def __init__(self, paths: Iterable[str]):
        content, ends = bytearray(), array("q", [0])
        for path in paths:
            content += os.fsencode(path)
            ends.append(len(content))
        self.content, self.ends = np.frombuffer(content, np.uint8), np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:
        """Return one of them, from 0 on."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return os.fsdecode(self.content[self.ends[index] : self.ends[index + 1]].tobytes())


class ImageFiles:
    """Images of one split, a file each.

    Args:
        samples: path and class of each.
        names: of the classes.
        left_out: how many files are none of them, and the first.

    Attributes:
        mislabelled: how many copies of an image have another class, and the first; see ``files``.
    """

    mislabelled = ""

    def __init__(self, samples: Iterable[tuple[str, int]], names: list[str], left_out: str = ""):
        labels = array("q")
        self.paths = Paths(path for path, label in samples if labels.append(label) is None)
        self.labels, self.names, self.left_out = np.frombuffer(labels, np.int64), names, left_out
        self.classes = len(names)

    def __len__(self) -> int:
        return len(self.paths)

    def samples(self) -> Iterator[tuple[str, int]]:
        """Yield the path and class of each image."""
        yield from zip(self.paths, self.labels.tolist())

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes of an image, and its class."""
        return read_file(self.paths[index], DATA), int(self.labels[index])

    def name(self, index: int) -> str:
        """Return which image this is."""
        return self.paths[index]

    def sizes(self) -> list[int | None]:
        """Return the bytes of each image, None of a file that cannot be read."""
        return list(map(_size, self.paths))

    def files(self, other: "ImageFiles | None" = None) -> list[Hashable]:
        """Return what identifies each image, by whatever path, link or copy it is named.

        Args:
            other: images of another split, which come after these.

        Raises:
            ValueError: one file has two classes. Of copies ``mislabelled`` says it.
        """
        samples = [*self.samples(), *(other.samples() if other else ())]
        files = contents(path for path, _ in samples)
        alike, paths = Counter(files), dict(zip(files, (path for path, _ in samples)))
        readable = cache(lambda file: _is_readable(paths[file]))
        files = [
            file if alike[file] == 1 or readable(file) else (index,)
            for index, file in enumerate(files)
        ]
        firsts: dict[Hashable, tuple[str, int]] = {}
        mislabelled: list[str] = []
        for file, (path, label) in zip(files, samples):
            first, before = firsts.setdefault(file, (path, label))
            if before != label and identity(path) != identity(first):
                mislabelled.append(f"{path} is {self.names[label]}, {first} {self.names[before]}")
            elif before != label:
                both = f"{self.names[before]} and {self.names[label]}"
                also = "" if path == first else f", which is {first} too"
                raise ValueError(f"--data has the labels {both} of one image, {path}{also}")
        if mislabelled:
            self.mislabelled = f"{len(mislabelled):,}: {mislabelled[0]}"
        return files


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:
        return None


def _is_readable(path: str) -> bool:
    # Downloads that failed are often alike, and no copies; the loader counts them.
    try:
        decode(read_file(path, DATA), str)
    except (OSError, ValueError):
        return False
    return True


def open_folder(root: Path) -> tuple[ImageFiles, ImageFiles | None, str]:
    """Return the training images of a folder, and those held out where it has a folder for them.

    Args:
        root: holds ``CLASS/IMAGE``, or ``train/CLASS/IMAGE`` and maybe ``val/CLASS/IMAGE``, under
            any of the usual names of splits.

    Returns:
        The images, and what a plan says of folders that have the name of a split.

    Raises:
        ValueError: no images, a class without any, other classes among those held out, or a folder
            that may be a split or a class.
    """
    split, shown = _find_split(root)
    if split.train is None:
        images = _class_folders(root, root)
        # Some archives have CLASS/train/IMAGE.
        folders = [os.path.relpath(path, root).split(os.sep)[1:-1] for path in images.paths]
        parts, inner = _parts_of_folders(folders)
        return (*_divided(images, parts), inner or shown)
    train = _class_folders(root, _inner(root / split.train))
    if split.held_out is None:
        return train, None, shown
    held_out = _class_folders(root, _inner(root / split.held_out))
    if train.names != held_out.names:
        unmatched = sorted(set(train.names) ^ set(held_out.names))[0]
        raise ValueError(
            f"--data {root} must have the same classes in {split.train}/ and {split.held_out}/, "
            f"not {unmatched}"
        )
    return train, held_out, shown


def _find_split(root: Path) -> tuple[Split, str]:
    """Return which folders train and are held out, neither where all are classes; what to say.

    A folder of pictures is a class and a folder of such folders is a split, so ``train`` is a class
    beside ``bus`` and ``car``, and a split beside ``test`` or alone.

    Raises:
        ValueError: it may be either.
    """
    folders = _folders(root)
    parts = parts_of(folders)
    if not parts:
        return Split(None, None), ""
    nested = [name for name in parts if _folders(root / name)]
    pure = [name for name in nested if not any(map(_is_image, os.listdir(root / name)))]
    others = [n for n in folders if n not in parts and holds_image(root / n)]
    whole = pure if others else nested
    train = [name for name in whole if parts[name] == "train"]
    held_out = [name for name in whole if parts[name] != "train"]
    if others and not (train and held_out):
        if not pure:
            return Split(None, None), f"none: {', '.join(parts)} read as classes, as {others[0]} is"
        raise ValueError(
            f"--data {root} has {pure[0]}/{_folders(root / pure[0])[0]}/ beside {others[0]}/: is "
            f"{pure[0]} a class or a split? Have train/CLASS/ and val/CLASS/ alone, or CLASS/ alone"
        )
    if "train" not in parts.values():
        raise ValueError(f"--data {root} has {', '.join(parts)}, and no train/ beside")
    # Pictures of a test without classes measure nothing.
    kept = [name for name in parts if name in nested or parts[name] != "test"]
    split = split_of(kept, f"--data {root}")
    rest = [name for name in (*parts, *others) if name not in (split.train, split.held_out)]
    split = split._replace(left_out=tuple(rest))
    return split, split.shown()


def _folders(folder: Path) -> list[str]:
    inside = sorted(os.scandir(folder), key=lambda entry: entry.name)
    return [entry.name for entry in inside if is_folder(entry) and not is_hidden(entry.name)]


def _is_image(name: str) -> bool:
    return name.lower().endswith(PICTURES) and not is_hidden(name)


def holds_image(folder: Path) -> bool:
    """Return whether a folder, or one of its folders, has a picture."""
    return any(_is_image(file.name) for file in files_below(folder))


def _inner(part: Path) -> Path:
    """Return the folder of the classes of a split: some archives have train/train/CLASS/IMAGE."""
    inside = _folders(part)
    kinds = parts_of((part.name, *inside))
    same = len(inside) == 1 and (
        part.name == inside[0] or kinds.get(part.name) == kinds.get(inside[0], "")
    )
    return _inner(part / inside[0]) if same and _folders(part / inside[0]) else part


def _class_folders(root: Path, part: Path) -> ImageFiles:
    names = _folders(part)
    if not names:
        count = len(os.listdir(part))
        found = f"{count:,} files and no folder" if count else "nothing"
        shown = "" if part == root else f"{part.name}/"
        raise ValueError(f"--data {root} must hold {shown}CLASS/IMAGE, found {found} in {part}")
    left_out: list[str] = []

    def samples() -> Iterator[tuple[str, int]]:
        for label, name in enumerate(names):
            # The order of the split: the files of a folder, then those of its folders.
            for path in sorted(map(str, files_below(part / name)), key=os.path.split):
                if path.lower().endswith(PICTURES):
                    yield path, label
                else:
                    left_out.append(path)

    images = ImageFiles(samples(), names)
    counts = np.bincount(images.labels, minlength=len(names))
    empty = [name for name, count in zip(names, counts) if not count]
    if empty:
        more = f", and {len(empty) - 1} more classes hold none" if len(empty) > 1 else ""
        raise ValueError(f"--data: {part / empty[0]} holds no image: fill or remove it{more}")
    shown = [f"{len(left_out):,} of other endings: {left_out[0]}"] if left_out else []
    loose = sorted(name for name in os.listdir(part) if _is_image(name))
    loose = [name for name in loose if name not in names]
    shown += [f"{len(loose):,} of no class: {part / loose[0]}"] if loose else []
    images.left_out = "; ".join(shown)
    return images


def open_csv(path: Path) -> tuple[ImageFiles, ImageFiles | None, str]:
    """Return the images that a CSV names: columns ``path``, relative to it, and ``label``.

    A further column whose values are names of splits says which rows train and which are held out.
    Spaces around labels and names of columns are no part of them. Rows of hidden files are left
    out.

    Returns:
        The images to train on, those held out where a column says so, and what a plan says of it.

    Raises:
        ValueError: other columns, an empty cell, no rows, or a file that is not there.
    """
    try:
        with TextIOWrapper(open_file(path, DATA), "utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            columns = [(name or "").strip() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            missing = {"path", "label"} - set(columns)
            if missing:
                raise ValueError(
                    f"--data {path} must have columns path and label, got "
                    f"{', '.join(columns) or 'an empty file'}"
                )
            cells = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"--data {path} is no CSV in UTF-8: {error}") from None
    if not cells:
        raise ValueError(f"--data {path} has no rows")
    rows = [(line, row["path"] or "", (row["label"] or "").strip()) for line, row in cells]
    for line, image, label in rows:
        if not image.strip() or not label:
            missing = "label" if image.strip() else "path"
            raise ValueError(f"--data {path} has no {missing} in line {line}")
    # The name of a file may end in a space, but seldom does.
    rows = [
        (line, image if (path.parent / image).is_file() else image.strip(), label)
        for line, image, label in rows
    ]
    others = [name for name in columns if name not in ("path", "label")]
    parts, splits = _parts_of_rows({name: [row[name] for _, row in cells] for name in others}, rows)
    hidden = [image for _, image, _ in rows if not os.path.isabs(image) and is_hidden(image)]
    unseen = set(hidden)
    kept = [(*row, part) for row, part in zip(rows, parts) if row[1] not in unseen]
    if not kept:
        raise ValueError(f"--data {path} has rows of hidden files alone, such as {hidden[0]}")
    files = [(line, path.parent / image, part) for line, image, _, part in kept]
    lost = [(line, file) for line, file, _ in files if not file.is_file()]
    if lost:
        more = f", nor are {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ValueError(f"--data {path}: {lost[0][1]} of line {lost[0][0]} is no file{more}")
    names = _in_order({label for _, _, label, _ in kept})
    numbers = {name: number for number, name in enumerate(names)}
    samples = [(str(file), numbers[row[2]]) for (_, file, _), row in zip(files, kept)]
    shown = f"{len(hidden):,} rows of hidden files: {hidden[0]}" if hidden else ""
    images = ImageFiles(samples, names, shown)
    return (*_divided(images, [part for *_, part in kept]), splits)


def _parts_of_rows(
    columns: dict[str, list[str | None]], rows: Sequence[tuple[int, str, str]]
) -> tuple[list[str], str]:
    """Return the split of each row of a CSV, and what to say of it: "train" and "" without one.

    It stands in a column of nothing else, or is a folder in every path.
    """
    for name, cells in columns.items():
        values = [value.strip() if isinstance(value, str) else "" for value in cells]
        parts = parts_of(set(values))
        if {*values} == {*parts} and "train" in parts.values() and {*parts.values()} > {"train"}:
            split = split_of(sorted(parts), f"column {name}")
            return [parts[value] for value in values], f"{split.shown()}, of the column {name}"
    return _parts_of_folders([Path(image).parent.parts for _, image, _ in rows])


def _parts_of_folders(folders: Sequence[Sequence[str]]) -> tuple[list[str], str]:
    """Return the split of each path by its folders; "train" and "" where not all have one."""
    names = parts_of({name for of in folders for name in of})
    parts = [next((names[name] for name in of if name in names), "") for of in folders]
    if "" in parts or "train" not in parts or {*parts} == {"train"}:
        return ["train"] * len(folders), ""
    split = split_of(sorted(names), "the folders of the paths")
    return parts, f"{split.shown()}, of the folders of the paths"


def _divided(images: ImageFiles, parts: Sequence[str]) -> tuple[ImageFiles, ImageFiles | None]:
    """Return the images of the part that trains, and of the first that measures."""
    part = next((part for part in HELD_OUT if part in parts), None)
    if part is None:
        return images, None

    def samples(wanted: str) -> Iterator[tuple[str, int]]:
        return (sample for sample, of in zip(images.samples(), parts) if of == wanted)

    train = ImageFiles(samples("train"), images.names, images.left_out)
    return train, ImageFiles(samples(part), images.names)


def _in_order(names: Iterable[str]) -> list[str]:
    """Return names in alphabetical order, whole numbers by their value."""
    names = sorted(names)
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names
