"""Operators under vmap, torch.func, second derivatives, forward mode and autocast."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leaner_kernels import (
    attention,
    attention_qkvpacked,
    attention_varlen,
    attention_with_stats,
    channel_attention,
    cross_covariance_attention,
    nystrom_attention,
    outlook_attention,
    window_attention,
)
from tests.backends import CPU, GPU
from tests.error_budget import assert_within_budget

OPS = torch.ops.leaner_kernels
EXAMPLES = 3


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


LENGTHS = integers(3, 4)


def calls() -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Operators without ``_with_stats``, and arguments for one example, in float64."""
    torch.manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    q, k, v = randn(2, 4, 3, 2), randn(2, 2, 4, 2), randn(2, 2, 4, 2)
    mask = randn(4, 3, 4)
    unseen = mask.where(torch.arange(3)[:, None] != 1, float("-inf"))
    packed, seed = randn(2, 4, 3, 2, 3), torch.tensor([5])
    tokens, starts = randn(5, 3, 4, 2).unbind(1), integers(0, 2, 2, 4)
    tokens = tokens[0], tokens[1][:, :2], tokens[2][:, :2]
    starts = starts, integers(1, 3, 4, 4)
    return {
        "attention": ("attention", (q, k, v, mask, LENGTHS, None, 0.0, False, 0.4, 0.0, -1, -1)),
        "row without keys": (
            "attention",
            (q, k, v, unseen, None, None, 0.0, False, 0.4, 0.0, -1, -1),
        ),
        "boolean mask": (
            "attention",
            (q, k, v, randn(2, 1, 3, 1) > 0, None, None, 0.0, False, 1.0, 0.0, -1, -1),
        ),
        "causal": ("attention", (q, k, v, None, None, None, 0.0, True, 0.4, 0.0, -1, -1)),
        "dropout": ("attention", (q, k, v, None, None, seed, 0.4, False, 0.4, 0.0, -1, -1)),
        "softcap": ("attention", (q, k, v, mask, LENGTHS, None, 0.0, False, 0.4, 0.7, -1, -1)),
        "packed": ("attention_qkvpacked", (packed, LENGTHS, None, 0.0, True, 0.4, -1, -1)),
        "varlen": ("attention_varlen", (*tokens, *starts, None, 3, 3, 0.0, False, 0.4, -1, -1)),
        "varlen, dropout": (
            "attention_varlen",
            (*tokens, *starts, seed, 3, 3, 0.3, True, 0.4, -1, -1),
        ),
        "cross-covariance": ("cross_covariance_attention", (packed, randn(2).exp(), 1e-12)),
        "channel": ("channel_attention", (packed, 0.4)),
        "window": ("window_attention", (randn(2, 2, 4, 3, 2, 3), 1, 2, 0.4)),
        "outlook": (
            "outlook_attention",
            (randn(2, 3, 3, 2, 2), randn(2, 2, 2, 2, 9, 9), 3, 2, 1, 1.0),
        ),
    }


def floating(args: tuple[Any, ...]) -> list[int]:
    return [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()]


def to_float(a: Any) -> Any:
    return a.float() if isinstance(a, Tensor) and a.is_floating_point() else a


