"""Many-head attention kernels and the condition number they make visible."""

from functools import partial
from typing import TYPE_CHECKING

from . import removed
from .activation_checkpointing import checkpoint_policy
from .adapters.sdpa import register as _register_sdpa
from .adapters.sdpa import use_sdpa
from .alarms import EntropyAlarm, KappaAlarm
from .conditioning import ConditioningPenalty, QKClip, conditioning_penalty
from .kappa import (
    condition_number,
    condition_report,
    gaussian_condition_number,
    head_report,
    singular_values,
)
from .monitor import KappaMonitor, measure
from .ops.attention import (
    AttentionStats,
    attention,
    attention_qkvpacked,
    attention_qkvpacked_with_stats,
    attention_varlen,
    attention_varlen_with_stats,
    attention_with_stats,
    explain,
)
from .ops.covariance import (
    channel_attention,
    channel_attention_with_stats,
    cross_covariance_attention,
    cross_covariance_attention_with_stats,
)
from .ops.nystrom import nystrom_attention, nystrom_attention_with_stats
from .ops.outlook import outlook_attention, outlook_attention_with_stats
from .ops.window import window_attention, window_attention_with_stats

__version__ = "0.3.0"

__all__ = [
    "AttentionStats",
    "ConditioningPenalty",
    "EntropyAlarm",
    "KappaAlarm",
    "KappaMonitor",
    "QKClip",
    "attention",
    "attention_qkvpacked",
    "attention_qkvpacked_with_stats",
    "attention_varlen",
    "attention_varlen_with_stats",
    "attention_with_stats",
    "channel_attention",
    "channel_attention_with_stats",
    "checkpoint_policy",
    "condition_number",
    "condition_report",
    "conditioning_penalty",
    "cross_covariance_attention",
    "cross_covariance_attention_with_stats",
    "explain",
    "gaussian_condition_number",
    "head_report",
    "measure",
    "nystrom_attention",
    "nystrom_attention_with_stats",
    "outlook_attention",
    "outlook_attention_with_stats",
    "singular_values",
    "use_sdpa",
    "window_attention",
    "window_attention_with_stats",
]

_register_sdpa()

if not TYPE_CHECKING:  # where it would hide misspelt names
    __getattr__ = partial(removed.attribute, __name__)
