"""On two ranks: DTensors split by heads and by batch, PyTorch's tensor parallelism, FSDP2 and DDP.

Two processes compute everything once; each test reads what they found.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from leaner_kernels import attention, attention_with_stats
from leaner_kernels.ops.transforms import DECLARATIONS
from tests import two_ranks

ours = torch.ops.leaner_kernels
Call = Callable[..., tuple[Tensor, ...]]
ATTENTION_CASES = (
    *("grouped", "groups that two ranks cannot share", "lengths", "sample"),
    *("mask without gradient", "mask of each head", "mask of all heads", "mask of all"),
)


def _differentiable(name: str) -> list[str]:
    """Name the inputs of an operator that have gradients."""
    returns = getattr(ours, f"{name}_backward").default._schema.returns
    return [result.name.removeprefix("d") for result in returns]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


FOUR, GROUPED, PACKED = (4, 6, 5, 8), (4, 2, 5, 8), (4, 6, 3, 4, 8)
# Of each operator: the shapes of its differentiable inputs, and the arguments after them and after
# the sample's place.
OPERATORS: dict[str, tuple[list[tuple[int, ...]], list[Any], list[Any]]] = {
    "attention": ([FOUR, FOUR, FOUR], [None, None, None], [0.0, False, 0.3, 1.5, -1, -1]),
    "attention_qkvpacked": ([PACKED], [None, None], [0.0, True, 0.3, -1, -1]),
    "attention_varlen": (
        [(9, 4, 8)] * 3,
        [torch.tensor([0, 4, 9], dtype=torch.int32)] * 2 + [None],
        [5, 5, 0.0, False, 0.3, -1, -1],
    ),
    "cross_covariance_attention": ([PACKED, (4,)], [], [1e-12]),
    "channel_attention": ([PACKED], [], [0.3]),
    "window_attention": ([(4, 4, 6, 3, 4, 8)], [], [2, 3, 0.3]),
    "outlook_attention": ([(4, 5, 6, 4, 8), (4, 5, 6, 4, 9, 9)], [], [3, 1, 1, 0.3]),
    "nystrom_attention": ([(4, 2, 12, 8)] * 3, [None], [4, 0.3, 3, False]),
}


def compared(run: Call, inputs: list[Tensor], lay: Callable[[Tensor], list[Placement]]) -> dict:
    """What differs when inputs lie over the ranks; how the output lies; how often ranks spoke."""
    mesh = init_device_mesh("cpu", (2,))
    whole = [t.clone().requires_grad_() for t in inputs]
    spread = [distribute_tensor(t, mesh, lay(t)).requires_grad_() for t in inputs]
    expected = run(*whole)
    expected += torch.autograd.grad(expected[0].square().sum(), whole)
    with CommDebugMode() as spoken:
        actual = run(*spread)
        # The sum over ranks is not the operator's.
        grad = 2 * actual[0].detach()
        actual += torch.autograd.grad(actual[0], spread, grad)
    wrong = [
        number
        for number, (one, other) in enumerate(zip(actual, expected, strict=True))
        if not torch.allclose(one.full_tensor(), other, rtol=1e-9, atol=1e-12, equal_nan=True)
    ]
    placements = [str(each.placements[0]) for each in (actual[0], *actual[-len(inputs) :])]
    return {"wrong": wrong, "placements": placements, "spoken": spoken.get_total_counts()}


def operators() -> dict[str, dict]:
    found = {}
    for name, (shapes, before, params) in OPERATORS.items():
        operator = getattr(ours, f"{name}_with_stats")
        inputs = [random(*shape) for shape in shapes]
        replicated = [
            distribute_tensor(t, init_device_mesh("cpu", (2,)), [Replicate()])
            if isinstance(t, Tensor)
            else t
            for t in before
        ]
        for kind, way in enumerate(("batch", "heads")):
            pairs = [DECLARATIONS[name].pair(tensor) for tensor in _differentiable(name)]
            if pairs[0][kind] is None:
                continue
            axes = {id(t): pair[kind] for t, pair in zip(inputs, pairs)}

            def run(*t: Tensor, of=operator, plain=before, spread=replicated, params=params):
                others = spread if isinstance(t[0], DTensor) else plain
                # Without a sample the last is empty.
                return of(*t, *others, None, *params)[:-1]

            def lay(t: Tensor, axes=axes) -> list[Placement]:
                axis = axes[id(t)]
                return [Replicate() if axis is None else Shard(axis)]

            found[f"{name} {way}"] = compared(run, inputs, lay)

    def whole_batch(*t: Tensor) -> tuple[Tensor, ...]:
        return ours.nystrom_attention(*t, None, 4, 0.3, 3, True)

    inputs = [random(4, 2, 12, 8) for _ in range(3)]
    found["whole batch"] = compared(whole_batch, inputs, lambda _: [Shard(0)])
    return found


def attentions() -> dict[str, dict]:
    """Masks, lengths, groups of heads and samples of ``attention``."""
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    lengths, fixed = torch.tensor([5, 3, 1, 4], dtype=torch.int32), random(4, 1, 5, 5)
    # Of the shape of the lengths: decisions about one must not serve the other.
    sample = torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    spread = {id(t): distribute_tensor(t, mesh, [Replicate()]) for t in (lengths, sample, fixed)}

    def run(*t: Tensor, **more: Any) -> tuple[Tensor, ...]:
        if isinstance(t[0], DTensor):
            more = {name: spread.get(id(value), value) for name, value in more.items()}
        stats = attention_with_stats(*t, enable_gqa=True, **more)
        return stats if "sample" in more else stats[:-1]

    q, k, v = random(*FOUR), random(*FOUR), random(*FOUR)
    grouped = [q, random(*GROUPED), random(*GROUPED)]
    odd = [q, random(4, 3, 5, 8), random(4, 3, 5, 8)]
    cases = {
        "grouped": (grouped, {}),
        "groups that two ranks cannot share": (odd, {}),
        "lengths": ([q, k, v], {"key_lengths": lengths}),
        "sample": ([q, k, v], {"sample": sample}),
        "mask without gradient": ([q, k, v], {"attn_mask": fixed}),
        "mask of each head": ([q, k, v, random(4, 6, 5, 5)], {}),
        "mask of all heads": ([q, k, v, random(4, 1, 5, 5)], {}),
        "mask of all": ([q, k, v, random(5, 5)], {}),
    }
    for name, (inputs, more) in cases.items():
        for axis, way in enumerate(("batch", "heads")):

            def lay(t: Tensor, axis=axis) -> list[Placement]:
                return [Shard(axis) if t.dim() == 4 and t.shape[axis] > 1 else Replicate()]

            found[f"{name} {way}"] = compared(lambda *t, more=more: run(*t, **more), inputs, lay)
    found["plain"] = compared(lambda *t: (attention(*t),), [q, k, v], lambda _: [Shard(1)])
    query = distribute_tensor(q, mesh, [Shard(1)])
    # Decisions are remembered: one without dropout came first.
    for dropout_p in (0.0, 0.5):
        try:
            attention_with_stats(query, query, query, dropout_p=dropout_p)
            found[f"dropout {dropout_p}"] = {"raised": None}
        except RuntimeError as error:
            found[f"dropout {dropout_p}"] = {"raised": str(error)}
    return found


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
    found = operators() | attentions() | split_over_ranks(mesh) | data_parallel(mesh, rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes found, the same in both."""
    folder = tmp_path_factory.mktemp("ranks")
    both = two_ranks.found_by("tests.ops.test_sharding", folder)
    assert both[0] == both[1]
    return both[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_splits_by_heads_and_by_batch_without_a_word(found, name):
    out = DECLARATIONS[name].pair("out")
    inputs = [DECLARATIONS[name].pair(tensor) for tensor in _differentiable(name)]
    ways = [way for kind, way in enumerate(("batch", "heads")) if out[kind] is not None]
    assert "heads" in ways
    for way in ways:
        case = found[f"{name} {way}"]
        assert case["wrong"] == []
        assert case["spoken"] == 0
        kind = ("batch", "heads").index(way)
        # Ranks add up the gradient of what each has whole.
        gradients = ["P(sum)" if pair[kind] is None else f"S({pair[kind]})" for pair in inputs]
        laid = [f"S({out[kind]})", *gradients[: len(case["placements"]) - 1]]
        assert case["placements"] == laid


@pytest.mark.parametrize(
    "way", ["separate", "DDP False", "DDP True", "FSDP2 float32", "FSDP2 bf16"]
)
def test_a_model_written_elsewhere_has_the_gradients_of_one_process(found, way):
    assert found[way] == []


def test_masks_lengths_groups_and_samples_split_too(found):
    assert found["plain"] == {"wrong": [], "placements": ["S(1)"] * 4, "spoken": 0}
    for case in ATTENTION_CASES:
        for way in ("batch", "heads"):
            assert found[f"{case} {way}"]["wrong"] == [], case
            # Samples are entries of the whole batch, so every rank needs it whole.
            if case != "groups that two ranks cannot share":
                assert (found[f"{case} {way}"]["spoken"] > 0) == (f"{case} {way}" == "sample batch")
    # What ranks cannot share is gathered, and so is a batch that nystrom attention sees whole.
    for gathered in (found["groups that two ranks cannot share heads"], found["whole batch"]):
        assert (gathered["wrong"], gathered["placements"]) == ([], ["R"] * 4)


def test_dropout_of_dtensors_is_refused_also_after_a_call_without(found):
    without, dropped = found["dropout 0.0"]["raised"], found["dropout 0.5"]["raised"]
    assert without is None
    assert "dropout_p must be 0 for attention of DTensors, got 0.5" in dropped
