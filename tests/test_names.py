"""Names of variables say what they hold."""

import ast
from collections import Counter

from bench.harness.machine import ROOT

VAGUE = {"each", "found", "given", "what"}
MOST = 50  # of the library, names and arguments together


def test_few_names_are_vague() -> None:
    counts: Counter[str] = Counter()
    for path in (ROOT / "leaner_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = getattr(node, "id", None) or getattr(node, "arg", None)
            counts[path.name] += isinstance(node, ast.Name | ast.arg) and name in VAGUE
    assert 0 < counts.total() <= MOST, counts.most_common(5)
