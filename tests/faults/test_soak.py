"""The soak counts right what faults have cost."""

import random
import sys

import pytest

from tests.faults import soak
from tests.faults.table import of_soak


class Said:
    """A launch that has said so much."""

    def __init__(self, text: str):
        self.text = text

    def said(self) -> str:
        return self.text


@pytest.fixture
def campaign(tmp_path) -> soak.Soak:
    return soak.Soak(tmp_path, tmp_path, ranks=2, mean=1.0, draw=random.Random(0))


def resumed(*steps: int) -> Said:
    return Said("".join(f"resumed from runs/x/checkpoints/step-{step:08d}\n" for step in steps))


def test_steps_lost_are_those_since_the_checkpoint_and_are_counted_once(campaign):
    # The second fault came before the run had gone on, the third one is not over.
    campaign.events = [{"fault": "kill -9 of a rank", "step": step} for step in (70, 70)]
    campaign.events.append({"fault": "kill -9 of a rank"})
    campaign._note_resumes(resumed(50))
    assert [event.get("steps_lost") for event in campaign.events] == [20, 0, None]
    campaign.events[2]["step"] = 110
    campaign._note_resumes(resumed(50))
    assert "steps_lost" not in campaign.events[2], "the same resume must not be seen twice"
    campaign._note_resumes(resumed(50, 100))
    assert campaign.events[2]["steps_lost"] == 10
    assert campaign.problems == []


def test_a_step_lost_to_a_signal_that_asks_to_stop_is_a_problem(campaign):
    # Saved before an evaluation, after which the row is written: not lost.
    campaign.events = [{"fault": "SIGTERM to torchrun", "step": 54}]
    campaign._note_resumes(resumed(55))
    assert campaign.problems == []
    campaign.events.append({"fault": "SIGTERM to torchrun", "step": 60})
    campaign._note_resumes(resumed(55, 59))
    assert len(campaign.problems) == 1


RESULT = {
    **{"minutes": 60, "ranks": 2, "cpu": "x", "cores": 2, "torch": "2", "commit": "a" * 40},
    **{"steps": 100, "launches": 2, "restarts": 0, "steps_lost": 5, "most_steps_lost": 5},
    **{"checkpoint_every": 50, "faults": {"kill": 1}, "problems": [], "differences": []},
    **{"events": [{"fault": "kill", "steps_lost": 5}], "same": True},
}


def test_a_soak_that_found_a_difference_says_so(tmp_path, monkeypatch, capsys):
    assert "| kill | 1 | 5 | 5 |" in of_soak(RESULT)
    assert "different from" not in of_soak(RESULT)
    assert "100 steps, 0 faults" in of_soak(RESULT | {"events": [], "faults": {}})
    different = {"differences": ["kappa.jsonl has 1 rows instead of 2"], "same": False}
    monkeypatch.setattr(soak, "soak", lambda out, **_: RESULT | different)
    monkeypatch.setattr(sys, "argv", ["soak", "--out", str(tmp_path / "new")])
    assert soak.main() == 1
    out = capsys.readouterr().out
    assert "**different from**" in out
    assert out.endswith("\nkappa.jsonl has 1 rows instead of 2\n")


@pytest.mark.parametrize("flags", [["--minutes", "0"], ["--ranks", "-1"], ["--out", "{tmp}"]])
def test_flags_of_a_soak_that_cannot_be_are_refused(flags, tmp_path, monkeypatch, capsys):
    given = [flag.format(tmp=tmp_path) for flag in flags]
    monkeypatch.setattr(sys, "argv", ["soak", "--out", str(tmp_path / "new"), *given])
    with pytest.raises(SystemExit, match="2"):
        soak.main()
    assert f"{given[0]} must be" in capsys.readouterr().err
