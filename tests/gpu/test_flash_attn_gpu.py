"""``deterministic=True`` of flash-attention's names where ``attention`` dispatches to PyTorch."""

import pytest
import torch
from torch import Tensor

from leaner_kernels import explain
from leaner_kernels.adapters.flash_attn import flash_attn_func, flash_attn_varlen_func

TOKENS, HEADS, DIM = 640, 2, 64


def gradients(varlen: bool) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (1, TOKENS, HEADS, DIM)
    q, k, v, grad = torch.randn(4, *shape).to(torch.bfloat16).cuda()
    operands = [t.clone().requires_grad_() for t in (q, k, v)]
    if varlen:
        starts = torch.tensor([0, TOKENS], dtype=torch.int32, device="cuda")
        flat = [t.flatten(0, 1) for t in operands]
        lengths = starts, starts, TOKENS, TOKENS
        out = flash_attn_varlen_func(*flat, *lengths, deterministic=True)[None]
    else:
        out = flash_attn_func(*operands, deterministic=True)
    return [out, *torch.autograd.grad(out, operands, grad)]


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_gradients_of_a_deterministic_call_are_bitwise_equal(varlen: bool) -> None:
    torch.use_deterministic_algorithms(False)  # which every other test has on
    assert all(map(torch.equal, gradients(varlen), gradients(varlen)))


def test_the_calls_above_are_dispatched_without_it() -> None:
    torch.use_deterministic_algorithms(False)
    q = torch.empty(1, HEADS, TOKENS, DIM, dtype=torch.bfloat16, device="meta")
    assert explain(q, q, q, backward=True, capability=90).forward.implementation == "sdpa"
