"""Which of the collected tests run."""

from collections.abc import Iterable

import pytest


def first_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the first case of each parametrized test, and all other tests."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    return list(first.values())


def keep(config: pytest.Config, items: list[pytest.Item], chosen: list[pytest.Item]) -> None:
    """Leave only the chosen ones of the items, and report the others as deselected."""
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen
