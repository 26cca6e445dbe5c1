"""What listens, and where: a run on one machine opens no port that another can reach."""

import json
import os
import subprocess
import sys

import pytest

from tests.train.launch import ROOT

# Joins as a script does, talks to the others, and writes down the addresses that it listens at.
PROGRAM = """
import json, os, re, sys
from pathlib import Path
from torch import distributed as dist
from train.loop.parallel import init_distributed

with init_distributed() as joined:
    dist.barrier()
    dist.broadcast_object_list([1], src=0, group=joined.host_group)
    files = Path("/proc/self/fd").iterdir()
    links = [os.readlink(path) for path in files if path.is_symlink()]
    inodes = {match[1] for match in map(re.compile(r"socket:.(\\d+).").fullmatch, links) if match}
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                addresses.append(words[1].partition(":")[0])
    Path(f"{sys.argv[1]}/{joined.rank}.json").write_text(json.dumps(addresses))
"""
LOOPBACK = "0100007F"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_one_machine_listens_on_loopback_alone(tmp_path, ranks):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), script, tmp_path]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        assert set(json.loads((tmp_path / f"{rank}.json").read_text())) == {LOOPBACK}


def joined(**given: str) -> dict[str, str]:
    """Return the interfaces that the libraries use after a process alone has joined."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    program = (
        "import os; from train.loop.parallel import init_distributed\n"
        f"with init_distributed(): print(*(os.environ.get(n, '') for n in {names!r}), sep=',')"
    )
    environment = {k: v for k, v in os.environ.items() if k not in names}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | given
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    return dict(zip(names, done.stdout.strip().split(","), strict=True))


def test_gloo_and_nccl_take_the_loopback_interface_unless_told_otherwise():
    assert set(joined().values()) <= {"lo", "lo0"}
    assert joined(NCCL_SOCKET_IFNAME="eth7")["NCCL_SOCKET_IFNAME"] == "eth7"
