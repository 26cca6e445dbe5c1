"""The import arrows: who may import whom, read from the syntax trees of every Python file."""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("leaner_kernels", "models", "train", "studies", "bench", "tests")
MAY_IMPORT_LAYERS = {
    "leaner_kernels": {"leaner_kernels"},
    "models": {"models", "leaner_kernels"},
    "train": {"train", "models", "leaner_kernels"},
    "studies": {"studies", "train", "models", "leaner_kernels"},
    "bench": {"bench", "models", "leaner_kernels"},
    "hubconf": {"models", "leaner_kernels"},
    "tests": {*LAYERS, "hubconf"},
}
# Parts of leaner_kernels beside the operators, and the parts that each may import.
MAY_IMPORT_PARTS = {
    "_ops": set(),
    "extras": set(),
    "removed": set(),
    "kappa": {"kappa", "ops._checks"},
    "nn": {"nn", "ops", "kappa", "removed"},
    "alarms": {"alarms", "ops._checks", "removed"},
    "monitor": {"monitor", "alarms", "ops", "kappa", "extras", "removed"},
    "conditioning": {"conditioning", "ops", "kappa", "removed"},
    "activation_checkpointing": {"activation_checkpointing", "ops"},
    "adapters": {"adapters", "monitor", "nn", "ops", "kappa", "extras", "removed"},
}
# Parts of bench, and the parts that each may import; commands (on top, or run by pytest) may all.
MAY_IMPORT_BENCH = {
    "harness": {"harness"},
    "subject": {"subject", "harness"},
    "gpu_model": {"gpu_model", "subject", "harness"},
}
SUBJECTS = "attention", "kappa", "networks"
# Shared files of the operators that stand on other shared files.
MAY_IMPORT_SHARED = {
    "ops._launch_cache": {"ops._checks"},
    "ops._tiles": {"ops._checks", "ops.gpus"},
    "ops.dispatcher": {"ops._checks", "ops._launch_cache"},
    "ops.gpus": set(),
    "ops.route": {
        "ops._checks",
        "ops._launch_cache",
        "ops._tiles",
        "ops.dispatcher",
        "ops.statistics",
    },
    "ops.statistics": set(),
}
LATE = ("triton", "timm", "transformers", "lightning", "matplotlib")
GLUON = "leaner_kernels/ops/_gluon.py"  # gathers the names that kernels in Gluon are written with


@dataclass(frozen=True)
class Import:
    """One imported module as written, where, and whether importing the file runs the import."""

    module: str
    names: tuple[str, ...]
    line: int
    at_import: bool


class _Imports(ast.NodeVisitor):
    def __init__(self, package: list[str]):
        self.package = package
        self.found: list[Import] = []
        self.at_import = True

    def _visit_later(self, node: ast.AST) -> None:
        before, self.at_import = self.at_import, False
        self.generic_visit(node)
        self.at_import = before

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_later  # noqa: N815

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self._visit_later(node)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [Import(a.name, (), node.lineno, self.at_import) for a in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) - node.level + 1] if node.level else []
        module = ".".join([*base, *filter(None, [node.module])])
        names = tuple(alias.name for alias in node.names)
        self.found.append(Import(module, names, node.lineno, self.at_import))


def module_name(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: str, source: str) -> list[Import]:
    visitor = _Imports(list(PurePosixPath(path).parent.parts))
    visitor.visit(ast.parse(source, path))
    return visitor.found


def targets(imported: Import, modules: dict[str, str]) -> list[str]:
    """The modules an import reaches: `from ops import attention` reaches `ops.attention`."""
    inner = [f"{imported.module}.{name}" for name in imported.names]
    return [name for name in inner if name in modules] or [imported.module]


def part(module: str) -> str:
    """The part of leaner_kernels a module belongs to: `ops.attention`, `kappa`, '' for the root."""
    names = module.split(".")[1:]
    return ".".join(names[:2] if names[:1] == ["ops"] else names[:1])


def may_import_part(source: str, target: str) -> bool:
    if source in ("", "ops"):  # these two only gather the public names
        return True
    if target == "_ops":  # the namespace of the operators: it imports torch alone
        return True
    if (source, target) == ("ops.nystrom", "ops.attention"):
        return True  # composed of it
    if source.startswith("ops."):
        if source.startswith("ops._") or source in MAY_IMPORT_SHARED:
            return target == source or target in MAY_IMPORT_SHARED.get(source, ())
        return target == source or target.startswith("ops._") or target in MAY_IMPORT_SHARED
    return not MAY_IMPORT_PARTS[source].isdisjoint({target, target.split(".")[0]})


def bench_part(module: str) -> str:
    """The part of bench a module belongs to."""
    names = module.split(".")[1:] or [""]
    if names[-1].startswith("bench_"):
        return "command"
    folder = "subject" if names[0] in SUBJECTS else names[0]
    return folder if folder in MAY_IMPORT_BENCH else "command"


def may_import_bench(source: str, target: str) -> bool:
    return (
        bench_part(source) == "command"
        or bench_part(target) in MAY_IMPORT_BENCH[bench_part(source)]
    )


def holds_kernels(path: str, source: str) -> bool:
    """Whether a file of the library or the benchmarks defines a function for Triton to compile."""
    decorators = (
        ast.unparse(decorator)
        for node in ast.walk(ast.parse(source, path))
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    )
    if path == GLUON:
        return True
    return path.startswith(("leaner_kernels/", "bench/")) and any(
        decorator.startswith(("triton.jit", "gluon.jit")) for decorator in decorators
    )


