"""Attention by libraries: where the kernels do not run, and where libraries are faster."""

import importlib.util
import tomllib
from importlib import resources
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

# Bound here, so that attention may itself be put in the place of PyTorch's function.
from torch.nn.functional import scaled_dot_product_attention as _sdpa

from ..._ops import ops
from .._checks import has_values
from .._tiles import capability
from .call import LEAST_SCALE, draw_seed
from .reference import visible

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
# What takes a call that the wanted backend refuses; none of them stores the scores.
OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
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
        if torch.is_grad_enabled() and any(t.requires_grad for t in leaves) and _sinks(mask):
            return with_all_scores()
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


def long_attention(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return (B, H, N, D) from the library that ``faster_backend`` named."""
    if backend == "flash_attn":
        import flash_attn  # pyright: ignore[reportMissingImports]

        tokens = (t.transpose(1, 2) for t in (query, key, value))
        out = flash_attn.flash_attn_func(*tokens, softmax_scale=scale, causal=is_causal)
        return out.transpose(1, 2)
    with sdpa_kernel([BACKENDS[backend], *OTHERS], set_priority=True):
        return _sdpa(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def transformed(query: Tensor) -> bool:
    """Whether torch.func or forward mode is at work: libraries have no second derivatives."""
    if torch.compiler.is_compiling():
        return False
    if not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0:
        return False
    return query.device.type in ("cpu", "cuda")


def faster_backend(
    query: Tensor,
    rows: int,
    cols: int,
    is_causal: bool,
    scale: float | None,
    *others: Tensor | float | None,
) -> str | None:
    """Return the library that a call on a GPU goes to, None where a kernel of ours is faster.

    ``others`` are the mask, the lengths, dropout and the softcap: libraries get calls
    without, of self-attention in half precision with a head dimension that is a multiple of 8 and
    a positive scale, since they find the maximum of a row before they scale it. Their gradients
    are sums in no fixed order, so deterministic algorithms rule them out.
    """
    if rows < LEAST_TOKENS or rows != cols or _present(others):
        return None
    if (scale is not None and scale < LEAST_SCALE) or transformed(query) or 0 in query.shape:
        return None
    dim = query.shape[-1]
    if query.dtype == torch.float32 or dim % 8 or torch.are_deterministic_algorithms_enabled():
        return None
    gpu = capability(query.device)
    fitting = [
        rule
        for rule in RULES
        if (rule["capability"], rule["head_dim"], rule["causal"]) == (gpu, dim, is_causal)
        and rule["min_tokens"] <= rows
    ]
    return max(fitting, key=lambda rule: rule["min_tokens"])["backend"] if fitting else None


def _present(others: tuple[Tensor | float | None, ...]) -> bool:
    return any(isinstance(other, Tensor) or bool(other) for other in others)


def read_rules(text: str) -> list[dict[str, Any]]:
    """Return the rules in ``library.toml`` whose library can be imported."""
    has_flash_attn = importlib.util.find_spec("flash_attn") is not None
    return [
        rule
        for rule in tomllib.loads(text).get("rule", [])
        if rule["backend"] in BACKENDS or (rule["backend"] == "flash_attn" and has_flash_attn)
    ]


# Read now, not at a first call that torch.compile may be tracing.
RULES = read_rules((resources.files(str(__package__)) / "library.toml").read_text("utf-8"))
LEAST_TOKENS = min((rule["min_tokens"] for rule in RULES), default=2**31)
