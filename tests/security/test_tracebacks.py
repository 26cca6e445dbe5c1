"""What no run, data set or model writes ends in one line, or is left out and counted."""

import json
import shutil
import struct
from contextlib import suppress

import pyarrow as pa
import pytest
from pyarrow import parquet

from leaner_kernels.monitor import __main__ as monitor
from leaner_kernels.monitor import page, plot
from leaner_kernels.monitor.rows import read_rows, read_summary
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
GOOD = {
    **{"step": 0, "layer": "blocks.0", "kappa": 3.0, "reason": None, "kappa_gaussian": 2.0},
    **{"sigma_max": 1.0, "entropy": 1.0, "max_logit": 1.0, "head_norms": [1.0, 2.0]},
    **{"heads": 2, "head_dim": 8, "tokens": 4, "columns": 4, "rank": 4.0},
}
SUMMARY = {
    **{"params": 100, "steps": 2, "seconds": 1.5, "throughput": 10.0, "unit": "images"},
    **{"peak_memory_bytes": 100, "held_out_accuracy": 0.5, "best_held_out_accuracy": 0.5},
    **{"best_step": 1, "command": "x", "torch": "2", "layers": [1, 2], "mean_joules": 1.0},
    "settings": {"lr": 0.1, "heads": [2, 2]},
}
SIZES = ["--model", "vit_digits", "--heads", "2", "--head-dim", "8", "--depth", "1"]
SIZES += ["--img-size", "16", "--patch-size", "4", "--batch-size", "2", "--steps", "1"]
SIZES += ["--workers", "0", "--eval-every", "0", "--dry-run"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_vit(tmp_path_factory.mktemp("runs") / "run", "--ckpt-every", "2")


def shown(run, out):
    """Show a run in every way there is."""
    page.main([str(run), "--out", str(out / "page.html")])
    rows, _ = read_rows(run / "kappa.jsonl", step=int, layer=str)
    for over in ("steps", "layers") if rows else ():
        plot(rows, out / "o.png", over=over)


@pytest.mark.parametrize("field", [*GOOD, "another"])
def test_rows_of_any_kind_are_shown_or_counted(tmp_path, field):
    run = tmp_path / "run"
    run.mkdir()
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    lines = [json.dumps(GOOD), json.dumps(GOOD | {"step": 1, "layer": "blocks.1"})]
    lines += [json.dumps(GOOD | {field: value}) for value in ODD]
    lines += [json.dumps(GOOD)[:-1] + f', "{field}": {odd}}}' for odd in (LONG, DEEP)]
    (run / "kappa.jsonl").write_text("\n".join([*lines, DEEP, LONG, "[]", "null", "\x1b", ""]))
    (run / "kappa_probe.jsonl").write_bytes((run / "kappa.jsonl").read_bytes())
    metrics = [json.dumps({"step": 0, "loss": 1.0, field: value}) for value in ODD]
    (run / "metrics.jsonl").write_text("\n".join([*metrics, LONG, DEEP, ""]))
    alarms = [json.dumps({"step": 0, "message": "m", "kind": v, field: v}) for v in ODD]
    (run / "alarms.jsonl").write_text("\n".join([*alarms, DEEP, ""]))
    shown(run, tmp_path)
    rows, damaged = read_rows(run / "kappa.jsonl", step=int, layer=str)
    assert len(rows) >= 2
    assert damaged >= 5


@pytest.mark.parametrize("field", [*SUMMARY, "another"])
def test_summaries_of_any_kind_are_shown_as_far_as_they_are_plain(tmp_path, field):
    run = tmp_path / "run"
    run.mkdir()
    # One chart, which no summary changes: drawing takes the time.
    (run / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    for value in [*ODD, [[1]], {"lr": [[1]]}, {"lr": {"a": 1}}]:
        (run / "summary.json").write_text(json.dumps(SUMMARY | {field: value}))
        page.main([str(run), "--out", str(tmp_path / "page.html")])
    (run / "summary.json").write_text(json.dumps(SUMMARY)[:-1] + f', "{field}": {LONG}}}')
    page.main([str(run), "--out", str(tmp_path / "page.html")])
    assert read_summary(run / "summary.json").get("settings") == SUMMARY["settings"] or field


@pytest.mark.parametrize("field", ["skipped", "resumed_at", "bad_samples", "unfinished", "step"])
def test_a_forged_state_of_a_checkpoint_is_one_line(trained, tmp_path, capsys, field):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "summary.json").unlink()
    (checkpoint,) = (run / "checkpoints").glob("step-00000002")
    state = json.loads((checkpoint / "state.json").read_text())
    for value in ["x", -1, {"a": 1}, [{}], [[]], {"step": 0}, {"step": 0, "loss": "x"}]:
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
        (page.main, ["--\x1b[31m", "x"]),
        (monitor.main, [evil, "--data", evil]),
        (monitor.main, ["vit_tiny_patch16_224", "--random-weights", "--data", evil]),
    ):
        line = refusal(capsys, main, *words)
        assert line.isprintable(), (main.__module__, line)
