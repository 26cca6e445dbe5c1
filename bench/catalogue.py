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
# Of a CPU, what tells most without a GPU, in this order, by the name of a row: all that
# `pytest bench/` measures on a machine without one, unless rows are selected.
OVERVIEW = (
    r"cpu_kappa_197x1024-.*",
    r"cpu_model_.*-training-(leaner|timm)",
    r"cpu_(outlook|window|xca|channel|nystrom)-both-wall-(leaner|timm|eager|sdpa)",
    r"cpu_(outlook|window|xca|channel|nystrom)-both-wall-leaner_stats_sampled",
    r"cpu_language_.*-training-.*(?<!compiled)",
    r"cpu_ragged-both-wall-(leaner|sdpa|eager).*",
    r"cpu_vit-both-wall-(leaner_attention|leaner_packed|leaner_stats_sampled|sdpa|eager)",
    # Long where other processes share the cores, so that these come last.
    r"cpu_vit_step-every-10",
    r"cpu_kappa_(2048x64|512x512)-.*",
    r"cpu_vit_step-every-50",
)
