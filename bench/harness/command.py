"""Shared code of the commands of bench/: their parser, the origin of a result, and its file."""

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import current_flash_attention_impl

from bench.harness import machine
from models.json_rows import json_rows


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m MODULE``, whose help begins with the module's docstring."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m {module}", description=doc, formatter_class=layout)


def need_gpu(module: str) -> None:
    """Exit with one line if there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{module} needs a CUDA GPU, but torch finds none")


def other_attention(module: str) -> str | None:
    """Return a line if kernels of another library are active below PyTorch's attention."""
    if (name := current_flash_attention_impl()) is None:
        return None
    return (
        f"{module} compares with PyTorch's own attention, but {name!r} is active: call "
        "torch.nn.attention.restore_flash_attention_impl() first"
    )


def need_pytorchs_attention(module: str) -> None:
    """Exit with that line if another library is active."""
    if (line := other_attention(module)) is not None:
        raise SystemExit(line)


def origin() -> dict[str, Any]:
    """Return the machine, the commit and the time of a measurement, as results of pytest have."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"machine_info": machine.facts(), "commit_info": machine.commit(), "datetime": now}


def write(path: Path, rows: Iterable[Mapping[str, Any]], name: str = "rows", **head: Any) -> None:
    """Write a result as JSON: its origin, then a line for each row under ``name``."""
    path.write_text(json_rows({**head, name: list(rows)}), "utf-8")


def rounded(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with its floats to six significant digits."""
    return json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.6g}"))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned text; columns in which every cell is a number go to the right."""
    lines = [headers, *rows]
    columns = []
    for number, heading in enumerate(headers):
        cells = [line[number] for line in lines]
        width = max(map(len, cells))
        numeric = all(re.fullmatch(r"[\d,.]*", cell) for cell in cells[1:])
        align = str.rjust if numeric else str.ljust
        columns.append([align(cell, width) for cell in (heading, "-" * width, *cells[1:])])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True)) + "\n"
