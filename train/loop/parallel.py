"""Processes, devices and FSDP2: the same code on one laptop core and on many nodes.

The order in which a model is built matters: blocks on the meta device, activation checkpointing,
``torch.compile``, ``fully_shard`` on each block and then on the whole, memory, weights. The
optimizer comes after all of it, since sharding replaces the parameters.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from leaner_kernels.activation_checkpointing import checkpoint_policy
from leaner_kernels.nn import Capturing


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
        host_group: a group of its own for what is done on the host beside training: checkpoints.
        agreement: another, for what ranks agree on while one is written.
    """

    rank: int
    size: int
    local_size: int
    device: torch.device
    mesh: DeviceMesh
    host_group: dist.ProcessGroup
    agreement: dist.ProcessGroup


@contextmanager
def world(timeout: float = 0) -> Iterator[World]:
    """Join the processes that torchrun started, or be the only one; leave at the end.

    Args:
        timeout: seconds that one process waits for another, in joining and in every collective,
            before it gives up; 0 leaves PyTorch's own.

    Yields:
        The ``World``.

    Raises:
        ValueError: more processes on this machine than GPUs.
        ConnectionError: the other processes cannot be reached.
    """
    timeout = timedelta(seconds=timeout) if timeout else None
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
    if size == local_size:
        _listen_on_loopback()
    if "RANK" in os.environ:
        _join(backend, timeout, rank, size)
    else:
        # A TCPStore would listen on every interface, whatever host it is given.
        alone = dist.HashStore()
        dist.init_process_group(backend, timeout=timeout, store=alone, rank=0, world_size=1)
    try:
        nodes = size // local_size
        if nodes > 1:
            shape, names = (nodes, local_size), ("replicate", "shard")
        else:
            shape, names = (size,), ("shard",)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        groups = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)]
        yield World(rank, size, local_size, device, mesh, *groups)
    finally:
        dist.destroy_process_group()


def _listen_on_loopback() -> None:
    """Keep gloo's and NCCL's sockets, which ask for no password, from other machines."""
    with suppress(OSError):
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        for library in ("GLOO", "NCCL") if loopback else ():
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback[0])


def _join(backend: str, timeout: timedelta | None, rank: int, size: int) -> None:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        if attempt == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
            dist.init_process_group(backend, timeout=timeout)
        else:
            # The agent's store still has the addresses of the attempt before, at which a rank that
            # is early would wait for nobody. Several nodes do not count attempts alike.
            store, _, _ = next(rendezvous("env://", timeout=timeout or default_pg_timeout))
            store = dist.PrefixStore(f"attempt {attempt}", store)
            dist.init_process_group(
                backend, timeout=timeout, store=store, rank=rank, world_size=size
            )
    except RuntimeError as error:  # of gloo's connections, or dist.DistError of the store's
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        cause = str(error).strip().partition("\n")[0]
        raise ConnectionError(
            f"rank {rank} cannot join the {size} processes at {place} (GLOO_SOCKET_IFNAME and "
            f"NCCL_SOCKET_IFNAME choose the network): {cause}"
        ) from error


def uses_bf16(precision: str, world: World) -> bool:
    """Return whether to compute in bfloat16: "auto" does on a GPU."""
    return precision == "bf16" or (precision == "auto" and world.device.type == "cuda")


def device_name(world: World) -> str:
    """Return what computes, for people."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return f"CPU, {torch.get_num_threads()} threads per rank"


def shard(
    build: Callable[[], nn.Module],
    world: World,
    *,
    seed: int,
    bf16: bool,
    activation_checkpointing: Literal["none", "full", "selective"] = "none",
    compile: bool = False,
) -> nn.Module:
    """Build a model whose parameters, gradients and optimizer state are spread over all ranks.

    Args:
        build: makes the model; it must have ``blocks`` and ``init_weights(generator)``, which
            gives every parameter and buffer a value that does not depend on the sharding.
        world: the processes.
        seed: of the initial weights.
        bf16: compute in bfloat16, norms included. Gradients are still added up over ranks in
            float32, and the weights that the optimizer sees are float32, as are batch norms'
            statistics.
        activation_checkpointing: "full" keeps only the inputs of each block for the backward,
            "selective" also what attention operators return.
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
    if compile:
        # Blocks share their code, and each may have a rate of its own for stochastic depth: by
        # default the ninth variant would no longer be compiled.
        torch._dynamo.config.recompile_limit = max(
            torch._dynamo.config.recompile_limit, 4 * len(model.blocks)
        )
    for block in model.blocks:
        # Replacing `forward` leaves FSDP's hooks outside, and the names of parameters alone.
        if activation_checkpointing != "none":
            selective = activation_checkpointing == "selective"
            block.forward = _checkpointed_forward(block, selective=selective, compile=compile)
        if compile:
            block.forward = torch.compile(block.forward)
        shard_one(block)
    shard_one(model)
    model.to_empty(device=world.device)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def _batch_norms(module: nn.Module) -> list[BatchNorm]:
    return [m for m in module.modules() if isinstance(m, BatchNorm)]


def _checkpointed_forward(
    block: nn.Module, *, selective: bool, compile: bool
) -> Callable[..., Any]:
    """Return a block's forward that is computed again for its backward."""
    policy = checkpoint_policy if selective else _keep_no_result

    def forward_and_recomputation() -> tuple[AbstractContextManager, AbstractContextManager]:
        first, second = nullcontext(), nullcontext()
        # The compiler requires a policy in any case.
        if selective or compile:
            first, second = create_selective_checkpoint_contexts(policy)
        return first, _RecomputeWithoutSideEffects(block, second)

    return partial(
        checkpoint, block.forward, use_reentrant=False, context_fn=forward_and_recomputation
    )


def _keep_no_result(*_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


class _RecomputeWithoutSideEffects(TorchDispatchMode):
    """Recompute without noting again what the forward noted: statistics, and what is captured.

    It intercepts no operator itself; the compiler requires contexts of this class.
    """

    def __init__(self, block: nn.Module, inner: AbstractContextManager):
        super().__init__()
        self.inner = inner
        self.norms = [(norm, norm.momentum) for norm in _batch_norms(block)]
        self.captures = [m for m in block.modules() if isinstance(m, Capturing)]

    def __enter__(self):
        for norm, _ in self.norms:
            norm.momentum = 0.0
        for module in self.captures:
            module._store_capture = _keep_nothing
        self.inner.__enter__()
        return self

    def __exit__(self, *exception: Any):
        try:
            self.inner.__exit__(*exception)
        finally:
            for norm, momentum in self.norms:
                norm.momentum = momentum
            for module in self.captures:
                del module._store_capture


def _keep_nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the running means and variances of a model's batch norms, by name."""
    norms = [(name, m) for name, m in model.named_modules() if isinstance(m, BatchNorm)]
    kinds = ("running_mean", "running_var")
    return {f"{name}.{kind}": getattr(norm, kind) for name, norm in norms for kind in kinds}


def norm_buffers(model: nn.Module) -> list[Tensor]:
    """Return all that a forward changes in a model's batch norms: statistics and counters."""
    return [buffer for norm in _batch_norms(model) for buffer in norm.buffers(recurse=False)]


@torch.no_grad()
def share_statistics(model: nn.Module, world: World) -> None:
    """Average the statistics of batch norms over ranks, each of which saw a part of the batch."""
    mine = list(statistics(model).values())
    if world.size == 1 or not mine:
        return
    flat = torch.cat(mine)
    dist.all_reduce(flat)
    torch._foreach_copy_(mine, flat.div_(world.size).split([len(each) for each in mine]))
