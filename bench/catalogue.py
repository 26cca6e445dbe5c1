"""Every case that is measured; of attention and losses also the peers, and what checks them.

``ATTENTION_CASES``, whose rows are measured alike, holds attention of any kind, not the loss of a
large vocabulary.
"""

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
FIRST_OPERATORS, OTHER_OPERATORS = (
    tuple(case for module in MODULES for case in module.CASES[part])
    for part in (slice(2), slice(2, None))
)
# What bench/gpu.sh checks before anything is timed: a shape of each kind of attention.
ONE_OF_EACH = (CASES[0], *VISION_CASES[:4], *(module.CASES[0] for module in MODULES))
# As they are run: a run on borrowed time may end anywhere, so the cases with goals come first.
IN_ORDER = (
    *(CASES[0], MATRIX_CASES[0], *STEP_CASES[:1], *VISION_CASES[:4], *BLOCK_CASES[:4]),
    # Of the language rows, those that have a goal: Crammed BERT and GPT-2.
    *(*FIRST_OPERATORS, *MODEL_CASES[:2], *LANGUAGE_CASES[:4], *CROSS_ENTROPY_CASES),
    # Libraries take seconds for some batches of matrices.
    *(*CASES[1:4], *MATRIX_CASES[1:]),
    *(*MODEL_CASES[2:], *CASES[4:], *VISION_CASES[4:], *BLOCK_CASES[4:]),
    *(*OTHER_OPERATORS, *LANGUAGE_CASES[4:], *ADAPTER_CASES, *STEP_CASES[1:]),
)
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
