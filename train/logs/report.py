"""Write the output of a run: progress, tables, files of JSON lines and a page.

``metrics.jsonl`` has one line per optimizer step, ``kappa.jsonl`` one per layer and sampled step,
``kappa_probe.jsonl`` one per layer and probe of held-out items, ``alarms.jsonl`` one for each
alarm. A line's step counts the updates made before it, so step 0 is the initial model. Only rank 0
prints or writes anything.
"""

import json
import math
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from leaner_kernels.monitor.command_line import UntilUnread, one_line
from leaner_kernels.monitor.page import CHART_POINTS, kappa_or_rank, plot, short_names, write_page
from leaner_kernels.monitor.run_files import (
    KAPPA_ROW,
    METRICS_ROW,
    JsonLines,
    check_own,
    finite,
    read_own,
    read_thinned,
    set_aside,
    write_file,
)
from leaner_kernels.monitor.writers import AXIS, WandbRun
from train.checkpoint.weights import BEST
from train.config.flags import Settings

# The files of a run, besides its checkpoints.
_FILES = (
    *("metrics.jsonl", "kappa.jsonl", "kappa_probe.jsonl", "alarms.jsonl", "summary.json"),
    *("page.html", "kappa.png", "tensorboard", "wandb_id.txt"),
    *("classes.txt", "held_out.txt", "tokenizer.json"),
    *("model.safetensors", "model_ema.safetensors", BEST),
)

# Shares of waiting for data above which the progress line shows it, and gives advice.
_SHOWN, _TOO_MUCH = 0.05, 0.1


