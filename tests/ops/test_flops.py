"""FLOPs of the operators, as PyTorch's FlopCounterMode counts them."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from leaner_kernels.ops.route import OPERATORS, flop_formulas
from tests.operators import CHANNEL, CROSS, call, leaves_of, make_inputs
from tests.ops.test_covariance import CovarianceTestCase
from tests.ops.test_outlook import OutlookTestCase
from tests.ops.test_windows import WindowTestCase

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


CASES = (
    CovarianceTestCase("cross", CROSS, 2, 6, 4, 8),
    CovarianceTestCase("channel", CHANNEL, 2, 6, 4, 8),
    WindowTestCase("window", 2, (2, 2), (2, 3), 4, 8),
    OutlookTestCase("outlook", 2, (5, 6), 4, 8, (3, 1, 1)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_operator_counts_the_products_that_it_is_composed_of(case):
    """The public function, on the CPU, is the composition."""
    inputs = make_inputs(case, torch.float32)
    name, numbers = inputs.operator, inputs.numbers
    leaves = [t.contiguous().requires_grad_() for t in leaves_of(inputs, inputs.tensors)]
    others = inputs.tensors[len(leaves) :]
    with sdpa_kernel(SDPBackend.MATH):
        forward, backward = counted(partial(call, inputs), *leaves)
    # Autograd keeps what an operator computes again: all products but the last.
    operator = OPERATORS[name]
    arguments = operator.Arguments(*leaves, *others, *numbers)
    backward += forward - operator.flops(arguments).last
    for suffix, sample in (("", ()), ("_with_stats", (inputs.sample[:1],))):
        function = getattr(ours, name + suffix)
        run = lambda *t: function(*t, *others, *sample, *numbers)[0]  # noqa: B023, E731
        assert counted(run, *leaves) == (forward, backward)


def test_every_attention_operator_has_a_formula():
    names = torch._C._dispatch_get_all_op_names()
    defined = {n.split("::")[1] for n in names if n.startswith("leaner_kernels::")}
    assert flop_formulas().keys() == {n for n in defined if "attention" in n}


def test_importing_the_library_leaves_the_counter_for_later():
    code = (
        "import sys, leaner_kernels; assert 'torch.utils.flop_counter' not in sys.modules; "
        "from torch.utils.flop_counter import flop_registry as r; import torch; "
        "assert torch.ops.leaner_kernels.attention_backward in r"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
