"""The gradient of a projection's bias from the backward of attention, which no call uses yet."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leaner_kernels import nn as leaner_nn
from leaner_kernels.ops import _launch_cache
from leaner_kernels.ops.attention import biased
from tests.error_budget import assert_within_budget

OPS = torch.ops.leaner_kernels
NUMBERS = 0.0, True, None, -1, -1


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls on the CPU use it that nothing but autograd sees."""
    monkeypatch.setattr(biased, "ENABLED", True)
    monkeypatch.setattr(biased, "_sums_bias", lambda *_: True)
    monkeypatch.setattr(biased, "needs_no_dispatcher", lambda _: not _launch_cache._observed())


def make_module(dtype: torch.dtype = torch.float64) -> leaner_nn.ManyHeadAttention:
    torch.manual_seed(0)
    return leaner_nn.ManyHeadAttention(12, 3, 4, dtype=dtype)


def gradients(module: nn.Module, x: Tensor, **options: object) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = module(x, **options)
    return list(torch.autograd.grad(out.square().sum(), (x, *module.parameters())))


def uses_it(run: Callable[[], object]) -> bool:
    attend, calls = biased.attend, []

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(args)
        return attend(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(biased, "attend", counted)
        run()
    return bool(calls)


def test_no_call_uses_it() -> None:
    assert not biased.ENABLED


@pytest.mark.parametrize("lengths", [None, (2, 7)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_module_has_the_same_gradients(
    enabled: None, causal: bool, lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = make_module(), torch.randn(2, 7, 12, dtype=torch.float64)
    options = {"is_causal": causal, "key_lengths": lengths}
    assert uses_it(lambda: module(x, **options))
    found = gradients(module, x, **options)
    monkeypatch.setattr(biased, "ENABLED", False)
    expected = gradients(module, x, **options)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-13)


def test_half_precision_sums_in_float32(enabled: None) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(8, 50, 3, 2, 16, dtype=torch.bfloat16)
    grad = torch.randn(8, 50, 2, 16, dtype=torch.bfloat16)

    def dbias(dtype: torch.dtype) -> Tensor:
        bias = torch.zeros(96, dtype=torch.float32, requires_grad=True)
        out, _ = OPS.attention_qkvpacked_biased(qkv.to(dtype), bias, None, None, *NUMBERS)
        return torch.autograd.grad(out, bias, grad.to(dtype))[0]

    def plain(dtype: torch.dtype) -> Tensor:
        x = qkv.to(dtype).requires_grad_()
        q, k, v = (t.transpose(1, 2) for t in x.unbind(2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return torch.autograd.grad(out, x, grad.to(dtype))[0].sum((0, 1)).flatten()

    found = dbias(torch.bfloat16)
    assert found.dtype == torch.float32
    assert_within_budget(found, plain(torch.bfloat16).float(), plain(torch.float64))


def test_derivatives_of_every_order() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 3, 3, 1, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def attend(qkv: Tensor, bias: Tensor) -> Tensor:
        # A layer adds the bias detached.
        return OPS.attention_qkvpacked_biased(
            qkv + bias.detach().view(3, 1, 2), bias, None, None, *NUMBERS
        )[0]

    def plain(qkv: Tensor, bias: Tensor) -> Tensor:
        return OPS.attention_qkvpacked(qkv + bias.view(3, 1, 2), None, None, *NUMBERS)[0]

    def second(function: Callable[..., Tensor]) -> list[Tensor]:
        firsts = torch.autograd.grad(
            function(qkv, bias).pow(3).sum(), (qkv, bias), create_graph=True
        )
        total = sum(first.square().sum() for first in firsts)
        return list(torch.autograd.grad(total, (qkv, bias)))

    for actual, wanted in zip(second(attend), second(plain), strict=True):
        torch.testing.assert_close(actual, wanted)

    def of_both(function: Callable[..., Tensor]) -> Tensor:
        tangents = torch.ones_like(qkv), torch.ones_like(bias)
        return torch.func.jvp(function, (qkv.detach(), bias.detach()), tangents)[1]

    torch.testing.assert_close(of_both(attend), of_both(plain))

    def mapped(function: Callable[..., Tensor]) -> Tensor:
        def loss(one: Tensor, bias: Tensor) -> Tensor:
            return function(one[None], bias).pow(3).sum()

        return torch.func.vmap(torch.func.grad(loss, argnums=1), (0, None))(
            qkv.detach(), bias.detach()
        )

    torch.testing.assert_close(mapped(attend), mapped(plain))


def test_the_operator_passes_opcheck() -> None:
    qkv = torch.randn(2, 5, 3, 2, 4, requires_grad=True)
    bias = torch.randn(24, requires_grad=True)
    arguments = qkv, bias, None, None, *NUMBERS
    torch.library.opcheck(OPS.attention_qkvpacked_biased.default, arguments)
    out, rows = OPS.attention_qkvpacked_biased(*(t.detach() for t in arguments[:2]), *arguments[2:])
    backward = torch.randn_like(out), qkv, bias, None, None, out, rows, *NUMBERS
    torch.library.opcheck(OPS.attention_qkvpacked_biased_backward.default, backward)


def with_hook(module: nn.Module) -> None:
    module.qkv.register_forward_hook(lambda *_: None)


def with_frozen_bias(module: nn.Module) -> None:
    module.qkv.bias.requires_grad_(False)


def with_tracked_logits(module: nn.Module) -> None:
    module.track_logits = True


def with_another_forward(module: nn.Module) -> None:
    module.qkv.forward = module.qkv.forward


def with_parametrization(module: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(module.qkv)


@pytest.mark.parametrize(
    "change",
    [with_hook, with_frozen_bias, with_tracked_logits, with_another_forward, with_parametrization],
)
def test_a_layer_that_does_more_is_called_as_it_is(
    enabled: None, change: Callable[[nn.Module], None]
) -> None:
    module, x = make_module(), torch.randn(2, 7, 12, dtype=torch.float64)
    assert uses_it(lambda: module(x))
    change(module)
    assert not uses_it(lambda: module(x))


def test_transforms_masks_dropout_and_calls_without_gradient_use_the_layer(enabled: None) -> None:
    module, x = make_module(), torch.randn(2, 7, 12, dtype=torch.float64)
    params = dict(module.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, params, (x[None],)).square().sum()

    assert not uses_it(lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x))
    assert not uses_it(lambda: module(x, attn_mask=torch.ones(7, 7, dtype=torch.bool)))
    with torch.no_grad():
        assert not uses_it(lambda: module(x))
    module.attn_drop = 0.1
    assert not uses_it(lambda: module(x))


def test_compiled_code_uses_the_layer(enabled: None) -> None:
    module, x = make_module(torch.float32), torch.randn(2, 7, 12)
    expected = gradients(module, x)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for actual, wanted in zip(gradients(compiled, x), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_checkpointed_activations_give_the_same_bits(enabled: None) -> None:
    from torch.utils.checkpoint import checkpoint

    module, x = make_module(), torch.randn(2, 7, 12, dtype=torch.float64)

    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(module, x, use_reentrant=False)

        def parameters(self, recurse: bool = True):
            return module.parameters(recurse)

    for actual, wanted in zip(gradients(Checkpointed(), x), gradients(module, x), strict=True):
        assert torch.equal(actual, wanted)
