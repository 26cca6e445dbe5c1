"""KappaMonitor on two ranks: one report for all."""

import json
import math
from pathlib import Path
from unittest import mock

import pytest
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from leaner_kernels import KappaMonitor, attention
from tests import two_ranks
from tests.kappa.test_monitor import Model, batch
from tests.kappa.test_monitor_foreign import SDPA, Attention, seeded

pytestmark = pytest.mark.slow


def one_step(monitor: KappaMonitor, model: nn.Module, rank: int) -> list[dict]:
    """Two micro-batches, other ones on each rank."""
    monitor.begin(2)
    for scale in (3, 1):
        model(scale * (batch() + rank)).sum().backward()
    return monitor.end()


def failure(monitor: KappaMonitor) -> str:
    with pytest.raises(RuntimeError) as caught:
        monitor.end()
    return str(caught.value)


def work(rank: int, folder: Path) -> None:
    """What each rank does; its findings go to a file."""
    found = {}
    model = Model(recompute=True)
    found["alone"] = one_step(KappaMonitor(model, every=1, samples=3), model, rank)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    sharded = Model(recompute=True)
    for part in (sharded.first, sharded.second, sharded):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    replicated = DistributedDataParallel(Model(recompute=True))
    for name, model in {"FSDP2": sharded, "DDP": replicated}.items():
        path = folder / f"{name}.jsonl"
        monitor = KappaMonitor(model, every=1, samples=3, path=path)
        gathered = dist.all_gather_into_tensor
        with mock.patch.object(dist, "all_gather_into_tensor", wraps=gathered) as gather:
            found[name] = one_step(monitor, model, rank)
        # FSDP2 gathers weights with it too, in another group.
        groups = [call.kwargs.get("group") for call in gather.call_args_list]
        found[f"{name} collectives"] = groups.count(monitor._group)

    monitor.begin(3)
    model.module.first(batch())
    if rank == 0:
        model.module.second(batch())
    found["skipped"] = monitor.end()
    monitor.begin(4)
    model(batch())
    monitor.cancel()
    found["next"] = one_step(monitor, model, rank)
    found["foreign"] = work_of_others(rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def foreign() -> nn.Module:
    return seeded(lambda: nn.Sequential(Attention(SDPA), nn.LayerNorm(12), Attention(attention)))


def one_ragged_step(monitor: KappaMonitor, model: nn.Module, rank: int) -> list[dict]:
    """Sequences of 9 tokens on one rank, of 7 on the other."""
    monitor.begin(2)
    model(batch()[:, 2 * rank :]).sum().backward()
    return monitor.end()


def work_of_others(rank: int) -> dict:
    """What each rank finds in a model whose attention is not a module of ours."""
    found = {}
    sharded = foreign()
    for part in (*sharded, sharded):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    model = DistributedDataParallel(foreign())
    found["FSDP2"] = one_ragged_step(KappaMonitor(sharded, every=1), sharded, rank)
    monitor = KappaMonitor(model, every=1)
    monitor.begin(3)
    if rank == 0:
        model.module(batch())
    found["no forward"] = failure(monitor)
    monitor.begin(4)
    if rank == 1:
        model.module[0].heads = 4
    model.module(batch())
    found["disagree"] = failure(monitor)
    model.module[0].heads = 3
    found["DDP"] = one_ragged_step(monitor, model, rank)
    longer = nn.Sequential(*foreign(), *([Attention(SDPA)] if rank == 0 else []))
    monitor = KappaMonitor(longer, every=1)
    monitor.begin(5)
    longer(batch())
    found["longer"] = failure(monitor)
    # As if there were one process.
    with mock.patch.object(dist, "get_world_size", return_value=1):
        found["alone"] = one_ragged_step(KappaMonitor(model := foreign(), every=1), model, rank)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], Path]:
    """What each of two processes found, and the folder of their files."""
    folder = tmp_path_factory.mktemp("ranks")
    return two_ranks.found_by("tests.kappa.test_monitor_ranks", folder), folder


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["FSDP2", "DDP"])
def test_rows_are_joined_over_ranks_in_one_collective(
    ranks: tuple[list[dict], Path], wrapped: str
) -> None:
    (first, second), folder = ranks
    rows = first[wrapped]
    assert rows == second[wrapped]
    assert first[f"{wrapped} collectives"] == 1
    written = [json.loads(line) for line in (folder / f"{wrapped}.jsonl").read_text().splitlines()]
    # By rank 0 alone, and for DDP once more in the step after one that was left.
    written = [row for row in written if row["step"] != 3]
    assert written == (rows if wrapped == "FSDP2" else rows + first["next"])
    assert [row["layer"] for row in rows] == ["first", "second.0"]
    for row, *alone in zip(rows, first["alone"], second["alone"]):
        logs = [math.log(one["kappa"]) for one in alone]
        assert row["kappa"] == pytest.approx(math.exp(sum(logs) / 2), rel=1e-3)
        assert row["max_logit"] == pytest.approx(max(one["max_logit"] for one in alone), rel=1e-4)
        for name in ("sigma_max", "entropy", "prob_norm", "head_norm", "effective_rank", "tokens"):
            assert row[name] == pytest.approx(sum(one[name] for one in alone) / 2, rel=1e-4)


def test_a_layer_that_ran_on_one_rank_alone_has_the_row_of_that(
    ranks: tuple[list[dict], Path],
) -> None:
    first, second = ranks[0]
    assert first["skipped"] == second["skipped"]
    assert [row["reason"] for row in first["skipped"]] == [None, None]
    assert first["skipped"][1]["kappa"] > 1


def test_rows_of_models_of_others_are_joined_too(ranks: tuple[list[dict], Path]) -> None:
    first, second = (found["foreign"] for found in ranks[0])
    for wrapped in ("FSDP2", "DDP"):
        assert first[wrapped] == second[wrapped]
        assert [row["layer"] for row in first[wrapped]] == ["0", "2"]
        for row, *alone in zip(first[wrapped], first["alone"], second["alone"]):
            logs = [math.log(one["kappa"]) for one in alone]
            assert row["kappa"] == pytest.approx(math.exp(sum(logs) / 2), rel=1e-3)
            assert row["max_logit"] == pytest.approx(max(one["max_logit"] for one in alone))
            assert (row["tokens"], row["columns"]) == (8, 8)


def test_ranks_that_disagree_in_the_first_step_all_say_so(ranks: tuple[list[dict], Path]) -> None:
    first, second = (found["foreign"] for found in ranks[0])
    nothing = "step 3 on rank 1: DistributedDataParallel ran no forward between begin and end"
    assert first["no forward"] == second["no forward"] == nothing
    differ = "the same layers, but they differ in 0 in the first sampled step, 4"
    assert first["longer"] == second["longer"]
    assert first["longer"].endswith("they differ in 3 in the first sampled step, 5")
    assert first["disagree"] == second["disagree"]
    assert first["disagree"].endswith(differ)
