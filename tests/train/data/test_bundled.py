"""The digits that come with the scripts."""

import numpy as np
import pytest
import torch

from train.data.images import open_digits


def test_the_digits_are_those_of_scikit_learn():
    known = pytest.importorskip("sklearn.datasets").load_digits()
    train, held_out, _ = open_digits(8, 1, seed=0)
    assert (len(train), len(held_out)) == (1433, 364)
    images = torch.cat([train.images, held_out.images])[:, 0] * 16
    expected = torch.from_numpy(known.images).float()
    away = np.zeros(len(expected), bool)
    for label in range(10):
        away[np.flatnonzero(known.target == label)[::5]] = True
    order = np.concatenate([np.flatnonzero(~away), np.flatnonzero(away)])
    assert torch.equal(images, expected[order])
    labels = torch.cat([train.labels, held_out.labels])
    assert labels.tolist() == known.target[order].tolist()
