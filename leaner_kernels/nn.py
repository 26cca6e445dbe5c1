"""Modules around the operators: the projections before and after, and the capture for kappa."""

from typing import Literal

import torch
from torch import Tensor, nn

from leaner_kernels.ops.attention import attention, attention_packed, attention_with_stats


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
        captured: (max_logit, entropy, prob_norm, head_norm, heads) of ``AttentionStats`` from the
            newest forward that captured, or None; overwritten, so that recomputing activations
            counts nothing twice.

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
        self.captured: tuple[Tensor, ...] | None = None

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        key_lengths: Tensor | None = None,
    ) -> Tensor:
        """Attend and project.

        Args:
            x: (B, N, dim), floating point.
            attn_mask: as in ``attention``, broadcastable to (B, H, N, N).
            is_causal: row i sees columns 0 to i.
            key_lengths: (B,) int32, each in [1, N].

        Returns:
            (B, N, dim), in the dtype of the projection.

        Raises:
            ValueError: what ``attention`` refuses.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (B, N, {self.dim}), got {tuple(x.shape)}")
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, self.head_dim)
        dropout_p = self.attn_drop if self.training else 0.0
        if self.capture_samples == 0 and attn_mask is None:
            a = attention_packed(
                qkv, key_lengths=key_lengths, dropout_p=dropout_p, is_causal=is_causal
            )
        else:
            a = self._attend_unpacked(qkv, attn_mask, dropout_p, is_causal, key_lengths)
        return self.proj_drop(self.proj(a.reshape(batch, tokens, -1)))

    def _attend_unpacked(
        self,
        qkv: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        key_lengths: Tensor | None,
    ) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.capture_samples == 0:
            out = attention(q, k, v, attn_mask, dropout_p, is_causal, key_lengths=key_lengths)
            return out.transpose(1, 2)
        sample = evenly_spaced(len(q), self.capture_samples, q.device)
        stats = attention_with_stats(
            q, k, v, attn_mask, dropout_p, is_causal, key_lengths=key_lengths, sample=sample
        )
        assert stats.heads is not None
        self.captured = (
            stats.max_logit,
            stats.entropy,
            stats.prob_norm,
            stats.head_norm,
            stats.heads,
        )
        return stats.out.transpose(1, 2)

    def extra_repr(self) -> str:
        """Show the sizes in the printed module."""
        return f"dim={self.dim}, num_heads={self.num_heads}, head_dim={self.head_dim}"


def evenly_spaced(batch: int, samples: int, device: torch.device) -> Tensor:
    """Return (min(samples, batch),) int32: batch entries spread over the batch."""
    samples = min(samples, batch)
    return (torch.arange(samples, device=device) * batch // samples).to(torch.int32)
