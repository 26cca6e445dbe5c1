"""One checkout in an environment where another is installed, as a redirecting finder does it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("leaner_kernels", "models", "train", "bench", "examples")
# Ahead of every other finder, as scikit-build-core's editable installs are.
INSTALLED = f"""
import sys
from importlib.machinery import PathFinder

class Installed:
    def find_spec(self, name, path=None, target=None):
        if name in {PACKAGES[:4]!r}:
            return PathFinder.find_spec(name, [{str(ROOT)!r}])

sys.meta_path.insert(0, Installed())
"""


@pytest.fixture(scope="module")
def another(tmp_path_factory) -> Path:
    """Another checkout, whose modules say that they are of it."""
    checkout = tmp_path_factory.mktemp("another")
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "results", "*.so")
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    for name in ("leaner_kernels", "models"):
        with (checkout / name / "__init__.py").open("a") as file:
            file.write("\nprint(__name__, 'of another')\n")
    return checkout


@pytest.mark.parametrize("finder", [INSTALLED, f"import sys; sys.path.append({str(ROOT)!r})"])
def test_a_training_script_runs_the_code_beside_it(another, tmp_path, finder):
    (tmp_path / "sitecustomize.py").write_text(finder)
    done = subprocess.run(
        [sys.executable, another / "train" / "vit.py", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "models of another" in done.stdout
    assert "leaner_kernels of another" in done.stdout
    assert done.stderr == ""
