"""The module of Nyström attention."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..ops._checks import checked_lengths, shown
from ..ops.attention import attention_qkvpacked
from ..ops.nystrom import check_landmarks, nystrom_attention, nystrom_attention_with_stats
from .capture import Attends, Capturing


class NystromAttention(Capturing):
    """Self-attention through landmarks, whose width may differ from the width of its input.

    Args:
        num_landmarks: number of means of consecutive tokens. A sequence of at most that many
            tokens gets softmax attention, as published.
        conv_kernel_size: width in tokens, an odd number, of a convolution of the values that is
            added to the heads: one kernel per head, no bias. None disables it.
        iterations: iterations of the pseudo-inverse, at least 1.
        init: divides its first iterate by the largest column sum of each matrix, ``"matrix"``, or
            of the whole batch, ``"batch"``, as published; with the latter, the result of a sample
            depends on the others in the batch.

    Other arguments are those of ``ManyHeadAttention``.

    Raises:
        ValueError: if a count or width is not supported.

    ``Capturing`` describes the attributes for ``KappaMonitor``. Captured heads, and their norms,
    are those of the attention, before the convolution is added. Entropy is that of a token's
    distribution over the landmarks. A head is a combination of its m landmark distributions, whose
    sum is 1 for every token: unless m is above ``head_dim``, all heads share that direction, and
    kappa of several is infinite. All landmarks that consist of padding count as one.
    Source: arXiv:2102.03902; heads * head_dim != dim after arXiv:2505.20802.
    """

    attends: ClassVar[Attends] = "landmarks"

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        head_dim: int | Literal["split"] = 64,
        num_landmarks: int = 64,
        conv_kernel_size: int | None = None,
        iterations: int = 6,
        init: Literal["matrix", "batch"] = "matrix",
        *,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, head_dim)
        check_landmarks(num_landmarks, iterations, init)
        self.num_landmarks: int = num_landmarks
        self.iterations: int = iterations
        self.init = init
        width = self.num_heads * self.head_dim
        self.qkv: nn.Linear = nn.Linear(dim, 3 * width, bias=qkv_bias, device=device, dtype=dtype)
        self.conv = None
        if conv_kernel_size is not None:
            odd = isinstance(conv_kernel_size, int) and conv_kernel_size % 2 == 1
            if not odd or conv_kernel_size < 1:
                raise ValueError(
                    f"conv_kernel_size must be odd and positive, got {shown(conv_kernel_size)}"
                )
            self.conv = nn.Conv2d(
                num_heads,
                num_heads,
                (conv_kernel_size, 1),
                padding=(conv_kernel_size // 2, 0),
                groups=num_heads,
                bias=False,
                device=device,
                dtype=dtype,
            )
        self.proj: nn.Linear = nn.Linear(width, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop: nn.Dropout = nn.Dropout(proj_drop)

    def forward(
        self,
        x: Tensor,
        key_lengths: Tensor | Sequence[int] | None = None,
        skip: Tensor | None = None,
    ) -> Tensor:
        """Compute self-attention through landmarks and project.

        Args:
            x: (B, N, dim), floating point; N at most ``num_landmarks``, or a multiple of it.
            key_lengths: as in ``attention``: (B,), each in [1, N]; tokens at or past a length are
                padding. Results of other tokens depend on their number, but not on their values:
                the landmarks divide all N tokens, and count padding as zeros.
            skip: as in ``ManyHeadAttention``.

        Returns:
            (B, N, dim), in the dtype of the projection.

        Raises:
            ValueError: if ``nystrom_attention`` raises one, or ``skip`` differs from ``x`` in
                shape.
        """
        self._check_input(x, skip, "B, N")
        batch, tokens, _ = x.shape
        key_lengths = checked_lengths(key_lengths, batch, tokens, x.device)
        qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)

        def finish(a: Tensor) -> Tensor:
            if self.conv is None:
                return self._project(a)
            values = v
            if key_lengths is not None:
                padded = torch.arange(tokens, device=x.device) >= key_lengths[:, None]
                values = v.masked_fill(padded[:, None, :, None], 0)
            return self._project(a + self.conv(values).transpose(1, 2))

        params = {"key_lengths": key_lengths, "store": {"skip": skip, "key_lengths": key_lengths}}
        if tokens <= self.num_landmarks:
            operators = attention_qkvpacked, self._qkvpacked_with_stats
            return self._run(finish, *operators, qkv, **params)
        return self._run(
            lambda out: finish(out.transpose(1, 2)),
            *(nystrom_attention, nystrom_attention_with_stats, q, k, v, self.num_landmarks),
            iterations=self.iterations,
            init=self.init,
            **params,
        )

    def columns(self, tokens: int) -> int:
        """Return how many entries a softmax row has: the landmarks, unless tokens are fewer."""
        return min(tokens, self.num_landmarks)
