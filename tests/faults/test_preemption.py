"""Runs that are signalled to stop, or started again by torchrun, go on as if nothing had happened.

What torchrun has a part in is started by it. Everything else, the resumes too, is forked.
"""

import os
import signal
import textwrap
from pathlib import Path

import pytest

from tests.faults.zygote import Ranks, Zygote, kill, steps_done
from tests.train import launch
from tests.train.launch import (
    SCRIPT,
    TINY,
    assert_same_run,
    finish,
    pid_of_rank,
    run,
    start,
    torchrun,
    wait_for,
)
from train.checkpoint.checkpointer import find_damage

# With an evaluation every 4.4 steps, which is not where checkpoints are.
RUN = [*TINY, "--deterministic", "--ema", 0.9, "--steps", 40, "--ckpt-every", 4, "--keep", 99]
RUN += ["--eval-every", 0.1]
LAST = "step-00000040"


@pytest.fixture(scope="module")
def whole(zygote, tmp_path_factory) -> Path:
    """The run on two ranks that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    Ranks(zygote, [*RUN, "--out", folder / "run"], folder / "log", 2).finish()
    return folder / "run"


def assert_goes_on(zygote: Zygote, out: Path, whole: Path) -> None:
    """Two ranks take up a run and do it to its end, to the same bits."""
    args = [*RUN, "--out", out, "--resume", "auto"]
    Ranks(zygote, args, out.with_name("resumed.log"), 2).finish()
    assert_same_run(out, whole, LAST)


@pytest.fixture
def witnessed(tmp_path, monkeypatch) -> Path:
    """Have the script leave a file for what it does, and take its time over it.

    Returns:
        The folder of the files: "saving" and "evaluating" since when, and "rank0" and so on with
        the status of each rank that ended by itself.
    """
    marks = tmp_path / "marks"
    marks.mkdir()
    script = tmp_path / "witnessed.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, runpy, sys, time
        from pathlib import Path
        import train
        from train.checkpoint import checkpointer as checkpoint
        from train.loop import train as loop
        marks = Path({str(marks)!r})

        def slowly(owner, name, mark, seconds):
            function = getattr(owner, name)
            def wrapped(*args, **kwargs):
                (marks / mark).touch()
                time.sleep(seconds)
                return function(*args, **kwargs)
            setattr(owner, name, wrapped)

        slowly(checkpoint.Checkpointer, "_seal", "saving", 0.1)
        slowly(loop, "raise_if_stopped", "evaluating", 0.02)
        sys.argv[0] = {SCRIPT!r}
        rank = marks / ("rank" + os.environ.get("RANK", "0"))
        rank.unlink(missing_ok=True)
        status = "0"
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except BaseException as error:
            status = repr(error)
            raise
        finally:
            rank.write_text(status)
        """)
    )
    monkeypatch.setattr(launch, "SCRIPT", str(script))
    return marks


def checkpoints(out: Path) -> list[Path]:
    return sorted((out / "checkpoints").glob("step-*"))


def assert_stopped(out: Path) -> None:
    """The run is not at its end; there are checkpoints, and all are whole."""
    assert steps_done(out) < 40
    assert not (out / "summary.json").exists()
    assert checkpoints(out)
    assert [find_damage(path) for path in checkpoints(out)] == [None] * len(checkpoints(out))


def test_torchrun_starts_again_after_a_kill_and_the_run_continues_by_itself(whole, tmp_path):
    out = tmp_path / "run"
    process = start(*RUN, "--out", out, torchrun=[*torchrun(2), "--max-restarts=1"])
    wait_for(lambda: checkpoints(out), process)
    os.kill(pid_of_rank(1, process.pid), signal.SIGKILL)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert f"resumed from {out}" in done.stdout
    assert_same_run(out, whole, LAST)


def test_sigterm_to_torchrun_while_it_saves_loses_nothing(full, zygote, whole, witnessed, tmp_path):
    out = tmp_path / "run"
    process = start(*RUN, "--out", out, torchrun=torchrun(2))
    wait_for((witnessed / "saving").exists, process)
    process.terminate()
    done = finish(process)
    # torchrun reports the signal that it was sent; its ranks ended by themselves and in time.
    assert done.returncode == 1
    assert [(witnessed / f"rank{rank}").read_text() for rank in (0, 1)] == ["0", "0"], done.stderr
    assert "forcefully exiting" not in done.stderr
    assert "--resume auto continues" in done.stdout
    assert_stopped(out)
    assert_goes_on(zygote, out, whole)


def test_sigterm_while_it_evaluates_loses_nothing(full, zygote, whole, witnessed, tmp_path):
    out = tmp_path / "run"
    ranks = Ranks(zygote, [*RUN, "--out", out], tmp_path / "log", 2, script=launch.SCRIPT)
    ranks.wait_for((witnessed / "evaluating").exists)
    for pid in ranks.pids:
        assert kill(pid, signal.SIGTERM)
    assert "--resume auto continues" in ranks.finish()
    assert_stopped(out)
    assert_goes_on(zygote, out, whole)


def test_ranks_that_start_again_meet_also_where_one_is_late(full, tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        textwrap.dedent("""
        import os, time
        import torch
        from train.loop import parallel
        again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
        if again and os.environ["RANK"] == "1":
            time.sleep(5)
        with parallel.init_distributed(60):
            torch.distributed.all_reduce(torch.ones(1))
            if not again:
                os._exit(9)
        """)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "SCRIPT", str(script))
        run(torchrun=[*torchrun(2), "--max-restarts=1"])
