"""Predictions: tiles counted by hand, the limit that binds, and what is left out."""

import json

import pytest
import torch

from bench import predict
from bench.cases import CASES, Case
from bench.vision_cases import VISION_CASES

CASE = Case("small", "cuda", 2, 3, 100, 64, torch.bfloat16)
RESIDENT = {"BLOCK_M": 64, "BLOCK_D": 64, "SEGMENTS": [[0, 64], [64, 32], [96, 16]]}
RESIDENT_BACKWARD = {"BLOCK_N": 128, "BLOCK_D": 64, "SEGMENTS": [[0, 64], [64, 32], [96, 16]]}
GROUPED = {"HEADS": 4, "ROWS": 128, "COLS": 128, "BLOCK_D": 64}
ONLINE = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_D": 64}


def row(launch="forward", tiles=RESIDENT, capability=80, case="vit_base", **instructions):
    return {
        "case": case,
        "launch": launch,
        "capability": capability,
        "tiles": tiles,
        "programs_per_sm": 2,
        "instructions": {"total": 1, **instructions},
    }


@pytest.mark.parametrize(
    ("tiles", "causal", "expected"),
    [
        (RESIDENT, False, 2 * 3 * 128 * 112),
        (RESIDENT, True, 2 * 3 * 128 * 112),  # a whole row of scores, whatever is hidden
        (RESIDENT_BACKWARD, False, 2 * 3 * 112 * 128),
        (GROUPED, True, 8 * 128 * 128),
        (ONLINE, False, 2 * 3 * 128 * 128),
        (ONLINE, True, 2 * 3 * 64 * (64 + 128)),
    ],
)
def test_scores_of_whole_tiles_are_counted(tiles, causal, expected):
    case = Case("small", "cuda", 2, 3, 100, 64, torch.bfloat16, causal=causal)
    assert predict.tile_scores(case, tiles) == expected


def test_bytes_bind_the_operators_of_vision_models():
    xcit = VISION_CASES[0]
    found = predict.predict("H200", xcit, row(tiles={"BLOCK_N": 64}, capability=90))
    assert found.limit == "bytes"
    # 4 tensors of 128 * 196 * 512 bfloat16, at nine tenths of 4.8 TB/s.
    assert found.seconds == pytest.approx(102.8e6 / 4.32e12, rel=1e-3)
    assert found.matrix == pytest.approx(3.288e9 / (0.8 * 0.6 * 989e12), rel=1e-3)


def test_sequences_are_cut_one_by_one():
    case = Case("ragged", "cuda", 3, 2, 100, 64, torch.bfloat16, lengths=(1, 100, 70))
    blocks = 1 * 1 + 2 * 4 + 2 * 3  # of 64 rows, of 32 keys
    assert predict.tile_scores(case, ONLINE) == 2 * 64 * 32 * blocks


def test_crossed_tiles_have_few_rows():
    case = Case("class", "cuda", 2, 3, 100, 64, torch.bfloat16, queries=1)
    assert predict.tile_scores(case, RESIDENT | {"BLOCK_M": 16}) == 2 * 3 * 16 * 112


def test_each_limit_is_its_work_over_its_rate():
    found = predict.predict("A100", CASE, row())
    scores = 2 * 3 * 128 * 112
    assert found.bytes == pytest.approx(CASE.bytes("forward") / (0.9 * 2.04e12))
    assert found.matrix == pytest.approx(4 * scores * 64 / (0.8 * 312e12))
    assert found.exp == pytest.approx(scores / (16 * 108 * 1.41e9))
    assert found.seconds == max(found.bytes, found.matrix, found.exp)
    assert found.limit == "bytes"


def test_a_backward_without_whole_rows_reads_and_computes_more():
    whole, cut, grouped, online = (
        predict.predict("A100", CASE, row("backward", tiles))
        for tiles in (RESIDENT_BACKWARD, RESIDENT_BACKWARD | {"BLOCK_N": 64}, GROUPED, ONLINE)
    )
    for found in (whole, cut):
        assert found.matrix == pytest.approx(10 * 2 * 3 * 128 * 112 * 64 / (0.8 * 312e12))
    assert online.matrix == pytest.approx(14 * 2 * 3 * 128 * 128 * 64 / (0.8 * 312e12))
    assert online.exp == pytest.approx(2 * 2 * 3 * 128 * 128 / (16 * 108 * 1.41e9))
    for found in (whole, grouped):
        assert found.bytes == pytest.approx(CASE.bytes("backward") / (0.9 * 2.04e12))
    output = 2 * 3 * 100 * (64 * 2 + 4)
    for found in (cut, online):
        assert (found.bytes - whole.bytes) * 0.9 * 2.04e12 == pytest.approx(output)


def test_hopper_without_its_own_instruction_multiplies_slower():
    slow, fast = (
        predict.predict("H200", CASE, row(capability=90, **found)).matrix
        for found in ({}, {"HGMMA": 4})
    )
    assert slow / fast == pytest.approx(1 / 0.6)


def test_every_card_gets_its_own_rows(tmp_path):
    path = tmp_path / "resources.json"
    rows = [row(launch, capability=c) for c in (80, 90, 100) for launch in ("forward", "capture")]
    path.write_text(json.dumps({"versions": {}, "rows": rows}))
    found = predict.predictions(path)
    # No capture, and no card of capability 100.
    assert [(p.card, p.direction) for p in found] == [
        *(("H200", "forward"), ("H100", "forward"), ("A100", "forward"))
    ]
    assert {p.case.name for p in found} == {"vit_base"}


def test_a_prediction_is_never_below_the_roof_of_useful_work():
    for case in CASES:
        if case.device == "cuda":
            tiles = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 128}
            for launch in ("forward", "backward"):
                found = predict.predict("A100", case, row(launch, tiles))
                assert found.bytes >= case.bytes(launch) / 2.04e12
                assert found.matrix >= case.flops(launch) / 312e12
                assert found.exp >= case.exps(launch) / (16 * 108 * 1.41e9)


def test_the_command_prints_a_table_for_each_card(tmp_path, capsys):
    path = tmp_path / "resources.json"
    launches = "forward", "backward"
    rows = [row(launch, ONLINE, c) for c in (80, 86) for launch in launches]
    path.write_text(json.dumps({"versions": {}, "rows": rows}))
    predict.main([str(path)])
    out = capsys.readouterr().out
    assert "A100, µs, predicted:" in out
    assert "RTX A6000, µs, predicted:" in out
    assert out.count("| vit_base | ") == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": [{}]}'])
def test_another_file_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="not a table of resources") as refused:
        predict.predictions(path)
    assert "\n" not in str(refused.value)


def test_a_missing_table_says_how_to_write_it(tmp_path):
    with pytest.raises(SystemExit, match=r"python -m bench.resources --write"):
        predict.predictions(tmp_path / "nowhere.json")