def broken_arrows(path: str, kernels: bool, imported: Import, modules: dict[str, str]) -> list[str]:
    """What is wrong with one import of a file (which holds kernels or not), as reasons."""
    source, layer = module_name(path), path.removesuffix(".py").split("/")[0]
    library = imported.module.split(".")[0]
    reasons = []
    for target in targets(imported, modules):
        target_layer = target.split(".")[0]
        allowed = MAY_IMPORT_LAYERS[layer] | ({"train"} if path == "bench/training.py" else set())
        if target_layer in (*LAYERS, "hubconf") and target_layer not in allowed:
            reasons.append(f"{layer} may not import {target_layer}")
        elif layer == target_layer == "bench" and not may_import_bench(source, target):
            reasons.append(f"{source} may not import {target}")
        elif layer == target_layer == "leaner_kernels":
            if not may_import_part(part(source), part(target)):
                reasons.append(f"{source} may not import {target}")
            if kernels and target.split(".")[-1] == "reference":
                reasons.append("kernels may not import their reference")
    folder = "leaner_kernels/adapters"
    adapter = tuple(f"{folder}/{name}" for name in (f"{library}.py", f"{library}_", f"_{library}_"))
    at_home = kernels if library == "triton" else path.startswith(adapter)
    if imported.at_import and library in LATE and not at_home and layer != "tests":
        reasons.append(f"{library} must be imported inside the function that needs it")
    is_reference = layer == "leaner_kernels" and source.endswith(".reference")
    if is_reference and library != "torch" and library not in sys.stdlib_module_names:
        reasons.append(f"a reference imports torch only, not {imported.module}")
    return reasons


def violations(files: dict[str, str]) -> list[str]:
    """Every broken arrow in `files` (path -> source), as `path:line: reason`."""
    modules = {module_name(path): path for path in files}
    found = []
    for path, source in files.items():
        where = part(module_name(path))
        if path.startswith("leaner_kernels/") and where.split(".")[0] not in (
            "",
            "ops",
            *MAY_IMPORT_PARTS,
        ):
            found.append(f"{path}:1: {where} has no place in the layout")
            continue
        kernels = holds_kernels(path, source)
        for imported in imports_of(path, source):
            reasons = broken_arrows(path, kernels, imported, modules)
            found += [f"{path}:{imported.line}: {reason}" for reason in reasons]
    return found


def checkout() -> dict[str, str]:
    paths = [path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")]
    paths += ROOT.glob("*.py")
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(paths)}


def circles(files: dict[str, str]) -> list[list[str]]:
    """Return the modules that import each other, imports inside of functions included."""
    modules = {module_name(path): path for path in files}
    reached: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = (targets(one, modules) for one in imports_of(path, files[path]))
        reached[name] = {target for some in imported for target in some} & modules.keys() - {name}
    for middle in modules:  # all that leads to it leads to what it reaches
        for name in modules:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    circular = [name for name in modules if name in reached[name]]
    alike = {
        name: sorted(other for other in reached[name] if name in reached[other])
        for name in circular
    }
    return sorted(map(list, {tuple(members) for members in alike.values()}))


KERNEL = "\n\n@triton.jit(noinline=True)\ndef f(): pass"


def test_the_checkout_keeps_every_arrow():
    files = checkout()
    assert "leaner_kernels/__init__.py" in files
    assert violations(files) == []


def test_no_modules_import_each_other():
    assert circles(checkout()) == []


def test_a_circle_of_imports_is_reported():
    files = {
        "bench/a.py": "from bench import b",
        "bench/b.py": "def f():\n    from bench.c import g",
        "bench/c.py": "import bench.a",
        "bench/d.py": "import bench.a",
    }
    assert circles(files) == [["bench.a", "bench.b", "bench.c"]]


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("leaner_kernels/nn.py", "import models", "leaner_kernels may not import models"),
        ("models/vit.py", "from train.loop import engine", "models may not import train"),
        ("train/vit.py", "import bench", "train may not import bench"),
        ("hubconf.py", "from train.loop import engine", "hubconf may not import train"),
        ("leaner_kernels/ops/b/__init__.py", "from ..a import f", "may not import leaner_kernels"),
        ("leaner_kernels/ops/statistics.py", "from .a import f", "may not import"),
        ("leaner_kernels/nn.py", "from . import monitor", "may not import leaner_kernels.monitor"),
        ("leaner_kernels/ops/a/kernels.py", "from .reference import f" + KERNEL, "their reference"),
        ("leaner_kernels/ops/a/launch.py", "import triton", "triton must be imported inside"),
        ("leaner_kernels/ops/a/reference.py", "import numpy", "a reference imports torch only"),
        ("leaner_kernels/ops/a/__init__.py", "class A:\n    import triton", "inside"),
        ("leaner_kernels/adapters/timm.py", "import transformers", "transformers must be imported"),
        ("train/a.py", "import matplotlib.figure", "matplotlib must be imported inside"),
        ("bench/harness/a.py", "from bench import catalogue", "may not import bench"),
        ("leaner_kernels/misc.py", "", "misc has no place in the layout"),
    ],
)
def test_a_broken_arrow_is_reported(path, source, reason):
    files = {
        "leaner_kernels/__init__.py": "",
        "leaner_kernels/nn.py": "",
        "leaner_kernels/monitor.py": "",
        "leaner_kernels/ops/__init__.py": "",
        "leaner_kernels/ops/a/__init__.py": "",
        "leaner_kernels/ops/a/kernels.py": "import triton" + KERNEL,
        "leaner_kernels/ops/a/reference.py": "import torch",
        "leaner_kernels/adapters/__init__.py": "",
        "leaner_kernels/adapters/timm.py": "import timm",
        **{path: source},
    }
    found = violations(files)
    assert len(found) == 1
    assert found[0].startswith(("leaner_kernels/", path))
    assert reason in found[0]
