"""What no run, data set or model writes ends in one line, or is left out and counted."""

import json
import shutil
import struct
import warnings
from contextlib import suppress

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from leaner_kernels.monitor import page
from leaner_kernels.monitor.run_log import RunLog
from tests.security.refusals import refusal
from tests.security.test_pictures import png
from tests.train.launch import TINY, manifest_of
from tests.train.trained import gpt, train_text, train_vit
from train import vit
from train.export import load

DEEP = "[" * 100_000
LONG = "1" + "0" * 5000
ODD = [
    *(0, -1, 1.5, 1e308, -1e308, float("nan"), float("inf"), 2**62, 10**299, True, None, "x"),
    *("", "\x1b[31m", "\ud800", [], [[]], ["x"], [None], {}, {"a": []}),
]
SIZES = ["--model", "vit_digits", "--heads", "2", "--head-dim", "8", "--depth", "1"]
SIZES += ["--img-size", "16", "--patch-size", "4", "--batch-size", "2", "--steps", "1"]
SIZES += ["--workers", "0", "--eval-every", "0", "--dry-run"]


GOOD = {
    **{"step": 0, "layer": "blocks.0", "kappa": 3.0, "reason": None, "kappa_gaussian": 2.0},
    **{"sigma_max": 1.0, "entropy": 1.0, "max_logit": 1.0, "head_norms": [1.0, 2.0]},
    **{"heads": 2, "head_dim": 8, "tokens": 4, "columns": 4, "rank": 4.0},
}
SUMMARY = {
    **{"params": 100, "steps": 2, "seconds": 1.5, "throughput": 10.0, "unit": "images"},
    **{"peak_memory_bytes": 100, "held_out_accuracy": 0.5, "best_held_out_accuracy": 0.5},
    **{"best_step": 1, "command": "x", "torch": "2", "layers": [1, 2], "kappa": []},
    "settings": {"lr": 0.1, "heads": [2, 2]},
}
# JSON that no library writes: nested, with more digits than Python reads, and than a float holds.
HUGE = "1" + "0" * 400
ODD_TEXTS = [DEEP, LONG, HUGE, f"-{HUGE}", "[" * 500 + "]" * 500, *map(json.dumps, ODD)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_vit(tmp_path_factory.mktemp("runs") / "run", "--ckpt-every", "2")


def with_field(row, field, text):
    """Return a row as JSON in which a field has a value that is JSON already."""
    return json.dumps({name: value for name, value in row.items() if name != field})[:-1] + (
        f', "{field}": {text}}}'
    )


@pytest.mark.parametrize("field", [*GOOD, "another"])
def test_rows_of_any_kind_are_shown_or_counted(tmp_path, field):
    runs = [tmp_path / "run", tmp_path / "other"]
    for run in runs:
        run.mkdir()
        lines = [json.dumps(GOOD), json.dumps(GOOD | {"step": 1, "layer": "blocks.1"})]
        lines += [with_field(GOOD, field, odd) for odd in ODD_TEXTS]
        (run / "kappa.jsonl").write_text("\n".join([*lines, DEEP, LONG, "[]", "null", "\x1b", ""]))
        (run / "kappa_probe.jsonl").write_bytes((run / "kappa.jsonl").read_bytes())
        row = {"step": 0, "loss": 1.0}
        lines = [with_field(row, name, odd) for name in (field, "loss", "lr") for odd in ODD_TEXTS]
        (run / "metrics.jsonl").write_text("\n".join([json.dumps(row), *lines, LONG, DEEP, ""]))
        alarm = {"step": 0, "message": "m", "kind": "loss"}
        names = field, "kind", "message"
        lines = [with_field(alarm, name, odd) for name in names for odd in ODD_TEXTS]
        (run / "alarms.jsonl").write_text("\n".join([*lines, DEEP, ""]))
    for shown in (runs[:1], runs):
        page.main([*map(str, shown), "--out", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    assert "damaged lines in kappa.jsonl" in text
    assert "blocks.1" in text


@pytest.mark.parametrize("field", [*SUMMARY, "another"])
def test_summaries_of_any_kind_are_shown_or_called_damaged(tmp_path, field, monkeypatch):
    monkeypatch.setattr(page, "_charts", lambda runs: [])  # they do not show the summary
    (tmp_path / "kappa.jsonl").write_text(json.dumps(GOOD) + "\n")
    for odd in [*ODD_TEXTS, "[[1]]", '{"lr": [[1]]}', '{"lr": {"a": 1}}', f'{{"lr": {HUGE}}}']:
        (tmp_path / "summary.json").write_text(with_field(SUMMARY, field, odd))
        page.main([str(tmp_path)])
    (tmp_path / "summary.json").write_text(with_field(SUMMARY, field, DEEP))
    page.main([str(tmp_path)])
    assert "<th>summary.json</th><td>damaged</td>" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("text", [DEEP, LONG, "", "{", "\x00", "\ud800", "[]", "1", "null"])
def test_a_summary_that_is_none_is_called_damaged(tmp_path, text, monkeypatch):
    monkeypatch.setattr(page, "_charts", lambda runs: [])
    (tmp_path / "kappa.jsonl").write_text(json.dumps(GOOD) + "\n")
    (tmp_path / "summary.json").write_text(text, "utf-8", "surrogatepass")
    page.main([str(tmp_path)])
    assert "<th>summary.json</th><td>damaged</td>" in (tmp_path / "page.html").read_text()


def test_a_nested_summary_says_nothing_of_a_checkpoint(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    for path in run.glob("*.safetensors"):
        path.unlink()
    (run / "summary.json").write_text(DEEP)
    assert load(run)[1].scores == {}


@pytest.mark.parametrize("name", ["metrics.jsonl", "kappa.jsonl", "alarms.jsonl"])
def test_a_resume_drops_rows_of_any_kind(trained, tmp_path, capsys, name):
    lines = [DEEP, LONG, "{}", "[]", '{"step": "x"}', f'{{"step": {HUGE}}}']
    if name == "metrics.jsonl":
        lines += ['{"step": 0}', '{"step": 0, "loss": "x"}', f'{{"step": 0, "loss": {HUGE}}}']
    if name == "kappa.jsonl":
        lines += [with_field(GOOD, "kappa", odd) for odd in ("-1.0", '"x"', "[]", HUGE)]
        lines += [with_field(GOOD, "columns", odd) for odd in ("0", '"x"', "{}", HUGE)]
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "summary.json").unlink()
    (run / name).write_text("\n".join([*lines, (run / name).read_text()]))
    vit.main([*TINY, "--steps", "2", "--ckpt-every", "2", "--out", str(run), "--resume", "auto"])
    said = capsys.readouterr().out
    for line in range(1, len(lines) + 1):
        assert f"line {line} of {name} cannot be read: dropped" in said
    assert (run / "summary.json").exists()


def test_a_callback_goes_on_after_rows_of_any_kind(tmp_path):
    lines = [DEEP, "{}", '{"step": 0}', with_field(GOOD, "columns", '"x"'), json.dumps(GOOD)]
    (tmp_path / "kappa.jsonl").write_text("\n".join([*lines, ""]))
    (tmp_path / "metrics.jsonl").write_text('{"step": "x"}\n{"step": 0, "loss": 1.0}\n')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        RunLog(torch.nn.MultiheadAttention(8, 2), tmp_path, first=1).close()
    assert len((tmp_path / "kappa.jsonl").read_text().splitlines()) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("field", ["skipped", "resumed_at", "bad_samples", "unfinished", "step"])
def test_a_forged_state_of_a_checkpoint_is_one_line(trained, tmp_path, capsys, field):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "summary.json").unlink()
    (checkpoint,) = (run / "checkpoints").glob("step-00000002")
    state = json.loads((checkpoint / "state.json").read_text())
    for value in [
        "x",
        -1,
        {"a": 1},
        [{}],
        [[]],
        {"step": 0},
        {"step": 0, "loss": "x"},
        {"step": 0, "loss": 10**400, "throughput": 1.0},
    ]:
        (checkpoint / "state.json").write_text(json.dumps(state | {field: value}))
        (checkpoint / "manifest.json").unlink()
        (checkpoint / "manifest.json").write_text(json.dumps(manifest_of(checkpoint)))
        line = refusal(capsys, vit.main, *TINY, "--steps", "2", "--out", run, "--resume", "auto")
        assert f"has an invalid {field}, got" in line, line


def pictures(count=8):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": png(8, 8), "path": None} for _ in range(count)]
    return pa.array(rows, type=kind)


@pytest.mark.parametrize(
    "labels",
    [
        *([0.5] * 8, [2**62, *[0] * 7], [2**20, *[0] * 7], ["a", "b"] * 4, [-1, *[0] * 7]),
    ],
    ids=str,
)
def test_labels_are_numbers_of_classes(tmp_path, capsys, labels):
    parquet.write_table(
        pa.table({"image": pictures(), "label": pa.array(labels)}), tmp_path / "train-0.parquet"
    )
    line = refusal(capsys, vit.main, "--data", tmp_path, *SIZES, "--out", tmp_path / "out")
    assert "must have class numbers" in line, line


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.py", "raise SystemExit('ran')"),
        ("README.md", "---\nconfigs:\n- [x\n---\n"),
        ("dataset_dict.json", DEEP),
    ],
)
@pytest.mark.parametrize("where", ["", "hf:"])
def test_files_about_a_data_set_are_one_line_or_unused(tmp_path, capsys, name, content, where):
    root = tmp_path / "data"
    root.mkdir()
    for split in ("train", "test"):
        table = pa.table({"image": pictures(), "label": [0, 1] * 4})
        parquet.write_table(table, root / f"{split}-0.parquet")
    (root / name).write_text(content)
    words = ["--data", f"{where}{root}", *SIZES, "--out", str(tmp_path / "out")]
    with suppress(SystemExit):
        vit.main(words)
        return
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("vit.py: error: --data "), line
    assert "ran" not in line.split()


