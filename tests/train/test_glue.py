"""GLUE: its files are read as the Hub has them, and its scores are those of the usual packages."""

import random

import numpy as np
import pytest
import tokenizers
import torch
from scipy import stats
from sklearn import metrics as known
from tokenizers import models, pre_tokenizers

from tests.train.glue_files import WORDS, write_task
from train.data.text import Tokenizer
from train.glue import TASKS, open_task, table
from train.glue.metrics import derive, item_loss, item_values
from train.glue.rows import GlueSplit, Sentences, encode

pytest.importorskip("pyarrow", reason="pyarrow is not installed")


KNOWN = {
    "accuracy": known.accuracy_score,
    "f1": known.f1_score,
    "matthews": known.matthews_corrcoef,
    "pearson": lambda truth, said: stats.pearsonr(truth, said).statistic,
}


def words() -> Tokenizer:
    """A tokenizer whose tokens are whole words."""
    names = ["[PAD]", "[CLS]", "[SEP]", *WORDS]
    model = models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="the")
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole.add_special_tokens(names[:3])
    return Tokenizer(whole, "words")


def items(length: int, *columns: list[str]) -> Sentences:
    part = GlueSplit(encode(words(), columns, length)[0], torch.zeros(len(columns[0])))
    return Sentences([part], 0, length)


def keys(data: Sentences) -> list[tuple[int, int]]:
    return [(0, index) for index in range(len(data))]


