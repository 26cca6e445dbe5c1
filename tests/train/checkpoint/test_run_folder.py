"""What a launch finds, and whether it may continue it; without torchrun."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from train.checkpoint import run_folder
from train.checkpoint.run_folder import choose_folder, resume_from
from train.config.flags import Settings
from train.loop import parallel


@pytest.fixture(scope="module")
def world():
    with parallel.world() as alone:
        yield alone


@pytest.fixture
def agent(monkeypatch):
    """Says which agent of torchrun has started this process, or None."""
    return lambda name: monkeypatch.setattr(run_folder, "_own_agent", lambda: name)


def leave_checkpoint(folder: Path) -> None:
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)


def test_a_process_has_one_name_for_its_agent_and_none_without_torchrun(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert run_folder._own_agent() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    mine = run_folder._own_agent()
    assert mine == run_folder._own_agent()
    assert f" {os.getppid()} " in mine
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert run_folder._own_agent() != mine


def test_an_attempt_continues_what_an_earlier_one_of_its_launch_began(world, agent, tmp_path):
    settings = Settings(out=str(tmp_path / "run"), resume="none")
    agent("a")
    out = choose_folder("vit", settings, world)
    assert resume_from(settings, out, world) == "none"
    leave_checkpoint(out)
    assert choose_folder("vit", settings, world) == out
    assert resume_from(settings, out, world) == "auto"
    agent("b")
    assert resume_from(settings, out, world) == "none"
    with pytest.raises(ValueError, match="holds a run: give --resume auto or another --out"):
        choose_folder("vit", settings, world)
    agent("a")
    assert choose_folder("vit", settings, world) == out, "a refusal must not change whose it is"


def test_an_attempt_whose_launch_was_refused_is_refused_again(world, agent, tmp_path):
    leave_checkpoint(tmp_path)
    agent("a")
    for _ in range(2):
        with pytest.raises(ValueError, match="holds a run"):
            choose_folder("vit", Settings(out=str(tmp_path)), world)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_checkpoint_that_was_named_is_taken_until_the_run_has_its_own(world, agent, tmp_path):
    settings = Settings(out=str(tmp_path / "run"), resume="other/checkpoints/step-00000002")
    agent("a")
    out = choose_folder("vit", settings, world)
    choose_folder("vit", settings, world)
    assert resume_from(settings, out, world) == settings.resume
    leave_checkpoint(out)
    assert resume_from(settings, out, world) == "auto"


def test_an_attempt_finds_the_folder_that_its_launch_made_in_runs(
    world, agent, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    agent("a")
    first = choose_folder("vit", Settings(), world)
    agent("b")
    second = choose_folder("vit", Settings(), world)
    assert (first, second) == (Path("runs/vit-1"), Path("runs/vit-2"))
    agent("a")
    assert choose_folder("vit", Settings(), world) == first
    assert choose_folder("gpt", Settings(), world) == Path("runs/gpt-1")


def test_a_node_that_came_back_continues_with_the_one_that_stayed(world, agent, tmp_path):
    agent("stayed")
    choose_folder("vit", Settings(out=str(tmp_path)), world)
    leave_checkpoint(tmp_path)
    # Rank 0 may be on the new node, whose agent has not seen the first attempt.
    two = replace(world, size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "_agents", lambda _: {"new", "stayed"})
        assert choose_folder("vit", Settings(out=str(tmp_path)), two) == tmp_path
        assert resume_from(Settings(), tmp_path, two) == "auto"
    agent("new")
    assert resume_from(Settings(), tmp_path, world) == "auto"


def test_without_torchrun_no_mark_is_left_and_none_is_followed(world, agent, tmp_path):
    agent(None)
    choose_folder("vit", Settings(out=str(tmp_path / "run")), world)
    assert list((tmp_path / "run").iterdir()) == []
    agent("a")
    choose_folder("vit", Settings(out=str(tmp_path / "run")), world)
    leave_checkpoint(tmp_path / "run")
    agent(None)
    with pytest.raises(ValueError, match="holds a run"):
        choose_folder("vit", Settings(out=str(tmp_path / "run")), world)


@pytest.mark.parametrize("mark", ["", "[]", "{}", '{"agents": 1}'])
def test_a_mark_that_says_nothing_is_nobodys(world, agent, tmp_path, mark):
    leave_checkpoint(tmp_path)
    (tmp_path / "launch.json").write_text(mark)
    agent("a")
    with pytest.raises(ValueError, match="holds a run"):
        choose_folder("vit", Settings(out=str(tmp_path)), world)
