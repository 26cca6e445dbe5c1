"""Code that a folder or a repository of the Hub holds is neither run nor asked for."""

import ast
import json
import os
import subprocess
import sys

import pytest
from PIL import Image

from tests.train.launch import ROOT

OWN_CODE = """
from pathlib import Path
Path({canary!r}).touch()
from transformers import BertConfig, BertModel, BertTokenizer, ViTImageProcessor

class C(BertConfig):
    model_type = "unheard_of"

class M(BertModel):
    config_class = C

class T(BertTokenizer):
    pass

class P(ViTImageProcessor):
    pass
"""
BERT = {
    "model_type": "bert",
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 16, "vocab_size": 50, "max_position_embeddings": 32},
}
VIT = {
    "model_type": "vit",
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 16, "image_size": 32, "patch_size": 16},
}


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


@pytest.mark.parametrize(
    ("config", "names", "file"),
    [
        ({"model_type": "unheard_of"}, {"AutoConfig": "own.C", "AutoModel": "own.M"}, "config"),
        (BERT, {"AutoModel": "own.M"}, "config"),
        (BERT, {"AutoTokenizer": ["own.T", None]}, "tokenizer_config"),
        (VIT, {"AutoImageProcessor": "own.P"}, "preprocessor_config"),
    ],
    ids=["config", "model", "tokenizer", "processor"],
)
def test_the_monitors_command_runs_no_code_of_a_folder(tmp_path, config, names, file):
    folder, canary = tmp_path / "model", tmp_path / "canary"
    transformers = pytest.importorskip("transformers")
    if config["model_type"] in transformers.CONFIG_MAPPING:
        known = transformers.AutoConfig.for_model(**config)
        transformers.AutoModel.from_config(known).save_pretrained(folder)
    folder.mkdir(exist_ok=True)
    files = {"config": config} | {file: (config if file == "config" else {}) | {"auto_map": names}}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "own.py").write_text(OWN_CODE.format(canary=str(canary)))
    (tmp_path / "t.txt").write_text("some text")
    Image.new("RGB", (32, 32)).save(tmp_path / "p.png")
    data = [tmp_path / "t.txt", tmp_path / "p.png"]
    command = [sys.executable, "-m", "leaner_kernels.monitor", folder, "--data", *data]
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, input="y\n" * 9, capture_output=True, text=True, env=environment, timeout=120
    )
    assert not canary.exists()
    assert "[y/N]" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    # Where transformers has a class of its own for what the folder names, that is taken.
    assert done.returncode == 0 or done.stderr.splitlines()[-1].startswith("error: ")
