"""The planner: what it counts, chooses, measures and writes."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from models import papers, plan
from models.memory import predict
from models.plan import Configuration, Limits

BASE = {"image_size": 32, "patch_size": 8, "embed_dim": 48, "mlp_ratio": 4.0, "num_classes": 10}
ROW = papers.PaperRow("tiny", "original", "vit", "widen", 128, {}, None, {}, "")
FLAT = replace(ROW, config=BASE | {"depth": 6, "heads": 4, "head_dim": 12})
STAGED = replace(
    ROW,
    row="staged",
    architecture="volo",
    config={
        "image_size": 32,
        "embed_dims": [32, 64],
        "depths": [2, 4],
        "heads": [2, 4],
        "head_dim": "split",
        "mlp_ratio": 2.0,
    },
)


@pytest.mark.parametrize("row", [FLAT, STAGED])
def test_the_default_grid_reaches_from_the_row_to_leaner_ones(row):
    found = plan.grid(row)
    assert row.config in [_as_lists(c.config) for c in found]
    assert min(c.params for c in found) < max(c.params for c in found) * 0.7
    assert max(plan._total(c.config["heads"]) for c in found) == 2 * plan._total(
        row.config["heads"]
    )
    for c in found[:: len(found) // 3]:
        assert c.params == sum(p.numel() for p in c.build().parameters())


def _as_lists(config: dict) -> dict:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}


def test_the_default_grid_splits_widths_evenly():
    row = replace(FLAT, config=FLAT.config | {"head_dim": "split", "heads": 6})
    assert {c.config["heads"] for c in plan.grid(row)} == {3, 4, 6, 8, 12}


def test_a_grid_of_ones_own_is_every_combination():
    found = plan.grid(FLAT, depths=[1, 3], heads=[2, 5], mlp_ratios=[1.5], head_dim=8)
    assert [(c.config["depth"], c.config["heads"]) for c in found] == [
        (1, 2),
        (1, 5),
        (3, 2),
        (3, 5),
    ]
    assert {(c.config["mlp_ratio"], c.config["head_dim"]) for c in found} == {(1.5, 8)}


def test_heads_may_differ_from_layer_to_layer():
    (found,) = plan.grid(FLAT, depths=[2], heads=[(4, 2)], mlp_ratios=[1.0])
    assert [block.attn.num_heads for block in found.build().blocks] == [4, 2]


def test_a_grid_that_nothing_can_be_built_of_is_refused():
    with pytest.raises(ValueError, match=r"no configuration of tiny can be built: .* 129"):
        plan.grid(FLAT, head_dim=129)


def test_a_grid_leaves_out_what_the_kernels_do_not_run():
    config = BASE | {"embed_dim": 192, "depth": 1, "heads": 2, "head_dim": "split"}
    row = replace(ROW, architecture="xcit", config=config)
    assert {c.config["heads"] for c in plan.grid(row)} == {3, 4}
    with pytest.raises(ValueError, match=r"at most 64 on a GPU, got 65 in blocks\.0\.attn"):
        plan.grid(row, head_dim=65)


def test_the_plan_uses_most_of_the_parameters_first():
    found = plan.grid(FLAT, mlp_ratios=[4.0])
    budget = sorted(c.params for c in found)[len(found) // 2]
    planned = plan.plan(found, Limits(budget, 1e15), batch_size=2, show=4)
    within = sorted((c.params for c in found if c.params <= budget), reverse=True)
    assert [c.params for c in planned] == within[:4]
    assert all(c.fits for c in planned)
    assert within[3] > plan.LEAST * budget
    first = planned[0]
    assert first.memory == predict(first.build, 2)
    assert first.flops == first.build().flops_per_image()


def test_of_equals_those_with_more_heads_come_first():
    found = plan.grid(FLAT, depths=[2], heads=[2, 3, 4], mlp_ratios=[4.0], head_dim="split")
    planned = plan.plan(found, Limits(found[0].params, 1e15), batch_size=2)
    assert [c.config["heads"] for c in planned] == [4, 3, 2]


def test_memory_and_flops_are_limits_too():
    found = plan.grid(FLAT, depths=[4], mlp_ratios=[4.0])
    budget = max(c.params for c in found)
    planned = plan.plan(found, Limits(budget, 1e15), batch_size=8)
    less = sorted(c.memory.total for c in planned)[-2]
    fitting = plan.plan(found, Limits(budget, less), batch_size=8)
    assert [c.config for c in fitting] == [c.config for c in planned if c.memory.total <= less]
    cheap = sorted(c.flops for c in planned)[0]
    fitting = plan.plan(found, Limits(budget, 1e15, flops=cheap), batch_size=8)
    assert [c.flops for c in fitting] == [cheap]


@pytest.mark.parametrize("limits", [Limits(10, 1e15), Limits(1e9, 1e15), Limits(70_000, 1.0)])
def test_where_nothing_fits_the_nearest_are_shown_as_such(limits):
    planned = plan.plan(plan.grid(FLAT, mlp_ratios=[4.0]), limits, batch_size=2)
    assert 1 <= len(planned) <= plan.NEAREST
    assert [c.fits for c in planned] == [
        c.params <= limits.params < 1e10 and limits.memory > 1 for c in planned
    ]


def test_kappa_is_that_of_the_heads_before_the_projection():
    configuration = plan.grid(FLAT, depths=[2], heads=[3], mlp_ratios=[1.0])[0]
    images = torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(1))
    measured = plan.with_kappa(configuration, images, seed=3)

    torch.manual_seed(3)
    model = configuration.build().double()
    heads = []
    for block in model.blocks:
        block.attn.proj.register_forward_pre_hook(lambda _, inputs: heads.append(inputs[0]))
    size = {"mode": "bilinear", "antialias": True}
    model(torch.nn.functional.interpolate(images, (32, 32), **size).double())
    sigmas = torch.linalg.svdvals(torch.stack(heads).flatten(0, 1).detach())
    exact = (sigmas[:, 0] / sigmas[:, -1]).log().mean().exp().item()
    assert (measured.resolved, measured.layers) == (2, 2)
    assert measured.kappa == pytest.approx(exact, rel=1e-3)


def test_kappa_that_cannot_be_told_is_not_made_up(monkeypatch):
    vit = papers.constructor("vit")

    def build(blind, **config):
        model = vit(**config)
        with torch.no_grad():
            for block in model.blocks[:blind]:
                block.attn.qkv.weight.zero_()
        return model

    images = torch.randn(1, 3, 32, 32)
    config = FLAT.config | {"depth": 2}
    for blind, resolved in ((1, 1), (2, 0)):
        monkeypatch.setattr(papers, "constructor", lambda _, blind=blind: partial(build, blind))
        measured = plan.with_kappa(Configuration("blind", config, 1), images)
        assert (measured.resolved, measured.layers) == (resolved, 2)
        assert (measured.kappa is None) == (resolved == 0)
        assert f"({resolved} of 2 layers resolved)" in plan.table([measured])


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (plan.bytes_of, "24GB", 24e9),
        (plan.bytes_of, "24GiB", 24 * 2**30),
        (plan.bytes_of, "1.5 gib", 1.5 * 2**30),
        (plan.bytes_of, "2e10B", 2e10),
        (plan.count_of, "40e6", 40e6),
        (plan.count_of, "40M", 40e6),
        (plan.count_of, "1.2e+1G", 12e9),
    ],
)
def test_amounts_are_read_with_their_units(parse, text, value):
    assert parse(text) == value


@pytest.fixture
def command(monkeypatch):
    """Runs the planner on a tiny row."""
    monkeypatch.setattr(plan, "_rows", lambda: {"tiny": FLAT, "staged": STAGED})
    monkeypatch.setitem(papers.ROWS, ("tiny", "original"), FLAT)

    def run(*arguments, model="tiny"):
        limits = ["--params", "100k", "--memory", "1GB", "--batch", "2"]
        plan.main(["--model", model, *limits, *arguments])

    return run


def test_the_command_prints_what_fits_and_the_row_itself(command, capsys):
    command("--show", "3")
    printed = capsys.readouterr().out
    assert printed.startswith(
        "Of 105 configurations around tiny these fit 100,000 parameters, 1 GB"
    )
    lines = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("| ")]
    header, *rows, paper = ([cell.strip() for cell in line] for line in lines)
    assert tuple(header) == plan.COLUMNS
    assert len(rows) == 3
    sizes = [int(row[4].replace(",", "")) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert paper[8] == "tiny original"
    for depth, heads, _, mlp_ratio, params, *_ in rows:
        sizes = {"depth": int(depth), "heads": int(heads), "mlp_ratio": float(mlp_ratio)}
        model = papers.constructor("vit")(**FLAT.config | sizes, device="meta")
        assert params == f"{model.num_params():,}"
        assert model.num_params() <= 100_000


def test_a_row_in_stages_takes_a_number_for_each(command, capsys):
    sizes = ["--depths", "1/2,2/2", "--heads", "2/4,4/4", "--mlp-ratio", "2"]
    command(*sizes, "--params", "1e6", "--no-kappa", model="staged")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    shown = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines[1:]}
    assert shown & {("1/2", "2/4"), ("1/2", "4/4"), ("2/2", "2/4"), ("2/2", "4/4")}
    assert len(lines) >= 1 + plan.NEAREST


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "24XB"], "--memory: must be a positive amount such as 24GB .* got '24XB'"),
        (["--params", "-3"], "--params"),
        (["--params", "0"], "--params: must be a positive amount such as 40e6 or 40M, got '0'"),
        (["--depths", "4,x"], "--depths: must be like 6,8,12 .* got '4,x'"),
        (["--heads", "0"], "--heads: must be like 6,8,12 .* got '0'"),
        (["--head-dim", "half"], "--head-dim: must be a width or split, got 'half'"),
        (["--mlp-ratio", "2,-1"], "--mlp-ratio: must be a positive amount"),
        (["--batch", "0"], "--batch: must be a whole number of at least 1, got '0'"),
        (["--heads", "2/4", "--depths", "3"], "no configuration of tiny .* got 2"),
        (["--depths", "2/4"], "depths of tiny must have 1 number each, got 2/4"),
        (
            ["--model", "staged", "--depths", "2"],
            "depths of staged must have 2 numbers each, got 2",
        ),
        (["--model", "vit_huge"], "invalid choice: 'vit_huge'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(command, arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command(*arguments)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])


def test_every_vision_row_can_be_planned():
    assert set(plan._rows()) == {
        row.row
        for row in papers.ROWS.values()
        if row.variant == "lean" and "image_size" in row.config
    }
