"""Runs side by side: parameters, memory, throughput, loss, accuracy and κ.

python -m train.compare RUN RUN...
"""

import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leaner_kernels.monitor import layer_means
from leaner_kernels.monitor.rows import newest, read_rows, read_summary
from leaner_kernels.monitor.table import aligned
from leaner_kernels.monitor.command_line import as_path, command
from train.checkpoint.weights import printable
from train.config.flags import Parser, one_line_errors

PROGRAM = "train.compare"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write the page if asked to; see ``--help``."""
    parser = command(PROGRAM, __doc__, Parser)
    parser.add_argument("runs", metavar="RUN", type=as_path, nargs="+", help="folders of runs")
    parser.add_argument("--markdown", action="store_true", help="as a table of Markdown")
    parser.add_argument("--page", type=as_path, metavar="FILE", help="also write curves, as HTML")
    args = parser.parse_args(argv)
    with one_line_errors(PROGRAM):
        names = [run.resolve().name for run in args.runs]
        rows = [
            _row(run) | {"run": name if names.count(name) == 1 else str(run)}
            for run, name in zip(args.runs, names)
        ]
        # A column that no run fills tells nothing.
        titles = [t for t in rows[0] if any(row[t] is not None for row in rows)]
        cells = [titles, *([_text(row[t]) for t in titles] for row in rows)]
        sys.stdout.write((_markdown if args.markdown else aligned)(cells) + "\n")
        if args.page is not None:
            from leaner_kernels.monitor.page import write_page

            try:
                write_page(args.runs, args.page)
            except ImportError as error:
                raise ValueError(str(error)) from None


def _row(run: Path) -> dict[str, Any]:
    """Return what the table shows of a run, None where it is not known."""
    if not run.is_dir():
        raise ValueError(f"no such folder: {run}")
    summary = _summary(run / "summary.json")
    kappa, probe = (_kappa(run / f"{name}.jsonl") for name in ("kappa", "kappa_probe"))
    if not summary and kappa is None:
        raise ValueError(f"{run} is no run: it has neither summary.json nor kappa.jsonl")

    def of(name: str, shown: Callable[[Any], str]) -> str | None:
        value = summary.get(name)
        return shown(value) if isinstance(value, int | float) else None

    unit = summary.get("unit", "items")
    return {
        "run": str(run),
        "parameters": of("params", lambda v: f"{v / 1e6:.3g} M"),
        "steps": of("steps", lambda v: f"{v:,}"),
        "memory": of("peak_memory_bytes", lambda v: f"{v / 2**30:.2f} GiB"),
        "throughput": of("throughput", lambda v: f"{v:,.0f} {unit}/s"),
        "loss": of("held_out_loss", lambda v: f"{v:.4g}"),
        "best loss": of("best_held_out_loss", lambda v: f"{v:.4g}"),
        "perplexity": of("held_out_perplexity", lambda v: f"{v:.4g}"),
        "accuracy": of("held_out_accuracy", lambda v: f"{v:.2%}"),
        "best accuracy": of("best_held_out_accuracy", lambda v: f"{v:.2%}"),
        "test accuracy": of("test_accuracy", lambda v: f"{v:.2%}"),
        "κ": kappa,
        "κ, held out": probe,
    }


def _summary(path: Path) -> dict[str, Any]:
    try:
        return read_summary(path)
    except FileNotFoundError:
        return {}
    except ValueError:
        raise ValueError(f"{path} is no JSON") from None


def _kappa(path: Path) -> str | None:
    """Return the geometric mean over layers of the newest step, None without one."""
    if not path.exists():
        return None
    rows, _ = read_rows(path, step=int, layer=str)
    means = layer_means(newest(rows))
    if not means or means[-1]["geometric_mean"] is None:
        return None
    # With layers past what can be told the mean is a lower bound.
    least = "≥ " if means[-1]["not_resolved"] else ""
    return f"{least}{means[-1]['geometric_mean']:.4g}"


def _text(value: str | None) -> str:
    return "–" if value is None else printable(value)


def _markdown(cells: list[list[str]]) -> str:
    titles, *rows = ([each.replace("|", "\\|") for each in line] for line in cells)
    ruler = ["---", *["---:"] * (len(titles) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, ruler, *rows))


if __name__ == "__main__":
    main()
