"""Experiments that ask whether the paper's claims hold: one file each, and what they share.

The file of a study states its question, its expectations and its decision rule, and is committed
before its results. ``python -m studies.NAME`` runs it; ``docs/studies.md`` is written from the
results.
"""

import importlib.util

_NEEDED = "numpy", "scipy", "tabulate", "torch"  # of the dependency group, and the library's own
if _missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
    raise SystemExit(
        f"studies need {', '.join(_missing)}: in the checkout, pip install -e . --group studies"
    )

import leaner_kernels.removed  # noqa: E402, F401 - what a removed command was replaced by
