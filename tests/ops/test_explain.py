"""`explain` says what a call runs, on the GPU at hand or on one that is not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.attention.cases import CASES, AttentionCase
from leaner_kernels import explain

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
SPREAD = 1.03  # two runs of one kernel differ by as much


@pytest.fixture(autouse=True)
def allow_pytorch() -> None:
    torch.use_deterministic_algorithms(False)  # which every other test has on


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("gpu", "forward", "backward"),
    [
        (90, "hopper_forward", "hopper_resident_backward"),
        (80, "ampere_forward", "ampere_backward"),
        (86, "ampere_forward", "ampere_backward"),
        (120, "ampere_forward", "ampere_backward"),
    ],
)
def test_vit_b_runs_kernels_on_every_gpu(gpu: int, forward: str, backward: str) -> None:
    q = meta(128, 16, 197, 64)
    found = explain(q, q, q, capability=gpu, backward=True)
    assert (found.forward.implementation, found.backward.implementation) == (forward, backward)
    assert found.forward.tile["num_warps"] >= 4
    assert str(found).startswith(f"forward {forward}(")
    assert f"compute capability {gpu // 10}.{gpu % 10}" in str(found)
    assert "\n" not in str(found)


def test_what_goes_to_pytorch_names_the_measurement() -> None:
    q = meta(64, 16, 577, 64)
    found = explain(q, q, q, capability=90, backward=True)
    assert found.forward.implementation == found.backward.implementation == "sdpa"
    assert found.forward.tile == {}
    assert "bench/results/crossover-h200.json" in str(found)


@pytest.mark.parametrize(
    "call",
    [
        {"stats": True},
        {"attn_mask": meta(577, 577)},
        {"key_lengths": [5] * 64},
        {"dropout_p": 0.1},
        {"softcap": 20.0},
        {"scale": -1.0},
        {"scale": 0.0},
        {"window_size": (8, 0)},
        {"key": meta(64, 16, 700, 64)},
        {"query": meta(64, 16, 577, 62, dtype=torch.float32)},
        {"query": meta(64, 16, 577, 62)},
    ],
    ids=lambda call: next(iter(call)),
)
def test_what_pytorchs_cannot_do_stays_here(call: dict[str, Any]) -> None:
    given = {"query": meta(64, 16, 577, 64)} | call
    given = {"key": given["query"], "value": call.get("key", given["query"])} | given
    found = explain(**given, capability=90).forward
    assert found.implementation not in ("sdpa", "reference")
    why = "PyTorch's attention has no statistics" if "stats" in call else "no rule"
    assert found.reason.startswith(f"compute capability 9.0; {why}")


@pytest.mark.parametrize("gpu", [80, 86, 89, 90, 100, 120])
def test_float32_goes_to_pytorch_by_prediction_and_its_statistics_stay(gpu: int) -> None:
    q = meta(128, 16, 197, 64, dtype=torch.float32)
    found = explain(q, q, q, capability=gpu, backward=True)
    assert found.forward.implementation == found.backward.implementation == "sdpa"
    assert "predicted: " in found.forward.reason
    kept = explain(q, q, q, capability=gpu, backward=True, stats=True)
    assert (kept.forward.implementation, kept.backward.implementation) == (
        "online_forward",
        "online_backward",
    )


def test_one_image_goes_to_pytorch_where_the_kernel_for_any_length_would_run() -> None:
    q, qkv = meta(1, 16, 197, 64), meta(1, 197, 3, 16, 64)
    found = explain(q, q, q, capability=90, backward=False).forward
    assert found.implementation == "sdpa"
    assert "predicted: " in found.reason
    # Backward ours own a head each; from a projection the launch from Python decides.
    assert explain(q, q, q, capability=90, backward=True).forward.implementation != "sdpa"
    assert explain(qkv, capability=90, backward=False).forward.implementation != "sdpa"
    batch = meta(8, 16, 197, 64)
    for gpu, expected in ((80, "sdpa"), (86, "sdpa"), (90, "sdpa"), (100, "short_forward")):
        found = explain(batch, batch, batch, capability=gpu, backward=False).forward
        assert found.implementation == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_before_8_0_statistics_alone_and_what_pytorch_lacks_run_our_kernels(
    dtype: torch.dtype,
) -> None:
    q = meta(128, 16, 197, 64, dtype=dtype)
    found = explain(q, q, q, capability=75, backward=True)
    assert found.forward.implementation == found.backward.implementation == "sdpa"
    assert found.forward.reason == (
        "predicted: compiled for sm_75 our kernels spill registers inside loops"
    )
    for call, reason in (
        ({"stats": True}, "PyTorch's attention has no statistics"),
        ({"softcap": 9.0}, "PyTorch's attention has no softcap"),
        ({"attn_mask": meta(197, 197, dtype=torch.float32)}, "PyTorch's attention rounds a mask"),
    ):
        kept = explain(q, q, q, capability=75, backward=True, **call)
        assert kept.forward.implementation == "online_forward"
        assert kept.backward.implementation == "online_backward"
        assert kept.forward.reason.startswith(f"compute capability 7.5; {reason}")
        with pytest.raises(ValueError, match=r"of compute capability 7.5 or newer, got 7.0$"):
            explain(q, q, q, capability=70, **call)
    t = meta(300, 4, 64, dtype=dtype)
    found = explain(t, t, t, cu_seqlens=[0, 100, 300], max_seqlen=200, capability=75).forward
    assert "varlen attention needs compute capability 8.0" in found.reason
    assert explain(q, q, q, capability=70).forward.implementation == "sdpa"


@pytest.mark.parametrize("gpu", [60, 70, 75])
def test_an_empty_call_is_explained_for_every_gpu(gpu: int) -> None:
    """No kernel is launched for it, so that none need run there."""
    empty = meta(0, 16, 197, 64)
    found = explain(empty, empty, empty, capability=gpu, stats=True, backward=True)
    assert found.forward.implementation == "online_forward"
    assert found.backward.implementation == "online_backward"


def test_deterministic_algorithms_keep_the_deterministic_backward() -> None:
    torch.use_deterministic_algorithms(True)  # the fixture around every test takes it back
    q = meta(64, 16, 577, 64)
    assert explain(q, q, q, capability=90).forward.implementation not in ("sdpa", "reference")


Q = torch.empty(2, 3, 7, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: explain(Q, Q), "give key and value, or neither"),
        (lambda: explain(Q.double(), Q.double(), Q.double(), capability=90), "got torch.float64"),
        (lambda: explain(Q, Q, Q, capability="90"), "capability must be an int such as 90"),
        (lambda: explain(Q, Q, Q, capability=9), "capability must be an int such as 90"),
        (lambda: explain(*[torch.empty(1, 1, 4, 160)] * 3, softcap=9.0), "softcap needs a head"),
        (lambda: explain(*[torch.empty(1, 1, 4, 160)] * 3, stats=True), "up to 128, got 160"),
        (lambda: explain(torch.empty(2, 7, 3, 3, 16), softcap=9.0), "does not accept softcap"),
        (lambda: explain(Q[0], Q[0], Q[0], Q, cu_seqlens=[0, 3]), "does not accept attn_mask"),
    ],
)
def test_what_the_call_would_refuse_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_without_a_gpu_it_is_pytorchs() -> None:
    q = torch.empty(2, 3, 5, 16)
    assert explain(q, q, q).forward.implementation == "sdpa"
    assert explain(q, q, q, stats=True).forward.implementation == "reference"
    assert "cpu" in str(explain(q, q, q))
    wide = torch.empty(2, 3, 5, 160)
    assert "160 is above 128" in str(explain(wide, wide, wide))


# --- Never slower than the default ----------------------------------------------------------------

BY_NAME = {case.name: case for case in CASES}
# Of a call of ours: the row that times our kernel, the one that times the default from the same
# inputs, and what runs where a rule hands the call over.
COMPARED = {
    "separate": ("leaner_kernel", "sdpa", "sdpa"),
    "packed": ("leaner_packed", "sdpa_packed", "sdpa"),
    "varlen": ("leaner_varlen", "torch_varlen", "varlen_attn"),
}


def route(case: AttentionCase, call: str, backward: bool) -> str:
    sizes = case.batch, case.heads, case.tokens, case.head_dim
    if call == "varlen":
        q = meta(sum(case.lengths), case.heads, case.head_dim, dtype=case.dtype)
        ends = {"cu_seqlens": case.offsets(torch.device("meta")), "max_seqlen": case.tokens}
        given = (q, q, q), ends
    elif call == "packed":
        batch, heads, tokens, dim = sizes
        given = (meta(batch, tokens, 3, heads, dim, dtype=case.dtype),), {}
    else:
        given = (meta(*sizes, dtype=case.dtype),) * 3, {}
    tensors, named = given
    found = explain(*tensors, is_causal=case.causal, capability=90, backward=backward, **named)
    return found.forward.implementation


def measured() -> dict[tuple[str, str, str], float]:
    """Seconds by case, peer and direction, of the H200's runs."""
    times = {}
    for path in sorted(RESULTS.glob("20*-h200-*.json")):
        for row in json.loads(path.read_text("utf-8"))["benchmarks"]:
            info = row["extra_info"]
            if info.get("mode") == "graph" and info["case"] in BY_NAME:
                times[info["case"], info["peer"], info["direction"]] = row["stats"]["median"]
    return times


