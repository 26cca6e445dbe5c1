"""The kernels in Gluon, executed: how they cut a head, masks, dropout, shared keys."""

import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("runs with --backend executed", allow_module_level=True)

from bench.gpu_model.execute import Execution, executing
from leaner_kernels import attention
from leaner_kernels.ops import _gluon, _tiles, route
from leaner_kernels.ops.attention import dispatch, op
from leaner_kernels.ops.attention.call import Call
from leaner_kernels.ops.attention.kernels import BACKWARD, FORWARD, STATISTICS
from tests import attention_cases, varlen_cases
from tests.attention_cases import (
    AttentionTestCase,
    Inputs,
    aligned,
    make_inputs,
    run_operators,
    side_by_side,
)
from tests.backends import check_findings
from tests.error_budget import assert_all_within_budget, assert_within_budget
from tests.varlen_cases import VarlenTestCase

if not _gluon.AVAILABLE:
    pytest.skip("this Triton has no Gluon", allow_module_level=True)

BF16, HALF = torch.bfloat16, torch.float16
Results = dict[str, Tensor]


def judge(
    case: AttentionTestCase,
    dtype: torch.dtype,
    run: Callable[[Inputs], Results],
    layout: Callable[..., Tensor] = aligned,
    change: Callable[[Inputs], None] = lambda inputs: None,
) -> None:
    """Assert that what ``run`` returns is within the error budget, gradients included.

    Args:
        case: sizes.
        dtype: of the tensors.
        run: computes results of inputs on the pretended GPU.
        layout: of the tensors, as models have them.
        change: called on the inputs before they are used.
    """
    on_cpu, on_gpu = (make_inputs(case, dtype, device, layout) for device in ("cpu", "cuda"))
    for inputs in (on_cpu, on_gpu):
        change(inputs)
    attention_cases.check(on_cpu, run(on_gpu))


# Whole tiles alone; with a tail of 16, 32 or 48; a last tile that is not full.
LENGTHS = {
    65: ({}, {"causal": True}),
    100: ({}, {"causal": True}),
    128: ({"causal": True},),
    160: ({}, {"lengths": (3, 140), "batch": 2}),
    197: ({}, {"causal": True}, {"lengths": (50, 197), "batch": 2}),
    250: ({"causal": True}, {"lengths": (200,)}),
    256: ({},),
    272: ({"causal": True, "lengths": (201,)},),
    320: ({},),
    460: ({"causal": True, "lengths": (300,)},),
    520: ({},),
}
DIMS = 16, 32, 48, 64, 80, 128
LIMITS = FORWARD | STATISTICS | BACKWARD
GPUS = {90: "hopper", 80: "ampere", 86: "ampere"}
CHOSEN = {
    (197, 64, BF16, 90),
    (160, 64, HALF, 90),
    (250, 32, BF16, 90),
    (65, 80, BF16, 90),
    (197, 64, BF16, 80),
    (250, 32, HALF, 86),
    (100, 64, BF16, 80),
    (320, 32, BF16, 90),
    (460, 32, BF16, 90),
    (520, 32, BF16, 90),
    (460, 64, BF16, 90),
    (520, 64, HALF, 90),
}
SHORT = {
    "TNT": AttentionTestCase("TNT", 5, 4, 4, 16, 16, 10),
    "causal": AttentionTestCase("causal", 3, 4, 4, 16, 16, 10, causal=True),
    "lengths": AttentionTestCase("lengths", 5, 4, 4, 16, 16, 10, lengths=(16, 1, 9, 3, 12)),
    "one token, one pair": AttentionTestCase("one token, one pair", 9, 2, 2, 1, 1, 2),
    "heads of 16": AttentionTestCase("heads of 16", 3, 6, 6, 7, 7, 16, causal=True),
    "a prime number of heads": AttentionTestCase("a prime number of heads", 2, 5, 5, 13, 13, 14),
    "heads of 30": AttentionTestCase("heads of 30", 3, 4, 4, 16, 16, 30, lengths=(2, 16, 7)),
    "heads of 32": AttentionTestCase("heads of 32", 2, 4, 4, 16, 16, 32),
    "heads of 64": AttentionTestCase("heads of 64", 2, 2, 2, 16, 16, 64, lengths=(16, 5)),
    "everything": AttentionTestCase(
        "everything", 2, 8, 8, 15, 15, 12, causal=True, lengths=(15, 4)
    ),
}
LAYOUTS = {"beside": side_by_side, "apart": aligned}
CHOSEN_SHORT = {
    ("TNT", BF16, 90, "plain", "beside"),
    ("TNT", HALF, 80, "plain", "apart"),
    ("everything", BF16, 86, "statistics", "beside"),
    ("everything", BF16, 90, "statistics", "apart"),
    ("heads of 64", BF16, 90, "plain", "beside"),
}


