"""The layout of the kernels hub: loads under any name, beside the installed package."""

import ast
import base64
import hashlib
import importlib.util
import inspect
import json
import pkgutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import leaner_kernels

ROOT = Path(__file__).resolve().parent.parent
# What the hub's rules let a layer have beside nn.Module's own members.
LAYER_MEMBERS = {"can_torch_compile", "has_backward"}
REGISTERS = {"custom_op", "triton_op", "register_kernel", "register_fake", "register_vmap"}


def load(name: str, path: Path) -> ModuleType:
    """Import a file the way the hub's loader does: under a name that no path leads to."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load("torch_ext_make", ROOT / "torch-ext/make.py")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "out"
    make.make(folder)
    return folder


@pytest.fixture(scope="module")
def build(project: Path) -> Path:
    return project / "build/torch-cpu"


@pytest.fixture(scope="module")
def kernel(build: Path) -> ModuleType:
    return load(json.loads((build / "metadata.json").read_text())["id"], build / "__init__.py")


def test_the_project_has_what_kernel_builder_reads(project):
    general = tomllib.loads((project / "build.toml").read_text())["general"]
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (general["name"], general["license"]) == (shipped["name"], shipped["license"])
    assert (project / "torch-ext/leaner_kernels/__init__.py").exists()
    # kernel-builder writes this one itself.
    assert not (project / "torch-ext/leaner_kernels/_ops.py").exists()
    builds = {path.name for path in (project / "build").iterdir()}
    assert builds == {f"torch-{backend}" for backend in general["backends"]}


def test_a_build_is_named_by_what_it_holds(project):
    digests, names = [], []
    for build in (project / "build").iterdir():
        metadata = json.loads((build / "metadata.json").read_text())
        assert build.name == f"torch-{metadata['backend']['type']}"
        found = {
            path.relative_to(build).as_posix(): base64.b64encode(
                hashlib.sha256(path.read_bytes()).digest()
            ).decode()
            for path in build.rglob("*")
            if path.is_file() and path.name != "metadata.json" and path.suffix != ".pyc"
        }
        assert metadata["digest"] == {"algorithm": "sha256", "files": found}
        assert metadata["id"].isidentifier()
        names.append(metadata["id"])
        digests.append({k: v for k, v in found.items() if k != "_ops.py"})
    assert len(set(names)) == 2
    assert digests[0] == digests[1]


def test_every_module_loads_under_the_name_of_the_build(kernel):
    pytest.importorskip("triton")
    before = {name for name in sys.modules if name.split(".")[0] == "leaner_kernels"}
    modules = [m.name for m in pkgutil.walk_packages(kernel.__path__, f"{kernel.__name__}.")]
    for name in modules:
        importlib.import_module(name)
    assert len(modules) > 50
    assert {n for n in sys.modules if n.split(".")[0] == "leaner_kernels"} == before


def test_only_adapters_of_other_libraries_stay_behind(build):
    shipped = {path.relative_to(build).as_posix() for path in build.rglob("*.py")}
    library = ROOT / "leaner_kernels"
    ours = {path.relative_to(library).as_posix() for path in library.rglob("*.py")}
    missing = {path for path in ours - shipped if not path.startswith("adapters/")}
    assert missing == set()
    assert shipped - ours == {"layers.py"}


def test_attention_is_the_installed_one_with_operators_of_its_own(kernel):
    results = []
    for module in (leaner_kernels, kernel):
        torch.manual_seed(0)
        query, key, value = (torch.randn(2, 3, 9, 8, requires_grad=True) for _ in range(3))
        stats = module.attention_with_stats(query, key, value, is_causal=True)
        stats.out.square().sum().backward()
        results.append((*stats, query.grad, key.grad, value.grad))
    for installed, loaded in zip(*results, strict=True):
        assert installed is loaded is None or torch.equal(installed, loaded)
    assert torch.ops.leaner_kernels.attention_with_stats.default.name() != (
        getattr(torch.ops, kernel.__name__).attention_with_stats.default.name()
    )


def test_every_copy_registers_with_what_is_imported_later(kernel, tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    called = []
    for name in ("leaner_kernels", kernel.__name__):
        imports = importlib.import_module(f"{name}.ops._imports")
        imports.after_import("imported_later", lambda name=name: called.append(name))
    importlib.import_module("imported_later")
    assert sorted(called) == sorted(["leaner_kernels", kernel.__name__])


def test_every_operator_is_registered_in_the_namespace_of_the_build(build):
    registered = 0
    for path in build.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in REGISTERS:
                registered += 1
                assert ast.unparse(node.args[0]).startswith("add_op_namespace_prefix("), path
    assert registered >= 2  # fakes in ``ops.dispatcher``, vmap in ``ops.transforms``


def test_layers_hold_nothing_but_a_forward(kernel):
    assert "layers" in kernel.__all__
    classes = [c for _, c in inspect.getmembers(kernel.layers, inspect.isclass)]
    layers = [c for c in classes if c.__module__ == kernel.layers.__name__]
    assert {c.__name__ for c in layers} == {"ScaledDotProductAttention", "SelfAttention"}
    for layer in layers:
        assert layer.__init__ is nn.Module.__init__
        assert set(dir(layer)) - set(dir(nn.Module)) <= LAYER_MEMBERS


def test_a_layer_attends_with_what_the_adopting_class_holds(kernel):
    adopting = nn.Module()
    adopting.qkv, adopting.proj, adopting.num_heads = nn.Linear(12, 24), nn.Linear(8, 5), 2
    x = torch.randn(2, 7, 12)
    query, key, value = adopting.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    heads = kernel.layers.ScaledDotProductAttention()(query, key, value)
    exact = nn.functional.scaled_dot_product_attention(query, key, value)
    assert torch.equal(heads, exact)
    out = kernel.layers.SelfAttention.forward(adopting, x)
    assert torch.equal(out, adopting.proj(exact.transpose(1, 2).flatten(2)))


def outside_names(tree: ast.Module) -> set[str]:
    """The packages that a module imports without a dot, now or later."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found


def strings(tree: ast.Module) -> list[str]:
    """The strings of a module, docstrings apart."""
    nodes = list(ast.walk(tree))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [n for n in nodes if isinstance(n, ast.Constant) and id(n) not in docs]
    return [node.value for node in constants if isinstance(node.value, str)]


def test_no_file_of_a_build_needs_the_installed_package_or_its_operators(build):
    paths = sorted(build.rglob("*.py"))
    assert len(paths) > 50
    for path in paths:
        tree = ast.parse(path.read_text("utf-8"))
        assert "leaner_kernels" not in outside_names(tree), path
        attributes = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        assert "torch.ops.leaner_kernels" not in attributes, path
        used = [text for text in strings(tree) if text.split("::")[0] == "leaner_kernels"]
        assert used == [], path


def test_no_file_of_a_build_imports_more_than_torch_and_triton_when_it_is_imported(build):
    admitted = {*sys.stdlib_module_names, "torch", "triton"}
    for path in build.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
            node.body = [ast.Pass()]
        for node in [n for n in ast.walk(tree) if isinstance(n, ast.If)]:
            if ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = [ast.Pass()]
        assert outside_names(tree) <= admitted, path


def test_a_folder_with_files_is_refused(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match="OUT must be a new or empty folder, got"):
        make.make(tmp_path)
