"""Studies run, are stopped and go on; what is on the page is what was recorded."""

import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from studies import depth_for_heads, page, runner, stats
from studies.study import Arm, Claim, Scale, Study, judged

# In place of a script of train/: a run that takes a while and leaves what its seed and heads say.
SCRIPT = """
import argparse, json, pathlib, time
parser = argparse.ArgumentParser()
for name in ("heads", "seed", "resume", "out", "wait", "fail"):
    parser.add_argument("--" + name, default="0")
a = parser.parse_args()
if a.fail == a.heads:
    raise SystemExit("script: error: no such model")
out = pathlib.Path(a.out)
out.mkdir(parents=True, exist_ok=True)
with (out.parent.parent / "begun.txt").open("a") as file:
    file.write(f"{a.heads} {a.seed}\\n")
time.sleep(float(a.wait))
kappa = 100 / int(a.heads) + int(a.seed) % 10
rows = [{"step": step, "kappa": kappa * (1 + step)} for step in (0, 0, 6, 6)]
(out / "kappa_probe.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
summary = {"held_out_loss": 1.0, "held_out_accuracy": 0.5, "params": 7, "seconds": 0.1}
summary |= {"losses": [2.0, 1.000049], "accuracies": [0.25, 0.5]}
(out / "summary.json").write_text(json.dumps(summary | {"torch": "2.x"}))
"""
ARMS = tuple(Arm(f"heads-{h}", "heads", h, ("--heads", str(h))) for h in (1, 2, 4))


def decide(runs, scale):
    values = stats.table(runs, [arm.name for arm in scale.arms], "kappa")
    return [Claim("κ falls", float(values[0, 0]), 1.0, 2.0, stats.falls(values), "κ")]


STUDY = Study(
    name="small",
    question="Does it fall?",
    claims="It does.",
    metric="κ.",
    rule="Page.",
    not_shown="Much.",
    scales={"cpu": Scale("train/script.py", ("--resume", "none"), ARMS, seeds=3, seconds=60)},
    decide=decide,
    axes=("heads", "κ"),
)


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "RESULTS", tmp_path)


def begun(out: Path) -> list[str]:
    return sorted((out / "begun.txt").read_text().splitlines())


ALL = sorted(f"{heads} {seed}" for heads in (1, 2, 4) for seed in (0, 1, 2))


def test_every_arm_runs_with_every_seed_and_the_results_are_recorded(tmp_path, capsys):
    out = tmp_path / "out"
    runner.main(STUDY, ["--out", str(out), "--record"])
    assert begun(out) == ALL
    found = json.loads((tmp_path / "small.json").read_text())
    assert found == json.loads((out / "results.json").read_text())
    one = next(run for run in found["runs"] if (run["arm"], run["seed"]) == ("heads-2", 1))
    assert one["kappa"] == pytest.approx(51 * 7)
    assert one["kappa_at_first"] == pytest.approx(51)
    assert one["kappas"] == [51, 357]
    assert (one["losses"], one["accuracies"]) == ([2.0, 1.0], [0.25, 0.5])
    assert len(found["runs"]) == 9
    said = capsys.readouterr().out
    assert "3 arms x 3 seeds = 9 runs of train/script.py, 2 at once: about 4 minutes" in said
    assert "holds" in said
    assert runner.recorded("small") == found["runs"]


def test_other_seeds_are_recorded_beside(tmp_path):
    runner.main(STUDY, ["--out", str(tmp_path / "out"), "--record", "--first-seed", "100"])
    found = json.loads((tmp_path / "small-from-100.json").read_text())
    assert sorted({run["seed"] for run in found["runs"]}) == [100, 101, 102]


def test_a_dry_run_shows_the_cost_alone(tmp_path, capsys):
    runner.main(STUDY, ["--out", str(tmp_path / "out"), "--dry-run"])
    assert "9 runs" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_study_that_is_stopped_goes_on_to_the_same_results(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    runner.main(STUDY, ["--out", str(whole)])
    code = (
        "import pathlib, sys; sys.path.insert(0, '.'); from studies import runner; "
        "from tests.studies.test_runner import STUDY; "
        f"runner.ROOT = pathlib.Path({str(tmp_path)!r}); "
        f"runner.main(STUDY, ['--out', {str(cut)!r}, '--', '--wait', '0.2'])"
    )
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while "1 of 9" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not (cut / "results.json").exists()
    before = len(begun(cut))
    assert before < 9
    done = len(list(cut.glob("*/*/summary.json")))
    runner.main(STUDY, ["--out", str(cut), "--", "--wait", "0.2"])
    assert len(begun(cut)) == before + 9 - done
    first, second = (json.loads((out / "results.json").read_text()) for out in (whole, cut))
    assert first["runs"] == second["runs"]
    assert first["claims"] == second["claims"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--", "--fail", "2"],
            r"heads-2, seed 0: script: error: no such model \(see .*seed-0.log",
        ),
        (["--", "--wait", "0"], "holds runs with other flags: give another --out"),
        (["--jobs", "0"], "--jobs must be at least 1"),
    ],
)
def test_what_goes_wrong_is_one_line(tmp_path, capsys, more, message):
    out = str(tmp_path / "out")
    if "--wait" in more:
        runner.main(STUDY, ["--out", out])
    with pytest.raises(SystemExit, match="2"):
        runner.main(STUDY, ["--out", out, *more])
    assert re.search(message, capsys.readouterr().err)


