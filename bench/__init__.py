"""Benchmarks: every kernel against every peer, checked before it is timed.

Commands lie here, and the catalogue of all cases; a subject's cases, peers and benchmarks in its
folder: ``attention``, ``kappa``, ``networks``. ``harness``, which imports none of them, checks and
times; ``gpu_model`` runs compiled kernels without a GPU.
"""

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    # Such as a pytest on PATH that is not the environment's own.
    raise SystemExit(
        f"bench needs torch, which {sys.executable} lacks: run it in the environment that "
        "make demo made, after . .venv/bin/activate"
    )

import leaner_kernels.removed  # noqa: F401 - names what a removed command was replaced by
