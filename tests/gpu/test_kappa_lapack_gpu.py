"""The native solver on a GPU against LAPACK, over thousands of matrices and at full size."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from leaner_kernels import condition_number
from leaner_kernels.kappa import backend
from tests.gpu.draws import randn
from tests.kappa.spectra import KINDS, matrices, spectrum

pytestmark = pytest.mark.skipif(backend() != "cuda", reason="needs the native library on a GPU")


def assert_right(a: torch.Tensor) -> None:
    found = condition_number(a.cuda())
    true = torch.linalg.cond(a.double())
    assert found.resolved.all()
    error = (found.kappa.cpu() / true - 1).abs().max().item()
    assert error < 1e-3 * max(1e-3, (true.max().item() / 1e6) ** 2)


@hypothesis.settings(deadline=None, max_examples=400, database=None)
@hypothesis.given(
    rows=st.integers(2, 40),
    cols=st.integers(2, 40),
    kind=st.sampled_from(KINDS),
    exponent=st.floats(0, 6),
    scale=st.sampled_from([1e-30, 1.0, 1e15]),
    seed=st.integers(0, 1 << 30),
)
def test_kappa_agrees_with_lapack(
    rows: int, cols: int, kind: str, exponent: float, scale: float, seed: int
) -> None:
    assert_right(
        scale * matrices(spectrum(kind, min(rows, cols), 10**exponent), rows, cols, seed, 26)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(197, 1024), (512, 512), (1024, 197)], ids=str)
def test_kappa_at_full_size(shape: tuple[int, int], kind: str) -> None:
    assert_right(matrices(spectrum(kind, min(shape), 1e6), *shape, seed=0, batch=3))


def test_it_does_not_wait_for_the_device() -> None:
    a = randn(4, 100, 120)
    condition_number(a)
    torch.cuda.set_sync_debug_mode("error")
    try:
        condition_number(a)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_it_can_be_captured_in_a_graph() -> None:
    a = randn(4, 100, 120)
    expected = condition_number(a).kappa
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = condition_number(a).kappa
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)


def test_it_compiles_without_a_break() -> None:
    a = randn(4, 60, 120)
    compiled = torch.compile(lambda x: condition_number(x).kappa.log(), fullgraph=True)
    torch.testing.assert_close(compiled(a), condition_number(a).kappa.log())
