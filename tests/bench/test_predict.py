"""Predictions: floors by bytes and units, the model's times, a peer, and the table of all."""

import json

import pandas as pd
import pytest

from bench import predict
from bench.attention.cases import CASES

NAN = float("nan")
CASE = next(case for case in CASES if case.name == "vit_base")


def row(launch="forward", capability=80, case="vit_base", wavefronts=0, **executed):
    return {
        "case": case,
        "launch": launch,
        "capability": capability,
        "programs": 1000,
        "programs_per_sm": 2,
        "executed": executed,
        "wavefronts": wavefronts,
        "predicted": {"A100": [3e-4, "latency"], "H200": [2e-4, "issue"]},
    }


def test_each_limit_is_its_work_over_its_rate():
    work = {"MUFU": 2e5, "FFMA": 1e5, "IMAD": 3e5, "HMMA.16816.F32.BF16": 7e4}
    found = predict.predict("A100", CASE, [row(**work, wavefronts=1e5)])
    assert found["bytes"] == pytest.approx(CASE.bytes("forward") / (0.9 * 2.04e12))
    a_cycle = 1000 / 108 / 1.41e9
    assert found["busy"][0] == pytest.approx(
        {
            "issue": 6.7e5 / 4 * a_cycle,
            "tensor cores": 1000 * 7e4 * 2 * 16 * 8 * 16 / 312e12,
            "multiply-add": 4e5 / 2 * a_cycle,
            "other arithmetic": 0,
            "special functions": 2e5 * 2 * a_cycle,
            "shared memory": 1e5 * a_cycle,
        }
    )
    assert found["floor"] == found["units"] == found["busy"][0]["special functions"]
    assert found["limit"] == "special functions"
    idle = predict.predict("A100", CASE, [row(MUFU=1.0)])
    assert (idle["limit"], idle["floor"]) == ("bytes", idle["bytes"])


def test_hopper_multiplies_slower_without_its_own_instruction():
    found = [
        predict.predict("H200", CASE, [row(capability=90, **{opcode: n})])
        for opcode, n in (("HGMMA.64x64x16.F32.BF16", 4), ("HMMA.16816.F32.BF16", 32))
    ]
    seconds = [each["busy"][0]["tensor cores"] for each in found]
    at_boost = 989e12 * 1.98 / 1.83
    assert seconds[0] == pytest.approx(1000 * 2 * 64 * 64 * 16 / at_boost)
    assert seconds[0] / seconds[1] == pytest.approx(0.62)


def test_launches_follow_each_other():
    rows = [row(MUFU=3e5), row(wavefronts=5e5, MUFU=1) | {"programs_per_sm": 1}]
    found = predict.predict("A100", CASE, rows)
    assert found["units"] == pytest.approx(1000 / 108 * 1.1e6 / 1.41e9)
    assert (found["limit"], found["programs"]) == ("special functions", 1)
    assert found["predicted"] == pytest.approx(6e-4)


def test_what_is_not_understood_is_said_to_be_unknown():
    unknown = row() | {"executed": None}
    found = predict.predict("A100", CASE, [unknown, row(MUFU=1.0)])
    assert found["limit"] == "bytes, units unknown"
    found = predict.predict("A100", CASE, [unknown | {"predicted": {}}, row(MUFU=1.0)])
    assert found["predicted"] is None
    (line,) = predict.frame([found]).to_dict("records")
    assert line["binds"] == "unknown"
    assert [line[name] for name in ("predicted", "units")] == pytest.approx([NAN, NAN], nan_ok=True)
    assert line["bytes"] == pytest.approx(113.4, abs=0.05)


def test_a_frame_has_microseconds_and_the_peer():
    (line,) = predict.frame([predict.predict("A100", CASE, [row(MUFU=1.0)], 6e-4)]).to_dict(
        "records"
    )
    assert (line["gpu"], line["case"], line["stage"]) == ("A100", "vit_base", "forward")
    assert (line["predicted"], line["binds"], line["limit"]) == (
        pytest.approx(300),
        *("latency", "bytes"),
    )
    assert line["floor"] == line["bytes"] == pytest.approx(113.4, abs=0.05)
    assert line["times_peer"] == pytest.approx(2)
    assert len(predict.frame([])) == 0


