"""What a run writes down, and how it looks on a terminal."""

import functools
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console
from rich.progress import Progress

from leaner_kernels.monitor.run_files import JsonLines
from tests.train.launch import TINY, rows
from train import vit
from train.logs.report import range_of_kappa


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Listener:
    """Notes the lines that it is passed."""

    def __init__(self):
        self.said: list[str] = []

    def log(self, line: str) -> None:
        self.said.append(line)


def test_lines_that_a_full_disk_refused_are_written_when_there_is_room(tmp_path):
    path, listener = tmp_path / "m.jsonl", Listener()
    lines = JsonLines(path, 0, listener.log)
    lines.append([{"step": 0, "loss": 2.5}])
    with no_file_larger_than(40):
        for step in (1, 2):
            lines.append([{"step": step, "loss": 2.5}])
    assert listener.said == ["m.jsonl not written, training goes on: [Errno 27] File too large"]
    lines.append([{"step": 3, "loss": 2.5}])
    assert rows(path) == [{"step": step, "loss": 2.5} for step in range(4)]


def test_damage_is_dropped_alone_and_its_line_is_named(tmp_path):
    path, listener = tmp_path / "m.jsonl", Listener()
    whole = b"".join(json.dumps({"step": step}).encode() + b"\n" for step in range(8))
    path.write_bytes(whole + bytes(12) + b"\n" + b'{"step": 8}\n')
    assert [row["step"] for row in JsonLines(path, 9, listener.log).rows] == [*range(9)]
    assert listener.said == ["line 9 of m.jsonl cannot be read: dropped"]
    assert path.read_bytes() == whole + b'{"step": 8}\n'


def test_a_resume_keeps_earlier_lines_and_drops_later_ones_and_half_a_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(4)) + '{"ste')
    lines = JsonLines(path, 2, Listener().log)
    lines.append([{"step": 2, "loss": float("inf")}])
    assert rows(path) == [{"step": 0}, {"step": 1}, {"step": 2, "loss": None}]
    assert lines.rows == [{"step": 0}, {"step": 1}]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_a_bar_and_the_time_left_and_a_file_plain_lines(
    tmp_path, monkeypatch, capsys, terminal
):
    console = functools.partial(Console, force_terminal=terminal, width=120)
    monkeypatch.setattr("train.logs.report.Console", console)
    vit.main([*TINY, "--steps", "3", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert ("\x1b[" in said) == terminal
    assert ("━━" in said.partition("summary")[0]) == terminal
    assert ("0:00:00" in said) == terminal
    assert ("step 2/3  loss" in said) != terminal
    assert terminal or "(blocks." in said


def test_a_line_on_a_terminal_shows_kappa_or_the_held_out_score(tmp_path, monkeypatch):
    """Both would not fit in 80 columns."""
    lines = []
    monkeypatch.setattr(
        "train.logs.report.Console", functools.partial(Console, force_terminal=True)
    )
    monkeypatch.setattr(
        Progress, "update", lambda *_, description, **_others: lines.append(description)
    )
    vit.main([*TINY, "--steps", "3", "--out", str(tmp_path)])
    assert ["(blocks." in line for line in lines] == [True, True, False]
    assert ["held-out" in line for line in lines] == [False, False, True]


def test_a_line_of_progress_shows_kappa_if_it_was_sampled_since_the_line_before(tmp_path, capsys):
    vit.main([*TINY, "--steps", "8", "--kappa-every", "4", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("step ")]
    shown = [int(line[5]) for line in lines if "κ " in line]
    assert [int(line[5]) for line in lines] == [*range(8)]
    assert shown == [0, 4, 7]
    first = [row for row in rows(tmp_path / "kappa.jsonl") if row["step"] == 0]
    assert lines[0].endswith(range_of_kappa(first))


def test_the_plot_of_a_run_is_written_and_named(tmp_path, capsys):
    vit.main([*TINY, "--steps", "2", "--out", str(tmp_path)])
    assert f"κ of every layer over the steps: {tmp_path / 'kappa.png'}\n" in capsys.readouterr().out
    assert (tmp_path / "kappa.png").read_bytes().startswith(b"\x89PNG")
    vit.main([*TINY, "--steps", "2", "--kappa-every", "0", "--out", str(tmp_path / "none")])
    assert not (tmp_path / "none" / "kappa.png").exists()


def sample(kappa: float | None, layer: str, step: int = 0, reason: str | None = None) -> dict:
    return {"step": step, "layer": layer, "kappa": kappa, "reason": reason}


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], ""),
        ([sample(None, "a", reason="not run")], ""),
        ([sample(12.34, "a")], "κ 12.3–12.3 (a)"),
        ([sample(12.0, "a"), sample(85.2, "b"), sample(40, "c")], "κ 12–85.2 (b)"),
        ([sample(99.0, "a"), sample(2.0, "a", step=9)], "κ 2–2 (a)"),
        ([sample(None, "a", reason="not resolved")], "κ 1 not resolved"),
        ([sample(None, name, reason="not finite") for name in "ab"], "κ 2 not finite"),
        (
            [sample(3.0, "a"), sample(None, "b", reason="not resolved")],
            "κ 3–3 (a), 1 not resolved",
        ),
    ],
)
def test_kappa_of_all_layers_is_one_phrase(samples, expected):
    assert range_of_kappa(samples) == expected
