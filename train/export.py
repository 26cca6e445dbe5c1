"""Export the weights of a run to one safetensors file.

python -m train.export RUN_OR_CHECKPOINT OUT.safetensors [--last]

``load(path)`` returns the model of such a file, or of a run, ready to be used.
"""

import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import argparse
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from leaner_kernels.monitor.command_line import as_path, command
from train.config.flags import Parser, one_line_errors
from train.checkpoint.weights import (
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


def add_last(parser: argparse.ArgumentParser) -> None:
    """Add the flag ``--last`` to a command that takes the best weights of a run."""
    parser.add_argument(
        "--last",
        action="store_true",
        help="use the newest weights of a run, not those with the best held-out score",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Write the weights of a run or a checkpoint; see ``--help``."""
    parser = command(PROGRAM, __doc__, Parser)
    parser.add_argument(
        "weights",
        metavar="RUN_OR_CHECKPOINT",
        type=as_path,
        help="run folder, for its weights with the best held-out score, or one of its checkpoints",
    )
    parser.add_argument("out", metavar="OUT", type=as_path, help="safetensors file to write")
    add_last(parser)
    args = parser.parse_args(argv)
    with one_line_errors(PROGRAM):
        saved = open_weights(args.weights, "RUN_OR_CHECKPOINT", last=args.last)
        if "family" in saved.about:  # a version before did not write it
            check_tensors(saved, saved.info())
        kept = metadata(saved.settings, saved.step, saved.about, saved.tokenizer, saved.scores)
        write(saved.read(list(saved.shapes)), args.out, kept)


if __name__ == "__main__":
    main()
