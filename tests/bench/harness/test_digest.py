"""The digest of the kernels' sources."""

import re
from pathlib import Path

import pytest

from bench.harness import digest, machine

KERNEL = '''
"""A kernel."""
import triton

RULES = (rule(dim=64, num_warps=4),)
TILES = Tiles("kernel", *RULES)  # of a GPU
PASSES: tl.constexpr = tl.constexpr(2)


@gluon.constexpr_function
def half(count):
    return count // 2


@triton.jit
def kernel(q_ptr, N):
    """Do something."""
    if N > 2:
        # a comment
        store(q_ptr)
    load(q_ptr)


def launch(q):
    kernel[(1,)](q, 4)
'''
CSRC = "int f(int a) {  // adds one\n  return a + 1;\n}\n"


@pytest.fixture
def made(tmp_path):
    """Write a checkout with a kernel, and return its digests."""

    def made(kernel=KERNEL, csrc=CSRC, name="kernels.py"):
        for folder in ("ops/window", "csrc"):
            (tmp_path / "leaner_kernels" / folder).mkdir(parents=True, exist_ok=True)
        for path in (tmp_path / "leaner_kernels" / "ops" / "window").glob("*.py"):
            path.unlink()
        (tmp_path / "leaner_kernels" / "ops" / "window" / name).write_text(kernel)
        (tmp_path / "leaner_kernels" / "csrc" / "a.cu").write_text(csrc)
        return digest.kernels(tmp_path)

    return made


def test_text_that_runs_nowhere_on_a_gpu_does_not_change_a_digest(made):
    before = made()
    assert before.keys() == {"window", "csrc"}
    renamed = KERNEL.replace('"""Do something."""', '"""Do\n\n    another thing."""')
    renamed = renamed.replace("# a comment", "# another").replace("# of a GPU", "")
    renamed = renamed.replace("kernel[(1,)](q, 4)", "kernel[(2,)](q, 4)")
    assert made(renamed, CSRC.replace("adds one", "adds 1"), "another.py") == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("N > 2", "N > 3"),
        ("num_warps=4", "num_warps=8"),
        ("constexpr(2)", "constexpr(3)"),
        ("count // 2", "count // 4"),
        ("    load(q_ptr)", "        load(q_ptr)"),
        ("@triton.jit", '@triton.jit(do_not_specialize=["N"])'),
    ],
)
def test_a_change_of_a_device_function_or_its_tiles_changes_its_digest_alone(made, old, new):
    before, after = made(), made(KERNEL.replace(old, new))
    assert after["window"] != before["window"]
    assert after["csrc"] == before["csrc"]


def test_a_change_of_native_code_changes_its_digest_alone(made):
    before, after = made(), made(csrc=CSRC.replace("a + 1", "a + 2"))
    assert after["window"] == before["window"]
    assert after["csrc"] != before["csrc"]


def test_every_folder_with_kernels_has_a_digest():
    root = Path(machine.ROOT)
    jitted = {
        path.relative_to(root / "leaner_kernels" / "ops").parts[0]
        for path in (root / "leaner_kernels" / "ops").rglob("*.py")
        if re.search(r"^@(triton|gluon)\.jit", path.read_text("utf-8"), flags=re.MULTILINE)
    }
    folders = {name for name in jitted if not name.endswith(".py")}
    assert machine.commit()["kernels"].keys() == folders | {"csrc"}
