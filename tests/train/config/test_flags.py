"""What the help shows, and settings as flags."""

import dataclasses
import re
import shlex

import pytest

from train import bert, gpt, lra, vit
from train.bert import BertSettings
from train.config import flags
from train.gpt import GptSettings
from train.lra import LraSettings
from train.vit import ImageSettings

SCRIPTS = {
    vit: ImageSettings,
    bert: BertSettings,
    gpt: GptSettings,
    lra: LraSettings,
}

DEIT = ("--data", "synthetic", "--recipe", "deit", "--rand-augment", "none", "--erase", "0")


def help_of(script, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.PROGRAM)
def test_help_has_every_flag_once_in_a_group(script, capsys):
    said = help_of(script, capsys)
    kind = SCRIPTS[script]
    shown = re.findall(r"^  --([a-z0-9-]+)", said, re.MULTILINE)
    fields = [field.name.replace("_", "-") for field in dataclasses.fields(kind)]
    assert sorted(shown) == sorted(fields)
    titles = re.findall(r"^(\S.*):$", said, re.MULTILINE)
    assert titles == ["options", *kind.GROUPS.values(), kind.OWN_GROUP, "examples"]
    assert f"torchrun train/{script.PROGRAM}" in said
    assert "python -m models.papers" in said


@pytest.mark.parametrize(
    ("script", "args"),
    [
        (vit, ()),
        (vit, ("--heads", "16", "--depth", "7", "--compile", "--skip-limit", "3")),
        (vit, (*DEIT, "--head-dim", "split")),
        (gpt, ("--heads", "4,2", "--depth", "2", "--tokens", "5000")),
        (bert, ("--heads", "2")),
        (lra, ()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value.PROGRAM,
)
def test_filled_settings_as_flags_are_the_same_settings(script, args, capsys):
    def filled(arguments):
        settings = flags.parse(script.PROGRAM, "", list(arguments), SCRIPTS[script])
        return script.make_task(settings)[1]

    settings = filled(args)
    again = filled(settings.as_flags())
    assert again == settings
    assert settings.batch_size is not None


def test_a_dry_run_prints_the_recipe_as_flags(tmp_path, capsys):
    vit.main(["--heads", "16", "--dry-run", "--out", str(tmp_path / "run")])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "as flags: " in line)
    given = shlex.split(line.partition("as flags: ")[2])
    assert "--dry-run" not in given
    assert given[given.index("--epochs") + 1] == "12.0"
    settings = flags.parse("vit.py", "", given, ImageSettings)
    assert settings.heads == (16,) * 7
    assert (settings.batch_size, settings.out) == (64, str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("main", "words", "meant"),
    [
        *((script.main, ["--hedas", "8", "--depth", "2"], "--heads") for script in SCRIPTS),
        (vit.main, ["--kappa_every=5"], "--kappa-every"),
    ],
)
def test_an_unknown_flag_is_one_line_with_the_nearest_one(main, words, meant, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.endswith(f", did you mean {meant}?\n")


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (["--heads", "5"], "5 heads do not divide 192: attention is 190 wide, 5 x 38"),
        (["--heads", "8,5", "--depth", "2"], "5 heads do not divide 192: attention is 190 wide"),
        (["--heads", "8"], None),
        (["--heads", "5", "--head-dim", "38"], None),
    ],
)
def test_heads_that_do_not_divide_a_width_that_they_split_are_warned_of(words, warning, capsys):
    split = [] if "--head-dim" in words else ["--head-dim", "split"]
    vit.main(["--model", "vit_digits", *words, *split, "--dry-run"])
    said = " ".join(capsys.readouterr().out.replace("\u2502", "").split())
    assert ("warning" in said) == (warning is not None)
    assert warning is None or warning in said
