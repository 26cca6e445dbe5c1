"""The weights of a run in one safetensors file, which any program reads and nothing runs.

python -m train.export RUN_OR_CHECKPOINT OUT.safetensors [--last | --average]
python -m train.export RUN OUT --format timm

``load(path)`` returns the model of such a file, or of a run, ready to be used.
"""

import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from leaner_kernels.monitor.command_line import as_path, command
from train.config.flags import Parser, one_line_errors
from train.checkpoint.checkpoints import newest_intact
from train.checkpoint.shards import (
    load_tensors,
    part_of,
    saved_tensors,
)
from train.checkpoint.weights import (
    BEST,
    Info,
    build_model,
    check_tensors,
    metadata,
    open_weights,
    write,
)

PROGRAM = "train.export"


def load(path: str | Path, *, last: bool = False) -> tuple[nn.Module, Info]:
    """Return a trained model and what it is of; nothing is unpickled or downloaded.

        model, info = load("runs/vit_digits-digits-1")

    Args:
        path: of a safetensors file that a run or this module wrote, of a checkpoint, or of a run,
            whose best weights on the held-out items are taken.
        last: of a run take the newest weights instead.

    Returns:
        The model, float32 in eval mode on the CPU, and ``Info``: family, arguments, settings, task,
        classes, image_size, channels, mean, std, tokenizer, step, scores, accuracy, loss.

    Raises:
        ValueError: no weights of a run, damaged ones, or ones without what they are of.
    """
    weights = open_weights(path, "WEIGHTS", last=last)
    info = weights.info()
    return build_model(weights, info), info


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
    tensors = {k: torch.empty(saved[k].size, dtype=saved[k].dtype) for k in wanted.values()}
    load_tensors(path, {key: part_of(tensor) for key, tensor in tensors.items()})
    return {name: tensors[key] for name, key in wanted.items()}


def add_last(parser: argparse.ArgumentParser) -> None:
    """Add the flag ``--last`` to a command that takes the best weights of a run."""
    parser.add_argument(
        "--last",
        action="store_true",
        help="of a run the newest weights, not the best ones on the held-out items",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Write the weights of a run or a checkpoint; see ``--help``."""
    parser = command(PROGRAM, __doc__, Parser)
    parser.add_argument(
        "weights",
        metavar="RUN_OR_CHECKPOINT",
        type=as_path,
        help="folder of a run: of a finished one the best weights on the held-out items are taken, "
        "of one that is not, or with --average, the newest checkpoint; or one of its checkpoints",
    )
    parser.add_argument(
        "out", metavar="OUT", type=as_path, help="the safetensors file, or with --format the folder"
    )
    add_last(parser)
    parser.add_argument("--average", action="store_true", help="the running average of the weights")
    parser.add_argument(
        "--format",
        choices=("timm", "transformers"),
        help="write a folder that this library loads by itself, and that can be uploaded",
    )
    args = parser.parse_args(argv)
    with one_line_errors(PROGRAM):
        if args.format is not None:
            if args.average:
                raise ValueError("--average is not for --format: give the file model_ema")
            from train.checkpoint import formats

            try:
                formats.write(args.format, *load(args.weights, last=args.last), args.out)
            except SafetensorError as error:
                raise ValueError(f"{args.out} not written: {error}") from None
            sys.stdout.write(f"{args.out} written, and loaded by {args.format} with equal logits\n")
            return
        flag, path = "RUN_OR_CHECKPOINT", args.weights
        finished = (path / "summary.json").exists() and (path / BEST).is_file()
        if args.average or args.last or not (finished or path.is_file()):
            path = newest_intact(path, flag)
        found = open_weights(path, flag)
        if "family" in found.about:  # a version before did not write it
            check_tensors(found, found.info())
        if args.average:
            tensors = read_weights(found.path, average=True)
        else:
            tensors = found.read(list(found.shapes))
        # Nothing measured the averages of a checkpoint.
        scores = {} if args.average else found.scores
        kept = metadata(found.settings, found.step, found.about, found.tokenizer, scores)
        write(tensors, args.out, kept)


if __name__ == "__main__":
    main()
