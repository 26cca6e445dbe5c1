"""Identify the kernels that a measurement ran, by a digest of their sources."""

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

NATIVE = ".cu", ".cuh", ".h"
NO_CODE = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE


def kernels(root: Path) -> dict[str, str]:
    """Return a digest of the kernels' sources for each folder of operators, and for csrc.

    A digest covers the folder's device functions, tables of tiles and the constants beside them,
    with those that all operators share. Comments, docstrings, layout and names of files do not
    count, so that a digest changes only where a measurement may.

    Args:
        root: a checkout.
    """
    package = root / "leaner_kernels"
    native = [path for path in (package / "csrc").glob("*") if path.suffix in NATIVE]
    folders: dict[str, list[str]] = {}
    shared: list[str] = []
    for path in (package / "ops").rglob("*.py"):
        folder, *inner = path.relative_to(package / "ops").parts
        sources = list(_device_sources(path.read_text("utf-8")))
        if sources:
            (folders.setdefault(folder, []) if inner else shared).extend(sources)
    digests = {folder: _digest(sources + shared) for folder, sources in sorted(folders.items())}
    return digests | {"csrc": _digest([_cpp_tokens(path.read_text("utf-8")) for path in native])}


def _digest(sources: list[str]) -> str:
    return hashlib.sha256("\0".join(sorted(sources)).encode()).hexdigest()[:16]


def _device_sources(text: str) -> Iterator[str]:
    """Yield the tokens of each device function, table of tiles and constant of a kernel's module.

    Device functions read constants, and tables of tiles are made from them.
    """
    lines, kept, has_kernels = text.splitlines(keepends=True), [], False
    for node in ast.parse(text).body:
        decorators = [*getattr(node, "decorator_list", [])]
        names = " ".join(map(ast.unparse, decorators))
        on_device = "jit" in names or "constexpr_function" in names
        assigned = isinstance(node, ast.Assign | ast.AnnAssign)
        has_kernels |= on_device or (assigned and "Tiles(" in ast.unparse(node))
        if on_device or assigned:
            first = min(line.lineno for line in (node, *decorators))
            kept.append("".join(lines[first - 1 : node.end_lineno]))
    return map(_python_tokens, kept if has_kernels else ())


def _python_tokens(text: str) -> str:
    """Return the tokens of Python source without comments and docstrings."""
    kept: list[str] = []
    statement: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            kept.append(tokenize.tok_name[token.type])
        elif token.type not in NO_CODE:
            statement.append(token.string)
        elif token.type == tokenize.NEWLINE:
            docstring = len(statement) == 1 and statement[0].endswith(('"""', "'''"))
            kept += [] if docstring else statement
            statement = []
    return " ".join(kept)


def _cpp_tokens(text: str) -> str:
    """Return C++ source without comments, with single spaces."""
    return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).split())
