"""ListOps: nested lists of operators and digits, whose value is a digit.

The law is that of the Long-Range Arena's generator. A node is, where it is not as deep as the
grammar allows, with probability 1/4 an operator over 2 to 10 nodes, and otherwise a digit. What is
not longer than ``min_length`` or not shorter than ``max_length`` is drawn again; an operator counts
two, for its bracket too. MED is the median rounded down, SM the sum modulo 10.

Published files hold parentheses besides, which say nothing and are left out. The ids of the symbols
are those of ``SYMBOLS``, 1 to 15, and 0 pads: the original takes them from a Python set, in any
order.

Sequence i of a split is a function of (seed, split, i) alone, whatever the sizes; only where it
equals an earlier one, of test, dev and train in this order, is it drawn again.

Source: Nangia and Bowman 2018 (arXiv:1804.06028); google-research/long-range-arena.
"""

import csv
import random
from collections.abc import Callable
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

import numpy as np

from leaner_kernels.monitor.files import DATA, open_file
from train.data.longrange.corpus import SPLITS, Corpus

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = (*"0123456789", *OPERATORS, "]")
IDS = {symbol: id for id, symbol in enumerate(SYMBOLS, start=1)}
CLASSES = 10
SIZES = {"train": 96_000, "dev": 2_000, "test": 2_000}

_FIRST_OPERATOR, _END = IDS[OPERATORS[0]], IDS["]"]
_OPERATOR_SHARE = 0.25
_MAX_DRAWS = 1000  # of one sequence, before there are too few different ones


@dataclass(frozen=True)
class ListLimits:
    """What a sequence may be like.

    Attributes:
        max_depth: of a node; those of the last level are digits.
        max_args: of an operator, from 2.
        min_length: tokens that a sequence exceeds.
        max_length: tokens that it stays under.
        operators: so many of ``OPERATORS``, the first ones.

    Raises:
        ValueError: limits that no sequence is within.
    """

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000
    operators: int = len(OPERATORS)

    def __post_init__(self):
        longest = 1
        for _ in range(1, self.max_depth):
            longest = 2 + self.max_args * longest
        shortest = max(self.min_length + 1, 4)
        fits = shortest <= min(longest, self.max_length - 1)
        fits = fits and 1 <= self.operators <= len(OPERATORS)
        if self.max_args < 2 or self.min_length < 1 or not fits:
            raise ValueError(f"limits must leave room for a list, got {self}")


def generate(seed: int, sizes: dict[str, int], limits: ListLimits) -> dict[str, Corpus]:
    """Return sequences of token ids by split, no two alike, labelled by their values.

    Args:
        seed: of everything.
        sizes: sequences of "train", "dev" and "test".
        limits: of the sequences.

    Raises:
        ValueError: more sequences than there are within the limits.
    """
    seen: set[bytes] = set()
    corpora = {}
    for split in reversed(SPLITS):
        drawn = [_draw_new(seed, split, i, limits, seen) for i in range(sizes[split])]
        corpora[split] = Corpus.of([s for s, _ in drawn], [value for _, value in drawn])
    return corpora


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
    """A list is as long as none may be."""


def draw(rng: random.Random, limits: ListLimits) -> tuple[bytes, int, int]:
    """Return a sequence within the limits, its value, and how many were drawn until it came."""
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
    return _apply(operator, values)


def _apply(operator: int, values: list[int]) -> int:
    values, count = sorted(values), len(values)
    middle = (values[(count - 1) // 2] + values[count // 2]) // 2
    return (values[0], values[-1], middle, sum(values) % 10)[operator]


def inner_values(tokens: bytes | np.ndarray) -> np.ndarray:
    """Return the id of the value of each list at its closing bracket, 0 elsewhere: (tokens,) uint8.

    The last one is the value of the whole list.
    """
    values = np.zeros(len(tokens), np.uint8)
    open_lists: list[tuple[int, list[int]]] = [(0, [])]
    for place, token in enumerate(bytes(tokens)):
        if _FIRST_OPERATOR <= token < _END:
            open_lists.append((token - _FIRST_OPERATOR, []))
            continue
        value = token - 1
        if token == _END:
            value = _apply(*open_lists.pop())
            values[place] = 1 + value
        open_lists[-1][1].append(value)
    return values


def read(folder: Path) -> dict[str, Corpus]:
    """Read the published ``basic_train.tsv``, ``basic_val.tsv`` and ``basic_test.tsv``.

    Raises:
        ValueError: a file that is not there, or is not laid out as it must be.
    """
    names = {"train": "basic_train.tsv", "dev": "basic_val.tsv", "test": "basic_test.tsv"}
    return {split: _read_table(folder / name) for split, name in names.items()}


def _read_table(path: Path) -> Corpus:
    if not path.is_file():
        raise ValueError(f"--data must contain basic_{{train,val,test}}.tsv, got no {path}")
    sequences, labels = [], []
    with TextIOWrapper(open_file(path, DATA), "utf-8-sig", newline="") as file:
        table = csv.DictReader(file, delimiter="\t")
        try:
            for row in table:
                sequences.append(encode(row["Source"]))
                labels.append([*"0123456789"].index(row["Target"]))
        except (csv.Error, KeyError, ValueError, AttributeError) as error:
            raise ValueError(
                f"--data {path} line {table.line_num} must have columns Source, a list, and "
                f"Target, its digit: {error}"
            ) from None
    return Corpus.of(sequences, labels)


def encode(text: str) -> bytes:
    """Return the token ids of a list as it is published, with or without parentheses.

    Raises:
        KeyError: a symbol that is none.
        ValueError: no symbol.
    """
    words = text.replace("(", " ").replace(")", " ").split()
    if not words:
        raise ValueError("an empty list")
    return bytes(IDS[word] for word in words)


def decode(tokens: bytes | np.ndarray) -> str:
    """Return the text of token ids, without parentheses."""
    return " ".join(SYMBOLS[token - 1] for token in tokens)
