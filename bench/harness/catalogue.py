"""Every case of attention of any kind, the peers that it is put to, and what checks them.

The loss of a large vocabulary has peers and a gate too, but is no attention: ``EVERY_CASE``, whose
rows are measured alike, holds none of it.
"""

import torch

from bench.attention import peers
from bench.attention.blocks import BLOCK_CASES, BLOCK_PEERS, BlockCase, BlockProblem
from bench.attention.cases import CASES, Case
from bench.attention.nystrom import NYSTROM_CASES, NYSTROM_PEERS, NystromCase, NystromProblem
from bench.attention.peers import Peer
from bench.attention.vision_cases import VISION_CASES, VisionCase
from bench.attention.vision_gate import VisionProblem
from bench.attention.vision_peers import VISION_PEERS
from bench.cross_entropy.cases import CrossEntropyCase
from bench.cross_entropy.gate import CrossEntropyProblem
from bench.cross_entropy.peers import CROSS_ENTROPY_PEERS
from bench.harness.gate import Problem

AnyCase = Case | VisionCase | BlockCase | NystromCase | CrossEntropyCase
EVERY_CASE: tuple[AnyCase, ...] = (*CASES, *VISION_CASES, *BLOCK_CASES, *NYSTROM_CASES)
PROBLEMS: dict[type, type[Problem]] = {
    Case: Problem,
    VisionCase: VisionProblem,
    BlockCase: BlockProblem,
    NystromCase: NystromProblem,
    CrossEntropyCase: CrossEntropyProblem,
}
OF_ONE_KIND: dict[type, dict[str, Peer]] = {
    BlockCase: BLOCK_PEERS,
    NystromCase: NYSTROM_PEERS,
    CrossEntropyCase: CROSS_ENTROPY_PEERS,
}


def peers_of(case: AnyCase) -> dict[str, Peer]:
    """Return all peers that a case is put to, by name."""
    if isinstance(case, Case):
        return peers.peers_of(case)
    return VISION_PEERS[case.op] if isinstance(case, VisionCase) else OF_ONE_KIND[type(case)]


def problem_of(case: AnyCase, device: torch.device, copies: int) -> Problem:
    """Return the tensors of a case, ``copies`` sets of them, with what checks a peer on them."""
    return PROBLEMS[type(case)](case, device, copies)
