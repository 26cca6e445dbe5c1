"""Which calls go to PyTorch, that they arrive there as they were made, and what ships as rules."""

import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from leaner_kernels import attention, attention_qkvpacked, attention_with_stats
from leaner_kernels.ops import attention as calls
from leaner_kernels.ops.attention import library
from leaner_kernels.ops.attention.library import faster_library, faster_varlen, find_rule
from tests.compile_cases import library_call

ROOT = Path(__file__).resolve().parents[2]
RULES = """
[[gpus]]
capabilities = [90]
source = "bench/results/some.json"
rules = [
  { varlen = false, causal = false, backward = false, head_dim = 32, tokens = [] },
  { varlen = false, causal = false, backward = false, head_dim = 64, tokens = [[256, 256], [512, 0]] },
  { varlen = true, causal = false, backward = true, head_dim = 64, tokens = [[100, 0]] },
]
[[gpus]]
capabilities = []
source = "assumed"
rules = [{ varlen = false, causal = false, backward = false, head_dim = 128, tokens = [[300, 0]] }]
"""  # noqa: E501


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)  # which every other test has on
    monkeypatch.setattr(library, "RULES", library.read_rules(RULES))
    monkeypatch.setattr(library, "capability", lambda _: 90)


def choose(rows: int = 600, dim: int = 64, dtype: torch.dtype = torch.bfloat16, **call: Any) -> Any:
    query = torch.empty(1, 1, rows, dim, dtype=dtype)
    others = call.get("mask"), call.get("lengths"), call.get("dropout_p", 0.0)
    causal, scale = call.get("causal", False), call.get("scale", 0.125)
    return faster_library((query,), rows, call.get("cols", rows), causal, scale, *others)


def test_a_rule_holds_from_its_first_to_its_last_length() -> None:
    lengths = 255, 256, 257, 511, 512, 10**6
    assert [choose(rows) is not None for rows in lengths] == [False, True, False, False, True, True]
    assert choose(256) == (256, 256, "bench/results/some.json")
    assert choose(512) == (512, None, "bench/results/some.json")


def test_a_head_dimension_takes_the_rules_of_the_next_that_has_some() -> None:
    assert [choose(dim=dim) is not None for dim in (16, 32, 40, 64, 72)] == [False] * 2 + [
        True
    ] * 2 + [False]


def test_other_gpus_take_the_rules_that_name_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "capability", lambda _: 120)
    assert [choose(rows, dim) is not None for rows in (299, 300) for dim in (32, 128)] == [
        *(False, False),
        *(True, True),
    ]


