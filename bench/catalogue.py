"""Every case that is measured; of attention and losses also the peers, and what checks them.

``ATTENTION_CASES``, whose rows are measured alike, holds attention of any kind, not the loss of a
large vocabulary.
"""

from typing import Any

import torch

from bench.adapters.cases import ADAPTER_CASES
from bench.attention import peers
from bench.attention.blocks import BLOCK_CASES, BLOCK_PEERS, BlockCase, BlockProblem
from bench.attention.cases import CASES, AttentionCase
from bench.attention.gate import AttentionProblem
from bench.attention.operators import MODULES, OPERATOR_CASES, OperatorCase
from bench.attention.vision_cases import VISION_CASES, VisionCase
from bench.attention.vision_gate import VisionProblem
from bench.attention.vision_peers import VISION_PEERS
from bench.cross_entropy.cases import CROSS_ENTROPY_CASES, CrossEntropyCase
from bench.cross_entropy.gate import CrossEntropyProblem
from bench.cross_entropy.peers import CROSS_ENTROPY_PEERS
from bench.harness.gate import Problem
from bench.harness.peers import Peer
from bench.harness.steps import STEP_CASES
from bench.kappa.spectra import MATRIX_CASES
from bench.networks.language_cases import LANGUAGE_CASES
from bench.networks.vision_cases import MODEL_CASES

AnyCase = AttentionCase | VisionCase | BlockCase | CrossEntropyCase | OperatorCase
ATTENTION_CASES: tuple[AnyCase, ...] = (*CASES, *VISION_CASES, *BLOCK_CASES, *OPERATOR_CASES)
# What bench/gpu.sh checks before anything is timed: a shape of each kind of attention.
ONE_OF_EACH = (
    *("vit_base", "xcit_m", "volo_d3_outlook", "davit_channel3", "davit_window3"),
    "nystrom_listops",
)
# A run on borrowed time may end anywhere, so cases with goals come first.
FIRST = (
    *("vit_base", "kappa_197x1024", "vit_base_lean_step"),
    *("xcit_m", "volo_d3_outlook", "davit_channel3", "davit_window3"),
    *("xcit_m_block", "volo_d3_outlook_block", "davit_channel3_block", "davit_window3_block"),
    *("nystrom_listops", "nystrom_listops_lean", "model_vit_base_original", "model_vit_base_lean"),
    *("language_crammed_bert_original", "language_crammed_bert_lean"),
    *("language_gpt2_tinystories_original", "language_gpt2_tinystories_lean"),
    *("cross_entropy_32k", "cross_entropy_50k", "bert", "gpt2_64", "vit_large"),
)
LAST = tuple(case.name for case in (*ADAPTER_CASES, *STEP_CASES) if case.name not in FIRST)
REGISTERED = (
    *(*MATRIX_CASES, *MODEL_CASES, *CASES, *VISION_CASES, *BLOCK_CASES, *OPERATOR_CASES),
    *(*LANGUAGE_CASES, *CROSS_ENTROPY_CASES, *ADAPTER_CASES, *STEP_CASES),
)


def _place(case: Any) -> int:
    name = case.name
    return FIRST.index(name) if name in FIRST else len(FIRST) + (name in LAST)


IN_ORDER = sorted(REGISTERED, key=_place)
# Of a CPU, what tells most without a GPU, in this order, by the name of a row: all that
# `pytest bench/` measures on a machine without one, unless rows are selected.
OVERVIEW = (
    r"cpu_kappa_197x1024-.*",
    r"cpu_model_.*-training-(leaner|timm)",
    r"cpu_adapter_.*-both-.*",
    r"cpu_(outlook|window|xca|channel|nystrom)-both-wall-(leaner|timm|eager|sdpa)",
    r"cpu_(outlook|window|xca|channel|nystrom)-both-wall-leaner_stats_sampled",
    r"cpu_language_(crammed_bert|gpt2_tinystories|nystromformer_listops)_.*-training-.*(?<!compiled)",
    r"cpu_ragged-both-wall-(leaner|sdpa|eager).*",
    r"cpu_vit-both-wall-(leaner_attention|leaner_packed|leaner_stats_sampled|sdpa|eager)",
    # Long where other processes share the cores, so that these come last.
    r"cpu_vit_step-every-10",
    r"cpu_kappa_(2048x64|512x512)-.*",
    r"cpu_cross_entropy-both-.*(?<!compiled)",
    r"cpu_vit_step-every-50",
)
PROBLEMS: dict[type, type[Problem]] = {
    AttentionCase: AttentionProblem,
    VisionCase: VisionProblem,
    BlockCase: BlockProblem,
    CrossEntropyCase: CrossEntropyProblem,
    **{type(module.CASES[0]): module.PROBLEM for module in MODULES},
}
OF_ONE_KIND: dict[type, dict[str, Peer]] = {
    BlockCase: BLOCK_PEERS,
    CrossEntropyCase: CROSS_ENTROPY_PEERS,
    **{type(module.CASES[0]): module.PEERS for module in MODULES},
}


def peers_of(case: AnyCase) -> dict[str, Peer]:
    """Return all peers that a case is put to, by name."""
    if isinstance(case, AttentionCase):
        return peers.peers_of(case)
    return VISION_PEERS[case.op] if isinstance(case, VisionCase) else OF_ONE_KIND[type(case)]


def problem_of(case: AnyCase, device: torch.device, copies: int) -> Problem:
    """Return the tensors of a case, ``copies`` sets of them, with what checks a peer on them."""
    return PROBLEMS[type(case)](case, device, copies)
