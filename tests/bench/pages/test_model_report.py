"""Measured models in the report: rates, memory against the paper's, and goals."""

import json

import pytest

from bench import report
from bench.pages import model_report
from tests.bench.test_report import INFO, RESULT, row

FACTS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "row": "vit_base",
    "variant": "original",
    "batch": 128,
    "image_size": 224,
    "depth": 12,
    "heads": 12,
    "same": ["deit_base"],
}
LEAN = FACTS | {"variant": "lean", "depth": 7, "heads": 16}
OP = {
    "device": "cuda",
    "dtype": "bfloat16",
    "op": "cross_covariance",
    "size": "128·8·14²·64",
}
GB = 10**9


VIT = "model_vit_base_original"


def model(peer, images_per_s, stage="training", case=VIT, peak=20 * GB, gb=178.4):
    training = stage == "training"
    info = {
        "case": case,
        "kind": "model",
        "peer": peer,
        "ours": peer.startswith("leaner"),
        "stage": stage,
        "images_per_s": images_per_s,
        "peak_memory_bytes": peak,
        "printed_memory_gb": gb,
        "joules_per_image": 0.25,
        **({"kept_bytes": 128 * 70_000_000} if training else {}),
    }
    median = 128 / images_per_s
    return {"extra_info": info, "stats": {"median": median, "iqr": median / 100}}


def one_step(case, gb, peak):
    info = {
        "case": case,
        "kind": "one_step",
        "peer": "one_step",
        "params": 86_567_656,
        "loss": 7.125,
        "peak_memory_bytes": peak,
        "printed_memory_gb": gb,
    }
    return {"extra_info": info, "stats": {"median": 1.0, "iqr": 0.0}}


@pytest.fixture
def load(tmp_path):
    def load(*rows, machine="NVIDIA H200"):
        gpu = INFO["gpu"] | {"name": machine}
        cases = RESULT["cases"] | {
            "model_vit_base_original": FACTS,
            "model_vit_base_lean": LEAN,
            "cpu_model_vit_original": FACTS | {"device": "cpu"},
            "xcit_m": OP,
        }
        changes = {
            "machine_info": INFO | {"gpu": gpu},
            "cases": cases,
            "benchmarks": list(rows),
            "unmeasured": [],
        }
        path = tmp_path / "models.json"
        path.write_text(json.dumps(RESULT | changes))
        return report.load(path)

    return load


BOTH = model("leaner_compiled", 4200.0), model("timm_compiled", 4000.0)


def test_a_model_stands_beside_timms_of_the_same_kind(load):
    page = report.page([load(*BOTH, model("leaner", 3000), model("timm", 1500))], {}, [])
    size = "128 images of 224², 12 layers, 12 heads, bfloat16"
    assert f"#### model_vit_base_original (vit_base and deit_base, original: {size})" in page
    line = "| training | **leaner_compiled** | 4,200 | 1.0% | 1.05 | 20.00 | 70.0 | 250 |"
    assert line in page
    assert "| training | **leaner** | 3,000 | 1.0% | 2.00 |" in page
    assert "| training | timm | 1,500 | 1.0% | 1.00 |" in page


def test_goals_are_met_or_missed_out_loud(load):
    run = load(*BOTH)
    page = report.page([run], {}, [])
    compiled = "vit_base original: 1.10 × compiled timm in training"
    assert f"| {compiled} | 1.05 × | **missed** |" in page
    assert "| vit_base original: 4,000 images/s in training | 4,200 | met |" in page
    assert f"goal: {compiled}: 1.05 ×, missed" in report.short([run])


def test_goals_of_one_gpu_are_not_put_to_another(load):
    assert "images/s in training |" not in report.page([load(*BOTH, machine="Other")], {}, [])


def test_memory_is_compared_with_the_papers_ratio(load):
    lean = model("leaner", 5000, case="model_vit_base_lean", peak=11 * GB, gb=101.6)
    steps = (
        one_step("model_vit_base_original", 178.4, 24 * GB),
        one_step("model_vit_base_lean", 101.6, 12 * GB),
    )
    page = report.page([load(model("leaner", 3000), lean, *steps)], {}, [])
    assert "| vit_base | 0.55 | – | 1.00 | 0.50 | 0.57 |" in page
    goal = "vit_base: lean over original memory at most the paper's 0.57"
    assert f"| {goal} | 0.55 | met |" in page
    assert "| vit_base lean | 128 | 86,567,656 | 7.125 | 12.00 |" in page
    alone = report.page([load(*steps)], {}, [])
    assert f"| {goal} | 0.50 | met |" in alone
    greedy = one_step("model_vit_base_lean", 101.6, 16 * GB)
    assert f"| {goal} | 0.67 | **missed** |" in report.page([load(steps[0], greedy)], {}, [])


def test_small_models_of_a_cpu_are_held_to_no_goal(load):
    rates = {"leaner": 90, "timm": 80}
    small = {"case": "cpu_model_vit_original", "peak": None}
    rows = [model(peer, rate, **small) for peer, rate in rates.items()]
    page = report.page([load(*rows)], {}, [])
    assert "### Goals of the models" not in page
    assert "### Memory of lean over original" not in page
    assert "| training | **leaner** | 90 | 1.0% | 1.12 | – | 70.0 | 250 |" in page


def test_the_newest_of_each_row_is_kept(load):
    old, new = model("leaner", 100), model("leaner", 200)
    rows = report.newest([load(old, new, model("leaner", 300, "inference"))], "models")
    assert [row.images_per_s for row in rows] == [200, 300]


def test_operators_are_compared_with_timm_and_their_fastest_peer(load):
    rows = [
        row("leaner", 100e-6, "both", case="xcit_m"),
        row("timm", 300e-6, "both", case="xcit_m"),
        row("eager_compiled", 140e-6, "both", case="xcit_m"),
    ]
    run = load(*rows)
    page = report.page([run], {}, [])
    assert "### xcit_m (cross covariance, 128·8·14²·64, bfloat16), both, graph" in page
    assert "| xcit_m | both, graph | leaner | 100 | 66% | 3.00 | 1.40 eager_compiled |" in page
    goal = "xcit_m: 1.5 × the fastest peer, eager_compiled"
    assert f"| {goal} | 1.40 × | **missed** |" in page
    assert f"goal: {goal}: 1.40 ×, missed" in report.short([run])


def test_hierarchies_show_every_stage():
    facts = FACTS | {"row": "davit_base", "depth": [1, 1, 9, 1], "heads": [4, 8, 16, 32]}
    shape = model_report.shape(facts | {"same": []})
    size = "128 images of 224², 1+1+9+1 layers, 4,8,16,32 heads, bfloat16"
    assert shape == f"davit_base, original: {size}"
