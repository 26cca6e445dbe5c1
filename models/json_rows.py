"""Format JSON with one record a line, for readable diffs of results.

``python -m models.json_rows FILE...`` rewrites files in this format, with the same values.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH = 200  # longest object on one line, in characters


def json_rows(value: Any) -> str:
    """Return a value as JSON text, with a line for each record of a list.

    Args:
        value: an object or a list that ``json.dumps`` takes. A list of numbers or text is one line.
            An object is one line if it is a record of a list, or short; otherwise each of its
            entries begins a line. A value that contains a list of records has a line for each
            record.

    Returns:
        Text that ``json.loads`` reads as the same value, with a line break at its end.
    """
    return _text(value, indent=0) + "\n"


def _text(value: Any, indent: int, record: bool = False) -> str:
    line = json.dumps(value)
    if not value or not isinstance(value, dict | list | tuple):
        return line
    whole = record or not isinstance(value, dict) or len(line) <= WIDTH
    if indent and whole and not _nests(value):
        return line
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_text(item, indent + 1)}" for key, item in value.items()]
        opening, closing = "{}"
    else:
        items = [_text(item, indent + 1, record=True) for item in value]
        opening, closing = "[]"
    inner = ",\n".join(" " * (indent + 1) + item for item in items)
    return f"{opening}\n{inner}\n{' ' * indent}{closing}"


def _nests(value: Any) -> bool:
    """Return whether a value has a list of records inside, or is one."""
    if isinstance(value, list | tuple):
        return any(isinstance(item, dict | list | tuple) for item in value)
    return isinstance(value, dict) and any(map(_nests, value.values()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite JSON files with one record a line; their values stay the same."""
    parser = argparse.ArgumentParser(prog="python -m models.json_rows", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="JSON files to rewrite in place")
    for path in parser.parse_args(arguments).files:
        try:
            value = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            parser.error(f"{path} cannot be read as JSON: {error}")
        path.write_text(json_rows(value), "utf-8")


if __name__ == "__main__":
    main()
