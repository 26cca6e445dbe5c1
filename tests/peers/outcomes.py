"""What comes of a case of another project's tests: equal, or refused by design, which skips it.

docs/compatibility.md has the counts: ``pytest tests/peers/FILE::TEST -rs`` ends with them.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

from leaner_kernels.ops._checks import ArgumentError

# Why a call is refused, by the text of the error. One that is refused no longer is judged as any.
REASONS = {
    r"alibi_slopes are not supported: .*": "ALiBi by its slopes: pass them in `attn_mask`",
    r"softcap needs a head dimension up to 128, got \d+": "a softcap at a head dimension above 128",
    r"query must be \(B, H, N, D\), got .* with a key \(.*\)": "axes that differ, to broadcast",
}


def settle(call: Callable[[], Any], judge: Callable[[Any], None]) -> None:
    """Make a call of ours and judge its result; skip what is refused for a known reason.

    It fails where the result is another, and where it is refused for no reason that is known or in
    more than one line.
    """
    try:
        result = call()
    except (ArgumentError, NotImplementedError, TypeError, ValueError) as error:
        known = (why for pattern, why in REASONS.items() if re.fullmatch(pattern, str(error)))
        why = next(known, None)
        if why is None:
            pytest.fail(f"refused for no reason of the table: {error!r}")
        pytest.skip(f"refused by design: {why}")
    judge(result)
