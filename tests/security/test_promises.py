"""Each promise of SECURITY.md names tests that there are."""

import re

from tests.train.launch import ROOT


def test_each_test_that_a_promise_names_is_there():
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`tests/" in line]
    assert len(rows) > 15
    for row in rows:
        # "::test_b" after "tests/a.py::test_a" is of the same file.
        path = None
        for file, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", row):
            path = file or path
            if name:
                assert f"def {name}(" in (ROOT / path).read_text("utf-8"), (path, name)
            elif file:
                assert "def test_" in (ROOT / file).read_text("utf-8"), file
