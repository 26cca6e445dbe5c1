"""The hook that intercepts calls of attention outside the modules of ``leaner_kernels.nn``.

``KappaMonitor`` sets ``current``, whose ``attend`` is that of ``monitor.trace.CallTrace``, for the
steps that it samples, and only then: in any other step a call costs one comparison with None.
"""

from typing import Any

current: Any = None
