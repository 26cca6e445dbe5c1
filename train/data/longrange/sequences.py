"""Corpora as data sets: batches of tokens padded at their ends."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from train.data.loader import Key
from train.data.longrange.corpus import Corpus

Batch = tuple[Tensor, Tensor, Tensor]


class PaddedSequences:
    """Sequences of one length each, padded with 0 to ``length``.

    Args:
        corpus: the sequences.
        length: tokens of a batch; a longer sequence is cut.
        shift: added to every token: 1 where 0 is a byte like others, so as not to be the padding.
    """

    def __init__(self, corpus: Corpus, length: int, shift: int = 0):
        self.corpus, self.length, self.shift = corpus, length, shift

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        """Return tokens (B, length) int64, lengths (B,) int32 and labels (B,) int64."""
        chosen = [index for _, index in keys]
        tokens, lengths = padded(self.corpus, chosen, self.length, self.shift)
        return tokens, lengths, torch.from_numpy(self.corpus.labels[chosen].astype(np.int64))


class Pairs:
    """Pairs of sequences.

    Args:
        corpus: the sequences.
        pairs: (pairs, 2), indices of them.
        labels: (pairs,) uint8.
        length: tokens of a batch; a longer sequence is cut.
        shift: added to every token.
    """

    def __init__(
        self, corpus: Corpus, pairs: np.ndarray, labels: np.ndarray, length: int, shift: int = 0
    ):
        self.corpus, self.pairs, self.labels = corpus, pairs, labels
        self.length, self.shift = length, shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        """Return tokens (B, 2, length) int64, lengths (B, 2) int32 and labels (B,) int64."""
        chosen = [index for _, index in keys]
        both = self.pairs[chosen].reshape(-1).tolist()
        tokens, lengths = padded(self.corpus, both, self.length, self.shift)
        labels = torch.from_numpy(self.labels[chosen].astype(np.int64))
        return tokens.view(-1, 2, self.length), lengths.view(-1, 2), labels


def padded(corpus: Corpus, chosen: Sequence[int], length: int, shift: int) -> tuple[Tensor, Tensor]:
    """Return sequences, (B, length) int64 with 0 after their ends, and their lengths, int32."""
    tokens = np.zeros((len(chosen), length), np.int64)
    lengths = np.zeros(len(chosen), np.int32)
    for row, index in enumerate(chosen):
        sequence = corpus[index][:length]
        tokens[row, : len(sequence)] = sequence
        tokens[row, : len(sequence)] += shift
        lengths[row] = len(sequence)
    return torch.from_numpy(tokens), torch.from_numpy(lengths)
