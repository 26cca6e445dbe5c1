"""The copy of a state on the host: its bytes, its memory, and who takes that when."""

import ctypes
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from train.checkpoint import staging
from train.checkpoint.shards import Part, ordered, part_of, pieces_of_shard
from train.checkpoint.staging import Staging, available_memory

CPU = torch.device("cpu")
PAGE = 4096


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of two pages, so that tensors lie across several."""
    monkeypatch.setattr(staging, "SEGMENT", 2 * PAGE)


def quiet(_line: str) -> None:
    raise AssertionError(_line)


def tensors_of(scale: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(scale)
    return {
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "weight": torch.randn(37 * scale, 41),
        "half": torch.randn(501 * scale).bfloat16(),
        "transposed": torch.randn(64, 33 * scale).T,
        "empty": torch.zeros(0, 7),
        "flags": torch.rand(4099 * scale) > 0.5,
        "random": torch.randint(0, 256, (5001,), dtype=torch.uint8),
        "steps": torch.arange(1023),
    }


def parts_of(tensors: dict[str, torch.Tensor]) -> dict[str, Part]:
    return ordered({name: part_of(tensor) for name, tensor in tensors.items()})


def locals_of(parts: dict[str, Part]) -> list[torch.Tensor]:
    return [part.local for part in parts.values()]


def places(memory: Staging) -> list[int]:
    return [segment.data_ptr() for segment in memory._segments]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("begun", [True, False])
def test_a_file_of_a_copy_has_the_bytes_of_one_of_the_tensors(begun: bool) -> None:
    """Also where the state grows or shrinks from one copy to the next."""
    memory = Staging(CPU, 1, quiet)
    if begun:
        memory.begin(sum(t.nbytes for t in tensors_of(2).values()))
        memory.join()
    for scale in (2, 1, 3, 2):
        before = places(memory)
        parts = parts_of(tensors_of(scale))
        staged = memory.copy(locals_of(parts))
        assert staged is not None
        expected = b"".join(pieces_of_shard(parts))
        for part in parts.values():
            part.local.zero_()
        assert b"".join(pieces_of_shard(parts, staged.wait())) == expected
        assert places(memory)[: len(before)] == before


def test_a_thread_takes_the_memory_of_the_first_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system clears new memory at its first use, which was in the pause of the training."""
    # Deterministic algorithms fill what they allocate.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    size = 96 * 2**20
    state, memory = torch.ones(size // 4), Staging(CPU, 1, quiet)
    memory.begin(size)
    assert {thread.name for thread in threading.enumerate()} >= {"checkpoint memory"}
    memory.join()
    assert sum(segment.nbytes for segment in memory._segments) >= size
    assert all(share_in_memory(segment) > 0.9 for segment in memory._segments)
    taken_places = places(memory)
    memory._add_segment = None  # pyright: ignore[reportAttributeAccessIssue] - none is allocated
    staged = memory.copy([state])
    assert staged is not None
    assert places(memory) == taken_places
    assert [t.data_ptr() for t in staged.body] == taken_places


def share_in_memory(tensor: torch.Tensor) -> float:
    """Return the share of a tensor's whole pages that the system holds, by ``mincore``."""
    first = -(-tensor.data_ptr() // PAGE) * PAGE
    pages = (tensor.data_ptr() + tensor.nbytes - first) // PAGE
    held = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * PAGE), held)
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in held) / pages


@pytest.mark.usefixtures("small")
def test_a_copy_that_comes_before_the_thread_is_done_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "_REST", 1e6)
    memory = Staging(CPU, 1, quiet)
    parts = parts_of(tensors_of(3))
    memory.begin(sum(tensor.nbytes for tensor in locals_of(parts)))
    while not memory._segments:
        time.sleep(0.001)
    began = time.perf_counter()
    staged = memory.copy(locals_of(parts))
    assert time.perf_counter() - began < 10
    assert staged is not None
    assert not memory._thread.is_alive()  # pyright: ignore[reportOptionalMemberAccess]
    assert b"".join(pieces_of_shard(parts, staged.wait())) == b"".join(pieces_of_shard(parts))


class Gpu:
    """Notes what is asked of CUDA, which has no GPU here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pinned: bool = True):
        self.asked: list[str] = []
        empty = torch.empty

        def allocate(
            size: int, *, dtype: torch.dtype, pin_memory: bool | None = None
        ) -> torch.Tensor:
            if pin_memory is None:
                return empty(size, dtype=dtype)
            self.asked.append("pinned" if pin_memory else "pageable")
            if pin_memory and not pinned:
                raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
            return empty(size, dtype=dtype)

        monkeypatch.setattr(staging.torch, "empty", allocate)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: self)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(device))

    def record_event(self) -> "Gpu":
        self.asked.append("event")
        return self

    def synchronize(self) -> None:
        self.asked.append("synchronize")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("pinned", [True, False])
def test_a_gpus_copies_go_to_pinned_memory_and_the_writer_waits_for_them(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    memory, gpu = Staging(torch.device("cuda", 0), 1, said.append), Gpu(monkeypatch, pinned)
    parts = parts_of({"weight": torch.randn(5000), "step": torch.tensor(1.0)})
    memory.begin(sum(tensor.nbytes for tensor in locals_of(parts)))
    memory.join()
    taken = [*gpu.asked]
    assert taken == (["pinned"] * 3 if pinned else ["pinned", *["pageable"] * 3])
    staged = memory.copy(locals_of(parts))
    assert staged is not None
    assert gpu.asked[len(taken) :] == ["event"]  # the training does not wait
    assert b"".join(pieces_of_shard(parts, staged.wait())) == b"".join(pieces_of_shard(parts))
    assert gpu.asked[len(taken) :] == ["event", "synchronize"]
    if pinned:
        assert said == []
    else:
        assert said == [
            "no pinned memory, so that checkpoints pause training longer: CUDA error: out of "
            "memory Compile with TORCH_USE_CUDA_DSA"
        ]


def test_the_memory_of_a_control_group_is_what_its_limit_leaves(tmp_path: Path) -> None:
    free = available_memory()
    assert free is None or free > 0
    assert staging._free_of_group(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300\nactive_file 50\n")
    assert staging._free_of_group(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert staging._free_of_group(tmp_path) is None
    (tmp_path / "memory.stat").write_text("anon 5\n")
    assert staging._free_of_group(tmp_path) is None


def test_ranks_of_a_host_take_no_memory_that_their_copies_together_would_exceed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "available_memory", lambda: 4_000_000)
    warned: list[str] = []
    memory = Staging(CPU, 8, warned.append)
    tensors = [torch.zeros(1_000_000, dtype=torch.uint8)]
    memory.begin(1_000_000)
    assert memory.copy(tensors) is None
    assert not memory._segments
    assert len(warned) == 1
    assert Staging(CPU, 4, quiet).copy(tensors) is not None
