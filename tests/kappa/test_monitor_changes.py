"""A row says what ran in its step; several monitors in a step; calls inside transforms."""

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leaner_kernels
from leaner_kernels import (
    KappaMonitor,
    QKClip,
    condition_number,
    gaussian_condition_number,
    head_report,
)
from leaner_kernels.adapters import pytorch
from leaner_kernels.monitor import measurement
from leaner_kernels.nn import ManyHeadAttention

SDPA = nn.functional.scaled_dot_product_attention
DIM, HEAD_DIM = 24, 6


class OtherAttention(nn.Module):
    """An attention module of a user, with the attributes that pruning changes."""

    def __init__(self, attend: Callable[..., Tensor], num_heads: int = 4) -> None:
        super().__init__()
        self.attend, self.num_heads = attend, num_heads
        self.qkv = nn.Linear(DIM, 3 * num_heads * HEAD_DIM)
        self.proj = nn.Linear(num_heads * HEAD_DIM, DIM)
        well_conditioned(self)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


def ours(num_heads: int = 4) -> nn.Module:
    return well_conditioned(ManyHeadAttention(DIM, num_heads, HEAD_DIM))


def well_conditioned(module: Any) -> Any:
    """Return a module whose tokens differ, so that kappa of the next one is small too."""
    nn.init.normal_(module.qkv.weight, std=0.3)
    nn.init.normal_(module.proj.weight, std=0.3)
    return module


KINDS: dict[str, Callable[..., Any]] = {
    "ours": ours,
    "leaner_kernels.attention": lambda n=4: OtherAttention(leaner_kernels.attention, n),
    "PyTorch's": lambda n=4: OtherAttention(SDPA, n),
}


