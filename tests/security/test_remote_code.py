"""Code that a folder or a repository of the Hub holds is neither run nor asked for."""

import ast

from tests.train.launch import ROOT


def unsafe_calls(tree: ast.AST) -> list[str]:
    """Calls that may run what a file holds, or do not refuse remote code, and unpicklers."""
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
        asks = called.rpartition(".")[2] in ("from_pretrained", "pipeline")
        if (
            (called == "torch.load" and given.get("weights_only") != "True")
            or called in ("pickle.load", "pickle.loads", "pickle.Unpickler")
            or called.partition(".")[0] in ("dill", "cloudpickle", "joblib", "marshal", "shelve")
            or given.get("allow_pickle", "False") != "False"
            or given.get("weights_only", "True") != "True"
            or given.get("trust_remote_code", "None" if asks else "False") != "False"
        ):
            found.append(ast.unparse(node))
    return found


def test_no_source_file_loads_without_refusing_remote_code():
    found = {}
    folders = ("leaner_kernels", "models", "train", "bench", "examples")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in (ROOT / "hubconf.py", *files):
        if calls := unsafe_calls(ast.parse(path.read_text())):
            found[str(path.relative_to(ROOT))] = calls
    assert found == {}
