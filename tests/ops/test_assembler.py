"""Which ptxas assembles, with tools that only tell their release."""

import os
from pathlib import Path

import pytest

from leaner_kernels.ops import _launch_cache

knobs = pytest.importorskip("triton.knobs")
if not hasattr(knobs.nvidia, "ptxas_blackwell"):
    pytest.skip("Triton has one ptxas", allow_module_level=True)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def of(chosen: str, other: str) -> list[str]:
        paths = []
        for name, release in (("PTXAS", chosen), ("PTXAS_BLACKWELL", other)):
            path = tmp_path / f"{name}-{chosen}-{other}"
            path.write_text(
                f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}\n"
            )
            path.chmod(0o755)
            monkeypatch.setenv(f"TRITON_{name}_PATH", str(path))
            paths.append(str(path))
        _launch_cache._other_ptxas.cache_clear()
        return paths

    yield of
    _launch_cache._other_ptxas.cache_clear()


@pytest.mark.parametrize(
    ("chosen", "other", "used"),
    [("12.8", "12.9", 1), ("12.8", "13.1", 1), ("12.9", "13.0", 0), ("13.0", "13.3", 0)],
)
def test_an_launch_cache_that_is_wrong_is_replaced_while_we_compile(tools, chosen, other, used):
    paths = tools(chosen, other)
    before = os.environ.copy()
    with _launch_cache.assembling():
        assert knobs.nvidia.ptxas.path == paths[used]
    assert knobs.nvidia.ptxas.path == paths[0]
    assert os.environ == before


def test_without_a_better_one_it_stays(tools):
    paths = tools("12.8", "12.8")
    with _launch_cache.assembling():
        assert knobs.nvidia.ptxas.path == paths[0]
