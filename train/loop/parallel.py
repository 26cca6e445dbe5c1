"""Distribute a model over processes and devices, from one core to many nodes.

There are three ways. In one process the parameters are plain; with several, FSDP2 shards them, or
DDP keeps all of them on each. A step computes the same in all three, to the bit on one process.

The order in which a model is built matters: blocks on the meta device, activation checkpointing,
``torch.compile``, ``fully_shard`` on each block and then on the whole, memory, weights. The
optimizer comes after all of it, since sharding replaces the parameters, and DDP last.
"""

import inspect
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from leaner_kernels.monitor.command_line import one_line
from leaner_kernels.nn import Capturing

DataParallelMode = Literal["one", "fsdp", "ddp"]

# Variables that torchrun sets, and those in which launchers state the number of processes.
_LAUNCHED = "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
_SIZES = (
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS"),
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
)


@dataclass(frozen=True)
class DistributedContext:
    """This process among all of them.

    Attributes:
        rank: rank of this process, 0 to ``size`` - 1.
        size: number of processes.
        local_size: processes on this machine.
        device: what this process computes on.
        host_group: separate group for work on the host during training: checkpoints.
        agreement: another group, in which ranks agree while a checkpoint is written.
    """

    rank: int
    size: int
    local_size: int
    device: torch.device
    host_group: dist.ProcessGroup
    agreement: dist.ProcessGroup

    @property
    def shape(self) -> tuple[int, ...]:
        """The layout of processes for FSDP2: shards, or on several machines replicas times shards.

        So weights are gathered within a machine, and only gradients travel between machines.
        """
        nodes = self.size // self.local_size
        return (nodes, self.local_size) if nodes > 1 else (self.size,)


class Place(NamedTuple):
    """This process among those that a launcher started, by default the only one."""

    launched: bool = False
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def place_in_launch() -> Place:
    """Return the place that torchrun gave this process; without RANK, that of the only one.

    Raises:
        ConnectionError: if RANK is set but another variable is not, or one is not a whole number.
    """
    if not os.environ.get("RANK"):
        return Place()
    missing = [name for name in _LAUNCHED if not os.environ.get(name)]
    if missing:
        raise ConnectionError(
            f"RANK is {os.environ['RANK']!r}, but {', '.join(missing)} must be set as well: start "
            "the script with torchrun, or unset RANK to train in one process"
        )
    rank, size = _whole("RANK", 0), _whole("WORLD_SIZE", 1)
    if rank >= size:
        raise ConnectionError(f"RANK must be below WORLD_SIZE, got {rank} and {size}")
    return Place(True, rank, size, _whole("LOCAL_RANK", 0), _whole("LOCAL_WORLD_SIZE", 1))


def _whole(name: str, least: int) -> int:
    """Return a variable of the environment, which must be a whole number if it is set."""
    text = os.environ.get(name) or str(least)
    if not text.isdecimal() or int(text) < least:
        raise ConnectionError(f"{name} must be a whole number at least {least}, got {text!r}")
    return int(text)


def _say_that_it_is_alone() -> None:
    """Print one line if launcher variables are ignored because RANK is missing."""
    sizes = {name: os.environ.get(name, "") for name in _SIZES}
    told = ", ".join(f"{name}={size}" for name, size in sizes.items() if size not in ("", "1"))
    if told:
        line = f"{told} is ignored without RANK: one process trains alone; torchrun starts several"
        sys.stderr.write(one_line(line) + "\n")


