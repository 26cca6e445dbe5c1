"""ListOps: nested lists of operators and digits, whose value is a digit.

The law is that of the Long-Range Arena's generator. A node is, where it is not as deep as the
grammar allows, with probability 1/4 an operator over 2 to 10 nodes, and otherwise a digit. What is
not longer than ``min_length`` or not shorter than ``max_length`` is drawn again; an operator counts
two, for its bracket too. MED is the median rounded down, SM the sum modulo 10.

Published files hold parentheses besides, which say nothing and are left out. The ids of the symbols
are those of ``SYMBOLS``, 1 to 15, and 0 pads: the original takes them from a Python set, in any
order.

Sequence i of a split is a function of (seed, split, i) alone, whatever the sizes and the number of
processes; only where it equals an earlier one, of test, dev and train in this order, is it drawn
again.

python -m train.data.longrange.listops --check

Source: Nangia and Bowman 2018 (arXiv:1804.06028); google-research/long-range-arena.
"""

import argparse
import csv
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.data.longrange.corpus import SPLITS, Corpus, cached, in_processes

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = (*"0123456789", *OPERATORS, "]")
IDS = {symbol: id for id, symbol in enumerate(SYMBOLS, start=1)}
CLASSES = 10
SIZES = {"train": 96_000, "dev": 2_000, "test": 2_000}

_FIRST_OPERATOR, _END = IDS[OPERATORS[0]], IDS["]"]
_OPERATOR_SHARE = 0.25
_CHUNK = 2**19  # most tokens of the sequences whose trees are laid out together
_MAX_DRAWS = 1000  # of one sequence, before there are too few different ones


@dataclass(frozen=True)
class ListLimits:
    """What a sequence may be like.

    Attributes:
        max_depth: of a node; those of the last level are digits.
        max_args: of an operator, from 2.
        min_length: tokens that a sequence exceeds.
        max_length: tokens that it stays under.

    Raises:
        ValueError: limits that no sequence is within.
    """

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000

    def __post_init__(self):
        longest = 1
        for _ in range(1, self.max_depth):
            longest = 2 + self.max_args * longest
        shortest = max(self.min_length + 1, 4)
        fits = shortest <= min(longest, self.max_length - 1)
        if self.max_args < 2 or self.min_length < 1 or not fits:
            raise ValueError(f"limits must leave room for a list, got {self}")


# Every level of one tree, from its root: for each node its number of children, 0 of a digit.
Tree = list[np.ndarray]