def means_in_batches(task, logits, labels, parts) -> dict[str, float]:
    """The means of the items' values, of batches in another order, as the loop takes them."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    batches = [item_values(task, logits[i], labels[i], parts[i]) for i in order.split(7)]
    return {
        name: sum(batch[name].sum().item() for batch in batches) / len(labels)
        for name in batches[0]
    }


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_read_from_the_files_of_the_hub(name, tmp_path):
    write_task(tmp_path, name, shards=2)
    task = TASKS[name]
    train, held_out = open_task(str(tmp_path), task, words(), 128)
    splits = len(task.held_out)
    assert (len(train), len(held_out)) == (12, 12 * splits)
    tokens, lengths, labels, parts = held_out.__getitems__(keys(held_out))
    assert labels.dtype == (torch.float32 if name == "stsb" else torch.int64)
    assert lengths.dtype == torch.int32
    assert parts.tolist() == [part for part in range(splits) for _ in range(12)]
    dog = 3 + WORDS.index("dog")
    for item, length, label in zip(tokens.tolist(), lengths.tolist(), labels.tolist()):
        used = item[:length]
        assert (used[0], used[-1]) == (1, 2)
        assert used.count(2) == len(task.columns)
        assert (dog in used) == (label % 2 == 1)
        assert set(item[length:]) <= {0}


def test_a_batch_is_as_wide_as_its_longest_item_rounded_up_and_no_wider_than_allowed():
    data = items(40, ["cat", "cat " * 16, "cat " * 99])
    assert data.__getitems__([(0, 0)])[0].shape == (1, 16)
    assert data.__getitems__([(0, 0), (3, 1)])[0].shape == (2, 32)
    tokens, lengths, *_ = data.__getitems__([(0, 2)])
    assert (tokens.shape, lengths.tolist(), tokens[0, -1].item()) == ((1, 40), [40], 2)
    assert data.mean_length() == round((3 + 18 + 40) / 3)


@pytest.mark.parametrize(("first", "second"), [(2, 3), (2, 50), (50, 2), (50, 60), (9, 8), (0, 30)])
def test_of_a_pair_the_longer_sentence_is_cut_first(first, second):
    item = items(20, ["cat " * first], ["dog " * second]).items[0].tolist()
    kept = [item.count(3 + WORDS.index(word)) for word in ("cat", "dog")]
    expected = [first, second]
    while sum(expected) > 17:
        expected[expected[0] < expected[1]] -= 1
    assert kept[0] + kept[1] == sum(expected)
    assert max(abs(k - e) for k, e in zip(kept, expected)) <= 1
    assert len(item) == sum(kept) + 3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["sst2", "mnli", "qqp", "cola", "stsb"])
def test_scores_are_those_of_scikit_learn_and_scipy(name, seed):
    task, draw = TASKS[name], torch.Generator().manual_seed(seed)
    logits = torch.randn(60, task.classes, generator=draw)
    labels = torch.randint(max(task.classes, 2), (60,), generator=draw)
    parts = torch.arange(60) % len(task.held_out)
    if task.is_regression:
        labels = 5 * torch.rand(60, generator=draw)
    scores = derive(task, means_in_batches(task, logits, labels, parts))
    assert set(task.scores) < scores.keys()
    assert scores["loss"] == pytest.approx(item_loss(task, logits, labels).mean().item())
    for part, (_, ending) in enumerate(task.held_out):
        mine = parts == part
        truth = labels[mine].numpy()
        said = (logits[:, 0] if task.is_regression else logits.argmax(1))[mine].numpy()
        expected = KNOWN[task.metric](truth, said)
        assert scores[task.metric + ending] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("said", [0, 1])
@pytest.mark.parametrize(("name", "truth"), [("cola", [0, 1, 1]), ("mrpc", [0, 1, 1])])
def test_one_class_for_everything_has_no_correlation(name, truth, said):
    task, labels = TASKS[name], torch.tensor(truth * 11)
    logits = torch.zeros(33, 2)
    logits[:, said] = 1.0
    scores = derive(task, means_in_batches(task, logits, labels, torch.zeros_like(labels)))
    expected = 0.0 if name == "cola" or said == 0 else known.f1_score(labels, np.ones(33))
    assert scores[task.metric] == pytest.approx(expected, abs=1e-15)
    assert scores["accuracy"] == pytest.approx((1 / 3, 2 / 3)[said])


def test_the_table_has_the_papers_averages_and_ours_only_when_all_was_run():
    for variant in ("original", "lean"):
        paper = table.printed(variant)
        assert list(paper) == list(table.TITLES)
        tasks = [value for name, value in paper.items() if name != "glue"]
        assert sum(tasks) / 8 == pytest.approx(paper["glue"], abs=0.05)
    draw = random.Random(0)
    measures = {name: {s: draw.random() for s in TASKS[name].scores} for name in TASKS}
    row = table.in_percent(measures)
    both = measures["mnli"]["accuracy"], measures["mnli"]["accuracy_mismatched"]
    assert row["mnli"] == pytest.approx(50 * sum(both))
    assert row["glue"] == pytest.approx(sum(row[name] for name in TASKS) / 8)
    assert both != (row["mnli"] / 100,) * 2
    shown = table.shown(measures, "ours")
    cells = [next(iter(column.cells)) for column in shown.columns]
    assert cells[:3] == [
        "ours",
        "{:.1f}/{:.1f}".format(*(100 * b for b in both)),
        f"{row['sst2']:.1f}",
    ]
    assert cells[-1] == f"{row['glue']:.1f}"
    del measures["rte"]
    assert (table.in_percent(measures)["rte"], table.in_percent(measures)["glue"]) == (None, None)


def test_a_data_set_of_the_hub_is_the_same_as_its_files(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    write_task(tmp_path, "cola")
    # As the README on the Hub lists which files are which.
    splits = "".join(f"  - split: {s}\n    path: cola/{s}-*\n" for s in ("train", "validation"))
    gpu = f"---\nconfigs:\n- config_name: cola\n  data_files:\n{splits}---\n"
    (tmp_path / "README.md").write_text(gpu)
    for hub, files in zip(
        *(open_task(f"{kind}{tmp_path}", TASKS["cola"], words(), 128) for kind in ("hf:", ""))
    ):
        assert len(hub) == len(files) == 12
        for ours, theirs in zip(hub.__getitems__(keys(hub)), files.__getitems__(keys(files))):
            assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="'rte' not found"):
        open_task(f"hf:{tmp_path}", TASKS["rte"], words(), 128)


def test_files_that_are_not_glue_are_refused_in_one_line(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    def opening(name: str):
        return open_task(str(tmp_path), TASKS[name], words(), 128)

    with pytest.raises(ValueError, match=r"--glue must be hf:NAME or a folder with cola/train-"):
        opening("cola")
    write_task(tmp_path, "cola")
    validation = tmp_path / "cola" / "validation-00000-of-00001.parquet"
    test = tmp_path / "cola" / "test-00000-of-00001.parquet"
    test.replace(validation)
    with pytest.raises(ValueError, match=r"must have labels 0 to 1 \(.*\), got -1"):
        opening("cola")
    parquet.write_table(pa.table({"text": ["a"], "label": [1]}), validation)
    with pytest.raises(ValueError, match="must have the column sentence, got text, label"):
        opening("cola")
    parquet.write_table(pa.table({"sentence": [1], "label": [1]}), validation)
    with pytest.raises(ValueError, match="must have text in the column sentence"):
        opening("cola")
    validation.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="which is not readable"):
        opening("cola")
    write_task(tmp_path, "stsb")
    texts = {name: ["a"] for name in ("sentence1", "sentence2", "label")}
    parquet.write_table(pa.table(texts), tmp_path / "stsb" / "train-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=r"must have labels 0 to 5 .* got a"):
        opening("stsb")
    write_task(tmp_path, "stsb", rows=0)
    with pytest.raises(ValueError, match="stsb/train has no rows"):
        opening("stsb")