@contextmanager
def init_distributed(timeout: float = 0) -> Iterator[DistributedContext]:
    """Join the processes that torchrun started, or run alone; leave at the end.

    Args:
        timeout: seconds that a process waits for others, when joining and in every collective; 0
            keeps PyTorch's default.

    Yields:
        This process among all of them.

    Raises:
        ValueError: more processes on this machine than GPUs.
        ConnectionError: the other processes cannot be reached, or the environment has only some of
            the variables that torchrun sets.
    """
    timeout = timedelta(seconds=timeout) if timeout else None
    launched, rank, size, local_rank, local_size = place_in_launch()
    if not launched:
        _say_that_it_is_alone()
    if torch.cuda.is_available():
        needed = max(local_size, local_rank + 1)
        if needed > torch.cuda.device_count():
            raise ValueError(
                f"--nproc-per-node must be at most the {torch.cuda.device_count()} GPUs of this "
                f"machine, got {needed}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    if size == local_size:
        _listen_on_loopback()
    if launched:
        _join(backend, timeout, rank, size)
    else:
        # A TCPStore would listen on every interface, regardless of its host argument.
        alone, hook = dist.HashStore(), sys.excepthook
        dist.init_process_group(backend, timeout=timeout, store=alone, rank=0, world_size=1)
        sys.excepthook = hook  # PyTorch's hook names the rank, and would remain
    try:
        groups = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)]
        yield DistributedContext(rank, size, local_size, device, *groups)
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
            # The agent's store still has the addresses of the previous attempt, at which an early
            # rank would wait in vain. Nodes may count attempts differently.
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


def uses_bf16(precision: str, world: DistributedContext) -> bool:
    """Return whether to compute in bfloat16: "auto" does on a GPU."""
    return precision == "bf16" or (precision == "auto" and world.device.type == "cuda")


def device_name(world: DistributedContext) -> str:
    """Return a readable name of the device."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s'[: threads != 1]} per rank"


def data_parallel_mode(shard: str, world: DistributedContext) -> DataParallelMode:
    """Return how ``--shard`` spreads a model over the processes."""
    if shard == "fsdp" or (shard == "auto" and world.size > 1):
        return "fsdp"
    return "one" if world.size == 1 else "ddp"


def make_model(
    build: Callable[[], nn.Module],
    world: DistributedContext,
    *,
    seed: int,
    bf16: bool,
    mode: DataParallelMode | None = None,
    activation_checkpointing: Literal["none", "full", "selective"] = "none",
    compile: bool = False,
) -> nn.Module:
    """Build a model for training; with FSDP2 each rank holds its share of every parameter.

    Args:
        build: makes the model; it must have ``blocks`` and ``init_weights(generator)``, which
            gives every parameter and buffer a value that does not depend on the sharding.
        world: the processes.
        seed: seed of the initial weights.
        bf16: compute in bfloat16, norms included. Gradients are still summed over passes and ranks
            in float32, and the optimizer's weights and the statistics of batch norms are float32.
        mode: as ``data_parallel_mode`` returns it; that of ``--shard auto`` when omitted.
        activation_checkpointing: "full" keeps only the inputs of each block for the backward,
            "selective" also what attention operators return.
        compile: compile each block; ``all_blocks_compiled`` is for its training.

    Returns:
        The model, on ``world.device``.
    """
    with torch.device("meta"):
        model = build()
    for block in model.blocks:
        # Replacing `forward` keeps FSDP's hooks outside, and parameter names unchanged.
        if activation_checkpointing != "none":
            selective = activation_checkpointing == "selective"
            block.forward = _checkpointed_forward(block, selective=selective, compile=compile)
        if compile:
            block.forward = torch.compile(block.forward)
    if (mode or data_parallel_mode("auto", world)) == "fsdp":
        _fully_shard(model, world, bf16)
    elif bf16:
        from train.loop.rounding import round_weights

        round_weights(model)
    model.to_empty(device=world.device)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def all_blocks_compiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the context in which every block of a model is compiled.

    Blocks share their code, but may have different rates of stochastic depth: by default, no more
    than eight variants would be compiled.
    """
    limit = max(torch._dynamo.config.recompile_limit, 4 * len(model.blocks))
    return torch._dynamo.config.patch(recompile_limit=limit)


def _fully_shard(model: nn.Module, world: DistributedContext, bf16: bool) -> None:
    # Imported late: one process does not need it, and the import takes a second.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = ("replicate", "shard")[-len(world.shape) :]
    mesh = init_device_mesh(world.device.type, world.shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)


