"""A checkpoint whose shards do not make up its tensors is refused wherever weights are read."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.train.launch import SHARD, TINY, manifest_of
from tests.train.trained import train_vit
from train import vit
from train.checkpoint.shards import Piece, tiles
from train.export import load

NAME = "model.blocks.0.attn.qkv.weight"
SECOND = "shard-00002-model-00001-of-00001.safetensors"


def chunks(*corners):
    return [Piece(Path(SHARD), offsets, sizes) for offsets, sizes in corners]


@pytest.mark.parametrize(
    "shards",
    [
        [((0, 0), (4, 6))],
        [((2, 0), (2, 6)), ((0, 0), (2, 6))],
        [((0, 0), (1, 6)), ((1, 0), (3, 2)), ((1, 2), (3, 4))],
        [((0, 0), (4, 6)), ((4, 0), (0, 6))],
    ],
)
def test_shards_that_cover_a_tensor_once_are_whole(shards):
    assert tiles((4, 6), chunks(*shards))


@pytest.mark.parametrize(
    "shards",
    [
        [],
        [((0, 0), (4, 5))],
        [((0, 0), (2, 6)), ((3, 0), (1, 6))],
        [((0, 0), (3, 6)), ((2, 0), (2, 6))],
        [((0, 0), (4, 6)), ((0, 0), (4, 6))],
        # As many elements as the tensor, two rows twice and two never.
        [((0, 0), (2, 6)), ((0, 0), (2, 6))],
        [((-1, 0), (5, 6))],
        [((0,), (4,))],
    ],
)
def test_shards_with_a_gap_or_an_overlap_are_not(shards):
    assert not tiles((4, 6), chunks(*shards))


def test_scalars_and_empty_tensors_have_shards_too():
    assert tiles((), chunks(((), ())))
    assert not tiles((), chunks(((), ()), ((), ())))
    assert tiles((0, 3), chunks(((0, 0), (0, 3))))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = train_vit(tmp_path_factory.mktemp("runs") / "run")
    for name in ("summary.json", "model.safetensors", "model_best.safetensors"):
        (out / name).unlink()
    return out


def forge(run, change):
    """Write the tensors of a checkpoint anew, in two files, with a manifest that agrees."""
    folder = run / "checkpoints" / "step-00000002"
    with safe_open(folder / SHARD, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
    files = change(tensors, offsets)
    for name, (content, starts) in files.items():
        about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(starts)}
        save_file(content, folder / name, metadata=about)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest_of(folder)))
    return folder


def with_a_gap(tensors, offsets):
    whole = tensors[NAME]
    return {
        SHARD: (tensors | {NAME: whole[:10].clone()}, offsets),
        SECOND: ({NAME: whole[40:].clone()}, {NAME: {"saved_offsets": [40, 0]}}),
    }


def with_an_overlap(tensors, offsets):
    whole = tensors[NAME]
    return {
        SHARD: (tensors, offsets),
        SECOND: ({NAME: whole[40:].clone()}, {NAME: {"saved_offsets": [40, 0]}}),
    }


def in_two_dtypes(tensors, offsets):
    whole = tensors[NAME]
    return {
        SHARD: (tensors | {NAME: whole[:40].clone()}, offsets),
        SECOND: ({NAME: whole[40:].double()}, {NAME: {"saved_offsets": [40, 0]}}),
    }


def in_another_dtype(tensors, offsets):
    return {SHARD: (tensors | {NAME: tensors[NAME].to(torch.int32)}, offsets)}


def in_another_shape(tensors, offsets):
    return {SHARD: (tensors | {NAME: tensors[NAME][:-1].clone()}, offsets)}


READERS = {
    "resume": lambda run: vit.main([*TINY, "--steps", "4", "--out", str(run), "--resume", "auto"]),
    "load": load,
}


CHANGES = [with_a_gap, with_an_overlap, in_two_dtypes, in_another_dtype, in_another_shape]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("change", CHANGES)
def test_forged_shards_are_refused_and_nothing_is_written(
    trained, tmp_path, capsys, change, reader
):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    forge(run, change)
    before = {path: hashlib.sha256(path.read_bytes()).digest() for path in run.rglob("*.safe*")}
    with pytest.raises((SystemExit, ValueError)) as refused:
        READERS[reader](run)
    shown = str(refused.value) + capsys.readouterr().err
    assert "qkv.weight" in shown
    assert "Traceback" not in shown
    after = {path: hashlib.sha256(path.read_bytes()).digest() for path in run.rglob("*.safe*")}
    assert before == after
