"""Peers of softmax attention, as data: a name, and a builder of the callable."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import leaner_kernels
from bench.attention.cases import AttentionCase
from bench.harness.peers import AbsentError, Peer, compiled, found
from leaner_kernels.ops.attention import op

# By peer: the backend, and its name in the legend.
BACKENDS = {
    "sdpa_flash": (SDPBackend.FLASH_ATTENTION, "FlashAttention"),
    "sdpa_cudnn": (SDPBackend.CUDNN_ATTENTION, "cuDNN"),
    "sdpa_efficient": (SDPBackend.EFFICIENT_ATTENTION, "memory-efficient"),
    "sdpa_math": (SDPBackend.MATH, "unfused math"),
}
# By peer: the module, and its name in the legend.
FLASH_ATTN = {
    "flash_attn_2": ("flash_attn", "FlashAttention 2"),
    "flash_attn_3": ("flash_attn_interface", "FlashAttention 3"),
    "flash_attn_4": ("flash_attn.cute", "FlashAttention 4"),
}
# By peer: the entries of the batch that are captured, and what the legend says of them.
SAMPLES = {
    "leaner_stats": (None, "with statistics of every head"),
    "leaner_stats_sampled": ((0, 1, 2, 3), "with statistics, and four samples captured"),
    "leaner_stats_unsampled": ((-1, -1, -1, -1), "with statistics, in a step without a capture"),
}


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float
) -> Tensor:
    """Softmax attention as a textbook writes it, (B, H, N, D), in the dtype of its inputs."""
    scores = scale * (q @ k.mT)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def _eager(case: AttentionCase, device: torch.device) -> Callable[..., Tensor]:
    return partial(eager_attention, visible=case.visible(device), scale=case.scale)


def _sdpa(case: AttentionCase, device: torch.device) -> Callable[..., Tensor]:
    # Use a mask only if needed: without one, most backends are faster, and some only then exist.
    hidden = case.ragged or case.window > 0
    mask = case.visible(device) if hidden else None
    causal = case.causal and not hidden
    return partial(scaled_dot_product_attention, attn_mask=mask, is_causal=causal)


def _sdpa_of_ours(case: AttentionCase, device: torch.device) -> Callable[..., Tensor]:
    if device.type != "cuda":
        raise AbsentError("our kernels serve PyTorch's function on CUDA only")
    return _sdpa(case, device)


def _sdpa_packed(case: AttentionCase, device: torch.device) -> Callable[..., Tensor]:
    _self_attention(case)
    attend = _sdpa(case, device)

    def run(qkv: Tensor) -> Tensor:
        # The split of a projection with the cheapest backward: one copy stacks the gradients.
        return attend(*(t.transpose(1, 2) for t in qkv.unbind(2))).transpose(1, 2)

    return run


def every_sample(with_stats: Callable[..., Callable[..., Any]], layout: str) -> dict[str, Peer]:
    """Return our peers that also give statistics: plain, of a sampled step, and of an unsampled.

    Args:
        with_stats: (case, device, ``sample`` as the public function takes it) -> function of the
            leaves of ``layout`` that returns the output.
        layout: layout of ``Peer``.
    """

    def build(sample: tuple[int, ...] | None, case: Any, device: torch.device) -> Any:
        if sample is None:
            return with_stats(case, device, None)
        chosen = torch.tensor(sample[: case.batch], dtype=torch.int32, device=device)
        return with_stats(case, device, chosen)

    return {
        name: Peer(
            partial(build, sample), layout, ours=True, about=f"This project's kernel {samples}"
        )
        for name, (sample, samples) in SAMPLES.items()
    }


def _half_on_cuda(case: AttentionCase, device: torch.device) -> None:
    if device.type != "cuda":
        raise AbsentError("runs on CUDA only")
    if case.dtype == torch.float32:
        raise AbsentError("takes float16 and bfloat16, not float32")


def _self_attention(case: AttentionCase) -> None:
    if case.crossed:
        raise AbsentError("takes one projection, so as many queries as keys")


def _flash_attn(module: str, case: AttentionCase, device: torch.device) -> Callable[..., Tensor]:
    _half_on_cuda(case, device)
    options: dict[str, Any] = {"causal": case.causal, "window_size": case.window_size}
    if case.ragged:
        for side in "qk":
            options[f"cu_seqlens_{side}"] = case.offsets(device)
            options[f"max_seqlen_{side}"] = case.tokens
    function = found(module, "flash_attn_varlen_func" if case.ragged else "flash_attn_func")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out  # versions 3 and 4 return (out, lse)

    return run


def _torch_varlen(case: AttentionCase, device: torch.device) -> Callable[..., Tensor]:
    _half_on_cuda(case, device)
    function = found("torch.nn.attention.varlen", "varlen_attn")
    limits = case.offsets(device, queries=True), case.offsets(device), case.rows, case.tokens
    window = case.window_size if case.window or not case.causal else (-1, 0)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Sequences of one length, (B, N, H, D), are put end to end; this copies nothing.
        packed = q.ndim == 3
        q_rows, k_rows, v_rows = (t if packed else t.flatten(0, 1) for t in (q, k, v))
        return function(q_rows, k_rows, v_rows, *limits, window_size=window).view_as(q)

    return run


def flex_mask(case: AttentionCase, device: torch.device) -> Callable[..., Tensor] | None:
    """Return the ``mask_mod`` of a case, None where all scores count; documents lie end to end."""
    conditions = []
    if case.causal:
        conditions.append(lambda batch, head, row, col: row >= col)
    if case.window:
        conditions.append(lambda batch, head, row, col: row - col <= case.window)
    if case.ragged:
        lengths = case.key_lengths(device)
        document = torch.arange(case.batch, device=device).repeat_interleave(lengths)
        conditions.append(lambda batch, head, row, col: document[row] == document[col])
    return and_masks(*conditions) if conditions else None


def flex(
    case: AttentionCase, device: torch.device, function: Callable[..., Any]
) -> Callable[..., Tensor]:
    """Return a case by ``function``, which is ``flex_attention``, compiled or not."""
    visible, block_mask = flex_mask(case, device), None
    if visible is not None:
        rows, keys = (case.query_rows, case.key_rows) if case.ragged else (case.rows, case.tokens)
        block_mask = create_block_mask(visible, None, None, rows, keys, device=device)
    if not case.ragged:
        return partial(function, block_mask=block_mask)

    def run(*leaves: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in leaves)
        return function(q, k, v, block_mask=block_mask)[0].transpose(0, 1)

    return run


def _flex_compiled(case: AttentionCase, device: torch.device) -> Callable[..., Tensor]:
    return flex(case, device, compiled(flex_attention, device))


def _xformers(case: AttentionCase, device: torch.device) -> Callable[..., Tensor]:
    if device.type != "cuda":
        raise AbsentError("runs on CUDA only")
    function = found("xformers.ops", "memory_efficient_attention")
    masks = partial(found, "xformers.ops.fmha.attn_bias")
    mask = None
    if case.ragged:
        mask = masks("BlockDiagonalMask").from_seqlens(list(case.lengths))
        mask = mask.make_causal() if case.causal else mask
    elif case.window:
        mask = masks("LocalAttentionFromBottomRightMask")(case.window, 0)
    elif case.causal:
        mask = masks("LowerTriangularMask")()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.ragged:
            return function(q[None], k[None], v[None], attn_bias=mask)[0]
        return function(q, k, v, attn_bias=mask)

    return run


def _apex(case: AttentionCase, device: torch.device) -> Callable[..., Tensor]:
    _half_on_cuda(case, device)
    _self_attention(case)
    fits = case.dtype == torch.float16 and case.head_dim == 64 and case.tokens <= 512
    if not fits or case.causal:
        raise AbsentError("takes float16, heads of 64, at most 512 tokens, and no causal mask")
    function = found("apex.contrib.fmha.fmha", "FMHAFun").apply
    offsets, longest = case.offsets(device), -(-case.tokens // 128) * 128

    def run(qkv: Tensor) -> Tensor:
        out = function(qkv.flatten(0, 1), offsets, 0.0, longest, True, False)
        return out.view(*qkv.shape[:2], *qkv.shape[3:])

    return run


def _flash_attn_packed(case: AttentionCase, device: torch.device) -> Callable[..., Tensor]:
    _half_on_cuda(case, device)
    _self_attention(case)
    options = {"causal": case.causal, "window_size": case.window_size}
    return partial(found("flash_attn", "flash_attn_qkvpacked_func"), **options)


def _leaner_kernel(case: AttentionCase, device: torch.device) -> Callable[..., Tensor]:
    lengths = case.key_lengths(device)
    tensors = dict.fromkeys(op.Dense.tensors)
    call = op.Dense.Arguments(
        **tensors,
        dropout_p=0.0,
        is_causal=case.causal,
        scale=case.scale,
        **dict(zip(("window_left", "window_right"), case.window_size, strict=True)),
    )
    numbers = tuple(getattr(call, name) for name in op.Dense.numbers)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, *_ = torch.ops.leaner_kernels.attention(q, k, v, None, lengths, None, *numbers)
        return out

    return run


def _leaner(
    name: str, case: AttentionCase, device: torch.device, sample: Tensor | None = None
) -> Callable[..., Tensor]:
    """Return a public function; ``sample`` is of those with statistics."""
    function, options = getattr(leaner_kernels, name), {"is_causal": case.causal}
    if "varlen" in name:
        ends = case.offsets(device), case.tokens
    else:
        ends = ()
        options |= {"key_lengths": case.key_lengths(device), "window_size": case.window_size}
    if "packed" in name:
        _self_attention(case)
    if sample is not None:
        options["sample"] = sample
    if name.endswith("_with_stats"):
        return lambda q, k, v: function(q, k, v, *ends, **options).out
    if ends:
        return lambda q, k, v: function(q, k, v, *ends, **options)
    return partial(function, **options)


# PyTorch's attention with each backend by name, besides the one that it chooses.
FORCED = {
    name: Peer(
        _sdpa,
        context=partial(sdpa_kernel, backend),
        about=f"PyTorch's scaled_dot_product_attention, its {words} backend",
    )
    for name, (backend, words) in BACKENDS.items()
}
DENSE = {
    "leaner_attention": Peer(
        partial(_leaner, "attention"),
        ours=True,
        about="leaner_kernels.attention, which may dispatch to PyTorch's",
    ),
    "leaner_kernel": Peer(
        _leaner_kernel, ours=True, about="This project's kernel, never dispatched to a library"
    ),
    "leaner_sdpa": Peer(
        _sdpa_of_ours,
        ours=True,
        context=leaner_kernels.use_sdpa,
        about="PyTorch's scaled_dot_product_attention inside leaner_kernels.use_sdpa",
    ),
    "leaner_packed": Peer(
        partial(_leaner, "attention_qkvpacked"),
        "packed",
        ours=True,
        about="leaner_kernels.attention_qkvpacked on one fused projection",
    ),
    **every_sample(partial(_leaner, "attention_with_stats"), "heads"),
    "sdpa": Peer(_sdpa, about="PyTorch's scaled_dot_product_attention with its default backend"),
    **FORCED,
    # From the projection that leaner_packed starts from, and with one gradient, as it returns.
    "sdpa_packed": Peer(
        _sdpa_packed,
        "packed",
        about="PyTorch's scaled_dot_product_attention on one fused projection",
    ),
    "eager": Peer(_eager, about="The textbook formula in separate PyTorch operators"),
    **{
        name: Peer(partial(_flash_attn, module), "tokens", about=f"{words}, flash_attn_func")
        for name, (module, words) in FLASH_ATTN.items()
    },
    "flash_attn_2_packed": Peer(
        _flash_attn_packed, "packed", about="FlashAttention 2 on one fused projection"
    ),
    "torch_varlen_equal": Peer(
        _torch_varlen,
        "tokens",
        about="PyTorch's varlen_attn (FlashAttention 2) on sequences of one length",
    ),
    "flex_attention": Peer(
        _flex_compiled, about="PyTorch's flex_attention with a block mask, compiled"
    ),
    "xformers": Peer(_xformers, "tokens", about="xformers' memory_efficient_attention"),
    "apex_fmha": Peer(_apex, "packed", about="Apex's fused attention for BERT (in old releases)"),
}
# Of different lengths: packed end to end, or padded to the longest beforehand.
RAGGED = {
    "leaner_varlen": Peer(
        partial(_leaner, "attention_varlen"),
        "varlen",
        ours=True,
        about="leaner_kernels.attention_varlen on sequences packed end to end",
    ),
    "leaner_varlen_stats": Peer(
        partial(_leaner, "attention_varlen_with_stats"),
        "varlen",
        ours=True,
        about="The same kernel with statistics of every head",
    ),
    "leaner_padded": Peer(
        partial(_leaner, "attention"),
        ours=True,
        about="leaner_kernels.attention on padded sequences, with key_lengths",
    ),
    "sdpa_padded": Peer(
        _sdpa, about="PyTorch's scaled_dot_product_attention on padded sequences, with a mask"
    ),
    **{
        f"{name}_padded": replace(peer, about=f"{peer.about}, on padded sequences")
        for name, peer in FORCED.items()
        if name in ("sdpa_cudnn", "sdpa_efficient")  # which take a mask
    },
    "torch_varlen": Peer(
        _torch_varlen,
        "varlen",
        about="PyTorch's varlen_attn (FlashAttention 2) on sequences packed end to end",
    ),
    "flex_attention_varlen": Peer(
        _flex_compiled,
        "varlen",
        about="PyTorch's flex_attention on sequences packed end to end, compiled",
    ),
    "xformers_varlen": Peer(
        _xformers,
        "varlen",
        about="xformers' memory_efficient_attention on sequences packed end to end",
    ),
    "eager_padded": Peer(_eager, about="The textbook formula on padded sequences, with a mask"),
    **{
        f"{name}_varlen": Peer(
            partial(_flash_attn, module),
            "varlen",
            about=f"{words} on sequences packed end to end",
        )
        for name, (module, words) in FLASH_ATTN.items()
    },
}
# All of them, by name.
PEERS = DENSE | {name: replace(peer, ragged=True) for name, peer in RAGGED.items()}


def peers_of(case: AttentionCase) -> dict[str, Peer]:
    """Return all peers that a case is put to, by name."""
    return {name: peer for name, peer in PEERS.items() if peer.ragged == case.ragged}