def calls() -> Iterator[Any]:
    for (tokens, flavours), dim, dtype, gpu in product(LENGTHS.items(), DIMS, (BF16, HALF), GPUS):
        for number, flavour in enumerate(flavours):
            marks = () if (tokens, dim, dtype, gpu) in CHOSEN else pytest.mark.nightly
            batch = flavour.get("batch", 1)
            rest = {name: value for name, value in flavour.items() if name != "batch"}
            case = AttentionTestCase(f"{tokens}", batch, 2, 2, tokens, tokens, dim, **rest)
            name = f"{tokens}-{dim}-{dtype}-{gpu}-{number}"
            yield pytest.param(case, dtype, gpu, marks=marks, id=name)


def run_without_statistics(inputs: Inputs) -> dict[str, Tensor]:
    leaves = [t.requires_grad_() for t in inputs[:3]]
    out, kept = torch.ops.leaner_kernels.attention(*inputs.arguments)
    grads = torch.autograd.grad(out, leaves, inputs.grad)
    mask = inputs.attn_mask
    unit = inputs.scale if mask is None or mask.dtype == torch.bool else 1.0
    lse = kept[..., 0] * unit + kept[..., 1]
    lse = lse.where(lse != float("inf"), -float("inf"))  # of a row that sees no key
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


RUNS = {"plain": run_without_statistics, "statistics": run_operators}
# The kernels of each way, of which the first that takes a call runs it.
WAYS = {
    "hopper": (
        (("hopper_forward",), ("plain",)),
        (("hopper_forward_statistics", "hopper_long_forward_statistics"), ("statistics",)),
        (("hopper_resident_backward", "hopper_backward"), ("plain", "statistics")),
    ),
    "ampere": (
        (("ampere_forward",), ("plain",)),
        (("ampere_forward_statistics",), ("statistics",)),
        (("ampere_backward",), ("plain", "statistics")),
    ),
}


def function_of(kernel: str) -> str:
    short = kernel.removesuffix("_statistics").replace("forward", "fwd").replace("backward", "bwd")
    return f"_{short}_kernel"


def lacks_fence(execution: Execution) -> bool:
    """Return whether Triton 3.6 left out the fence between copies and products of a forward."""
    forward = execution.name == "_attention_fwd_kernel" and execution.launch is not None
    captures = forward and execution.launch.kwargs["CAPTURE"]
    return forward and not captures and not _gluon.KEEPS_FENCES


