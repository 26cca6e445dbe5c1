"""Name the rows of whole models: which library's model, and how it is compiled.

A row's name is a model's name, and a suffix where torch.compile compiles the model. This module
imports no library.
"""

from typing import NamedTuple

# By model: one sentence for a legend.
MODELS = {
    "leaner": "This project's model",
    "timm": "timm's model",
    "timm_leaner": "timm's model after leaner_kernels.adapters.timm.use",
    "transformers": "transformers' model with logits of every token",
    "transformers_masked": "transformers' BERT with logits of only the masked tokens, as in ours",
}
GRAPHS = "reduce-overhead"


class Mode(NamedTuple):
    """A way to compile.

    Attributes:
        words: for a table.
        option: the ``mode`` of torch.compile.
    """

    words: str
    option: str | None


# By suffix, for training.
MODES = {
    "_compiled": Mode("compiled", None),
    "_compiled_autotune": Mode("compiled, max-autotune", "max-autotune-no-cudagraphs"),
    "_compiled_graphs": Mode("compiled, CUDA graphs", GRAPHS),
}
# For inference, where every compiled model replays CUDA graphs.
INFERENCE_MODES = {"_compiled": Mode("compiled", GRAPHS)}


def model_and_suffix(name: str) -> tuple[str, str]:
    """Return a row's model and its suffix, which is empty where the model is eager."""
    model, compiled, rest = name.partition("_compiled")
    return model, compiled + rest


def whose(name: str) -> str:
    """Return a row's model."""
    return model_and_suffix(name)[0]


def mode_of(name: str) -> str:
    """Return a row's mode in words: ``eager``, or those of a mode of ``MODES``."""
    suffix = model_and_suffix(name)[1]
    return MODES[suffix].words if suffix else "eager"


def modes_of(stage: str) -> dict[str, Mode]:
    """Return the ways to compile a model for a stage, by suffix."""
    return MODES if stage == "training" else INFERENCE_MODES


def replays_graphs(name: str, stage: str) -> bool:
    """Return whether a row replays CUDA graphs, whose memory PyTorch's counters do not show."""
    mode = modes_of(stage).get(model_and_suffix(name)[1])
    return mode is not None and mode.option == GRAPHS
