"""Masked language modelling: choose the masked tokens from (seed, epoch, index)."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from train.data.loader import DataSet, Key

IGNORED = -100  # the target of a token that need not be predicted
HIDDEN, REPLACED = 0.8, 0.1  # shares of the chosen tokens; the rest are unchanged


class Masked:
    """Sequences with masked tokens to predict: batches (tokens, targets), (B, N) int64.

    Every sequence has the same number of chosen tokens, so that the shapes of a step are fixed: the
    rate times N, rounded, or all that are not special if there are fewer. A chosen token becomes
    the mask with probability 0.8, any ordinary token with 0.1, and stays with 0.1.

    Args:
        sequences: batches (tokens,) of them.
        vocab_size: number of distinct tokens.
        specials: tokens that do not represent text, by name; they are never chosen, and include
            "[MASK]".
        rate: fraction of tokens to choose.
        seed: seed of all draws.

    Raises:
        ValueError: no token is called "[MASK]".

    Source: Devlin et al. 2019 (arXiv:1810.04805), section 3.1.
    """

    def __init__(
        self,
        sequences: DataSet,
        *,
        vocab_size: int,
        specials: Mapping[str, int],
        rate: float,
        seed: int,
    ):
        if "[MASK]" not in specials:
            raise ValueError(
                f"--tokenizer must have the token [MASK], got {', '.join(specials) or 'none'}"
            )
        self.sequences, self.rate, self.seed = sequences, rate, seed
        self.mask = specials["[MASK]"]
        self.specials = np.array(sorted(specials.values()))
        self.ordinary = np.setdiff1d(np.arange(vocab_size), self.specials)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        """Return the input tokens, and the original tokens at chosen places as targets."""
        (tokens,) = self.sequences.__getitems__(keys)
        inputs = tokens.numpy().copy()
        targets = np.full_like(inputs, IGNORED)
        special = np.isin(inputs, self.specials)
        for row, key in enumerate(keys):
            draw = np.random.default_rng((self.seed, *key))
            chosen = self._choose(draw, special[row])
            targets[row, chosen] = inputs[row, chosen]
            fate = draw.random(len(chosen))
            inputs[row, chosen[fate < HIDDEN]] = self.mask
            replaced = chosen[(fate >= HIDDEN) & (fate < HIDDEN + REPLACED)]
            inputs[row, replaced] = draw.choice(self.ordinary, len(replaced))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _choose(self, draw: np.random.Generator, special: np.ndarray) -> np.ndarray:
        places = np.flatnonzero(~special)
        count = min(round(self.rate * len(special)), len(places))
        return draw.permutation(places)[:count]
