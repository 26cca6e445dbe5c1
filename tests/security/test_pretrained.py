"""Sizes that a file of weights makes up end in one line: nothing follows from a number alone."""

import json

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from tests.train.trained import train_vit
from train import vit

VALUES = [
    *(0, -1, 2**40, 10**400, 1.5, float("nan"), float("inf"), True, "x", "", "\x1b[31m"),
    *([], [0], [2, "x"], [[2]], [10**400], [2] * 1000, {}),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_vit(tmp_path_factory.mktemp("runs") / "run") / "model.safetensors"


def with_settings(path, out, settings):
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = file.metadata()
    text = (
        settings
        if isinstance(settings, str)
        else json.dumps(json.loads(about["settings"]) | settings)
    )
    save_file(tensors, out, metadata=about | {"settings": text})
    return out


def refusal(capsys, weights):
    with pytest.raises(SystemExit):
        vit.main(["--data", "digits", "--steps", "1", "--dry-run", "--pretrained", str(weights)])
    *_, line = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    "name",
    [
        *("model", "heads", "head_dim", "depth", "mlp_ratio"),
        *("img_size", "patch_size", "in_chans", "width"),
    ],
)
def test_no_size_of_a_file_ends_in_a_traceback(trained, tmp_path, capsys, name):
    for value in VALUES:
        if name == "model" and isinstance(value, str):
            continue
        path = with_settings(trained, tmp_path / "w.safetensors", {name: value})
        line = refusal(capsys, path)
        assert line.startswith("vit.py: error: --pretrained"), (value, line)
        assert name in line or value == 1.5, line
        assert len(line) < 400
        assert line.isprintable()
