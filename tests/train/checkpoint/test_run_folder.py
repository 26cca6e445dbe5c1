"""Which folder a run gets, and whether what is in it goes on."""

from pathlib import Path

import pytest

from train.checkpoint.run_folder import choose_folder
from train.config.flags import Settings
from train.loop import parallel


@pytest.fixture(scope="module")
def world():
    with parallel.world() as alone:
        yield alone


def test_a_run_goes_on_in_its_folder_until_it_is_finished(world, tmp_path):
    settings = Settings(out=str(tmp_path / "run"))
    out = choose_folder("vit", settings, world)
    (out / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert choose_folder("vit", settings, world) == out
    (out / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a finished run: give --resume auto or another"):
        choose_folder("vit", settings, world)
    assert choose_folder("vit", Settings(out=str(out), resume="auto"), world) == out


def test_without_out_a_run_has_the_next_folder_of_its_name(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (choose_folder("vit", Settings(), world) for _ in range(2))
    assert (first, second) == (Path("runs/vit-1"), Path("runs/vit-2"))
    assert choose_folder("vit", Settings(resume="auto"), world) == second
    assert choose_folder("gpt", Settings(), world) == Path("runs/gpt-1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ValueError, match="--max-restarts needs --out"):
        choose_folder("vit", Settings(), world)
