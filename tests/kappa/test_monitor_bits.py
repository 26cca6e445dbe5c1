"""On the CPU a sampled step is what it would have been, bit for bit, and kappa is of that step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from leaner_kernels import KappaMonitor, attention
from leaner_kernels.nn import (
    ChannelAttention,
    CrossCovarianceAttention,
    ManyHeadAttention,
    NystromAttention,
    OutlookAttention,
    WindowAttention,
)
from tests.kappa.test_monitor_foreign import SDPA, Attention


class Map(nn.Module):
    """Attention of a map, given its tokens."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x.unflatten(1, (3, 4))).flatten(1, 2)


class Masked(nn.Module):
    def __init__(self, mask: Tensor, attn_drop: float) -> None:
        super().__init__()
        self.attn = ManyHeadAttention(12, 4, 8, attn_drop=attn_drop)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, attn_mask=self.mask.to(x.dtype))


class Recomputed(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attn, x, use_reentrant=False)


dropped = partial(attention, dropout_p=0.3)
MODULES: dict[str, Callable[[], nn.Module]] = {
    "tokens": lambda: ManyHeadAttention(12, 4, 8),
    "tokens, dropout": lambda: ManyHeadAttention(12, 4, 8, attn_drop=0.3, proj_drop=0.3),
    "masked, dropout": lambda: Masked(torch.randn(12, 12), 0.3),
    # Of which PyTorch's fused backward is wrong, so that it is not called.
    "sinks, dropout": lambda: Masked(torch.full((12, 12), -2e3), 0.3),
    "recomputed, dropout": lambda: Recomputed(ManyHeadAttention(12, 4, 8, attn_drop=0.3)),
    "landmarks": lambda: NystromAttention(12, 4, 8, num_landmarks=4),
    "windows": lambda: Map(WindowAttention(12, 4, 8, window_size=2)),
    "neighbours": lambda: Map(OutlookAttention(12, 4, 8)),
    "channels": lambda: ChannelAttention(12, 4, 8),
    "cross-covariance": lambda: CrossCovarianceAttention(12, 4, 8),
    "function, dropout": lambda: Attention(dropped),
    "PyTorch's": lambda: Attention(partial(SDPA, dropout_p=0.3)),
    "nn.TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(12, 3, 16, batch_first=True),
}


def step(model: nn.Module, given: Any, autocasts: bool) -> list[Tensor | None]:
    """Loss, gradients, and the next random number."""
    model.zero_grad()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        out = model(**given) if isinstance(given, dict) else model(given)
        loss = (out if isinstance(out, Tensor) else out[0]).float().square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), torch.rand(1)]


def assert_sampling_changes_no_bit(model: nn.Module, given: Any, autocasts: bool) -> list[dict]:
    """Compare a step that is sampled with one that is not; return the rows."""
    plain = step(model, given, autocasts)
    with KappaMonitor(model, every=1, samples=2).step(0) as rows:
        sampled = step(model, given, autocasts)
    for actual, expected in zip(sampled, plain, strict=True):
        assert actual is expected is None or torch.equal(actual, expected)
    return rows


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", MODULES)
def test_a_sampled_step_changes_no_bit_of_training(name: str, precision: str) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = MODULES[name]().to(dtype)
    x = torch.randn(6, 12, 12).to(dtype)
    assert len(assert_sampling_changes_no_bit(model, x, precision == "autocast")) == 1


class AttentionCalls(TorchDispatchMode):
    """Count the operators that compute attention."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.count += "attention" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "dropout_p", "more"),
    [(torch.float32, 0.0, 0), (torch.float32, 0.3, 1), (torch.bfloat16, 0.0, 1)],
)
def test_a_sampled_step_attends_once_if_its_output_has_the_precision_of_kappa(
    dtype: torch.dtype, dropout_p: float, more: int
) -> None:
    model = ManyHeadAttention(12, 4, 8, attn_drop=dropout_p, dtype=dtype)
    monitor = KappaMonitor(model, every=2)
    x = torch.randn(6, 12, 12, dtype=dtype)
    counts = []
    for number in (1, 2):
        monitor.begin(number)
        with AttentionCalls() as calls:
            model(x)
        assert len(monitor.end()) == number - 1
        counts.append(calls.count)
    plain, sampled = counts
    assert sampled == plain + more


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["module", "function"])
def test_on_a_cpu_kappa_is_that_of_the_heads_before_dropout(name: str, causal: bool) -> None:
    torch.manual_seed(0)
    x, rows = torch.randn(5, 9, 12), []
    for p in (0.3, 0.0):
        torch.manual_seed(1)
        model: nn.Module
        if name == "module":
            model = ManyHeadAttention(12, 4, 8, attn_drop=p)
        else:
            model = Attention(partial(attention, dropout_p=p, is_causal=causal))
        monitor = KappaMonitor(model, every=1, samples=5)
        monitor.begin(0)
        model(x, is_causal=causal) if name == "module" else model(x)
        rows.append(monitor.end())
    assert rows[0] == rows[1]
