"""The report: measured rows only, losses and absences shown, ratios right."""

import copy
import json
import re
from pathlib import Path

import pytest

from bench import report
from bench.attention.cases import CASES
from bench.predict import Prediction

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {
    "device": "cuda",
    "batch": 128,
    "heads": 16,
    "rows": 197,
    "tokens": 197,
    "head_dim": 64,
    "dtype": "bfloat16",
    "causal": False,
    "padded": False,
    "lengths": [],
}
INFO = {
    "versions": {"torch": "2.11.0", "driver": "580.1", "flash-attn": None},
    "cpu": {"model": "A processor", "cores": 8, "torch_threads": 4},
    "gpu": {
        "name": "A GPU",
        "count": 1,
        "compute_capability": "9.0",
        "memory_bytes": 2**37,
        "power_limit_watts": 700,
        "clocks_mhz": {"sm": 1980},
    },
}


def row(peer, median, direction="forward", mode="graph", case="vit_base", **extra):
    info = {
        "case": case,
        "peer": peer,
        "ours": peer.startswith("leaner"),
        "direction": direction,
        "mode": mode,
        "copy_fraction": 0.655,
        "matrix_fraction": 0.125,
        "bytes": 2e8,
        "flops": 2e10,
        "tflop_per_s": 2e-2 / median,
        "copy_gb_per_s": 4000.0,
        "matrix_tflop_per_s": 700.0,
        **extra,
    }
    return {"extra_info": info, "stats": {"median": median, "iqr": median / 10}}


def memory(peer, own, case="vit_base", peak=3 * 2**20):
    info = {
        "case": case,
        "peer": peer,
        "ours": peer.startswith("leaner"),
        "kept_bytes": {"inputs": 600, "out": 200, "own": own},
        "tokens": 10,
        "peak_memory_bytes": peak,
    }
    return {"extra_info": info, "stats": {"median": 1.0, "iqr": 0.0}}


RESULT = {
    "machine_info": INFO,
    "commit_info": {"id": "0123456789abcdef", "dirty": False, "source": "feed"},
    "datetime": "2026-01-02T00:00:00",
    "cases": {"vit_base": SHAPE, "cpu_vit": {**SHAPE, "device": "cpu", "causal": True}},
    "benchmarks": [
        row("sdpa", 200e-6),
        row("leaner_attention", 80e-6),
        row("leaner_stats", 250e-6),
        row("sdpa_cudnn", 100e-6),
        row("sdpa", 300e-6, "both", "eager", kernels=["flash_fwd", "flash_bwd"]),
        row("leaner_attention", 1.5e-3, "both", joules=0.0125),
        memory("sdpa", 640),
        memory("leaner_attention", 0),
    ],
    "unmeasured": [
        {"case": "vit_base", "peer": "xformers", "status": "absent", "reason": "not there"},
        {"case": "vit_base", "peer": "eager", "status": "wrong", "reason": "off by 3"},
    ],
}


@pytest.fixture
def write(tmp_path):
    def write(name="gpu.json", **changes):
        path = tmp_path / name
        path.write_text(json.dumps(copy.deepcopy(RESULT) | changes))
        return path

    return write


def test_ratios_compare_with_the_default_and_the_best_peer(write):
    page = report.page([report.load(write())], {}, [])
    rows = re.findall(r"^\| (\S+) \| ([\d.,]+) .*\| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    assert (
        "| vit_base | forward, graph | leaner_attention | 80.0 | 66% | 2.50 | 1.25 sdpa_cudnn |"
        in page
    )
    assert rows[:4] == [
        ("**leaner_attention**", "80.0", "2.50", "1.25"),
        ("sdpa_cudnn", "100", "2.00", "1.00"),
        ("sdpa", "200", "1.00", "0.50"),
        ("**leaner_stats**", "250", "0.80", "0.40"),  # a loss stays
    ]
    assert "| **leaner_attention** | 80.0 | 8.00 | 66% | 12% | 2.50 | 1.25 |" in page
    assert "| **leaner_attention** | 1,500 | 150 | 66% | 12% | – | – | 12.5 |" in page
    assert "### vit_base (128·16·197·64 bfloat16), forward, graph" in page
    assert "- sdpa (vit_base): `flash_fwd`, `flash_bwd`" in page


