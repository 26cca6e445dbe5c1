"""Experiments that ask whether the paper's claims hold: one file each, and what they share.

A study's file states what is asked, what is expected and what decides it, and is committed before
its results. ``python -m studies.NAME`` runs it; ``docs/studies.md`` is written from the results.
"""

import leaner_kernels.removed  # noqa: F401 - names what a removed command was replaced by
