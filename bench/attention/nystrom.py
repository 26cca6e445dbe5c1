"""Nyström attention: its cases, its peers and its correctness gate.

Letters: B batch, N tokens, H heads, D head dimension, m landmarks. Every peer takes q, k and v as a
projection leaves them, (B, N, 3, H, D), and returns (B, N, H, D). The peers ``sdpa`` compute exact
softmax attention of the same tensors, which is what an approximation has to beat; they are checked
against that.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import leaner_kernels
from bench.attention.cases import Case
from bench.attention.gate import checked_entries
from bench.attention.peers import eager_attention, every_backend, operator_peers
from bench.harness.gate import Problem

ITERATIONS = 6


@dataclass(frozen=True)
class NystromCase(Case):
    """Nyström attention on a batch of sequences.

    Attributes:
        name: an identifier; cases of the CPU begin with ``cpu_``.
        device: ``cuda`` or ``cpu``.
        batch: B.
        heads: H.
        tokens: N, a multiple of m.
        head_dim: D.
        landmarks: m.
        dtype: of every tensor.
    """

    name: str
    device: str
    batch: int
    heads: int
    tokens: int
    head_dim: int
    landmarks: int
    dtype: torch.dtype
    op: ClassVar[str] = "nystrom"

    @property
    def rows(self) -> int:
        """Queries of each head: N."""
        return self.tokens

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        return self.batch, self.tokens, self.heads, self.head_dim

    @property
    def compiled_for(self) -> tuple[int, int]:
        """Sizes that are constants of the kernels: batch, heads and tokens are none."""
        return self.head_dim, self.landmarks

    @property
    def meta_inputs(self) -> tuple[Tensor | None, ...]:
        """Queries, keys and values of the operator, as one projection lays them; no lengths."""
        shape = self.batch, self.tokens, 3, self.heads, self.head_dim
        packed = torch.empty(shape, dtype=self.dtype, device="meta")
        return *packed.permute(2, 0, 3, 1, 4).unbind(0), None

    @property
    def operator_params(self) -> tuple[Any, ...]:
        """What the operator takes beside tensors."""
        return self.landmarks, self.scale, ITERATIONS, False

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes of the forward and of the backward."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return 4 * size, 7 * size  # q, k, v, out; q, k, v, dout, dq, dk, dv

    @property
    def computed(self) -> tuple[int, int]:
        """Products of the forward, and of a backward that computes all but the output again.

        Long ones have N m D multiplications: two scores, and what the matrices of both multiply.
        The iterations have four of m m m each, and twice as many backward.
        """
        m, width = self.landmarks, self.head_dim
        long, square = self.tokens * m * width, m * m * width
        iterations = ITERATIONS * 4 * m**3
        forward = 4 * long + 2 * square + iterations
        # Scores and K3 V again; then each long product gives two.
        backward = (3 + 2 * 4) * long + (1 + 2 * 2) * square + 3 * iterations
        heads = self.batch * self.heads
        return 2 * heads * forward, 2 * heads * backward

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        size = f"{self.batch}·{self.heads}·{self.tokens}·{self.head_dim}"
        return {**super().facts(), "op": self.op, "size": f"{size}, {self.landmarks} landmarks"}


def composition(case: NystromCase, qkv: Tensor) -> Tensor:
    """Nyström attention as its authors' code writes it, in the dtype of its input."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    q_land, k_land = (t.unflatten(2, (case.landmarks, -1)).mean(dim=3) for t in (q, k))
    k1 = torch.softmax(case.scale * (q @ k_land.mT), dim=-1)
    k2 = torch.softmax(case.scale * (q_land @ k_land.mT), dim=-1)
    k3 = torch.softmax(case.scale * (q_land @ k.mT), dim=-1)
    one = torch.eye(case.landmarks, dtype=k2.dtype, device=k2.device)
    z = k2.mT / k2.sum(dim=-2, keepdim=True).amax(dim=-1, keepdim=True)
    for _ in range(ITERATIONS):
        a = k2 @ z
        z = 0.25 * z @ (13 * one - a @ (15 * one - a @ (7 * one - a)))
    return (k1 @ z @ (k3 @ v)).transpose(1, 2)


def _heads(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of q, k and v, (B, H, N, D), as one of what a projection gives."""
    return lambda qkv: function(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2)


def softmax_attention(case: NystromCase, qkv: Tensor) -> Tensor:
    """Exact softmax attention as a textbook writes it."""
    return _heads(partial(eager_attention, visible=None, scale=case.scale))(qkv)


def _leaner(case: NystromCase, device: torch.device) -> Callable[[Tensor], Tensor]:
    return _heads(lambda q, k, v: leaner_kernels.nystrom_attention(q, k, v, case.landmarks))


def _leaner_stats(
    case: NystromCase, device: torch.device, sample: Tensor | None
) -> Callable[[Tensor], Tensor]:
    function = partial(leaner_kernels.nystrom_attention_with_stats, sample=sample)
    return _heads(lambda q, k, v: function(q, k, v, case.landmarks).out)


def _eager(case: NystromCase, device: torch.device) -> Callable[[Tensor], Tensor]:
    return partial(composition, case)


def _sdpa(case: NystromCase, device: torch.device) -> Callable[[Tensor], Tensor]:
    return _heads(scaled_dot_product_attention)


PEERS = {"nystrom": operator_peers(_leaner, _leaner_stats, _eager, every_backend(_sdpa, "softmax"))}


class NystromProblem(Problem):
    """The tensors of a ``NystromCase`` and the truth about them.

    Layout ``softmax`` is ``packed`` for a peer that computes exact attention.
    """

    names = "out", "dqkv"
    apart = "softmax"

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        case = self.case

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=self.device, generator=generator)

        # The tokens of a segment share a part, or all landmarks would be near the mean of all.
        share = draw(case.batch, case.landmarks, 1, 3, case.heads, case.head_dim)
        segments = case.batch, case.landmarks, case.tokens // case.landmarks, 3
        qkv = share + 0.5 * draw(*segments, case.heads, case.head_dim)
        return qkv.flatten(1, 2).to(case.dtype), draw(*case.shape).to(case.dtype)

    @cached_property
    def entries(self) -> Tensor:
        """The batch entries that are checked."""
        return checked_entries(self.case, self.device)

    def _reference(self, apart: bool, *leaves: Tensor) -> Tensor:
        formula = softmax_attention if apart else composition
        return formula(self.case, *leaves)


PROBLEM = NystromProblem
_BF16 = torch.bfloat16

# The rows of the Long-Range Arena at the batches of their recipes; Retrieval has two of a kind.
CASES = (
    NystromCase("nystrom_listops", "cuda", 32, 2, 2048, 32, 64, _BF16),
    NystromCase("nystrom_listops_lean", "cuda", 32, 4, 2048, 32, 64, _BF16),
    NystromCase("nystrom_retrieval", "cuda", 64, 2, 4096, 32, 64, _BF16),
    NystromCase("nystrom_image_lean", "cuda", 256, 4, 1024, 32, 64, _BF16),
    NystromCase("nystrom_listops_m128", "cuda", 32, 2, 2048, 32, 128, _BF16),
    NystromCase("nystrom_listops_m256", "cuda", 32, 2, 2048, 32, 256, _BF16),
    NystromCase("cpu_nystrom", "cpu", 2, 2, 128, 16, 16, torch.float32),
)
