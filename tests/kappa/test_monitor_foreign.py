"""KappaMonitor on models whose attention is not a module of ours."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode
from torch.utils.checkpoint import checkpoint

from leaner_kernels import KappaMonitor, attention, attention_qkvpacked
from leaner_kernels.monitor import trace
from leaner_kernels.nn import ManyHeadAttention
from leaner_kernels.ops import _hooks

SDPA = F.scaled_dot_product_attention


class Attention(nn.Module):
    """Self-attention by a function that is given q, k and v, (B, H, N, D)."""

    def __init__(self, call: Callable[..., Tensor], dim: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.call, self.heads = call, heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        # Heads that attend to different tokens: else their outputs are nearly of rank one.
        nn.init.normal_(self.qkv.weight, std=0.4)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.call(*self.split(x)).transpose(1, 2).flatten(2))


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_qkvpacked(torch.stack([q, k, v]).permute(1, 3, 0, 2, 4)).transpose(1, 2)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def batch(tokens: int = 9) -> Tensor:
    return torch.randn(6, tokens, 12, generator=torch.Generator().manual_seed(1))


def untouched(model: nn.Module) -> bool:
    """Whether the model has no hooks, and no trace is active."""
    hooks = [
        {**m._forward_hooks, **m._forward_pre_hooks, **m._forward_hooks_always_called}
        for m in model.modules()
    ]
    assert F.scaled_dot_product_attention is SDPA
    return not any(hooks) and _hooks.current is None and _get_current_function_mode() is None


def one_step(monitor: KappaMonitor, model: nn.Module, *inputs: Tensor, step: int = 0) -> list[dict]:
    monitor.begin(step)
    model(*inputs).sum().backward()
    return monitor.end()


def exact_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    entries: tuple[int, ...] = (0, 2, 4),
    **options: object,
) -> Tensor:
    """The heads of these entries side by side, by PyTorch's function in float64."""
    q, k, v = (t[list(entries)].detach().double() for t in (q, k, v))
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    return SDPA(q, k, v, mask, **options).transpose(1, 2).flatten(2)


def kappa(heads: Tensor) -> float:
    return torch.linalg.cond(heads).log().mean().exp().item()


@pytest.mark.parametrize(
    ("call", "source"),
    [(SDPA, "recomputed"), (attention, "same pass"), (packed, "same pass")],
    ids=["sdpa", "attention", "packed"],
)
def test_calls_of_attention_get_rows_by_the_name_of_their_module(call, source) -> None:
    model = seeded(
        lambda: nn.Sequential(Attention(call), nn.Sequential(nn.LayerNorm(12), Attention(call)))
    )
    x = batch()
    expected, monitor = model(x), KappaMonitor(model, every=1, samples=3)
    monitor.begin(5)
    out = model(x)
    rows = monitor.end()
    assert monitor.layers == [row["layer"] for row in rows] == ["0", "1.1"]
    torch.testing.assert_close(out, expected)
    if call is SDPA:
        assert torch.equal(out, expected)
    inputs = x, model[1][0](model[0](x))
    for row, attend, given in zip(rows, (model[0], model[1][1]), inputs):
        q, k, v = attend.split(given)
        heads = exact_heads(q, k, v)
        assert row["kappa"] == pytest.approx(kappa(heads), rel=1e-3)
        assert (row["step"], row["source"], row["tokens"], row["columns"]) == (5, source, 9, 9)
        assert (row["heads"], row["head_dim"]) == (3, 4)
        # Of the samples where they are computed once more, else of the whole batch.
        logits = (q @ k.mT / 2)[[0, 2, 4] if call is SDPA else slice(None)]
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1).mean().item()
        assert row["max_logit"] == pytest.approx(logits.max().item(), rel=1e-5)
        assert row["entropy"] == pytest.approx(entropy)
        assert row["kappa_before_skip"] is row["kappa_after_skip"] is None