def model_of(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(KINDS[kind](), KINDS[kind]())


def rows_of(monitor: KappaMonitor, step: int, x: Tensor) -> list[dict[str, Any]]:
    with monitor.step(step) as rows:
        monitor.model(x)
    return rows


def fresh(model: nn.Module, x: Tensor) -> list[dict[str, Any]]:
    """Return the rows of a monitor of the model as it is now."""
    return rows_of(KappaMonitor(model, every=1), 1, x)


def prune(module: Any, kept: int) -> None:
    """Keep the first heads of a module."""
    qkv = module.qkv.weight.unflatten(0, (3, module.num_heads, HEAD_DIM))[:, :kept]
    bias = module.qkv.bias.unflatten(0, (3, module.num_heads, HEAD_DIM))[:, :kept]
    module.num_heads = kept
    module.qkv.weight = nn.Parameter(qkv.flatten(0, 2).detach().clone())
    module.qkv.bias = nn.Parameter(bias.flatten().detach().clone())
    module.proj.weight = nn.Parameter(module.proj.weight[:, : kept * HEAD_DIM].detach().clone())


def to_more_heads(model: nn.Sequential, kind: str) -> None:
    model[0] = KINDS[kind](7)


def freeze(model: nn.Sequential, kind: str) -> None:
    model.requires_grad_(False)


CHANGES: dict[str, Callable[[nn.Sequential, str], object]] = {
    "pruned": lambda model, kind: prune(model[0], 3),
    "pruned to one head": lambda model, kind: prune(model[1], 1),
    "replaced": lambda model, kind: model.__setitem__(1, KINDS[kind]()),
    "replaced by more heads": to_more_heads,
    "replaced by another kind": lambda model, kind: model.__setitem__(
        0, OtherAttention(SDPA) if kind == "ours" else ours()
    ),
    "added": lambda model, kind: model.append(KINDS[kind](2)),
    "added before": lambda model, kind: model.insert(0, KINDS[kind](2)),
    "in float64": lambda model, kind: model.double(),
    "frozen": freeze,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_after_a_change_are_those_of_a_new_monitor(kind: str, change: str) -> None:
    model, x = model_of(kind), torch.randn(5, 9, DIM)
    monitor = KappaMonitor(model, every=1)
    rows_of(monitor, 0, x)
    CHANGES[change](model, kind)
    x = torch.randn(3, 13, DIM, dtype=next(model.parameters()).dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = rows_of(monitor, 1, x)
    assert rows == fresh(model, x)
    assert all(row["reason"] is None and row["tokens"] == 13 for row in rows)
    for row in rows:
        width = row["heads"] * row["head_dim"]
        assert row["kappa_gaussian"] == gaussian_condition_number(13, width)
        assert len(row["head_norms"]) == row["heads"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_is_gone_keeps_a_row_with_the_reason(kind: str) -> None:
    model, x = model_of(kind), torch.randn(2, 9, DIM)
    monitor = KappaMonitor(model, every=1)
    rows_of(monitor, 0, x)
    del model[1]
    first, gone = rows_of(monitor, 1, x)
    assert (first["layer"], first["reason"]) == ("0", None)
    assert (gone["layer"], gone["kappa"], gone["reason"]) == (
        "1",
        None,
        "no call of several queries",
    )


def test_a_monitor_goes_on_over_use_and_undo() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(DIM, 4, 16, batch_first=True)
    x, monitor = torch.randn(3, 9, DIM), KappaMonitor(model, every=1)
    before = rows_of(monitor, 0, x)
    report = pytorch.use(model)
    swapped = rows_of(monitor, 1, x)
    report.undo()
    after = rows_of(monitor, 2, x)
    sources = [rows[0]["source"] for rows in (before, swapped, after)]
    assert sources == ["recomputed", "same pass", "recomputed"]
    for rows in (swapped, after):
        assert rows[0]["kappa"] == pytest.approx(before[0]["kappa"], rel=1e-3)


# --- Several monitors in a step -------------------------------------------------------------------


ORDERS = ("nested", "crossed", "second inside")


def rows_of_both(
    order: str, first: KappaMonitor, second: KappaMonitor, forward: Callable[[], Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    first.begin(0)
    if order == "second inside":
        forward()
    second.begin(0)
    forward()
    if order == "crossed":
        rows = first.end()
        return rows, second.end()
    others = second.end()
    return first.end(), others


def without(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in names} for row in rows]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_monitors_of_two_models_capture_their_own_numbers_of_samples(kind: str, order: str) -> None:
    teacher, student, x = model_of(kind), model_of(kind), torch.randn(8, 12, DIM)
    alone = [
        rows_of(KappaMonitor(model, every=1, samples=samples), 0, x)
        for model, samples in ((teacher, 8), (student, 1))
    ]
    first = KappaMonitor(teacher, every=1, samples=8)
    second = KappaMonitor(student, every=1, samples=1)
    both = rows_of_both(order, first, second, lambda: (teacher(x), student(x)))
    # One launch of other slots: equal up to rounding.
    for rows, expected in zip(both, alone):
        assert [row["kappa"] for row in rows] == pytest.approx([row["kappa"] for row in expected])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["leaner_kernels.attention", "PyTorch's"])
def test_monitors_of_one_model_of_others_capture_their_own_numbers_of_samples(
    kind: str, order: str
) -> None:
    model, x = model_of(kind), torch.randn(8, 12, DIM)
    alone = [rows_of(KappaMonitor(model, every=1, samples=n), 0, x) for n in (8, 1)]
    first, second = (KappaMonitor(model, every=1, samples=n) for n in (8, 1))
    both = rows_of_both(order, first, second, lambda: model(x))
    for rows, expected in zip(both, alone):
        assert [row["kappa"] for row in rows] == pytest.approx([row["kappa"] for row in expected])


@pytest.mark.parametrize("need_weights", [True, False])
def test_two_monitors_of_pytorchs_module_both_have_rows(need_weights: bool) -> None:
    model = nn.MultiheadAttention(DIM, 4)
    x = torch.randn(9, 8, DIM)
    first, second = (KappaMonitor(model, every=1, samples=n) for n in (8, 1))
    with ExitStack() as stack:
        rows = [stack.enter_context(monitor.step(0)) for monitor in (first, second)]
        model(x, x, x, need_weights=need_weights)
    ((one,), (other,)) = rows
    assert one["kappa"] != other["kappa"]
    assert one["kappa"]
    assert other["kappa"]


@pytest.mark.parametrize("order", ORDERS)
def test_of_two_monitors_of_modules_of_ours_the_later_samples_and_the_other_says_so(
    order: str,
) -> None:
    model, x = model_of("ours"), torch.randn(8, 12, DIM)
    expected = rows_of(KappaMonitor(model, every=1, samples=1), 0, x)
    first, second = (KappaMonitor(model, every=1, samples=n) for n in (8, 1))
    rows, others = rows_of_both(order, first, second, lambda: model(x))
    assert others == expected
    reasons = {(row["kappa"], row["reason"]) for row in rows}
    assert reasons == {(None, "sampled by another monitor")}
    assert all(module.capture_samples == 0 for module in model)
    # Each is alone in the next step.
    assert without(rows_of(first, 1, x)) == rows_of(KappaMonitor(model, every=1, samples=8), 1, x)


def test_monitors_with_other_intervals_and_a_part_of_a_model() -> None:
    model, x = model_of("leaner_kernels.attention"), torch.randn(8, 12, DIM)
    whole, part = (
        KappaMonitor(model, every=2, samples=2),
        KappaMonitor(model[1], every=3, samples=5),
    )
    (expected,) = rows_of(KappaMonitor(model[1], every=1, samples=5), 0, model[0](x))
    for step in range(7):
        with whole.step(step) as rows, part.step(step) as of_part:
            model(x)
        assert [row["layer"] for row in rows] == (["0", "1"] if step % 2 == 0 else [])
        assert [row["kappa"] for row in of_part] == pytest.approx(
            [expected["kappa"]] if step % 3 == 0 else []
        )


def test_a_copied_model_is_sampled_by_no_monitor_of_the_original() -> None:
    model, x = model_of("ours"), torch.randn(2, 9, DIM)
    monitor = KappaMonitor(model, every=1)
    with monitor.step(0) as rows:
        other = copy.deepcopy(model)
        model(x)
    assert all(row["kappa"] for row in rows)
    assert all(row["kappa"] for row in rows_of(KappaMonitor(other, every=1), 0, x))


# --- The report of heads --------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, [5, 9]])
def test_a_head_report_has_the_means_of_head_report_without_padding(lengths: Any) -> None:
    torch.manual_seed(0)
    model, tokens = ManyHeadAttention(DIM, 3, HEAD_DIM), torch.randn(2, 9, DIM)
    monitor = KappaMonitor(model, every=1, samples=2, head_report=True)
    with monitor.step(0) as rows:
        model(tokens, key_lengths=lengths)
        assert model.captured is not None
        heads = model.captured.heads.double()
    samples = [a[:count] for a, count in zip(heads, lengths or [9, 9])]
    reports = [head_report(a, 3) for a in samples]
    pairs = ~torch.eye(3, dtype=torch.bool)

    def mean(values: list[Tensor]) -> Any:
        return pytest.approx(float(torch.stack(values).mean()), rel=1e-6)

    (row,) = rows
    assert row["head_correlation"] == mean([one.correlation[pairs].mean() for one in reports])
    assert row["isotropy"] == mean([one.isotropy.mean() for one in reports])
    assert row["mean_share"] == mean([one.mean_share for one in reports])
    assert row["isotropy_gaussian"] == (row["tokens"] - 1) / (row["tokens"] + HEAD_DIM)
    assert row["head_correlation_gaussian"] == HEAD_DIM / (row["tokens"] + HEAD_DIM)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_report_changes_no_other_column_and_costs_nothing_when_off(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = model_of(kind), torch.randn(3, 9, DIM)
    with_report = rows_of(KappaMonitor(model, every=1, head_report=True), 0, x)
    new = {"head_correlation", "isotropy", "mean_share"}
    new |= {"head_correlation_gaussian", "isotropy_gaussian"}
    assert all(0 < row[name] <= 1 for row in with_report for name in new)
    monkeypatch.setattr(measurement, "head_report", None)
    rows = rows_of(KappaMonitor(model, every=1), 0, x)
    assert not new & rows[0].keys()
    assert rows == without(with_report, *new)


def test_one_head_has_no_correlation_and_a_layer_that_did_not_run_no_report() -> None:
    model, x = nn.Sequential(ours(1), ours(2)), torch.randn(3, 9, DIM)
    monitor = KappaMonitor(model, every=1, head_report=True)
    with monitor.step(0) as rows:
        model[0](x)
    one, gone = rows
    assert one["head_correlation"] is None
    assert one["isotropy"] is not None
    assert gone["reason"] == "not run"
    assert gone["isotropy"] is gone["isotropy_gaussian"] is None


# --- nn.MultiheadAttention called as by default ---------------------------------------------------


MASKS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "none": lambda rows, cols: {},
    "boolean": lambda rows, cols: {"attn_mask": torch.arange(cols) > torch.arange(rows)[:, None]},
    "additive": lambda rows, cols: {"attn_mask": torch.randn(rows, cols)},
    "of each head": lambda rows, cols: {"attn_mask": torch.randn(3 * 4, rows, cols)},
    "causal": lambda rows, cols: {
        "attn_mask": nn.Transformer.generate_square_subsequent_mask(rows),
        "is_causal": True,
    },
    "padding": lambda rows, cols: {
        "key_padding_mask": torch.arange(cols) >= cols - torch.eye(3, 1)
    },
    "both": lambda rows, cols: {
        "attn_mask": torch.randn(rows, cols),
        "key_padding_mask": torch.zeros(3, cols).index_fill(1, torch.tensor([1]), float("-inf")),
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "dropout": {"dropout": 0.3},
    "tokens first": {"batch_first": False},
    "other keys": {"kdim": 10, "vdim": 14},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("masks", MASKS)
def test_multihead_attention_with_weights_is_measured_and_returns_the_same(
    masks: str, options: str
) -> None:
    torch.manual_seed(0)
    given = {"batch_first": True, **OPTIONS[options]}
    module = nn.MultiheadAttention(DIM, 4, **given)
    rows, cols = 9, 9 if masks == "causal" else 7
    query = torch.randn(3, rows, DIM)
    key, value = (torch.randn(3, cols, given.get(name, DIM)) for name in ("kdim", "vdim"))
    inputs = [query, key, value]
    if not given["batch_first"]:
        inputs = [t.transpose(0, 1) for t in inputs]
    named = MASKS[masks](rows, cols)
    monitor = KappaMonitor(module, every=1, samples=3)
    for step, (training, average) in enumerate(((True, True), (True, False), (False, True))):
        module.train(training)
        torch.manual_seed(1)
        expected = module(*inputs, average_attn_weights=average, **named)
        state = torch.get_rng_state()
        torch.manual_seed(1)
        with monitor.step(step) as measured:
            actual = module(*inputs, average_attn_weights=average, **named)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(map(torch.equal, actual, expected))
        (row,) = measured
        assert (row["heads"], row["head_dim"], row["tokens"]) == (4, 6, rows)
        assert row["columns"] == cols + (options in ("bias_kv", "zero_attn"))
    # In float64, before the output projection.
    exact = copy.deepcopy(module).double().eval()
    nn.init.eye_(exact.out_proj.weight)
    nn.init.zeros_(exact.out_proj.bias)
    wide = {
        k: v.double() if getattr(v, "is_floating_point", bool)() else v for k, v in named.items()
    }
    heads = exact(*(t.double() for t in inputs), **wide)[0].detach()
    heads = heads if given["batch_first"] else heads.transpose(0, 1)
    kappa = condition_number(heads).kappa.log().mean().exp()
    assert row["kappa"] == pytest.approx(float(kappa), rel=1e-3)


def test_multihead_attention_with_weights_keeps_its_gradients_under_a_monitor() -> None:
    module, x = nn.MultiheadAttention(DIM, 4, batch_first=True), torch.randn(3, 9, DIM)

    def gradients() -> list[Tensor]:
        out, weights = module(x, x, x)
        loss = out.square().sum() + weights.square().sum()
        return [*torch.autograd.grad(loss, list(module.parameters()))]

    expected = gradients()
    with KappaMonitor(module, every=1).step(0) as rows:
        actual = gradients()
    assert all(map(torch.equal, actual, expected))
    assert rows[0]["kappa"]


# --- Inside transforms of torch.func --------------------------------------------------------------


WRAPPED = {**KINDS, "swapped": lambda: pytorch.TransformerEncoderLayer(DIM, 4, 8, batch_first=True)}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_sampled_step_inside_vmap_changes_nothing_and_is_refused_in_one_line(kind: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(WRAPPED[kind]()).eval(), torch.randn(4, 9, DIM)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x[None],)).square().mean()

    per_example = torch.vmap(torch.func.grad(loss), (None, 0))
    expected = per_example(weights, x)
    monitor = KappaMonitor(model, every=1)
    monitor.begin(0)
    actual = per_example(weights, x)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    with pytest.raises(
        RuntimeError, match="cannot be measured: it runs inside a transform"
    ) as caught:
        monitor.end()
    assert "\n" not in str(caught.value)
    # Later such steps have rows that say so, others are measured.
    assert all(row["kappa"] for row in rows_of(monitor, 1, x))
    with monitor.step(2) as rows:
        per_example(weights, x)
    assert {row["reason"] for row in rows} == {"a call that cannot be traced"}
    assert all(row["kappa"] for row in rows_of(monitor, 3, x))


def test_modules_of_ours_are_measured_inside_grad_jvp_and_functional_call() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(ours(), ours()), torch.randn(4, 9, DIM)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    expected = [row["kappa"] for row in fresh(model, x)]

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    calls: list[Callable[[], Any]] = [
        lambda: loss(weights),
        lambda: torch.func.grad(loss)(weights),
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.func.jacrev(lambda x: model(x).mean((0, 1)))(x),
    ]
    monitor = KappaMonitor(model, every=1)
    for step, call in enumerate(calls):
        with monitor.step(step) as rows:
            call()
        assert [row["kappa"] for row in rows] == pytest.approx(expected, rel=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_qk_clip_refuses_logits_inside_vmap_in_one_line() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(ours()), torch.randn(4, 9, DIM)
    clip = QKClip(model)
    with pytest.raises(RuntimeError, match=r"inside vmap of torch\.func, where QKClip"):
        torch.vmap(lambda x: model(x[None]))(x)
    clip.close()
    torch.vmap(lambda x: model(x[None]))(x)
    clip = QKClip(model, threshold=1e-3)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(weights)
    model(x)
    assert clip.step()["0"].isfinite().all()


def test_a_monitor_prints_its_interval_and_its_layers():
    ours = nn.Sequential(ManyHeadAttention(16, 2, 8))
    assert repr(KappaMonitor(ours, every=7)) == "KappaMonitor(every=7, samples=4, layers: 0)"
    others = nn.TransformerEncoderLayer(8, 2)
    assert repr(KappaMonitor(others)).endswith("layers: none before the first sampled step)")
