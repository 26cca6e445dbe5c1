"""Attention by PyTorch: where the kernels do not run, and where PyTorch's are faster.

``library.toml`` holds the rules, for each GPU what was measured or predicted on it.
"""

import tomllib
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

# Bound here, so that attention may itself be put in the place of PyTorch's function.
from torch.nn.functional import scaled_dot_product_attention as _sdpa

from ..._ops import ops
from .._checks import MAX_HEAD_DIM, ArgumentError, has_values
from .._operators import TENSORS
from .._tiles import capability
from .call import LEAST_SCALE, draw_seed
from .reference import visible, without_padding

# Beside a maximum that is lower, the log of a sum is rounded away from the log-sum-exp.
LOWEST_MAXIMUM = -1e3


def library_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    key_lengths: Tensor | None,
    softcap: float = 0.0,
) -> Tensor:
    """Return (B, H, N, D): the arguments of ``attention``, lengths and causality as one mask."""

    def with_all_scores() -> Tensor:
        seed = draw_seed(dropout_p, query.device)
        return ops.attention(
            query, key, value, attn_mask, key_lengths, seed, dropout_p, is_causal, scale, softcap
        )[0]

    # A DTensor, for which PyTorch's function has no rule here, or what it does not compute at all.
    if hasattr(query, "device_mesh") or softcap:
        return with_all_scores()
    # On the CPU it hides what is not causal before it scales: -inf times such a scale is no -inf.
    if is_causal and scale is not None and scale <= 0:
        query, scale = (-query, -scale) if scale else (0 * query, 1.0)
    seen = None
    if key_lengths is not None:
        shape = query.shape[2], key.shape[2]
        seen = visible(*shape, key_lengths, is_causal, query.device)
        key, value = (without_padding(t, key_lengths) for t in (key, value))
    mask = attn_mask
    if seen is not None:
        if mask is None:
            mask = seen
        elif mask.dtype == torch.bool:
            mask = mask & seen
        else:
            mask = mask.masked_fill(~seen, float("-inf"))
    if mask is not None:
        if query.dtype == torch.float64 != mask.dtype and mask.dtype != torch.bool:
            mask = mask.double()  # PyTorch's fused function on the CPU misreads a float32 one
        mask = torch.atleast_2d(mask)
        leaves = query, key, value
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
        if query.device.type != "cuda":
            if recorded and _sinks(mask):
                return with_all_scores()
        elif mask.dtype != torch.bool:
            mask = mask.to(query.dtype)  # cuDNN misreads a float32 one beside half precision
    # A comparison of sizes that is traced is no bool, which is all that PyTorch's function takes.
    causal = True if is_causal and seen is None else False  # noqa: SIM210
    return _sdpa(query, key, value, mask, dropout_p, causal, scale=scale, enable_gqa=enable_gqa)


def _sinks(mask: Tensor) -> bool:
    """Whether a row of an additive mask may be all large negative numbers, finite ones among them.

    PyTorch's backward on the CPU computes P from the log-sum-exp, which in such a row has lost the
    log of how many keys share it: its gradient of the values is as many times too large.
    """
    if mask.dtype == torch.bool:
        return False
    if not has_values(mask):
        return True
    largest = mask.detach().amax(dim=-1)
    return bool(((largest < LOWEST_MAXIMUM) & (largest > float("-inf"))).any())


def wide_attention(query: Tensor, *others: Any) -> Tensor:
    """Return ``library_attention`` of heads that the kernels do not take, and warn once.

    Raises:
        ValueError: a softcap, which PyTorch's function does not have, or a DTensor on a GPU.
    """
    check_wide(query, others[-1])
    if not torch.compiler.is_compiling():
        _warn_of_width(query.shape[-1])
    if transformed(query):
        # PyTorch's fused kernels have neither forward mode nor second derivatives.
        with sdpa_kernel(SDPBackend.MATH):
            return library_attention(query, *others)
    return library_attention(query, *others)


def check_wide(query: Tensor, softcap: float) -> None:
    """Raise ValueError for what ``wide_attention`` does not take."""
    what = "softcap" if softcap else None
    if hasattr(query, "device_mesh") and query.device.type == "cuda":
        what = "a DTensor on cuda"
    if what is not None:
        raise ArgumentError(
            f"{what} needs a head dimension up to {MAX_HEAD_DIM}, got {query.shape[-1]}"
        )


@cache
def _warn_of_width(head_dim: int) -> None:
    warnings.warn(
        f"head dimension {head_dim} is above {MAX_HEAD_DIM}: attention is PyTorch's "
        "scaled_dot_product_attention, and gives no statistics",
        stacklevel=5,  # past the functions between here and who called attention
    )


class Rule(NamedTuple):
    """The lengths at which PyTorch's attention is faster, and what says so.

    Attributes:
        first: the fewest tokens; of a varlen batch, the mean over its sequences.
        last: the most, None without end.
        source: a file under bench/results, or a sentence that begins with "predicted" or "assumed".
    """

    first: int
    last: int | None
    source: str


# (varlen, causal, with a backward) -> head dimensions, ascending, each with its rules.
_Rules = dict[tuple[bool, bool, bool], list[tuple[int, list[Rule]]]]


