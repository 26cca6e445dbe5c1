"""Recipes fill in what no flag gives."""

import json
import re

import pytest

from train import vit
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
