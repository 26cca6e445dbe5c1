"""Measured language models and losses in the report: rates, ratios against the paper, goals."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench import report
from bench.catalogue import peers_of, problem_of
from bench.cross_entropy import bench_cross_entropy
from bench.cross_entropy.cases import CROSS_ENTROPY_CASES
from bench.harness import clock, machine
from bench.harness.checked import Checked, Current, Row
from bench.networks import bench_language
from bench.networks.language_cases import LANGUAGE_CASES
from bench.networks.steps import single_steps
from bench.pages import language_report, language_training
from bench.pages.loss_report import LossRow
from bench.pages.paper_rows import OneStepRow
from tests.bench.test_report import INFO, RESULT

GB = 10**9
FACTS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "row": "crammed_bert",
    "variant": "original",
    "batch": 128,
    "sequence": 128,
    "pairs": False,
    "padded": False,
    "vocabulary": 32768,
    "depth": 16,
    "heads": 12,
}
LOSS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "loss_tokens": 4096,
    "width": 768,
    "vocabulary": 32768,
    "bias": False,
}
CASES = {
    "language_crammed_bert_original": FACTS,
    "language_crammed_bert_lean": FACTS | {"variant": "lean", "depth": 10, "heads": 24},
    "language_gpt2_tinystories_original": FACTS | {"row": "gpt2_tinystories"},
    "language_gpt2_tinystories_lean": FACTS | {"row": "gpt2_tinystories", "variant": "lean"},
    "cpu_language_crammed_bert_lean": FACTS | {"device": "cpu", "variant": "lean"},
    "cross_entropy_32k": LOSS,
}
BERT, LEAN = "language_crammed_bert_original", "language_crammed_bert_lean"


def model(peer, tokens_per_s, case=BERT, peak=20 * GB, gb=13.8):
    ours = peer.startswith("leaner")
    info = {
        "case": case,
        "kind": "language",
        "peer": peer,
        "ours": ours,
        "differs": None if ours else "BERT: norms after the residual",
        "tokens_per_s": tokens_per_s,
        "kept_bytes": 128 * 128 * 50_000,
        "loss": 10.5,
        "params": 119_589_889,
        "peak_memory_bytes": peak,
        "printed_memory_gb": gb,
        "joules_per_token": 0.0002,
    }
    median = 128 * 128 / tokens_per_s
    return {"extra_info": info, "stats": {"median": median, "iqr": median / 100}}


def one_step(case, gb, peak):
    info = {
        "case": case,
        "kind": "language_step",
        "peer": "one_step",
        "params": 89_160_785,
        "loss": 10.875,
        "peak_memory_bytes": peak,
        "printed_memory_gb": gb,
    }
    return {"extra_info": info, "stats": {"median": 1.0, "iqr": 0.0}}


def loss(peer, median, peak=300 * 2**20):
    info = {
        "case": "cross_entropy_32k",
        "kind": "cross_entropy",
        "peer": peer,
        "ours": peer.startswith("leaner"),
        "tokens_per_s": 4096 / median,
        "matrix_fraction": 0.5,
        "peak_memory_bytes": peak,
        "joules": 0.5,
    }
    return {"extra_info": info, "stats": {"median": median, "iqr": median / 100}}


@pytest.fixture
def load(tmp_path):
    def load(*rows):
        gpu = INFO["gpu"] | {"name": "NVIDIA H200"}
        changes = {
            "machine_info": INFO | {"gpu": gpu},
            "cases": RESULT["cases"] | CASES,
            "benchmarks": list(rows),
            "unmeasured": [
                {"case": BERT, "peer": "transformers", "status": "absent", "reason": "not there"}
            ],
        }
        path = tmp_path / "language.json"
        path.write_text(json.dumps(RESULT | changes))
        return report.load(path)

    return load


def test_a_model_stands_beside_the_fastest_of_transformers_called_alike(load):
    rows = [
        model("leaner", 3e5),
        model("transformers", 1e5),
        model("transformers_modernbert", 2e5),
        model("leaner_compiled", 3e5),
        model("transformers_compiled", 4e5),
    ]
    page = report.page([load(*rows)], {}, [])
    size = "128 sequences of 128, depth 16, 12 heads, vocabulary 32,768, bfloat16"
    assert f"#### {BERT} (crammed_bert, original: {size})" in page
    rest = "20.00 | 50.0 | 200 | 119,589,889 | 10.500 |"
    assert f"| **leaner** | 300,000 | 1.0% | 1.50 | {rest}" in page
    assert f"| **leaner_compiled** | 300,000 | 1.0% | 0.75 | {rest}" in page  # a loss stays
    assert f"| transformers | 100,000 | 1.0% | 0.50 | {rest}" in page
    assert "- transformers (crammed_bert): BERT: norms after the residual." in page
    assert f"- transformers, absent ({BERT}): not there" in page


def test_goals_of_bert_are_met_or_missed_out_loud(load):
    rows = [
        model("leaner", 1e5),
        model("leaner", 1.5e5, LEAN, gb=10.3),
        model("transformers", 1.2e5, LEAN, gb=10.3),
        model("transformers_modernbert", 1.1e5, LEAN, gb=10.3),
    ]
    run = load(*rows)
    page = report.page([run], {}, [])
    goal = "crammed_bert: lean 1.4 × the tokens/s of the original, eager"
    assert f"| {goal} | 1.50 × | met |" in page
    missed = "crammed_bert lean: 1.3 × transformers, eager"
    assert f"| {missed} | 1.25 × | **missed** |" in page
    assert f"goal: {missed}: 1.25 ×, missed" in report.short([run])
    assert f"{LEAN} leaner: 150,000 tokens/s, 20.00 GB" in report.short([run])


def test_memory_of_gpt_is_compared_with_the_papers_ratio(load):
    cases = "language_gpt2_tinystories_original", "language_gpt2_tinystories_lean"
    steps = one_step(cases[0], 12.8, 4 * GB), one_step(cases[1], 9.7, 3 * GB)
    page = report.page([load(*steps)], {}, [])
    assert "| gpt2_tinystories | – | – | – | – | 0.75 | 0.76 |" in page
    goal = "gpt2_tinystories: lean over original memory at most the paper's 0.76"
    assert f"| {goal} | 0.75 | met |" in page
    assert "| gpt2_tinystories lean | 128 | 89,160,785 | 10.875 | 3.00 |" in page
    greedy = one_step(cases[1], 9.7, int(3.2 * GB))
    assert f"| {goal} | 0.80 | **missed** |" in report.page([load(steps[0], greedy)], {}, [])
    models = model("leaner", 1e5, cases[0], 4 * GB, 12.8), model("leaner", 2e5, cases[1], GB, 9.7)
    page = report.page([load(*steps, *models)], {}, [])
    assert "| gpt2_tinystories | 0.50 | – | – | 0.25 | 0.75 | 0.76 |" in page


def test_small_models_of_a_cpu_are_held_to_no_goal(load):
    case = "cpu_language_crammed_bert_lean"
    page = report.page([load(model("leaner", 90, case), model("transformers", 80, case))], {}, [])
    assert "### Goals of the language models" not in page
    assert "### Language models, lean over original" not in page
    assert "| **leaner** | 90 | 1.0% | 1.12 |" in page


def test_losses_are_compared_with_logits_and_the_fastest_peer(load):
    rows = loss("leaner", 2e-3), loss("logits_float32", 4e-3), loss("liger", 1e-3)
    run = load(*rows)
    page = report.page([run], {}, [])
    size = "4,096 tokens of 768, vocabulary 32,768, without bias, bfloat16"
    assert f"#### cross_entropy_32k ({size})" in page
    assert "| **leaner** | 2.000 | 1.0% | 2,048,000 | 50% | 2.00 | 0.50 | 300 | 500 |" in page
    assert "| liger | 1.000 | 1.0% | 4,096,000 | 50% | 4.00 | 1.00 | 300 | 500 |" in page
    assert "cross_entropy_32k leaner: 2.000 ms, 300 MiB" in report.short([run])


def test_the_newest_of_each_row_is_kept(load):
    rows = load(model("leaner", 1), model("leaner", 2), loss("leaner", 1), loss("leaner", 2))
    kept = report.newest([rows], "language") + report.newest([rows], "losses")
    assert [row.tokens_per_s for row in kept] == [2, 2048]


def test_pairs_say_so():
    facts = FACTS | {"pairs": True, "sequence": 4096, "row": "nystromformer_retrieval"}
    assert "128 pairs of sequences of 4,096" in report.shape(facts)


class Benchmark:
    """What the benchmark fixture does of a row: calls, an interval that is one, and no timer."""

    def __init__(self):
        self.extra_info = {}
        self.stats = SimpleNamespace(stats=SimpleNamespace(median=2.0, iqr=0.5))

    def pedantic(self, function, **_):
        return function()

    def entry(self):
        """Return what a result file holds."""
        stats = self.stats.stats
        return {"extra_info": self.extra_info, "stats": {"median": stats.median, "iqr": stats.iqr}}


def refuse(*args, **row):
    raise AssertionError(args)


def test_what_is_measured_is_what_the_report_reads(monkeypatch):
    monkeypatch.setitem(clock.STEP_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(machine, "matrix_rate", lambda *_: 1e12)
    case = next(c for c in LANGUAGE_CASES if c.name == "cpu_language_nystromformer_image_lean")
    here = Benchmark()
    bench_language.test_language(Row(case, "leaner"), here, Current(), refuse, 9.0)
    row = language_report.LanguageRow.read(here.entry(), here.extra_info["shape"], "m")
    assert (row.tokens_per_s, row.median, row.iqr) == (4 * 128 / 2, 2.0, 0.5)
    assert (row.ours, row.peak_memory_bytes, row.joules_per_token, row.printed_memory_gb) == (
        True,
        None,
        None,
        None,
    )
    assert row.params == case.build(torch.device("cpu")).num_params()
    assert 0 <= here.extra_info["budget_used"] <= 1
    # Every block keeps its input, its normalised input, q, k and v at the least.
    assert row.kept > 4 * 5 * 64
    step = Benchmark()
    bench_language.test_language_one_step(next(single_steps([case])), step, refuse, 9.0)
    one_step = OneStepRow.read(step.entry(), step.extra_info["shape"], "m")
    assert (one_step.batch, one_step.params, one_step.loss) == (
        4,
        row.params,
        pytest.approx(row.loss),
    )
    loss_case = replace(CROSS_ENTROPY_CASES[-1], tokens=32, vocabulary=100)
    of_loss = Benchmark()
    bench_cross_entropy.test_cross_entropy(
        Row(loss_case, "leaner"),
        of_loss,
        Checked(peers_of, problem_of),
        refuse,
        9.0,
    )
    read = LossRow.read(of_loss.entry(), of_loss.extra_info["shape"], "m")
    assert (read.tokens_per_s, read.median) == (16, 2.0)
    assert read.matrix_fraction == pytest.approx(3 * 2 * 32 * 64 * 100 / 2 / 1e12)


def test_time_that_is_spent_is_stated():
    recorded = []

    def unmeasured(status, reason, **row):
        recorded.append((status, reason, row))
        pytest.skip(reason)

    case = LANGUAGE_CASES[-1]
    calls = [
        (
            bench_language.test_language,
            Row(case, "leaner"),
            Current(),
        ),
        (bench_language.test_language_one_step, next(single_steps([case]))),
        (
            bench_cross_entropy.test_cross_entropy,
            Row(CROSS_ENTROPY_CASES[-1], "leaner"),
            Checked(peers_of, problem_of),
        ),
    ]
    for function, row, *state in calls:
        with pytest.raises(pytest.skip.Exception):
            function(row, Benchmark(), *state, unmeasured, 0.0)
    assert {status for status, _, _ in recorded} == {"not run"}
    assert [row["peer"] for _, _, row in recorded] == [
        "every peer left",
        "one_step",
        "every peer left",
    ]


TRAINED = {
    "depth": 1,
    "heads": 4,
    "seeds": 5,
    "test_accuracy": 0.37125,
    "test_accuracy_standard_error": 0.0025,
    "baseline_first_operator": 0.361,
    "baseline_constant_class": 0.172,
}


def test_trained_rows_stand_beside_the_paper_and_the_trivial_baseline(tmp_path):
    assert language_training.section(tmp_path) == ""
    path = tmp_path / "listops-lean.json"
    path.write_text(json.dumps(TRAINED))
    text = language_training.section(tmp_path)
    line = "| lean | 1, 4 | 37.12 ± 0.25 | 37.13 | 36.10 | 17.20 | 5 | – | at most 120 s: – |"
    assert line in text
    assert "original" not in text
    for seconds, verdict in (([80.0, 119.0], "119 | at most 120 s: met"), ([9, 121], "**missed**")):
        path.write_text(json.dumps(TRAINED | {"seconds_of_each": seconds}))
        assert verdict in language_training.section(tmp_path)


def test_a_file_that_is_no_summary_is_named(tmp_path):
    (tmp_path / "listops-lean.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"listops-lean.json: not a summary of train/lra.py"):
        language_training.section(tmp_path)
