"""Whoever names something that was removed, or never was, gets one line with what to do instead."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import leaner_kernels
from leaner_kernels import removed
from leaner_kernels.adapters import swap
from train import bert, gpt, lra, vit

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"bert": bert, "gpt": gpt, "lra": lra, "vit": vit}


@pytest.mark.parametrize("name", removed.table()["flags"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_removed_flag_says_what_to_do_instead(script, name, capsys):
    with pytest.raises(SystemExit, match="2"):
        SCRIPTS[script].main([name, "1"])
    instead = removed.table()["flags"][name]
    assert (
        capsys.readouterr().err == f"{script}.py: error: {name} was removed; instead: {instead}\n"
    )


def test_a_flag_that_never_was_names_the_nearest(capsys):
    with pytest.raises(SystemExit, match="2"):
        gpt.main(["--bach-size", "1"])
    assert "unrecognized arguments: --bach-size 1, did you mean --batch-size?" in (
        capsys.readouterr().err
    )


def test_a_flag_that_is_like_no_other_gets_no_suggestion(capsys):
    with pytest.raises(SystemExit, match="2"):
        vit.main(["--task", "text"])
    assert capsys.readouterr().err == "vit.py: error: unrecognized arguments: --task text\n"


def test_every_removed_command_has_a_line_and_no_module(capsys):
    for name, instead in removed.table()["commands"].items():
        with pytest.raises(SystemExit, match="2"):
            removed.stop_command(name)
        assert capsys.readouterr().err == f"{name} was removed; instead: {instead}\n"
        assert name == "train.export" or not (ROOT / f"{name.replace('.', '/')}.py").exists()
    removed.stop_command("bench.report")  # that exists


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("train.compare", "train.export", "models.plan", "bench.predict"),
        *("leaner_kernels.monitor", "leaner_kernels.monitor.plots"),
    ],
)
def test_python_m_of_a_removed_command_is_one_line(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", name, "--anything"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"{removed.line_for('commands', name)}\n"
    assert done.stdout == ""


OF_OBJECTS = {
    "KappaMonitor": lambda: leaner_kernels.KappaMonitor(nn.TransformerEncoderLayer(8, 2)),
    "Swapped": lambda: swap.Swapped(lambda: None),
}
NAMES = {name: kind for kind in ("names", "absent") for name in removed.table()[kind]}
IN_MODULES = [name for name in NAMES if name.split(".")[-2] not in OF_OBJECTS]


@pytest.mark.parametrize("name", IN_MODULES)
def test_a_name_of_the_table_says_what_to_do_instead(name):
    module, _, attribute = name.rpartition(".")
    line = removed.line_for(NAMES[name], name)
    imported = importlib.import_module(module)
    with pytest.raises(AttributeError) as refused:
        getattr(imported, attribute)
    assert str(refused.value) == line
    assert not hasattr(imported, attribute)
    assert getattr(imported, attribute, 1) == 1
    with pytest.raises(ImportError) as refused:
        exec(f"from {module} import {attribute}")
    assert str(refused.value) == line
    names = {}
    exec(f"from {module} import *", names)
    assert attribute not in names


@pytest.mark.parametrize("name", sorted({*NAMES} - {*IN_MODULES}))
def test_a_removed_attribute_says_what_to_do_instead(name):
    owner, attribute = name.split(".")[-2:]
    with pytest.raises(AttributeError) as refused:
        getattr(OF_OBJECTS[owner](), attribute)
    assert str(refused.value) == removed.line_for("names", name)
    assert not hasattr(OF_OBJECTS[owner](), "nothing")


OWNERS = {
    "KappaMonitor": leaner_kernels.KappaMonitor,
    "conditioning_penalty": leaner_kernels.conditioning_penalty,
    "ConditioningPenalty": leaner_kernels.ConditioningPenalty,
    "QKClip": leaner_kernels.QKClip,
    "EntropyAlarm": leaner_kernels.EntropyAlarm,
    "KappaAlarm": leaner_kernels.KappaAlarm,
    "plot": leaner_kernels.monitor.plot,
}


@pytest.mark.parametrize("key", removed.table()["arguments"])
def test_a_removed_argument_says_what_to_do_instead(key):
    owner, _, argument = key.removesuffix("=)").partition("(")
    if owner == "register":
        function = pytest.importorskip("leaner_kernels.adapters.transformers").register
    else:
        function = OWNERS[owner]
    with pytest.raises(TypeError) as refused:
        function(**{argument: 1})
    assert str(refused.value) == removed.line_for("arguments", key)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        function(nothing=1)


def test_a_name_that_never_was_is_not_called_removed():
    name = "flash_attn_with_kvcache"
    with pytest.raises(ImportError, match=rf"^\S+{name} is not provided; instead: .*FlashInfer"):
        from leaner_kernels.adapters.flash_attn import flash_attn_with_kvcache  # noqa: F401


def test_other_names_are_missing_as_in_any_module():
    with pytest.raises(AttributeError, match="'leaner_kernels' has no attribute 'nothing'"):
        leaner_kernels.nothing  # noqa: B018
    assert not hasattr(leaner_kernels.nn, "nothing")