@pytest.mark.parametrize(("case", "dtype", "gpu"), list(calls()))
def test_a_head_is_cut_into_tiles_and_a_tail(
    case: AttentionTestCase, dtype: torch.dtype, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)
    launched = {}
    for name, run in RUNS.items():
        with executing(gpu) as executions:
            judge(case, dtype, run)
        check_findings([e for e in executions if not lacks_fence(e)])
        launched[name] = {execution.name for execution in executions}
    query = torch.empty(case.batch, case.heads, case.rows, case.dim, dtype=dtype, device="meta")
    monkeypatch.setattr(_tiles, "capability", lambda _: gpu)
    call = Call(query, query, query, None, None, None, 0.0, False, None)
    for kernels, runs in WAYS[GPUS[gpu]]:
        profile = call.profile()
        takers = [k for k in kernels if dispatch.tile_of(k, LIMITS[k], gpu, call, profile)]
        for kernel, run in product(kernels, runs):
            assert (function_of(kernel) in launched[run]) == (kernel in takers[:1])


@pytest.mark.parametrize(
    ("gpu", "tokens", "dim"),
    [(90, 197, 64), (90, 300, 32), (90, 100, 48), (90, 50, 24), (80, 197, 64), (80, 600, 32)],
)
def test_gradients_of_one_projection_read_its_output(
    gpu: int, tokens: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output lies as (B, N, H, D); a backward once read it as (B, H, N, D)."""
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)
    torch.manual_seed(0)
    qkv = torch.randn(1, tokens, 3, 2, dim, dtype=BF16)
    grad = torch.randn(1, tokens, 2, dim, dtype=BF16)

    def library(dtype: torch.dtype) -> Tensor:
        x = qkv.to(dtype).requires_grad_()
        q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
        out = torch.softmax(dim**-0.5 * (q @ k.mT), dim=-1) @ v
        return torch.autograd.grad(out.transpose(1, 2), x, grad.to(dtype))[0]

    attend, _, differentiate = route.launchers(op.Packed)
    numbers = 0.0, False, None, -1, -1
    with executing(gpu) as executions:
        saved = attend(qkv, None, None, *numbers)
        dqkv = differentiate(grad, qkv, None, None, *saved, *numbers)
    check_findings([e for e in executions if not lacks_fence(e)])
    assert_within_budget(dqkv, library(BF16), library(torch.float64))


# Statistics of heads that do not fit on chip.
LONG = {
    "shared keys": AttentionTestCase("shared keys", 1, 4, 2, 420, 420, 64, causal=True),
    "heads of 48": AttentionTestCase("heads of 48", 2, 1, 1, 590, 590, 48, lengths=(1, 580)),
    "heads of 32": AttentionTestCase("heads of 32", 1, 1, 1, 770, 770, 32),
    "heads of 16": AttentionTestCase("heads of 16", 1, 1, 1, 1030, 1030, 16),
}


@pytest.mark.parametrize("dtype", [BF16, pytest.param(HALF, marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("name", LONG)
def test_keys_pass_by_128_rows_of_a_long_head(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)
    with executing(90) as executions:
        judge(LONG[name], dtype, run_operators)
    check_findings([e for e in executions if e.name.startswith("_hopper")])
    assert executions[0].name == "_hopper_long_fwd_kernel"


def short_calls() -> Iterator[Any]:
    for call in product(SHORT, (BF16, HALF), GPUS, RUNS, LAYOUTS):
        marks = () if call in CHOSEN_SHORT else pytest.mark.nightly
        yield pytest.param(*call, marks=marks, id="-".join(map(str, call)))


@pytest.mark.parametrize(("name", "dtype", "gpu", "run", "layout"), list(short_calls()))
def test_a_warp_owns_heads_of_up_to_16_tokens(
    name: str, dtype: torch.dtype, gpu: int, run: str, layout: str
) -> None:
    with executing(gpu) as executions:
        judge(SHORT[name], dtype, RUNS[run], LAYOUTS[layout])
    check_findings(executions)
    names = {execution.name for execution in executions}
    capture = {"_attention_fwd_kernel"} if run == "statistics" else set()
    assert names == {"_warp_multihead_fwd_kernel", "_warp_multihead_bwd_kernel"} | capture


def test_a_head_that_is_no_number_leaves_its_neighbours_alone() -> None:
    with executing(90):
        inputs = make_inputs(SHORT["TNT"], BF16, "cuda", side_by_side)
        for t in (*inputs[:3], inputs.grad):
            t[:, 1] = float("nan")
        results = run_without_statistics(inputs)
    for name, t in results.items():
        found = t.cpu().isnan().flatten(2).any(2).any(0)
        assert found.tolist() == [False, True, False, False], name


# Without rows, without keys and without either; one token, a tile, tails, the longest.
RAGGED = {
    "images": VarlenTestCase("images", (0, 1, 256, 0, 65, 64, 197, 16), 2, 64, before=2, after=3),
    "texts": VarlenTestCase(
        "texts", (200, 0, 100, 5, 130), 2, 64, key_lengths=(70, 30, 200, 0, 130), causal=True
    ),
    "heads of 48": VarlenTestCase("heads of 48", (150, 5, 130), 1, 48, after=40, slack=6),
    "heads of 16": VarlenTestCase("heads of 16", (0, 300, 7), 2, 16, causal=True),
    "heads of 32": VarlenTestCase("heads of 32", (270, 1, 64), 2, 32),
    "heads of 128": VarlenTestCase("heads of 128", (90, 33), 1, 128, before=1),
    "dropout": VarlenTestCase("dropout", (3, 140, 70), 2, 64, dropout_p=0.3, after=5),
}


def run_varlen(inputs: Any) -> dict[str, Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    operands = *leaves, *inputs.operands[3:], *inputs.params
    out, _ = torch.ops.leaner_kernels.attention_varlen(*operands)
    gradients = torch.autograd.grad(out, leaves, inputs.grad)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))


RAGGED_RUNS = {"plain": run_varlen, "statistics": varlen_cases.run_operators}


CHOSEN_RAGGED = {
    ("images", BF16, "plain"),
    ("texts", HALF, "statistics"),
    ("heads of 32", BF16, "plain"),
    ("dropout", BF16, "plain"),
}


def ragged_calls() -> Iterator[Any]:
    for call in product(RAGGED, (BF16, HALF), RAGGED_RUNS):
        marks = () if call in CHOSEN_RAGGED else pytest.mark.nightly
        yield pytest.param(*call, marks=marks, id="-".join(map(str, call)))


@pytest.mark.parametrize(("name", "dtype", "run"), list(ragged_calls()))
def test_programs_own_a_head_of_a_sequence(
    name: str, dtype: torch.dtype, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)
    inputs = varlen_cases.make_inputs(RAGGED[name], dtype, gap=16)
    exact = varlen_cases.assemble(inputs, torch.float64)
    with executing(90) as executions:
        results = RAGGED_RUNS[run](varlen_cases.make_inputs(RAGGED[name], dtype, "cuda", gap=16))
    assert_all_within_budget(results, varlen_cases.peers_of(inputs, dtype), exact)
    check_findings([e for e in executions if e.name.startswith("_hopper")])
    fenced = _gluon.KEEPS_FENCES or not RAGGED[name].dropout_p
    assert (executions[-1].name == "_hopper_bwd_kernel") == fenced


@pytest.mark.parametrize(
    ("gpu", "dim", "kernel"),
    [
        (80, 64, "_ampere_bwd_kernel"),
        (90, 64, "_hopper_resident_bwd_kernel"),
        (90, 128, "_hopper_bwd_kernel"),
    ],
)
def test_what_a_large_log_sum_exp_lost_is_put_right(
    gpu: int, dim: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of millions, exact in float32; beside them the log of a sum is rounded away."""
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)
    torch.manual_seed(0)
    shape = 1, 197, 2, dim
    query, key, value, grad = (torch.randn(shape).transpose(1, 2) for _ in range(4))
    for t in (query, key):
        t.mul_(2).round_()[..., 0] = 2048
    inputs = [t.to(BF16).requires_grad_() for t in (query, key, value)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    p = (exact[0] @ exact[1].mT * dim**-0.5).softmax(-1)
    (p @ exact[2]).backward(grad.to(BF16).double())
    with executing(gpu) as executions:
        on_gpu = [t.detach().cuda().requires_grad_() for t in inputs]
        attention(*on_gpu).backward(grad.to(BF16).cuda())
    check_findings(executions)
    assert executions[-1].name == kernel
    expected, actual = exact[2].grad, on_gpu[2].grad
    assert expected is not None
    assert actual is not None
    error = (actual.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < 0.008


# Masks and dropout in both directions, and key heads that rows share in the forward.
ON_HOPPER = {
    "dropout": AttentionTestCase("dropout", 1, 2, 2, 197, 197, 64, dropout_p=0.1),
    "causal dropout": AttentionTestCase(
        "causal dropout", 1, 2, 2, 128, 128, 32, causal=True, dropout_p=0.2
    ),
    "additive": AttentionTestCase("additive", 1, 2, 2, 100, 100, 64, mask="additive"),
    "float32": AttentionTestCase("float32", 1, 2, 2, 100, 100, 64, mask="float32"),
    "boolean": AttentionTestCase("boolean", 2, 2, 2, 197, 197, 64, mask="boolean"),
    "over keys": AttentionTestCase("over keys", 2, 2, 2, 160, 160, 64, mask="keys"),
    "all": AttentionTestCase(
        "all", 2, 2, 2, 160, 160, 64, mask="additive", dropout_p=0.2, lengths=(50, 160)
    ),
    "narrow": AttentionTestCase("narrow", 2, 2, 2, 250, 250, 16, mask="boolean", dropout_p=0.1),
    "wide": AttentionTestCase("wide", 1, 2, 2, 100, 100, 128, dropout_p=0.1),
    "shared": AttentionTestCase("shared", 1, 4, 1, 128, 128, 32, mask="shared", dropout_p=0.1),
}
CHOSEN_ON_HOPPER = {
    ("dropout", HALF, "plain"),
    ("boolean", BF16, "plain"),
    ("float32", BF16, "plain"),
    ("all", BF16, "statistics"),
}


def flavours() -> Iterator[Any]:
    for name, dtype, run in product(ON_HOPPER, (BF16, HALF), RUNS):
        marks = () if (name, dtype, run) in CHOSEN_ON_HOPPER else pytest.mark.nightly
        yield pytest.param(name, dtype, run, marks=marks, id=f"{name}-{dtype}-{run}")


@pytest.mark.parametrize(("name", "dtype", "run"), list(flavours()))
def test_masks_dropout_and_shared_keys_on_hopper(
    name: str, dtype: torch.dtype, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)
    with executing(90) as executions:
        judge(ON_HOPPER[name], dtype, RUNS[run])
    check_findings(executions)
    names = {execution.name for execution in executions}
    no_rule = name == "wide" and run == "statistics"
    assert ("_hopper_fwd_kernel" in names) == (not no_rule)
    dropout = ON_HOPPER[name].dropout_p > 0
    assert ("_hopper_resident_bwd_kernel" in names) == (not dropout)
    fenced_dropout = dropout and _gluon.KEEPS_FENCES
    assert ("_hopper_bwd_kernel" in names) == (name != "shared" and fenced_dropout)


ON_AMPERE = {
    "additive mask": AttentionTestCase("additive mask", 1, 2, 2, 197, 197, 64, mask="additive"),
    "additive mask, lengths": AttentionTestCase(
        "additive mask, lengths", 2, 2, 2, 100, 100, 32, mask="shared", lengths=(30, 100)
    ),
    "float32 mask": AttentionTestCase("float32 mask", 2, 2, 2, 100, 100, 32, mask="float32"),
    "boolean mask, a hidden row": AttentionTestCase(
        "boolean mask", 1, 2, 2, 197, 197, 64, mask="boolean"
    ),
    "boolean mask over keys": AttentionTestCase("over keys", 2, 2, 2, 110, 110, 32, mask="keys"),
    "dropout": AttentionTestCase("dropout", 1, 2, 2, 197, 197, 64, dropout_p=0.1),
    "dropout, causal, lengths": AttentionTestCase(
        "dropout, causal", 2, 2, 2, 100, 100, 32, causal=True, lengths=(7, 100), dropout_p=0.5
    ),
    "shared key heads": AttentionTestCase("shared key heads", 1, 4, 2, 197, 197, 64),
}
BACKWARDS = {80: "_ampere_bwd_kernel", 90: "_hopper_resident_bwd_kernel"}
CHOSEN_ON_AMPERE = {
    ("additive mask", BF16, 80),
    ("additive mask, lengths", HALF, 86),
    ("float32 mask", BF16, 80),
    ("boolean mask, a hidden row", HALF, 80),
    ("dropout", BF16, 80),
    ("shared key heads", BF16, 80),
}


def flavoured() -> Iterator[Any]:
    for name, dtype, gpu in product(ON_AMPERE, (BF16, HALF), (80, 86)):
        marks = () if (name, dtype, gpu) in CHOSEN_ON_AMPERE else pytest.mark.nightly
        yield pytest.param(name, dtype, gpu, marks=marks, id=f"{name}-{dtype}-{gpu}")


@pytest.mark.parametrize(("name", "dtype", "gpu"), list(flavoured()))
def test_masks_dropout_and_shared_key_heads_on_ampere(
    name: str, dtype: torch.dtype, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)
    expected = {"_ampere_fwd_kernel"}
    if name != "shared key heads":
        expected |= {"_ampere_bwd_kernel"}
    for run in RUNS.values():
        with executing(gpu) as executions:
            judge(ON_AMPERE[name], dtype, run)
        check_findings(executions)
        assert expected <= {execution.name for execution in executions}


@pytest.mark.parametrize("gpu", BACKWARDS)
@pytest.mark.parametrize("number", [-1e9, -1e30])
def test_a_row_may_be_hidden_by_large_numbers(
    gpu: int, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside them scores are lost: a row of nothing else sees every key alike."""
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)

    def hide_a_row(inputs: Inputs) -> None:
        assert inputs.attn_mask is not None
        inputs.attn_mask[..., 5, :] = number

    with executing(gpu) as executions:
        case = ON_AMPERE["additive mask"]
        judge(case, BF16, run_without_statistics, change=hide_a_row)
    check_findings(executions)
    forward, backward = (execution.name for execution in executions)
    assert forward == f"_{GPUS[gpu]}_fwd_kernel"
    assert backward == BACKWARDS[gpu]


@pytest.mark.parametrize("gpu", BACKWARDS)
@pytest.mark.parametrize("tokens", [100, 197])
def test_an_additive_mask_gets_its_gradient(tokens: int, gpu: int) -> None:
    case = ON_AMPERE["additive mask"]._replace(rows=tokens, cols=tokens)
    inputs = make_inputs(case, BF16, layout=aligned)
    assert inputs.attn_mask is not None
    exact = [t.detach().double().requires_grad_() for t in (*inputs[:3], inputs.attn_mask)]
    p = (exact[0] @ exact[1].mT * inputs.scale + exact[3]).softmax(-1)
    (p @ exact[2]).backward(inputs.grad.double())
    with executing(gpu) as executions:
        tensors = [t.detach().cuda().requires_grad_() for t in (*inputs[:3], inputs.attn_mask)]
        attention(*tensors[:3], attn_mask=tensors[3]).backward(inputs.grad.cuda())
    check_findings(executions)
    assert executions[-1].name == BACKWARDS[gpu]
    expected, actual = exact[3].grad, tensors[3].grad
    assert expected is not None
    assert actual is not None
    error = (actual.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < 0.02
