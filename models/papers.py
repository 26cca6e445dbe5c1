"""Every architecture row of the paper as data, and the models that can be built from them.

``python -m models.papers`` lists the rows with the parameter count of each model as built here,
the count audited by hand, and the count the paper prints; ``--json`` gives the same as a JSON
list, with the configuration, the other printed values and the note on misprints; ``--markdown``
the tables of docs/models.md.

Paper: "Leaner Transformers: More Heads, Less Depth" (arXiv:2505.20802).
"""

import argparse
import itertools
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from leaner_kernels import removed
from models.json_rows import json_rows

# The class of each architecture, in the module of its name.
MODELS = {
    "vit": "VisionTransformer",
    "xcit": "XCiT",
    "tnt": "TNT",
    "volo": "VOLO",
    "davit": "DaViT",
    "bert": "BERT",
    "gpt": "GPT",
    "nystromformer": "Nystromformer",
}


def constructor(architecture: str, name: str | None = None) -> Callable[..., Any]:
    """Import an architecture and return its class.

    Args:
        architecture: key of ``MODELS``.
        name: name of another class in its module.
    """
    return getattr(import_module(f"models.{architecture}"), name or MODELS[architecture])


@dataclass(frozen=True)
class PaperRow:
    """One model of the paper.

    Attributes:
        row: name of the table row, e.g. ``"vit_base"``.
        variant: ``"original"``, ``"lean"``, or a point of a figure such as ``"depth8_heads14"``.
        architecture: key of ``MODELS``.
        convention: ``"widen"`` or ``"split"``.
        batch: samples on each GPU of the paper.
        config: arguments of the architecture's constructor.
        audited_params: exact count worked out apart from this code, None for the figures.
        printed: values in the paper: ``params_m`` in 1e6, ``memory_gb``, ``top1`` in percent, ...
        note: where the paper contradicts itself, or empty.
    """

    row: str
    variant: str
    architecture: str
    convention: str
    batch: int
    config: dict[str, Any]
    audited_params: int | None
    printed: dict[str, Any]
    note: str

    @property
    def takes_images(self) -> bool:
        """Whether the model classifies images; the others read tokens."""
        return "image_size" in self.config


def _read_rows(path: Path) -> Iterator[PaperRow]:
    for name, row in tomllib.loads(path.read_text(encoding="utf-8")).items():
        if "grid" in row:
            points = [dict(zip(row["grid"], p)) for p in itertools.product(*row["grid"].values())]
            variants = {
                "_".join(f"{key}{value:g}" for key, value in point.items()): {"config": point}
                for point in points
            }
        else:
            variants = {key: row[key] for key in ("original", "lean")}
        for variant, entry in variants.items():
            yield PaperRow(
                name,
                variant,
                row["architecture"],
                row["convention"],
                row.get("batch", 128),
                row["base"] | entry["config"],
                entry.get("params"),
                entry.get("printed", {}),
                row.get("note", ""),
            )


def _rows_of(name: str) -> dict[tuple[str, str], PaperRow]:
    rows = _read_rows(Path(__file__).with_name(name))
    return {(row.row, row.variant): row for row in rows}


ROWS = _rows_of("rows.toml")
# Models that the paper does not have, beyond a billion parameters.
PRESETS = _rows_of("presets.toml")


def build(row: str, variant: str, **overrides: Any) -> nn.Module:
    """Build one model of the paper with random weights.

    Args:
        row: name of the row, e.g. ``"vit_base"``, ``"figure3"``, or of a preset: ``"vit_1b"``.
        variant: ``"original"`` or ``"lean"``; for figures e.g. ``"depth8_heads14"``.
        **overrides: constructor arguments instead of the row's or besides them, e.g.
            ``num_classes=10`` or ``device="meta"``.

    Returns:
        The model, on the default device unless ``device`` is given.

    Raises:
        ValueError: an unknown row or variant.
    """
    rows = ROWS | PRESETS
    names = dict.fromkeys(r.row for r in rows.values())
    if row not in names:
        raise ValueError(f"row must be one of {', '.join(names)}, got {row!r}")
    if (row, variant) not in rows:
        variants = ", ".join(r.variant for r in rows.values() if r.row == row)
        raise ValueError(f"variant of {row} must be one of {variants}, got {variant!r}")
    entry = rows[row, variant]
    return constructor(entry.architecture)(**entry.config | overrides)


