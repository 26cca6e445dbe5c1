"""Machine facts: complete where the machine has them, None where not, nothing private."""

import json
import shutil
import subprocess

import pytest
import torch

import leaner_kernels
from bench.harness import machine


def test_facts_name_the_versions_and_the_cpu():
    facts = json.loads(json.dumps(machine.facts()))
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["leaner_kernels"] == leaner_kernels.__version__
    wanted = ("triton", "cuda", "cudnn", "driver", "python", "pytest-benchmark")
    wanted += "flash-attn", "flash-attn-3", "flash-attn-4", "xformers", "apex"
    assert facts["versions"].keys() >= set(wanted)
    assert facts["cpu"]["model"]
    assert facts["cpu"]["torch_threads"] == torch.get_num_threads()
    assert (facts["gpu"] is None) == (not torch.cuda.is_available())


def write(root, text):
    (root / "bench/attention").mkdir(parents=True, exist_ok=True)
    (root / "bench/attention/cases.py").write_text(text)


def test_a_copy_without_git_is_known_by_its_source(tmp_path):
    write(tmp_path, "a = 1")
    first = machine.commit(tmp_path)
    assert (first["id"], first["dirty"]) == (None, None)
    assert machine.commit(tmp_path) == first
    write(tmp_path, "a = 2")
    assert machine.commit(tmp_path)["source"] != first["source"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_commit_is_named_and_its_changes_noticed(tmp_path):
    def git(*command):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init")
    assert machine.commit(tmp_path)["id"] is None  # no commit yet
    write(tmp_path, "a = 1")
    git("add", ".")
    git("commit", "-m", "a")
    clean = machine.commit(tmp_path)
    assert (clean["id"], clean["dirty"]) == (git("rev-parse", "HEAD"), False)
    write(tmp_path, "a = 2")
    assert machine.commit(tmp_path)["dirty"] is True
