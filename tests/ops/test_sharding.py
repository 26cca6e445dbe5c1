"""On two ranks: tensor parallelism by PyTorch's styles, FSDP2 and DDP.

Two processes compute everything once; each test reads what they found.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from leaner_kernels import attention
from tests import two_ranks

pytestmark = pytest.mark.slow


class Separate(nn.Module):
    """Attention as models written elsewhere have it, with a projection for each of q, k and v."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.q, self.k, self.v = nn.Linear(12, 32), nn.Linear(12, 16), nn.Linear(12, 16)
        self.o = nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(a.transpose(1, 2).flatten(2))


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of the weights and of x, whole."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().mean().backward()
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    found |= {"x": x.grad, "out": out.detach()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def differing(actual: dict[str, Tensor], expected: dict[str, Tensor], **near: float) -> list[str]:
    assert actual.keys() == expected.keys()
    near = near or {"rtol": 1e-4, "atol": 1e-6}
    return [n for n, t in expected.items() if not torch.allclose(actual[n], t, **near)]


def split_over_ranks(mesh: DeviceMesh) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(4, 7, 12)
    found: dict[str, Any] = {}
    model = Separate()
    expected = gradients(copy.deepcopy(model), x)
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel()}
    parallelize_module(model, mesh, plan | {"o": RowwiseParallel()})
    found["separate"] = differing(gradients(model, x), expected)
    return found


def data_parallel(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    """Each rank has half of the batch; gradients are the means over both."""
    torch.manual_seed(1)
    model, x = nn.Sequential(Separate(), Separate()), torch.randn(4, 7, 12)
    mine = x[2 * rank : 2 * rank + 2]
    expected = gradients(copy.deepcopy(model), x)
    del expected["x"], expected["out"]
    found = {}
    for static in (False, True):
        wrapped = DistributedDataParallel(copy.deepcopy(model), static_graph=static)
        actual = gradients(wrapped, mine)
        found[f"DDP {static}"] = differing({n: actual[n] for n in expected}, expected)
    in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, policy in {"float32": MixedPrecisionPolicy(), "bf16": in_bf16}.items():
        sharded = copy.deepcopy(model)
        for part in (*sharded, sharded):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        actual = gradients(sharded, mine)
        near = {"rtol": 0.1, "atol": 2e-3} if name == "bf16" else {}
        found[f"FSDP2 {name}"] = differing({n: actual[n] for n in expected}, expected, **near)
    return found


def work(rank: int, folder: Path) -> None:
    """What each rank does; its findings go to a file."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    found = split_over_ranks(mesh) | data_parallel(mesh, rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes found, the same in both."""
    folder = tmp_path_factory.mktemp("ranks")
    both = two_ranks.found_by("tests.ops.test_sharding", folder)
    assert both[0] == both[1]
    return both[0]


@pytest.mark.parametrize(
    "way", ["separate", "DDP False", "DDP True", "FSDP2 float32", "FSDP2 bf16"]
)
def test_a_model_written_elsewhere_has_the_gradients_of_one_process(found, way):
    assert found[way] == []
