"""Two nodes that meet over a network: each a network namespace, with a cable between them."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.zygote import Ranks
from tests.train.launch import (
    ROOT,
    SCRIPT,
    TINY,
    assert_same_run,
    finish,
    rows,
    wait_for,
)
from train.checkpoint.checkpointer import find_damage

# Without clipping: its factor would follow from a norm that the layouts sum in another order.
RUN = [*TINY, "--deterministic", "--ema", 0.9, "--clip-grad", 0, "--steps", 40, "--ckpt-every", 4]
RUN += ["--keep", 99, "--eval-every", 0.1]
LAST = "step-00000040"


class Node:
    """A network namespace with one end of a cable.

    Args:
        number: 1 or 2; the first is where the nodes meet.
    """

    def __init__(self, number: int):
        self.number = number
        self.name = f"leaner{os.getpid()}n{number}"
        self.cable = f"cable{number}"
        self.address = f"10.77.0.{number}"

    def start(self, out: Path, *torchrun: str, resume: str = "none") -> subprocess.Popen:
        """Start this node's torchrun."""
        elastic = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=faults"]
        elastic += [f"--rdzv-endpoint={Node(1).address}:29400", f"--local-addr={self.address}"]
        # Both namespaces have the machine's name, by which torchrun would tell who is who.
        elastic += [f"--rdzv-conf=is_host={int(self.number == 1)}"]
        words = [str(arg) for arg in (*RUN, "--out", out, "--resume", resume)]
        inside = ["ip", "netns", "exec", self.name, sys.executable, "-m"]
        return subprocess.Popen(
            [*inside, "torch.distributed.run", *elastic, *torchrun, SCRIPT, *words],
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            # Otherwise a node that joins later waits for an address that was published before.
            | {"GLOO_SOCKET_IFNAME": self.cable, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def kill(self) -> None:
        """End everything on the node at once, as when its power fails."""
        for pid in ip("netns", "pids", self.name).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture(scope="module")
def nodes(full: None) -> Iterator[tuple[Node, Node]]:
    """Two nodes, or none where they cannot be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command ip (iproute2)")
    pair = Node(1), Node(2)
    try:
        try:
            for node in pair:
                ip("netns", "add", node.name)
            ends = [["name", node.cable, "netns", node.name] for node in pair]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for node in pair:
                ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", node.cable)
                for device in ("lo", node.cable):
                    ip("-n", node.name, "link", "set", device, "up")
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield pair
    finally:
        for node in pair:
            if Path("/run/netns", node.name).exists():
                node.kill()
                ip("netns", "del", node.name)


@pytest.fixture(autouse=True)
def cleared(nodes) -> Iterator[None]:
    """A test that fails leaves nothing on the nodes that the next would meet."""
    yield
    for node in nodes:
        node.kill()


@pytest.fixture(scope="module")
def together(nodes, tmp_path_factory) -> Path:
    """The run on two nodes that nothing interrupts."""
    out = tmp_path_factory.mktemp("together") / "run"
    for process in [node.start(out) for node in nodes]:
        done = finish(process)
        assert done.returncode == 0, done.stderr
    return out


def test_two_nodes_train_as_one_node_does(zygote, together, tmp_path):
    alone = tmp_path / "run"
    Ranks(zygote, [*RUN, "--out", alone], tmp_path / "log", 2).finish()
    # The same weights and items to begin with, to the bit. Each node has all of a tensor, where
    # one node has a half for each rank: what ends a vector of the processor rounds otherwise.
    both = [rows(out / "metrics.jsonl") for out in (together, alone)]
    assert both[0][0]["loss"] == both[1][0]["loss"]
    sampled = [rows(out / "kappa.jsonl")[:2] for out in (together, alone)]
    assert [row["step"] for row in sampled[0]] == [0, 0]
    assert sampled[0] == sampled[1]
    for ours, theirs in zip(*both, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_node_that_dies_and_comes_back_costs_no_more_than_the_steps_since_the_last_save(
    nodes, together, tmp_path
):
    out = tmp_path / "run"
    stays, dies = (node.start(out, "--max-restarts=3") for node in nodes)
    wait_for((out / "checkpoints" / "step-00000008").exists, stays)
    nodes[1].kill()
    assert finish(dies).returncode == -signal.SIGKILL
    back = nodes[1].start(out, "--max-restarts=3")
    said = [finish(process) for process in (stays, back)]
    assert [done.returncode for done in said] == [0, 0], said[0].stderr + said[1].stderr
    assert "resumed from" in said[0].stdout + said[1].stdout
    assert_same_run(out, together, LAST)


def test_sigterm_to_both_nodes_stops_them_and_a_new_launch_resumes(nodes, together, tmp_path):
    out = tmp_path / "run"
    processes = [node.start(out) for node in nodes]
    wait_for((out / "checkpoints" / "step-00000008").exists, processes[0])
    for process in reversed(processes):
        process.terminate()
    said = "".join(finish(process).stdout for process in processes)
    assert "by SIGTERM; --resume auto continues" in said or "by another rank's signal" in said
    saved = sorted((out / "checkpoints").glob("step-*"))
    assert [find_damage(path) for path in saved] == [None] * len(saved)
    assert not (out / "summary.json").exists()
    for process in [node.start(out, resume="auto") for node in nodes]:
        done = finish(process)
        assert done.returncode == 0, done.stderr
    assert_same_run(out, together, LAST)
