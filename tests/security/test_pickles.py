"""CIFAR-10's files are pickles: they give arrays and run nothing, whatever their MD5."""

import builtins
import hashlib
import io
import os
import pickle
import subprocess

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

from tests.train.published import write_cifar
from train.data.longrange.files import ArraysOnly, read_cifar


class Gadget:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def published(monkeypatch, folder, contents):
    """Take the files that are there, and other contents of some, for the published ones."""
    sums = write_cifar(folder, 4)
    for name, content in contents.items():
        (folder / CIFAR10.base_folder / name).write_bytes(content)
        sums[name] = hashlib.md5(content).hexdigest()
    for part in ("train_list", "test_list"):
        known = [[name, sums[name]] for name, _ in getattr(CIFAR10, part)]
        monkeypatch.setattr(CIFAR10, part, known)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch {}"),
        (subprocess.Popen, ["touch", "{}"]),
        (builtins.open, "{}", "w"),
        (builtins.eval, "open('{}', 'w')"),
        (builtins.getattr, np.ndarray, "tofile"),
        (np.load, "{}"),
        (os.mkdir, "{}"),
    ],
    ids=lambda call: call[0].__name__,
)
def test_a_pickle_that_calls_is_refused_before_it_does(tmp_path, monkeypatch, call, protocol):
    canary = str(tmp_path / "canary")
    function, *arguments = call
    filled = [
        [word.format(canary) for word in a] if isinstance(a, list)
        else a.format(canary) if isinstance(a, str) else a
        for a in arguments
    ]  # fmt: skip
    content = pickle.dumps({"data": Gadget(function, *filled), "labels": []}, protocol)
    published(monkeypatch, tmp_path, {"data_batch_3": content})
    with pytest.raises(ValueError, match="must not name"):
        read_cifar(tmp_path)
    assert not os.path.exists(canary)


def test_what_is_read_is_what_was_checked(tmp_path, monkeypatch):
    published(monkeypatch, tmp_path, {})
    assert {split: len(corpus) for split, corpus in read_cifar(tmp_path).items()} == {
        "train": 18,
        "dev": 2,
        "test": 4,
    }
    batch = tmp_path / CIFAR10.base_folder / "data_batch_1"
    batch.write_bytes(batch.read_bytes() + b"\n")
    with pytest.raises(ValueError, match="another MD5"):
        read_cifar(tmp_path)
    batch.unlink()
    with pytest.raises(ValueError, match="No such file"):
        read_cifar(tmp_path)


# The published files are of protocol 2.
@pytest.mark.parametrize("protocol", range(5))
def test_arrays_are_read_in_every_protocol(protocol):
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    content = pickle.dumps({"data": array, "labels": [1, 2], "name": "batch"}, protocol)
    found = ArraysOnly(io.BytesIO(content)).load()
    np.testing.assert_array_equal(found["data"], array)
    assert found["labels"] == [1, 2]
