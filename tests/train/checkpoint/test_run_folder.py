"""What a launch finds, and whether it may continue it; without torchrun."""

from pathlib import Path

import pytest

from train.checkpoint import run_folder
from train.checkpoint.run_folder import choose_folder
from train.config.flags import Settings
from train.loop import parallel


@pytest.fixture(scope="module")
def world():
    with parallel.world() as alone:
        yield alone


@pytest.fixture
def launch(monkeypatch):
    """Says which torchrun has started this process, or None."""
    return lambda name: monkeypatch.setattr(run_folder, "_torchrun", lambda: name)


def finish_run(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text("{}")


def test_a_run_that_is_not_finished_is_continued_by_any_launch(world, launch, tmp_path):
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    for name in ("a", "b", None):
        launch(name)
        assert choose_folder("vit", Settings(out=str(tmp_path)), world) == tmp_path


def test_a_finished_run_is_continued_by_an_attempt_of_its_own_launch(world, launch, tmp_path):
    settings = Settings(out=str(tmp_path / "run"), resume="none")
    launch("a")
    out = choose_folder("vit", settings, world)
    finish_run(out)
    assert choose_folder("vit", settings, world) == out
    for other in ("b", None):
        launch(other)
        with pytest.raises(ValueError, match="holds a finished run: give --resume auto or another"):
            choose_folder("vit", settings, world)
    launch("a")
    assert choose_folder("vit", settings, world) == out, "a refusal must not change whose it is"


def test_an_attempt_finds_the_folder_that_its_launch_made_in_runs(
    world, launch, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    launch("a")
    first = choose_folder("vit", Settings(), world)
    launch("b")
    second = choose_folder("vit", Settings(), world)
    assert (first, second) == (Path("runs/vit-1"), Path("runs/vit-2"))
    launch("a")
    assert choose_folder("vit", Settings(), world) == first
    assert choose_folder("gpt", Settings(), world) == Path("runs/gpt-1")
