"""Tuning, as far as it goes without a GPU: candidates, rules and the choice between trials."""

import tomllib

import pytest
import torch

from bench import tune
from bench.attention.cases import CASES, AttentionCase
from leaner_kernels.ops.attention.kernels.scores import Tiles
from leaner_kernels.ops.attention.tiles import (
    AmpereTile,
    HopperTile,
    MultiheadTile,
    ShortTile,
    WarpMultiheadTile,
)

SHORT = AttentionCase("short", "cuda", 2, 4, 50, 10, torch.bfloat16)
TINY = AttentionCase("tiny", "cuda", 2, 4, 16, 10, torch.bfloat16)
LONG = next(case for case in CASES if case.name == "lra_1024")
MIDDLE = AttentionCase("middle", "cuda", 2, 4, 197, 64, torch.bfloat16)


def test_short_sequences_try_both_families() -> None:
    assert tune.kernels(SHORT) == [
        "multihead_forward", "multihead_backward", "short_forward", "short_backward",
    ]  # fmt: skip
    assert tune.kernels(TINY) == [
        "warp_multihead_forward",
        "warp_multihead_backward",
        *tune.kernels(SHORT),
    ]
    in_gluon = ["hopper_forward", "hopper_backward", "ampere_forward", "ampere_backward"]
    assert tune.kernels(MIDDLE) == ["short_forward", "short_backward", *in_gluon]
    assert tune.kernels(LONG) == [*in_gluon, "tiled_backward"]


@pytest.mark.parametrize("case", [TINY, SHORT, MIDDLE, LONG], ids=lambda case: case.name)
def test_every_candidate_is_a_tile(case: AttentionCase) -> None:
    for kernel in tune.kernels(case):
        found = list(tune.candidates(kernel, case))
        assert len(found) == len({tuple(tile.items()) for tile in found}) > 3
        for tile in found:
            if kernel.startswith("multihead"):
                MultiheadTile(ROWS=64, COLS=64, **tile)
            elif kernel.startswith("tiled"):
                Tiles(**tile)
            elif kernel.startswith("warp_multihead"):
                WarpMultiheadTile(**tile)
            elif kernel.startswith("hopper"):
                HopperTile(**tile)
            elif kernel.startswith("ampere"):
                AmpereTile(**tile)
            else:
                ShortTile(197, **tile)


def test_the_fastest_that_has_a_time_wins() -> None:
    trials = [
        tune.Trial("k", "c", {"BLOCK": 16}, None, 255, "spills"),
        tune.Trial("k", "c", {"BLOCK": 32}, 9.0, 200),
        tune.Trial("k", "c", {"BLOCK": 64}, 7.5, 128),
    ]
    winner = tune.best(trials)
    assert winner is trials[2]
    assert tune.best(trials[:1]) is None


def test_a_winner_is_printed_as_a_rule_of_the_data() -> None:
    trial = tune.Trial("short_forward", "short", {"BLOCK": 64, "num_warps": 4}, 7.5, 128)
    (rule,) = tomllib.loads(f"rules = [{tune.rule(trial, SHORT)}]")["rules"]
    with_ = ["odd", "unaligned"]
    expected_tile = {"BLOCK": 64, "num_warps": 4}
    assert rule == {"dim": 16, "tokens": 50, "with": with_, "tile": expected_tile}
    trial = tune.Trial("tiled_backward", "lra_1024", {"BLOCK_M": 64, "BLOCK_N": 64}, 7.5, 128)
    (rule,) = tomllib.loads(f"rules = [{tune.rule(trial, LONG)}]")["rules"]
    assert rule == {"dim": 32, "with": [], "tile": {"BLOCK_M": 64, "BLOCK_N": 64}}


def test_launches_read_and_write_the_tensors_of_the_case() -> None:
    case = AttentionCase("tiny", "cuda", 2, 3, 20, 16, torch.float16, causal=True)
    problem = tune.TileProblem(case, torch.device("cpu"))
    assert len(problem.sets) == 1
    every = (
        *tune.kernels(case),
        "tiled_backward",
        "warp_multihead_forward",
        "warp_multihead_backward",
    )
    for kernel in every:
        tile = next(tune.candidates(kernel, case))
        (launch,) = problem.launches(kernel, tile)
        results = tune.written(launch)
        assert len(results) == (1 if kernel.endswith("forward") else 3)
        assert all(t.shape == (2, 3, 20, 16) for t in results)
        assert launch.grid[0] >= 1


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="no CUDA GPU"):
        tune.main(["--case", "vit_base"])
