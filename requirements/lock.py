"""Write a lock file: ``PYTHON lock.py FILE REQUIREMENT...`` for the environment of that Python.

What pip would install now, each package with its version and the SHA-256 of its wheel. A lock
serves this machine's kind alone: its system, processor and Python.
"""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

HEADER = """\
# Written by `make lock`: read by pip where LOCKED=1 is given, on {machine}.
"""


def main(file: str, *requirements: str) -> None:
    """Resolve the requirements without installing them."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    resolve = ["--dry-run", "--ignore-installed", "--only-binary", ":all:", "--report", "-"]
    done = subprocess.run([*pip, *resolve, *requirements], stdout=subprocess.PIPE, check=True)
    lines = []
    for package in json.loads(done.stdout)["install"]:
        source, metadata = package["download_info"], package["metadata"]
        if "archive_info" in source:  # not this checkout
            digest = source["archive_info"]["hashes"]["sha256"]
            name = re.sub("[-_.]+", "-", metadata["name"]).lower()
            lines.append(f"{name}=={metadata['version']} --hash=sha256:{digest}\n")
    python = ".".join(platform.python_version_tuple()[:2])
    machine = f"{platform.system()} {platform.machine()}, Python {python}"
    Path(file).write_text(HEADER.format(machine=machine) + "".join(sorted(lines)), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
