"""Blocks of Python in README.md and docs/usage.md run as they stand, most without the checkout."""

import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = "README.md", "docs/usage.md"
BLOCKS = re.findall(
    r"^```python\n(.*?)^```$",
    "\n".join((ROOT / page).read_text("utf-8") for page in PAGES),
    re.M | re.S,
)
OF_THE_CHECKOUT = "models", "train", "bench", "studies"


@pytest.fixture(autouse=True)
def pytorchs_attention():
    """A block may leave our kernels active in PyTorch's registry."""
    yield
    torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_runs_from_an_install_or_says_that_it_needs_the_checkout(
    block, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for library in ("timm", "transformers"):
        if re.search(rf"^(import|from) {library}\b", block, re.MULTILINE):
            pytest.importorskip(library, reason=f"{library} is not installed")
    program = compile(block, "a page", "exec")
    if block.startswith("# From the checkout"):
        exec(program, {})
    for name in OF_THE_CHECKOUT:
        monkeypatch.setitem(sys.modules, name, None)  # to import it raises
    if block.startswith("# From the checkout"):
        with pytest.raises(ImportError, match=r"models|train|bench|studies"):
            exec(program, {})
    else:
        exec(program, {})


def test_the_blocks_show_what_the_project_is_for():
    text = "\n".join(BLOCKS)
    for name in ("attention(", "KappaMonitor(", "attention_with_stats("):
        assert name in text
