"""Benchmark every kernel against every peer, each checked before it is timed.

This folder has the commands and the catalogue of all cases. The folders ``attention``, ``kappa``
and ``networks`` have the cases, peers and benchmarks of a subject. ``harness`` checks and times,
and imports none of them; ``gpu_model`` runs compiled kernels without a GPU.
"""

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    # For example, a pytest on PATH from outside of the environment.
    raise SystemExit(
        f"bench needs torch, which {sys.executable} lacks: run it in the environment that "
        "make demo made, after . .venv/bin/activate"
    )

import leaner_kernels.removed  # noqa: F401 - names what a removed command was replaced by
