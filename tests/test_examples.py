"""The examples run as written on a CPU and print what their README promises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# What a reader looks for in the output of each.
SHOWS = {
    "bert_finetune.py": r"(?ms)'eval_accuracy': '0\.[89].*^step 150:.*\.3\.attention\.self +8x8 ",
    "glue.py": r"(?m)^( +-){3} +\d\d+\.\d( +-){3} +\d\d+\.\d +-  runs/glue/bert, drawn tasks",
    "fast_inference.py": r"(?m)^ +compiled .* \d\.\de-0[5-9]\n +package .* \d\.\de-0[5-9]$",
    "kappa_layer_by_layer.ipynb": r"(?ms), random weights$.*^blocks\.11\.attn +6x64 +197 +\d",
    "monitor_your_model.py": r"(?ms)^step 250: loss 0\.\d.*^step 295:.*^encoder\.layers\.2.*^open ",
    "nanogpt.py": r"(?ms)^step 300: loss [12]\.\d+, κ \d+ \d+ \d+, .* s$.*^def ",
    "qk_clip.py": r"(?m)^ +99 +\d\.\d+ +\d\d\d\.\d +\d\.\d+ +[12]\d\.\d$",
    "timm_drop_in.py": r"(?ms)^training step: \d.*^blocks\.11\.attn +\d.*^undone: <class 'timm\.",
    "train_and_predict.py": r"(?ms)^accuracy [189]\d+\.\d+% of 24 .*^in Python: .* is a circle",
}
# Runs the code cells of a notebook in one namespace, as Jupyter does, for another model where one
# is named, and looks at the rows and the figure that they leave.
NOTEBOOK = """
import json, math, sys

scope = {}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), scope)
        scope["NAME"] = sys.argv[2] if len(sys.argv) > 2 else scope["NAME"]
rows, (axes,) = scope["rows"], scope["figure"].axes
assert all(math.isfinite(row["kappa"]) and row["kappa"] >= 1 for row in rows), rows
kappa, gaussian = axes.lines
assert list(kappa.get_ydata()) == [row["kappa"] for row in rows]
assert list(gaussian.get_ydata()) == [row["kappa_gaussian"] for row in rows]
"""


# Tasks of nyu-mll/glue: columns of text, classes (1: a number), and the sets that are scored.
PAIR = ("sentence1", "sentence2")
GLUE = {
    "mnli": (("premise", "hypothesis"), 3, ("validation_matched", "validation_mismatched")),
    "sst2": (("sentence",), 2, ("validation",)),
    "stsb": (PAIR, 1, ("validation",)),
    "rte": (PAIR, 2, ("validation",)),
    "qnli": (("question", "sentence"), 2, ("validation",)),
    "qqp": (("question1", "question2"), 2, ("validation",)),
    "mrpc": (PAIR, 2, ("validation",)),
    "cola": (("sentence",), 2, ("validation",)),
}


def pretrain_and_write_glue(folder: Path) -> None:
    """Pre-train a BERT for a step, and write tasks whose labels the last word gives away."""
    from datasets import Dataset

    command = [sys.executable, str(EXAMPLES.parent / "train" / "bert.py"), "--out", "run"]
    flags = ["--steps", "1", "--kappa-every", "0"]
    subprocess.run([*command, *flags], cwd=folder, check=True, capture_output=True)
    for task, (columns, classes, judging) in GLUE.items():
        labels = [0.0, 2.5, 5.0] if classes == 1 else [*range(classes)]
        (folder / task).mkdir()
        for split in ("train", *judging):
            chosen = [labels[row % len(labels)] for row in range(24)]
            texts = [
                f"{'a cat sat'[: row % 7]} {'xyz'[labels.index(label)]}"
                for row, label in enumerate(chosen)
            ]
            rows = {"label": chosen, "idx": [*range(24)]} | dict.fromkeys(columns, texts)
            Dataset.from_dict(rows).to_parquet(folder / task / f"{split}-00000-of-00001.parquet")


@pytest.mark.slow
def test_glue_reads_the_columns_and_the_sets_of_every_task(tmp_path):
    pretrain_and_write_glue(tmp_path)
    shown = output(EXAMPLES / "glue.py", ["run", "--glue", ".", "--epochs", "1"], tmp_path)
    header, own, *paper = [line.split() for line in shown.splitlines() if line][-4:]
    assert header == [*GLUE, "glue"]
    scores = [float(cell) for cell in own[:9]]
    assert own[9] == "run"
    assert scores[8] == pytest.approx(sum(scores[:8]) / 8, abs=0.1)
    assert all(-100 <= score <= 100 for score in scores)
    assert [row[9:] for row in paper] == [["paper,", "original"], ["paper,", "lean"]]
    assert {path.parent.name for path in tmp_path.glob("runs/glue/*/kappa.jsonl")} == set(GLUE)


def output(path: Path, arguments: list[str], folder: Path) -> str:
    """Return what an example prints."""
    code = ["-c", NOTEBOOK] if path.suffix == ".ipynb" else []
    environment = {
        **os.environ,
        "PYTHONPATH": str(EXAMPLES.parent),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
        "MPLBACKEND": "Agg",
    }
    command = [sys.executable, *code, str(path), *arguments]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_every_example_is_listed_and_tried():
    found = sorted(path.name for kind in ("*.py", "*.ipynb") for path in EXAMPLES.glob(kind))
    text = (EXAMPLES / "README.md").read_text("utf-8")
    listed = re.findall(r"^\|[^|]+\| \[(\w+\.(?:py|ipynb))\]", text, re.M)
    assert found == sorted(listed) == sorted(SHOWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWS)
def test_an_example_runs_and_shows_what_it_promises(name, tmp_path):
    shown = output(EXAMPLES / name, [], tmp_path)
    assert re.search(SHOWS[name], shown), shown


@pytest.mark.slow
def test_monitoring_an_unstable_model_raises_an_alarm(tmp_path):
    flags = ["--lr", "0.1", "--steps", "30", "--out", "run"]
    shown = output(EXAMPLES / "monitor_your_model.py", flags, tmp_path)
    assert re.search(r"(?m)^ALARM: step \d+: attention of encoder\.layers\.\d\.self_attn", shown), (
        shown
    )


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("bert_finetune", "transformers"),
        ("fast_inference", "timm"),
        ("glue", "datasets"),
        ("monitor_your_model", "matplotlib"),
        ("timm_drop_in", "timm"),
        ("train_and_predict", "safetensors"),
    ],
)
def test_an_example_that_lacks_a_package_says_what_to_install(name, missing):
    path = EXAMPLES / f"{name}.py"
    code = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_path({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(rf"{missing} is missing: pip install [^\n]+\n", done.stderr)
    advice = done.stderr.strip().partition(": ")[2]
    assert f"`{advice}`" in (EXAMPLES / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_the_notebook_takes_a_model_of_transformers(tmp_path):
    shown = output(EXAMPLES / "kappa_layer_by_layer.ipynb", ["gpt2"], tmp_path)
    assert re.search(r"(?ms)^BertModel for gpt2, random weights$.*^encoder\.layer\.3\.", shown), (
        shown
    )


@pytest.mark.parametrize("path", [*EXAMPLES.glob("*.ipynb")], ids=lambda path: path.name)
def test_a_notebook_is_committed_without_outputs(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)