class Layers(nn.Module):
    """An encoder of PyTorch's modules, whose last layer is a decoder's with cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True}
        layer = nn.TransformerEncoderLayer(12, 4, 16, **options)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.decoder = nn.TransformerDecoderLayer(12, 2, 16, **options)
        for name, weight in self.named_parameters():
            if "in_proj_weight" in name:
                nn.init.normal_(weight, std=0.4)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        memory = self.encoder(x, src_key_padding_mask=padding)
        return self.decoder(x[:, :5], memory, memory_key_padding_mask=padding)


NAMES = [
    *("encoder.layers.0.self_attn", "encoder.layers.1.self_attn"),
    *("decoder.self_attn", "decoder.multihead_attn"),
]


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_pytorchs_own_layers_are_seen_training_or_not(padded: bool) -> None:
    model, x = seeded(Layers), batch()
    # Ragged: keys past a length are hidden, and all rows count as tokens.
    padding = torch.arange(9) >= torch.tensor([9, 8, 7, 6, 9, 5])[:, None] if padded else None
    monitor = KappaMonitor(model, every=1, samples=3)
    rows = one_step(monitor, model, x, padding)
    assert [row["layer"] for row in rows] == NAMES
    assert [(row["tokens"], row["columns"]) for row in rows] == [(9, 9), (9, 9), (5, 5), (5, 9)]
    attn = model.encoder.layers[0].self_attn
    q, k, v = F.linear(x, attn.in_proj_weight, attn.in_proj_bias).chunk(3, dim=-1)
    q, k, v = (t.unflatten(-1, (4, 3)).transpose(1, 2) for t in (q, k, v))
    mask = None if padding is None else ~padding[[0, 2, 4], None, None]
    assert rows[0]["kappa"] == pytest.approx(kappa(exact_heads(q, k, v, mask)), rel=1e-3)
    # In evaluation PyTorch would take a fused path that calls nothing that can be traced.
    with torch.no_grad():
        expected = model.eval()(x, padding)
        monitor.begin(1)
        actual = model(x, padding)
    torch.testing.assert_close(actual, expected)
    for row, trained in zip(monitor.end(), rows, strict=True):
        assert row["kappa"] == pytest.approx(trained["kappa"], rel=1e-2)


def test_a_model_may_mix_modules_of_ours_with_others_and_leave_some_out() -> None:
    class Ours(ManyHeadAttention):
        def forward(self, x: Tensor) -> Tensor:
            SDPA(x, x, x)  # inside of ours no call counts
            return super().forward(x)

    model = seeded(
        lambda: nn.Sequential(
            Attention(SDPA), Ours(12, 4, 8), Attention(SDPA), Attention(attention)
        )
    )
    model[2].monitored = False
    monitor = KappaMonitor(model, every=1, samples=3)
    assert monitor.layers == ["1"]
    rows = one_step(monitor, model, batch())
    assert monitor.layers == ["0", "1", "3"]
    assert [(row["layer"], row["source"]) for row in rows] == [
        ("0", "recomputed"),
        ("1", "same pass"),
        ("3", "same pass"),
    ]
    (alone,) = one_step(KappaMonitor(model[1], every=1, samples=3), model, batch())
    assert rows[1] == alone | {"layer": "1"}


def test_other_steps_run_untouched() -> None:
    model = seeded(Layers)
    monitor = KappaMonitor(model, every=2)
    for step in range(4):
        monitor.begin(step)
        assert untouched(model) == (step % 2 == 1)
        model(batch()).sum().backward()
        assert len(monitor.end()) == (4 if step % 2 == 0 else 0)
        assert untouched(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_a_forward_leaves_nothing_behind(error: type[BaseException]) -> None:
    fails = True

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fails:
                raise error
            return x

    model = seeded(lambda: nn.Sequential(Attention(SDPA), nn.Sequential(Fails()), Attention(SDPA)))
    monitor = KappaMonitor(model, every=1)
    monitor.begin(0)
    with pytest.raises(error):
        model(batch())
    # After an interrupt PyTorch calls no hook.
    if error is ValueError:
        assert _get_current_function_mode() is None
    # The step may be begun again, or tried again.
    monitor.begin(1)
    with pytest.raises(error):
        model(batch())
    fails = False
    model(batch())
    assert [row["layer"] for row in monitor.end()] == ["0", "2"]
    assert untouched(model)
    # Or given up, with the monitor.
    fails = True
    monitor.begin(2)
    with pytest.raises(error):
        model(batch())
    del monitor
    assert untouched(model)


@pytest.mark.parametrize("call", [SDPA, attention], ids=["sdpa", "attention"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_count_once(
    call: Callable[..., Tensor], reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = mock.Mock(wraps=trace.attention_statistics)
    monkeypatch.setattr(trace, "attention_statistics", measure)

    class Recomputes(nn.Module):
        def __init__(self, of_module: bool | None) -> None:
            super().__init__()
            self.attn, self.of_module = seeded(lambda: Attention(call)), of_module

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            if self.of_module is None:
                return self.attn(x)
            if self.of_module:
                return checkpoint(self.attn, x, use_reentrant=reentrant)
            q, k, v = self.attn.split(x)
            # No forward runs when the backward calls this.
            heads = checkpoint(lambda *qkv: call(*qkv), q, k, v, use_reentrant=reentrant)
            return self.attn.proj(heads.transpose(1, 2).flatten(2))

    found, grads = [], []
    for of_module in (None, True, False):
        model = Recomputes(of_module)
        found += one_step(KappaMonitor(model, every=1), model, batch())
        grads.append(model.attn.qkv.weight.grad)
    assert [row["layer"] for row in found] == ["attn", "attn", ""]
    assert found[1] == found[0]
    assert found[2] == found[0] | {"layer": ""}
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])
    assert measure.call_count == (3 if call is SDPA else 0)


def test_bfloat16_models_get_the_kappa_that_a_hook_on_the_output_cannot_see() -> None:
    # Tokens somewhat alike, and attention to all of them: kappa is 156,000.
    x = batch(32)[:, :1] + batch(32) / 3
    model = seeded(lambda: nn.Sequential(Attention(SDPA)))
    nn.init.normal_(model[0].qkv.weight, std=0.1, generator=torch.Generator().manual_seed(2))
    in_float32 = model[0].split(x)
    monitor = KappaMonitor(model, every=1, samples=3)
    (exact,) = one_step(monitor, model, x)
    assert exact["kappa"] == pytest.approx(kappa(exact_heads(*in_float32)), rel=1e-2)
    (row,) = one_step(monitor, model.bfloat16(), x.bfloat16(), step=1)
    q, k, v = model[0].split(x.bfloat16())
    truth = kappa(exact_heads(q, k, v))
    assert row["kappa"] == pytest.approx(truth, rel=1e-2)
    hook = SDPA(q, k, v)[[0, 2, 4]].transpose(1, 2).flatten(2).double()
    assert not truth / 2 < kappa(hook) < 2 * truth


@pytest.mark.parametrize("whole_model", [True, False])
def test_compiled_models_run_eagerly_in_sampled_steps_alone(whole_model: bool) -> None:
    model = seeded(lambda: nn.Sequential(Attention(SDPA), Attention(attention)))
    (expected, _) = one_step(KappaMonitor(model, every=1), model, batch())
    compiled = 0

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        nonlocal compiled
        compiled += 1
        return graph.forward

    if whole_model:
        called = torch.compile(model, backend=backend, fullgraph=True)
    else:
        called = model
        for layer in model:
            layer.compile(backend=backend, fullgraph=True)
    # Constructed after it was compiled, of the compiled model, and sampled before and after.
    monitor, counts = KappaMonitor(called, every=2), []
    for step in range(3):
        rows = one_step(monitor, called, batch(), step=step)
        counts.append((len(rows), compiled > 0))
        assert not rows or rows[0]["kappa"] == pytest.approx(expected["kappa"], rel=1e-3)
    assert counts == [(2, False), (0, True), (2, True)]
    assert untouched(model)


def test_a_layer_that_comes_or_goes_or_changes_has_the_rows_of_what_ran() -> None:
    class Attention(nn.Module):
        def forward(self, heads: int) -> Tensor:
            return SDPA(*[torch.randn(2, heads, 4, 5)] * 3)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Attention(), Attention()])

        def forward(self, *heads: int) -> None:
            for layer, count in zip(self.layers, heads):
                if count:
                    layer(count)

    def rows(first: tuple[int, int], then: tuple[int, int]) -> list[tuple[str, int, str]]:
        monitor = KappaMonitor(Model(), every=1)
        for step, heads in enumerate((first, then)):
            monitor.begin(step)
            monitor.model(*heads)
            rows = monitor.end()
        return [(row["layer"], row["heads"], row["reason"]) for row in rows]

    gone = "layers.1", 2, "no call of several queries"
    assert rows((2, 2), (2, 0)) == [("layers.0", 2, None), gone]
    assert rows((2, 2), (2, 3)) == [("layers.0", 2, None), ("layers.1", 3, None)]
    assert rows((2, 2), (1, 2)) == [("layers.0", 1, None), ("layers.1", 2, None)]
    with pytest.warns(UserWarning, match=r"no rows of layers\.0, which look like attention"):
        assert rows((0, 2), (2, 2)) == [("layers.0", 2, None), ("layers.1", 2, None)]
