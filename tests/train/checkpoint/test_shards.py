"""The files of a checkpoint: DCP reads ours, we read DCP's, on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch import distributed as dist

from tests.train.forked import on_two_ranks
from tests.train.launch import SHARD
from train.checkpoint import shards
from train.checkpoint.shards import load_tensors, part_of, saved_tensors, whole_of
from train.loop import parallel

# Of every dtype that a state has, a scalar and an empty one among them.
TENSORS = {
    "model.weight": torch.arange(15.0).view(5, 3),
    "model.half": torch.arange(7, dtype=torch.bfloat16),
    "model.seen": torch.tensor(2**40),
    "model.mask": torch.tensor([True, False]),
    "model.none": torch.zeros(0, 3),
    "optimizer.state.weight.step": torch.tensor(3.0),
    "random.0.torch": torch.arange(9, dtype=torch.uint8),
    "random.0.spare_gaussians": torch.tensor([0.5, float("inf")], dtype=torch.float64),
}


@pytest.fixture
def group():
    """One process that PyTorch's own checkpoints can work with."""
    with parallel.init_distributed() as world:
        yield world.host_group


def write(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write the shard of the only rank."""
    folder.mkdir()
    parts = {name: part_of(tensor) for name, tensor in tensors.items()}
    with (folder / SHARD).open("xb") as file:
        return shards.write_synced(file, shards.pieces_of_shard(parts))


def empty(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def test_pytorch_reads_what_a_run_writes(group, tmp_path):
    from torch.distributed import checkpoint as dcp

    write(tmp_path / "c", TENSORS)
    read = empty(TENSORS)
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "c"))
    dcp.load(read, storage_reader=reader, process_group=group)
    assert_equal(read, TENSORS)
    assert_equal(load_file(tmp_path / "c" / SHARD), TENSORS)


MESHES = {"rows": (2,), "replicas": (2, 1), "one replica": (1, 2)}
SIZES = {"uneven": (3, 4), "one row": (1, 5), "even": (4, 2)}


def work(rank: int, folder: Path) -> dict[str, Any]:
    """Save and read sharded tensors on two ranks, one of which then finds a file missing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    said: dict[str, Any] = {}
    with parallel.init_distributed() as world:
        for mesh_name, shape in MESHES.items():
            mesh = init_device_mesh("cpu", shape)
            placements = [Replicate()] * (len(shape) - 1) + [Shard(0)]
            tensors = {
                name: distribute_tensor(torch.rand(size), mesh, placements)
                for name, size in SIZES.items()
            }
            tensors["plain"] = torch.tensor([1.5, 2.5])
            parts = {name: part_of(tensor, rank) for name, tensor in tensors.items()}
            owned = {name: part for name, part in parts.items() if part.owned}
            said[mesh_name] = {name: [*part.offsets] for name, part in owned.items()}
            path = folder / mesh_name
            path.mkdir(exist_ok=True)
            with (path / f"{rank}.safetensors").open("xb") as file:
                shards.write_synced(file, shards.pieces_of_shard(owned))
            dist.barrier()
            read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            own = {name: part_of(tensor) for name, tensor in read.items()}
            load_tensors(path, own, world.host_group)
            for name, tensor in tensors.items():
                assert torch.equal(whole_of(read[name]), whole_of(tensor)), name
                shards.copy_part(own[name], torch.zeros(own[name].size))
                assert not whole_of(read[name]).any()
        missing = path if rank == 0 else folder / "nowhere"
        with pytest.raises(ValueError, match="cannot load") as refused:
            load_tensors(missing, own, world.host_group)
        said["refused"] = str(refused.value)
    return said


@pytest.mark.slow
def test_each_part_is_written_by_one_rank_and_read_by_whoever_needs_it(tmp_path):
    first, second = on_two_ranks(__name__, tmp_path)
    begin = {name: [0, 0] for name in SIZES} | {"plain": [0]}
    assert first["replicas"] == first["rows"] == first["one replica"] == begin
    assert second["replicas"] == {}, "the second replica writes nothing"
    assert (
        second["rows"]
        == second["one replica"]
        == {
            "uneven": [2, 0],
            "one row": [1, 0],
            "even": [2, 0],
        }
    )
    for refused in (first["refused"], second["refused"]):
        assert "the checkpoint has no tensor 'uneven'" in refused, (
            "both ranks tell what one of them found"
        )
    for mesh in MESHES:
        sizes = {name: tensor.size for name, tensor in saved_tensors(tmp_path / mesh).items()}
        assert sizes == {name: (*size,) for name, size in SIZES.items()} | {"plain": (2,)}
