"""Models of other libraries, untouched, with our kernels behind scaled_dot_product_attention."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs with --backend interpreter", allow_module_level=True)

from leaner_kernels.ops.attention import aten as ours
from tests.error_budget import assert_computes, by_layer
from tests.replaced_operators import aten, behind_sdpa, replaced, stand_ins

sdpa: Any = nn.functional.scaled_dot_product_attention
PADDING = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])


def vit_of_timm() -> tuple[nn.Module, dict[str, Tensor]]:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = timm.models.VisionTransformer(**sizes, num_classes=3)
    return model, {"x": torch.randn(2, 3, 32, 32)}


def bert_of_transformers() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=50, intermediate_size=64, attn_implementation="sdpa", **sizes
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    tokens = torch.randint(50, (2, 9))
    return model.eval(), {"input_ids": tokens, "attention_mask": PADDING}


def transformer_of_diffusers() -> tuple[nn.Module, dict[str, Tensor]]:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1}
    model = diffusers.DiTTransformer2DModel(
        **sizes,
        in_channels=4,
        sample_size=8,
        patch_size=2,
        norm_num_groups=1,
        num_embeds_ada_norm=5,
    )
    inputs = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7])}
    return model.eval(), inputs | {"class_labels": torch.tensor([1, 2])}


def outcome(model: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The output and the gradients, in a dtype, of a model that is not changed."""
    model = model.to(dtype)
    model.zero_grad()
    inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}
    out = model(**inputs)
    out = out if isinstance(out, Tensor) else out[0]
    if "attention_mask" in inputs:
        out = out[PADDING.bool()]
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * direction.to(dtype)).sum().backward()
    grads = {n: w.grad for n, w in model.named_parameters() if w.grad is not None}
    return {name: t.detach().clone() for name, t in by_layer({"output": out} | grads).items()}


@pytest.mark.parametrize("build", [vit_of_timm, bert_of_transformers, transformer_of_diffusers])
def test_an_untouched_model_computes_with_our_kernels(
    build: Callable[[], tuple[nn.Module, dict[str, Tensor]]],
) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    state = {name: t.clone() for name, t in model.half().state_dict().items()}
    with behind_sdpa() as below, mock.patch.object(ours, "forward", wraps=ours.forward) as attend:
        actual = outcome(model, inputs, torch.float16)
    assert attend.call_count
    assert not below

    def reference(dtype: torch.dtype) -> dict[str, Tensor]:
        model.load_state_dict(state)
        return outcome(model, inputs, dtype)

    assert_computes(actual, reference)


# --- Around the operators -------------------------------------------------------------------------


def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v).float().square().sum()


@pytest.fixture
def three() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 2, 17, 32).half().requires_grad_() for _ in range(3)]


SAVED = aten._scaled_dot_product_flash_attention_for_cpu.default


def save_attention(ctx: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if function is SAVED:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("selective", "calls"), [(False, 2), (True, 1)])
def test_checkpointing_computes_attention_again_unless_it_is_saved(
    three: list[Tensor], selective: bool, calls: int
) -> None:
    contexts = {}
    if selective:
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, save_attention)
    with behind_sdpa() as below:
        expected = torch.autograd.grad(loss(*three), three)
        with mock.patch.object(ours, "forward", wraps=ours.forward) as attend:
            out = checkpoint(loss, *three, use_reentrant=False, **contexts)
            actual = torch.autograd.grad(out, three)
    assert not below
    assert attend.call_count == calls
    assert all(map(torch.equal, actual, expected))


def test_torch_func_maps_and_differentiates(three: list[Tensor]) -> None:
    with behind_sdpa() as below:
        expected = torch.autograd.grad(loss(*three), three)
        plain = [t.detach() for t in three]
        actual = torch.func.grad(loss, argnums=(0, 1, 2))(*plain)
        batch = [t[:, None] for t in plain]
        mapped = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*batch)
    assert not below
    for gradient, other, expectation in zip(actual, mapped, expected, strict=True):
        torch.testing.assert_close(gradient, expectation)
        torch.testing.assert_close(other[:, 0], expectation)


def test_flops_are_counted_as_pytorchs() -> None:
    q = torch.randn(2, 2, 17, 32).half().requires_grad_()
    product = 2 * 2 * 2 * 17 * 17 * 32
    with replaced(), FlopCounterMode(display=False) as counter:
        aten._scaled_dot_product_flash_attention(q, q, q)[0].sum().backward()
    assert counter.get_total_flops() == 7 * product


@pytest.mark.parametrize("late", [False, True])
def test_a_backward_that_comes_too_late_is_announced(three: list[Tensor], late: bool) -> None:
    """PyTorch's kernels cannot repeat our dropout."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with replaced():
            out = aten._scaled_dot_product_flash_attention(*three, 0.25)[0]
            if not late:
                out.sum().backward()
    messages = [str(w.message) for w in caught if "without a backward" in str(w.message)]
    assert len(messages) == late


def test_dropout_is_drawn_from_pytorchs_generator(three: list[Tensor]) -> None:
    outs = []
    with replaced() as below:
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            outs.append(aten._scaled_dot_product_flash_attention(*three, 0.5)[0].detach())
    assert not below
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_with_dropout_a_forward_before_the_operators_were_replaced_keeps_its_backward(
    three: list[Tensor],
) -> None:
    flash = aten._scaled_dot_product_flash_attention
    with replaced() as below:  # launches are cached from here on
        flash(*three, 0.25)[0].sum().backward()
        assert not below
    with stand_ins() as earlier:
        out = flash(*three, 0.25)[0]
        assert len(earlier) == 1
        with replaced() as below:
            out.sum().backward()
    assert [call.name for call in [*earlier[1:], *below]] == [f"{flash.__name__}_backward"]
