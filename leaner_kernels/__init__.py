"""Many-head attention kernels and the condition number they make visible."""

from leaner_kernels.conditioning import (
    ConditioningPenalty,
    EntropyAlarm,
    QKClip,
    conditioning_penalty,
)
from leaner_kernels.kappa import (
    condition_number,
    condition_report,
    gaussian_condition_number,
    head_report,
    singular_values,
)
from leaner_kernels.monitor import KappaMonitor
from leaner_kernels.ops.attention import (
    AttentionStats,
    attention,
    attention_packed,
    attention_packed_with_stats,
    attention_varlen,
    attention_varlen_with_stats,
    attention_with_stats,
)

__version__ = "0.1.0"

__all__ = [
    "AttentionStats",
    "ConditioningPenalty",
    "EntropyAlarm",
    "KappaMonitor",
    "QKClip",
    "attention",
    "attention_packed",
    "attention_packed_with_stats",
    "attention_varlen",
    "attention_varlen_with_stats",
    "attention_with_stats",
    "condition_number",
    "condition_report",
    "conditioning_penalty",
    "gaussian_condition_number",
    "head_report",
    "singular_values",
]
