"""Presets fill in what no flag gives, and controls keep the size of the lean model."""

import json
import re

import pytest

from models import papers
from train import bert, gpt, lra, vit
from train.config import architecture, flags
from train.vit import ImageSettings

TABLE_6 = {
    "lr": 3e-3,
    "weight_decay": 0.3,
    "smoothing": 0.1,
    "warmup_lr": 1e-5,
    "mixup": 0.8,
    "cutmix": 1.0,
    "drop_path": 0.1,
    "rand_augment": "rand-m9-mstd0.5",
    "epochs": 300,
}
SETTINGS = {
    vit: ImageSettings,
    gpt: gpt.GptSettings,
    bert: bert.BertSettings,
    lra: lra.LraSettings,
}
# Of so few layers and heads that one more is too many.
TOO_COARSE = {
    ("xcit_digits", "depth"),
    ("tnt_digits", "depth"),
    ("nystromformer_small", "depth"),
    ("nystromformer_small", "heads"),
}
# What the lean row shares with each arm, and what only the arm of a name changes.
SHARED = ("image_size", "embed_dim", "embed_dims", "inner_dim", "inner_heads", "window")


def settings(*args: object) -> ImageSettings:
    return vit.filled(flags.parse("vit.py", "", [str(arg) for arg in args], ImageSettings))


def test_the_recipe_of_the_paper_is_its_table_and_follows_photographs():
    ours = settings("--data", "/some/where")
    assert ours.recipe == "paper"
    assert {name: getattr(ours, name) for name in TABLE_6} == TABLE_6
    assert ours.warmup * ours.epochs == pytest.approx(20)
    assert (ours.repeats, ours.erase, ours.ema, ours.clip_grad) == (1, 0.0, 0.0, 0.0)


def test_the_rate_of_deit_follows_the_batch_and_flags_come_first():
    ours = settings("--recipe", "deit", "--batch-size", 256, "--mixup", 0, "--repeats", 1)
    assert ours.lr == pytest.approx(2.5e-4)
    assert (ours.mixup, ours.repeats, ours.erase, ours.ema) == (0, 1, 0.25, 0.99996)
    assert settings("--recipe", "deit", "--lr", 1e-3).lr == 1e-3


def arm(name, control, classes):
    """The arm of a model of images."""
    model = architecture.find(name, architecture.DIGITS, architecture.VISION)
    return architecture.arm(name, control, model, num_classes=classes)


LEAN_ROWS = [f"{row}_lean" for row in ("vit_large", "tnt_base", "davit_base")]


@pytest.mark.parametrize("control", ["depth", "mlp", "heads"])
@pytest.mark.parametrize("name", LEAN_ROWS)
def test_an_arm_has_the_size_of_the_lean_model_and_grows_one_thing(name, control):
    lean = papers.names()[name]
    original = papers.names()[lean.row].config
    model, params = arm(name, control, 1000)
    assert params["lean"] == lean.audited_params
    built = model.build(**model.sizes, num_classes=1000, device="meta")
    assert built.num_params() == params[control]
    assert params[control] == pytest.approx(params["lean"], rel=0.03)
    for size in SHARED:
        assert model.sizes.get(size) == lean.config.get(size), size
    depth = "depths" if model.stages else "depth"
    grown = {
        "depth": model.sizes[depth] != lean.config[depth],
        "mlp": model.sizes["mlp_ratio"] != lean.config["mlp_ratio"] / 2,
        "heads": model.sizes["heads"] != original["heads"],
    }
    assert grown == {each: each == control for each in grown}


@pytest.mark.parametrize("control", ["depth", "mlp", "heads"])
@pytest.mark.parametrize(
    ("script", "args"),
    [
        *[(vit, ["--model", name]) for name in architecture.DIGITS],
        (gpt, ["--data", "synthetic", "--model", "gpt_small"]),
        (gpt, ["--data", "synthetic", "--model", "gpt2_tinystories_lean"]),
        (bert, ["--data", "synthetic", "--model", "bert_small"]),
        (lra, ["--sizes", "64,4,4"]),
    ],
)
def test_every_script_has_arms_of_the_size_of_its_model(script, args, control, tmp_path):
    if script is lra:
        args = [*args, "--cache", str(tmp_path)]
    kind = SETTINGS[script]
    lean, _ = script.make_task(flags.parse("x", "", args, kind))
    controlled = flags.parse("x", "", [*args, "--control", control], kind)
    if (lean.facts["model"], control) in TOO_COARSE:
        with pytest.raises(ValueError, match=r"cannot match .* within 3%"):
            script.make_task(controlled)
        return
    task, filled = script.make_task(controlled)
    assert task.name.startswith(f"{filled.model}-{control}")
    assert task.facts["params_of_the_lean_model"] == lean.facts["params"]
    assert task.facts["params"] == pytest.approx(lean.facts["params"], rel=0.03)
    assert (filled.depth == lean.facts["depth"]) == (control != "depth")


def test_arms_that_cannot_have_the_size_are_refused(monkeypatch):
    monkeypatch.setattr("train.config.architecture.TOLERANCE", 0.001)
    message = "--control depth cannot match the 39,403,854 .* within 0%, the closest model has "
    with pytest.raises(ValueError, match=message):
        arm("vit_base_lean", "depth", 78)


@pytest.mark.parametrize("name", ["vit_base", "figure3_depth8_heads14"])
def test_only_a_lean_model_has_arms(name):
    with pytest.raises(ValueError, match=f"needs a lean --model .* got '{name}'"):
        arm(name, "depth", 10)


@pytest.mark.parametrize(
    ("args", "sizes"),
    [
        (["--model", "xcit_large_lean"], {"heads": [24] * 12, "head_dim": ["split"] * 12}),
        (["--model", "figure3_depth8_heads14"], {"heads": [14] * 8, "depth": 8, "mlp_ratio": 4.0}),
        (["--model", "volo_d3_lean"], {"depths": [4, 4, 8, 2], "heads": [16, 32, 32, 32]}),
        (
            ["--model", "davit_base", "--depth", "1,1,2,1", "--heads", "4,8,16,16,32"],
            {"depths": [1, 1, 2, 1], "heads": [4, 8, 16, 16, 32], "head_dim": "split"},
        ),
        (
            ["--model", "volo_d4", "--heads", "12", "--head-dim", "32"],
            {"heads": 12, "head_dim": 32},
        ),
    ],
)
def test_sizes_come_from_the_row_unless_flags_give_them(args, sizes):
    given = settings(*args)
    model = architecture.find(given.model, architecture.DIGITS, architecture.VISION)
    arguments = architecture.arguments(architecture.sized(given, model), model)
    assert {name: _plain(arguments[name]) for name in sizes} == sizes
    assert model.build(**arguments, device="meta").num_params() > 1e6


def _plain(value: object) -> object:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "vit_base", "--depth", "8,8"], "one number for vit_base, got 8,8"),
        (
            ["--model", "volo_d3", "--depth", "8"],
            "4 numbers .* one per stage, got 8 for all",
        ),
        (["--model", "davit_base", "--depth", "1,1"], "4 numbers .* got 1,1"),
        (
            ["--model", "davit_base", "--heads", "4,8"],
            "--heads must be one value, 4 (one per stage) or 12 (one per layer) .* got 2",
        ),
    ],
)
def test_lists_that_do_not_fit_a_model_are_refused(args, message):
    given = settings(*args)
    message = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises(ValueError, match=message):
        architecture.sized(
            given, architecture.find(given.model, architecture.DIGITS, architecture.VISION)
        )
