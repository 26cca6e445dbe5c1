"""Which names of folders, files and tables say that they train, or that they are held out."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

# In the order in which parts measure: where there is validation, test data is not looked at.
HELD_OUT = ("validation", "test")
_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("dev", "eval", "evaluation", "val", "valid", "validation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# Words that may stand beside them: "Training set", "test-images", "train-00000-of-00002".
_BESIDE = {"data", "dataset", "folder", "image", "images", "img", "imgs", "of", "set", "split"}
_JOINED = re.compile(f"({'|'.join(sorted(_WORDS, key=len, reverse=True))})(?:{'|'.join(_BESIDE)})")


class Split(NamedTuple):
    """The part of a data set to train on and the part to measure, by name; None of a missing one.

    Attributes:
        train: name of the part to train on.
        held_out: name of the part to measure.
        left_out: names of other parts, which are not read.
    """

    train: str | None
    held_out: str | None
    left_out: tuple[str, ...] = ()

    def shown(self) -> str:
        """Return what a plan says of it."""
        held_out = "" if self.held_out is None else f", held out {self.held_out}"
        left_out = f"; not read: {', '.join(self.left_out)}" if self.left_out else ""
        return f"trained on {self.train}{held_out}{left_out}"


def parts_of(names: Iterable[str]) -> dict[str, str]:
    """Return the names that are of a split, and which: "train", "validation" or "test".

    A name is one in any case and with any separators and numbers: ``Training``, ``test_set``,
    ``val2017``, ``train-00000-of-00002``. With other words it is one beside another name that
    differs in the split alone: ``birds-train`` beside ``birds-test``, but not ``bullet train``
    beside ``crash test``.
    """
    parts: dict[str, str] = {}
    framed: defaultdict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for name in names:
        words = re.findall(r"[^\W\d_]+", name.casefold())
        words = [joined[1] if (joined := _JOINED.fullmatch(word)) else word for word in words]
        named = [word for word in words if word in _WORDS]
        if len(named) == 1:
            others = tuple(word for word in words if word not in _BESIDE and word not in _WORDS)
            framed[others][name] = _WORDS[named[0]]
    for others, of in framed.items():
        if not others or ("train" in of.values() and set(of.values()) > {"train"}):
            parts |= of
    return parts


def split_of(names: Sequence[str], where: str) -> Split:
    """Return which of some names is trained on, and which is held out.

    Args:
        names: of parts; those that are of no split are left out.
        where: what has them, for a message.

    Raises:
        ValueError: two of them are the same part.
    """
    parts = parts_of(names)
    chosen: dict[str, str] = {}
    for name, part in parts.items():
        if part in chosen:
            raise ValueError(f"{where} has two parts {part}, {chosen[part]} and {name}: keep one")
        chosen[part] = name
    train = chosen.get("train")
    held_out = next((chosen[part] for part in HELD_OUT if part in chosen), None)
    return Split(train, held_out, tuple(name for name in names if name not in (train, held_out)))


def by_part(root: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the files of a folder by the split of their folders, or else of their names.

    Returns:
        Files by "train", "validation", "test", and "" for those of no split.
    """
    files = sorted(files)
    inside = {file: file.relative_to(root) for file in files}
    folders = parts_of({name for path in inside.values() for name in path.parent.parts})
    stems = parts_of({path.stem for path in inside.values()})
    parts: defaultdict[str, list[Path]] = defaultdict(list)
    for file, path in inside.items():
        of_folders = (folders[name] for name in path.parent.parts if name in folders)
        parts[next(of_folders, stems.get(path.stem, ""))].append(file)
    return dict(parts)