@pytest.mark.parametrize(
    "call",
    [
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
    assert choose() is not None
    assert choose(**call) is None


def test_a_call_with_a_backward_has_rules_of_its_own() -> None:
    query = torch.empty(1, 1, 600, 64, dtype=torch.bfloat16, requires_grad=True)
    assert faster_library((query,), 600, 600, False, None) is None
    with torch.no_grad():
        assert faster_library((query,), 600, 600, False, None) is not None


def test_deterministic_algorithms_keep_the_deterministic_backward() -> None:
    assert choose() is not None
    torch.use_deterministic_algorithms(True)  # the fixture around every test takes it back
    assert choose() is None


@pytest.mark.parametrize(("tokens", "expected"), [(99, False), (100, True)])
def test_the_mean_length_of_a_varlen_batch_counts(tokens: int, expected: bool) -> None:
    query = torch.empty(4 * tokens, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    starts = torch.zeros(5, dtype=torch.int32)
    given = query, query, query, starts, False, None
    assert (faster_varlen(*given, 0.0) is not None) == expected
    assert faster_varlen(*given, 0.1) is None
    assert faster_varlen(*given[:1], query[1:], query[1:], *given[3:], 0.0) is None


def test_varlen_of_other_tensors_and_without_flash_attention_stays_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other(Tensor):
        pass

    query, starts = torch.empty(400, 1, 64, dtype=torch.bfloat16), torch.zeros(5)
    given = query, query, starts, False, None, 0.0, True
    assert faster_varlen(query, *given) is not None
    assert faster_varlen(query.as_subclass(Other), *given) is None
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    assert faster_varlen(query, *given) is None


def test_varlen_stays_here_on_gpus_that_pytorchs_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "capability", lambda _: 75)
    monkeypatch.setattr(library, "find_rule", lambda *call: library.Rule(0, None, "a test"))
    query = torch.empty(400, 1, 64, dtype=torch.bfloat16)
    assert faster_varlen(query, query, query, torch.zeros(5), False, None, 0.0) is None


def test_the_file_that_ships_says_what_each_rule_rests_on() -> None:
    text = (library.resources.files("leaner_kernels.ops.attention") / "library.toml").read_text()
    sections = tomllib.loads(text)["gpus"]
    assert [section["capabilities"] for section in sections].count([]) == 1
    for section in sections:
        source = section["source"]
        measured = source.startswith("bench/results/")
        assert measured or source.startswith(
            "assumed" if not section["capabilities"] else "predict"
        )
        assert not measured or (ROOT / source).exists()
        assert {rule["varlen"] for rule in section["rules"]} == {False, True}
        for rule in section["rules"]:
            assert rule.keys() == {"varlen", "causal", "backward", "head_dim", "tokens"}


@pytest.mark.parametrize("gpu", [75, 80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("dim", [32, 48, 64, 80, 96, 128])
def test_long_calls_reach_pytorch_on_every_gpu(
    gpu: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (library.resources.files("leaner_kernels.ops.attention") / "library.toml").read_text()
    monkeypatch.setattr(library, "RULES", library.read_rules(text))
    for causal in (False, True):
        assert find_rule(gpu, False, causal, True, dim, 4096) is not None


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_a_call_that_goes_to_a_library_is_one_compiled_graph(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, made to choose as on a GPU; tests/gpu has the same on one."""
    monkeypatch.setattr(calls, "transformed", lambda _: True)
    monkeypatch.setattr(library, "transformed", lambda _: False)
    monkeypatch.setattr(calls, "library_attention", None)  # what a CPU takes without a choice
    torch.testing.assert_close(*library_call(packed, "cpu", monkeypatch))


# --- Heads wider than the kernels take ------------------------------------------------------------


def wide(*shape: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, 160, requires_grad=True) for _ in range(3)]


def test_wide_heads_are_pytorchs_with_one_warning() -> None:
    library._warn_of_width.cache_clear()
    q, k, v = wide(2, 3, 20)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    with pytest.warns(UserWarning, match="head dimension 160 is above 128"):
        out = attention(q, k, v, is_causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert q.grad is not None


def test_wide_heads_keep_masks_lengths_and_the_packed_layout() -> None:
    q, k, v = wide(2, 3, 20)
    seen = torch.arange(20) < torch.tensor([20, 7])[:, None, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = attention(q, k, v, key_lengths=[20, 7])
        qkv = torch.stack([t.transpose(1, 2) for t in (q, k, v)], dim=2)
        packed = attention_qkvpacked(qkv, key_lengths=[20, 7])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(packed, expected.transpose(1, 2))
    assert packed.is_contiguous()


def test_wide_heads_on_a_gpu_never_reach_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask whose values nobody can read, and a gradient: PyTorch's, in the dtype of the query."""
    monkeypatch.setattr(library.ops, "attention", None)
    masks = []
    sdpa = library._sdpa

    def watched(*given: Any, **params: Any) -> Tensor:
        masks.append(given[3])
        return sdpa(*given, **params)

    monkeypatch.setattr(library, "_sdpa", watched)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q = torch.empty(2, 3, 20, 160, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        out = attention(q, q, q, torch.zeros(20, 20, device="cuda"))
    assert out.shape == q.shape
    assert [mask.dtype for mask in masks] == [torch.bfloat16]


@pytest.mark.filterwarnings("ignore:head dimension")
def test_wide_heads_have_forward_mode_and_second_derivatives() -> None:
    q, k, v = (t.detach().double() for t in wide(1, 2, 4))
    out, tangent = torch.func.jvp(lambda q: attention(q, k, v), (q,), (torch.ones_like(q),))
    plain = torch.softmax(q @ k.mT / 160**0.5, -1) @ v
    torch.testing.assert_close(out, plain)
    assert tangent.shape == out.shape
    hessian = torch.func.hessian(lambda x: attention(x, k, v).square().sum())(q)
    assert hessian.isfinite().all()


def test_wide_heads_have_no_statistics_and_no_softcap() -> None:
    q, k, v = wide(1, 1, 4)
    with pytest.raises(ValueError, match="a head dimension up to 128, got 160"):
        attention_with_stats(q, k, v)
    with pytest.raises(ValueError, match="softcap needs a head dimension up to 128, got 160"):
        attention(q, k, v, softcap=20.0)
