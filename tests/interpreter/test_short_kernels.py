"""The kernels that own whole heads, in the interpreter, on every awkward shape they take.

Tiles are forced, so that the mathematics of each kernel is tested whatever the data for a GPU
says."""

import os

import pytest
import torch
from torch import Tensor

from tests import attention_cases
from tests.attention_cases import (
    CASES,
    AttentionTestCase,
    Inputs,
    as_reference,
    check,
    make_inputs,
    new_gradients,
    new_stats,
    peers_of,
    reference_results,
)
from tests.backends import Target, in_interpreter
from tests.error_budget import assert_all_within_budget

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs with --backend interpreter", allow_module_level=True)

from leaner_kernels.ops._tiles import Tile
from leaner_kernels.ops.attention import dispatch, op
from leaner_kernels.ops.attention.call import Gradients
from leaner_kernels.ops.attention.kernels import short
from leaner_kernels.ops.route import Results
from tests.interpreter import online

STATISTICS = "lse", *attention_cases.STATISTICS
# A softcap goes to the kernels of any length.
UNCAPPED = [case for case in CASES if not case.softcap]
# With keys in one step, where the softmax is computed again, and in several.
BLOCKS = 16, 128


def short_tile(tokens: int, block: int, largest_segment: int) -> Tile:
    sizes = {"tokens": tokens, "BLOCK": block, "largest_segment": largest_segment}
    return Tile.of(**sizes, num_warps=4, num_stages=1)


def run_short(inputs: Inputs, block: int, lse_alone: bool = False) -> dict[str, Tensor]:
    tokens = max(inputs.query.shape[2], inputs.key.shape[2])
    tile = short_tile(tokens, block, largest_segment=64)
    out, max_log_sum, stats, grads, ds = buffers(inputs)
    saved = Results(out, None, stats[0]) if lse_alone else Results(out, max_log_sum)
    results = saved if lse_alone else Results(out, max_log_sum, *stats)
    short.prepare_forward(tile, inputs.call, results).start()
    if inputs.query.shape[1] == inputs.key.shape[1]:
        gradients = Gradients(*grads, ds)
        short.prepare_backward(tile, inputs.grad, inputs.call, saved, gradients).start()
    found = named(inputs, out, stats, grads, ds)
    if lse_alone:
        found = {name: t for name, t in found.items() if name not in attention_cases.STATISTICS}
        found["lse"] = as_reference(found["lse"])
    return found


def buffers(inputs: Inputs) -> tuple:
    query, key, value, mask = *inputs[:3], inputs.attn_mask
    out, max_log_sum = op.new_out(query), online.new_max_log_sum(query)
    stats = new_stats(query, None)[:2]
    *grads, _ = new_gradients(query, key, value, mask, False)
    ds = None
    if mask is not None and mask.is_floating_point():
        ds = torch.full((*query.shape[:3], key.shape[2]), float("nan"))
    return out, max_log_sum, stats, grads, ds


def named(inputs: Inputs, out: Tensor, stats, grads, ds) -> dict[str, Tensor]:
    lse, per_head = stats
    results = {"out": out, **dict(zip(STATISTICS, (lse, *per_head), strict=True))}
    if inputs.query.shape[1] == inputs.key.shape[1]:
        results |= dict(zip(("dq", "dk", "dv"), grads))
        if ds is not None:
            results["dmask"] = ds.sum_to_size(inputs.attn_mask.shape).to(inputs.query.dtype)
    return results


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("case", "target"), in_interpreter(UNCAPPED, half_first=True))
def test_short_kernels_stay_within_the_error_budget(
    case: AttentionTestCase, target: Target, block: int
) -> None:
    inputs = make_inputs(case, target.dtype)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs, target.dtype)
    with target.active():
        results = run_short(inputs, block)
    assert_all_within_budget(results, peers, exact)
    if block == BLOCKS[1]:
        return  # the backward computes the softmax again, whatever the forward saved
    with target.active():
        alone = run_short(inputs, block, lse_alone=True)
    if target.rounding == "exact":  # a GPU's is drawn, and other operations draw other errors
        assert torch.equal(alone["out"], results["out"])
    assert_all_within_budget(alone, peers, exact)


def test_row_tiles_spread_over_programs_give_the_same() -> None:
    inputs = make_inputs(next(case for case in CASES if case.name == "ViT"), torch.float16)
    tile = short_tile(208, 16, largest_segment=128)
    assert short.programs_per_head(2, 13) == 13
    out, max_log_sum, stats, _, _ = buffers(inputs)
    # With statistics one program owns a head.
    short.prepare_forward(tile, inputs.call, Results(out, max_log_sum, *stats)).start()
    spread, spread_max_log_sum, _, _, _ = buffers(inputs)
    spread_results = Results(spread, spread_max_log_sum)
    short.prepare_forward(tile, inputs.call, spread_results).start()
    assert torch.equal(out, spread)
    assert torch.equal(max_log_sum, spread_max_log_sum)


def test_a_scale_that_is_not_positive_takes_kernels_that_allow_it() -> None:
    case = next(case for case in CASES if case.name == "ViT")
    inputs = make_inputs(case, torch.float16)._replace(scale=-0.125)
    out, max_log_sum, stats, grads, _ = buffers(inputs)
    results = Results(out, max_log_sum, *stats)
    assert results.stats is not None
    dispatch.prepare_forward(inputs.call, results).first({}, {}, {"stats": results.stats})
    dq, dk, dv = grads
    gradients = op.DenseGradients(dq, dk, dv)
    dispatch.prepare_backward(inputs.grad, inputs.call, results, gradients).start()
    check(inputs, named(inputs, out, stats, grads, None))


def test_the_backward_is_deterministic() -> None:
    case = next(case for case in CASES if case.name == "dropout with everything")
    inputs = make_inputs(case, torch.float16)
    first, second = run_short(inputs, 32), run_short(inputs, 32)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
