"""The chunked cross-entropy: PyTorch's losses and gradients, little kept, and what it refuses."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import cross_entropy
from models.cross_entropy import linear_cross_entropy
from tests.error_budget import assert_within_budget

T, D, V = 23, 12, 37


def inputs(dtype=torch.float32, bias=True, shape=(T,)):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, D, generator=rng).to(dtype)
    weight = torch.randn(V, D, generator=rng).to(dtype)
    b = torch.randn(V, generator=rng).to(dtype) if bias else None
    targets = torch.randint(V, shape, generator=rng)
    targets[torch.rand(shape, generator=rng) < 0.2] = -100
    assert (targets == -100).any()
    grad = torch.randn(shape, generator=rng)
    return x, weight, targets, b, grad


def plain(x, weight, targets, bias):
    """What PyTorch makes with all logits, in float32 from where they are."""
    logits = F.linear(x, weight, bias).to(torch.promote_types(x.dtype, torch.float32))
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


def losses_and_gradients(function, x, weight, targets, bias, grad):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    losses = function(*leaves[:2], targets, leaves[2] if bias is not None else None)
    return losses, *torch.autograd.grad(losses, leaves, grad.to(losses.dtype))


def doubled(tensors):
    return [t.double() if t is not None and t.is_floating_point() else t for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 5, 23, None])
@pytest.mark.parametrize("bias", [True, False])
def test_losses_and_gradients_are_those_of_all_logits(dtype, chunk, bias):
    given = inputs(dtype, bias)

    def chunked(*args):
        return linear_cross_entropy(*args, chunk=chunk)

    actual = losses_and_gradients(chunked, *given)
    same_dtype = losses_and_gradients(plain, *given)
    exact = losses_and_gradients(plain, *doubled(given))
    assert actual[0].dtype == torch.float32
    assert [g.dtype for g in actual[1:]] == [dtype] * (2 + bias)
    for a, s, e in zip(actual, same_dtype, exact, strict=True):
        assert_within_budget(a, s, e)


def test_gradients_are_the_derivatives():
    x, weight, targets, bias, _ = doubled(inputs(shape=(8,)))
    leaves = [t.requires_grad_() for t in (x, weight, bias)]

    def losses(x, weight, bias):
        return linear_cross_entropy(x, weight, targets, bias, chunk=5)

    assert losses(*leaves).dtype == torch.float64
    assert torch.autograd.gradcheck(losses, leaves)


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 5), (0,)])
def test_losses_have_the_shape_of_the_targets(shape):
    x, weight, _, bias, _ = inputs()
    x = x[:1].expand(*shape, D)
    targets = torch.arange(max(torch.Size(shape).numel(), 1))[: torch.Size(shape).numel()]
    targets = targets.view(shape)
    losses = linear_cross_entropy(x, weight, targets, bias, chunk=5)
    assert losses.shape == shape
    torch.testing.assert_close(losses, plain(x, weight, targets, bias))


def test_an_ignored_token_has_no_loss_and_gives_no_gradient():
    x, weight, targets, bias, grad = inputs()
    losses, dx, *_ = losses_and_gradients(linear_cross_entropy, x, weight, targets, bias, grad)
    ignored = targets == -100
    assert losses[ignored].eq(0).all()
    assert dx[ignored].eq(0).all()
    assert losses[~ignored].ne(0).all()
    assert dx[~ignored].any(dim=1).all()
    everything = torch.full_like(targets, -100)
    found = losses_and_gradients(linear_cross_entropy, x, weight, everything, bias, grad)
    assert all(t.eq(0).all() for t in found)


def test_a_frozen_weight_leaves_the_other_gradients_as_they_are():
    x, weight, targets, bias, grad = inputs()
    _, dx, dweight, dbias = losses_and_gradients(
        linear_cross_entropy, x, weight, targets, bias, grad
    )
    for wanted, expected in ((0, dx), (1, dweight), (3, dbias)):
        args = [x.clone(), weight.clone(), targets, bias.clone()]
        args[wanted].requires_grad_()
        linear_cross_entropy(*args).backward(grad)
        assert torch.equal(args[wanted].grad, expected)


class Largest(TorchDispatchMode):
    """Notes the most elements that any result had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def test_all_logits_are_never_there_and_none_are_kept():
    tokens, vocabulary, chunk = 64, 500, 8  # 512 with those that fill up
    x = torch.randn(tokens, D, requires_grad=True)
    weight = torch.randn(vocabulary, D, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    kept = []

    def keep(t):
        kept.append(t.numel())
        return t

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        linear_cross_entropy(x, weight, targets, chunk=chunk).sum().backward()
    assert chunk * vocabulary <= largest.elements < tokens * vocabulary / 4
    assert sum(kept) <= x.numel() + weight.numel() + 2 * tokens
    with Largest() as largest:
        plain(x, weight, targets, None).sum().backward()
    assert largest.elements == tokens * vocabulary


@pytest.mark.parametrize(("device", "columns"), [("cpu", 50257), ("meta", 50304)])
def test_without_a_chunk_a_large_vocabulary_takes_few_tokens_at_once(device, columns):
    with FakeTensorMode(), Largest() as largest:
        x, weight = torch.empty(8192, 16, device=device), torch.empty(50257, 16, device=device)
        linear_cross_entropy(x, weight, torch.empty(8192, dtype=torch.int64, device=device))
    # As many rows as 2**26 logits allow; on a GPU each begins at a multiple of 16 bytes.
    assert largest.elements == 1024 * columns


def test_it_compiles_into_one_graph():
    given = inputs()

    def chunked(*args):
        return linear_cross_entropy(*args, chunk=12)

    compiled = torch.compile(chunked, fullgraph=True, backend="aot_eager")
    expected = losses_and_gradients(chunked, *given)
    for a, e in zip(losses_and_gradients(compiled, *given), expected, strict=True):
        torch.testing.assert_close(a, e)


def test_autocast_makes_the_products_in_its_dtype_and_the_losses_in_float32():
    given = inputs()
    narrow = [t.bfloat16() if t is not None and t.is_floating_point() else t for t in given[:4]]
    with torch.autocast("cpu", torch.bfloat16):
        found = losses_and_gradients(linear_cross_entropy, *given)
    assert all(t.dtype == torch.float32 for t in found)
    assert torch.equal(found[0], linear_cross_entropy(*narrow))
    expected = losses_and_gradients(linear_cross_entropy, *narrow, given[4])
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e.float())


