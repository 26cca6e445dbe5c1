"""Condition numbers as a benchmark: batches of matrices, peers and the correctness gate.

The matrices have random singular vectors and log-spaced singular values. Their exact kappa comes
from LAPACK's singular values in float64, of the very float32 matrices that the peers get.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.harness.gate import WrongError, poison
from bench.harness.peers import AbsentError, Peer
from leaner_kernels import condition_number

# Every peer must be right at MILD to get a number: float32 can be, by a direct method. At HARD,
# which attention reaches (docs/kappa.md), we must be; of the others the error is shown.
MILD, HARD = 1e3, 1e6
ALLOWED = 1e-3  # relative error of kappa
CHECKED_MATRICES = 8  # of a batch, because the truth takes long


@dataclass(frozen=True)
class MatrixCase:
    """B matrices of N x M.

    Attributes:
        name: an identifier; cases of the CPU begin with ``cpu_``.
        device: ``cuda`` or ``cpu``.
        batch: B.
        rows: N.
        cols: M.
    """

    name: str
    device: str
    batch: int
    rows: int
    cols: int

    @property
    def bytes(self) -> int:
        """Least traffic: every matrix read once."""
        return 4 * self.batch * self.rows * self.cols

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        size = {"batch": self.batch, "rows": self.rows, "cols": self.cols}
        return {"device": self.device, "dtype": "float32", **size}


# ViT-B with 16 and with 12 heads, 4 samples of more layers than it has; square; BERT; tall.
_SIZES = ((96, 197, 1024), (96, 197, 768), (32, 512, 512), (24, 128, 768), (64, 2048, 64))
MATRIX_CASES = (
    *(MatrixCase(f"kappa_{n}x{m}", "cuda", b, n, m) for b, n, m in _SIZES),
    *(MatrixCase(f"cpu_kappa_{n}x{m}", "cpu", 4, n, m) for _, n, m in _SIZES),
)


Kappa = Callable[[Tensor], Tensor]


def _ours(case: MatrixCase, device: torch.device) -> Kappa:
    return lambda a: condition_number(a).kappa


def _svdvals(case: MatrixCase, device: torch.device, dtype: torch.dtype = torch.float32) -> Kappa:
    def run(a: Tensor) -> Tensor:
        sigma = torch.linalg.svdvals(a.to(dtype))
        return sigma[..., 0] / sigma[..., -1]

    return run


def gram(a: Tensor) -> Tensor:
    """Return the float64 Gram matrix of (B, N, M) on the smaller side."""
    a = a.double()
    return a.mT @ a if a.shape[-2] > a.shape[-1] else a @ a.mT


def _of_eigenvalues(ascending: Tensor) -> Tensor:
    return (ascending[..., -1] / ascending[..., 0]).sqrt()


def _gram_eigvalsh(case: MatrixCase, device: torch.device) -> Kappa:
    return lambda a: _of_eigenvalues(torch.linalg.eigvalsh(gram(a)))


def _gram_cupy(case: MatrixCase, device: torch.device) -> Kappa:
    try:
        import cupy
    except ImportError:
        raise AbsentError("CuPy is not installed") from None

    def run(a: Tensor) -> Tensor:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream):
            eigenvalues = cupy.linalg.eigvalsh(cupy.from_dlpack(gram(a)))
            return _of_eigenvalues(torch.from_dlpack(eigenvalues))

    return run


# Functions of (B, N, M) float32 that return (B,) kappa.
MATRIX_PEERS = {
    "leaner_condition_number": Peer(
        _ours, ours=True, about="leaner_kernels.condition_number, which computes in float64"
    ),
    "svdvals": Peer(_svdvals, about="torch.linalg.svdvals in float32"),
    "cond": Peer(lambda case, device: torch.linalg.cond, about="torch.linalg.cond in float32"),
    "svdvals_float64": Peer(
        partial(_svdvals, dtype=torch.float64), about="torch.linalg.svdvals in float64"
    ),
    "gram_eigvalsh": Peer(
        _gram_eigvalsh, about="torch.linalg.eigvalsh of the Gram matrix in float64"
    ),
}
# Others than PyTorch's own choice.
ON_GPU = {
    "gram_eigvalsh_cupy": Peer(_gram_cupy, about="CuPy's eigvalsh of the Gram matrix in float64"),
}


def peers_of(case: MatrixCase) -> dict[str, Peer]:
    """Return the peers that a case is measured with, by name."""
    return MATRIX_PEERS | (ON_GPU if case.device == "cuda" else {})


def with_kappa(batch: int, rows: int, cols: int, kappa: float, device: torch.device) -> Tensor:
    """Return (B, N, M) float32 matrices with log-spaced singular values from 1 to 1 / kappa.

    The singular vectors of one are those of another, permuted: a QR of each would take long.
    """
    generator = torch.Generator(device).manual_seed(0)
    options = {"device": device, "dtype": torch.float64}
    smaller = min(rows, cols)

    def orthonormal(size: int) -> Tensor:
        drawn = torch.randn(size, smaller, generator=generator, **options)
        orders = torch.rand(batch, size, generator=generator, **options).argsort(dim=1)
        return torch.linalg.qr(drawn).Q[orders]

    sigma = torch.logspace(0, -torch.tensor(kappa).log10().item(), smaller, **options)
    return ((orthonormal(rows) * sigma) @ orthonormal(cols).mT).float()


class Matrices:
    """The matrices of a case, ``copies`` sets of them, and the truth about some of each kind."""

    def __init__(self, case: MatrixCase, device: torch.device, copies: int):
        """Draw everything from a fixed seed."""
        self.case = case
        self.device = device
        size = case.rows, case.cols
        drawn = with_kappa(case.batch, *size, MILD, device)
        # Rolled along the batch: other matrices at the same place, and memory of their own.
        self.sets = [drawn.roll(place, 0) for place in range(copies)]
        self.hard = with_kappa(min(case.batch, CHECKED_MATRICES), *size, HARD, device)
        self.truth_mild = exact_kappa(self.sets[0][:CHECKED_MATRICES])
        self.truth_hard = exact_kappa(self.hard)

    def check(self, peer: Peer, function: Kappa) -> tuple[float, float]:
        """Compare a peer with the truth.

        Returns:
            The largest relative error of kappa at MILD, and at HARD (inf where it gives no number).

        Raises:
            WrongError: the first is above ALLOWED, or for a peer of ours the second.
        """
        poison([torch.empty(self.case.batch, dtype=torch.float64, device=self.device)] * 8)
        mild = _error(function(self.sets[0])[:CHECKED_MATRICES], self.truth_mild)
        hard = _error(function(self.hard), self.truth_hard)
        for kappa, error, matters in ((MILD, mild, True), (HARD, hard, peer.ours)):
            if matters and not error <= ALLOWED:
                raise WrongError(
                    f"kappa is off by {error:.3g} at {kappa:.0e}, {ALLOWED:.0e} is allowed"
                )
        return mild, hard


def exact_kappa(a: Tensor) -> Tensor:
    """Return (B,) float64 on the CPU, from the singular values of (B, N, M)."""
    sigma = torch.linalg.svdvals(a.cpu().double())
    return sigma[..., 0] / sigma[..., -1]


def _error(kappa: Tensor, truth: Tensor) -> float:
    return (kappa.cpu().double() / truth - 1).abs().nan_to_num(nan=float("inf")).max().item()
