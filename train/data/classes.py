"""Compare the classes of data, weights and runs by name, not by number.

Names compare in Unicode's composed form (NFC): a Mac may write "é" as two characters.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence

_SHOWN = 5  # names of a list that a message shows


def composed(name: str) -> str:
    """Return a name of a class in the form in which names compare."""
    return unicodedata.normalize("NFC", name)


def class_numbers(names: Sequence[str], known: Sequence[str]) -> list[int]:
    """Return the number that each class has among the known ones.

    Args:
        names: names of classes, in any order: all of the known ones or some.
        known: names of classes by their numbers.

    Returns:
        For class i of ``names``, its place in ``known``.

    Raises:
        ValueError: a name is not known, or one list has a name twice. The message is a clause that
            shows the names, such as "unknown classes ant, bee; known are cat, dog".
    """
    names, known = [*map(composed, names)], [*map(composed, known)]
    for listed in (names, known):
        if len(set(listed)) < len(listed):
            name = Counter(listed).most_common(1)[0][0]
            raise ValueError(f"two classes have the name {name}")
    numbers = {name: number for number, name in enumerate(known)}
    if unknown := [name for name in names if name not in numbers]:
        raise ValueError(f"unknown classes {shown(unknown)}; known are {shown(known)}")
    return [numbers[name] for name in names]


def same_classes(names: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether two lists have the same classes, in any order."""
    return sorted(map(composed, names)) == sorted(map(composed, others))


def shown(names: Sequence[str]) -> str:
    """Return names for a message: the first of many."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
