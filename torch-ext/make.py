"""Write the package in the layout of the Hugging Face kernels hub.

    python torch-ext/make.py build/hub

The folder is a project for ``kernel-builder`` (``build.toml``, ``flake.nix``, ``torch-ext/``), and
under ``build/`` holds what kernel-builder would make of it, ready for
``kernels.get_local_kernel(Path("build/hub"))`` or an upload: there is nothing to compile.

The hub loads a kernel under a name of its own choice, several versions of it in one process. So
imports become relative, and operators go into a namespace that names the build. Modules that import
anything but the standard library, torch and Triton when they are imported stay behind, and so does
the native library of ``kappa``, which the hub would need for every platform.
"""

import argparse
import ast
import base64
import hashlib
import itertools
import json
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "leaner_kernels"
NAME = PACKAGE.name
ADMITTED = {*sys.stdlib_module_names, "torch", "triton", NAME}

# What kernel-builder writes too, with its own identifier.
OPS = '''"""The namespace of this build's operators."""

import torch

_OPS_NAME = "{id}"

ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    """Return the operator's full name."""
    return f"{{_OPS_NAME}}::{{op_name}}"
'''
EXPORT_LAYERS = '\nfrom . import layers\n\n__all__ += ["layers"]\n'


def imported_at_once(tree: ast.Module) -> set[str]:
    """The libraries that importing a module imports."""
    pending: list[ast.AST] = [tree]
    found = set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)
    return found


class Rewriting(ast.NodeVisitor):
    """Collects the edits of one module: (first byte, end, new text), by line."""

    def __init__(self, source: str, depth: int):
        self.source, self.dots = source, "." * (depth + 1)
        self.lines = source.split("\n")
        self.starts = [0, *itertools.accumulate(len(line) + 1 for line in self.lines)]
        self.edits: list[tuple[int, int, str]] = []
        self.needed: set[str] = set()
        tree = ast.parse(source)
        self.visit(tree)
        imports = (node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
        self.first_import = next(imports, None)

    def offset(self, line: int, column: int) -> int:
        """Where a position of the syntax tree, whose columns are bytes, is in the source."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def replace(self, node: ast.expr | ast.stmt, old: str, new: str) -> None:
        """Replace the first ``old`` of a node's text, and the whole text where they are equal."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.offset(node.lineno, node.col_offset)
        end = self.offset(node.end_lineno, node.end_col_offset)
        text = self.source[start:end]
        if old not in text:
            raise ValueError(f"line {node.lineno}: cannot be rewritten for the hub: {text}")
        self.edits.append((start, end, text.replace(old, new, 1)))

    def prefix(self, node: ast.expr) -> None:
        """Give an operator's full name, literal or formatted, the namespace of the build."""
        self.needed.add("add_op_namespace_prefix")
        self.replace(node, f"{NAME}::", "")
        start, end, text = self.edits.pop()
        self.edits.append((start, end, f"add_op_namespace_prefix({text})"))

    def visit_Expr(self, node: ast.Expr) -> None:
        """Leave docstrings as they are."""
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Make ``from leaner_kernels.a import b`` relative."""
        if node.level == 0 and node.module and node.module.split(".")[0] == NAME:
            inner = node.module.removeprefix(NAME).removeprefix(".")
            self.replace(node, f"from {node.module} ", f"from {self.dots}{inner} ")

    def visit_Import(self, node: ast.Import) -> None:
        """Refuse ``import leaner_kernels``: it has no relative form."""
        if any(alias.name.split(".")[0] == NAME for alias in node.names):
            raise ValueError(f"line {node.lineno}: the hub needs 'from {NAME} import ...'")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Send ``torch.ops.leaner_kernels`` to the namespace of the build."""
        if ast.unparse(node) == f"torch.ops.{NAME}":
            self.needed.add("ops as ops_of_this_build")
            self.replace(node, f"torch.ops.{NAME}", "ops_of_this_build")
        else:
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Rewrite ``f"leaner_kernels::{name}"``."""
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and str(first.value).startswith(f"{NAME}::"):
            self.prefix(node)
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Rewrite ``"leaner_kernels::attention"`` and the namespace on its own."""
        if isinstance(node.value, str) and node.value.startswith(f"{NAME}::"):
            self.prefix(node)
        elif node.value == NAME:
            self.needed.add("add_op_namespace_prefix")
            self.replace(node, f'"{NAME}"', 'add_op_namespace_prefix("").removesuffix("::")')

    def result(self) -> str:
        """The module as the hub takes it."""
        if self.needed and self.first_import:
            start = self.offset(self.first_import.lineno, 0)
            names = ", ".join(sorted(self.needed))
            self.edits.append((start, start, f"from {self.dots}_ops import {names}\n"))
        text = self.source
        for start, end, new in sorted(self.edits, reverse=True):
            text = text[:start] + new + text[end:]
        return text


def rewritten() -> dict[str, str]:
    """Every file that the hub gets, by its path in the package."""
    files = {"layers.py": (ROOT / "torch-ext/layers.py").read_text("utf-8")}
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.toml")]):
        name, text = path.relative_to(PACKAGE).as_posix(), path.read_text("utf-8")
        if path.suffix == ".py":
            if not imported_at_once(ast.parse(text)) <= ADMITTED:
                continue
            try:
                text = Rewriting(text, name.count("/")).result()
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        files[name] = text
    files["__init__.py"] += EXPORT_LAYERS
    return files


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files under a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def digest(files: dict[str, str]) -> dict[str, object]:
    """The hub's digest of a build: base64 of SHA-256 of each file."""
    hashes = {
        name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for name, text in sorted(files.items())
    }
    return {"algorithm": "sha256", "files": hashes}


def make(folder: Path) -> None:
    """Write the project and its builds.

    Args:
        folder: is made; must be empty if it exists.

    Raises:
        ValueError: the folder holds something, or a module has no form for the hub.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"OUT must be a new or empty folder, got {folder}")
    files = rewritten()
    write(folder / "torch-ext" / NAME, files)
    for path in (ROOT / "build.toml", ROOT / "torch-ext/flake.nix", ROOT / "LICENSE"):
        shutil.copy(path, folder)
    general = tomllib.loads((ROOT / "build.toml").read_text("utf-8"))["general"]
    unique = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:10]
    for backend in general["backends"]:
        identifier = f"_{NAME}_{backend}_{unique}"
        build = {**files, "_ops.py": OPS.format(id=identifier)}
        metadata = {
            "name": general["name"],
            "id": identifier,
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
            "digest": digest(build),
        }
        build["metadata.json"] = json.dumps(metadata, indent=2) + "\n"
        write(folder / f"build/torch-{backend}", build)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the layout of the kernels hub.")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    make(parser.parse_args().out)
