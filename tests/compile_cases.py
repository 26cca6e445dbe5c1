"""What tests compile and export: a layer around each operator, as modules call them.

And calls of attention that go to a library, on any device.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import leaner_kernels as lk
from leaner_kernels.ops.attention import dispatch

HEADS, DIM, WIDTH = 3, 4, 6
SIZES = (2, 5), (7, 9)
Size = tuple[int, int]


def separate(qkv: Tensor) -> tuple[Tensor, ...]:
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def measured(stats: lk.AttentionStats) -> Tensor:
    assert stats.heads is not None
    return stats.out + stats.heads.mean() + stats.entropy.mean() + stats.max_logit.amax()


def first(x: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=x.device)


def varlen(qkv: Tensor) -> Tensor:
    batch, tokens = qkv.shape[:2]
    starts = tokens * torch.arange(batch + 1, dtype=torch.int32, device=qkv.device)
    q, k, v = qkv.flatten(0, 1).unbind(1)
    stats = lk.attention_varlen_with_stats(q, k, v, starts, tokens, sample=first(q))
    return measured(stats).view(batch, tokens, HEADS, DIM)


def window(qkv: Tensor) -> Tensor:
    return measured(lk.window_attention_with_stats(qkv, 2, sample=first(qkv)))


def outlook(qkv: Tensor) -> Tensor:
    value, pixels, _ = qkv.unbind(3)
    tiles = pixels.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 5, 2, 4, 6)
    logits = tiles.flatten(4, 5)  # as many places as D has elements
    stats = lk.outlook_attention_with_stats(
        value, logits, kernel_size=2, stride=2, padding=0, sample=first(qkv)
    )
    return measured(stats)


# Each: what it does to qkv (B, N, 3, H, D), N a multiple of 8, or (B, Y, X, 3, H, D).
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: lk.attention(*separate(x), is_causal=True),
    "attention_with_stats": lambda x: measured(
        lk.attention_with_stats(*separate(x), sample=first(x))
    ),
    "attention_qkvpacked_with_stats": lambda x: measured(
        lk.attention_qkvpacked_with_stats(x, sample=first(x))
    ),
    "varlen": varlen,
    "cross_covariance": lambda x: measured(
        lk.cross_covariance_attention_with_stats(x, x.new_ones(HEADS), sample=first(x))
    ),
    "channel": lambda x: measured(lk.channel_attention_with_stats(x, sample=first(x))),
    "nystrom": lambda x: measured(
        lk.nystrom_attention_with_stats(*separate(x), 4, sample=first(x))
    ),
    "window": window,
    "outlook": outlook,
}


class Layer(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * DIM)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, DIM))
        return self.call(qkv)


def tokens_of(name: str, size: Size) -> Tensor:
    batch, blocks = size
    cols = (4,) if name in ("window", "outlook") else ()
    return torch.randn(batch, 8 * blocks, *cols, WIDTH)


def library_call(
    packed: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor]]:
    """Return output and gradient, eager and compiled whole, of a call that PyTorch takes.

    Raises:
        AssertionError: it was not one graph, or one of ours computed it.
    """
    torch.manual_seed(0)
    torch.compiler.reset()
    torch.use_deterministic_algorithms(False)  # which PyTorch's gradients are not
    rule = dispatch.Rule(256, None, "a test")
    monkeypatch.setattr(dispatch, "find_rule_of_library", lambda *_, **call: rule)

    def run(qkv: Tensor) -> Tensor:
        return lk.attention_qkvpacked(qkv) if packed else lk.attention(*separate(qkv))

    counter = CompileCounterWithBackend("aot_eager")
    qkv = torch.randn(2, 300, 3, 2, 64).to(device, torch.bfloat16).requires_grad_()
    found = []
    for call in (run, torch.compile(run, fullgraph=True, backend=counter)):
        out = call(qkv)
        found.append([out, *torch.autograd.grad(out.float().square().mean(), qkv)])
    (graph,) = counter.graphs
    called = {str(node.target) for node in graph.graph.nodes}
    assert any("scaled_dot_product_attention" in name for name in called), called
    assert not any("leaner_kernels" in name for name in called), called
    return found[0], found[1]
