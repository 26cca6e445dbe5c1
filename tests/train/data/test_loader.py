"""Batches come whole and in order, whatever cannot be read and whichever worker dies."""

import errno
import gc
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from train.data import loader
from train.data.loader import (
    MAX_POOLS,
    MAX_REPLACEMENTS,
    DataError,
    Fetched,
    default_workers,
    loading,
)
from train.data.sampler import BatchSampler, Split
from train.data.text import TokenStream, Windows, open_text
from train.data.text.tokenizers import GPT

CPU = torch.device("cpu")
BAD = {3, 4, 11}


class Numbers:
    """Items that are their own keys; some cannot be read, and some do worse to their worker."""

    def __init__(
        self, length: int = 24, bad: set[int] = frozenset(), fatal: set[int] = frozenset()
    ):
        self.length, self.bad, self.fatal = length, bad, fatal
        self.requested = 0

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        self.requested += len(keys)
        for _, index in keys:
            if index in self.fatal and multiprocessing.parent_process() is not None:
                os.kill(os.getpid(), signal.SIGBUS)
            if index % 2 and index in self.bad:
                raise ValueError(f"number {index} cannot be read")
            if index in self.bad:
                raise FileNotFoundError(2, "No such file or directory", f"/numbers/{index}")
        tensor = torch.tensor(keys)
        return tensor, tensor.float().sin()


def order(steps: int = 8, first: int = 0, **split: int) -> BatchSampler:
    split = {"batch_size": 6, "ranks": 1, "accum": 1} | split
    return BatchSampler(24, Split(**split), seed=0, rank=0, first=first, last=steps)


def fetch(data, batches, workers: int = 0) -> list[Fetched]:
    with loading(data, batches, workers=workers, device=CPU) as fetched:
        return list(fetched)


def values(batches: list[Fetched]) -> list:
    return [([t.tolist() for t in batch.tensors], batch.bad_samples) for batch in batches]


def kill_worker(number: int = 0) -> int:
    """Kill a data worker of this process, see it dead but not yet buried, and return its pid."""
    pid = sorted(worker.pid for worker in multiprocessing.active_children())[number]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


@pytest.fixture
def attentive(monkeypatch):
    """A loader looks after its workers ten times a second instead of every 5 s."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


@pytest.fixture
def impatient(monkeypatch):
    """A loader waits for its workers to end for an instant instead of 5 s each."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


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


def test_the_last_item_is_followed_by_the_first_and_a_repeated_one_is_told_once():
    (batch,) = fetch(Numbers(bad={23, 0}), [[(0, 23), (0, 7), (0, 23)]])
    assert batch.tensors[0][:, 1].tolist() == [1, 7, 1]
    assert [bad.places for bad in batch.bad_samples] == [(0, 2)]


def test_stand_ins_depend_neither_on_workers_nor_on_ranks_nor_on_a_resume():
    data = Numbers(bad=BAD)
    whole = fetch(data, order())
    assert sum(len(batch.bad_samples) for batch in whole) == 2 * len(BAD)
    assert values(fetch(data, order(), workers=2)) == values(whole)
    assert values(fetch(data, order(first=5), workers=1)) == values(whole[5:])
    halves = [
        fetch(data, BatchSampler(24, Split(6, 2, 1), seed=0, rank=r, first=0, last=8))
        for r in (0, 1)
    ]
    for batch, *shares in zip(whole, *halves, strict=True):
        assert torch.equal(torch.cat([share.tensors[0] for share in shares]), batch.tensors[0])


def test_an_item_that_is_read_the_second_time_is_no_trouble():
    data = Numbers(bad={2})
    first = iter([True])

    class Hiccup(Numbers):
        def __getitems__(self, keys):
            return (data if next(first, False) else super()).__getitems__(keys)

    (batch,) = fetch(Hiccup(), [[(0, 1), (0, 2)]])
    assert values([batch]) == values(fetch(Numbers(), [[(0, 1), (0, 2)]]))


