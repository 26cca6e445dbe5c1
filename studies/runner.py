"""Run a study: every arm with every seed, several processes at once."""

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from tabulate import tabulate

from leaner_kernels.alarms import UNRESOLVED
from models.json_rows import json_rows
from studies.study import Arm, Claim, Scale, Study, judged

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
# Measures of a run, where it has them.
MORE = "validation_loss", "train_loss", "train_flops", "peak_memory_bytes", "cpu_seconds"


def main(study: Study, argv: Sequence[str] | None = None) -> None:
    """Run a study from the command line; see ``--help``."""
    parser = argparse.ArgumentParser(
        prog=study.command or f"python -m studies.{study.name}",
        description=study.question,
        epilog="Arguments after -- are passed to every run, as in: -- --data /data/imagenet",
    )
    smallest = next(iter(study.scales))
    parser.add_argument(
        "--scale",
        choices=list(study.scales),
        default=smallest,
        help=f"size of the runs ({smallest})",
    )
    parser.add_argument("--first-seed", type=int, default=0, help="number added to every seed (0)")
    parser.add_argument("--jobs", type=int, help="number of runs at a time (2; 8 on a GPU)")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the runs; unfinished runs in it continue (a new folder in runs/studies)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the cost of the study, then exit"
    )
    parser.add_argument(
        "--record", action="store_true", help="also write the results to studies/results"
    )
    parser.add_argument("more", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    scale = study.scales[args.scale]
    jobs = scale.jobs if args.jobs is None else args.jobs
    if jobs < 1 or args.first_seed < 0:
        parser.error(
            f"--jobs must be at least 1 and --first-seed at least 0, got {jobs} and "
            f"{args.first_seed}"
        )
    name = _name(study, args.scale, args.first_seed)
    runs = [
        _Run(arm, args.first_seed + arm.first_seed + number)
        for number in range(scale.seeds)
        for arm in scale.arms
    ]
    sys.stdout.write(_cost(study, scale, len(runs), jobs) + "\n")
    if args.dry_run:
        return
    out = (args.out or ROOT / "runs" / "studies" / name).resolve()
    commit = _commit()
    try:
        _take(out, {"flags": [scale.script, *scale.flags, *args.more], "arms": _flags(scale)})
        _train(runs, scale, args.more, out, jobs)
        measured = [run.measures(out) for run in runs]
        claims = study.decide(measured, scale)
    except (ValueError, _FailedError) as error:
        sys.stderr.write(f"{parser.prog}: error: {error}\n")
        raise SystemExit(2) from None
    found = {
        "study": study.name,
        "scale": args.scale,
        "first_seed": args.first_seed,
        "seeds": scale.seeds,
        "commit": commit,
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "jobs": jobs},
        "versions": {"python": platform.python_version(), **measured[0]["versions"]},
        "claims": [asdict(claim) for claim in claims],
        "runs": [{k: v for k, v in run.items() if k != "versions"} for run in measured],
    }
    text = json_rows(found)
    (out / "results.json").write_text(text)
    if args.record:
        (RESULTS / f"{name}.json").write_text(text)
    sys.stdout.write(table(claims) + "\n" + f"written to {out}\n")


def main_of(module: str, option: str, studies: Mapping[str, Study]) -> None:
    """Run one of a module's studies, named by an option of the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m studies.{module}", add_help=False)
    helped = not {"-h", "--help"}.isdisjoint(sys.argv)
    parser.add_argument(option, dest="name", choices=list(studies), required=not helped)
    chosen, others = parser.parse_known_args()
    main(studies[chosen.name or next(iter(studies))], others)


def table(claims: Sequence[Claim], kind: str = "simple", again: Sequence[Claim] = ()) -> str:
    """Return claims, effects and verdicts as a table, next to those of a repetition.

    A claim that was not repeated has empty cells there.
    """
    rows = [(claim.claim, _effect(claim), f"{p:.2g}", v) for claim, p, v in judged(claims)]
    headers = ("claim", "effect, 95% interval", "p", "verdict")
    if again:
        repeated = {claim.claim: (_effect(claim), verdict) for claim, _, verdict in judged(again)}
        rows = [(*row, *repeated.get(row[0], ("", ""))) for row in rows]
        headers += ("again", "verdict")
    return tabulate(rows, headers, kind, disable_numparse=True)


def _effect(claim: Claim) -> str:
    return f"{claim.effect:.3g} [{claim.low:.3g}, {claim.high:.3g}] {claim.unit}"


def recorded(name: str) -> list[dict[str, Any]]:
    """Return the runs of a study whose results are recorded.

    Raises:
        ValueError: there are none.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise ValueError(
            f"this study needs {path.name}: run python -m studies.{name} --record first"
        )
    return json.loads(path.read_text())["runs"]


class _FailedError(Exception):
    """A run that ended without a summary."""


