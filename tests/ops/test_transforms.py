"""Operators under vmap, torch.func, second derivatives, forward mode and autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leaner_kernels import attention, attention_qkvpacked, attention_with_stats
from leaner_kernels.ops import transforms
from tests.transform_cases import EXAMPLES, OPS, calls, integers, of_floats, several, to_float


class OperatorLog(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def with_sample(name: str, args: tuple[Any, ...], sample: Tensor) -> tuple[str, tuple[Any, ...]]:
    schema = getattr(OPS, f"{name}_with_stats").default._schema
    place = [argument.name for argument in schema.arguments].index("sample")
    return f"{name}_with_stats", (*args[:place], sample, *args[place:])


@pytest.mark.parametrize("name", calls())
def test_vmap_gives_what_a_loop_gives(name: str) -> None:
    function, given = of_floats(*with_sample(*calls()[name], integers(1, 0)), lambda r: r)
    dims = -1, *(0 for _ in given[1:])
    many = [several(t, dim) for t, dim in zip(given, dims)]
    actual = torch.vmap(function, dims)(*many)
    expected = [function(*(t.select(d, i) for t, d in zip(many, dims))) for i in range(EXAMPLES)]
    for a, e in zip(actual, zip(*expected), strict=True):
        torch.testing.assert_close(a, torch.stack(e))


def other_maps() -> dict[str, tuple[str, tuple[Any, ...], tuple[int | None, ...]]]:
    """Calls of which each example has its own mask, lengths, sample, seed or sequences."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 3, 2), torch.randn(EXAMPLES, 2, 4, 5, 2)
    mask, masks = torch.randn(2, 1, 3, 5), torch.randn(4, EXAMPLES, 3, 5)
    lengths = integers(3, 5, 1, 2, 4, 4).view(EXAMPLES, 2)
    sample = integers(1, 0, 1, 1, 0, 0).view(EXAMPLES, 2)
    seeds = torch.arange(EXAMPLES)[:, None]
    tokens, starts = torch.randn(6, 2, 3), integers(0, 2, 6, 0, 3, 5, 1, 4, 4).view(EXAMPLES, 3)
    capped, nowhere = (0.5, False, 0.4, 0.0, -1, -1), (None,) * 6
    plain = "attention_with_stats"
    return {
        "own masks": (
            plain,
            (q, k, k, masks, None, None, sample[0], *capped),
            (None, 0, 0, 1, None, None, None, *nowhere),
        ),
        "one mask, own lengths and samples": (
            plain,
            (q, k, k, mask, lengths, None, sample, *capped),
            (None, 0, 0, None, 0, None, 0, *nowhere),
        ),
        "own seeds": (
            plain,
            (q, k, k, None, None, seeds, sample, *capped),
            (None, 0, 0, None, None, 0, 0, *nowhere),
        ),
        "own sequences": (
            "attention_varlen_with_stats",
            (*(tokens,) * 3, starts, starts, None, integers(1), 4, 4, 0.0, True, 0.4, -1, -1),
            (None, None, None, 0, 0, *(None,) * 9),
        ),
    }


@pytest.mark.parametrize("name", other_maps())
def test_vmap_maps_whatever_an_example_has(name: str) -> None:
    operator, args, dims = other_maps()[name]
    call = getattr(OPS, operator)
    actual = torch.vmap(call, dims)(*args)
    for i in range(EXAMPLES):
        expected = call(*(a if d is None else a.select(d, i) for a, d in zip(args, dims)))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a[i], e)


def test_vmap_keeps_an_entry_past_an_example_out_of_the_next_one() -> None:
    """On a GPU an entry that does not exist is not captured: folded, it would name a neighbour."""
    q = torch.randn(EXAMPLES, 2, 1, 3, 2)
    calls = []

    def record(*args: Any) -> Tensor:
        calls.append(args[1])
        return args[0]

    axes = 0, transforms.ENTRIES
    transforms.folded(record, EXAMPLES, (0, None), (q, integers(1, 2, -1)), axes, (0,))
    assert calls[0].tolist() == [1, -1, -1, 3, -1, -1, 5, -1, -1]


def test_a_mask_that_examples_share_gets_the_gradient_of_each() -> None:
    torch.manual_seed(0)
    q, mask = torch.randn(EXAMPLES, 2, 4, 3, 2), torch.randn(4, 1, 3)

    def loss(mask: Tensor, q: Tensor) -> Tensor:
        return (
            OPS.attention(q, q, q, mask, None, None, 0.0, False, 0.4, 0.0, -1, -1)[0].square().sum()
        )

    actual = torch.vmap(torch.func.grad(loss), (None, 0))(mask, q)
    for i in range(EXAMPLES):
        torch.testing.assert_close(actual[i], torch.func.grad(loss)(mask, q[i]))


def test_public_functions_take_lengths_and_samples_under_vmap() -> None:
    q = torch.randn(EXAMPLES, 2, 4, 5, 2)
    lengths, sample = integers(3, 5, 1, 2, 4, 4).view(EXAMPLES, 2), integers(1)

    def call(q: Tensor, lengths: Tensor) -> Tensor:
        return attention_with_stats(q, q, q, key_lengths=lengths, sample=sample).heads

    expected = torch.stack([call(*both) for both in zip(q, lengths)])
    torch.testing.assert_close(torch.vmap(call)(q, lengths), expected)


