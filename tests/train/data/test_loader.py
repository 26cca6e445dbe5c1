"""Batches come whole and in order, whatever cannot be read and whichever worker dies."""

import errno
import multiprocessing
import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from train.data import loader
from train.data.loader import (
    MAX_REPLACEMENTS,
    DataError,
    Fetched,
    default_workers,
    loading,
)
from train.data.sampler import BatchSampler, BatchSplit
from train.data.text.stream import TokenStream, Windows

CPU = torch.device("cpu")
BAD = {3, 4, 11}


class Numbers:
    """Items that are their own keys; some cannot be read."""

    def __init__(self, length: int = 24, bad: set[int] = frozenset()):
        self.length, self.bad = length, bad
        self.requested = 0

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        self.requested += len(keys)
        for _, index in keys:
            if index % 2 and index in self.bad:
                raise ValueError(f"number {index} cannot be read")
            if index in self.bad:
                raise FileNotFoundError(2, "No such file or directory", f"/numbers/{index}")
        tensor = torch.tensor(keys)
        return tensor, tensor.float().sin()


def order(steps: int = 8, first: int = 0, **split: int) -> BatchSampler:
    split = {"batch_size": 6, "ranks": 1, "accum": 1} | split
    return BatchSampler(24, BatchSplit(**split), seed=0, rank=0, first=first, last=steps)


def fetch(data, batches, workers: int = 0) -> list[Fetched]:
    with loading(data, batches, workers=workers, device=CPU) as fetched:
        return list(fetched)


def values(batches: list[Fetched]) -> list:
    return [([t.tolist() for t in batch.tensors], batch.bad_samples) for batch in batches]


def test_the_next_item_that_can_be_read_stands_in():
    keys = [(5, index) for index in range(6)]
    (batch,) = fetch(Numbers(bad=BAD), [keys])
    index = [0, 1, 2, 5, 5, 5]
    assert batch.tensors[0].tolist() == [[5, i] for i in index]
    assert torch.equal(batch.tensors[1], batch.tensors[0].float().sin())
    assert [tuple(bad) for bad in batch.bad_samples] == [
        ("number 3 cannot be read", (3,)),
        ("/numbers/4: No such file or directory", (4,)),
    ]


def test_stand_ins_depend_neither_on_workers_nor_on_ranks_nor_on_a_resume():
    data = Numbers(bad=BAD)
    whole = fetch(data, order())
    assert sum(len(batch.bad_samples) for batch in whole) == 2 * len(BAD)
    assert values(fetch(data, order(), workers=2)) == values(whole)
    assert values(fetch(data, order(first=5), workers=1)) == values(whole[5:])
    halves = [
        fetch(data, BatchSampler(24, BatchSplit(6, 2, 1), seed=0, rank=r, first=0, last=8))
        for r in (0, 1)
    ]
    for batch, *shares in zip(whole, *halves, strict=True):
        assert torch.equal(torch.cat([share.tensors[0] for share in shares]), batch.tensors[0])


def test_ranks_share_the_cores_that_they_may_use_and_keep_one_each(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(loader, "_quota", lambda: np.inf)
    assert [default_workers(ranks) for ranks in (1, 4, 8, 60, 64, 100)] == [63, 15, 7, 1, 1, 1]
    monkeypatch.setattr(loader, "_quota", lambda: 12.5)
    assert [default_workers(ranks) for ranks in (1, 4)] == [11, 2]


@pytest.mark.parametrize("workers", [0, 1])
def test_where_nothing_can_be_read_few_are_tried_and_the_first_is_named(workers):
    data = Numbers(bad=set(range(24)))
    message = f"number 5 cannot be read; the next {MAX_REPLACEMENTS} items cannot be read either"
    with pytest.raises(DataError, match=f"^{message}$"):
        fetch(data, [[(0, 5), (0, 6)]], workers)
    assert data.requested <= 2 + 2 + MAX_REPLACEMENTS


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_before_one_that_cannot_be_had_are_had(workers):
    data = Numbers(bad=set(range(3, 24)))
    had = []
    with (
        pytest.raises(DataError, match=r"^number 3 cannot be read; the next "),
        loading(data, [[(0, i)] for i in range(6)], workers=workers, device=CPU) as batches,
    ):
        had.extend(batch.tensors[0][0, 1].item() for batch in batches)
    assert had == [0, 1, 2]


def test_tokens_whose_file_shrinks_while_it_is_read_are_named(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(70, dtype=np.uint16).tofile(path)
    windows = Windows(TokenStream(path, "uint16", 10, 70), 5)
    keys = [[(0, index) for index in some] for some in ((0, 11), (1, 10), (11, 2))]
    with loading(windows, keys, workers=0, device=CPU) as batches:
        assert next(batches).tensors[0].tolist() == [[10, 11, 12, 13, 14], [65, 66, 67, 68, 69]]
        os.truncate(path, 2 * 60 + 4)
        _, (bad,) = next(batches)
        assert bad == (f"{path} is truncated: reading at byte 120 failed", (1,))
        path.unlink()
        with pytest.raises(DataError, match=rf"^{path}: No such file or directory; the next"):
            next(batches)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_workers_that_cannot_be_started_end_the_run_in_one_line(monkeypatch):
    fork, left = os.fork, iter([True])

    def fork_once() -> int:
        if next(left, False):
            return fork()
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork_once)
    with pytest.raises(DataError, match=r"^data workers: .*Resource temporarily unavailable$"):
        fetch(Numbers(), order(), workers=2)
    assert not multiprocessing.active_children()


def test_an_error_of_the_program_is_not_taken_for_bad_data():
    class Wrong(Numbers):
        def __getitems__(self, keys):
            raise RuntimeError("a bug")

    for workers in (0, 1):
        with pytest.raises(RuntimeError, match="a bug"):
            fetch(Wrong(), order(), workers)
