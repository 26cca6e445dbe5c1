"""Batches of matrices with a known kappa, their peers, and the gate that peers pass."""

import sys

import pytest
import torch

from bench.harness.gate import WrongError
from bench.harness.peers import AbsentError, Peer
from bench.kappa import spectra
from bench.kappa.spectra import MATRIX_PEERS, MatrixCase

CPU = torch.device("cpu")
SMALL = MatrixCase("cpu_kappa_small", "cpu", 3, 12, 20)


@pytest.fixture(scope="module")
def matrices():
    return spectra.Matrices(SMALL, CPU, copies=2)


@pytest.mark.parametrize("size", [(12, 20), (20, 12), (12, 12)])
def test_drawn_matrices_have_the_singular_values_asked_for(size):
    a = spectra.with_kappa(3, *size, 1e3, CPU)
    assert (a.dtype, a.shape) == (torch.float32, (3, *size))
    sigma = torch.linalg.svdvals(a.double())
    asked = torch.logspace(0, -3, 12, dtype=torch.float64)
    torch.testing.assert_close(sigma, asked.expand(3, -1), rtol=1e-4, atol=0)
    assert not torch.allclose(a[0], a[1])


@pytest.mark.parametrize("name", spectra.peers_of(SMALL))
def test_every_peer_of_the_cpu_passes_where_it_should(matrices, name):
    peer = MATRIX_PEERS[name]
    mild, hard = matrices.check(peer, peer.build(SMALL, CPU))
    assert mild <= 1e-3
    # A direct method in float32 is right to 1e-3 at MILD and is not at HARD.
    assert (hard <= 1e-3) == (name not in ("svdvals", "cond"))


def test_a_wrong_peer_is_refused(matrices):
    off = Peer(lambda case, device: lambda a: 1.002 * spectra.exact_kappa(a))
    with pytest.raises(WrongError, match=r"kappa is off by 0.002 at 1e\+03, 1e-03 is allowed"):
        matrices.check(off, off.build(SMALL, CPU))
    nothing = Peer(lambda case, device: lambda a: torch.full((len(a),), torch.nan))
    with pytest.raises(WrongError, match="off by inf"):
        matrices.check(nothing, nothing.build(SMALL, CPU))


def test_ours_must_be_right_at_a_large_kappa_too(matrices):
    def build(case, device):
        return lambda a: (1 + 0.01 * (a is matrices.hard)) * spectra.exact_kappa(a)

    assert matrices.check(Peer(build), build(SMALL, CPU))[1] == pytest.approx(0.01)
    with pytest.raises(WrongError, match=r"off by 0.01 at 1e\+06"):
        matrices.check(Peer(build, ours=True), build(SMALL, CPU))


def test_an_absent_library_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(AbsentError, match="CuPy is not installed"):
        spectra.ON_GPU["gram_eigvalsh_cupy"].build(SMALL, CPU)