@pytest.mark.parametrize("name", calls())
def test_vmap_gives_the_gradient_of_each_example(name: str) -> None:
    function, given = of_floats(*calls()[name])
    many = [several(t, 0) for t in given]
    places = tuple(range(len(given)))
    actual = torch.vmap(torch.func.grad(lambda *x: function(*x).square().sum(), places))(*many)
    for i in range(EXAMPLES):
        leaves = [t[i].clone().requires_grad_() for t in many]
        expected = torch.autograd.grad(function(*leaves).square().sum(), leaves)
        torch.testing.assert_close([t[i] for t in actual], list(expected))


@pytest.mark.parametrize("name", calls())
def test_gradgradcheck(name: str) -> None:
    function, given = of_floats(*calls()[name])
    leaves = [t.clone().requires_grad_() for t in given]
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, fast_mode=True)


def test_a_graph_of_the_backward_leaves_the_first_derivative_to_the_kernel() -> None:
    """With ``create_graph`` the first derivative is bitwise what it is without."""
    (_, args), seen = calls()["attention"], []
    function, given = of_floats("attention", tuple(map(to_float, args)))
    leaves = [t.requires_grad_() for t in given]
    with OperatorLog(seen):
        first = torch.autograd.grad(function(*leaves).sum(), leaves, create_graph=True)
    assert seen.count("leaner_kernels::attention_backward") == 1
    for a, b in zip(first, torch.autograd.grad(function(*leaves).sum(), leaves)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", calls())
def test_a_region_of_autocast_narrows_the_operator(name: str) -> None:
    operator, args = calls()[name]
    args = tuple(map(to_float, args))
    function, given = of_floats(operator, args)
    narrow = given[:1] if operator == "cross_covariance_attention" else given
    leaves = [t.requires_grad_() for t in given]
    with torch.autocast("cpu", torch.bfloat16):
        out = function(*leaves)
    halves = [t.detach().bfloat16() for t in narrow]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, function(*halves, *given[len(halves) :]))
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert {g.dtype for g in gradients} == {torch.float32}


@pytest.mark.parametrize("name", ["attention", "varlen", "cross-covariance"])
def test_gradients_of_each_example_inside_a_region_of_autocast(name: str) -> None:
    operator, args = calls()[name]
    function, given = of_floats(operator, tuple(map(to_float, args)))
    many = [several(t, 0) for t in given]
    loss = torch.func.grad(lambda *x: function(*x).float().square().sum())
    with torch.autocast("cpu", torch.bfloat16):
        actual = torch.vmap(loss)(*many)
        expected = torch.stack([loss(*(t[i] for t in many)) for i in range(EXAMPLES)])
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", calls())
def test_transforms_nest_within_each_other_and_within_autograd(name: str) -> None:
    """The second derivative by autograd twice, by torch.func twice, and by one of each."""
    function, given = of_floats(*calls()[name])
    places = tuple(range(len(given)))

    def gradients(*x: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *y: function(*y).square().sum(), places)(*x)

    def loss(found: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([g.square().sum() for g in found]).sum()

    leaves = [t.clone().requires_grad_() for t in given]
    first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    expected = torch.autograd.grad(loss(first), leaves)
    mixed = torch.autograd.grad(loss(gradients(*leaves)), leaves)
    both = torch.func.grad(lambda *x: loss(gradients(*x)), places)(*given)
    torch.testing.assert_close(mixed, expected)
    torch.testing.assert_close(both, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_public_attention_has_every_derivative_under_torch_func(packed: bool) -> None:
    """On the CPU PyTorch's own fused attention has no second derivative and no forward mode."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 3, 2, 4, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        if packed:
            return attention_qkvpacked(x, is_causal=True).square().sum()
        q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
        return attention(q, k, v, is_causal=True).square().sum()

    def decomposition(x: Tensor) -> Tensor:
        q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
        hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
        p = (q @ k.mT / 2).masked_fill(hidden, float("-inf")).softmax(-1)
        return (p @ v).square().sum()

    torch.testing.assert_close(torch.func.hessian(loss)(x), torch.func.hessian(decomposition)(x))


@pytest.mark.parametrize("name", ["varlen", "cross-covariance"])
def test_vmap_maps_second_derivatives_where_examples_share_tensors(name: str) -> None:
    """What is written from a mapped tensor is allocated like one that is not."""
    function, (first, *others) = of_floats(*calls()[name])
    places = tuple(range(1 + len(others)))

    def second(x: Tensor) -> Any:
        gradients = torch.func.grad(lambda *y: function(*y).sin().sum(), places)
        mixed = torch.func.grad(lambda *y: sum(g.sin().sum() for g in gradients(*y)), places)
        given = x, *others
        return *mixed(*given), *torch.func.jvp(gradients, given, tuple(map(torch.cos, given)))[1]

    many = several(first, 0)
    expected = map(torch.stack, zip(*map(second, many)))
    torch.testing.assert_close(torch.vmap(second)(many), tuple(expected))


def test_compiled_code_keeps_the_tangent_of_an_operator() -> None:
    x = torch.randn(1, 2, 3, 2)

    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda y: attention_with_stats(y, y, y).out + y, (x,), (x,))[1]

    torch.testing.assert_close(torch.compile(tangent, backend="eager")(x), tangent(x))
