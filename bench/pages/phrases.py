"""How every page of results writes a number, and what a run was made with."""

from pathlib import Path
from typing import Any, Protocol


class Run(Protocol):
    """A file of results, whatever it holds."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def date(self) -> str:
        """When it was written, as ISO 8601 has it."""
        ...

    @property
    def machine_info(self) -> dict[str, Any]:
        """As ``machine.facts`` returns it."""
        ...

    @property
    def commit(self) -> dict[str, Any]:
        """As ``machine.commit`` returns it."""
        ...


def number(value: float) -> str:
    """Format a positive number with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def provenance(run: Run) -> str:
    """Describe one run in one line."""
    commit, info = run.commit, run.machine_info
    code = (commit["id"] or "no commit")[:12] + (" with changes" if commit["dirty"] else "")
    versions = (f"{name} {version}" for name, version in info["versions"].items() if version)
    hardware = [f"{info['cpu']['cores']} CPU cores, {info['cpu']['torch_threads']} torch threads"]
    if info["gpu"]:
        gpu = info["gpu"]
        hardware += [f"{gpu['count']} GPU", f"{gpu['memory_bytes'] / 2**30:.0f} GiB"]
        hardware += [f"power limit {gpu['power_limit_watts']} W"]
        hardware += [f"{name} clock {mhz} MHz" for name, mhz in gpu["clocks_mhz"].items()]
    facts = ", ".join([*hardware, *versions])
    return f"- {run.path.name}: {run.date[:10]}, {code}, source {commit['source']}; {facts}."
