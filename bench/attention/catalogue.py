"""All cases of attention, each with its peers and its correctness gate."""

from typing import Any

import torch

from bench.attention import cases, gate, operators, peers
from bench.attention.cases import AttentionCase
from bench.harness import machine
from bench.harness.gate import Problem
from bench.harness.peers import Peer

ATTENTION_CASES: tuple[Any, ...] = (*cases.CASES, *operators.CASES)
# The operators with kernels of their own: Nyström attention is composed of others.
ON_GPU = {
    case.name: case
    for case in ATTENTION_CASES
    if case.device == "cuda" and getattr(case, "op", "") != "nystrom"
}

# The cases that the pages show, in their order, and those of README.
LABELS = {
    "vit_base": "ViT-B, 16 heads",
    "vit_large": "ViT-L, 30 heads",
    "bert": "Crammed BERT",
    "gpt2_64": "GPT-2, 64 tokens",
    "gpt2_512": "GPT-2, 512 tokens",
    "davit_stage1": "DaViT windows",
    "tnt": "TNT, inner",
    "navit": "NaViT, varlen",
    "text": "texts, varlen",
    "xcit_m": "XCiT-M",
    "volo_d3_outlook": "VOLO-d3, outlook",
    "davit_channel3": "DaViT channels",
    "davit_window3": "DaViT windows of a map",
    "long_2048_sliding": "2,048 tokens, window of 256",
    "vit_huge": "ViT-H/14",
    "vit_384": "ViT-B at 384 px",
    "long_1024": "1,024 tokens",
    "lra_2048": "2,048 tokens",
}
HEADLINE = (
    *("vit_base", "bert", "gpt2_64", "gpt2_512", "davit_stage1", "tnt", "navit", "xcit_m"),
    *("vit_huge", "long_1024"),
)


def peers_of(case: Any) -> dict[str, Peer]:
    """Return all peers of a case, by name."""
    return (peers if isinstance(case, AttentionCase) else operators).peers_of(case)


def problem_of(case: Any, device: torch.device, copies: int) -> Problem:
    """Return ``copies`` sets of tensors of a case, with the check of a peer on them."""
    softmax = isinstance(case, AttentionCase)
    return (gate.AttentionProblem if softmax else operators.OperatorProblem)(case, device, copies)


def facts_of(
    case: Any, layout: str, direction: str, mode: str, budget_used: float, median: float
) -> dict[str, Any]:
    """Return the facts of a call in every result: the way it was timed, and its rates.

    Args:
        case: one of ``ATTENTION_CASES``, or a case with the same fields.
        layout: layout of the peer.
        direction: one of ``cases.DIRECTIONS``.
        mode: one of ``clock.MODES``.
        budget_used: the peer's largest error, as a fraction of the error allowed.
        median: seconds of a call.
    """
    num_bytes, flops = case.bytes(direction), case.flops(direction)
    return {
        "layout": layout,
        "direction": direction,
        "mode": mode,
        "budget_used": budget_used,
        "bytes": num_bytes,
        "flops": flops,
        # Relative to the rates of a copy and a matrix product on this machine.
        "copy_fraction": num_bytes / median / machine.copy_bandwidth(case.device),
        "matrix_fraction": flops / median / machine.matrix_rate(case.device, case.dtype),
    }
