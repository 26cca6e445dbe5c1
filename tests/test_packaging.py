"""What the package promises about itself: its files, its version, its commands."""

import ast
import importlib
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import leaner_kernels
from leaner_kernels import nn
from tests.test_import_arrows import LAYERS, imports_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("leaner_kernels", "models", "train", "bench")


def build(kind: str, folder: Path) -> Path:
    """The file that scikit-build-core makes of the checkout without running CMake."""
    code = (
        "import sys; from scikit_build_core import build; "
        "getattr(build, 'build_' + sys.argv[1])(sys.argv[2], {'wheel.cmake': 'false'})"
    )
    subprocess.run([sys.executable, "-c", code, kind, str(folder)], cwd=ROOT, check=True)
    (made,) = folder.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return made


def test_the_wheel_ships_the_library_alone(tmp_path):
    wheel = build("wheel", tmp_path)
    library = ROOT / "leaner_kernels"
    files = (path for kind in ("*.py", "*.toml") for path in library.rglob(kind))
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert shipped == expected | {"leaner_kernels/py.typed"}


@pytest.mark.slow
def test_the_source_distribution_holds_what_both_wheels_are_built_from(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    library = (ROOT / "leaner_kernels").rglob("*")
    sources = {path for path in library if path.is_file() and path.suffix not in (".pyc", ".so")}
    assert {path.relative_to(ROOT).as_posix() for path in sources} <= names
    assert {"CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"} <= names
    assert not any(name.startswith(("build/", "dist/", "runs/", ".venv")) for name in names)


def test_an_editable_install_maps_the_applications_too(tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(build("editable", tmp_path)).extractall(site)
    code = (
        "import importlib.util, site, sys; site.addsitedir(sys.argv[1]); "
        "print(*(importlib.util.find_spec(name).submodule_search_locations[0] "
        "for name in sys.argv[2:]), sep='\\n')"
    )
    # -I and -S: neither this environment's own install nor the working directory can help.
    command = [sys.executable, "-I", "-S", "-c", code, str(site), *PACKAGES]
    found = subprocess.run(command, cwd=elsewhere, check=True, capture_output=True, text=True)
    assert found.stdout.split() == [str(ROOT / package) for package in PACKAGES]


def test_the_version_is_the_same_everywhere(tmp_path):
    version = leaner_kernels.__version__
    assert build("wheel", tmp_path).name == f"leaner_kernels-{version}-py3-none-any.whl"
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [version]
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.findall(r"^## \[(\d.+)\]", changelog, re.MULTILINE)[0] == version


def test_continuous_integration_runs_what_the_readme_tells_a_reader_to_run():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    commands = re.findall(r"^make (\S+)", script.read_text("utf-8"), re.MULTILINE)
    assert commands == ["lint", "test", "test-rest"]
    assert "make test" in (ROOT / "README.md").read_text("utf-8")


# Of a module that its distribution, or the one that brings it, does not share a name with.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "_pytest": "pytest",
    "pyarrow": "datasets",
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def group(name: str) -> set[str]:
    """Return the distributions of a dependency group of pyproject.toml."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    names = set()
    for entry in groups[name]:
        if isinstance(entry, dict):
            names |= group(entry["include-group"])
        else:
            names.add(re.match(r"[\w.-]+", entry)[0])
    return names


def test_the_environment_of_make_demo_has_what_commands_examples_and_tests_import():
    assert "@.ci/install $(NEWEST) dev -e ." in (ROOT / "Makefile").read_text("utf-8")
    assert {"pytest", "pytest-benchmark", "pytest-xdist"} <= group("dev")
    missing = set()
    for folder in ("bench", "examples", "models", "studies", "tests", "train"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for imported in imports_of(name, path.read_text("utf-8")):
                top = imported.module.partition(".")[0]
                own = {*LAYERS, "hubconf", "torch", "triton", *sys.stdlib_module_names}
                if imported.at_import and top not in own:
                    missing |= {(name, DISTRIBUTIONS.get(top, top))} - {
                        (name, distribution) for distribution in group("dev")
                    }
    assert missing == set()


def public_names(path: Path) -> set[str]:
    """A module's ``__all__``, or the public functions and classes it defines; not imported."""
    body = ast.parse(path.read_text("utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {name for name in defined if not name.startswith("_")}


def test_the_reference_describes_every_public_name_and_no_other():
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    described = []
    for name, names in re.findall(
        r'^::: (\S+)(?:\n +options:\n +filters: \["(.*)"\])?', pages, re.M
    ):
        # Of a module all public names, or those that the page's pattern takes.
        module = importlib.import_module(name) if names else None
        found = public_names(Path(module.__file__)) if module else ()
        wanted = names.removeprefix("!^_")
        described += [f"{name}.{each}" for each in found if re.search(wanted, each)] or [name]
    public = {f"leaner_kernels.{name}" for name in leaner_kernels.__all__}
    public |= {f"leaner_kernels.nn.{name}" for name in nn.__all__}
    for library in ("pytorch", "timm", "transformers"):
        adapter = f"leaner_kernels/adapters/{library}.py"
        names = public_names(ROOT / adapter)
        public |= {f"{adapter[:-3].replace('/', '.')}.{name}" for name in names}
    assert sorted(described) == sorted(set(described))
    assert public - set(described) == set()
    for name in set(described) - public:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_every_document_is_in_the_navigation_of_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    listed = re.findall(r"[\w/-]+\.md", navigation)
    assert sorted(listed) == [
        page.relative_to(ROOT / "docs").as_posix() for page in sorted((ROOT / "docs").rglob("*.md"))
    ]


STUB = """#!/bin/sh
case "$*" in
  *--group*)
    printf '%s\\n' "{said}" "filename=leaner_kernels-1-py3-none-{tag}.whl" "$*"
    sleep {seconds}; exit {status} ;;
esac
"""


@pytest.mark.parametrize(
    ("said", "tag", "seconds", "status"),
    [
        pytest.param("  Downloading torch.whl", "linux_x86_64", 16, 0, marks=pytest.mark.slow),
        pytest.param("Looking in indexes: one", "any", 16, 0, marks=pytest.mark.slow),
        ("  Downloading torch.whl", "any", 0, 0),
        ("  Downloading torch.whl", "any", 0, 3),
    ],
)
def test_an_installation_shows_its_progress_and_how_it_ended(tmp_path, said, tag, seconds, status):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text(STUB.format(said=said, tag=tag, seconds=seconds, status=status), "utf-8")
    python.chmod(0o755)
    command = [ROOT / ".ci/install", tmp_path, "dev", "-e", "."]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    first, *lines = done.stdout.strip().splitlines()
    assert first == f"== installing into {tmp_path}, log in {tmp_path}/pip.log"
    if status:
        assert done.returncode == 1
        assert "--group dev -e ." in done.stderr
        return
    assert (done.returncode, done.stderr) == (0, "")
    shown = said.strip() if said.startswith(" ") else ""
    progress = rf" +\d+ s, +\d+ MB: {re.escape(shown)}"
    patterns = [progress] * (seconds // 15) + [r"installed in \d+ s"]
    if tag == "any":
        patterns.append(r"without the native library, which needs nvcc: .+")
    assert len(lines) == len(patterns)
    assert all(map(re.fullmatch, patterns, lines))