def names() -> dict[str, PaperRow]:
    """Return the rows and presets by the names that ``model`` takes.

    A name is the row and the variant, ``"xcit_medium_lean"``; a table row alone is its original.
    """
    found = {}
    for row in (ROWS | PRESETS).values():
        if row.variant == "original":
            found[row.row] = row
        found[f"{row.row}_{row.variant}"] = row
    return found


def model(name: str, **overrides: Any) -> nn.Module:
    """Build one model of the paper by name, with random weights.

    Args:
        name: ``"xcit_medium_lean"``, ``"figure3_depth8_heads14"``, or a table row alone for its
            original: ``"xcit_medium"``.
        **overrides: as in ``build``.

    Returns:
        The model, as ``build``.

    Raises:
        ValueError: a name that is not in ``names()``.
    """
    models = names()
    if name not in models:
        raise ValueError(f"model must be one of {', '.join(models)}, got {name!r}")
    return build(models[name].row, models[name].variant, **overrides)


def count_params(row: PaperRow) -> int:
    """Return the parameters of the model as built."""
    model = build(row.row, row.variant, device="meta")
    return sum(p.numel() for p in model.parameters())


def record(row: PaperRow) -> dict[str, Any]:
    """Return the listed row, with every count and its origin."""
    return {
        "row": row.row,
        "variant": row.variant,
        "params": count_params(row),
        "audited_params": row.audited_params,
        **{f"printed_{key}": value for key, value in row.printed.items()},
        "convention": row.convention,
        "architecture": row.architecture,
        "config": row.config,
        "note": row.note,
    }


def _cells(r: dict[str, Any]) -> list[str]:
    """Return one line of the list; unknown values are "-"."""

    def sizes(value: int | list[int]) -> str:
        return str(value).strip("[]").replace(" ", "")

    units = "printed_params_m", "printed_params_k"
    config = r["config"]
    printed = [f"{r[key]}{key[-1].upper()}" for key in units if key in r]
    return [
        r["row"],
        r["variant"],
        sizes(config.get("depth") or config["depths"]),
        sizes(config["heads"]),
        r["convention"],
        f"{r['params']:,}",
        "-" if r["audited_params"] is None else f"{r['audited_params']:,}",
        "".join(printed) or "-",
    ]


def markdown(records: list[dict[str, Any]]) -> str:
    """Return the records as a table in Markdown, with their notes below in lines of 120."""
    headings = "row", "variant", "depth", "heads", "convention", "params", "audited", "printed"
    lines = [headings, ["---"] * 5 + ["--:"] * 3, *map(_cells, records)]
    notes = dict.fromkeys(f"- **{r['row']}**: {r['note']}" for r in records if r["note"])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    wrap = partial(textwrap.fill, width=120, subsequent_indent="  ", break_on_hyphens=False)
    return table + "\n\n" + "\n".join(map(wrap, notes)) + "\n"


def main() -> None:
    """Print every row of the paper's tables with its parameters as built, audited and printed."""
    parser = argparse.ArgumentParser(prog="python -m models.papers", description=main.__doc__)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print a JSON list, one row per line")
    output.add_argument(
        "--markdown", action="store_true", help="print the table of docs/models.md, without figures"
    )
    wanted = parser.parse_args()
    records = [record(row) for row in ROWS.values()]
    if wanted.json:
        sys.stdout.write(json_rows(records))
    else:
        listed = [r for r in records if r["audited_params"] is not None or not wanted.markdown]
        sys.stdout.write(markdown(listed))


if not TYPE_CHECKING:  # where it would hide misspelt names
    __getattr__ = partial(removed.attribute, __name__)


if __name__ == "__main__":
    main()
