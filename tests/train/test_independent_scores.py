"""Scores of summaries again, by transformers, scikit-learn and scipy, from what runs leave."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.train.glue_files import write_task
from tests.train.published import write_lists
from tests.train.trained import QUICK, bert, gpt, letters, train_text
from train import export, lra
from train.data.longrange.listops import IDS
from train.data.masking import IGNORED, Masked
from train.data.text import Windows, open_text, tokenizers
from train.glue import TASKS

metrics = pytest.importorskip("sklearn.metrics")
stats = pytest.importorskip("scipy.stats")


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def predictions(folder: Path, split: str) -> dict[str, np.ndarray]:
    with (folder / f"predictions_{split}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def test_transformers_has_the_loss_perplexity_and_bits_per_byte_of_a_gpt(tmp_path):
    transformers = pytest.importorskip("transformers")
    run = train_text(gpt, tmp_path, "--no-head-bias", "--steps", 30)
    export.main([str(run), str(tmp_path / "up"), "--format", "transformers", "--last"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "up").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "up")
    documents = letters(tmp_path).read_text().split("\n\n")
    tokens = [
        token for text in documents for token in tokenizer(text + tokenizer.eos_token).input_ids
    ]
    held_out = tokens[int(0.9 * len(tokens)) :]
    size = len(tokenizer.decode(held_out).replace(tokenizer.eos_token, "").encode())
    context = model.config.n_positions
    starts = range(0, len(held_out) - context, context)
    windows = torch.tensor([held_out[start : start + context + 1] for start in starts])
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1).double(), windows[:, 1:].flatten()).item()
    done = summary(run)
    assert done["held_out_loss"] == pytest.approx(loss, rel=1e-5)
    assert done["held_out_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    bits = loss * len(held_out) / size / math.log(2)
    assert done["held_out_bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_scikit_learn_has_the_loss_and_the_accuracy_of_masked_tokens(tmp_path, monkeypatch):
    run = train_text(bert, tmp_path, "--steps", 30)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, info = export.load(run, last=True)
    text = open_text(info.settings["data"], "bytes", specials=tokenizers.BERT)
    about = {"vocab_size": 261, "specials": text.tokenizer.specials, "seed": 0}
    windows = Windows(text.held_out, info.settings["context"])
    items = Masked(windows, rate=info.settings["mask_rate"], **about)
    inputs, targets = items.__getitems__([(0, i) for i in range(len(items))])
    chosen = targets != IGNORED
    with torch.no_grad():
        probabilities = model(inputs)[chosen].double().softmax(1).numpy()
    named = targets[chosen].numpy()
    done = summary(run)
    loss = metrics.log_loss(named, probabilities, labels=range(261))
    assert done["held_out_loss"] == pytest.approx(loss, rel=1e-5)
    right = metrics.accuracy_score(named, probabilities.argmax(1))
    assert done["held_out_accuracy"] == pytest.approx(right)


MEASURES = {
    "accuracy": metrics.accuracy_score,
    "f1": metrics.f1_score,
    "matthews": metrics.matthews_corrcoef,
    "pearson": lambda y, x: stats.pearsonr(y, x)[0],
    "spearman": lambda y, x: stats.spearmanr(y, x)[0],
}


@pytest.mark.slow
def test_scikit_learn_and_scipy_have_the_scores_of_glue(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    pretrained = train_text(bert, tmp_path)
    tasks = {
        "mrpc": ("accuracy", "f1"),
        "cola": ("accuracy", "matthews"),
        "sst2": ("accuracy",),
        "stsb": ("pearson", "spearman"),
        "mnli": ("accuracy",),
    }
    for name in tasks:
        write_task(tmp_path / "glue", name, rows=40)
    tuned = tmp_path / "tuned"
    flags = ["--finetune", "glue", "--glue", tmp_path / "glue", "--checkpoint", pretrained, *QUICK]
    flags += ["--tasks", ",".join(tasks), "--steps", 80, "--lr", 3e-3, "--dropout", 0]
    flags += ["--context", 64, "--batch-size", 16]
    bert.main([str(arg) for arg in [*flags, "--out", tuned]])
    for name, wanted in tasks.items():
        model, info = export.load(tuned / name, last=True)
        special = json.loads(info.tokenizer)["added_tokens"]
        special = {token["content"]: token["id"] for token in special}
        done, kept = summary(tuned / name), predictions(tuned / name, "held_out")
        for part, (split, ending) in enumerate(TASKS[name].held_out):
            table = parquet.read_table(tmp_path / "glue" / name / f"{split}-00000-of-00001.parquet")
            labels, said = table["label"].to_numpy(), []
            for texts in zip(*(table[column].to_pylist() for column in TASKS[name].columns)):
                tokens = [special["[CLS]"]]
                for text in texts:
                    tokens += [*text.encode(), special["[SEP]"]]
                assert len(tokens) <= 64
                with torch.no_grad():
                    logits = model(torch.tensor([tokens]))[0]
                said.append(logits.item() if name == "stsb" else logits.argmax().item())
            mine = kept["part"] == part
            assert kept["label"][mine] == pytest.approx(labels)
            assert kept["prediction"][mine] == pytest.approx(np.array(said), rel=1e-3, abs=1e-4)
            for measure in wanted:
                expected = MEASURES[measure](labels, kept["prediction"][mine])
                assert done[f"held_out_{measure}{ending}"] == pytest.approx(expected, abs=1e-5)
                assert len(set(kept["prediction"][mine])) > 1, f"{name} says the same of all"


def test_scikit_learn_has_the_accuracy_of_lists(tmp_path):
    draw = np.random.default_rng(0)
    rows = [(f"[MAX {a} {b} ]", int(max(a, b))) for a, b in draw.integers(0, 10, (40, 2))]
    write_lists(tmp_path, rows)
    # The last row but 30 is what the tests write; 30 rows are tested.
    lines = (tmp_path / "basic_train.tsv").read_text().splitlines()
    (tmp_path / "basic_test.tsv").write_text("\n".join([lines[0], *lines[9:]]) + "\n")
    flags = ["--task", "listops", "--data", tmp_path, "--length", 16, "--landmarks", 4, *QUICK]
    flags += ["--heads", 2, "--depth", 1, "--head-dim", 8, "--steps", 40, "--lr", 1e-2]
    lra.main([str(arg) for arg in [*flags, "--out", tmp_path / "run"]])
    model, _ = export.load(tmp_path / "run")
    said, labels = [], []
    with (tmp_path / "basic_test.tsv").open() as file:
        for row in csv.DictReader(file, delimiter="\t"):
            ids = [IDS[word] for word in row["Source"].strip("() ").split()]
            tokens = torch.tensor([ids + [0] * (16 - len(ids))])
            with torch.no_grad():
                said.append(model(tokens, torch.tensor([len(ids)]).int())[0].argmax().item())
            labels.append(int(row["Target"]))
    kept, done = predictions(tmp_path / "run", "test"), summary(tmp_path / "run")
    assert kept["prediction"].tolist() == said
    assert kept["label"].tolist() == labels
    assert done["test_accuracy"] == pytest.approx(metrics.accuracy_score(labels, said))
    assert len(set(said)) > 1
