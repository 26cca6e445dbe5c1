"""Under selective checkpointing attention runs once in a step, and nothing else changes."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor, nn
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
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        assert executed.count[fused] == 2
        rows.append(monitor.end())
    assert rows[0] == rows[1]
