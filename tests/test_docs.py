"""Links of the documents lead somewhere, and their commands name what exists."""

import dataclasses
import importlib
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from train import bert, gpt, lra, vit

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "[!.]*/README.md",
    "bench/*/README.md",
    "leaner_kernels/*/README.md",
)
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A flag's value may be anything; these commands pass their arguments on to a program of ours.
LAUNCHERS = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:torchrun|python[\d.]*)\b")


def text_of(page: Path) -> str:
    """Return a page without its blocks of code, where brackets are no links."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as forges and mkdocs make them."""
    known: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", text_of(page), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", heading).lower())
        anchor = re.sub(r"\s", "-", words.strip())
        numbered = (f"{anchor}{f'-{n}' * (n > 0)}" for n in range(99))
        known.add(next(name for name in numbered if name not in known))
    return known


def commands() -> list[tuple[str, str]]:
    """Return (page, command) of every block of shell that runs a program of this project."""
    pairs = []
    for page, name in zip(PAGES, NAMES, strict=True):
        for block in BLOCK.findall(page.read_text("utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.partition(" #")[0].strip()
                if LAUNCHERS.match(command) or command.startswith(("make ", "bench/")):
                    pairs.append((name, command))
    return pairs


@cache
def help_of(*program: str) -> str:
    """Return what a program prints for ``--help``."""
    done = subprocess.run(
        [sys.executable, *program, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(program)} --help: {done.stderr[-500:]}"
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files_and_headings(page):
    broken = []
    for link in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        generated = page.parent.name == "docs" and path.startswith("api/")
        if (not target.exists() and not generated) or (
            anchor and target.suffix == ".md" and target.exists() and anchor not in anchors(target)
        ):
            broken.append(link)
    assert not broken


# A picture or a link alone on its line cannot be wrapped.
LONE = re.compile(r"\s*([-*] )?!?(\[[^\]]*\]\([^)]*\)|<?https?://\S+)[.,;:]?")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_lines_have_at_most_120_characters_and_cells_25_words(page):
    lines = text_of(page).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    text = [line for line in lines if not line.startswith("|") and not LONE.fullmatch(line)]
    assert [line for line in text if len(line) > 120] == []
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell.split()) > 25] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_code_names_targets_and_scripts_that_exist(page):
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text("utf-8"), re.DOTALL))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", code)) <= make_targets()
    scripts = re.findall(r"(?<!/)\b(?:train|bench|models|examples)/\w+\.(?:py|sh)\b", code)
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.slow
def test_commands_run_programs_that_exist_with_flags_that_they_have():
    unknown = []
    for page, command in commands():
        words = shlex.split(command)
        if words[0] in ("make",) or words[0].startswith("bench/"):
            continue
        start = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
        if start is None and "-m" in words:
            start = words.index("-m") + 1
            program = ("-m", words[start])
            if not (ROOT / words[start].partition(".")[0]).is_dir():
                continue
        elif start is not None:
            program = (words[start],)
            if not (ROOT / words[start]).exists() or "train/" not in words[start]:
                continue
        else:
            continue
        text = help_of(*program)
        flags = [word.partition("=")[0] for word in words[start + 1 :] if word.startswith("--")]
        unknown += [(page, command, flag) for flag in flags if not re.search(rf"{flag}\b", text)]
    assert len(commands()) > 40
    assert not unknown


@pytest.mark.slow
def test_benchmarks_that_pages_run_with_pytest_are_collected():
    """Status 5: every row is of a GPU that is not there."""
    lines = {
        line.partition(" #")[0].strip()
        for page in PAGES
        for block in BLOCK.findall(page.read_text("utf-8"))
        for line in block.splitlines()
        if line.startswith("pytest bench")
    }
    assert len(lines) > 3
    # pytest-benchmark refuses --benchmark-only in a worker of pytest-xdist.
    alone = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    for line in sorted(lines):
        words = [word for word in shlex.split(line) if not word.startswith("--benchmark-json")]
        command = [sys.executable, "-m", *words, "--collect-only", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, env=alone
        )
        assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), line
        assert "is named" not in done.stdout, line


# Of torchrun, pip, CMake, pytest and pytest-benchmark, which pages name too.
OTHERS_FLAGS = {
    *("--local-addr", "--max-restarts", "--nproc-per-node", "--rdzv-conf", "--signals-to-handle"),
    "--standalone",
    *("--target", "--no-deps", "--build", "--install"),
    *("--group", "--benchmark-only", "--benchmark-json", "--benchmark-compare", "--gpus"),
}


def own_flags() -> set[str]:
    """Return every flag that a program of this project has."""
    scripts = (vit.ImageSettings, gpt.GptSettings, bert.BertSettings, lra.LraSettings)
    fields = {field.name for kind in scripts for field in dataclasses.fields(kind)}
    flags = {f"--{name.replace('_', '-')}" for name in fields}
    programs = [
        *ROOT.glob("*/*.py"),
        *ROOT.glob("bench/*/*.py"),
        *ROOT.glob("leaner_kernels/monitor/*.py"),
        *ROOT.glob("tests/*/conftest.py"),
    ]
    for path in programs:
        if path.parent != ROOT / "tests" or path.name == "conftest.py":
            flags |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', path.read_text("utf-8")))
    return flags


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_pages_name_flags_that_exist(page):
    if page.name in ("CHANGELOG.md", "LOG.md"):  # what was
        return
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text("utf-8"), re.DOTALL))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", code))
    known = own_flags() | OTHERS_FLAGS
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    assert named - known == set()


# What a command names that is neither bundled nor generated; such a run plans on random items.
ELSEWHERE = re.compile(r"^(/|hf:|FOLDER|tinystories$)")
NEEDS_FILES = "--pretrained", "--resume", "train/predict.py"


def planned() -> list[tuple[str, ...]]:
    """Return the script and the arguments of every training command, each once."""
    plans = set()
    for _, command in commands():
        words = shlex.split(command)
        script = next((n for n, word in enumerate(words) if word.startswith("train/")), None)
        if script is None or any(need in command for need in NEEDS_FILES):
            continue
        if words[script] == "train/lra.py" and "--data" in words:
            continue
        plan = ["synthetic" if ELSEWHERE.match(word) else word for word in words[script:]]
        if "--recipe" in plan and plan[0] == "train/vit.py":  # random items are not augmented
            plan += ["--crop", "0.08", "--flip", "--rand-augment", "none", "--erase", "0"]
        plans.add(tuple(word for word in plan if word != "--dry-run"))
    return sorted(plans)


@pytest.mark.slow
@pytest.mark.parametrize("plan", planned(), ids=" ".join)
def test_training_commands_plan_a_run(plan, tmp_path, capsys):
    script = importlib.import_module(plan[0].removesuffix(".py").replace("/", "."))
    script.main([*plan[1:], "--dry-run", "--out", str(tmp_path / "run")])
    assert "as flags: " in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
