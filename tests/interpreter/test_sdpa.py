"""PyTorch's own attention operators by our kernels: values, layouts, dropout and compiled code."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs with --backend interpreter", allow_module_level=True)

from tests import varlen_cases
from tests.attention_cases import (
    CASES,
    AttentionTestCase,
    Inputs,
    check,
    make_inputs,
    reference_results,
)
from tests.error_budget import assert_all_within_budget
from tests.replaced_operators import assert_as_promised, aten, replaced

FLASH, CUDNN = "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"


# Few: other tests show what each kernel computes.
FLASH_CASES = (
    *("inner tokens of TNT", "GPT-2 on stories", "one query, many keys", "grouped queries"),
    "dropout",
)
CUDNN_CASES = (
    *("one of everything", "a window of DaViT", "additive mask", "additive mask for all"),
    *("additive mask, one axis", "float32 mask", "dropout, head_dim 128, mask"),
)
EFFICIENT_CASES = "additive mask", "dropout, head_dim 128, mask"
OPERATOR_CASES = [
    *((FLASH, name) for name in FLASH_CASES),
    *((CUDNN, name) for name in CUDNN_CASES),
    *((EFFICIENT, name) for name in EFFICIENT_CASES),
]


def forward_arguments(name: str, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operator."""
    query, key, value, _, mask, *_ = inputs
    tensors = (query, key, value) if name == FLASH else (query, key, value, mask, True)
    return (*tensors, inputs.dropout_p, inputs.is_causal), {"scale": inputs.scale}


def backward_arguments(name: str, inputs: Inputs, results: Any) -> tuple[Any, ...]:
    """The arguments of an operator's backward, less the scale."""
    query, key, value, grad, mask, *_ = inputs
    out, lse, *others = results
    if name == EFFICIENT:
        last = *others, inputs.dropout_p, [True] * 4, inputs.is_causal
        return grad, query, key, value, mask, out, lse, *last
    *ends, state, offset, _ = others
    last = *ends, inputs.dropout_p, inputs.is_causal
    if name == FLASH:
        return grad, query, key, value, out, lse, *last, state, offset
    return grad, query, key, value, out, lse, state, offset, mask, *last


def with_seed_of(inputs: Inputs, results: Any) -> Inputs:
    """The inputs of the reference: the seed is what a forward returned."""
    state = results[2 if len(results) == 4 else 6]
    seed = state.view(torch.int64).reshape(-1)[:1] if inputs.dropout_p else None
    return inputs._replace(seed=seed)


def in_packed_memory(inputs: Inputs) -> Inputs:
    """Query, key and value as views of one projection, and a gradient in the order (B, N, H, D)."""
    three = torch.stack([t.transpose(1, 2) for t in inputs[:3]], dim=2).unbind(2)
    grad = inputs.grad.transpose(1, 2).contiguous()
    return inputs._replace(
        **dict(zip(("query", "key", "value"), (t.transpose(1, 2) for t in three))),
        grad=grad.transpose(1, 2),
    )


