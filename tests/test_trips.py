"""How many files a reader of one call goes through: no more than these."""

import json
import subprocess
import sys

import pytest

from tests.trips import ROOT, Trip

# Of each trip the most files, and the most returns to a file that it had left.
MOST: dict[str, tuple[int, int | None]] = {
    # Of these two watch imports and mark the package of kernels.
    "attention, first": (15, None),
    "attention, further shape": (10, 30),
    "attention, repeated": (4, 8),
    "attention, repeated, statistics": (6, 9),  # two launches, one of them a capture
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


@pytest.mark.parametrize("name", MOST)
def test_a_trip_goes_through_no_more_files(name):
    found = measured(name)
    most, most_returns = MOST[name]
    assert len(found.files) <= most
    assert most_returns is None or found.returns <= most_returns
