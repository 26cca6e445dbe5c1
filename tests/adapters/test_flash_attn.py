"""flash-attention's functions by its names: signatures, layouts and refusals.

That they compute what flash-attention does is in tests/peers/test_flash_attention.py.
"""

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from leaner_kernels.adapters import flash_attn
from leaner_kernels.ops import _tiles
from leaner_kernels.ops.attention import dispatch, sdpa
from leaner_kernels.ops.attention.call import Call

COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
# As in flash_attn/flash_attn_interface.py, version 2.8; *args are those of the function before.
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
    "flash_attn_kvpacked_func": "q, kv, *args, **options",
    "flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
        f"{COMMON}, block_table=None"
    ),
    "flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen, *args, **options",
    "flash_attn_varlen_kvpacked_func": (
        "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **options"
    ),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_()


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_flash_attentions(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    plainly = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert ", ".join(map(str, plainly)) == SIGNATURES[name]


@pytest.mark.parametrize("rest", [{}, {"softcap": 5.0}, {"causal": True, "softmax_scale": 0.3}])
def test_a_packed_projection_gives_what_its_parts_give(rest: dict[str, Any]) -> None:
    qkv = randn(2, 5, 3, 4, 8)
    packed = flash_attn.flash_attn_qkvpacked_func(qkv, **rest)
    torch.testing.assert_close(packed, flash_attn.flash_attn_func(*qkv.unbind(2), **rest))
    assert packed.is_contiguous()


@pytest.mark.parametrize("window_size", [(-1, -1), (2, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alone", [True, False])
def test_sequences_of_a_varlen_batch_are_attended_one_by_one(
    alone: bool, causal: bool, window_size: tuple[int, int]
) -> None:
    starts = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    ends = starts if alone else torch.tensor([0, 3, 9, 13], dtype=torch.int32)
    q, k, v = (randn(13, 4, 8, seed=i) for i in range(3))
    rest = {"causal": causal, "window_size": window_size}
    out = flash_attn.flash_attn_varlen_func(q, k, v, starts, ends, 7, 7, **rest)
    for (a, b), (c, d) in zip(pairwise(starts.tolist()), pairwise(ends.tolist()), strict=True):
        one = flash_attn.flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], **rest)
        torch.testing.assert_close(out[a:b], one[0])
    kv = torch.stack([k, v], 1)
    same = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, starts, ends, 7, 7, **rest)
    torch.testing.assert_close(same, out)
    if alone:
        qkv = torch.stack([q, k, v], 1)
        same = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, starts, 7, **rest)
        torch.testing.assert_close(same, out)


def test_log_sum_exp_comes_with_the_output() -> None:
    q, k, v = (randn(2, 5, 4, 8, seed=i) for i in range(3))
    out, lse, probs = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * 8**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, flash_attn.flash_attn_func(q, k, v))
    assert probs is None
    starts = torch.tensor([0, 5, 10], dtype=torch.int32)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    _, side_by_side, _ = flash_attn.flash_attn_varlen_func(
        *flat, starts, starts, 5, 5, return_attn_probs=True
    )
    torch.testing.assert_close(side_by_side, lse.transpose(0, 1).flatten(1))


def test_what_is_not_computed_is_refused_in_one_line() -> None:
    q = randn(1, 5, 4, 8)
    dense = {
        "alibi_slopes are not supported": {"alibi_slopes": torch.ones(4)},
        "return_attn_probs excludes dropout": {"return_attn_probs": True, "dropout_p": 0.1},
    }
    for message, rest in dense.items():
        with pytest.raises(ValueError, match=f"^{message}.*$"):
            flash_attn.flash_attn_func(q, q, q, **rest)
    with pytest.raises(ValueError, match=r"^q must be \(B, N, H, D\), got \(5, 4, 8\)$"):
        flash_attn.flash_attn_func(q[0], q[0], q[0])
    with pytest.raises(ValueError, match=r"^k must be \(B, M, Hkv, D\), got \(4, 8\)$"):
        flash_attn.flash_attn_func(q, q[0, 0], q[0, 0])
    with pytest.raises(ValueError, match=r"^kv must be \(B, M, 2, Hkv, D\), got \(1, 5, 4, 8\)$"):
        flash_attn.flash_attn_kvpacked_func(q, q)
    with pytest.raises(ValueError, match=r"^k must be \(Tk, Hkv, D\), got \(8,\)$"):
        flash_attn.flash_attn_varlen_func(q[0], q[0, 0, 0], q[0], *[torch.zeros(2)] * 2, 5, 5)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    pages = torch.zeros(1, 1, dtype=torch.int32)
    for message, rest in {
        "softcap of a varlen batch is not supported, got 5.0": {"softcap": 5.0},
        "block_table is not supported": {"block_table": pages},
    }.items():
        with pytest.raises(ValueError, match=f"^{message}.*$"):
            flash_attn.flash_attn_varlen_func(*[q[0]] * 3, starts, starts, 5, 5, **rest)


