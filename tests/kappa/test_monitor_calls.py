"""Which calls of attention in models of others KappaMonitor traces; the reasons for the rest."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from leaner_kernels import KappaMonitor, attention
from leaner_kernels.monitor import trace
from leaner_kernels.nn import ManyHeadAttention
from leaner_kernels.ops import _hooks
from tests.kappa.test_monitor_foreign import SDPA, kappa


def rows_of(call: Callable[..., Tensor], **options: object) -> list[dict]:
    """The rows of a model that does nothing but this call."""

    class Calls(nn.Module):
        def forward(self) -> Tensor:
            return call()

    monitor = KappaMonitor(Calls(), every=1, **options)
    monitor.begin(0)
    monitor.model()
    return monitor.end()


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


SHAPES = {
    "values of another width": ((4, 2, 7, 4), (4, 2, 7, 4), (4, 2, 7, 6), {}),
    "cross": ((4, 2, 5, 4), (4, 2, 9, 4), (4, 2, 9, 4), {}),
    "cross, causal": ((4, 2, 5, 4), (4, 2, 9, 4), (4, 2, 9, 4), {"is_causal": True}),
    "scaled": ((4, 2, 7, 4), (4, 2, 7, 4), (4, 2, 7, 4), {"scale": 2.0}),
    "one key head": ((4, 6, 7, 4), (4, 1, 7, 4), (4, 1, 7, 4), {"enable_gqa": True}),
    "grouped": ((4, 6, 7, 4), (4, 2, 7, 4), (4, 2, 7, 4), {"enable_gqa": True, "is_causal": True}),
    "boolean mask": ((4, 2, 7, 4), (4, 2, 8, 4), (4, 2, 8, 4), {"attn_mask": draw(7, 8) > 0}),
    "padding": ((4, 2, 7, 4),) * 3 + ({"attn_mask": draw(4, 1, 1, 7) > -0.5},),
    "additive mask": ((4, 2, 7, 4),) * 3 + ({"attn_mask": draw(2, 7, 7)},),
    "lower right": (
        (4, 2, 5, 4),
        (4, 2, 9, 4),
        (4, 2, 9, 4),
        {"attn_mask": causal_lower_right(5, 9)},
    ),
    "one head": ((4, 7, 4),) * 3 + ({"attn_mask": draw(4, 7, 7)},),
    "no batch": ((7, 4),) * 3 + ({},),
    "five axes": ((2, 2, 3, 7, 4),) * 3 + ({"attn_mask": draw(2, 1, 1, 7, 7)},),
}


@pytest.mark.parametrize("block", [2**24, 30], ids=["whole", "blocks"])
@pytest.mark.parametrize("name", SHAPES)
def test_whatever_pytorchs_function_takes_is_measured(name, block, monkeypatch) -> None:
    *shapes, options = SHAPES[name]
    monkeypatch.setattr(trace, "MAX_SCORES", block)
    q, k, v = (draw(*shape, dtype=torch.float64) for shape in shapes)
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point() and "lower" not in name:
        options = options | {"attn_mask": mask.double()}
    (row,) = rows_of(lambda: SDPA(q, k, v, **options), samples=4)
    out = SDPA(q, k, v, **options)
    while out.dim() < 4:
        out = out.unsqueeze(-3)
    out = out.flatten(0, -4)
    assert (row["heads"], row["tokens"], row["head_dim"]) == out.shape[1:]
    assert row["columns"] == k.shape[-2]
    assert row["kappa"] == pytest.approx(kappa(out.transpose(1, 2).flatten(2)), rel=1e-6)
    norms = out.square().sum((2, 3)).sqrt().mean(0).tolist()
    assert row["head_norms"] == pytest.approx(norms, rel=1e-6)
    # Attention to the identity is P itself.
    eye = torch.eye(k.shape[-2], dtype=torch.float64).expand(*v.shape[:-2], -1, -1)
    p = SDPA(q, k, eye, **options)
    assert row["entropy"] == pytest.approx(torch.special.entr(p).sum(-1).mean().item(), rel=1e-5)
    norms = torch.linalg.matrix_norm(p).mean().item()
    assert row["prob_norm"] == pytest.approx(norms, rel=1e-5)


def test_only_what_the_model_itself_rounds_is_rounded() -> None:
    q, k, v = draw(4, 2, 7, 4), draw(4, 2, 8, 4), draw(4, 2, 8, 5)
    with torch.autocast("cpu", torch.bfloat16):
        (row,) = rows_of(lambda: SDPA(q, k, v), samples=4)
    out = SDPA(*(t.bfloat16().double() for t in (q, k, v)))
    assert row["kappa"] == pytest.approx(kappa(out.transpose(1, 2).flatten(2)), rel=1e-5)

    # float64 stays: this kappa, above 1e9, is past what float32 heads can tell.
    q, k, v = (t[:, :1].double() for t in (q, k, v))
    v[..., 0] *= 1e-9
    (row,) = rows_of(lambda: SDPA(q, k, v), samples=4)
    assert row["kappa"] == pytest.approx(kappa(SDPA(q, k, v).transpose(1, 2).flatten(2)), rel=1e-5)
    assert row["kappa"] > 1e9


def test_several_calls_of_one_module_are_numbered_and_single_queries_passed_over() -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return attention(q, k, k) + SDPA(q, k, k) + SDPA(k, q, q).sum()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()

        def forward(self, rows: int) -> Tensor:
            return self.attn(draw(4, 2, rows, 4), draw(4, 2, 6, 4))

    monitor = KappaMonitor(Model(), every=1)
    monitor.begin(0)
    monitor.model(9)
    rows = monitor.end()
    assert [(r["layer"], r["tokens"], r["columns"]) for r in rows] == [
        ("attn", 9, 6),
        ("attn#1", 9, 6),
        ("attn#2", 6, 9),
    ]
    # The newest forward counts, but not a decoding step of one token, and of logits the largest.
    monitor.begin(1)
    for count in (9, 5, 1):
        monitor.model(count)
    newer = monitor.end()
    assert [(r["layer"], r["tokens"], r["columns"]) for r in newer] == [
        ("attn", 5, 6),
        ("attn#1", 5, 6),
        ("attn#2", 6, 1),
    ]
    assert newer[0]["max_logit"] >= rows[0]["max_logit"]


def test_where_nothing_can_be_seen_the_first_sampled_step_says_so() -> None:
    def problem(call: Callable[[], object], forward: bool = True) -> str:
        class Model(nn.Module):
            def forward(self) -> object:
                return call()

        monitor = KappaMonitor(Model(), every=1)
        monitor.begin(3)
        if forward:
            monitor.model()
        with pytest.raises(RuntimeError) as caught:
            monitor.end()
        assert "\n" not in str(caught.value)
        assert monitor.layers == []
        return str(caught.value)

    q = draw(2, 3, 4, 5)
    assert "Model made no attention call that can be traced" in problem(lambda: q @ q.mT)
    assert "Model made no attention call" in problem(lambda: SDPA(q[:, :, :1], q, q))
    assert "Model ran no forward between begin and end" in problem(lambda: q, forward=False)
    nested = torch.nested.nested_tensor([q[0].mT, q[1].mT], layout=torch.jagged).transpose(1, 2)
    assert "is given a Nested" in problem(lambda: SDPA(nested, nested, nested))
    in_transform = problem(lambda: torch.func.vmap(SDPA)(q, q, q))
    assert "runs inside a transform of torch.func" in in_transform


def test_a_step_that_is_cancelled_leaves_nothing_behind_and_is_not_reported() -> None:
    torch.manual_seed(0)

    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (2, 16)).transpose(1, 2)
            return attention(heads, heads, heads)

    block = nn.ModuleDict({"ours": ManyHeadAttention(32, num_heads=2), "other": Other()})
    x = torch.randn(1, 6, 32)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in block.modules()]
    monitor = KappaMonitor(block, every=1)
    monitor.begin(0)
    block["ours"](x)
    assert _hooks.current is not None
    monitor.cancel()
    assert _hooks.current is None
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in block.modules()] == hooks
    assert (block["ours"].capture_samples, block["ours"].captured) == (0, None)
    assert monitor.end() == []
    monitor.begin(1)
    block["ours"](x)
    block["other"](x)
    assert {(row["step"], row["layer"]) for row in monitor.end()} == {(1, "ours"), (1, "other")}
