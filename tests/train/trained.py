"""Runs of two steps, to be used as those that trained longer are."""

from pathlib import Path

import pytest

from tests.train.launch import TINY
from train import bert, gpt, vit

QUICK = ["--steps", 2, "--batch-size", 8, "--eval-every", 0, "--kappa-every", 1, "--workers", 0]
SMALL = ["--depth", 1, "--context", 16, *QUICK]


def run(script, *args: object) -> None:
    """Run a script in this process."""
    script.main([str(arg) for arg in args])


def train_vit(out: Path, *args: object) -> Path:
    """Train two layers on digits."""
    run(vit, *TINY, "--steps", 2, "--out", out, *args)
    return out


def letters(folder: Path) -> Path:
    """Return a file of documents of one letter each."""
    path = folder / "letters.txt"
    path.write_text("\n\n".join("abcdbadc"[place % 8] * 100 for place in range(40)))
    return path


def train_text(script, folder: Path, *args: object) -> Path:
    """Train one layer on letters; ``script`` is ``gpt`` or ``bert``."""
    folder.mkdir(exist_ok=True)
    out = folder / "run"
    more = ["--samples", 0, "--tokenizer", "bytes"] if script is gpt else ["--recipe", "pydoc"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        sizes = ["--recipe", "pydoc", "--data", letters(folder), "--tokenizer", "bytes"]
        run(script, *SMALL, *more, *sizes, "--out", out, *args)
    return out


__all__ = ["bert", "gpt", "letters", "run", "train_text", "train_vit"]
