"""Look up the packages of lock files among known vulnerabilities: ``PYTHON audit.py LOCK...``.

Exits 0 where none is known, 1 where one is. A service that cannot be reached, or that has none
of the packages because it is a mirror without that part, is reported and is no failure.
"""

import json
import re
import subprocess
import sys

AUDIT = ["--require-hashes", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
UNREACHABLE = re.compile(r"ConnectionError|could not connect|timed? ?out", re.IGNORECASE)


def main(*locks: str) -> str | None:
    """Return what is wrong, one line for each vulnerability, or nothing."""
    found, unknown, known = [], set(), set()
    for lock in locks:  # each for itself: a package may be in several, in several versions
        done = subprocess.run(
            [sys.executable, "-m", "pip_audit", *AUDIT, "--requirement", lock],
            capture_output=True,
            text=True,
        )
        try:
            packages = json.loads(done.stdout)["dependencies"]
        except json.JSONDecodeError:
            if not UNREACHABLE.search(done.stderr):
                return f"audit: pip-audit failed: {done.stderr.strip()}"
            print("audit: not done, the service of known vulnerabilities cannot be reached")
            return "\n".join(found) or None
        for package in packages:
            (unknown if "skip_reason" in package else known).add(package["name"])
            found += [
                f"audit: {lock}: {package['name']} {package['version']}: {vulnerability['id']}, "
                f"mended in {', '.join(vulnerability['fix_versions']) or 'no version yet'}"
                for vulnerability in package.get("vulns", [])
            ]
    if not known:
        print(f"audit: not done, the service has none of {len(unknown)} packages: a mirror?")
    elif unknown:
        print(f"audit: the service does not have {', '.join(sorted(unknown))}")
    if known and not found:
        print(f"audit: {len(known)} packages, no known vulnerability")
    return "\n".join(found) or None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
