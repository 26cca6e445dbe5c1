"""ListOps: nested lists of operators and digits, whose value is a digit; generated here.

The distribution is that of the Long-Range Arena's generator. Above the largest depth, a node is an
operator over 2 to 10 nodes with probability 1/4, and otherwise a digit. A list must be longer than
``min_length`` and shorter than ``max_length``, or it is drawn again; an operator counts two,
because of its bracket. MED is the median rounded down, SM the sum modulo 10. The ids of the symbols
are those of ``SYMBOLS``, 1 to 15, and 0 pads.

Sequence i of a split is a function of (seed, split, i) alone, whatever the sizes. It is drawn again
only if it equals an earlier one, in the order test, dev, train.

Source: Nangia and Bowman 2018 (arXiv:1804.06028); Tay et al. 2021, "Long Range Arena"
(arXiv:2011.04006), github.com/google-research/long-range-arena.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from train.data.files import open_file
from train.data.loader import Key
from train.data.text.cache import build_once

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = (*"0123456789", *OPERATORS, "]")
IDS = {symbol: id for id, symbol in enumerate(SYMBOLS, start=1)}
CLASSES = 10
SPLITS = ("train", "dev", "test")
_PARTS = ("tokens", "offsets", "labels")  # of a split, in the file

_FIRST_OPERATOR, _END = IDS[OPERATORS[0]], IDS["]"]
_OPERATOR_SHARE = 0.25
_MAX_DRAWS = 1000  # of one sequence, before too few distinct ones are assumed


@dataclass(frozen=True)
class ListLimits:
    """The limits of a sequence.

    Attributes:
        max_depth: largest depth of a node; those of the last level are digits.
        max_args: largest number of arguments of an operator, from 2.
        min_length: tokens that a sequence exceeds.
        max_length: tokens that it stays under.
        operators: so many of ``OPERATORS``, the first ones.
    """

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000
    operators: int = len(OPERATORS)

    @property
    def padded_length(self) -> int:
        """Tokens of a sequence in a batch: the next power of two, as in the Long-Range Arena."""
        return 1 << (self.max_length - 2).bit_length()


@dataclass(frozen=True)
class Lists:
    """Sequences one after another, each with a label: a data set as ``train.data.loader`` has them.

    Attributes:
        tokens: (all tokens,) uint8.
        offsets: (sequences + 1,) int64: sequence i is ``tokens[offsets[i] : offsets[i + 1]]``.
        labels: (sequences,) uint8.
        length: tokens of a sequence in a batch, padded with 0.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    length: int

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens (B, length) int64, lengths (B,) int32 and labels (B,) int64."""
        chosen = [index for _, index in keys]
        lists = [self[index] for index in chosen]
        tokens = np.zeros((len(lists), self.length), np.int64)
        for row, symbols in zip(tokens, lists):
            row[: len(symbols)] = symbols
        lengths = torch.tensor([len(symbols) for symbols in lists], dtype=torch.int32)
        labels = torch.from_numpy(self.labels[chosen].astype(np.int64))
        return torch.from_numpy(tokens), lengths, labels

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, (sequences,)."""
        return np.diff(self.offsets)

    @property
    def first(self) -> np.ndarray:
        """The first token of each sequence, (sequences,)."""
        return self.tokens[self.offsets[:-1]]

    def digest(self) -> str:
        """Return the SHA-256 of the sequences and the labels."""
        whole = hashlib.sha256()
        for array in (self.tokens, self.offsets, self.labels):
            whole.update(array)
        return whole.hexdigest()


def open_lists(
    sizes: Mapping[str, int], limits: ListLimits, seed: int, folder: Path | None = None
) -> dict[str, Lists]:
    """Return the lists of each split, generated once and kept in a file.

    Args:
        sizes: sequences of "train", "dev" and "test".
        limits: limits of the sequences.
        seed: seed of everything.
        folder: where the file is kept, as in ``build_once``.

    Raises:
        ValueError: more sequences than there are within the limits, or a damaged file.
    """
    numbers = (*astuple(limits), "seed", seed, *(sizes[split] for split in SPLITS))
    name = "-".join(map(str, ("listops", "v3", *numbers)))

    def make(path: Path) -> None:
        lists = generate(seed, sizes, limits)
        arrays = {f"{s}_{part}": getattr(lists[s], part) for s in SPLITS for part in _PARTS}
        with path.open("wb") as file:
            np.savez(file, **arrays)

    path = build_once(f"{name}.npz", make, folder)
    try:
        with open_file(path) as file, np.load(file, allow_pickle=False) as arrays:
            parts = {s: [arrays[f"{s}_{part}"] for part in _PARTS] for s in SPLITS}
            return {split: Lists(*own, limits.padded_length) for split, own in parts.items()}
    except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} is damaged: remove it to create it again ({error})") from None


