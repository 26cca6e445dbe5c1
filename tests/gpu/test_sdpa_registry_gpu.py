"""PyTorch's own scaled_dot_product_attention by our kernels, on a GPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from leaner_kernels import attention, use_sdpa
from leaner_kernels.ops.attention import aten
from tests.error_budget import assert_computes

DEVICE = "cuda"


class Case(NamedTuple):
    """A call: (B, H, N, D), the heads of keys, and what it has."""

    sizes: tuple[int, int, int, int]
    key_heads: int | None = None
    packed: bool = False
    masked: bool = False
    causal: bool = False

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        """Draw query, key, value, the gradient and a mask, on the CPU."""
        batch, heads, rows, dim = self.sizes
        if self.packed:
            three = torch.randn(batch, rows, 3, heads, dim).to(dtype).transpose(1, 3).unbind(2)
        else:
            drawn = (heads, self.key_heads or heads, self.key_heads or heads)
            three = [torch.randn(batch, count, rows, dim).to(dtype) for count in drawn]
        hidden = torch.randn(batch, 1, rows, rows) > 1
        hidden[..., 0] = False
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, float("-inf"))
        return [*three, torch.randn(batch, heads, rows, dim).to(dtype), mask]

    def results(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """Return the output and the gradients."""
        *leaves, grad, mask = tensors
        leaves = [t.detach().requires_grad_() for t in leaves]
        options: dict[str, Any] = {"attn_mask": mask if self.masked else None}
        options |= {"is_causal": self.causal, "enable_gqa": self.key_heads is not None}
        out = sdpa(*leaves, **options)
        gradients = torch.autograd.grad(out, leaves, grad)
        return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients))}


CASES = {
    "ViT-B": Case((4, 12, 197, 64), packed=True),
    "its heads apart": Case((4, 12, 197, 64)),
    "BERT with a mask": Case((4, 12, 128, 64), masked=True),
    "64 causal tokens": Case((4, 16, 64, 32), packed=True, causal=True),
    "512 causal tokens": Case((2, 16, 512, 32), causal=True),
    "shared key heads": Case((4, 8, 128, 64), key_heads=2, causal=True),
    "a padded head dimension": Case((4, 8, 50, 20)),
}


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Say of each forward whether our kernels computed it."""
    calls: list[bool] = []
    attend = aten.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        done = attend(*args, **kwargs)
        calls.append(done is not None)
        return done

    monkeypatch.setattr(aten, "forward", noting)
    return calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_and_gradients_stay_within_the_error_budget(
    case: Case, dtype: torch.dtype, ours: list[bool]
) -> None:
    tensors = case.tensors(dtype)
    with use_sdpa():
        found = case.results([t.to(DEVICE) for t in tensors])
    assert ours == [True]
    actual = {name: t.cpu() for name, t in found.items()}
    assert_computes(actual, lambda precision: case.results([t.to(precision) for t in tensors]))


@pytest.mark.parametrize("masked", [False, True])
def test_both_directions_drop_the_same_probabilities(masked: bool, ours: list[bool]) -> None:
    """The output is linear in the values, and their gradient says by which matrix."""
    case = Case((4, 12, 128, 64), masked=masked)
    query, key, value, grad, mask = (t.to(DEVICE) for t in case.tensors(torch.bfloat16))
    leaves = [t.requires_grad_() for t in (query, key, value)]
    with use_sdpa():
        out = sdpa(*leaves, attn_mask=mask if masked else None, dropout_p=0.5)
        *_, dv = torch.autograd.grad(out, leaves, grad)
    assert ours == [True]
    through_out = (out.double() * grad.double()).sum(dim=(-1, -2))
    through_value = (value.double() * dv.double()).sum(dim=(-1, -2))
    size = (out.double() * grad.double()).norm(dim=(-1, -2))
    assert ((through_out - through_value).abs() < 0.1 * size).all()


def test_a_compiled_graph_computes_what_eager_code_does(ours: list[bool]) -> None:
    case = CASES["ViT-B"]
    tensors = [t.to(DEVICE) for t in case.tensors(torch.bfloat16)]
    compiled: Callable[[list[Tensor]], dict[str, Tensor]] = torch.compile(case.results)
    with use_sdpa():
        eager, graph = case.results(tensors), compiled(tensors)
        assert all(ours)
    for name, expected in eager.items():
        torch.testing.assert_close(graph[name], expected, rtol=2e-2, atol=2e-2)


def test_a_captured_graph_can_be_replayed(ours: list[bool]) -> None:
    case = CASES["64 causal tokens"]
    tensors = [t.to(DEVICE) for t in case.tensors(torch.bfloat16)]
    with use_sdpa():
        expected, stream = case.results(tensors), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            case.results(tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = case.results(tensors)
    for t in found.values():
        t.zero_()
    graph.replay()
    for name, t in found.items():
        torch.testing.assert_close(t, expected[name], rtol=0, atol=0)


def test_pytorchs_kernels_are_back_afterwards(ours: list[bool]) -> None:
    case = CASES["ViT-B"]
    tensors = [t.to(DEVICE) for t in case.tensors(torch.bfloat16)]
    before = case.results(tensors)
    with use_sdpa():
        case.results(tensors)
    after = case.results(tensors)
    assert ours == [True]
    torch.testing.assert_close(after["out"], before["out"], rtol=0, atol=0)


def test_our_own_function_hands_a_long_call_to_the_kernel_below(ours: list[bool]) -> None:
    torch.use_deterministic_algorithms(False)
    query = torch.randn(1, 16, 2048, 128).to(DEVICE, torch.bfloat16)
    with use_sdpa():
        out = attention(query, query, query)
    assert ours == []
    torch.testing.assert_close(out, sdpa(query, query, query), rtol=2e-2, atol=2e-2)
