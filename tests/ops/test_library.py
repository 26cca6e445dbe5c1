"""Which calls go to a library, and that they arrive there as they were made."""

import tomllib
from typing import Any

import pytest
import torch
from torch import Tensor

from leaner_kernels import attention
from leaner_kernels.ops import attention as calls
from leaner_kernels.ops.attention import library
from leaner_kernels.ops.attention.library import faster_backend, long_attention, read_rules
from tests.compile_cases import LIBRARIES, library_call

FIELDS = {"capability", "head_dim", "causal", "min_tokens", "backend", "source"}
RULES = [
    {"capability": 90, "head_dim": 64, "causal": False, "min_tokens": 512, "backend": "flash"},
    {"capability": 90, "head_dim": 64, "causal": False, "min_tokens": 2048, "backend": "cudnn"},
]


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)  # which every other test has on
    monkeypatch.setattr(library, "RULES", RULES)
    monkeypatch.setattr(library, "LEAST_TOKENS", 512)
    monkeypatch.setattr(library, "capability", lambda _: 90)


def choose(rows: int = 600, dim: int = 64, dtype: torch.dtype = torch.bfloat16, **call: Any) -> Any:
    query = torch.empty(1, 1, rows, dim, dtype=dtype)
    others = call.get("mask"), call.get("lengths"), call.get("dropout_p", 0.0)
    causal, scale = call.get("causal", False), call.get("scale", 0.125)
    return faster_backend(query, rows, call.get("cols", rows), causal, scale, *others)


def test_the_rule_with_the_most_tokens_that_fits_holds() -> None:
    assert [choose(rows) for rows in (511, 512, 2047, 2048)] == [None, "flash", "flash", "cudnn"]


@pytest.mark.parametrize(
    "call",
    [
        {"dim": 32},
        {"dim": 60},
        {"dtype": torch.float32},
        {"causal": True},
        {"scale": 0.0},
        {"scale": -0.125},
        {"cols": 700},
        {"mask": torch.ones(1)},
        {"lengths": torch.ones(1, dtype=torch.int32)},
        {"dropout_p": 0.1},
    ],
    ids=str,
)
def test_what_the_rule_does_not_name_stays_here(call: dict[str, Any]) -> None:
    assert choose(**call) is None


def test_deterministic_algorithms_keep_the_deterministic_backward() -> None:
    assert choose() is not None
    torch.use_deterministic_algorithms(True)  # the fixture around every test takes it back
    assert choose() is None


def test_other_gpus_have_rules_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "capability", lambda _: 80)
    assert choose() is None


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_long_attention_is_pytorchs(backend: str) -> None:
    """On a CPU, where no GPU backend takes the call, PyTorch's others do."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 40, 8) for heads in (4, 2, 2))
    expected = attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    actual = long_attention(backend, q, k, v, True, 0.3, True)
    torch.testing.assert_close(actual, expected)


def test_flash_attn_gets_tokens_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def flash_attn_func(
            q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool
        ) -> Tensor:
            heads = (t.transpose(1, 2) for t in (q, k, v))
            return attention(*heads, scale=softmax_scale, is_causal=causal).transpose(1, 2)

    monkeypatch.setitem(__import__("sys").modules, "flash_attn", Module)
    q, k, v = (torch.randn(2, 3, 20, 8) for _ in range(3))
    actual = long_attention("flash_attn", q, k, v, True, 0.2, False)
    torch.testing.assert_close(actual, attention(q, k, v, is_causal=True, scale=0.2))


def test_rules_of_a_library_that_is_not_there_do_not_count() -> None:
    text = '[[rule]]\nbackend = "flash_attn"\n[[rule]]\nbackend = "flash"\n'
    assert [rule["backend"] for rule in read_rules(text)] == ["flash"]


def test_the_file_that_ships_says_what_each_rule_rests_on() -> None:
    text = (library.resources.files("leaner_kernels.ops.attention") / "library.toml").read_text()
    rules = tomllib.loads(text)["rule"]
    assert rules
    for rule in rules:
        assert rule.keys() == FIELDS
        assert rule["backend"] in (*library.BACKENDS, "flash_attn")
        measured = rule["source"].startswith("bench/results/")
        assert measured or (rule["source"] == "predicted" and "PREDICTED" in text)


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_call_that_goes_to_a_library_is_one_compiled_graph(
    backend: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, made to choose as on a GPU; tests/gpu has the same on one."""
    monkeypatch.setattr(calls, "transformed", lambda _: True)
    monkeypatch.setattr(calls, "library_attention", None)  # what a CPU takes without a choice
    torch.testing.assert_close(*library_call(backend, packed, "cpu", monkeypatch))
