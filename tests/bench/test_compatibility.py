"""The page of compatibility: rows of tests that passed, all of them, and models that are right."""

import ast
import copy
import importlib
import inspect
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from bench import compatibility, frames, report
from bench.adapters import bench_adapters
from bench.adapters.cases import ADAPTER_CASES, LEANER, LIBRARY, MONITORED, AdapterModels, peers
from bench.harness.gate import WrongError
from bench.harness.peers import AbsentError
from tests import compatibility_record, error_budget
from tests.bench.test_report import RESULT, of_kind

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {case.name: case for case in ADAPTER_CASES}
COMMITTED = ROOT / "bench/results/compatibility-cpu.json"
FACT = {
    "library": "timm",
    "family": "vit",
    "architecture": "VisionTransformer",
    "case": "plain",
    "device": "cuda",
    "dtype": "bfloat16",
    "status": "equal",
    "error": 1e-3,
    "budget": 4e-3,
    "note": "",
    "test": "tests/gpu/test_timm_gpu.py::test_equal[vit]",
}
FOUND = {**RESULT, "benchmarks": [], "unmeasured": [], "compatibility": [FACT]}
REFUSED = FACT | {
    "library": "transformers",
    "family": "gemma2",
    "case": "softcap",
    "status": "refused",
    "error": None,
    "budget": None,
    "note": 'softcap=50.0 | None, which "leaner" does not support: use attn_implementation="eager"',
}


def timed(peer, median, peak=2**30):
    extra = {"direction": "both", "peak_memory_bytes": peak}
    return of_kind("adapter", "adapter_vit", peer, median, **extra)


CASE = {
    "device": "cuda",
    "dtype": "bfloat16",
    "library": "timm",
    "op": "timm vit_base",
    "size": "128 × 224² pixels",
}
SPEED = FOUND | {
    "compatibility": [],
    "cases": {"adapter_vit": CASE},
    "benchmarks": [timed(LIBRARY, 2e-2), timed(LEANER, 1e-2), timed(MONITORED, 1.1e-2)],
    "unmeasured": [
        {"case": "adapter_gpt2", "peer": LEANER, "status": "wrong", "reason": "off by 3"},
        {"case": "vit_base", "peer": "eager", "status": "wrong", "reason": "another page's"},
    ],
}


@pytest.fixture
def tables(tmp_path):
    """Return the lines of a table of compatibility, of these files alone."""

    def tables(name, *files):
        paths = [tmp_path / f"{number}.json" for number in range(len(files))]
        for path, data in zip(paths, files):
            path.write_text(json.dumps(data))
        found = report.gather(paths)
        return report.render(report.DECLARED["compatibility"][name], found).splitlines()[2:]

    return tables


def test_a_model_has_its_cases_and_the_nearest_miss_in_one_row(tables):
    near = FACT | {"case": "padded", "error": 3.9e-3, "note": "windows"}
    (row,) = tables("equal", FOUND | {"compatibility": [FACT, near]})
    assert row == (
        "| vit | `VisionTransformer` | padded; plain | 98% (padded) | A GPU | bfloat16 | windows |"
    )


def test_dtypes_share_a_row_where_the_same_cases_were_equal(tables):
    single = FACT | {"dtype": "float32", "error": 2e-3}
    (both,) = tables("equal", FOUND | {"compatibility": [FACT, single]})
    assert "| 50% (plain) | A GPU | bfloat16, float32 |" in both
    apart = tables("equal", FOUND | {"compatibility": [FACT, single | {"case": "padded"}]})
    assert len(apart) == 2


def test_what_is_refused_has_its_message_and_what_to_do_instead(tables):
    left = FACT | {"status": "left", "case": "a subclass", "note": "its forward may differ"}
    found = FOUND | {"compatibility": [REFUSED, REFUSED, left]}
    message = f"`{REFUSED['note']}`".replace("|", "\\|")
    advice = 'use attn_implementation="eager"'
    assert tables("refused", found) == [
        f"| gemma2 | `VisionTransformer` | softcap | {message} | {advice} |"
    ]
    assert tables("left", found) == [
        "| vit | `VisionTransformer` | a subclass | its forward may differ |"
    ]
    with_tick = compatibility.refused(pd.DataFrame([REFUSED | {"note": "call `f`"}]))
    assert list(with_tick["message"]) == ["``call `f```"]


def test_speed_is_shown_against_the_librarys_own_with_losses_and_kappa(tables):
    row = "| A GPU | vit_base | forward and backward | 20 | 0.2 | 10 | 0.1 | 2 | 11 | 10 |"
    assert tables("speed", SPEED) == [f"{row} 1,024 | 1,024 | 128 × 224² pixels, bfloat16 |"]
    on_cpu = copy.deepcopy(SPEED)
    on_cpu["cases"]["adapter_vit"]["device"] = "cpu"
    on_cpu["benchmarks"] = [timed(LIBRARY, 1e-2, peak=None), timed(LEANER, 2e-2, peak=None)]
    (loss,) = tables("speed", on_cpu)
    assert (
        "| 10 | 0.1 | 20 | 0.2 | 0.5 | 128 × 224² pixels" in loss
    )  # no column of κ, none of peaks


