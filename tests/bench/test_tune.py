"""Tuning, as far as it goes without a GPU: candidates, rules and the choice between trials."""

from unittest import mock

import pytest
import torch

from bench import tune
from bench.attention.cases import AttentionCase
from bench.attention.catalogue import ON_GPU
from bench.attention.operators import CASES, OperatorCase
from bench.gpu_model.candidates import CANDIDATES, DIRECTIONS, Candidate
from leaner_kernels.ops import _tiles, route
from leaner_kernels.ops._launch_cache import Launch
from leaner_kernels.ops._tiles import Rule, rule
from leaner_kernels.ops.attention import dispatch
from leaner_kernels.ops.attention.kernels import BACKWARD
from tests.tile_tables import TABLES

BF16 = torch.bfloat16
HAS_KERNELS = [case for case in CASES if case.op != "nystrom"]
SMALLEST = sorted(HAS_KERNELS, key=lambda case: -case.bytes("forward"))
EVERY = {case.op: case for case in SMALLEST} | {
    "window": OperatorCase("window", "cuda", "window", 2, 14, 4, 16, BF16),
    "short": AttentionCase("short", "cuda", 2, 4, 50, 10, BF16),
    "tiny": AttentionCase("tiny", "cuda", 2, 4, 16, 10, BF16),
    "middle": AttentionCase("middle", "cuda", 24, 12, 197, 64, BF16),
    "long": AttentionCase("long", "cuda", 2, 2, 1100, 32, BF16),
}
CHANGED = "num_warps", "num_stages"


def as_rule(text: str) -> Rule:
    return eval(text.strip().rstrip(","), {"rule": rule})


@pytest.mark.parametrize("name", EVERY)
def test_tiles_around_the_one_that_ships_are_tried(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Launch] = []
    monkeypatch.setattr(Launch, "start", lambda launch: started.append(launch))
    monkeypatch.setattr(_tiles, "capability", lambda _: 90)
    problem = tune.TileProblem(EVERY[name], torch.device("cpu"))
    assert {"backward" in kernel for kernel in problem.rules} == {False, True}
    for kernel, row in problem.rules.items():
        assert row in TABLES[kernel][1].rules
        shipped, *others = tune.around(row.tile)
        assert shipped == row.tile.arguments
        assert len(others) > 10
        other = next(t for t in others if all(t[o] != shipped.get(o, 1) for o in CHANGED))
        started.clear()
        with problem.trying(kernel, other) as compiled:
            results = problem.run(tune.direction_of(kernel), problem.sets[0])
        assert len(results) == 1 if "forward" in kernel else results
        # A kernel in Gluon has no stages.
        options = [option for option in CHANGED if option in started[-1].arguments]
        assert any(all(one.arguments[o] == other[o] for o in options) for one in started)
        assert len(compiled) == len(started)
        assert as_rule(tune.line(row, other)).tile == rule(**other).tile


def test_a_candidate_replaces_the_tile_or_the_kernel_of_a_call_and_nothing_stays() -> None:
    call = ON_GPU["vit_base"]
    with mock.patch.object(_tiles, "capability", return_value=90):
        problem = tune.launches.call_of(call)
        ships = problem.launches(90)
        faster = Candidate("t", "forward", ("vit_base",), {"hopper_forward": {"maxnreg": 96}})
        other = Candidate(
            "k", "backward", ("vit_base",), kernels={"hopper_backward": BACKWARD["hopper_backward"]}
        )
        setting = Candidate("s", "forward", (), settings={f"{__name__}.CHANGED": ("maxnreg",)})
        with faster.selected():
            assert [one.kwargs["maxnreg"] for one in problem.launches(90)["forward"]] == [96]
        with other.selected():
            backward = problem.launches(90)["backward"]
            assert [one.name for one in backward] == ["_hopper_bwd_kernel"]
            assert len(BACKWARD) == len(dispatch.BACKWARD)
            assert next(iter(BACKWARD)) in other.kernels
        route.plans["earlier"] = None
        with setting.selected():
            assert not route.plans
            assert CHANGED == ("maxnreg",)
        assert CHANGED == ("num_warps", "num_stages")
        again = problem.launches(90)
    for kind, launches in ships.items():
        named = [(one.name, one.kwargs.get("maxnreg")) for one in launches]
        assert named == [(one.name, one.kwargs.get("maxnreg")) for one in again[kind]], kind


@pytest.mark.parametrize("candidate", CANDIDATES.values(), ids=str)
def test_a_candidate_names_what_exists(candidate: Candidate) -> None:
    assert candidate.direction in DIRECTIONS
    assert set(candidate.cases) <= set(ON_GPU)
    assert set(candidate.tiles) <= set(TABLES)
    for target in candidate.settings:
        mock.patch(target, None).start()
        mock.patch.stopall()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_direction_of_a_candidate_runs(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Launch] = []
    monkeypatch.setattr(Launch, "start", lambda launch: started.append(launch))
    monkeypatch.setattr(_tiles, "capability", lambda _: 90)
    problem = tune.TileProblem(EVERY["middle"], torch.device("cpu"))
    started.clear()
    with tune.gathering() as compiled:
        results = problem.run(direction, problem.sets[0])
    launches, count = {
        "forward": (1, 1),
        "statistics": (1, 7),
        "capture": (2, 8),
        "backward": (1, 3),
        "module": (0, 5),  # a module on a CPU
    }[direction]
    assert len(compiled) == len(started) == launches
    assert len(results) == count


def test_a_comparison_shows_what_was_gained_or_why_there_is_no_time() -> None:
    timed = tune.Comparison("c", "bert", "forward", 40.0, 30.0, 96)
    assert str(timed) == "bert forward: 40.0 us, c 30.0 us (-25.0%)"
    failed = timed._replace(microseconds=None, reason="spills in a loop")
    assert str(failed) == "bert forward: 40.0 us, c spills in a loop"


def test_the_fastest_that_has_a_time_wins() -> None:
    trials = [
        tune.Trial("k", "c", {"BLOCK": 16}, None, 255, "spills"),
        tune.Trial("k", "c", {"BLOCK": 32}, 9.0, 200),
        tune.Trial("k", "c", {"BLOCK": 64}, 7.5, 128),
    ]
    assert tune.best(trials) is trials[2]
    assert tune.best(trials[:1]) is None


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        tune.main(["--case", "vit_base"])
