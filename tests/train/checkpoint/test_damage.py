"""What is no manifest; and that no file of the project reads what could run code."""

import ast
import hashlib
import json
import re

import pytest

from tests.train.launch import ROOT, SHARD
from train.checkpoint.checkpoints import find_damage

DIGEST = hashlib.sha256(b"x").hexdigest()
ENTRY = {"bytes": 1, "sha256": DIGEST}
FILES = {"state.json": ENTRY, SHARD: ENTRY}


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        "[" * 100_000,
        {},
        {"files": []},
        {"files": {}},
        *({"files": {k: v for k, v in FILES.items() if k != name}} for name in FILES),
        {"files": FILES | {"../elsewhere": ENTRY}},
        {"files": FILES | {"/etc/passwd": ENTRY}},
        {"files": FILES | {"..": ENTRY}},
        {"files": FILES | {"": ENTRY}},
        {"files": FILES | {"deeper/file": ENTRY}},
        {"files": FILES | {"zero\0": ENTRY}},
        {"files": FILES | {"state.json": [1, DIGEST]}},
        {"files": FILES | {"state.json": {"bytes": "1", "sha256": DIGEST}}},
        {"files": FILES | {"state.json": {"bytes": 1, "sha256": "0"}}},
        {"files": FILES | {"state.json": {"bytes": 1, "sha256": None}}},
        {"files": FILES | {"state.json": {"sha256": DIGEST}}},
    ],
    ids=lambda manifest: str(manifest)[:40],
)
def test_a_manifest_that_no_run_writes_is_damage(tmp_path, manifest):
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    for name in FILES:
        (folder / name).write_text("x")
    (tmp_path / "elsewhere").write_text("x")
    assert find_damage(folder)


def unsafe_calls(tree: ast.AST) -> list[str]:
    """Calls that may run what a file holds, and unpicklers by the name of their class."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(base).endswith("Unpickler") for base in node.bases
        ):
            found.append(node.name)
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "torch", "numpy"):
            found += [f"from {node.module} import load" for n in node.names if "load" in n.name]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if (
            (called == "torch.load" and given.get("weights_only") != "True")
            or called in ("pickle.load", "pickle.loads", "pickle.Unpickler")
            or called.partition(".")[0] in ("dill", "cloudpickle", "joblib", "marshal", "shelve")
            or given.get("allow_pickle", "False") != "False"
            or given.get("weights_only", "True") != "True"
        ):
            found.append(ast.unparse(node))
    return found


def test_no_source_file_reads_what_could_run_code():
    found = {}
    folders = ("leaner_kernels", "models", "train", "bench", "examples")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in (ROOT / "hubconf.py", *files):
        text = path.read_text()
        # What it looks for has one of these in its name; parsing all takes seconds.
        if not re.search("load|pickle|joblib|marshal|shelve", text):
            continue
        if calls := unsafe_calls(ast.parse(text)):
            found[str(path.relative_to(ROOT))] = calls
    assert not found
