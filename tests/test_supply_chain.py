"""What others wrote and we run: pinned actions, locked packages, and what audits them."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").iterdir())
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
# What one job may do beside reading the code, and why.
RIGHTS = {
    ("wheels.yml", "attest"): {"id-token": "write", "attestations": "write"},  # it signs
}


def jobs(workflow: Path) -> dict[str, dict]:
    return yaml.safe_load(workflow.read_text("utf-8"))["jobs"]


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


@named(WORKFLOWS)
def test_every_action_is_pinned_by_its_commit_and_says_its_version(path):
    lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    uses = [line for line in lines if re.match(r"(- )?uses:", line)]
    pinned = r"(- )?uses: [\w-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+"
    assert [line for line in uses if not re.fullmatch(pinned, line)] == []
    steps = [step for job in jobs(path).values() for step in job["steps"]]
    assert len(uses) == sum("uses" in step for step in steps) > 0
    images = [job["container"] for job in jobs(path).values() if "container" in job]
    assert [image for image in images if not re.fullmatch(r".+@sha256:[0-9a-f]{64}", image)] == []


@named(WORKFLOWS)
def test_a_workflow_may_read_the_code_and_nothing_else(path):
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        more = {right: may for right, may in job.get("permissions", {}).items() if may != "read"}
        assert more == RIGHTS.get((path.name, name), {})
    # YAML reads the key "on" as true. This event gives a stranger's code our secrets.
    assert "pull_request_target" not in workflow[True]
    text = path.read_text("utf-8")
    assert "secrets." not in text
    # What a stranger may name, such as a branch, must not be pasted into a shell.
    runs = [s["run"] for job in workflow["jobs"].values() for s in job["steps"] if "run" in s]
    assert [run for run in runs if "${{" in run] == []


@named(WORKFLOWS)
def test_no_checkout_leaves_a_token_behind(path):
    steps = [step for job in jobs(path).values() for step in job["steps"]]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step.get("with", {}).get("persist-credentials") is False for step in checkouts)


def test_every_job_ends_by_itself():
    found = {(path.name, name): job for path in WORKFLOWS for name, job in jobs(path).items()}
    assert len(found) > 5
    assert [key for key, job in found.items() if job.get("timeout-minutes", 999) > 60] == []


def test_actions_and_locks_are_kept_up_to_date():
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text("utf-8"))["updates"]
    assert {(update["package-ecosystem"], update["directory"]) for update in updates} == {
        ("github-actions", "/"),
        ("pip", "/requirements"),
    }
    (pip,) = (update for update in updates if update["package-ecosystem"] == "pip")
    assert all((ROOT / "requirements" / path).exists() for path in pip["exclude-paths"])


def locked(lock: Path) -> dict[str, Version]:
    """The version of each package; every one must have one, and digests of its files."""
    lines = lock.read_text("utf-8").replace(" \\\n    ", " ").splitlines()
    whole = r"([a-z0-9]+(?:-[a-z0-9]+)*)(?:\[\S+\])?==(\S+)( --hash=sha256:[0-9a-f]{64})+"
    matches = [re.fullmatch(whole, line) for line in lines]
    assert [line for line, match in zip(lines, matches, strict=True) if match is None] == []
    return {match[1]: Version(match[2]) for match in matches}


@named(LOCKS)
def test_a_lock_names_each_package_with_its_version_and_digest(path):
    assert len(locked(path)) > 5


def grouped(name: str, groups: dict[str, list]) -> list[str]:
    """The requirements of a dependency group and of those that it includes."""
    entries = groups[name]
    included = [entry["include-group"] for entry in entries if isinstance(entry, dict)]
    own = [entry for entry in entries if isinstance(entry, str)]
    return own + [line for group in included for line in grouped(group, groups)]


def wanted(lock: str) -> list[Requirement]:
    """What pyproject.toml asks of an environment, the library's own needs where it is installed."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    command = rf"^\t\$\(LOCK\) (.*)--group {lock} -o requirements/{lock}.txt$"
    (line,) = re.findall(command, makefile, re.MULTILINE)
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    library = pyproject["project"]["dependencies"] if line else []
    return [Requirement(x) for x in library + grouped(lock, pyproject["dependency-groups"])]


@named(LOCKS)
def test_a_lock_has_what_its_environment_needs(path):
    versions = locked(path)
    requirements = wanted(path.stem)
    assert requirements
    unmet = [
        str(requirement)
        for requirement in requirements
        if (version := versions.get(canonicalize_name(requirement.name))) is None
        or version not in requirement.specifier
    ]
    assert unmet == [], "run make lock"


def test_the_oldest_lock_is_of_the_oldest_versions_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    oldest, newest = (locked(ROOT / f"requirements/{name}.txt") for name in ("oldest", "dev"))
    for line in project["dependencies"]:
        requirement = Requirement(line)
        (bound,) = requirement.specifier
        assert oldest[requirement.name].release[:2] == Version(bound.version).release[:2]
        assert newest[requirement.name] > oldest[requirement.name]


def test_every_lock_but_the_oldest_is_audited():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (groups,) = re.findall(r"^audit:.*\n\tfor group in ([a-z ]+); do", makefile, re.M)
    assert sorted(groups.split()) == [path.stem for path in LOCKS if path.stem != "oldest"]
