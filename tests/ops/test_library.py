"""Which calls go to PyTorch, that they arrive there as they were made, and what ships as rules."""

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from leaner_kernels import attention, attention_qkvpacked, attention_with_stats
from leaner_kernels.ops import _tiles
from leaner_kernels.ops.attention import dispatch, sdpa
from leaner_kernels.ops.attention.call import Call, Sequences
from leaner_kernels.ops.attention.dispatch import find_rule_of_library, library_of
from tests.ops.test_compile import library_call

RULES = """
[[gpus]]
capabilities = [90]
programs = [8, 16]
source = "predicted"
rules = [{ varlen = false, causal = false, backward = false, head_dim = 32, tokens = [[100, 0]] }]
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
[[gpus]]
capabilities = []
float32 = true
source = "predicted"
rules = [{ varlen = false, causal = false, backward = false, head_dim = 128, tokens = [[1, 0]] }]
"""  # noqa: E501


class Other(Tensor):
    pass


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.use_deterministic_algorithms(False)  # which every other test has on
    monkeypatch.setattr(dispatch, "RULES", dispatch.read_rules(RULES))
    with _tiles.assume(90):
        yield


def choose(rows: int = 600, dim: int = 64, *, causal: bool = False, backward: bool = False) -> Any:
    query = torch.empty(1, 1, rows, dim, dtype=torch.bfloat16)
    call = Call(query, query, query, None, None, None, 0.0, causal, 0.125)
    return library_of(call, backward)


def test_a_rule_holds_from_its_first_to_its_last_length() -> None:
    lengths = 255, 256, 257, 511, 512, 10**6
    assert [choose(rows) is not None for rows in lengths] == [False, True, False, False, True, True]
    assert choose(256).reason == "faster at 256 to 256 tokens (bench/results/some.json)"
    assert choose(512).reason == "faster from 512 tokens on (bench/results/some.json)"


def test_a_head_dimension_takes_the_rules_of_the_next_that_has_some() -> None:
    assert [choose(dim=dim) is not None for dim in (16, 32, 40, 64, 72)] == [False] * 2 + [
        True
    ] * 2 + [False]


def test_causal_calls_and_those_with_a_backward_have_rules_of_their_own() -> None:
    assert choose() is not None
    assert choose(causal=True) is None
    assert choose(backward=True) is None


def few(programs: int, dim: int, *, packed: bool = False, compiling: bool = False) -> bool:
    query = torch.empty(programs // 8, 8, 200, dim, dtype=torch.bfloat16)
    call = Call(query, query, query, None, None, None, 0.0, False, None)
    # Code that is traced reads the capability of a GPU, never an assumed one.
    compiler = mock.patch.object(torch.compiler, "is_compiling", return_value=compiling)
    with compiler, mock.patch.object(_tiles, "assumed", return_value=90):
        return library_of(call, False, packed) is not None


def test_a_section_for_few_programs_comes_before_that_for_any() -> None:
    assert [few(programs, 32) for programs in (8, 16, 24)] == [True, True, False]
    assert not few(8, 64)  # a head dimension for which the section has no row
    # From Python a packed call of few heads takes as long as its launch, and ours is shorter.
    assert not few(8, 32, packed=True)
    assert few(8, 32, packed=True, compiling=True)


class Few(torch.nn.Module):
    def forward(self, qkv: Tensor) -> Tensor:
        return attention_qkvpacked(qkv)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("dynamic", "expected"), [(True, "leaner_kernels"), (False, "aten.")])
def test_few_programs_put_no_guard_on_a_dynamic_batch(
    dynamic: bool, expected: str, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "on_gpu", lambda query: True)
    monkeypatch.setattr(_tiles, "capability", lambda device: 90)
    torch.use_deterministic_algorithms(False)
    qkv = torch.randn(2, 200, 3, 8, 32, dtype=torch.bfloat16)
    shapes = {0: torch.export.Dim("batch")} if dynamic else None
    with torch.no_grad():
        program = torch.export.export(Few(), (qkv,), dynamic_shapes=(shapes,), strict=strict)
    called = [str(n.target) for n in program.graph.nodes if "attention" in str(n.target)]
    assert called
    assert all(name.startswith(expected) for name in called)


def float32_call(dim: int = 64, key_heads: int = 4, **changed: Any) -> Call:
    query, key = torch.empty(2, 4, 50, dim), torch.empty(2, key_heads, 50, dim)
    return Call(query, key, key, None, None, None, 0.0, False, None)._replace(**changed)


