"""Which of the collected tests run."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the first case of each parametrized test, and all other tests."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    return list(first.values())


def rehearsed(items: list[pytest.Item], listed: dict[str, Any]) -> list[pytest.Item]:
    """Leave out the tests that cannot run without a GPU, and make constants of others smaller.

    Args:
        items: tests of a GPU.
        listed: tests/gpu/not_rehearsed.toml.
    """
    for item in items:
        for name, value in listed["smaller"].get(item.path.name, {}).items():
            assert hasattr(item.module, name), f"{item.path.name} has no {name}"
            setattr(item.module, name, value)
    left_out = {name for entry in listed["left_out"] for name in entry["tests"]}
    cases = {item: f"{item.path.name}::{item.name}" for item in items}
    return [i for i in items if not left_out & {cases[i], cases[i].partition("[")[0]}]


def keep(config: pytest.Config, items: list[pytest.Item], chosen: list[pytest.Item]) -> None:
    """Leave only the chosen ones of the items, and report the others as deselected."""
    kept = set(chosen)
    left_out = [item for item in items if item not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = chosen
