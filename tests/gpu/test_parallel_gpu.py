"""What counts, keeps and splits the operators does so on a GPU too."""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from leaner_kernels import KappaMonitor, attention, attention_with_stats
from leaner_kernels.activation_checkpointing import MUST_SAVE, checkpoint_policy
from leaner_kernels.nn import ManyHeadAttention
from leaner_kernels.tensor_parallel import SplitHeads

DEVICE = "cuda"
ours = torch.ops.leaner_kernels
selective = partial(create_selective_checkpoint_contexts, checkpoint_policy)


def tensors(*shape: int, count: int = 3) -> list[Tensor]:
    found = (torch.randn(shape).to(DEVICE, torch.bfloat16) for _ in range(count))
    return [t.requires_grad_() for t in found]


class Executed(TorchDispatchMode):
    """Counts the operators that are computed, not taken from what was kept."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpointing_attends_once_with_equal_gradients(compiled):
    module = ManyHeadAttention(192, num_heads=8, head_dim=32).to(DEVICE, torch.bfloat16)
    (x,) = tensors(4, 65, 192, count=1)
    whole = partial(checkpoint, module, use_reentrant=False)
    found, times = [], []
    for run in (whole, partial(whole, context_fn=selective)):
        run = torch.compile(run, fullgraph=True) if compiled else run
        with nullcontext() if compiled else Executed() as executed:
            found.append(torch.autograd.grad(run(x).square().sum(), [x, *module.parameters()]))
        if executed is not None:
            times.append(sum(executed.count[op] for op in MUST_SAVE))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert compiled or times == [2, 1]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    alone = dist.HashStore()
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=alone, rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("axis", [0, 1])
def test_dtensors_go_to_the_kernels(mesh, axis):
    whole = tensors(4, 6, 65, 32)
    spread = [distribute_tensor(t.detach(), mesh, [Shard(axis)]).requires_grad_() for t in whole]
    sample = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    found = []
    for inputs in (whole, spread):
        with Executed() as executed:
            out = attention(*inputs)
            gradients = torch.autograd.grad(out.square().sum(), inputs)
        assert DEVICE == "cpu" or executed.count[ours.attention_backward.default] > 0
        heads = attention_with_stats(*inputs, sample=sample).heads
        found.append([t.detach() for t in (out, *gradients, heads)])
    for one, other in zip(*found, strict=True):
        assert other.placements == ((Shard(axis),) if one.dim() == 4 else other.placements)
        assert torch.equal(other.full_tensor(), one)


def test_a_module_split_by_heads_computes_and_is_watched_as_the_whole(mesh):
    whole = nn.Sequential(ManyHeadAttention(192, 8, 32)).to(DEVICE, torch.bfloat16)
    split = copy.deepcopy(whole)
    try:
        parallelize_module(split, mesh, {"0": SplitHeads()})
    except RuntimeError as error:
        pytest.skip(str(error))
    x = torch.randn(4, 65, 192).to(DEVICE, torch.bfloat16)
    rows, outputs = [], []
    for model in (whole, split):
        monitor = KappaMonitor(model, every=1, samples=2)
        monitor.begin(0)
        outputs.append(model(x))
        outputs[-1].square().sum().backward()
        rows.append(monitor.end()[0]["kappa"])
    assert rows[0] == pytest.approx(rows[1], rel=1e-3)
    torch.testing.assert_close(*outputs)
    for one, other in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad.full_tensor())
