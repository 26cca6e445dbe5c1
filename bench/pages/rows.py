"""Measured rows as every page of results reads, groups and replaces them."""

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self

# Of two rows that agree in these, as far as they have them, the newest counts.
IDENTITY = "machine", "case", "direction", "mode", "stage", "every", "peer"


@dataclass(frozen=True)
class MeasuredRow:
    """An entry of a result file: a subclass's fields have the names that they have there.

    Times are in seconds. What is missing from an entry has the default of its field.
    """

    machine: str
    case: str

    @classmethod
    def read(cls, entry: dict[str, Any], facts: dict[str, Any], machine: str) -> Self:
        """Return the row of an entry, and of the facts of its case."""
        values = facts | entry["stats"] | entry["extra_info"] | {"machine": machine}
        values |= cls.derived(values)
        needed = [f.name for f in fields(cls) if f.name in values or f.default is MISSING]
        return cls(**{name: values[name] for name in needed})

    @staticmethod
    def derived(values: dict[str, Any]) -> dict[str, Any]:
        """Return fields that are not in an entry as they are."""
        return {}

    @property
    def identity(self) -> tuple[Any, ...]:
        """What it is a measurement of."""
        return tuple(getattr(self, name, None) for name in IDENTITY)


def by(rows: Iterable[Any], *attributes: str) -> dict[Any, list[Any]]:
    """Group rows by the values of attributes, of one attribute by its value."""
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        values = tuple(getattr(row, attribute) for attribute in attributes)
        groups.setdefault(values if len(values) > 1 else values[0], []).append(row)
    return groups


def of_kind(rows: Iterable[Any], kind: type) -> list[Any]:
    """Return the rows of a class."""
    return [row for row in rows if isinstance(row, kind)]


def fastest(rows: Iterable[Any]) -> Any:
    """Return the row with the least median, or None of no rows."""
    return min(rows, key=lambda row: row.median, default=None)
