"""`bench/gpu.sh`: refusals, and its stages with a python3 that pretends."""

import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from bench.attention.cases import CASES
from bench.attention.peers import peers_of as softmax_peers
from bench.networks import profile_steps
from bench.networks.cases import PAPER_CASES
from bench.networks.gate import peers_of
from bench.networks.modes import mode_of
from tests.bench.test_report import RESULT

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench/gpu.sh"
# Answers as the environment names them.
PRETEND = """#!/usr/bin/env bash
echo "python3 $*" >>"$CALLS"
for argument; do
  case $argument in --benchmark-json=*) cp "$RESULT" "${argument#*=}" ;; esac
done
case $* in
  *torch.distributed.run*)
    [ ! -e "$CALLS.ran" ] || exit 124
    : >"$CALLS.ran"; exit 137 ;;
  *tests/gpu*) exit "${TESTS:-0}" ;;
esac
"""
TOOLS = (
    *("basename", "bash", "cat", "cp", "date", "dirname", "env", "gzip", "mkdir", "nproc", "rm"),
    *("tee", "timeout", "wc"),
)
STAGES = (
    *("training", "training_compiled", "training_graphs", "training_autotune", "first", "memory"),
    *("attention", "bench", "peers", "inference", "crossover", "rows", "run", "operators"),
    *("profile", "models", "compiled"),
)
# What a stage calls beside python3. A run is killed, then resumed until its time is over.
PROGRAMS = {
    "sleep": "exit 0",
    "pkill": 'echo "pkill $*" >>"$CALLS"',
    "ncu": 'echo "ncu $*" >>"$CALLS"; while [ $# -gt 0 ]; do '
    '[ "$1" != -o ] || echo 1 >"$2.ncu-rep"; shift; done',
}
USAGE = "bench/gpu.sh OUTDIR STAGE [-k EXPRESSION]"


