"""Models of other libraries that are timed with and without our attention."""

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.adapters import bench_adapters
from bench.adapters.cases import ADAPTER_CASES, LEANER, LIBRARY, MONITORED, AdapterModels, peers
from bench.harness.gate import WrongError
from bench.harness.peers import AbsentError

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {case.name: case for case in ADAPTER_CASES}


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