@pytest.mark.parametrize("name", ["settings", "about", "scores", "step", "tokenizer"])
def test_metadata_of_weights_are_a_value_error_or_unused(tmp_path, name):
    good = train_text(gpt, tmp_path / "gpt") / "model.safetensors"
    raw = good.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8 : 8 + size])
    path = tmp_path / "w.safetensors"
    for value in [DEEP, LONG, "", "[]", "\x1b[31m", *(json.dumps({"family": v}) for v in ODD)]:
        changed = head | {"__metadata__": head["__metadata__"] | {name: value}}
        data = json.dumps(changed).encode()
        path.write_bytes(struct.pack("<Q", len(data)) + data + raw[8 + size :])
        said = ""
        try:
            load(path)
        except ValueError as error:
            said = str(error)
        assert "\x1b" not in said


def test_refusals_quote_no_escape_codes(tmp_path, capsys):
    evil = tmp_path / "\x1b]0;title\x07\x9b31m\n\u202e"
    evil.mkdir()
    (evil / "a").mkdir()
    (evil / "a" / "1.png").write_bytes(b"none")
    for main, words in (
        (vit.main, ["--data", evil, *SIZES, "--out", tmp_path / "out"]),
        (vit.main, ["--\x1b[31m"]),
        (vit.main, ["--pretrained", evil / "x.safetensors", "--dry-run"]),
        (page.main, [evil]),
    ):
        line = refusal(capsys, main, *words)
        assert line.isprintable(), (main.__module__, line)
