"""The weights of a run in one safetensors file, which any program reads and nothing runs.

python -m train.export CHECKPOINT OUT.safetensors [--average]
"""

import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from train.config.flags import one_line_errors
from train.checkpoint.checkpoints import (
    cause,
    load_tensors,
    newest_intact,
    read_details,
    saved_tensors,
)

PROGRAM = "train.export"


def describe(settings: Mapping[str, Any], step: int) -> dict[str, str]:
    """Return the metadata of a file of weights: format, model, step, settings as JSON."""
    return {
        "format": "pt",
        "model": str(settings.get("model", "unknown")),
        "step": str(step),
        "settings": json.dumps(settings),
    }


def export_weights(model: nn.Module, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the whole weights of a sharded model: float32, under the names of its parameters.

    Every rank calls it. One tensor at a time is gathered; rank 0 keeps them in its memory and
    writes. Statistics of batch norms are among them, and tied weights are there under each name.

    Args:
        model: sharded by FSDP2, or not.
        path: of the file; one that is there stays until the new one is whole.
        metadata: text by name, as of ``describe``.

    Raises:
        OSError: on rank 0, the file cannot be written.
    """
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    # On the other ranks it is empty.
    if dist.get_rank() == 0:
        write({name: _portable(tensor) for name, tensor in whole.items()}, path, metadata)


def _portable(tensor: Tensor) -> Tensor:
    """Return a copy on the host that shares memory with no other, as safetensors wants."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    contiguous = torch.contiguous_format
    return tensor.detach().to("cpu", dtype, copy=True, memory_format=contiguous)


def write(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file that is whole or not there.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    partial = path.with_name(f".{path.name}")
    try:
        # As the umask has it: safetensors' own files are for the user alone.
        partial.touch()
        mode = partial.stat().st_mode
        save_file(dict(tensors), partial, metadata=dict(metadata))
        partial.chmod(mode)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink()
        raise OSError(f"{path} not written: {cause(error)}") from None


def read_weights(path: Path, *, average: bool = False) -> dict[str, Tensor]:
    """Return a checkpoint's weights, whole, on the host, without a process group.

    Args:
        path: of one that is intact.
        average: take the running averages; what has none is as in the model.

    Raises:
        ValueError: they cannot be read, or there are no averages.
    """
    saved = saved_tensors(path)
    wanted = {key.removeprefix("model."): key for key in saved if key.startswith("model.")}
    if average:
        averages = {name: f"average.{name}" for name in wanted if f"average.{name}" in saved}
        if not averages:
            raise ValueError(f"--average: {path} has no average: it was trained with --ema 0")
        wanted |= averages
    tensors = {
        key: torch.empty(saved[key].size, dtype=saved[key].properties.dtype)
        for key in wanted.values()
    }
    load_tensors(path, tensors)
    return {name: tensors[key] for name, key in wanted.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the weights of a checkpoint; see ``--help``."""
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__.splitlines()[0])
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="of a run, or the run's folder"
    )
    parser.add_argument("out", metavar="OUT.safetensors", type=Path, help="the file to write")
    parser.add_argument("--average", action="store_true", help="the running average of the weights")
    args = parser.parse_args(argv)
    with one_line_errors(PROGRAM):
        path = newest_intact(args.checkpoint, "CHECKPOINT")
        details = read_details(path)
        weights = {n: _portable(t) for n, t in read_weights(path, average=args.average).items()}
        write(weights, args.out, describe(details["settings"], details["step"]))


if __name__ == "__main__":
    main()