class Passes:
    """Run the passes of a step: forwards and backwards, and the sum of gradients over ranks.

    Args:
        model: of ``make_model``; with DDP equal on all ranks, and no parameter of it is frozen or
            thawed from here on.
        mode: as for ``make_model``.
        world: the processes.

    Attributes:
        called: the callable for the loss: the model, or its DDP wrapper.
    """

    def __init__(self, model: nn.Module, mode: DataParallelMode, world: DistributedContext):
        self.model = self.called = model
        self.sharded = [m for m in model.modules() if hasattr(m, "set_requires_gradient_sync")]
        self.last: bool | None = None
        # Ranks that hold the same gradients.
        self.copies = world.size if mode == "ddp" else math.prod(world.shape[:-1])
        self.no_flags = torch.zeros(2, device=world.device)
        if mode == "ddp":
            ddp = nn.parallel.DistributedDataParallel
            # Statistics of batch norms are averaged once a step, so DDP must not broadcast buffers;
            # the option was renamed.
            names = inspect.signature(ddp).parameters
            sync = next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in names)
            device_ids = [world.device] if world.device.type == "cuda" else None
            options: dict[str, Any] = {sync: False, "gradient_as_bucket_view": True}
            self.called = ddp(model, device_ids=device_ids, **options)

    @contextmanager
    def one(self, *, last: bool) -> Iterator[None]:
        """Run a forward and its backward in a context; ``last`` marks the last pass of a step."""
        if last != self.last:
            self.last = last
            for module in self.sharded:
                module.set_requires_gradient_sync(last, recurse=False)
        waits = self.called is not self.model and not last
        try:
            with self.called.no_sync() if waits else nullcontext():
                yield
        finally:
            if (rounding := getattr(self.model, "_rounding", None)) is not None:
                rounding.restore()

    def sum_over_ranks(self, values: Tensor, flags: Sequence[float]) -> Tensor:
        """Join the values of all ranks for a step in one collective, without waiting on the host.

        Args:
            values: (n,) float32 on the device; the second is the norm of this rank's gradients.
            flags: two numbers of the host.

        Returns:
            (n + 2,): the norm of the whole gradient, and sums of the others.
        """
        device, told = values.device, self.no_flags
        if any(flags):
            on_host = torch.tensor(flags, pin_memory=device.type == "cuda")
            told = on_host.to(device, non_blocking=True)
        whole = torch.cat([values, told])
        whole[1] = whole[1].square() / self.copies
        dist.all_reduce(whole)
        whole[1].sqrt_()
        return whole


def _batch_norms(module: nn.Module) -> list[BatchNorm]:
    return [m for m in module.modules() if isinstance(m, BatchNorm)]


def _checkpointed_forward(
    block: nn.Module, *, selective: bool, compile: bool
) -> Callable[..., Any]:
    """Return a block's forward that is recomputed in its backward."""
    policy = _keep_no_result
    if selective:
        from leaner_kernels.activation_checkpointing import checkpoint_policy as policy

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
    """Recompute without repeating side effects of the forward: statistics and captures.

    It intercepts no operators; the compiler requires contexts of this class.
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


class BatchNorms:
    """The batch norms of a model, found once.

    Args:
        model: the model, whose buffers have their final places.
    """

    def __init__(self, model: nn.Module):
        norms = [(name, m) for name, m in model.named_modules() if isinstance(m, BatchNorm)]
        kinds = ("running_mean", "running_var")
        self.statistics = {f"{n}.{kind}": getattr(m, kind) for n, m in norms for kind in kinds}
        # All buffers that a forward changes: statistics and counters.
        self.buffers = [buffer for _, m in norms for buffer in m.buffers(recurse=False)]

    def copies(self) -> list[Tensor]:
        """Return copies of all that a forward changes."""
        return [buffer.clone() for buffer in self.buffers]

    def restore(self, copies: list[Tensor], skipped: Tensor) -> None:
        """Put copies back if ``skipped``, () bool on the device."""
        for buffer, copy in zip(self.buffers, copies):
            torch.where(skipped, copy, buffer, out=buffer)

    @torch.no_grad()
    def share(self, world: DistributedContext) -> None:
        """Average the statistics over ranks, each of which saw a part of the batch.

        After every step: a resume and an evaluation then do not depend on which rank saves.
        """
        mine = list(self.statistics.values())
        if world.size == 1 or not mine:
            return
        flat = torch.cat(mine)
        dist.all_reduce(flat)
        torch._foreach_copy_(mine, flat.div_(world.size).split([len(each) for each in mine]))