def test_an_item_that_cannot_be_read_costs_no_other_of_its_batch():
    class Single(Numbers):
        one_by_one = True

    data, keys = Single(bad={3}), [[(0, index) for index in range(24)]]
    assert values(fetch(data, keys)) == values(fetch(Numbers(bad={3}), keys))
    assert data.requested == 24 + 2  # again, and what stands in for it


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2.5),
        ({"proc/self/cgroup": "0::/host/only\n", "sys/fs/cgroup/cpu.max": "100000 50000"}, 2),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, np.inf),
        (
            {
                "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/docker/x\n0::/\n",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        ({}, np.inf),
    ],
)
def test_the_quota_of_a_control_group_is_the_least_of_it_and_those_above(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert loader._quota(tmp_path) == cores


def test_ranks_share_the_cores_that_they_may_use_and_keep_one_each(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(loader, "_quota", lambda: np.inf)
    assert [default_workers(ranks) for ranks in (1, 4, 8, 60, 64, 100)] == [63, 15, 7, 1, 1, 1]
    monkeypatch.setattr(loader, "_quota", lambda: 12.5)
    assert [default_workers(ranks) for ranks in (1, 4)] == [11, 2]


@pytest.mark.parametrize("workers", [0, 1])
def test_where_nothing_can_be_read_few_are_tried_and_the_first_is_named(workers):
    data = Numbers(bad=set(range(24)))
    message = f"number 5 cannot be read; nor can the {MAX_REPLACEMENTS} items after it be read"
    with pytest.raises(DataError, match=f"^{message}$"):
        fetch(data, [[(0, 5), (0, 6)]], workers)
    assert data.requested <= 2 + 2 + MAX_REPLACEMENTS


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_before_one_that_cannot_be_had_are_had(workers):
    data = Numbers(bad=set(range(3, 24)))
    had = []
    with (
        pytest.raises(DataError, match=r"^number 3 cannot be read; nor can the "),
        loading(data, [[(0, i)] for i in range(6)], workers=workers, device=CPU) as batches,
    ):
        had.extend(batch.tensors[0][0, 1].item() for batch in batches)
    assert had == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_order_that_breaks_off_gives_the_batches_before(workers):
    def batches():
        yield from ([(0, index)] for index in range(3))
        raise ValueError("no more of it")

    had = []
    with (
        pytest.raises(DataError, match="no more of it"),
        loading(Numbers(), batches(), workers=workers, device=CPU) as fetched,
    ):
        had.extend(batch.tensors[0][0, 1].item() for batch in fetched)
    assert had == [0, 1, 2]


@pytest.mark.parametrize(
    ("asked", "lanes", "started"),
    [(7, 24, 6), (8, 24, 8), (30, 24, 24), (50, 24, 48), (7, 1, 7), (0, 24, 0)],
)
def test_workers_share_the_lanes_of_a_data_set_evenly(monkeypatch, asked, lanes, started):
    def fetch_none(_fetcher, _batches, workers, _device):
        yield workers

    monkeypatch.setattr(loader, "_fetch_in_order", fetch_none)
    data = Numbers()
    data.lanes = lanes
    assert fetch(data, [], asked) == [started]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_costs_no_batch_and_is_told_with_the_next(workers):
    data = Numbers(bad=BAD)
    wanted = order(12, accum=2)
    whole = values(fetch(data, wanted))
    got = []
    pids = {}
    started = 0
    with loading(data, iter(wanted), workers=workers, device=CPU) as batches:
        for at, batch in enumerate(batches):
            got.append(batch)
            if at in (0, 7, 8):
                # One that does not have the next batch, if there are several.
                pids[at + 1] = kill_worker((at + 1 - started + 1) % workers)
                started = at + 1
        assert len(set(pids.values())) == 3
    assert not multiprocessing.active_children()
    for at, pid in pids.items():
        death, *others = got[at].bad_samples
        assert (death.places, death.message.split(" (")[0]) == (
            (),
            f"data worker {pid} was killed by signal 9",
        )
        got[at] = got[at]._replace(bad_samples=tuple(others))
    assert values(got) == whole


def test_a_worker_that_dies_does_not_disturb_what_the_rank_is_doing():
    with loading(Numbers(), order(), workers=2, device=CPU) as batches:
        next(batches)
        kill_worker()
        for _ in range(20):  # a handler of signals would raise its error here
            time.sleep(0.005)
        assert "killed by signal 9" in next(batches).bad_samples[0].message
        assert len(list(batches)) == 6


def test_a_worker_that_dies_while_the_rank_waits_is_noticed(tmp_path, attentive):
    died = tmp_path / "died"

    class DiesOnce(Numbers):
        def __getitems__(self, keys):
            if keys[0][1] == 1 and not died.exists():
                died.touch()
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitems__(keys)

    keys = [[(0, index)] for index in range(4)]
    got = fetch(DiesOnce(), keys, 1)
    assert [len(batch.bad_samples) for batch in got] == [0, 1, 0, 0]
    assert [batch.tensors[0].tolist() for batch in got] == [[list(key)] for (key,) in keys]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_that_always_kills_its_worker_is_given_up(workers, attentive):
    with (
        pytest.raises(DataError, match=rf"by signal 7 .*, as in {MAX_POOLS - 1} tries before$"),
        loading(Numbers(fatal={8}), order(), workers=workers, device=CPU) as batches,
    ):
        list(batches)
    assert not multiprocessing.active_children()


def test_a_worker_that_hangs_does_not_outlive_the_loader(impatient):
    class Hanging(Numbers):
        def __getitems__(self, keys):
            time.sleep(600 if keys[0][1] > 2 else 0)
            return super().__getitems__(keys)

    keys = [[(0, i)] for i in range(8)]
    with loading(Hanging(), keys, workers=2, device=CPU) as batches:
        next(batches)
    assert not multiprocessing.active_children()


def test_a_worker_does_not_collect_the_garbage_of_its_rank():
    class Threads:
        """Like a process group, which cannot be taken apart where its threads were not forked."""

        def __del__(self):
            if multiprocessing.parent_process() is not None:
                os._exit(9)

    class Collecting(Numbers):
        def __getitems__(self, keys):
            gc.collect()
            return super().__getitems__(keys)

    threads = Threads()
    threads.itself, left = threads, weakref.ref(threads)
    del threads
    assert values(fetch(Collecting(), order(), workers=2)) == values(fetch(Numbers(), order()))
    gc.collect()
    assert left() is None


def test_tokens_whose_file_shrinks_while_it_is_read_are_named(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(70, dtype=np.uint16).tofile(path)
    windows = Windows(TokenStream(path, "uint16", 10, 70), 5)
    keys = [[(0, index) for index in some] for some in ((0, 11), (1, 10), (11, 2))]
    with loading(windows, keys, workers=0, device=CPU) as batches:
        assert next(batches).tensors[0].tolist() == [[10, 11, 12, 13, 14], [65, 66, 67, 68, 69]]
        os.truncate(path, 2 * 60 + 4)
        _, (bad,) = next(batches)
        assert bad == (f"{path} was cut off: nothing at byte 120", (1,))
        path.unlink()
        with pytest.raises(DataError, match=rf"^{path}: No such file or directory; nor can"):
            next(batches)


def test_text_whose_tokens_were_cut_off_is_not_trained_on(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("one two three\n\nfour five\n")
    which = str(tmp_path / "a.txt"), "bytes"
    assert len(open_text(*which, specials=GPT).train) == 21
    (tokens,) = tmp_path.rglob("tokens.bin")
    os.truncate(tokens, 9)
    with pytest.raises(ValueError, match=rf"{tokens.parent} is damaged; .* has 9 bytes"):
        open_text(*which, specials=GPT)


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
