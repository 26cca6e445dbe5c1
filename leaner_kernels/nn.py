"""Modules around the operators: the projections before and after, and the capture for kappa."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from leaner_kernels.ops.attention import (
    AttentionStats,
    attention,
    attention_packed,
    attention_packed_with_stats,
    attention_with_stats,
)


class Captured(NamedTuple):
    """What one forward of ``ManyHeadAttention`` kept of S sampled batch entries; no gradients.

    Attributes:
        heads: (S, N, H * D), float32: the heads side by side before the output projection.
        output: (S, N, dim), float32: what the module returned.
        stream: (S, N, dim), float32: the residual stream it is added to; None when not given.
        lengths: (S,) int32: tokens that are not padding; None without ``key_lengths``.
        max_logit: (H,), float32: maximum over the batch, and over the forwards since ``captured``
            was last None.
        entropy: (B, H), as in ``AttentionStats``, of the whole batch.
        prob_norm: (B, H), as ``entropy``.
        head_norm: (B, H), as ``entropy``.
        dtype: of the output before it became float32.
    """

    heads: Tensor
    output: Tensor
    stream: Tensor | None
    lengths: Tensor | None
    max_logit: Tensor
    entropy: Tensor
    prob_norm: Tensor
    head_norm: Tensor
    dtype: torch.dtype


class ManyHeadAttention(nn.Module):
    """Self-attention whose width, heads * head_dim, need not be the width of its input.

    Args:
        dim: width of the input and output.
        num_heads: number of heads, at least 1.
        head_dim: width of each head, 1 to 128; "split" divides ``dim`` among the heads,
            ``dim // num_heads`` (rounded down, so the attention width may fall short of ``dim``).
        qkv_bias: add a bias to the projection of queries, keys and values.
        proj_bias: add a bias to the output projection.
        attn_drop: dropout of the attention probabilities while training, in [0, 1).
        proj_drop: dropout after the output projection while training.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        capture_samples: batch entries whose heads the next forward captures; 0 captures nothing.
            ``KappaMonitor`` sets it.
        captured: ``Captured`` of the newest forward that captured, or None; overwritten, so that
            recomputing activations counts nothing twice.
        track_logits: whether every forward, capturing or not, keeps ``peak_logit``; it then takes
            the path that computes statistics. False at first.
        peak_logit: (H,) float32, the maximum of ``AttentionStats.max_logit`` over the batch and
            over all tracked forwards since it was last set to None; so recomputing activations
            changes nothing and accumulated micro-batches all count.

    Raises:
        ValueError: a count or width outside the list above.

    Parameters are named as in timm's Attention (qkv, proj), so its state dicts load unchanged.
    Source: arXiv:1706.03762; heads * head_dim != dim after arXiv:2505.20802.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        head_dim: int | Literal["split"] = 64,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, count in (("dim", dim), ("num_heads", num_heads)):
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}")
        if isinstance(head_dim, str):
            if head_dim != "split":
                raise ValueError(f'head_dim must be a width or "split", got {head_dim!r}')
            head_dim = dim // num_heads
        if not 0 <= attn_drop < 1:
            raise ValueError(f"attn_drop must be in [0, 1), got {attn_drop}")
        if not isinstance(head_dim, int) or not 1 <= head_dim <= 128:
            raise ValueError(
                f"head_dim must be in [1, 128], got {head_dim} (dim {dim}, num_heads {num_heads})"
            )
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim
        self.attn_drop = attn_drop
        width = num_heads * head_dim
        self.qkv = nn.Linear(dim, 3 * width, bias=qkv_bias, device=device, dtype=dtype)
        self.proj = nn.Linear(width, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)
        self.capture_samples = 0
        self.captured: Captured | None = None
        self.track_logits = False
        self.peak_logit: Tensor | None = None

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        key_lengths: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> Tensor:
        """Attend and project.

        Args:
            x: (B, N, dim), floating point.
            attn_mask: as in ``attention``, broadcastable to (B, H, N, N).
            is_causal: row i sees columns 0 to i.
            key_lengths: (B,) int32, each in [1, N].
            skip: (B, N, dim), the residual stream that the caller adds the result to: read for
                ``captured``, never added here.

        Returns:
            (B, N, dim), in the dtype of the projection.

        Raises:
            ValueError: what ``attention`` refuses, or a ``skip`` of another shape than ``x``.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (B, N, {self.dim}), got {tuple(x.shape)}")
        if skip is not None and skip.shape != x.shape:
            raise ValueError(f"skip must be as x, {tuple(x.shape)}, got {tuple(skip.shape)}")
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, self.head_dim)
        dropout_p = self.attn_drop if self.training else 0.0
        sample = stats = None
        if self.capture_samples > 0:
            sample = evenly_spaced(batch, self.capture_samples, x.device)
        knobs = {"key_lengths": key_lengths, "dropout_p": dropout_p, "is_causal": is_causal}
        measured = sample is not None or self.track_logits
        # A mask has no packed path: its gradients of q, k and v are joined by autograd, in copies.
        if attn_mask is None and measured:
            stats = attention_packed_with_stats(qkv, sample=sample, **knobs)
            a = stats.out
        elif attn_mask is None:
            a = attention_packed(qkv, **knobs)
        else:
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            if measured:
                stats = attention_with_stats(q, k, v, attn_mask, sample=sample, **knobs)
            out = attention(q, k, v, attn_mask, **knobs) if stats is None else stats.out
            a = out.transpose(1, 2)
        output = self.proj_drop(self.proj(a.reshape(batch, tokens, -1)))
        if stats is not None:
            self._keep(stats, sample, output, skip, key_lengths)
        return output

    @torch.no_grad()
    def _keep(
        self,
        stats: AttentionStats,
        sample: Tensor | None,
        output: Tensor,
        skip: Tensor | None,
        key_lengths: Tensor | None,
    ) -> None:
        peak = stats.max_logit.amax(dim=0)
        if self.track_logits:
            self.peak_logit = peak if self.peak_logit is None else peak.maximum(self.peak_logit)
        if sample is None:
            return
        assert stats.heads is not None
        self.captured = Captured(
            heads=stats.heads,
            output=output.index_select(0, sample).float(),
            stream=None if skip is None else skip.index_select(0, sample).float(),
            lengths=None if key_lengths is None else key_lengths.index_select(0, sample),
            max_logit=peak if self.captured is None else peak.maximum(self.captured.max_logit),
            entropy=stats.entropy,
            prob_norm=stats.prob_norm,
            head_norm=stats.head_norm,
            dtype=output.dtype,
        )

    def extra_repr(self) -> str:
        """Show the sizes in the printed module."""
        return f"dim={self.dim}, num_heads={self.num_heads}, head_dim={self.head_dim}"


def evenly_spaced(batch: int, samples: int, device: torch.device) -> Tensor:
    """Return (min(samples, batch),) int32: batch entries spread over the batch."""
    samples = min(samples, batch)
    ends = torch.arange(0, samples * batch, batch, dtype=torch.int32, device=device)
    return ends // samples
