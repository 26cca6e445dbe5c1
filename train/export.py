"""Load the model of a run. A run exports its model to the file ``model_best.safetensors``."""

import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

from pathlib import Path

from torch import nn

from leaner_kernels.removed import stop_command
from train.checkpoint.weights import Info, build_model, open_weights


def load(path: str | Path, *, last: bool = False) -> tuple[nn.Module, Info]:
    """Return a trained model and its description; nothing is unpickled or downloaded.

        model, info = load("runs/vit_digits-digits-1")

    Args:
        path: path of a safetensors file that a run wrote, of a checkpoint, or of a run, whose best
            weights on the held-out items are taken.
        last: for a run, take the newest weights instead.

    Returns:
        The model, in float32 and eval mode on the CPU, and its ``Info``. That class, in
        ``train.checkpoint.weights``, documents its fields.

    Raises:
        ValueError: if the path has no weights of a run, or they are damaged or lack their
            description.
    """
    weights = open_weights(path, "WEIGHTS", last=last)
    info = weights.info()
    return build_model(weights, info), info


if __name__ == "__main__":
    stop_command("train.export")