def generate(
    seed: int, sizes: dict[str, int], limits: ListLimits | None = None, processes: int | None = None
) -> dict[str, Corpus]:
    """Return sequences of token ids by split, no two alike, labelled by their values.

    Args:
        seed: of everything.
        sizes: sequences of "train", "dev" and "test".
        limits: those of the Long-Range Arena when omitted.
        processes: as many as cores when omitted.

    Raises:
        ValueError: more sequences than there are within the limits.
    """
    limits = limits or ListLimits()
    seen: set[bytes] = set()
    corpora = {}
    for split in reversed(SPLITS):
        args = (seed, SPLITS.index(split), limits)
        chunk = max(1, _CHUNK // limits.max_length)
        parts = in_processes(draw, sizes[split], chunk, *args, processes=processes)
        corpora[split] = _without_repetitions(Corpus.joined(parts), seen, *args)
    return {split: corpora[split] for split in SPLITS}


def draw(
    seed: int, split: int, limits: ListLimits, first: int, last: int, again: int = 0
) -> Corpus:
    """Return sequences ``first`` up to ``last`` of a split.

    Args:
        seed: of everything.
        split: number of the split.
        limits: of the sequences.
        first: index of the first sequence.
        last: index after the last one.
        again: how often these were drawn before and not wanted.
    """
    trees, contents = [], []
    for index in range(first, last):
        rng = np.random.default_rng((seed, split, index, again))
        tree, _ = draw_tree(rng, limits)
        trees.append(tree)
        # 20 is a multiple of the 10 digits and of the 4 operators.
        contents.append(rng.integers(0, 20, sum(map(len, tree)), dtype=np.uint8))
    return _write(trees, contents)


def draw_tree(rng: np.random.Generator, limits: ListLimits) -> tuple[Tree, int]:
    """Return a tree within the limits, and how many were drawn until it came."""
    tree, tries = None, 0
    while tree is None:
        tries += 1
        # A digit alone is never long enough.
        if rng.random() < _OPERATOR_SHARE:
            tree = _draw_below_operator(rng, limits)
    return tree, tries


def _draw_below_operator(rng: np.random.Generator, limits: ListLimits) -> Tree | None:
    """Return a tree with an operator on top; or None as soon as it is outside the limits."""
    tree: Tree = []
    nodes, length = 1, 0
    for depth in range(1, limits.max_depth + 1):
        share = {1: 1.0, limits.max_depth: 0.0}.get(depth, _OPERATOR_SHARE)
        places = (rng.random(nodes) < share).nonzero()[0]
        arity = np.zeros(nodes, np.int64)
        arity[places] = rng.integers(2, limits.max_args + 1, len(places))
        tree.append(arity)
        length += nodes + len(places)
        nodes = int(arity.sum())
        # Every node still to come takes a token or more.
        if length + nodes >= limits.max_length:
            return None
        if nodes == 0:
            break
    return tree if length > limits.min_length else None


def _write(trees: list[Tree], contents: list[np.ndarray]) -> Corpus:
    """Write trees down, each one's tokens in order, and work out their values.

    All trees are laid out together, level by level: the children of a node stand side by side.
    """
    depth = max(map(len, trees))
    pieces = [
        np.split(content, np.cumsum([len(level) for level in tree])[:-1])
        for tree, content in zip(trees, contents)
    ]
    arity, content = (
        [np.concatenate([tree[d] for tree in each if d < len(tree)]) for d in range(depth)]
        for each in (trees, pieces)
    )
    sizes: list[np.ndarray] = [np.ones(0, np.int64)] * depth
    values = [c.astype(np.int64) % 10 for c in content]
    for d in reversed(range(depth)):
        sizes[d] = np.ones(len(arity[d]), np.int64)
        operators = np.flatnonzero(arity[d])
        if len(operators):
            first = _before(arity[d][operators])
            sizes[d][operators] = 2 + np.add.reduceat(sizes[d + 1], first)
            chosen = content[d][operators] % 4
            values[d][operators] = _apply(chosen, values[d + 1], first, arity[d][operators])

    offsets = np.append(_before(sizes[0]), sizes[0].sum())
    tokens = np.empty(offsets[-1], np.uint8)
    places = offsets[:-1]
    for d in range(depth):
        tokens[places] = 1 + content[d] % 10
        operators = np.flatnonzero(arity[d])
        if len(operators):
            tops = places[operators]
            tokens[tops] = _FIRST_OPERATOR + content[d][operators] % 4
            tokens[tops + sizes[d][operators] - 1] = _END
            before = _before(sizes[d + 1])
            first = before[_before(arity[d][operators])]
            places = np.repeat(tops + 1 - first, arity[d][operators]) + before
    return Corpus(tokens, offsets, values[0].astype(np.uint8))


def _before(counts: np.ndarray) -> np.ndarray:
    """Return for each count the sum of those before it."""
    return np.cumsum(counts) - counts


def _apply(
    chosen: np.ndarray, values: np.ndarray, first: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Return what each operator makes of its values, which start at ``first``."""
    ordered = np.sort(np.repeat(10 * np.arange(len(counts)), counts) + values) % 10
    middle = (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) // 2
    total = np.add.reduceat(values, first) % 10
    return np.choose(chosen, [ordered[first], ordered[first + counts - 1], middle, total])


def _without_repetitions(
    corpus: Corpus, seen: set[bytes], seed: int, split: int, limits: ListLimits
) -> Corpus:
    """Draw again every sequence that was seen before, and note all in ``seen``."""
    others: dict[int, Corpus] = {}
    for index in range(len(corpus)):
        sequence, again = corpus[index], 0
        while (key := hashlib.blake2b(sequence, digest_size=16).digest()) in seen:
            again += 1
            if again == _MAX_DRAWS:
                raise ValueError(
                    f"sizes must be at most what differs within {limits}, got {len(seen) + 1} or "
                    "more"
                )
            others[index] = draw(seed, split, limits, index, index + 1, again)
            sequence = others[index][0]
        seen.add(key)
    if not others:
        return corpus
    sequences = [others[i][0] if i in others else corpus[i] for i in range(len(corpus))]
    labels = [others[i].labels[0] if i in others else corpus.labels[i] for i in range(len(corpus))]
    return Corpus.of(sequences, labels)


def read(folder: Path) -> dict[str, Corpus]:
    """Read the published ``basic_train.tsv``, ``basic_val.tsv`` and ``basic_test.tsv``.

    Raises:
        ValueError: a file that is not there, or is not laid out as it must be.
    """
    names = {"train": "basic_train.tsv", "dev": "basic_val.tsv", "test": "basic_test.tsv"}
    return {split: _read_table(folder / name) for split, name in names.items()}


def _read_table(path: Path) -> Corpus:
    if not path.is_file():
        raise ValueError(f"--data must hold basic_train.tsv, _val and _test, found no {path}")
    sequences, labels = [], []
    with path.open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file, delimiter="\t")
        try:
            for row in table:
                sequences.append(encode(row["Source"]))
                labels.append([*"0123456789"].index(row["Target"]))
        except (csv.Error, KeyError, ValueError, AttributeError) as error:
            raise ValueError(
                f"--data {path} line {table.line_num} must hold Source and Target, a list and its "
                f"digit: {error}"
            ) from None
    return Corpus.of(sequences, labels)


def encode(text: str) -> np.ndarray:
    """Return the token ids of a list as it is published, with or without parentheses.

    Raises:
        KeyError: a symbol that is none.
        ValueError: no symbol.
    """
    words = text.replace("(", " ").replace(")", " ").split()
    if not words:
        raise ValueError("an empty list")
    return np.array([IDS[word] for word in words], np.uint8)


def decode(tokens: np.ndarray) -> str:
    """Return the text of token ids, without parentheses."""
    return " ".join(SYMBOLS[token - 1] for token in tokens)


def open_cached(
    folder: Path, seed: int, sizes: dict[str, int], limits: ListLimits
) -> dict[str, Corpus]:
    """Return the generated splits of a file in ``folder``, generated first if it is not there."""
    numbers = (limits.max_depth, limits.max_args, limits.min_length, limits.max_length)
    name = "-".join(map(str, ("listops", *numbers, "seed", seed, *(sizes[s] for s in SPLITS))))
    return cached(folder / f"{name}.npz", lambda: generate(seed, sizes, limits))


def check(
    seed: int, count: int, limits: ListLimits | None = None, processes: int | None = None
) -> dict[str, Any]:
    """Return what tells a sampler of this law, measured on ``count`` sequences.

    Returns:
        "acceptance" of a drawn tree, "mean_length", the "class_shares", and the share that the
        first operator alone gets right, "first_operator": half of the sequences say which class
        each operator means, the other half are scored.
    """
    limits = limits or ListLimits()
    rng = np.random.default_rng(seed)
    tries = sum(draw_tree(rng, limits)[1] for _ in range(count))
    chunk = max(1, _CHUNK // limits.max_length)
    corpus = Corpus.joined(in_processes(draw, count, chunk, seed, 0, limits, processes=processes))
    half = count // 2
    first = corpus.tokens[corpus.offsets[:-1]]
    votes = np.zeros((len(SYMBOLS) + 1, CLASSES), np.int64)
    np.add.at(votes, (first[:half], corpus.labels[:half]), 1)
    right = votes.argmax(axis=1)[first[half:]] == corpus.labels[half:]
    return {
        "acceptance": count / tries,
        "mean_length": float(corpus.lengths.mean()),
        "class_shares": (np.bincount(corpus.labels, minlength=CLASSES) / count).tolist(),
        "first_operator": float(right.mean()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the sampler's statistics, or examples; see ``--help``."""
    parser = argparse.ArgumentParser("listops.py", description="Lists of the Long-Range Arena.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="measure what tells the sampler's law")
    what.add_argument("--show", type=int, metavar="N", help="print N lists and their values")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000, help="lists to measure (10000)")
    wanted = parser.parse_args(argv)
    if wanted.check:
        found = check(wanted.seed, wanted.count)
        shares = " ".join(f"{share:.3f}" for share in found["class_shares"])
        sys.stdout.write(
            f"{wanted.count:,} lists, seed {wanted.seed}\n"
            f"trees within the limits  {found['acceptance']:.2%}\n"
            f"mean length              {found['mean_length']:.1f}\n"
            f"shares of the classes    {shares}\n"
            f"first operator alone     {found['first_operator']:.2%}\n"
        )
    else:
        corpus = draw(wanted.seed, 0, ListLimits(), 0, wanted.show)
        for index, label in enumerate(corpus.labels):
            sys.stdout.write(f"{label}\t{decode(corpus[index])}\n")


if __name__ == "__main__":
    main()
