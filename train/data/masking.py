"""Masked language modelling: choose the masked tokens from (seed, epoch, index)."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from train.data.loader import DataSet, Key

IGNORED = -100  # the target of a token that is not to be named
HIDDEN, REPLACED = 0.8, 0.1  # shares of the chosen tokens; the rest stay as they are


class Masked:
    """Sequences some of whose tokens are to be named: batches (tokens, targets), (B, N) int64.

    Of every sequence the same number of tokens is chosen, so that the shapes of a step are fixed:
    the rate times N, rounded, or all that are not special where these are fewer. A chosen token
    becomes the mask with probability 0.8, any ordinary token with 0.1, and stays with 0.1.

    Args:
        sequences: batches (tokens,) of them.
        vocab_size: number of tokens that there are.
        specials: tokens that stand for no text and are never chosen, by name; one is "[MASK]".
        rate: share of the tokens that is chosen.
        seed: of all draws.

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
        """Return the tokens to be read, and what those were that are to be named."""
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
