"""Tuning, as far as it goes without a GPU: candidates, rules and the choice between trials."""

from dataclasses import replace

import pytest
import torch

from bench import tune
from bench.attention.cases import CASES, AttentionCase
from bench.attention.operators.nystrom import CASES as NYSTROM_CASES
from bench.attention.vision_cases import VISION_CASES
from leaner_kernels.ops import _tiles
from leaner_kernels.ops._launch_cache import Launch
from leaner_kernels.ops._tiles import Rule, Tile, rule
from tests.tile_tables import TABLES

SHORT = AttentionCase("short", "cuda", 2, 4, 50, 10, torch.bfloat16)
TINY = AttentionCase("tiny", "cuda", 2, 4, 16, 10, torch.bfloat16)
LONG = next(case for case in CASES if case.name == "lra_1024")
MIDDLE = AttentionCase("middle", "cuda", 2, 4, 197, 64, torch.bfloat16)


SMALLEST = sorted(VISION_CASES, key=lambda case: -case.bytes("forward"))
OTHERS = {case.op: case for case in SMALLEST} | {"nystrom": NYSTROM_CASES[0]}
CHANGED = "num_warps", "num_stages"
CPU = torch.device("cpu")


def test_each_case_tries_the_kernels_that_take_it() -> None:
    assert tune.kernels(SHORT) == ["short_forward", "short_backward"]
    assert tune.kernels(TINY) == [
        "warp_multihead_forward",
        "warp_multihead_backward",
        *tune.kernels(SHORT),
    ]
    on_hopper = ["hopper_forward", "hopper_resident_backward", "hopper_backward"]
    in_gluon = [*on_hopper, "ampere_forward", "ampere_backward"]
    assert tune.kernels(MIDDLE) == ["short_forward", "short_backward", *in_gluon]
    assert tune.kernels(LONG) == [*in_gluon, "online_forward", "online_backward"]


@pytest.mark.parametrize("case", [TINY, SHORT, MIDDLE, LONG], ids=lambda case: case.name)
def test_every_candidate_is_a_tile(case: AttentionCase) -> None:
    for kernel in tune.kernels(case):
        found = list(tune.candidates(kernel, case))
        assert len(found) == len({tuple(tile.items()) for tile in found}) > 3
        shipped = shipped_tiles(kernel)
        constants = set().union(*(tile.constexprs for tile in shipped))
        options = set().union(*(tile.options for tile in shipped)) | {"maxnreg"}
        for tile in (Tile.of(**sizes) for sizes in found):
            assert tile.constexprs.keys() <= constants
            assert {"num_warps"} <= tile.options.keys() <= options


def shipped_tiles(kernel: str) -> list[Tile]:
    _, tiles = TABLES[kernel]
    return [row.tile for row in tiles.rules]


def as_rule(text: str) -> Rule:
    return eval(text.strip().rstrip(","), {"rule": rule})


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators_try_tiles_around_the_one_that_ships(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launch, "start", lambda _: None)
    problem = tune.TileProblem(OTHERS[name], CPU)
    every = problem.tiles
    assert {"backward" in kernel for kernel in every} == {False, True}
    for kernel, (shipped, *others) in every.items():
        assert len(others) > 10
        assert shipped in [tile.arguments for tile in shipped_tiles(kernel)]
        other = next(
            tile for tile in others if all(tile[name] != shipped[name] for name in CHANGED)
        )
        (run,) = problem.runs(kernel, other)
        assert any(
            all(one.arguments[name] == other[name] for name in CHANGED) for one in run.launches
        )
        assert len(run.compiled) == len(run.launches)
        inputs = [t for t in problem.call.inputs if t is not None]
        assert len(run.results) == (len(inputs) if "backward" in kernel else 1)
        trial = tune.Trial(kernel, name, other, 1.0, 128)
        assert as_rule(problem.rule(trial)) == rule(**problem.rules[kernel], **other)


def test_the_fastest_that_has_a_time_wins() -> None:
    trials = [
        tune.Trial("k", "c", {"BLOCK": 16}, None, 255, "spills"),
        tune.Trial("k", "c", {"BLOCK": 32}, 9.0, 200),
        tune.Trial("k", "c", {"BLOCK": 64}, 7.5, 128),
    ]
    winner = tune.best(trials)
    assert winner is trials[2]
    assert tune.best(trials[:1]) is None


def test_a_winner_is_printed_as_a_rule_of_its_table() -> None:
    trial = tune.Trial("short_forward", "short", {"BLOCK": 64, "num_warps": 4}, 7.5, 128)
    odd = "padded_dim", "unaligned"
    expected = rule(dim=16, tokens=50, takes=odd, BLOCK=64, num_warps=4)
    assert as_rule(tune.TileProblem(SHORT, CPU).rule(trial)) == expected
    trial = tune.Trial("online_backward", "lra_1024", {"BLOCK_M": 64, "BLOCK_N": 64}, 7.5, 128)
    expected = rule(dim=32, BLOCK_M=64, BLOCK_N=64)
    assert as_rule(tune.TileProblem(LONG, CPU).rule(trial)) == expected


@pytest.mark.parametrize("case", [TINY, SHORT, MIDDLE, LONG], ids=lambda case: case.name)
def test_a_forced_kernel_runs_with_its_tile(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Launch] = []
    monkeypatch.setattr(Launch, "start", lambda launch: started.append(launch))
    part = replace(case, batch=2, heads=4)
    problem = tune.TileProblem(part, CPU)
    for kernel, tiles in problem.tiles.items():
        for gpu in (90, 80):
            monkeypatch.setattr(_tiles, "capability", lambda _, gpu=gpu: gpu)
            if (kernel.partition("_")[0], gpu) in (("hopper", 80), ("ampere", 90)):
                with pytest.raises(RuntimeError, match=f"{kernel} does not take the case"):
                    problem.runs(kernel, tiles[-1])
                continue
            (run,) = problem.runs(kernel, tiles[-1])
            (launch,) = run.launches
            module = launch.kernel.fn.__module__.rpartition(".")[2]
            assert kernel.startswith(module) or module.startswith(kernel)
            # Sizes may be cut to those of the case.
            for name in Tile.of(**tiles[-1]).options:
                assert launch.arguments[name] == tiles[-1][name]
            before = len(started)
            run.again()
            assert started[before:] == [launch]
            expected = [part.rows] + [part.rows, part.tokens, part.tokens] * ("backward" in kernel)
            assert [t.shape[2] for t in run.results] == expected[-3:]


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="no CUDA GPU"):
        tune.main(["--case", "vit_base"])
