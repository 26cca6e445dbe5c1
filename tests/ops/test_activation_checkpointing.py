"""Under selective checkpointing attention runs once in a step, and nothing else changes."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from leaner_kernels import KappaMonitor
from leaner_kernels.activation_checkpointing import MUST_SAVE, checkpoint_policy
from leaner_kernels.nn import ManyHeadAttention

ours = torch.ops.leaner_kernels
selective = partial(create_selective_checkpoint_contexts, checkpoint_policy)


class Executed(TorchDispatchMode):
    """Counts the operators that are computed, not taken from what was kept."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func] += 1
        return func(*args, **(kwargs or {}))


def test_it_names_every_forward_of_the_library():
    names = torch._C._dispatch_get_all_op_names()
    forwards = {
        name
        for name in names
        if name.startswith("leaner_kernels::") and "attention" in name and "backward" not in name
    }
    assert {op.name() for op in MUST_SAVE if op.namespace == "leaner_kernels"} == forwards


def attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    seed = torch.randint(2**31, (1,)) if dropout_p else None
    # In the middle, so that what is around it is there to be recomputed.
    out = ours.attention(q.sin(), k, v, None, None, seed, dropout_p, False, 0.4, 0.0, -1, -1)[0]
    return out.tanh()


def gradients(run, *inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.autograd.grad(run(*inputs).square().sum(), inputs))


@pytest.fixture
def qkv() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, 3, 7, 8, generator=generator).requires_grad_() for _ in range(3))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_operator_runs_once_and_gradients_are_equal(qkv, dropout_p):
    run = partial(attend, dropout_p=dropout_p)
    expected = gradients(run, *qkv)
    whole = partial(checkpoint, run, use_reentrant=False)
    for recomputed, times in ((partial(whole, context_fn=selective), 1), (whole, 2)):
        with Executed() as executed:
            actual = gradients(recomputed, *qkv)
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other)
        assert executed.count[ours.attention.default] == times
        assert executed.count[torch.ops.aten.sin.default] == 2


def test_pytorchs_fused_attention_runs_once_too(qkv):
    run = partial(checkpoint, F.scaled_dot_product_attention, use_reentrant=False)
    with Executed() as executed:
        gradients(partial(run, context_fn=selective), *qkv)
    fused = [op for op in MUST_SAVE if op.namespace == "aten"]
    assert [executed.count[op] for op in fused if executed.count[op]] == [1]


class Block(nn.Module):
    def __init__(self, contexts):
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.attn = ManyHeadAttention(24, num_heads=3, head_dim=8)
        self.contexts = contexts

    def part(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x), skip=x)

    def forward(self, x: Tensor) -> Tensor:
        if self.contexts is None:
            return self.part(x)
        return checkpoint(self.part, x, use_reentrant=False, context_fn=self.contexts)


def test_kappa_is_that_without_checkpointing_and_its_heads_are_captured_once():
    rows = []
    for contexts in (None, selective):
        torch.manual_seed(0)
        model = Block(contexts)
        monitor = KappaMonitor(model, every=1, samples=2)
        monitor.begin(0)
        with Executed() as executed:
            for scale in (1, 2):
                model(scale * torch.randn(4, 9, 24)).sum().backward()
        assert executed.count[ours.attention_with_stats.default] == 2
        rows.append(monitor.end())
    assert rows[0] == rows[1]


def nodes(run, *inputs: Tensor) -> list[int]:
    """How often the forward and the backward of a compiled function attend and take a sine."""
    found = []

    def keep(graph, _):
        count = Counter(node.target for node in graph.graph.nodes)
        found.append([count[ours.attention.default], count[torch.ops.aten.sin.default]])
        return make_boxed_func(graph.forward)

    def backend(graph, examples):
        return aot_module_simplified(
            graph,
            examples,
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=min_cut_rematerialization_partition,
        )

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    expected, actual = gradients(run, *inputs), gradients(compiled, *inputs)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)
    return found


def test_compiled_code_recomputes_attention_only_when_it_is_told_to(qkv):
    plain = partial(attend, dropout_p=0.0)

    def selected(*t: Tensor) -> Tensor:
        return checkpoint(plain, *t, use_reentrant=False, context_fn=selective)

    def full(*t: Tensor) -> Tensor:
        return checkpoint(plain, *t, use_reentrant=False)

    assert [count for count, _ in nodes(plain, *qkv)] == [1, 0]
    assert nodes(selected, *qkv) == [[1, 1], [0, 1]]
    assert [count for count, _ in nodes(full, *qkv)] == [1, 1]