def test_no_measured_case_runs_slower_than_the_default() -> None:
    """Both rows keep what a backward needs, the one of a forward alone too."""
    times, ours_won = measured(), 0
    for case in CASES:
        for call, (ours, default, library) in COMPARED.items():
            for direction in ("forward", "both"):
                keys = [(case.name, peer, direction) for peer in (ours, default)]
                if not times.keys() >= {*keys} or route(case, call, backward=True) == library:
                    continue
                assert times[keys[0]] <= SPREAD * times[keys[1]], keys[0]
                ours_won += 1
    assert ours_won > 20


def test_no_swept_shape_runs_slower_than_the_default() -> None:
    sweep = json.loads((RESULTS / "crossover-h200.json").read_text("utf-8"))
    for row in sweep["rows"]:
        lengths = (row["tokens"],) * row["batch"] if row["kind"] == "varlen" else ()
        sizes = row["batch"], row["heads"], row["tokens"], row["head_dim"]
        case = AttentionCase("", "cuda", *sizes, torch.bfloat16, row["causal"], lengths=lengths)
        call = "varlen" if lengths else "separate"
        for direction in ("forward", "both"):
            if route(case, call, backward=direction == "both") != COMPARED[call][2]:
                assert row[f"ours_{direction}"] <= SPREAD * row[f"library_{direction}"], row
