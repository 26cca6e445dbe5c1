"""How many files a reader goes through, and how many modules a run loads: no more than these."""

import json
import subprocess
import sys

import pytest

from tests.trips import ROOT, TRIPS, Trip

# Of each trip the most files, and the most outside of the attention operator.
MOST = {
    # Two of the model's modules, two each of the monitor and kappa, and what operators share.
    "sampled step": (18, 9),
    "training": (91, 80),
}


def measured(name: str) -> Trip:
    """Return a trip of ``tests.trips``, measured in a process of its own, and print its files."""
    command = [sys.executable, "-m", "tests.trips", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = Trip(*json.loads(done.stderr.splitlines()[-1]))
    sys.stdout.write(f"{name}: {len(found.files)} files, {found.returns} returns\n")
    sys.stdout.writelines(f"  {path}\n" for path in found.files)
    return found


def test_every_trip_has_a_limit():
    assert MOST.keys() == TRIPS.keys()


@pytest.mark.parametrize("name", MOST)
def test_a_trip_goes_through_no_more_files(name):
    files = measured(name).files
    outside = [path for path in files if not path.startswith("leaner_kernels/ops/attention/")]
    most, most_outside = MOST[name]
    assert len(files) <= most
    assert len(outside) <= most_outside
