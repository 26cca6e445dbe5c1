"""One checkout in an environment where another is installed, as a redirecting finder does it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(
    folder: Path, site: Path, *command: object, finder: str = INSTALLED
) -> subprocess.CompletedProcess:
    """Run Python in a folder of an environment where this checkout is installed."""
    site.mkdir()
    (site / "sitecustomize.py").write_text(finder)
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("script", ["vit", "gpt", "bert", "lra"])
@pytest.mark.parametrize("finder", [INSTALLED, f"import sys; sys.path.append({str(ROOT)!r})"])
def test_a_training_script_runs_the_code_beside_it(another, tmp_path, script, finder):
    command = another / "train" / f"{script}.py", "--help"
    done = run(tmp_path, tmp_path / "site", *command, finder=finder)
    assert done.returncode == 0, done.stderr
    assert "models of another" in done.stdout
    assert "leaner_kernels of another" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    "command",
    [
        *(["-m", f"train.{name}", "--help"] for name in ("predict", "export")),
        ["-m", "bench.kappa.capture_accuracy", "--help"],
        ["examples/monitor_kappa.py", "--help"],
        ["examples/qk_clip.py", "--help"],
    ],
    ids=lambda command: command[-2],
)
def test_a_module_or_an_example_says_in_one_line_whose_code_it_runs(another, tmp_path, command):
    done = run(another, tmp_path / "site", *command)
    assert done.returncode == 0, done.stderr
    assert "of another" not in done.stdout
    assert done.stderr == (
        f"leaner_kernels: the code of {ROOT} runs, not that of {another}: pip install -e {another} "
        "changes that\n"
    )


def test_in_its_own_checkout_and_elsewhere_nothing_is_said(tmp_path):
    for folder in (ROOT, tmp_path):
        site = tmp_path / f"site-{folder.name}"
        done = run(folder, site, "-m", "train.predict", "--help")
        assert (done.returncode, done.stderr) == (0, "")
