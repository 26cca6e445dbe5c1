"""List all cases in the order in which they are measured, and describe them."""

from typing import Any

from bench.attention.catalogue import ATTENTION_CASES
from bench.kappa.spectra import MATRIX_CASES
from bench.networks.cases import PAPER_CASES, STEP_CASES

# What bench/gpu.sh checks before anything is timed: a shape of each kind of attention.
ONE_OF_EACH = (
    *("vit_base", "xcit_m", "volo_d3_outlook", "davit_channel3", "davit_window3"),
    "nystrom_listops",
)
# A run on borrowed time may end anywhere, so cases with goals come first.
FIRST = (
    *("vit_base", "kappa_197x1024", "vit_base_lean_step"),
    *("xcit_m", "volo_d3_outlook", "davit_channel3", "davit_window3"),
    *("nystrom_listops", "nystrom_listops_lean", "model_vit_base_original", "model_vit_base_lean"),
    *("language_crammed_bert_original", "language_crammed_bert_lean"),
    *("language_gpt2_tinystories_original", "language_gpt2_tinystories_lean"),
    *("bert", "gpt2_64", "vit_large"),
)
REGISTERED = (*MATRIX_CASES, *PAPER_CASES, *ATTENTION_CASES, *STEP_CASES)
IN_ORDER = sorted(
    REGISTERED,
    key=lambda case: FIRST.index(case.name) if case.name in FIRST else len(FIRST),
)
# The expression that selects what tells most without a GPU: what `pytest bench/` measures there,
# unless it is given another.
OVERVIEW = (
    "(cpu_kappa_197x1024 or cpu_vit_step-every-10 or cpu_language"
    " or (cpu_model and training and not timm_leaner)"
    " or (both-wall and (cpu_xca or cpu_channel or cpu_window or cpu_outlook or cpu_nystrom)"
    " and not stats)"
    " or (both-wall and (cpu_vit or cpu_ragged) and (leaner or sdpa or eager)))"
    " and not compiled and not unsampled"
)
# What everybody has without us, the first of these that was measured.
DEFAULTS = (
    *("timm", "timm_compiled", "torch_varlen", "sdpa", "sdpa_packed", "sdpa_padded", "svdvals"),
    *("transformers", "transformers_compiled"),
)
# Beside what a case's size says.
NO_SIZE = "device", "op", "row", "variant", "same", "padded", "pairs"


def size(facts: dict[str, Any]) -> str:
    """Return the size of a case: B·H·N·D of attention, otherwise whatever it is described by.

    N is 1×197 where one query meets 197 keys, and 49…256 where sequences differ in length.
    """
    if "head_dim" in facts and "lengths" in facts:
        tokens = str(facts["tokens"])
        if facts["lengths"]:
            tokens = f"{min(facts['lengths'])}…{tokens}"
        elif facts["rows"] != facts["tokens"]:
            tokens = f"{facts['rows']}×{tokens}"
        heads = f"{facts['batch']}·{facts['heads']}·{tokens}·{facts['head_dim']}"
        window = f", window {facts['window']}" if facts.get("window") else ""
        return f"{heads} {facts['dtype']}" + " causal" * facts["causal"] + window
    if "size" in facts:
        return f"{facts['size']}, {facts['dtype']}"
    parts = {name: value for name, value in facts.items() if name not in (*NO_SIZE, "dtype")}
    words = (f"{name} {value}".replace("_", " ") for name, value in parts.items())
    return ", ".join([*words, facts["dtype"]])