class Report:
    """The output of a run.

    Args:
        folder: folder of the run.
        settings: settings of the run.
        is_main_process: False on every rank but the first: then nothing is printed or written.
    """

    def __init__(self, folder: Path, settings: Settings, is_main_process: bool):
        self.folder, self.settings, self.is_main_process = folder, settings, is_main_process
        self.console = Console(quiet=not is_main_process, file=_Stdout())
        if not self.console.is_terminal:
            self.console.width = 100
        self.advised = False
        self.kappa_range = ""  # of the newest sample
        self.kappa: JsonLines | None = None
        self.tensorboard, self.wandb = self._make_tensorboard(), None

    def _make_tensorboard(self) -> Any:
        if not (self.is_main_process and self.settings.tensorboard):
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "--tensorboard needs the package tensorboard: pip install tensorboard"
            ) from None
        return _SafeWriter("TensorBoard's events", SummaryWriter, self.log)

    def _open_wandb(self) -> Any:
        if not self.settings.wandb:
            return None
        try:
            import wandb
        except ImportError:
            raise ValueError("--wandb needs the package wandb: pip install wandb") from None
        try:
            check_own(self.folder / "wandb", folder=True)
            id_file = self.folder / "wandb_id.txt"
            if not id_file.exists():
                write_file(id_file, uuid.uuid4().hex[:8] + "\n")
            run = wandb.init(
                project=self.settings.wandb,
                dir=str(self.folder),
                config=self.settings.as_json(),
                id=read_own(id_file).decode().strip(),
                resume="allow",
            )
        except Exception as error:  # no key, no network, or any other cause
            raise ValueError(f"--wandb failed to start: {' '.join(str(error).split())}") from None
        return _SafeWriter("W&B's numbers", _WandbRun(run), self.log)

    def log(self, line: str) -> None:
        """Show one line."""
        self.console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)

    def plan(self, facts: dict[str, Any]) -> None:
        """Show the plan before the run."""
        table = _facts_table("plan")
        for name, value in facts.items():
            table.add_row(name.replace("_", " "), Text(_shown(value)))
        self.console.print(table)

    def open(self, first: int, *, last_again: bool = False) -> None:
        """Open the logs, and drop their rows from step ``first`` on.

        If a run starts anew, because it was not told to resume or the earlier run has finished, the
        earlier files are renamed.

        Args:
            first: first step of this run.
            last_again: whether the row of the previous step will be written, or written again.
        """
        if not self.is_main_process:
            return
        finished = (self.folder / "summary.json").exists()
        anew = first == 0 and (finished or self.settings.resume == "none")
        if anew and (renamed := set_aside(self.folder, _FILES)):
            self.log(f"files of an earlier run were renamed to {renamed}")
        self.wandb = self._open_wandb()
        metrics = self.folder / "metrics.jsonl"
        self.metrics = JsonLines(metrics, first - last_again, self.log, METRICS_ROW)
        kappa = self.folder / "kappa.jsonl"
        self.kappa = JsonLines(kappa, first, self.log, KAPPA_ROW)
        self.alarms = JsonLines(self.folder / "alarms.jsonl", first, self.log)
        self.logs = [self.metrics, self.kappa, self.alarms]
        if self.tensorboard is not None:
            check_own(self.folder / "tensorboard", folder=True)
            self.tensorboard.open(self.folder / "tensorboard", first)
        probe = self.folder / "kappa_probe.jsonl"
        if self.settings.kappa_probe or probe.exists():
            self.probe = JsonLines(probe, first, self.log, KAPPA_ROW)
            self.logs.append(self.probe)

    def keep(self, files: Mapping[str, str]) -> None:
        """Write files of text, by name, into the run's folder."""
        if self.is_main_process:
            for name, text in files.items():
                write_file(self.folder / name, text.encode("utf-8", "surrogateescape"))

    @contextmanager
    def progress(self, first: int, steps: int, unit: str) -> Iterator[None]:
        """Show the progress from step ``first`` to ``steps``; ``unit`` is the name of items."""
        self.steps, self.unit = steps, unit
        if not self.is_main_process:
            yield
            return
        self.live = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),  # with kappa a line must fit in 80 columns
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.bar = self.live.add_task("training", total=steps, completed=first)
        with self.live:
            yield
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()

    def sampled(self, rows: list[dict[str, Any]]) -> None:
        """Show kappa of a sampled step, whose rows are written already, in the line of progress."""
        if self.is_main_process and rows:
            self.kappa_range = range_of_kappa(rows)

    def probe_rows(self, rows: list[dict[str, Any]]) -> None:
        """Record rows of a probe of held-out items."""
        if self.is_main_process and rows:
            self.probe.append(rows)

    def sync(self) -> None:
        """Flush the lines of all logs to the disk, and TensorBoard's events."""
        if self.is_main_process:
            for log in self.logs:
                log.sync()
            if self.tensorboard is not None:
                self.tensorboard.flush()

    def begin_anew(self) -> None:
        """Remove the summary of a shorter run: a summary marks a finished run."""
        if self.is_main_process:
            with suppress(OSError):
                (self.folder / "summary.json").unlink()

    def alarm(self, rows: list[dict[str, Any]]) -> None:
        """Print and record alarms, each with step, kind and message."""
        if self.is_main_process and rows:
            self.alarms.append(rows)
            for row in rows:
                self.log(row["message"])

    def step(self, row: dict[str, Any], waiting: float = 0.0) -> None:
        """Record an optimizer step; ``waiting`` is the share of time spent waiting for data."""
        if not self.is_main_process:
            return
        self._send(row)
        self.metrics.append([row])
        # A row from a checkpoint has None for values that were not finite.
        loss = math.nan if row["loss"] is None else row["loss"]
        line = f"loss {loss:.3f}  {row['throughput']:,.0f} {self.unit}/s"
        if "tokens_per_second" in row:
            line += f", {row['tokens_per_second']:,.0f} tokens/s"
        if "held_out_accuracy" in row:
            line += f"  held-out accuracy {row['held_out_accuracy']:.1%}"
        elif "held_out_loss" in row:
            line += f"  held-out loss {row['held_out_loss']:.4f}"
        if "held_out_top5" in row:
            line += f", top-5 {row['held_out_top5']:.1%}"
        # On a terminal a line with both would not fit in 80 columns.
        if self.kappa_range and not (self.console.is_terminal and "held_out_loss" in row):
            line += f"  {self.kappa_range}"
        if waiting > _SHOWN:
            line += f"  {waiting:.0%} waiting for data"
        if waiting > _TOO_MUCH and not self.advised:
            self.advised = True
            more = "more --workers or more cores for each rank"
            if self.unit == "images":
                more += " or smaller images"
            self.log(f"{waiting:.0%} of the time is spent waiting for data: {more} may help")
        self.live.update(self.bar, completed=row["step"] + 1, description=line)
        # Without a terminal, print twenty lines in all, and one for each evaluation.
        every = max(1, self.steps // 20)
        if not self.console.is_terminal and (row["step"] % every == 0 or "held_out_loss" in row):
            self.log(f"step {row['step']}/{self.steps}  {line}")
            self.kappa_range = ""  # until it is sampled again

    def _send(self, row: dict[str, Any]) -> None:
        """Send a step's numbers to TensorBoard and W&B."""
        numbers = {k: v for k, v in row.items() if k != "step"}
        if self.tensorboard is not None:
            for name, value in numbers.items():
                if value is not None:
                    self.tensorboard.add_scalar(name, value, row["step"])
            if "held_out_loss" in row:
                self.tensorboard.flush()
        if self.wandb is not None:
            self.wandb.log(row)

    def summarize(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json`` and the page, and show the summary as tables."""
        if not self.is_main_process:
            return
        self.sync()
        rows = self._thinned("kappa.jsonl")
        kappa = [row for row in rows if row["step"] == rows[-1]["step"]]
        table = _facts_table("summary")
        for name, value in summary.items():
            if name == "throughput" and value is not None:
                rate = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
                shown = f"{rate} {summary['unit']}/s"
            elif name.endswith("_bytes"):
                name, shown = name.removesuffix("_bytes"), f"{value / 2**30:.2f} GiB"
            else:
                shown = _shown(value)
            table.add_row(name.replace("_", " "), Text(shown))
        self.console.print(table)
        if kappa:
            self.console.print(_kappa_table(kappa, rows))
        summary = summary | {"kappa": kappa, "settings": self.settings.as_json()}
        if self.settings.kappa_probe:
            probed = self._thinned("kappa_probe.jsonl")
            newest = [row for row in probed if row["step"] == probed[-1]["step"]]
            summary["kappa_probe"] = newest
        try:
            text = json.dumps(finite(summary), indent=1)
            write_file(self.folder / "summary.json", text + "\n")
        except OSError as error:
            self.log(f"summary not written: {error}")
            return
        page = self.draw()
        self.log(f"written to {self.folder}" + (f"; open {page} in a browser" if page else ""))
        if any(row.get("kappa") is not None for row in rows):
            self.draw_kappa(rows)

    def draw(self) -> Path | None:
        """Write the page and return its path; an error is logged and does not fail the run."""
        try:
            write_page([self.folder], self.folder / "page.html")
            return self.folder / "page.html"
        except Exception as error:  # the run is over and its results are written
            self.log(f"page not written: {error}")
        return None

    def draw_kappa(self, rows: list[dict[str, Any]]) -> None:
        """Write the plot of kappa over the steps; an error is logged and does not fail the run."""
        path, picture = self.folder / "kappa.png", BytesIO()
        try:
            plot(rows).savefig(picture, dpi=120, format="png")
            write_file(path, picture.getvalue())
        except Exception as error:  # the run is over and its results are written
            self.log(f"plot not written: {error}")
            return
        self.log(f"κ of every layer over the steps: {path}")

    def _thinned(self, name: str) -> list[dict[str, Any]]:
        """Return the first and the last rows of kappa in a file, and some between."""
        with suppress(OSError):
            return read_thinned(self.folder / name, CHART_POINTS, KAPPA_ROW)[0]
        return []


class _Stdout(UntilUnread):
    """The standard output until it fails; then nothing more is printed, and training goes on."""

    FORGIVEN = OSError

    def __init__(self):
        pass

    @property
    def stream(self) -> TextIO:
        """The current standard output, which a test may have replaced."""
        return sys.stdout


class _SafeWriter:
    """Forward method calls to a writer until one fails; then training continues without it.

    Args:
        name: name of the output, for messages.
        writer: writer of TensorBoard or W&B; a class if ``open`` is to construct it.
        on_failure: called with the message.
    """

    def __init__(self, name: str, writer: Any, on_failure: Callable[[str], None]):
        self.name, self.writer, self.on_failure, self.failed = name, writer, on_failure, False

    def open(self, folder: Path, first: int) -> None:
        """Begin a file of events, which voids events of step ``first`` and later in older files."""
        self.writer = self.writer(str(folder), purge_step=first)

    def __getattr__(self, method: str) -> Callable[..., None]:
        written = getattr(self.writer, method)

        def write(*args: Any, **named: Any) -> None:
            if self.failed:
                return
            try:
                written(*args, **named)
            except Exception as error:  # a full disk, a lost connection, or any other cause
                self.failed = True
                cause = " ".join(f"{type(error).__name__}: {error}".split())
                self.on_failure(f"{self.name} not written, training goes on: {cause}")

        return write


class _WandbRun:
    """A W&B run with rows of steps over the axis "step", and of the monitor over another."""

    def __init__(self, run: Any):
        self.run, self.kappa = run, WandbRun(run)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, Any]) -> None:
        """Log a row of ``metrics.jsonl``, or one with the means and layers of a sampled step."""
        (self.kappa if AXIS in values else self.run).log(values)

    def finish(self) -> None:
        """Finish the run."""
        self.run.finish()


def range_of_kappa(rows: list[dict[str, Any]]) -> str:
    """Return the smallest and largest kappa of the newest step and the layer of the largest.

    Such as ``κ 12–85 (blocks.3), 1 not resolved``. The text is empty if no layer has run.
    """
    rows = [row for row in rows if row["step"] == rows[-1]["step"]]
    kappas = {row["layer"]: row["kappa"] for row in rows if row.get("kappa") is not None}
    reasons = [row.get("reason") for row in rows]
    counts = ((reasons.count(reason), reason) for reason in ("not resolved", "not finite"))
    missing = ", ".join(f"{count} {reason}" for count, reason in counts if count)
    if not kappas:
        return f"κ {missing}" if missing else ""
    least, most = min(kappas.values()), max(kappas.values())
    layer = short_names(rows)[max(kappas, key=lambda layer: kappas[layer])]
    shown = f"κ {least:.3g}–{most:.3g} ({layer})"
    return f"{shown}, {missing}" if missing else shown


def _shown(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return _shown(value[0]) if len(set(value)) == 1 else one_line(", ".join(map(str, value)))
    return one_line(value)


def _facts_table(title: str) -> Table:
    """Return a table of names and values, in which long paths are wrapped, not cut."""
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    return table


def _kappa_table(rows: list[dict[str, Any]], history: list[dict[str, Any]]) -> Table:
    """Return a table of the first and the newest kappa of each layer, and of Gaussian heads."""
    first = {}
    for row in history:
        first.setdefault(row["layer"], row)
    caption = (
        "κ is the largest over the smallest singular value of a layer's head outputs side by side. "
        "Near 1 the outputs spread evenly over all directions. A large κ means that some are "
        "nearly combinations of others."
    )
    if any(row["reason"] == "not resolved" for row in (*rows, *first.values())):
        caption += " Where rounding hides the smallest singular value, the rank is shown instead: "
        caption += "the number of singular values above 1e-6 of the largest."
    table = Table(
        title=f"condition number κ of the concatenated heads at step {rows[0]['step']}",
        caption=caption,
    )
    for name in (
        "layer",
        "tokens x heads·head_dim",
        f"κ at step {history[0]['step']}",
        "κ",
        "κ Gaussian",
        "entropy",
    ):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for row in rows:
        table.add_row(
            row["layer"],
            f"{row['tokens']} x {row['heads']}·{row['head_dim']}",
            *map(kappa_or_rank, (first[row["layer"]], row)),
            "∞" if row["kappa_gaussian"] is None else f"{row['kappa_gaussian']:.4g}",
            "–" if row["entropy"] is None else f"{row['entropy']:.3f}",
        )
    return table
