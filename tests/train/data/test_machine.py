"""What one process of a machine finds, its others read from the same memory."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.forked import on_two_ranks
from tests.train.image_files import photographs, write_folder
from train.data.images import sources
from train.data.images.machine import once_per_machine
from train.loop.parallel import world


def work(rank: int, folder: Path) -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    calls, find = [], sources._find
    sources._find = lambda *arguments: calls.append(arguments) or find(*arguments)

    def fail() -> None:
        assert rank == 0
        raise ValueError("-- has no pictures")

    with world():
        found = sources.find_images(str(folder), 0)
        with pytest.raises(ValueError, match="-- has no pictures"):
            once_per_machine(fail)
        empty = once_per_machine(lambda: (rank, np.empty(0)))
    content: Any = found.train.paths.content
    while isinstance(getattr(content, "base", None), np.ndarray):
        content = content.base
    content = getattr(content, "obj", content)
    mapped = isinstance(content, np.memmap)
    return {
        "calls": len(calls),
        "left": Path(content.filename).exists() if mapped else "not mapped",
        "samples": list(found.train.samples()),
        "identity": found.identity("it"),
        "made by": empty[0],
    }


def test_one_rank_finds_pictures_and_both_map_them(tmp_path):
    write_folder(tmp_path, "train", photographs("train", 12))
    write_folder(tmp_path, "val", photographs("val", 6))
    alone = sources.find_images(str(tmp_path), 0)
    expected = {
        "left": False,
        "samples": list(map(list, alone.train.samples())),
        "identity": alone.identity("it"),
        "made by": 0,
    }
    assert on_two_ranks(__name__, tmp_path) == [{"calls": calls} | expected for calls in (1, 0)]
