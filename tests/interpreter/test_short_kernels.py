"""The kernels that own whole heads, in the interpreter, on every awkward shape they take.

Tiles are forced, so that the mathematics of each kernel is tested whatever the data for a GPU
says."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.resources import cuda_cases
from tests import attention_cases
from tests.attention_cases import (
    CASES,
    AttentionTestCase,
    Inputs,
    make_inputs,
    new_gradients,
    new_stats,
    peers_of,
    reference_results,
)
from tests.error_budget import assert_within_budget
from tests.interpreter.rounding import in_half_arithmetic

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from leaner_kernels.ops import _tiles
from leaner_kernels.ops._tiles import Tile
from leaner_kernels.ops.attention import launch, op
from leaner_kernels.ops.attention.call import Results
from leaner_kernels.ops.attention.kernels import short_backward, short_forward
from leaner_kernels.ops.attention.kernels.segments import cut
from tests.interpreter import online

CUDA_CASES = cuda_cases()
STATISTICS = "lse", *attention_cases.STATISTICS
# A softcap goes to the kernels of any length.
UNCAPPED = [case for case in CASES if not case.softcap]
# With keys in one step, where the softmax is computed again, and in several.
BLOCKS = 16, 128


def short_tile(tokens: int, block: int, largest_segment: int) -> Tile:
    sizes = {"tokens": tokens, "BLOCK": block, "largest_segment": largest_segment}
    return Tile.of(**sizes, num_warps=4, num_stages=1)


def run_short(inputs: Inputs, block: int) -> dict[str, Tensor]:
    tokens = max(inputs.query.shape[2], inputs.key.shape[2])
    tile = short_tile(tokens, block, largest_segment=64)
    out, max_log_sum, stats, grads, ds = buffers(inputs)
    short_forward.prepare(tile, inputs.call, out, max_log_sum, *stats).start()
    if inputs.query.shape[1] == inputs.key.shape[1]:
        short_backward.prepare(tile, inputs.grad, inputs.call, out, max_log_sum, *grads, ds).start()
    return named(inputs, out, stats, grads, ds)


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


def check(case: AttentionTestCase, results: dict[str, Tensor]) -> None:
    dtype = results["out"].dtype
    exact = reference_results(make_inputs(case, dtype), torch.float64)
    peers = peers_of(make_inputs(case, dtype), dtype)
    for name, actual in results.items():
        assert_within_budget(actual, peers[name], exact[name])


@in_half_arithmetic
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("case", UNCAPPED, ids=[case.name for case in UNCAPPED])
def test_short_kernels_stay_within_the_error_budget(
    case: AttentionTestCase, block: int, dtype: torch.dtype
) -> None:
    check(case, run_short(make_inputs(case, dtype), block))


def test_row_tiles_spread_over_programs_give_the_same() -> None:
    inputs = make_inputs(next(case for case in CASES if case.name == "ViT"), torch.float16)
    tile = short_tile(208, 16, largest_segment=128)
    assert short_forward.split(2, 13) == 13
    out, max_log_sum, stats, _, _ = buffers(inputs)
    # With statistics one program owns a head.
    short_forward.prepare(tile, inputs.call, out, max_log_sum, *stats).start()
    spread, spread_max_log_sum, _, _, _ = buffers(inputs)
    short_forward.prepare(tile, inputs.call, spread, spread_max_log_sum, None, None).start()
    assert torch.equal(out, spread)
    assert torch.equal(max_log_sum, spread_max_log_sum)


def shapes_of_the_benchmark() -> Iterator[Any]:
    """A head or two of every shape that the benchmark times, long ones not for every GPU."""
    seen = set()
    for case in CUDA_CASES:
        gpus = _tiles.ARCHITECTURES if case.tokens <= 256 else _tiles.ARCHITECTURES[-1:]
        shape = case.rows, case.tokens, case.head_dim, case.causal
        if case.lengths or case.tokens > 1024 or shape in seen:
            continue
        seen.add(shape)
        heads = 2 if case.tokens <= 256 else 1
        small = AttentionTestCase(case.name, 1, heads, heads, *shape)
        yield from (pytest.param(small, gpu, id=f"{case.name}-sm_{gpu}") for gpu in gpus)
    # Lengths between those that the segments are cut for.
    for tokens, dim in ((65, 32), (65, 64), (150, 64), (177, 32), (209, 64)):
        case = AttentionTestCase("between", 2, 2, 2, tokens, tokens, dim, causal=tokens % 2 == 1)
        yield pytest.param(case, 80, id=f"{tokens} tokens of {dim}")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "gpu"), list(shapes_of_the_benchmark()))
def test_what_a_gpu_runs_agrees_with_the_reference(
    case: AttentionTestCase, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the choice of kernels, by the data of each architecture: statistics too."""
    monkeypatch.setattr(_tiles, "capability", lambda _: gpu)
    inputs = make_inputs(case, torch.float16)
    out, max_log_sum, stats, grads, _ = buffers(inputs)
    results = Results(out, max_log_sum, *stats)
    launch.forward(inputs.call, results)
    launch.backward(inputs.grad, inputs.call, results, *grads, None)
    check(case, named(inputs, out, stats, grads, None))
    plain, plain_max_log_sum, _, plain_grads, _ = buffers(inputs)
    without = Results(plain, plain_max_log_sum)
    launch.forward(inputs.call, without)
    launch.backward(inputs.grad, inputs.call, without, *plain_grads, None)
    exact = reference_results(make_inputs(case, torch.float16), torch.float64)
    peers = peers_of(make_inputs(case, torch.float16), torch.float16)
    for name, actual in zip(("out", "dq", "dk", "dv"), (plain, *plain_grads), strict=True):
        assert_within_budget(actual, peers[name], exact[name])


def test_a_scale_that_is_not_positive_takes_kernels_that_allow_it() -> None:
    case = next(case for case in CASES if case.name == "ViT")
    inputs = make_inputs(case, torch.float16)._replace(scale=-0.125)
    exact = reference_results(inputs, torch.float64)
    peers = peers_of(inputs, torch.float16)
    out, max_log_sum, stats, grads, _ = buffers(inputs)
    results = Results(out, max_log_sum, *stats)
    launch.forward(inputs.call, results)
    launch.backward(inputs.grad, inputs.call, results, *grads, None)
    for name, actual in named(inputs, out, stats, grads, None).items():
        assert_within_budget(actual, peers[name], exact[name])


def test_the_backward_is_deterministic() -> None:
    case = next(case for case in CASES if case.name == "dropout with everything")
    inputs = make_inputs(case, torch.float16)
    first, second = run_short(inputs, 32), run_short(inputs, 32)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_segments_cover_the_keys_with_little_padding() -> None:
    assert cut(197, 128) == ((0, 128), (128, 64), (192, 16))
    for largest in (16, 32, 64, 128, 256):
        for keys in range(1, 400):
            segments = cut(keys, largest)
            starts, sizes = zip(*segments)
            assert starts == tuple(sum(sizes[:i]) for i in range(len(sizes)))
            assert sum(sizes) >= keys > sum(sizes[:-1])
            assert all(16 <= size <= largest and size & (size - 1) == 0 for size in sizes)
