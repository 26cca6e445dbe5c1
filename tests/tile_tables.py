"""The tile tables of all kernels, by name."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from leaner_kernels.ops import _gluon, _tiles
from leaner_kernels.ops._tiles import Tiles

PACKAGE = Path(_tiles.__file__).parent


def tables() -> Iterator[tuple[str, Tiles]]:
    """Yield the operator and each table of every kernel, found by its file."""
    for path in sorted(PACKAGE.glob("*/**/*.py")):
        if "Tiles(" not in path.read_text("utf-8") or path.name == "__init__.py":
            continue
        inside = path.relative_to(PACKAGE).with_suffix("")
        if not _gluon.AVAILABLE and re.match("hopper|ampere|warp", path.stem):
            continue
        module = import_module(f"leaner_kernels.ops.{'.'.join(inside.parts)}")
        for value in vars(module).values():
            if isinstance(value, Tiles):
                yield inside.parts[0], value


TABLES = {tiles.name: (operator, tiles) for operator, tiles in tables()}