def test_no_operation_runs_under_autocast(monkeypatch):
    """CUDA's autocast raises a softmax to float32, where the CPU's leaves it."""
    given = inputs()
    seen = []

    def watch(owner, name):
        function = getattr(owner, name)

        def watched(*args, **kwargs):
            seen.append((name, torch.is_autocast_enabled("cpu")))
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in ((F, "linear"), (F, "log_softmax"), (torch.Tensor, "softmax")):
        watch(owner, name)
    with torch.autocast("cpu", torch.bfloat16):
        losses_and_gradients(linear_cross_entropy, *given)
    assert {*seen} == {("linear", False), ("log_softmax", False), ("softmax", False)}


@pytest.mark.parametrize("wrong", [V, -1])
def test_a_target_outside_the_vocabulary_is_refused(wrong):
    x, weight, targets, bias, _ = inputs()
    targets[3] = wrong
    with pytest.raises(ValueError, match=rf"targets must be in \[0, 37\) or -100, got {wrong}"):
        linear_cross_entropy(x, weight, targets, bias)


def test_a_target_past_the_vocabulary_has_an_infinite_loss_where_it_cannot_be_read(monkeypatch):
    monkeypatch.setattr("models.cross_entropy.has_values", lambda _: False)
    monkeypatch.setitem(cross_entropy._COLUMNS, "cpu", 64)
    x, weight, targets, bias, _ = inputs()
    targets[3] = V
    assert linear_cross_entropy(x, weight, targets, bias).isinf().nonzero().tolist() == [[3]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(T, D + 1)}, r"x must be .* and weight \(V, D\), got \(23, 13\) and "),
        ({"weight": torch.zeros(V)}, r"got \(23, 12\) and \(37,\)"),
        ({"targets": torch.zeros(T)}, r"targets must be \(23,\) int64, got \(23,\) torch.float32"),
        ({"targets": torch.zeros(T, 1, dtype=torch.int64)}, r"got \(23, 1\) torch.int64"),
        ({"bias": torch.zeros(V + 1)}, r"bias must be \(37,\), got \(38,\)"),
        ({"bias": torch.zeros(V).half()}, "bias must be torch.float32 as x is, got torch.float16"),
        ({"weight": torch.zeros(V, D).double()}, "weight must be torch.float32 as x is, got"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(changes, message):
    x, weight, targets, bias, _ = inputs()
    given = {"x": x, "weight": weight, "targets": targets, "bias": bias} | changes
    with pytest.raises(ValueError, match=message) as error:
        linear_cross_entropy(**given)
    assert "\n" not in str(error.value)
