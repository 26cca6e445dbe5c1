"""Everything that computes attention, as data: a name, and what builds the callable for a case.

A builder raises ``AbsentError`` with the reason when its library is missing or does not take the
case. Each peer gets its inputs in the layout it asks for, so that none pays for another's.
"""

import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import leaner_kernels
from bench.cases import Case

# What a library raises for a case that it does not take.
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError)


class AbsentError(Exception):
    """A peer that cannot be measured here, and why."""


@dataclass(frozen=True)
class Peer:
    """One way to compute attention.

    Attributes:
        build: (case, device) -> function of the leaves of ``layout`` that returns the output.
        layout: ``heads`` q, k, v (B, H, N, D); ``tokens`` q, k, v (B, N, H, D); ``packed`` one
            qkv (B, N, 3, H, D). The output is (B, H, N, D) for ``heads``, else (B, N, H, D).
        ours: whether it is a kernel of this project.
        context: entered around every call, and not timed.
    """

    build: Callable[[Case, torch.device], Callable[..., Tensor]]
    layout: str = "heads"
    ours: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float
) -> Tensor:
    """Softmax attention as a textbook writes it, (B, H, N, D), in the dtype of its inputs."""
    scores = scale * (q @ k.mT)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def _eager(case: Case, device: torch.device) -> Callable[..., Tensor]:
    return partial(eager_attention, visible=case.visible(device), scale=case.scale)


def _sdpa(case: Case, device: torch.device) -> Callable[..., Tensor]:
    # A mask only where it is needed: most backends are faster, or exist at all, without.
    mask = case.visible(device) if case.padded else None
    causal = case.causal and not case.padded
    return partial(scaled_dot_product_attention, attn_mask=mask, is_causal=causal)


def _forced(backend: SDPBackend) -> Peer:
    return Peer(_sdpa, context=partial(sdpa_kernel, backend))


def flex_mask(case: Case, device: torch.device) -> BlockMask | None:
    """Return the case's visible scores as FlexAttention wants them: computed, not looked up."""
    if not case.causal and not case.padded:
        return None
    lengths = case.key_lengths(device)

    def seen(b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        inside = col >= 0 if lengths is None else col < lengths[b]
        return inside & (row >= col) if case.causal else inside

    batch = None if lengths is None else case.batch
    return create_block_mask(seen, batch, None, case.tokens, case.tokens, device=device)


def _flex(case: Case, device: torch.device) -> Callable[..., Tensor]:
    if device.type != "cuda":
        raise AbsentError("has no backward outside CUDA")
    # A timed backward runs many times over one forward, which donated buffers forbid.
    functorch_config.donated_buffer = False
    torch._dynamo.config.recompile_limit = 64  # one program for each shape, on purpose
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=flex_mask(case, device))


def _import(module: str, name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(importlib.import_module(module), name)
    except (ImportError, OSError) as error:
        raise AbsentError(f"{module} cannot be imported: {error}") from None
    except AttributeError:
        raise AbsentError(f"{module} has no {name}") from None


def _half_on_cuda(case: Case, device: torch.device) -> None:
    if device.type != "cuda":
        raise AbsentError("runs on CUDA only")
    if case.padded:
        raise AbsentError("takes padded sequences only after they are repacked")
    if case.dtype == torch.float32:
        raise AbsentError("takes float16 and bfloat16, not float32")


def _flash_attn(module: str, case: Case, device: torch.device) -> Callable[..., Tensor]:
    _half_on_cuda(case, device)
    function = _import(module, "flash_attn_func")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, causal=case.causal)
        return out[0] if isinstance(out, tuple) else out  # versions 3 and 4 return (out, lse)

    return run


def _flash_attn_packed(case: Case, device: torch.device) -> Callable[..., Tensor]:
    _half_on_cuda(case, device)
    return partial(_import("flash_attn", "flash_attn_qkvpacked_func"), causal=case.causal)


def _apex_fmha(case: Case, device: torch.device) -> Callable[..., Tensor]:
    _half_on_cuda(case, device)
    if case.causal or case.head_dim != 64 or case.dtype != torch.float16:
        raise AbsentError("takes float16 and head_dim 64 only, and no causal mask")
    fmha = _import("apex.contrib.fmha.fmha", "FMHAFun")
    ends = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.tokens

    def run(qkv: Tensor) -> Tensor:
        out = fmha.apply(qkv.flatten(0, 1), ends, 0.0, case.tokens, True, False)
        return out.view(case.batch, case.tokens, case.heads, case.head_dim)

    return run


def _xformers(case: Case, device: torch.device) -> Callable[..., Tensor]:
    _half_on_cuda(case, device)
    attend = _import("xformers.ops", "memory_efficient_attention")
    bias = _import("xformers.ops", "LowerTriangularMask")() if case.causal else None
    return partial(attend, attn_bias=bias)


def _leaner_attention(case: Case, device: torch.device) -> Callable[..., Tensor]:
    lengths = case.key_lengths(device)
    return partial(leaner_kernels.attention, is_causal=case.causal, key_lengths=lengths)


def _leaner_packed(case: Case, device: torch.device) -> Callable[..., Tensor]:
    lengths = case.key_lengths(device)
    return partial(leaner_kernels.attention_packed, is_causal=case.causal, key_lengths=lengths)


def _leaner_stats(sampled: int, case: Case, device: torch.device) -> Callable[..., Tensor]:
    lengths = case.key_lengths(device)
    sample = torch.arange(min(sampled, case.batch), dtype=torch.int32, device=device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return leaner_kernels.attention_with_stats(
            q, k, v, is_causal=case.causal, key_lengths=lengths, sample=sample if sampled else None
        ).out

    return run


PEERS = {
    "leaner_attention": Peer(_leaner_attention, ours=True),
    "leaner_packed": Peer(_leaner_packed, layout="packed", ours=True),
    "leaner_stats": Peer(partial(_leaner_stats, 0), ours=True),
    "leaner_stats_sampled": Peer(partial(_leaner_stats, 4), ours=True),
    "sdpa": Peer(_sdpa),
    "sdpa_flash": _forced(SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": _forced(SDPBackend.CUDNN_ATTENTION),
    "sdpa_efficient": _forced(SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_math": _forced(SDPBackend.MATH),
    "eager": Peer(_eager),
    "flex": Peer(_flex),
    "flash_attn_2": Peer(partial(_flash_attn, "flash_attn"), layout="tokens"),
    "flash_attn_2_packed": Peer(_flash_attn_packed, layout="packed"),
    "flash_attn_3": Peer(partial(_flash_attn, "flash_attn_interface"), layout="tokens"),
    "flash_attn_4": Peer(partial(_flash_attn, "flash_attn.cute"), layout="tokens"),
    "apex_fmha": Peer(_apex_fmha, layout="packed"),
    "xformers": Peer(_xformers, layout="tokens"),
}
