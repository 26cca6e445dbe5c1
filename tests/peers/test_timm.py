"""timm's tests of models and attention, with ours: fused and plain, backward, intermediates.

What tests/adapters holds already is left out: torch.fx, features by name, TorchScript's refusal.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from leaner_kernels.adapters import timm
from tests.adapters.test_timm import images, made
from tests.adapters.timm_families import CASES, TimmCase
from tests.error_budget import assert_computes, assert_within_budget, by_layer
from tests.peers.outcomes import settle

DTYPES = torch.float32, torch.bfloat16, torch.float16
every = pytest.mark.parametrize("case", CASES, ids=str)


def swapped(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    assert timm.use(model).swapped
    return model


def of(case: TimmCase, fused: bool = True, training: bool = False) -> nn.Module:
    """Return timm's model, on its fused attention or on its plain one."""
    model = made(case, training)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return model


@torch.no_grad()
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every
def test_fused_and_plain_attention_match(
    case: TimmCase,
    dtype: torch.dtype,
    fused: bool,
) -> None:
    x = images().to(dtype)

    def run(fused: bool, dtype: torch.dtype = dtype) -> Tensor:
        return of(case, fused).to(dtype)(x.to(dtype))

    def judge(found: Tensor) -> None:
        assert_within_budget(found, (run(True), run(False)), run(False, torch.float64))

    settle(lambda: swapped(of(case, fused).to(dtype))(x), judge)


@torch.no_grad()
@every
def test_intermediates_match(case: TimmCase) -> None:
    model, x = of(case), images()
    if not hasattr(model, "forward_intermediates"):
        pytest.skip(f"timm's {type(model).__name__} has no forward_intermediates")

    def run(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        final, found = copy.deepcopy(model).to(dtype).forward_intermediates(x.to(dtype))
        return [final, *found]

    def judge(found: list[Tensor]) -> None:
        peers = run(model), run(of(case, fused=False))
        exact = run(model, torch.float64)
        assert len(found) == len(exact) > 1
        for result, truth, *others in zip(found, exact, *peers):
            assert_within_budget(result, tuple(others), truth)

    settle(lambda: run(swapped(model)), judge)


@every
def test_activation_checkpointing_matches(case: TimmCase) -> None:
    """``set_grad_checkpointing``, which computes blocks again for the backward."""
    model, x = of(case, training=True), images()

    def gradients(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        model = copy.deepcopy(model).to(dtype)
        model(x.to(dtype)).square().sum().backward()
        return by_layer({n: p.grad for n, p in model.named_parameters() if p.grad is not None})

    def ours() -> dict[str, Tensor]:
        model_ = swapped(model)
        model_.set_grad_checkpointing()
        return gradients(model_)

    def judge(found: dict[str, Tensor]) -> None:
        assert_computes(found, lambda dtype: gradients(model, dtype))

    settle(ours, judge)
