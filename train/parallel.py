"""Processes, devices and FSDP2: the same code on one laptop core and on many nodes.

The order in which a model is built matters: blocks on the meta device, activation checkpointing,
``torch.compile``, ``fully_shard`` on each block and then on the whole, memory, weights. The
optimizer comes after all of it, since sharding replaces the parameters.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class World:
    """This process among all of them.

    Attributes:
        rank: of this process, 0 to ``size`` - 1.
        size: number of processes.
        local_size: processes on this machine.
        device: what this process computes on.
        mesh: all devices: one dimension on one machine; on several, replicas times shards, so that
            weights are gathered within a machine and only gradients cross between machines.
        host_group: a group of its own for what is done on the host beside training.
    """

    rank: int
    size: int
    local_size: int
    device: torch.device
    mesh: DeviceMesh
    host_group: dist.ProcessGroup


@contextmanager
def world() -> Iterator[World]:
    """Join the processes that torchrun started, or be the only one; leave at the end.

    Yields:
        The ``World``.

    Raises:
        ValueError: more processes on this machine than GPUs.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available():
        if local_size > torch.cuda.device_count():
            raise ValueError(
                f"--nproc-per-node must be at most the {torch.cuda.device_count()} GPUs of this "
                f"machine, got {local_size}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        alone = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
    try:
        nodes = size // local_size
        if nodes > 1:
            shape, names = (nodes, local_size), ("replicate", "shard")
        else:
            shape, names = (size,), ("shard",)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        yield World(rank, size, local_size, device, mesh, dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()


def shard(
    build: Callable[[], nn.Module],
    world: World,
    *,
    seed: int,
    bf16: bool,
    recompute: bool = False,
    compile: bool = False,
) -> nn.Module:
    """Build a model whose parameters, gradients and optimizer state are spread over all ranks.

    Args:
        build: makes the model; it must have ``blocks`` and ``init_weights(generator)``, which
            gives every parameter and buffer a value that does not depend on the sharding.
        world: the processes.
        seed: of the initial weights.
        bf16: compute in bfloat16, norms included. Gradients are still added up over ranks in
            float32, and the weights that the optimizer sees are float32.
        recompute: keep only the inputs of each block for the backward.
        compile: compile each block.

    Returns:
        The model, on ``world.device``.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_one = partial(
        fully_shard, mesh=world.mesh, mp_policy=policy if bf16 else MixedPrecisionPolicy()
    )
    with torch.device("meta"):
        model = build()
    for block in model.blocks:
        # Replacing `forward` leaves FSDP's hooks outside, and the names of parameters alone.
        if recompute:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if compile:
            block.forward = torch.compile(block.forward)
        shard_one(block)
    shard_one(model)
    model.to_empty(device=world.device)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model