def generate(seed: int, sizes: Mapping[str, int], limits: ListLimits) -> dict[str, Lists]:
    """Return lists by split, no two alike, labelled by their values; arguments as ``open_lists``.

    Raises:
        ValueError: more sequences than there are within the limits.
    """
    seen: set[bytes] = set()
    lists = {}
    for split in reversed(SPLITS):
        drawn = [_draw_new(seed, split, i, limits, seen) for i in range(sizes[split])]
        sequences, values = [s for s, _ in drawn], [value for _, value in drawn]
        lists[split] = Lists(
            np.frombuffer(b"".join(sequences), np.uint8),
            np.cumsum([0, *map(len, sequences)]),
            np.array(values, np.uint8),
            limits.padded_length,
        )
    return lists


def _draw_new(
    seed: int, split: str, index: int, limits: ListLimits, seen: set[bytes]
) -> tuple[bytes, int]:
    """Return the first sequence of an index that was not seen before, and its value."""
    for again in range(_MAX_DRAWS):
        sequence, value, _ = draw(random.Random(f"{seed} {split} {index} {again}"), limits)
        if sequence not in seen:
            seen.add(sequence)
            return sequence, value
    raise ValueError(
        f"sizes must be at most the number of distinct lists within {limits}, got {len(seen) + 1} "
        "or more"
    )


class _TooLongError(Exception):
    """A list has reached the length limit."""


def draw(rng: random.Random, limits: ListLimits) -> tuple[bytes, int, int]:
    """Return a sequence within the limits, its value, and the number of draws."""
    tries = 0
    while True:
        tries += 1
        tokens: list[int] = []
        try:
            value = _node(rng.random, 1, limits, tokens)
        except _TooLongError:
            continue
        if len(tokens) > limits.min_length:
            return bytes(tokens), value, tries


def _node(uniform: Callable[[], float], depth: int, limits: ListLimits, tokens: list[int]) -> int:
    """Append the tokens of a node at some depth, and return its value."""
    if depth == limits.max_depth or uniform() >= _OPERATOR_SHARE:
        digit = int(10 * uniform())
        tokens.append(1 + digit)
        return digit
    operator = int(limits.operators * uniform())
    tokens.append(_FIRST_OPERATOR + operator)
    count = 2 + int((limits.max_args - 1) * uniform())
    values = [_node(uniform, depth + 1, limits, tokens) for _ in range(count)]
    tokens.append(_END)
    if len(tokens) >= limits.max_length:
        raise _TooLongError
    return apply(operator, values)


def apply(operator: int, values: Sequence[int]) -> int:
    """Return the value of one of ``OPERATORS``, by its place, over digits."""
    values, count = sorted(values), len(values)
    middle = (values[(count - 1) // 2] + values[count // 2]) // 2
    return (values[0], values[-1], middle, sum(values) % 10)[operator]


def decode(tokens: bytes | np.ndarray) -> str:
    """Return the text of token ids."""
    return " ".join(SYMBOLS[token - 1] for token in tokens)


def baseline(
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    train_cues: np.ndarray | int = 0,
    test_cues: np.ndarray | int = 0,
) -> float:
    """Return the accuracy of predicting the most frequent training label of an item's cue.

    Args:
        train_labels: (items,) uint8.
        test_labels: (items,) uint8.
        train_cues: (items,) uint8, the cue of each item; 0 without one.
        test_cues: as ``train_cues``.
    """
    votes = np.zeros((256, 256), np.int64)
    np.add.at(votes, (train_cues, train_labels), 1)
    return float((votes.argmax(axis=1)[test_cues] == test_labels).mean())