def test_a_study_that_reads_another_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"run python -m studies.kappa_of_old --record first"):
        runner.recorded("kappa_of_old")


def test_the_page_is_what_the_results_say(monkeypatch):
    monkeypatch.undo()
    assert page.PAGE.read_text(encoding="utf-8") == page.text()


def test_an_arm_that_is_not_flat_is_named(tmp_path, monkeypatch):
    task, arms = "python-to-the-end", ("original", "lean")
    monkeypatch.setattr(depth_for_heads, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    rates = depth_for_heads.SETTINGS[task].rates
    tried = [
        {"arm": f"{arm}-lr-{rate}", "held_out_loss": float(rate), "losses": [1.0] * 21}
        for arm in arms
        for rate in rates
    ]
    path = tmp_path / "depth_for_heads_python-to-the-end-rates.json"
    path.write_text(json.dumps({"runs": tried}))
    flat, falling = [3.0] + [1.0] * 20, [3.0] * 17 + [2.9, 2.9, 2.9, 2.8]
    accuracies = [0.5] * 21
    runs = [
        {"arm": arm, "seed": seed, "losses": flat, "accuracies": accuracies}
        for arm in arms
        for seed in (0, 1)
    ]
    assert "Both arms are at the end of their training." in page.converged(task, {"runs": runs})
    runs[3]["losses"] = falling
    said = page.converged(task, {"runs": runs})
    assert "lean had not reached the end of training; all other arms had." in said
    row = next(line for line in said.splitlines() if line.startswith("| lean"))
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        *(f"{float(rate):.4f}" for rate in rates),
        rates[0],
        "0.0, 6.7",
        "3.33",
    ]
    assert "For original and lean, the rate taken is the lowest" in said
    assert "This was 0.0% to 6.7% in a run, and 0.0% at the median. 1 of 4 runs" in said
    leads = [float(line.split("|")[2].split("[")[0]) for line in said.splitlines()[-3:]]
    assert "| seeds from 0" in said
    # After 80% of the steps, after all of them, and at the lowest loss.
    assert leads == pytest.approx([-100 * math.log(loss) / 2 for loss in (3.0, 2.8, 2.8)], abs=0.01)
    tried[0]["losses"] = falling
    path.write_text(json.dumps({"runs": tried}))
    said = page.converged(task, {"runs": runs})
    assert "For lean, the rate taken is the lowest" in said
    assert "original had a lower loss at 1.5e-3, in a run that was not flat." in said
    assert "| original | 0.0015* " in said


def test_a_repetition_of_one_claim_stands_beside_that_claim():
    first, second = (Claim(name, 1.0, 0.5, 2.0, 0.01, "points") for name in ("one", "two"))
    again = Claim("two", 3.0, -1.0, 4.0, 0.2, "points")
    rows = [
        line.split("|") for line in runner.table([first, second], "github", [again]).split("\n")
    ]
    assert [cell.strip() for cell in rows[2][-3:-1]] == ["", ""]
    assert [cell.strip() for cell in rows[3][-3:-1]] == ["3 [-1, 4] points", "undecided"]


RECORDED = [study for study in page.STUDIES if page.read(study.name)]


@pytest.mark.parametrize("study", RECORDED, ids=lambda study: study.name)
def test_recorded_claims_follow_from_the_recorded_runs(monkeypatch, study):
    monkeypatch.undo()
    found = page.read(study.name)
    again = study.decide(found["runs"], study.scales[found["scale"]])
    recorded = [Claim(**claim) for claim in found["claims"]]
    for one, other in zip(again, recorded, strict=True):
        assert one.claim == other.claim
        for field in ("effect", "low", "high", "p"):
            assert getattr(one, field) == pytest.approx(getattr(other, field), rel=1e-6, abs=1e-9)
    assert [v for *_, v in judged(again)] == [v for *_, v in judged(recorded)]
    plan = {(arm.name, arm.first_seed + n) for arm in study.scales["cpu"].arms for n in range(99)}
    assert {(run["arm"], run["seed"]) for run in found["runs"]} <= plan
    assert page.figure_of(study).exists()
