"""Every case of attention of any kind, the peers that it is put to, and what checks them."""

import torch

from bench import peers
from bench.blocks import BLOCK_CASES, BLOCK_PEERS, BlockCase, BlockProblem
from bench.cases import CASES, Case
from bench.gate import Problem
from bench.peers import Peer
from bench.vision_cases import VISION_CASES, VisionCase
from bench.vision_gate import VisionProblem
from bench.vision_peers import VISION_PEERS

AnyCase = Case | VisionCase | BlockCase
EVERY_CASE: tuple[AnyCase, ...] = (*CASES, *VISION_CASES, *BLOCK_CASES)


def peers_of(case: AnyCase) -> dict[str, Peer]:
    """Return all peers that a case is put to, by name."""
    if isinstance(case, Case):
        return peers.peers_of(case)
    return BLOCK_PEERS if isinstance(case, BlockCase) else VISION_PEERS[case.op]


def problem_of(case: AnyCase, device: torch.device, copies: int) -> Problem:
    """Return the tensors of a case, ``copies`` sets of them, with what checks a peer on them."""
    kinds = {Case: Problem, VisionCase: VisionProblem, BlockCase: BlockProblem}
    return kinds[type(case)](case, device, copies)
