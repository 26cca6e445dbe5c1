"""Name the rows of whole models: which library's model, and how it is compiled.

A row's name is a model's name, and a suffix where torch.compile compiles the model.
"""

# By model: one sentence for a legend.
MODELS = {
    "leaner": "This project's model",
    "timm": "timm's model",
    "timm_leaner": "timm's model after leaner_kernels.adapters.timm.use",
    "transformers": "transformers' model, with logits of every token",
    "transformers_masked": "transformers' model, with logits of the masked tokens alone",
}
# By suffix: what a table calls the mode, and torch.compile's name of it.
MODES: dict[str, tuple[str, str | None]] = {
    "_compiled": ("compiled", None),
    "_compiled_autotune": ("compiled, max-autotune", "max-autotune-no-cudagraphs"),
    "_compiled_graphs": ("compiled, CUDA graphs", "reduce-overhead"),
}
GRAPHS = "reduce-overhead"


def split(name: str) -> tuple[str, str]:
    """Return the model of a row's name, and the suffix; no suffix where it is eager."""
    model, compiled, rest = name.partition("_compiled")
    return model, compiled + rest


def whose(name: str) -> str:
    """Return the model of a row's name, compiled or not."""
    return split(name)[0]


def mode_of(name: str) -> str:
    """Return how a table calls the mode of a row's name: ``eager``, or a name of ``MODES``.

    Inference is the exception: there ``_compiled`` alone replays CUDA graphs.
    """
    suffix = split(name)[1]
    return MODES[suffix][0] if suffix else "eager"