class _Run:
    """One arm with one seed."""

    def __init__(self, arm: Arm, seed: int):
        self.arm, self.seed = arm, seed

    def folder(self, out: Path) -> Path:
        return out / self.arm.name / f"seed-{self.seed}"

    def is_done(self, out: Path) -> bool:
        return (self.folder(out) / "summary.json").exists()

    def command(self, scale: Scale, more: Sequence[str], out: Path) -> list[str]:
        flags = [*scale.flags, *self.arm.flags, *more, "--seed", str(self.seed)]
        script = str(ROOT / scale.script)
        return [sys.executable, script, *flags, "--resume", "auto", "--out", str(self.folder(out))]

    def measures(self, out: Path) -> dict[str, Any]:
        """Return the measures of the run with its arm and seed, in seven digits."""
        summary = json.loads((self.folder(out) / "summary.json").read_text())
        lines = (self.folder(out) / "kappa_probe.jsonl").read_text().splitlines()
        probes: dict[int, list[float | None]] = {}
        for row in map(json.loads, lines):
            probes.setdefault(row["step"], []).append(row["kappa"])
        last = probes[max(probes)]
        found = {
            "arm": self.arm.name,
            "seed": self.seed,
            "kappa": _geometric_mean(last),
            "unresolved": last.count(None),
            "kappa_at_first": _geometric_mean(probes[0]),
            "kappa_of_layers": [k if k is None else _short(k) for k in last],
            "held_out_loss": summary["held_out_loss"],
            "held_out_accuracy": summary.get("held_out_accuracy"),
            "params": summary["params"],
            "seconds": summary["seconds"],
            **{name: summary[name] for name in MORE if name in summary},
            "versions": {"torch": summary["torch"]},
        }
        if "losses" in summary:
            for name in ("losses", "accuracies"):
                found[name] = [_short(value) for value in summary[name]]
            found["kappas"] = [_short(_geometric_mean(of)) for of in probes.values()]
        return {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in found.items()}


def _short(value: float) -> float:
    """Return a value in four digits."""
    return float(f"{value:.4g}")


def _geometric_mean(values: Sequence[float | None]) -> float:
    """Return the geometric mean of kappas; of those that are not resolved the limit counts."""
    logs = [math.log(UNRESOLVED if value is None else value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def _name(study: Study, scale: str, first_seed: int) -> str:
    parts = [study.name, *([scale] if scale != "cpu" else [])]
    return "-".join([*parts, *([f"from-{first_seed}"] if first_seed else [])])


def _cost(study: Study, scale: Scale, runs: int, jobs: int) -> str:
    said = f"{study.name}: {len(scale.arms)} arms x {scale.seeds} seeds = {runs} runs of "
    said += f"{scale.script}, {jobs} at once"
    if scale.seconds is None:
        return f"{said}; none was timed yet"
    minutes = runs * scale.seconds / jobs / 60
    return f"{said}: about {minutes:.0f} minutes, at {scale.seconds:g} s on one core each"


def _flags(scale: Scale) -> dict[str, list[str]]:
    return {arm.name: list(arm.flags) for arm in scale.arms}


def _take(out: Path, plan: dict[str, Any]) -> None:
    """Create the folder of the runs, or check that the runs in it follow the same plan."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "plan.json"
    if path.exists() and json.loads(path.read_text()) != plan:
        raise ValueError(f"{out} holds runs with other flags: give another --out")
    path.write_text(json.dumps(plan, indent=1) + "\n")


def _train(runs: Sequence[_Run], scale: Scale, more: Sequence[str], out: Path, jobs: int) -> None:
    """Run the remaining runs, ``jobs`` at a time; runs stopped by a signal can be resumed."""
    left = [run for run in runs if not run.is_done(out)]
    under_way: set[subprocess.Popen] = set()
    stopped = threading.Event()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def do(run: _Run) -> None:
        if stopped.is_set():
            return
        log = run.folder(out).with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            process = subprocess.Popen(
                run.command(scale, more, out), env=environment, stdout=file, stderr=file
            )
            under_way.add(process)
            process.wait()
            under_way.discard(process)
        if not run.is_done(out) and not stopped.is_set():
            last = log.read_text().strip().splitlines()[-1:]
            raise _FailedError(f"{run.arm.name}, seed {run.seed}: {''.join(last)} (see {log})")

    def stop(number: int, _frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                done = len(runs) - len(left)
                for future in as_completed([pool.submit(do, run) for run in left]):
                    future.result()
                    done += 1
                    sys.stdout.write(f"{done} of {len(runs)} runs\n")
                    sys.stdout.flush()
            except BaseException:
                stopped.set()
                for process in list(under_way):
                    process.terminate()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _commit() -> dict[str, Any]:
    """Return the commit of the run, and whether files differed from it."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"hash": git("rev-parse", "HEAD"), "changed": bool(changed)}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
