"""docs/compatibility.md names every model that is tested, and a test for what it says."""

import ast
import re
from pathlib import Path

from tests.adapters import timm_families, transformers_families

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/compatibility.md").read_text("utf-8")


def test_every_class_that_is_tested_is_on_the_page() -> None:
    classes = {case.build.__name__ for case in timm_families.CASES}
    classes |= {family.architecture for family in transformers_families.FAMILIES}
    assert len(classes) > 20
    assert {name for name in classes if f"`{name}`" not in PAGE} == set()


def test_every_sentence_of_the_page_names_a_test_that_exists() -> None:
    named = re.findall(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\)", PAGE)
    assert len(named) > 40
    for name, path in named:
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, name
    tables = [lines for lines in PAGE.split("\n\n") if "held by" in lines]
    rows = [line for table in tables for line in table.splitlines()[2:]]
    assert len(rows) == len(named)