def test_what_was_not_measured_is_listed(write):
    page = report.page([report.load(write())], {}, [])
    assert "- xformers, absent (vit_base): not there" in page
    assert "- eager, wrong (vit_base): off by 3" in page


def test_a_page_names_the_commit_and_the_hardware(write):
    page = report.page([report.load(write())], {}, [])
    assert "0123456789ab, source feed" in page
    assert "1 GPU, 128 GiB, power limit 700 W, sm clock 1980 MHz" in page
    assert "torch 2.11.0, driver 580.1." in page
    dirty = RESULT["commit_info"] | {"dirty": True}
    assert "0123456789ab with changes" in report.page(
        [report.load(write(commit_info=dirty))], {}, []
    )


def test_only_a_page_without_gpu_rows_says_so(write):
    on_cpu = row("sdpa", 1e-3, mode="wall", case="cpu_vit")
    both = report.load(write(benchmarks=[*RESULT["benchmarks"], on_cpu]))
    assert "No GPU run" not in report.page([both], {}, [])
    run = report.load(write(machine_info=INFO | {"gpu": None}, benchmarks=[on_cpu]))
    page = report.page([run], {}, [])
    assert "No GPU run is committed yet" in page
    assert "## CPU: A processor" in page
    assert "causal), forward, wall" in page
    assert "xformers" not in page  # it is absent from a case of another machine


def test_memory_is_shown_for_each_token_the_least_first(write):
    page = report.page([report.load(write())], {}, [])
    heading = "#### vit_base (128·16·197·64 bfloat16), memory"
    table = page.split(heading)[1].split("###")[0].strip().splitlines()
    assert table == [
        "|  | kept | output | inputs | peak |",
        "|---|---:|---:|---:|---:|",
        "| **leaner_attention** | 0 | 20 | 60 | 3 |",
        "| sdpa | 64 | 20 | 60 | 3 |",
    ]
    old = write(
        "old.json", datetime="2025-01-01", benchmarks=[memory("sdpa", 1), memory("flex", 2)]
    )
    rows = report.newest([report.load(write()), report.load(old)], "memory")
    assert {row.peer: row.own for row in rows} == {"sdpa": 64, "flex": 0.2, "leaner_attention": 0}


def test_shapes_say_what_is_crossed_or_of_different_lengths():
    assert report.shape(SHAPE) == "128·16·197·64 bfloat16"
    assert report.shape(SHAPE | {"rows": 1}) == "128·16·1×197·64 bfloat16"
    ragged = SHAPE | {"lengths": [49, 197, 60], "causal": True}
    assert report.shape(ragged) == "128·16·49…197·64 bfloat16 causal"


def test_padded_inputs_are_the_baseline_where_lengths_differ(write):
    rows = [row("sdpa_padded", 2e-4), row("leaner_varlen", 1e-4)]
    assert "| **leaner_varlen** | 100 | 10.0 | 66% | 12% | 2.00 | 2.00 |" in report.page(
        [report.load(write(benchmarks=rows))], {}, []
    )


def predicted(gpu):
    units = ({"issue": 7e-5, "shared memory": 1e-5},)
    return Prediction(gpu, CASES[0], "forward", 5e-5, units, 2, (9e-5,), ("latency",))


def test_predictions_stand_apart_beside_what_was_measured(write):
    pytest.importorskip("tabulate", reason="tables need tabulate")
    info = copy.deepcopy(INFO)
    info["gpu"]["name"] = "NVIDIA H200"
    rows = [predicted("H200"), predicted("A100")]
    page = report.page([report.load(write(machine_info=info))], {}, rows)
    measured, apart = page.split("## Predicted, not measured")
    assert "predicted" not in measured.replace("predicted from", "")
    (with_a_run, without) = (
        [cell.strip() for cell in line.split("|")[3:9]]
        for line in apart.splitlines()
        if line.startswith("| vit_base")
    )
    assert with_a_run == ["80.0", "90.0", "latency", "50.0", "70.0", "2"]
    assert without == ["", "90.0", "latency", "50.0", "70.0", "2"]
    assert apart.index("bench/gpu.sh OUTDIR") < apart.index("### H200")
    assert "**Nothing below was measured**" in apart
    assert "## Predicted" not in report.page([report.load(write())], {}, [])


