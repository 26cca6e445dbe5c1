"""All cases of attention, each with its peers and its correctness gate.

A module of an operator has ``CASES``, the most telling first, ``PEERS`` by operator and
``PROBLEM``, its gate. A case has what ``nystrom.NystromCase`` has: among others ``op``, the name of
the operator; ``meta_inputs`` and ``operator_params``, for which ``bench.resources`` compiles; and
``compiled_for``, by which that tells cases whose kernels differ.
"""

from typing import Any

import torch

from bench.attention import cases, gate, nystrom, peers, vision
from bench.attention.cases import AttentionCase
from bench.harness.gate import Problem
from bench.harness.peers import Peer

OPERATORS = {vision.VisionCase: vision, nystrom.NystromCase: nystrom}
OPERATOR_CASES: tuple[Any, ...] = (*vision.CASES, *nystrom.CASES)
ATTENTION_CASES: tuple[Any, ...] = (*cases.CASES, *OPERATOR_CASES)
ON_GPU = {case.name: case for case in ATTENTION_CASES if case.device == "cuda"}


def peers_of(case: Any) -> dict[str, Peer]:
    """Return all peers that a case is put to, by name."""
    if isinstance(case, AttentionCase):
        return peers.peers_of(case)
    return OPERATORS[type(case)].PEERS[case.op]


def problem_of(case: Any, device: torch.device, copies: int) -> Problem:
    """Return the tensors of a case, ``copies`` sets of them, with what checks a peer on them."""
    softmax = isinstance(case, AttentionCase)
    problem = gate.AttentionProblem if softmax else OPERATORS[type(case)].PROBLEM
    return problem(case, device, copies)
