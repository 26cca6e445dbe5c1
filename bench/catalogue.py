"""List all cases in the order in which they are measured."""

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