def test_own_kernels_are_known_by_peer_mode_and_gpu():
    columns = ["peer", "mode", "stage", "case", "on"]
    rows = [
        ("leaner_kernel", "graph", "forward", "vit_base", "NVIDIA H200"),
        ("leaner_varlen", "graph", "backward", "navit", "NVIDIA A100-SXM4-80GB"),
        ("leaner_attention", "graph", "forward", "vit_base", "NVIDIA H200"),  # may call a library
        ("leaner_kernel", "eager", "forward", "vit_base", "NVIDIA H200"),
        ("leaner_kernel", "graph", "both", "vit_base", "NVIDIA H200"),
        ("leaner_kernel", "graph", "forward", "gone", "NVIDIA H200"),
        ("leaner_kernel", "graph", "forward", "vit_base", "NVIDIA L4"),
    ]
    found = predict.own_kernels(pd.DataFrame(rows, columns=columns))
    assert list(found["gpu"]) == ["H200", "A100"]


def test_every_gpu_gets_its_own_rows(tmp_path):
    path = tmp_path / "predictions.json"
    rows = [row(launch, c) for c in (80, 90, 100) for launch in ("forward", "backward")]
    path.write_text(json.dumps({"rows": [*rows, row(case="gone")], "peers": []}))
    found = predict.predictions(path)
    # No GPU has capability 100, and no case is named gone.
    assert [(p["gpu"], p["stage"]) for p in found] == [
        (gpu, direction)
        for gpu in ("H200", "H100", "A100")
        for direction in ("forward", "backward")
    ]


def test_the_committed_table_has_every_case_on_every_gpu():
    found = predict.predictions()
    cases = {case.name: case for case in CASES if case.device == "cuda"}
    for name, of in predict.GPUS.items():
        for direction in ("forward", "backward"):
            rows = {p["case"]: p for p in found if (p["gpu"], p["stage"]) == (name, direction)}
            assert cases.keys() <= rows.keys()
            # No unit is busy for less than the useful work of a case takes it.
            for case, p in rows.items():
                if p["units"] is not None and case in cases:
                    rate = of.flop_per_s * of.boost_hz / of.clock_hz
                    busy = sum(units["tensor cores"] for units in p["busy"])
                    assert busy >= 0.99 * cases[case].flops(direction) / rate, p
                # What a kernel's tensors hold may be a little less than a case counts.
                assert p["predicted"] is None or p["predicted"] >= 0.94 * p["floor"], p
            # FlashAttention 2 stands beside all softmax attention that it computes too, on GPUs
            # whose architecture nobody has measured.
            beside = {case for case, p in rows.items() if p["FlashAttention 2"]}
            if of.capability == 90:
                assert not beside
            else:
                assert beside >= {"vit_base", "vit_large", "bert", "gpt2_64", "gpt2_512"}


def test_the_command_prints_a_table_for_each_gpu(tmp_path, capsys):
    path = tmp_path / "predictions.json"
    rows = [row(launch, c, MUFU=1.0) for c in (80, 86) for launch in ("forward", "backward")]
    path.write_text(json.dumps({"rows": rows, "peers": []}))
    predict.main([str(path)])
    out = capsys.readouterr().out
    assert "A100, µs, predicted:" in out
    assert "RTX A6000, µs, predicted:" in out
    assert out.count("| vit_base | forward ") == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": [{}]}'])
def test_another_file_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="not a table of predictions") as refused:
        predict.predictions(path)
    assert "\n" not in str(refused.value)


def test_a_missing_table_says_how_to_write_it(tmp_path):
    with pytest.raises(SystemExit, match=r"python -m bench\.gpu_model\.predictions"):
        predict.predictions(tmp_path / "nowhere.json")