def test_float32_has_rules_of_its_own_also_on_a_gpu_whose_sections_have_none() -> None:
    library = library_of(float32_call(), backward=False)
    assert library == ("sdpa", "faster at every length (predicted)")
    assert library_of(float32_call(dim=12), backward=False) is not None


@pytest.mark.parametrize(
    "call",
    [
        float32_call(dim=10),
        float32_call(key_heads=2),
        float32_call(scale=-1.0),
        float32_call(softcap=9.0),
        float32_call(window_left=4, window_right=0),
        float32_call(dropout_p=0.1),
        float32_call(attn_mask=torch.zeros(50, 50)),
        float32_call(key_lengths=torch.ones(2)),
    ],
)
def test_float32_that_the_memory_efficient_kernel_lacks_stays_here(call: Call) -> None:
    assert library_of(call, backward=False) is None


def test_float32_stays_here_without_the_memory_efficient_kernel() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert library_of(float32_call(), backward=False) is None


# --- GPUs before compute capability 8.0 -----------------------------------------------------------


def old_call(**changed: Any) -> Call:
    query = torch.empty(2, 4, 50, 10, dtype=torch.float16)
    return Call(query, query, query, None, None, None, 0.0, False, None)._replace(**changed)


@pytest.mark.parametrize("gpu", [60, 70, 75])
@pytest.mark.parametrize(
    "call",
    [
        old_call(),
        old_call(query=torch.empty(2, 4, 3, 10, dtype=torch.float16)),
        old_call(query=torch.empty(2, 8, 50, 10, dtype=torch.float16)),
        old_call(attn_mask=torch.ones(50, 50, dtype=torch.bool)),
        old_call(attn_mask=torch.ones(50, 50, dtype=torch.float16)),
        old_call(key_lengths=torch.ones(2)),
        old_call(dropout_p=0.1),
        old_call(window_left=4, window_right=0),
        old_call(scale=-1.0),
        float32_call(),
    ],
)
def test_before_8_0_pytorch_computes_every_plain_call(gpu: int, call: Call) -> None:
    with _tiles.assume(gpu):
        for backward in (False, True):
            library = library_of(call, backward)
            assert library is not None
            assert library.name == "sdpa"
            expected = "predicted: " if gpu == 75 else "our kernels need compute capability 7.5"
            assert library.reason.startswith(expected)


@pytest.mark.parametrize(
    "call",
    [
        old_call(softcap=9.0),
        old_call(attn_mask=torch.ones(50, 50)),
        old_call(query=torch.empty(0, 4, 50, 10, dtype=torch.float16)),
        old_call()._replace(sequences=Sequences(torch.zeros(3), torch.zeros(3), 5, 5)),
    ],
)
@pytest.mark.parametrize("gpu", [70, 75])
def test_before_8_0_what_pytorch_cannot_compute_stays_here(gpu: int, call: Call) -> None:
    with _tiles.assume(gpu):
        assert library_of(call, backward=True) is None