def test_the_newest_run_of_a_machine_counts_and_whole(tables):
    old = FOUND | {"datetime": "2025-01-01", "compatibility": [FACT, FACT | {"family": "gone"}]}
    assert [row.split(" | ")[0] for row in tables("equal", FOUND, old)] == ["| vit"]
    slow = SPEED | {"datetime": "2025-01-01", "benchmarks": [timed(LEANER, 9.0)]}
    assert tables("speed", SPEED, slow) == tables("speed", SPEED)


# What the tests record.


def node(name="tests/adapters/test_timm.py", **properties):
    return SimpleNamespace(path=Path(name), nodeid=f"{name}::test_x", user_properties=[])


def added(**changed):
    item, judged = node(), compatibility_record.Judged()
    row = {"library": "timm", "family": "vit", "architecture": "ViT", "case": "plain"} | changed
    compatibility_record.add(item, judged, **row)
    return item.user_properties[-1][1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"status": "fine"}, "status must be one of .* got 'fine'"),
        ({"status": "refused"}, "note must say why timm vit, plain is refused"),
        ({"status": "left", "note": "a\nb"}, "note must be one line"),
        ({"error": 2.0, "budget": 1.0}, "within a budget, got 2.0 and 1.0"),
        ({"error": math.nan, "budget": 1.0}, "within a budget, got nan and 1.0"),
        ({"error": 1.0}, "within a budget, got 1.0 and None"),
    ],
)
def test_a_row_without_numbers_or_against_them_is_refused(changed, message):
    assert added()["status"] == "equal"
    with pytest.raises(ValueError, match=message):
        added(**changed)