# --- deterministic=True ---------------------------------------------------------------------------


# Of shapes that ``attention`` dispatches to PyTorch on an H200.
DISPATCHED: dict[str, tuple[tuple[int, ...], ...]] = {
    "flash_attn_func": ((1, 1024, 2, 64),) * 3,
    "flash_attn_qkvpacked_func": ((1, 1024, 3, 2, 64),),
    "flash_attn_kvpacked_func": ((1, 1024, 2, 64), (1, 1024, 2, 2, 64)),
    "flash_attn_varlen_func": ((1024, 2, 64),) * 3,
    "flash_attn_varlen_qkvpacked_func": ((1024, 3, 2, 64),),
    "flash_attn_varlen_kvpacked_func": ((1024, 2, 64), (1024, 2, 2, 64)),
}


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Allow every algorithm, and note the calls that libraries compute."""
    torch.use_deterministic_algorithms(False)  # which every other test has on
    computed = []

    def library_attention(call: Call, _enable_gqa: bool) -> Tensor:
        computed.append("sdpa")
        return call.query + 0

    def varlen_attention(call: Call) -> Tensor:
        computed.append("varlen_attn")
        return call.query + 0

    monkeypatch.setattr(sdpa, "library_attention", library_attention)
    monkeypatch.setattr(sdpa, "varlen_attention", varlen_attention)
    return computed


def bfloat16(*shapes: tuple[int, ...]) -> list[Any]:
    return [randn(*shape, seed=i).detach().bfloat16() for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("name", DISPATCHED)
def test_a_deterministic_call_runs_our_kernels_where_another_is_dispatched(
    name: str, libraries: list[str]
) -> None:
    arguments = bfloat16(*DISPATCHED[name])
    if "varlen" in name:
        starts = torch.tensor([0, 1024], dtype=torch.int32)
        packed = name == "flash_attn_varlen_qkvpacked_func"
        arguments += [starts, 1024] if packed else [starts, starts, 1024, 1024]
    function = getattr(flash_attn, name)
    for capability in (90, 75):
        with _tiles.assume(capability):
            deterministic = function(*arguments, deterministic=True)
            assert libraries == []
            function(*arguments)
        # Before 8.0 PyTorch has no attention for varlen batches.
        library = ["varlen_attn"] if "varlen" in name else ["sdpa"]
        assert libraries == ([] if capability == 75 and "varlen" in name else library)
        libraries.clear()
    assert deterministic.shape[-2:] == (2, 64)


@pytest.mark.parametrize(
    ("capability", "dim", "reason"),
    [
        (90, 160, "head dimension 160 is above 128"),
        (70, 64, "our kernels need compute capability 7.5"),
    ],
)
def test_a_deterministic_call_that_a_library_alone_computes_is_refused(
    capability: int, dim: int, reason: str, libraries: list[str]
) -> None:
    q, qkv = (t.requires_grad_() for t in bfloat16((1, 8, 2, dim), (1, 8, 3, 2, dim)))
    line = f"^deterministic=True needs torch.use_deterministic_algorithms.* call: {reason}$"
    with _tiles.assume(capability):
        with pytest.raises(ValueError, match=line):
            flash_attn.flash_attn_func(q, q, q, deterministic=True)
        with pytest.raises(ValueError, match=line):
            flash_attn.flash_attn_qkvpacked_func(qkv, deterministic=True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.raises(ValueError, match=line):
            flash_attn.flash_attn_func(q, q, q, deterministic=True)
        torch.use_deterministic_algorithms(True)
        flash_attn.flash_attn_func(q, q, q, deterministic=True)
        torch.use_deterministic_algorithms(False)
        flash_attn.flash_attn_func(*[q.detach()] * 3, deterministic=True)  # no gradient
    assert libraries == ["sdpa", "sdpa"]


@pytest.mark.parametrize("dim", [8, 160])
@pytest.mark.filterwarnings("ignore:head dimension")
def test_a_deterministic_call_on_the_cpu_is_any_call(dim: int) -> None:
    torch.use_deterministic_algorithms(False)
    q, k, v = (randn(2, 5, 4, dim, seed=i) for i in range(3))
    gradients = []
    for deterministic in (False, True):
        out = flash_attn.flash_attn_func(q, k, v, causal=True, deterministic=deterministic)
        gradients.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(map(torch.equal, *gradients))


def test_a_deterministic_call_is_one_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, made to choose as on a GPU."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(dispatch, "on_gpu", lambda query: True)
    monkeypatch.setattr(_tiles, "capability", lambda device: 90)
    called = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        called.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    q = bfloat16(*DISPATCHED["flash_attn_func"])
    for deterministic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(flash_attn.flash_attn_func, fullgraph=True, backend=backend)
        compiled(*q, deterministic=deterministic)
    ours = [any("leaner_kernels" in name for name in names) for names in called]
    assert ours == [False, True]
