"""Runs of Weights & Biases that send nothing, and what they keep."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BLOCK, HEADER = 32768, 7
WHOLE, LAST = 1, 4


class FakeRun:
    """As W&B's run: what is logged for a step is merged, and dropped where the step is over."""

    def __init__(self, mode: str = "offline") -> None:
        self.settings = SimpleNamespace(mode=mode)
        self.rows: list[dict[str, Any]] = []
        self.axes: dict[str, str | None] = {}
        self.waits: dict[str, Any] = {}
        self.at, self.lost, self.finished = 0, 0, 0

    @property
    def step(self) -> int:
        if self.settings.mode == "shared":
            raise RuntimeError("the step of a shared run is not known")
        return self.at

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict, step: int | None = None, commit: bool | None = None) -> None:
        if step is not None and step < self.at:
            self.lost += 1
            return
        if step is not None and step > self.at:
            self._end_step()
            self.at = step
        self.waits |= values
        if commit or (commit is None and step is None):
            self._end_step()
            self.at += 1

    def _end_step(self) -> None:
        if self.waits:
            self.rows.append(self.waits)
        self.waits = {}

    def finish(self) -> None:
        self._end_step()
        self.finished += 1


def kept(folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the rows and the axes of metrics that the only finished run below a folder has kept.

    ``finish`` returns shortly before the last record is written.
    """
    deadline = time.monotonic() + 30
    records = list(_records(folder))
    while all(record.WhichOneof("record_type") != "exit" for record in records):
        assert time.monotonic() < deadline, "the run never ended"
        time.sleep(0.05)
        records = list(_records(folder))
    histories = (r.history.item for r in records if r.WhichOneof("record_type") == "history")
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for items in histories
    ]
    metrics = (r.metric for r in records if r.WhichOneof("record_type") == "metric")
    return rows, {m.name or m.glob_name: m.step_metric for m in metrics}


def _records(folder: Path) -> Iterator[Any]:
    """Yield the records of a file in LevelDB's log format: blocks of parts, each with a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.rglob("offline-run-*/*.wandb")
    data, at, part = file.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        # After a checksum of four bytes.
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if at > len(data):
            return
        if kind in (WHOLE, LAST):
            yield Record.FromString(part)
            part = b""