def run(script, *arguments, path=os.environ["PATH"], cwd=None, **environment):
    return subprocess.run(
        ["bash", script, *arguments],
        cwd=cwd,
        env=os.environ | {"PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "arguments", [(), ("out",), ("out", "first", "lra"), ("out", "first", "-k"), ("out", "all")]
)
def test_without_a_folder_and_a_stage_it_refuses(arguments, tmp_path):
    done = run(SCRIPT, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"{USAGE}\n")
    assert done.stderr.count("\n") == 1
    assert all(stage in done.stderr for stage in STAGES)
    assert not (tmp_path / "out").exists()


ATTENTION = "gpu/test_kappa_gpu.py", "ops/test_softmax.py", "ops/test_softmax_masks.py"
OPERATORS = "gpu/test_guard_pages_gpu.py", "gpu/test_native_kappa.py", "ops/test_windows.py"
LARGE = "gpu/test_large_tensors_gpu.py"


@pytest.fixture
def checkout(tmp_path):
    """A copy without git, with tests of a GPU and with python3 that pretends."""
    copy = tmp_path / "checkout"
    for folder in ("bench", "tests/gpu", "tests/ops", "leaner_kernels/csrc", "bin"):
        (copy / folder).mkdir(parents=True)
    shutil.copy(SCRIPT, copy / "bench")
    for tests in (*ATTENTION, *OPERATORS, LARGE):
        (copy / "tests" / tests).touch()
    (copy / "bin/python3").write_text(PRETEND)
    (copy / "bin/python3").chmod(0o755)
    for tool in TOOLS:
        (copy / "bin" / tool).symlink_to(shutil.which(tool))
    for program, text in PROGRAMS.items():
        (copy / "bin" / program).write_text(f"#!/bin/bash\n{text}\n")
        (copy / "bin" / program).chmod(0o755)
    return copy


def pretend(checkout, tmp_path, *arguments, **environment):
    result = tmp_path / "result.json"
    result.write_text(json.dumps(RESULT))
    return run(
        checkout / "bench/gpu.sh",
        str(tmp_path / "out"),
        *arguments,
        path=str(checkout / "bin"),
        CALLS=str(tmp_path / "calls"),
        RESULT=str(result),
        **environment,
    )


def calls_of(tmp_path):
    return (tmp_path / "calls").read_text().splitlines()


def test_stages_name_the_next_one_end_in_four_minutes_and_run_every_test_once(checkout, tmp_path):
    ran = {}
    for number, stage in enumerate(STAGES):
        (tmp_path / "calls").unlink(missing_ok=True)
        done = pretend(checkout, tmp_path, stage)
        assert done.returncode == 0, done.stdout + done.stderr
        named = re.findall(r"^next: bench/gpu.sh \S+ (\w+)$", done.stdout, re.MULTILINE)
        assert named == list(STAGES[number + 1 : number + 2])
        limits = [int(n) for n in re.findall(r"\(at most (\d+) s\)", done.stdout)]
        assert 0 < max(limits) <= 205
        for line in calls_of(tmp_path):
            for name in re.findall(r"tests/((?:gpu|ops)/test_\w+\.py)", line):
                ran.setdefault(name, []).append((stage, " -n " in line))
    assert ran == {
        **{name: [("attention", True)] for name in ATTENTION},
        **{name: [("operators", True)] for name in OPERATORS},
        LARGE: [("memory", False)],
    }


def test_a_run_is_killed_and_resumed_in_its_folder(checkout, tmp_path):
    done = pretend(checkout, tmp_path, "run")
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (line for line in calls_of(tmp_path) if "torch.distributed.run" in line)
    assert one == two
    assert "train/vit.py --data synthetic --model vit_base_lean --compile" in one
    assert one.endswith(f"--out {tmp_path}/out/run")
    (pattern,) = (
        line.removeprefix("pkill -KILL -f ") for line in calls_of(tmp_path) if "pkill" in line
    )
    assert re.match(pattern, f"/usr/bin/{one}")
    assert not re.match(pattern, f"timeout --signal=INT 100 bash -c killed {one}")
    assert "a run, killed: passed" in done.stdout
    assert "the run, resumed: passed" in done.stdout


def test_steps_are_profiled_unless_an_expression_narrows_the_stage(checkout, tmp_path):
    for arguments, count in ((("training",), 1), (("training", "-k", "crammed_bert"), 0)):
        (tmp_path / "calls").unlink(missing_ok=True)
        done = pretend(checkout, tmp_path, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line for line in calls_of(tmp_path) if "profile_steps" in line]
        assert len(lines) == count
        for line in lines:
            case, peer, option, file = line.split()[-4:]
            assert peer in peers_of(profile_steps.CASES[case])
            assert (option, file) == ("--json", f"{tmp_path}/out/steps-profile.json")


def contains(name, word, **_):
    return word in name


def selected(line, names):
    """Return the names that a call of pytest selects by its -k, by pytest's own rule."""
    expression = Expression.compile(line.split(" -k ", 1)[1])
    return {name for name in names if expression.evaluate(partial(contains, name))}


def test_every_mode_of_a_whole_step_is_timed_in_one_stage(checkout, tmp_path):
    names = {
        f"{case.name}-training-{name}"
        for case in PAPER_CASES
        for name in peers_of(case)
        if case.device == "cuda" and case.row in ("vit_base", "crammed_bert", "gpt2_tinystories")
    }
    timed = {}
    for stage in STAGES:
        (tmp_path / "calls").unlink(missing_ok=True)
        pretend(checkout, tmp_path, stage)
        for line in calls_of(tmp_path):
            if "--benchmark-only" in line and re.search(r" bench(/networks)? ", line):
                for name in selected(line, names):
                    timed.setdefault(name, []).append(stage)
    where = {
        "eager": ["training"],
        "compiled": ["training_compiled"],
        "compiled, CUDA graphs": ["training_graphs"],
        "compiled, max-autotune": ["training_autotune"],
    }
    assert timed == {name: where[mode_of(name.split("-")[-1])] for name in names}


def test_the_peers_stage_times_every_peer_of_softmax_attention(checkout, tmp_path):
    pretend(checkout, tmp_path, "peers")
    (line,) = (line for line in calls_of(tmp_path) if "--benchmark-only" in line)
    names = {
        f"{case.name}-both-graph-{name}": peer
        for case in CASES
        for name, peer in softmax_peers(case).items()
        if case.device == "cuda"
    }
    left = {name for name in names if name not in selected(line, names)}
    assert all("stats" in name for name in left)
    assert {name for name in names if "stats" in name} == left


def test_an_expression_narrows_a_stage(checkout, tmp_path):
    done = pretend(checkout, tmp_path, "bench", "-k", "lra or text")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in calls_of(tmp_path) if "-m pytest" in line)
    assert line.endswith("-k (lra or text) and (not cpu_ and (not (compiled or flex)))")
    assert (tmp_path / "out/bench-lra-or-text.json").exists()


def test_a_failed_test_is_the_exit_status_and_the_summary_is_written(checkout, tmp_path):
    done = pretend(checkout, tmp_path, "attention", TESTS="3")
    assert done.returncode == 1
    assert "tests of a GPU, attention: FAILED with status 3" in done.stdout
    summary = (tmp_path / "out/summary.txt").read_text()
    assert "tests of a GPU, attention: FAILED with status 3" in summary
    assert "next: bench/gpu.sh" in done.stdout