def test_before_8_0_deterministic_algorithms_keep_our_kernels_where_these_run() -> None:
    torch.use_deterministic_algorithms(True)  # the fixture around every test takes it back
    with _tiles.assume(75):
        assert library_of(old_call(), backward=True) is None
    with _tiles.assume(70):  # PyTorch's function follows the setting by itself
        assert library_of(old_call(), backward=True) is not None


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_negative_scale_reaches_pytorch_on_a_gpu_as_a_positive_one(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels take the maximum of a row before they scale."""
    scales = []
    pytorchs = sdpa._sdpa

    def watched(*given: Any, **params: Any) -> Tensor:
        scales.append(params["scale"])
        return pytorchs(*given, **params)

    monkeypatch.setattr(sdpa, "_sdpa", watched)
    with FakeTensorMode(), _tiles.assume(75):
        q = torch.empty(2, 3, 20, 16, dtype=torch.float16, device="cuda")
        for scale in (-2.0, 0.0, 0.5):
            assert attention(q, q, q, is_causal=is_causal, scale=scale).shape == q.shape
    assert scales == [2.0, 1.0, 0.5]


def test_lengths_that_were_not_checked_are_clamped_for_pytorch() -> None:
    q = torch.randn(2, 1, 5, 8)
    outs = [
        sdpa.library_attention(
            Call(q, q, q, None, torch.tensor(lengths), None, 0.0, False, None), False
        )
        for lengths in ([0, 9], [1, 5])
    ]
    assert torch.equal(*outs)


def test_before_8_0_derivatives_of_torch_func_are_those_of_pytorchs_composition() -> None:
    q = torch.randn(1, 2, 4, 16, dtype=torch.float32)
    with _tiles.assume(75):
        out, tangent = torch.func.jvp(lambda x: attention(x, q, q), (q,), (torch.ones_like(q),))
    plain = torch.softmax(q @ q.mT / 4, -1) @ q
    torch.testing.assert_close(out, plain)
    assert tangent.shape == out.shape


# --- Varlen batches, and what ships ---------------------------------------------------------------


def varlen(tokens: int = 400, **changed: Any) -> Call:
    query, starts = torch.empty(tokens, 1, 64, dtype=torch.bfloat16), torch.zeros(5)
    call = Call(query, query, query, None, None, None, 0.0, False, None)
    sequences = Sequences(starts, changed.pop("key_starts", starts), tokens, tokens)
    return call._replace(sequences=sequences, **changed)


@pytest.mark.parametrize(("tokens", "expected"), [(99, False), (100, True)])
def test_the_mean_length_of_a_varlen_batch_counts(tokens: int, expected: bool) -> None:
    assert (library_of(varlen(4 * tokens), backward=True) is not None) == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"dropout_p": 0.1},
        {"window_left": 4, "window_right": 0},
        {"key": torch.empty(399, 1, 64, dtype=torch.bfloat16)},
        {"key_starts": torch.zeros(5)},
        {"query": torch.empty(400, 1, 64, dtype=torch.bfloat16).as_subclass(Other)},
        {"query": torch.empty(400, 1, 64, dtype=torch.float32)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_pytorchs_varlen_does_not_take_stays_here(changed: dict[str, Any]) -> None:
    assert library_of(varlen(), backward=True) is not None
    assert library_of(varlen(**changed), backward=True) is None


@pytest.mark.parametrize("gpu", [80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("dim", [32, 48, 64, 80, 96, 128])
def test_long_calls_reach_pytorch_on_every_gpu(
    gpu: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (dispatch.resources.files("leaner_kernels.ops.attention") / "library.toml").read_text()
    monkeypatch.setattr(dispatch, "RULES", dispatch.read_rules(text))
    for causal in (False, True):
        call = {"varlen": False, "causal": causal, "backward": True, "head_dim": dim}
        assert find_rule_of_library(gpu, **call, tokens=4096) is not None
        rule = find_rule_of_library(gpu, **call, tokens=16, programs=8, float32=True)
        assert rule is not None
        assert rule.source.startswith("predicted")


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_a_call_that_goes_to_a_library_is_one_compiled_graph(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, made to choose as on a GPU; tests/gpu has the same on one."""
    torch.testing.assert_close(*library_call(packed, "cpu", monkeypatch))


# --- Heads wider than the kernels take ------------------------------------------------------------


def wide(*shape: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, 160, requires_grad=True) for _ in range(3)]


def test_wide_heads_are_pytorchs_with_one_warning() -> None:
    sdpa._warn_of_width.cache_clear()
    q, k, v = wide(2, 3, 20)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    with pytest.warns(UserWarning, match="head dimension 160 is above 128") as warned:
        out = attention(q, k, v, is_causal=True)
    assert [warning.filename for warning in warned] == [__file__]
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
    monkeypatch.setattr(sdpa.ops, "attention", None)
    masks = []
    pytorchs = sdpa._sdpa

    def watched(*given: Any, **params: Any) -> Tensor:
        masks.append(given[3])
        return pytorchs(*given, **params)

    monkeypatch.setattr(sdpa, "_sdpa", watched)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q = torch.empty(2, 3, 20, 160, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        out = attention(q, q, q, torch.zeros(20, 20, device="cuda"))
    assert out.shape == q.shape
    assert [mask.dtype for mask in masks] == [torch.bfloat16]


def test_wide_heads_have_no_statistics_and_no_softcap() -> None:
    q, k, v = wide(1, 1, 4)
    with pytest.raises(ValueError, match="a head dimension up to 128, got 160"):
        attention_with_stats(q, k, v)
    with pytest.raises(ValueError, match="softcap needs a head dimension up to 128, got 160"):
        attention(q, k, v, softcap=20.0)


@pytest.mark.filterwarnings("ignore:head dimension")
def test_wide_heads_have_forward_mode_and_second_derivatives() -> None:
    q, k, v = (t.detach().double() for t in wide(1, 2, 4))
    out, tangent = torch.func.jvp(lambda q: attention(q, k, v), (q,), (torch.ones_like(q),))
    plain = torch.softmax(q @ k.mT / 160**0.5, -1) @ v
    torch.testing.assert_close(out, plain)
    assert tangent.shape == out.shape
    hessian = torch.func.hessian(lambda x: attention(x, k, v).square().sum())(q)
    assert hessian.isfinite().all()
