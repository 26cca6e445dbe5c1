"""What others wrote and we run: actions pinned by commit, with the least rights."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").iterdir())
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
