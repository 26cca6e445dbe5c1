"""Whose code runs: one line where a checkout is at hand and the library of another one is used."""

import os
import sys
from multiprocessing import parent_process


def report_another_checkout(name: str, file: str) -> None:
    """Write a line where a script's checkout, or that of the current folder, has a library unused.

    An editable install of one checkout is found before the files of another, and nothing else
    would tell.

    Args:
        name: of the library's package.
        file: its ``__init__.py``.
    """
    if os.environ.get("RANK", "0") != "0" or parent_process() is not None:
        return
    script = os.path.dirname(os.path.dirname(os.path.abspath(sys.argv[0] if sys.argv else "")))
    for checkout in dict.fromkeys((script, os.path.abspath(os.curdir))):
        other = os.path.join(checkout, name, "__init__.py")
        beside = os.path.join(checkout, "pyproject.toml")
        if os.path.isfile(other) and os.path.isfile(beside) and not os.path.samefile(other, file):
            sys.stderr.write(
                f"{name}: the code of {os.path.dirname(os.path.dirname(file))} runs, not that of "
                f"{checkout}: pip install -e {checkout} changes that\n"
            )
