"""What no run, data set or model writes ends in one line, or is left out and counted."""

import json
import shutil
import struct
from contextlib import suppress

import pyarrow as pa
import pytest
from pyarrow import parquet

from leaner_kernels.monitor import page
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_vit(tmp_path_factory.mktemp("runs") / "run", "--ckpt-every", "2")


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
    ):
        line = refusal(capsys, main, *words)
        assert line.isprintable(), (main.__module__, line)
