"""A missing optional library is named in one line, with the extra that brings it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from leaner_kernels.extras import EXTRAS, how_to_install, needed_by

ROOT = Path(__file__).resolve().parent.parent
HIDE = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hide())
"""
ADAPTERS = {
    "lightning": "lightning",
    "timm": "timm",
    "transformers": "transformers",
    "transformers_trainer": "transformers",
}


def python(code: str, *hidden: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDE.format(hidden=hidden) + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_names_the_extra_of_its_library(adapter: str) -> None:
    library, module = ADAPTERS[adapter], f"leaner_kernels.adapters.{adapter}"
    hidden = (library, "pytorch_lightning") if library == "lightning" else (library,)
    done = python(f"import {module}", *hidden)
    line = f"ModuleNotFoundError: {module} needs the package {library}: {how_to_install(library)}"
    assert done.stderr.splitlines()[-1] == line
    assert "During handling" not in done.stderr


def test_every_extra_is_one_that_the_package_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    brought = {
        extra: [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]
        for extra, requirements in project["optional-dependencies"].items()
    }
    assert all(library in brought[extra] for library, extra in EXTRAS.items())
    assert how_to_install("timm") == "pip install 'leaner-kernels[timm]'"


def test_lightnings_former_package_serves_as_well() -> None:
    done = python(
        "import types; former = types.ModuleType('pytorch_lightning'); former.Callback = object; "
        "sys.modules['pytorch_lightning'] = former; "
        "from leaner_kernels.adapters.lightning import KappaCallback; print(KappaCallback.__mro__)",
        "lightning",
    )
    assert done.returncode == 0, done.stderr


def test_a_library_that_is_damaged_is_not_called_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'other'$"), needed_by("it"):
        raise ModuleNotFoundError("No module named 'other'", name="other")
    with pytest.raises(ImportError, match=r"^cannot import name$"), needed_by("it"):
        raise ImportError("cannot import name", name="timm")