def of_floats(
    name: str, args: tuple[Any, ...], result: Callable[[Any], Any] = lambda r: r[0]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return the operator as a function of its floating-point tensors, and these."""
    places = floating(args)

    def function(*tensors: Tensor) -> Any:
        given = list(args)
        for i, t in zip(places, tensors):
            given[i] = t
        return result(getattr(OPS, name)(*given))

    return function, [args[i] for i in places]


def several(t: Tensor, dim: int) -> Tensor:
    """Stack different examples along ``dim``, the first one as it is."""
    return torch.stack([t * (1 + i) for i in range(EXAMPLES)], dim)


def placed(args: tuple[Any, ...], dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """Return the arguments on a device, what is floating point in this dtype."""
    return tuple(
        a.to(device, dtype if a.is_floating_point() else a.dtype) if isinstance(a, Tensor) else a
        for a in args
    )


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


def public_calls() -> dict[str, tuple[Any, list[Tensor]]]:
    """Public functions of floating-point tensors, as a user calls them on a CPU."""
    torch.manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    three = [randn(2, 2, 8, 4) for _ in range(3)]
    tokens = [t[0].transpose(0, 1) for t in three]
    mask, shared, map_ = randn(1, 2, 8, 8), [randn(2, 1, 8, 4) for _ in range(2)], randn(2, 4, 4, 3)
    lengths = integers(8, 5)
    return {
        "attention": (attention, three),
        "causal": (partial(attention, is_causal=True), three),
        "mask": (attention, [*three, mask]),
        "boolean mask": (lambda q, k, v: attention(q, k, v, mask > 0), three),
        "lengths": (partial(attention, key_lengths=lengths), three),
        "window": (partial(attention, window_size=(2, 1)), three),
        "softcap": (partial(attention, softcap=2.0), three),
        "shared heads": (partial(attention, enable_gqa=True), [three[0], *shared]),
        "three axes": (attention, [t[0] for t in three]),
        "wide heads": (attention, [randn(1, 2, 3, 130) for _ in range(3)]),
        "packed": (attention_qkvpacked, [randn(2, 5, 3, 2, 4)]),
        "statistics": (lambda *x: attention_with_stats(*x).out, three),
        "varlen": (lambda *x: attention_varlen(*x, [0, 3, 8], 5), tokens),
        "cross-covariance": (cross_covariance_attention, [randn(2, 5, 3, 2, 4), randn(2).exp()]),
        "channel": (channel_attention, [randn(2, 5, 3, 2, 4)]),
        "windows": (lambda x: window_attention(x, 2), [map_[..., None, None] * randn(2, 3)]),
        "outlook": (outlook_attention, [randn(2, 3, 3, 2, 4), randn(2, 3, 3, 2, 9, 9)]),
        "nystrom": (lambda *x: nystrom_attention(*x, 4), three),
        "nystrom, lengths": (
            lambda *x: nystrom_attention(*x, 4, key_lengths=lengths, init="batch"),
            three,
        ),
    }


@pytest.mark.filterwarnings("ignore:head dimension 130")
@pytest.mark.parametrize("name", public_calls())
def test_autograd_alone_gives_second_derivatives_of_every_public_function(name: str) -> None:
    """A gradient penalty, with ``create_graph``: PyTorch's fused attention on a CPU has none."""
    function, given = public_calls()[name]
    leaves = [t.clone().contiguous().requires_grad_() for t in given]

    def loss(*tensors: Tensor) -> Tensor:
        return function(*tensors).square().sum()

    def penalty(first: Any) -> Tensor:
        return sum((g.square().sum() for g in first), torch.zeros(()))

    places = tuple(range(len(leaves)))
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(loss(*leaves), leaves))
    actual = torch.autograd.grad(penalty(first), leaves)
    twice = torch.func.grad(lambda *x: penalty(torch.func.grad(loss, places)(*x)), places)
    torch.testing.assert_close(actual, twice(*(t.detach() for t in leaves)))


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.backends(CPU)),
        pytest.param("cuda", marks=pytest.mark.backends(GPU)),
    ],
)
@pytest.mark.parametrize("name", calls())
def test_a_region_of_autocast_narrows_the_operator(name: str, device: str) -> None:
    operator, args = calls()[name]
    function, given = of_floats(operator, placed(args, torch.float32, device))
    narrow = given[:1] if operator == "cross_covariance_attention" else given
    leaves = [t.requires_grad_() for t in given]
    with torch.autocast(device, torch.bfloat16):
        out = function(*leaves)
    halves = [t.detach().bfloat16() for t in narrow]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, function(*halves, *given[len(halves) :]))
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert {g.dtype for g in gradients} == {torch.float32}


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


# --- On a GPU -------------------------------------------------------------------------------------


TRUTH_PEER_ACTUAL = (torch.float64, "cpu"), (torch.float32, "cpu"), (torch.float32, "cuda")


@pytest.mark.backends(GPU)
@pytest.mark.parametrize("name", calls())
def test_gradients_of_each_example_stay_within_the_error_budget(name: str) -> None:
    operator, args = calls()[name]
    found = []
    for dtype, device in TRUTH_PEER_ACTUAL:
        function, given = of_floats(operator, placed(args, dtype, device))
        places = tuple(range(len(given)))
        many = [several(t, 0) for t in given]
        found.append(
            torch.vmap(torch.func.grad(lambda *x: function(*x).square().sum(), places))(*many)  # noqa: B023
        )
    for exact, same_dtype, actual in zip(*found, strict=True):
        assert actual.shape[0] == EXAMPLES
        assert_within_budget(actual, same_dtype, exact)


@pytest.mark.backends(GPU)
@pytest.mark.parametrize("name", calls())
def test_second_derivatives_stay_within_the_error_budget(name: str) -> None:
    """Of the squared length of the gradient, and in forward mode over it."""
    operator, args = calls()[name]
    found = []
    for dtype, device in TRUTH_PEER_ACTUAL:
        function, given = of_floats(operator, placed(args, dtype, device))

        def gradients(*x: Tensor) -> tuple[Tensor, ...]:
            leaves = tuple(range(len(x)))
            return torch.func.grad(lambda *y: function(*y).square().sum(), leaves)(*x)  # noqa: B023

        leaves = [t.clone().requires_grad_() for t in given]
        loss = sum(g.square().sum() for g in gradients(*leaves))
        assert isinstance(loss, Tensor)
        _, forward = torch.func.jvp(gradients, tuple(given), tuple(given))
        found.append([*torch.autograd.grad(loss, leaves), *forward])
    for exact, same_dtype, actual in zip(*found, strict=True):
        assert_within_budget(actual, same_dtype, exact)
