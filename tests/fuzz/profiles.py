"""How long to fuzz: a few cases that are always the same, or new ones for hours.

``pytest tests/fuzz`` takes the short profile, and so do the runs of all tests. The long one is
chosen by ``HYPOTHESIS_PROFILE=long`` or ``--hypothesis-profile=long``; it keeps what failed in
``.hypothesis`` and tries that first the next time.
"""

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings

QUIET = list(HealthCheck)
# Shrinking a failure takes longer than all cases together; the long profile does it.
SHORT = settings(
    derandomize=True,
    max_examples=12,
    database=None,
    deadline=None,
    suppress_health_check=QUIET,
    phases=[Phase.explicit, Phase.generate],
    print_blob=False,
)
LONG = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "5000")),
    deadline=None,
    suppress_health_check=QUIET,
)

settings.register_profile("short", SHORT)
settings.register_profile("long", LONG)


def fuzzed(share: float = 1.0) -> Callable[..., Any]:
    """Return the settings of the profile in force, for a share of its examples (at least 3)."""
    asked = os.environ.get("HYPOTHESIS_PROFILE") == "long"
    # By name alone, for the plugin loads a profile before this module has registered any.
    chosen = LONG if asked or settings.default is settings.get_profile("long") else SHORT
    return settings(chosen, max_examples=max(3, round(share * chosen.max_examples)))
