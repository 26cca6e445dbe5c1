"""torch.hub finds the models in a checkout, from any directory, with torch alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hubconf
from models import papers

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(row.row for row in papers.ROWS.values() if row.variant == "original")


def load(name: str, **kwargs):
    return torch.hub.load(str(ROOT), name, source="local", **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_hub_builds_the_lean_model_unless_asked_for_the_original(name):
    counts = [load(name, device="meta", **kw).num_params() for kw in ({}, {"variant": "original"})]
    assert counts == [papers.ROWS[name, v].audited_params for v in ("lean", "original")]
    assert f"{counts[0]:,} parameters" in getattr(hubconf, name).__doc__


@pytest.mark.parametrize("name", NAMES)
def test_pretrained_weights_are_refused(name):
    with pytest.raises(ValueError, match=f"pretrained must be False, got True: {name} has no"):
        load(name, pretrained=True)


@pytest.mark.slow
def test_hub_needs_no_installation_and_no_path(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    code = (
        "import torch; m = torch.hub.load("
        f"{str(ROOT)!r}, 'vit_base', source='local', device='meta'); print(m.num_params())"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "40112872\n"), run.stderr
