"""Recognise the names of splits: ``Training``, ``test_set``, ``val2017``, ``seg_train``."""

import re
from collections import defaultdict
from collections.abc import Iterable

# Splits for evaluation, in order of preference: test data is not read if there is validation data.
HELD_OUT = ("validation", "test")
_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("dev", "eval", "evaluation", "val", "valid", "validation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# Words that do not change the split: "Training set", "test-images", "train-00000-of-00002".
_BESIDE = {"data", "dataset", "folder", "image", "images", "img", "imgs", "of", "set", "split"}
_JOINED = re.compile(f"({'|'.join(sorted(_WORDS, key=len, reverse=True))})(?:{'|'.join(_BESIDE)})")


def split_in(name: str) -> str | None:
    """Return the split for which a name has a word, whatever its other words are.

    Returns:
        "train", "validation" or "test"; None without such a word, or with two.
    """
    splits = [_WORDS[word] for word in _words(name) if word in _WORDS]
    return splits[0] if len(splits) == 1 else None


def splits_of(names: Iterable[str]) -> dict[str, str]:
    """Return the names that denote splits, each with its split: "train", "validation" or "test".

    Case, separators and numbers do not matter. A name with further words counts only beside a name
    that differs only in the split: ``birds-train`` beside ``birds-test``, but not ``bullet train``
    beside ``crash test``.
    """
    alike: defaultdict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for name in names:
        if split := split_in(name):
            others = (word for word in _words(name) if word not in _WORDS and word not in _BESIDE)
            alike[tuple(others)][name] = split
    splits: dict[str, str] = {}
    for others, named in alike.items():
        if not others or {"train"} < set(named.values()):
            splits |= named
    return splits


def _words(name: str) -> list[str]:
    words = re.findall(r"[^\W\d_]+", name.casefold())
    return [joined[1] if (joined := _JOINED.fullmatch(word)) else word for word in words]
