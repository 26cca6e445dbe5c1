"""What counts and keeps the operators does so on a GPU too."""

from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from leaner_kernels.activation_checkpointing import MUST_SAVE, checkpoint_policy
from leaner_kernels.nn import ManyHeadAttention

DEVICE = "cuda"
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
