"""FLOPs of the operators, as PyTorch's FlopCounterMode counts them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from leaner_kernels import ops
from leaner_kernels.ops.transforms import DECLARATIONS, flop_formulas

ROOT = Path(__file__).resolve().parents[2]
ours = torch.ops.leaner_kernels


def counted(run: Callable[..., Tensor], *inputs: Tensor) -> tuple[int, int]:
    """FLOPs of a forward and of the backward after it."""
    with FlopCounterMode(display=False) as counter:
        out = run(*inputs)
    forward = counter.get_total_flops()
    with counter:
        out.sum().backward()
    return forward, counter.get_total_flops()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "rows", "cols"), [(3, 3, 7, 7), (4, 2, 5, 9)])
def test_attention_counts_two_products_and_five_in_the_backward(
    heads, key_heads, rows, cols, causal
):
    product = 2 * 2 * heads * rows * cols * 8
    q = random(2, heads, rows, 8)
    k, v = random(2, key_heads, cols, 8), random(2, key_heads, cols, 8)
    others = None, None, None, 0.0, causal, 0.3, 0.0, -1, -1
    run = lambda *t: ours.attention(*t, *others)[0]  # noqa: E731
    assert counted(run, q, k, v) == (2 * product, 5 * product)
    others = None, None, None, None, 0.0, causal, 0.3, 0.0, -1, -1
    run = lambda *t: ours.attention_with_stats(*t, *others)[0]  # noqa: E731
    assert counted(run, q, k, v) == (2 * product, 5 * product)


def test_packed_and_varlen_count_as_the_same_sequences_apart():
    qkv = random(2, 7, 3, 4, 8)
    expected = 4 * 2 * 4 * 49 * 8, 10 * 2 * 4 * 49 * 8
    assert counted(
        lambda t: ours.attention_qkvpacked(t, None, None, 0.0, False, 1.0, -1, -1)[0], qkv
    ) == (expected)
    starts = torch.tensor([0, 7, 14], dtype=torch.int32)
    tokens = [t.reshape(14, 4, 8) for t in qkv.detach().unbind(2)]
    tokens = [t.requires_grad_() for t in tokens]

    def varlen(*t: Tensor, starts: Tensor = starts, longest: int = 7) -> Tensor:
        numbers = longest, longest, 0.0, False, 1.0, -1, -1
        return ours.attention_varlen(*t, starts, starts, None, *numbers)[0]

    assert counted(varlen, *tokens) == expected
    uneven = torch.tensor([0, 5, 12], dtype=torch.int32)
    for longest, pairs in ((7, 25 + 49), (6, 25 + 36)):
        with FlopCounterMode(display=False) as counter:
            varlen(*tokens, starts=uneven, longest=longest)
        assert counter.get_total_flops() == 4 * 4 * 8 * pairs
    with FakeTensorMode() as fake, FlopCounterMode(display=False) as counter:
        varlen(*(fake.from_tensor(t) for t in tokens), starts=fake.from_tensor(uneven))
    assert counter.get_total_flops() == expected[0]


QKV = (2, 6, 3, 4, 8)
FOUR = (2, 3, 12, 8)
# Name, shapes of the tensors, what comes between them and the sample's place, the parameters; and
# the composition of it that the public function is on the CPU.
DECOMPOSITIONS = {
    "cross_covariance_attention": (
        [QKV, (4,)],
        [1e-12],
        lambda qkv, t: ops.covariance.cross_covariance_attention(qkv, t),
    ),
    "channel_attention": ([QKV], [0.5], lambda qkv: ops.covariance.channel_attention(qkv)),
    "window_attention": (
        [(2, 4, 6, 3, 4, 8)],
        [2, 3, 0.5],
        lambda qkv: ops.window.window_attention(qkv, (2, 3)),
    ),
    "outlook_attention": (
        [(2, 5, 6, 4, 8), (2, 5, 6, 4, 9, 9)],
        [3, 1, 1, 0.5],
        lambda value, logits: ops.outlook.outlook_attention(value, logits),
    ),
    "nystrom_attention": (
        [FOUR, FOUR, FOUR],
        [None, 4, 0.5, 3, False],
        lambda *qkv: ops.nystrom.nystrom_attention(*qkv, 4, iterations=3),
    ),
}


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_an_operator_counts_the_products_that_it_is_composed_of(name):
    shapes, params, compose = DECOMPOSITIONS[name]
    tensors = [random(*shape) for shape in shapes]
    with sdpa_kernel(SDPBackend.MATH):
        forward, backward = counted(compose, *tensors)
    # Autograd keeps what an operator computes again: all products but the last.
    backward += forward - DECLARATIONS[name].flops(*tensors, *params).last
    operator, with_stats = getattr(ours, name), getattr(ours, f"{name}_with_stats")
    assert counted(lambda *t: operator(*t, *params)[0], *tensors) == (forward, backward)
    sample = torch.zeros(1, dtype=torch.int32)
    names = [argument.name for argument in with_stats.default._schema.arguments]
    params = [*params]
    params.insert(names.index("sample") - len(tensors), sample)
    assert counted(lambda *t: with_stats(*t, *params)[0], *tensors) == (forward, backward)


def test_every_attention_operator_has_a_formula():
    names = torch._C._dispatch_get_all_op_names()
    defined = {n.split("::")[1] for n in names if n.startswith("leaner_kernels::")}
    assert {name for name, _ in flop_formulas()} == {n for n in defined if "attention" in n}


def test_importing_the_library_leaves_the_counter_for_later():
    code = (
        "import sys, leaner_kernels; assert 'torch.utils.flop_counter' not in sys.modules; "
        "from torch.utils.flop_counter import flop_registry as r; import torch; "
        "assert torch.ops.leaner_kernels.attention_backward in r"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
