"""The module of softmax attention."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..ops.attention import attention, attention_qkvpacked, biased
from .capture import Capturing


class ManyHeadAttention(Capturing):
    """Self-attention whose width, heads * head_dim, may differ from the width of its input.

    Args:
        dim: width of the input and output.
        num_heads: number of heads, at least 1.
        head_dim: width of each head, 1 to 128; "split" divides ``dim`` among the heads,
            ``dim // num_heads`` (rounded down, so the attention width may fall short of ``dim``).
        qkv_bias: add a bias to the projection of queries, keys and values.
        proj_bias: add a bias to the output projection.
        attn_drop: dropout of the attention probabilities while training, in [0, 1).
        proj_drop: dropout after the output projection while training.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: if a count or width is not supported.

    ``Capturing`` describes the attributes for ``KappaMonitor``. Parameters are named as in timm's
    Attention (qkv, proj), so that its state dicts load unchanged.
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
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, head_dim)
        if not 0 <= attn_drop < 1:
            raise ValueError(f"attn_drop must be in [0, 1), got {attn_drop}")
        self.attn_drop = attn_drop
        self._set_projections(qkv_bias, proj_bias, proj_drop, device, dtype)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        key_lengths: Tensor | Sequence[int] | None = None,
        skip: Tensor | None = None,
    ) -> Tensor:
        """Compute self-attention and project.

        Args:
            x: (B, N, dim), floating point.
            attn_mask: as in ``attention``, broadcastable to (B, H, N, N).
            is_causal: row i sees columns 0 to i.
            key_lengths: as in ``attention``: (B,), each in [1, N].
            skip: (B, N, dim), the residual stream to which the caller adds the result; read for
                ``captured``, never added here.

        Returns:
            (B, N, dim), in the dtype of the projection.

        Raises:
            ValueError: if ``attention`` raises one, or ``skip`` differs from ``x`` in shape.
        """
        self._check_input(x, skip, "B, N")
        dropout_p = self.attn_drop if self.training else 0.0
        hands_over = (
            attn_mask is None
            and not self._measures()
            and biased.takes(self.qkv, x, self.num_heads, is_causal, dropout_p)
        )
        if hands_over:
            attend, projected = partial(biased.attend, self.qkv.bias), biased.project(self.qkv, x)
        else:
            attend, projected = attention_qkvpacked, self.qkv(x)
        qkv = projected.view(*x.shape[:2], 3, self.num_heads, self.head_dim)
        params = {
            "key_lengths": key_lengths,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "store": {"skip": skip, "key_lengths": key_lengths},
        }
        # With a mask there is no packed path: autograd joins the gradients of q, k and v by copies.
        if attn_mask is None:
            operators = attend, self._qkvpacked_with_stats
            return self._run(self._project, *operators, qkv, **params)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self._run(
            lambda out: self._project(out.transpose(1, 2)),
            *(attention, self._attention_with_stats, q, k, v, attn_mask),
            **params,
        )
