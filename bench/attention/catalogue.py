"""All cases of attention, each with its peers and its correctness gate."""

from typing import Any

import torch

from bench.attention import cases, gate, operators, peers
from bench.attention.cases import AttentionCase
from bench.harness.gate import Problem
from bench.harness.peers import Peer

ATTENTION_CASES: tuple[Any, ...] = (*cases.CASES, *operators.CASES)
# What runs a kernel of its own: Nyström attention is composed of others.
ON_GPU = {
    case.name: case
    for case in ATTENTION_CASES
    if case.device == "cuda" and getattr(case, "op", "") != "nystrom"
}


def peers_of(case: Any) -> dict[str, Peer]:
    """Return all peers that a case is put to, by name."""
    return (peers if isinstance(case, AttentionCase) else operators).peers_of(case)


def problem_of(case: Any, device: torch.device, copies: int) -> Problem:
    """Return the tensors of a case, ``copies`` sets of them, with what checks a peer on them."""
    softmax = isinstance(case, AttentionCase)
    return (gate.AttentionProblem if softmax else operators.OperatorProblem)(case, device, copies)