@pytest.mark.parametrize("share", [False, True], ids=["converted", "by kernels"])
@pytest.mark.parametrize(("name", "case_name"), OPERATOR_CASES)
def test_results_stay_within_the_error_budget_and_have_the_promised_layouts(
    name: str, case_name: str, share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leaner_kernels.ops.attention.aten.KERNELS_SHARE_LSE", share)
    (case,) = (case for case in CASES if case.name == case_name)
    inputs = make_inputs(case, torch.float16)
    if case.heads == case.kv_heads and case.rows == case.cols:
        inputs = in_packed_memory(inputs)
    args, kwargs = forward_arguments(name, inputs)
    with replaced(80 if name == EFFICIENT else 90) as below:
        results = getattr(aten, name)(*args, **kwargs)
        backward = backward_arguments(name, inputs, results)
        gradients = getattr(aten, f"{name}_backward")(*backward, **kwargs)
    assert not below
    assert_as_promised(results, name, *args, **kwargs)
    assert_as_promised(gradients, f"{name}_backward", *backward, **kwargs)
    rows = inputs.query.shape[2]
    lse = results[1].reshape(*inputs.query.shape[:2], -1)
    assert lse[..., rows:].isposinf().all()
    computed = {"out": results[0], "lse": lse[..., :rows]}
    computed |= dict(zip(("dq", "dk", "dv", "dmask"), gradients))
    check(with_seed_of(inputs, results), computed)


@pytest.mark.parametrize("factor", [1, 30])
@pytest.mark.parametrize("name", [FLASH, CUDNN])
def test_a_backward_follows_a_forward_of_pytorchs(name: str, factor: int) -> None:
    inputs = make_inputs(AttentionTestCase("", 1, 2, 2, 70, 70, 64), torch.float16)
    inputs = inputs._replace(query=inputs.query * factor)
    exact = reference_results(inputs, torch.float64)
    lse = exact["lse"].float().reshape(1, 2, 70, *[1] * (name == CUDNN))
    results = exact["out"].half(), lse, None, None, 70, 70, torch.empty(0), torch.empty(0), None
    with replaced() as below:
        arguments = backward_arguments(name, inputs, results)
        gradients = getattr(aten, f"{name}_backward")(*arguments, scale=inputs.scale)
    assert not below
    check(inputs, dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


def test_a_row_without_a_visible_key_has_no_gradient_after_a_forward_of_pytorchs() -> None:
    inputs = make_inputs(AttentionTestCase("", 1, 1, 1, 20, 20, 16), torch.float16)
    mask = torch.zeros(20, 20).half()
    mask[3] = -torch.inf
    inputs = inputs._replace(attn_mask=mask)
    with replaced():
        args, kwargs = forward_arguments(CUDNN, inputs)
        results = list(getattr(aten, CUDNN)(*args, **kwargs))
        assert results[1][..., 3, :] == torch.inf
        results[1] = results[1].nan_to_num(posinf=-torch.inf)
        arguments = backward_arguments(CUDNN, inputs, results)
        dq, dk, dv = getattr(aten, f"{CUDNN}_backward")(*arguments, **kwargs)
    assert not dq[:, :, 3].any()
    check(inputs, {"dq": dq, "dk": dk, "dv": dv})


def test_without_a_backward_no_log_sum_exp_is_computed() -> None:
    inputs = make_inputs(AttentionTestCase("", 1, 2, 2, 20, 20, 16, mask="line"), torch.float16)
    (*tensors, _, dropout_p, causal), kwargs = forward_arguments(CUDNN, inputs)
    for name in (CUDNN, EFFICIENT):
        args = *tensors, False, dropout_p, causal
        with replaced() as below:
            results = getattr(aten, name)(*args, **kwargs)
        assert not below
        assert_as_promised(results, name, *args, **kwargs)
        check(inputs, {"out": results[0]})


def test_a_call_is_recorded_after_one_in_inference_mode() -> None:
    inputs = make_inputs(AttentionTestCase("", 1, 1, 1, 20, 20, 16), torch.float16)
    for name in (FLASH, CUDNN):
        args, kwargs = forward_arguments(name, inputs)
        with replaced():
            with torch.inference_mode():
                getattr(aten, name)(*args, **kwargs)
            leaf = inputs.query.detach().requires_grad_()
            getattr(aten, name)(leaf, *args[1:], **kwargs)[0].sum().backward()
        assert leaf.grad is not None


FLASH_VARLEN, CUDNN_VARLEN = "_flash_attention", "_cudnn_attention"
VARLEN_CASES = (
    *((FLASH_VARLEN, name) for name in ("texts, causal", "dropout", "grouped queries")),
    *((CUDNN_VARLEN, name) for name in ("causal, crossed", "dropout")),
)


@pytest.mark.parametrize(("name", "case_name"), VARLEN_CASES)
def test_sequences_side_by_side_stay_within_the_error_budget(name: str, case_name: str) -> None:
    case = varlen_cases.case_named(case_name)
    inputs = varlen_cases.make_inputs(case, torch.float16)
    starts, key_starts = inputs.cu_seqlens, inputs.cu_seqlens_k
    if case.causal and name == FLASH_VARLEN:
        key_starts = starts  # otherwise PyTorch's mask and ours differ
    tensors, kwargs = inputs[:3], {"scale": inputs.scale}
    ends = starts, key_starts, inputs.max_seqlen, inputs.max_seqlen_k
    dropout = inputs.dropout_p, inputs.is_causal
    extra = () if name == FLASH_VARLEN else (None,)
    forward = *tensors, *extra, *ends, *(True for _ in extra), *dropout, False
    with replaced() as below:
        results = getattr(aten, f"{name}_forward")(*forward, **kwargs)
        out, lse, *_, state, offset, _ = results
        backward = inputs.grad, *tensors, out, lse
        if extra:
            backward += state, offset, None, *ends, *dropout
        else:
            backward += *ends, *dropout, state, offset
        gradients = getattr(aten, f"{name}_backward")(*backward, **kwargs)
    assert not below
    if name == FLASH_VARLEN:  # PyTorch has no fake kernels of cuDNN's
        assert_as_promised(results, f"{name}_forward", *forward, **kwargs)
        assert_as_promised(gradients, f"{name}_backward", *backward, **kwargs)
    if case.dropout_p:
        inputs = inputs._replace(seed=state.view(torch.int64).reshape(-1)[:1])
    computed = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    exact = varlen_cases.assemble(inputs, torch.float64)
    owned = slice(int(starts[0]), int(starts[-1]))
    peers = varlen_cases.peers_of(inputs, torch.float16)
    for results in (computed, exact):
        results["lse"] = results["lse"][:, owned]
    peers["lse"] = tuple(peer[:, owned] for peer in peers["lse"])
    assert_all_within_budget(computed, peers, exact)


@pytest.mark.parametrize(
    ("name", "backend", "dropout_p"),
    [(FLASH, "inductor", 0.25), (FLASH, "aot_eager", 0.0), (CUDNN, "inductor", 0.0)],
)
def test_compiled_graphs_call_our_kernels_until_they_are_removed(
    name: str, backend: str, dropout_p: float
) -> None:
    extra = (dropout_p,) if name == FLASH else (None, True, dropout_p)

    def block(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).view(2, 33, 3, 2, 32).permute(2, 0, 3, 1, 4).unbind(0)
        out = getattr(aten, name)(q, k, v, *extra)[0]
        return out.transpose(1, 2).reshape(2, 33, 64).sin()

    torch.manual_seed(0)
    x = torch.randn(2, 33, 64).half().requires_grad_()
    w = (torch.randn(64, 192) / 8).half().requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    with replaced() as below:
        outs = []
        for run in (block, compiled):
            torch.manual_seed(1)
            outs.append(run(x, w))
        eager, out = outs
        expected, actual = (torch.autograd.grad(t.sum(), (x, w)) for t in (eager, out))
        assert not below
    torch.testing.assert_close(out, eager, atol=5e-3, rtol=5e-3)
    for gradient, expectation in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, expectation, atol=3e-2, rtol=3e-2)
    with pytest.raises(NotImplementedError):  # a graph asks the dispatcher at every call
        compiled(x, w)