def test_what_a_test_judged_is_recorded_with_it():
    judged, item = compatibility_record.Judged(), node()
    exact = torch.tensor([1.0, math.inf], dtype=torch.float64)
    peers = (exact + 0.01).float(), (exact + 0.02).float()
    judged((exact + 0.035).float(), peers, exact)
    judged((exact + 0.015).float(), peers[0], exact)
    row = {"library": "timm", "family": "vit", "architecture": "ViT", "case": "plain"}
    compatibility_record.add(item, judged, **row)
    compatibility_record.add(item, judged, **row)
    first, second = (facts for _, facts in item.user_properties)
    assert (first["error"], first["budget"]) == (0.035, 0.04)
    assert second["error"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_recorded_as_allowed_is_what_the_original_allows(dtype):
    exact = torch.tensor([1.0, 0.25], dtype=torch.float64)
    peer = (exact + 0.25).half()
    judged = compatibility_record.Judged()
    judged((exact + 0.25).to(dtype), peer, exact)
    _, allowed = judged.worst
    assert allowed == 2 * (0.25 + torch.finfo(dtype).eps)
    judged(torch.tensor([1.0, 0.75], dtype=dtype), peer, exact)
    assert judged.share == 0.5 / allowed
    with pytest.raises(AssertionError, match="past the budget"):
        judged(torch.tensor([1.0, 0.25 + 1.1 * allowed], dtype=dtype), peer, exact)
    assert judged.share == 0.5 / allowed


def test_every_module_that_judges_is_found():
    namespace = SimpleNamespace(assert_within_budget=error_budget.assert_within_budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tests.pretended", namespace)
        assert "tests.pretended" in compatibility_record.judging()
    assert "tests.error_budget" in compatibility_record.judging()


def test_what_is_judged_of_a_whole_model_is_recorded(record):
    linear = torch.nn.Linear(40, 8)
    x = torch.randn(5, 40)
    error_budget.assert_computes(
        {"out": linear(x)},
        lambda dtype: {"out": copy.deepcopy(linear).to(dtype)(x.to(dtype))},
    )
    judged = record.args[1]
    assert judged.worst[0] is not None
    assert judged.worst[0] <= judged.worst[1]


def test_rows_of_a_test_that_failed_are_left_out_and_its_name_kept():
    recorder = compatibility_record.Recorder(Path("unused"))

    def report(outcome, when="call", rows=({},)):
        properties = [(compatibility_record.PROPERTY, row) for row in rows]
        return pytest.TestReport(
            f"{outcome} {when}", ("", 0, ""), {}, outcome, None, when, user_properties=properties
        )

    recorder.pytest_runtest_logreport(report("passed", "setup"))
    recorder.pytest_runtest_logreport(report("passed", rows=({}, FACT)))
    recorder.pytest_runtest_logreport(report("passed", "teardown", rows=({}, FACT)))
    recorder.pytest_runtest_logreport(report("failed", rows=({}, FACT)))
    recorder.pytest_runtest_logreport(report("failed", rows=()))  # records nothing by intent
    assert recorder.rows == [FACT]
    assert recorder.failed == ["failed call"]


# What is timed.


def test_every_case_of_a_gpu_has_a_small_one_for_a_cpu():
    on_gpu = [case for case in ADAPTER_CASES if case.device == "cuda"]
    on_cpu = [case for case in ADAPTER_CASES if case.device == "cpu"]
    assert [f"cpu_{case.name}" for case in on_gpu] == [case.name for case in on_cpu]
    assert [(c.library, c.family) for c in on_gpu] == [(c.library, c.family) for c in on_cpu]
    assert MONITORED in peers("both")
    assert MONITORED not in peers("forward")


def test_the_script_for_a_gpu_begins_with_rows_that_exist():
    wanted = re.findall(r"adapter_\w+", (ROOT / "bench/gpu.sh").read_text("utf-8"))
    ids = {row.id for row in bench_adapters.rows()}
    assert wanted
    assert {f"{name}-both-eager-leaner" for name in wanted} <= ids


def test_the_cases_of_a_gpu_are_models_of_real_size():
    def millions(case):
        with torch.device("meta"):
            return round(sum(weight.numel() for weight in case.new().parameters()) / 1e6)

    assert {case.family: millions(case) for case in ADAPTER_CASES if case.device == "cuda"} == {
        **{"llama": 552, "bert": 109, "gpt2": 124, "vit": 87, "xcit": 84, "swin": 88}
    }


def test_without_the_library_its_models_are_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(AbsentError, match="timm cannot be imported"):
        BY_NAME["cpu_adapter_vit"].new()


def test_a_library_that_is_too_old_for_its_adapter_is_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "leaner_kernels.adapters.timm", None)
    with pytest.raises(AbsentError, match=r"adapters\.timm cannot be imported"):
        AdapterModels(BY_NAME["cpu_adapter_vit"])


@pytest.fixture(params=["cpu_adapter_bert", "cpu_adapter_swin"])
def models(request):
    return AdapterModels(BY_NAME[request.param])


def test_a_model_before_and_after_its_adapter_passes_the_gate(models):
    assert all(0 <= models.check(name) <= 1 for name in (LIBRARY, LEANER, MONITORED))


def test_wrong_outputs_gradients_and_silent_monitors_get_no_number(models, monkeypatch):
    silent = SimpleNamespace(begin=lambda step: None, end=list, flush=list)
    monkeypatch.setattr(models, "monitor", lambda: silent)
    with pytest.raises(WrongError, match="no row"):
        models.check(MONITORED)
    weight = next(p for p in models.models[LEANER].parameters() if p.ndim > 1)
    hook = weight.register_hook(lambda grad: 1.01 * grad)
    with pytest.raises(WrongError, match="gradients: off by"):
        models.check(LEANER)
    hook.remove()
    with torch.no_grad():
        weight.fill_(math.nan)
    with pytest.raises(WrongError, match="output: off by nan"):
        models.check(LEANER)


# What is committed.


def committed():
    return compatibility.facts([frames.read(COMMITTED)])


def recording():
    """Yield each test of the adapters that records, and how many times it runs."""
    for path in sorted((ROOT / "tests/adapters").glob("test_*.py")):
        module = importlib.import_module(f"tests.adapters.{path.stem}")
        for name, test in vars(module).items():
            if name.startswith("test_") and "record" in inspect.signature(test).parameters:
                marks = [m for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"]
                runs = math.prod(len(list(mark.args[1])) for mark in marks)
                yield f"tests/adapters/{path.name}::{name}", runs


def test_the_committed_rows_are_of_all_tests_as_they_are_now():
    runs = {}
    for test in set(committed()["test"]):
        runs.setdefault(test.split("[")[0], []).append(test)
    assert {name: len(tests) for name, tests in runs.items()} == dict(recording())


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_every_family_is_on_the_page(library):
    table = importlib.import_module(f"tests.adapters.{library}_families")
    families = {getattr(family, "name", family) for family in table.FAMILIES}
    equal = compatibility.equal(committed())
    assert families <= set(equal[equal["library"] == library]["family"])
    assert len(families) >= {"timm": 8, "transformers": 10}[library]


def test_whatever_is_refused_says_what_to_do_instead():
    rows = compatibility.refused(committed())
    refused = rows[rows["status"] == "refused"]
    assert len(refused)
    assert set(refused[refused["instead"] == ""]["note"]) == set()


def test_every_sentence_of_the_page_names_a_test_that_exists():
    page = (ROOT / "docs/compatibility.md").read_text("utf-8")
    named = re.findall(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\)", page)
    assert len(named) > 40
    for name, path in named:
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, name
    # Every row of a table that no measurement fills names one.
    tables = [lines for lines in page.split("\n\n") if "held by" in lines]
    rows = [line for table in tables for line in table.splitlines()[2:]]
    assert len(rows) == len(named)