def read_rules(text: str) -> tuple[dict[int, _Rules], _Rules]:
    """Return what ``library.toml`` holds: by capability, and for every other GPU."""
    by_capability: dict[int, _Rules] = {}
    others: _Rules = {}
    for gpus in tomllib.loads(text)["gpus"]:
        rules: _Rules = {}
        for row in gpus["rules"]:
            lengths = [Rule(first, last or None, gpus["source"]) for first, last in row["tokens"]]
            key = row["varlen"], row["causal"], row["backward"]
            rules.setdefault(key, []).append((row["head_dim"], lengths))
        by_capability |= dict.fromkeys(gpus["capabilities"], rules)
        others = others if gpus["capabilities"] else rules
    return by_capability, others


# Read now, not at a first call that torch.compile may be tracing.
RULES = read_rules((resources.files(str(__package__)) / "library.toml").read_text("utf-8"))


def find_rule(
    gpu: int, varlen: bool, causal: bool, backward: bool, head_dim: int, tokens: float
) -> Rule | None:
    """Return the rule that sends a call to PyTorch, None where a kernel of ours is faster.

    Args:
        gpu: its capability, as ``capability`` returns it.
        varlen: whether sequences lie end to end.
        causal: whether rows see no later columns.
        backward: whether a backward will follow.
        head_dim: up to 128; of those that have rules, the next that is no smaller counts.
        tokens: of a sequence, or their mean.
    """
    by_capability, others = RULES
    rules = by_capability.get(gpu, others)
    for dim, lengths in rules.get((varlen, causal, backward), ()):
        if head_dim <= dim:
            for rule in lengths:
                if rule.first <= tokens and (rule.last is None or tokens <= rule.last):
                    return rule
            return None
    return None


def faster_library(
    tensors: Sequence[Tensor],
    rows: int,
    cols: int,
    is_causal: bool,
    scale: float | None,
    *others: Tensor | float | None,
    backward: bool | None = None,
) -> Rule | None:
    """Return the rule that sends a call on a GPU to PyTorch, None where a kernel of ours runs it.

    PyTorch gets self-attention in half precision with a head dimension that is a multiple of 8 and
    a positive scale, since it finds the maximum of a row before it scales it. Its gradients are
    sums in no fixed order, so deterministic algorithms rule it out.

    Args:
        tensors: query, key and value, or the projection that holds them.
        rows: of the queries.
        cols: of the keys.
        is_causal: whether rows see no later columns.
        scale: multiplies the scores.
        others: the mask, the lengths, dropout and the softcap: a call with one of them stays.
        backward: whether one will follow; by default, whether autograd records the call.
    """
    if rows != cols or any(isinstance(other, Tensor) or bool(other) for other in others):
        return None
    first = tensors[0]
    if 0 in first.shape or not _suits(first, scale):
        return None
    if backward is None:
        backward = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    key = capability(first.device), False, bool(is_causal), backward
    return find_rule(*key, first.shape[-1], rows)


def faster_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    backward: bool | None = None,
) -> Rule | None:
    """Return the rule that sends a varlen batch of self-attention to PyTorch, as above.

    PyTorch's has no rule for DTensors, and takes no tensors without memory.
    """
    sequences = starts.shape[0] - 1
    if torch.compiler.is_compiling() or dropout_p or sequences < 1:
        return None
    plain = TENSORS.issuperset(map(type, (query, key, value, starts)))
    if not plain or not torch.backends.cuda.flash_sdp_enabled():
        return None
    if query.shape != key.shape or 0 in query.shape or not _suits(query, scale):
        return None
    gpu = capability(query.device)
    if gpu < 80:  # PyTorch's needs more
        return None
    if backward is None:
        backward = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    size = query.shape[-1], query.shape[0] / sequences
    return find_rule(gpu, True, bool(is_causal), backward, *size)


def _suits(query: Tensor, scale: float | None) -> bool:
    if query.dtype == torch.float32 or query.shape[-1] % 8:
        return False
    if scale is not None and scale < LEAST_SCALE:
        return False
    return not torch.are_deterministic_algorithms_enabled() and not transformed(query)


def long_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return (B, H, N, D) of PyTorch's function, with the backend that it chooses."""
    return _sdpa(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    max_seqlen: int,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Return (T, H, D) of PyTorch's varlen attention, zero outside every sequence.

    So are the gradients. PyTorch leaves what no sequence owns as its memory was, and follows
    ``starts`` wherever they lead: here they are brought into order inside the tensors.
    """
    starts = starts.clamp(0, query.shape[0]).cummax(dim=0).values
    query, key, value = _ZeroGradientsOutside.apply(starts, query, key, value)
    window = (-1, 0) if is_causal else (-1, -1)
    ends = starts, starts, max_seqlen, max_seqlen
    out = _varlen_attn()(query, key, value, *ends, scale=scale, window_size=window).contiguous()
    _fill_with_zeros(starts, out)
    return out


@cache
def _varlen_attn() -> Any:
    # Imported at the first call: it imports Triton, by way of FLOP counters.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


class _ZeroGradientsOutside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, starts: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(starts)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (starts,) = ctx.saved_tensors
        whole = [None if grad is None else grad.contiguous() for grad in grads]
        for grad in whole:
            if grad is not None:
                _fill_with_zeros(starts, grad)
        return None, *whole


def _fill_with_zeros(starts: Tensor, t: Tensor) -> None:
    # By a kernel: autograd has saved the output, and would refuse one that PyTorch writes to.
    from .kernels.scores import launch_fill

    launch_fill(starts, t)


def transformed(query: Tensor) -> bool:
    """Whether torch.func or forward mode is at work: libraries have no second derivatives."""
    if torch.compiler.is_compiling():
        return False
    if not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0:
        return False
    return query.device.type in ("cpu", "cuda")