def test_without_arguments_the_page_of_the_repository_is_written(write, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    results = tmp_path / "bench/results"
    results.mkdir(parents=True)
    write().rename(results / "2026-01-02-GPU.json")
    (results / "resources.json").write_text("{}")  # no result of a benchmark
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "PAGE", tmp_path / "results.md")
    report.main(["--predictions", str(tmp_path / "nowhere.json")])
    page = (tmp_path / "results.md").read_text("utf-8")
    assert "Written by `python -m bench.report` from 2026-01-02-GPU.json." in page


def test_the_newest_of_several_files_wins(write):
    old = write("old.json", datetime="2025-01-01", benchmarks=[row("sdpa", 1.0), row("flex", 2.0)])
    rows = report.newest([report.load(write("new.json")), report.load(old)], "attention")
    medians = {row.peer: row.median for row in rows if row.direction == "forward"}
    assert medians["sdpa"] == 200e-6
    assert medians["flex"] == 2.0


def test_the_short_form_shows_our_fastest_and_what_is_wrong(write):
    lines = report.short([report.load(write())]).splitlines()
    assert lines[1].split() == [
        *("vit_base", "forward", "graph", "leaner_attention", "80.0", "66%", "2.50", "1.25"),
        "sdpa_cudnn",
    ]
    assert lines[-1] == "WRONG: vit_base eager: off by 3"


def test_the_short_form_holds_our_fastest_against_the_model(write):
    rows = [predicted("H200"), predicted("A100")]
    lines = report.short([report.load(write())], rows).splitlines()
    assert not any(line.startswith("model") for line in lines)  # the GPU is none of ours
    info = copy.deepcopy(INFO)
    info["gpu"]["name"] = "NVIDIA H200"
    lines = report.short([report.load(write(machine_info=info))], rows).splitlines()
    assert [line.split(":")[1] for line in lines if line.startswith("model")] == [
        " vit_base forward",
        " H200",
    ]


def test_models_of_others_have_a_page_of_their_own(write, capsys):
    extra = {"kind": "adapter", "case": "adapter_vit", "peer": "leaner"}
    facts = {"device": "cuda", "op": "timm vit", "size": "2 images", "dtype": "bfloat16"}
    row = {"extra_info": extra, "stats": {}}
    others = {"benchmarks": [row], "cases": {"adapter_vit": facts}, "unmeasured": []}
    alone = write("alone.json", **others)
    report.main([str(alone), "--short"])
    assert len(capsys.readouterr().out.splitlines()) == 1  # the head
    page = report.page([report.load(write()), report.load(alone)], {}, [])
    assert "alone.json" not in page


def test_pages_and_plots_are_written(write, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    path = str(write())
    page = tmp_path / "results.md"
    report.main([path, "-o", str(page)])
    assert "![Medians on A GPU](results-a-gpu.png)" in page.read_text("utf-8")
    assert "![Roofline on A GPU](results-a-gpu-roofline.png)" in page.read_text("utf-8")
    for name in ("results-a-gpu.png", "results-a-gpu-roofline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    report.main([path])
    assert "# Results" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a result of bench/"),
        ('{"machine_info": {}}', "not a result of bench/"),
        (
            json.dumps(RESULT | {"cases": {"vit_base": {"device": "cuda"}}}),
            "not a result of bench/",
        ),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match=message) as refused:
        report.main([str(path)])
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nothing_to_report_is_refused(write, tmp_path):
    with pytest.raises(SystemExit, match=r"no measured row in .*empty.json"):
        report.main([str(write("empty.json", benchmarks=[]))])
    with pytest.raises(SystemExit, match=r"nowhere.json: No such file"):
        report.main([str(tmp_path / "nowhere.json")])


def test_the_committed_page_is_rendered_from_the_committed_results(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    pytest.importorskip("tabulate", reason="tables need tabulate")
    report.main(["-o", str(tmp_path / "results.md")])
    committed = (ROOT / "docs/results.md").read_text("utf-8")
    assert (tmp_path / "results.md").read_text("utf-8") == committed
