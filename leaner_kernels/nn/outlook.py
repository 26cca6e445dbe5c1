"""The module of outlook attention."""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.outlook import check_window, outlook_attention, outlook_attention_with_stats
from .capture import Attends, Capturing


class OutlookAttention(Capturing):
    """VOLO's outlook attention, whose width may differ from the width of its input.

    The probabilities of a window are a projection of the mean over the ``stride`` x ``stride``
    pixels where it starts, without queries and keys.

    Args:
        kernel_size: pixels along the side of a window, 1 to 7.
        padding: pixels by which the first window is outside the map.
        stride: pixels from a window to the next, 1 to 4.

    Other arguments are those of ``ManyHeadAttention``; ``qkv_bias`` adds a bias to the projection
    of the values, the only one of the three.

    Raises:
        ValueError: if a count or width is not supported.

    ``Capturing`` describes the attributes for ``KappaMonitor``. Parameters are named as in timm's
    OutlookAttention (v, attn, proj), so that its state dicts load unchanged.
    Source: arXiv:2106.13112, section 3.1; heads * head_dim != dim after arXiv:2505.20802.
    """

    attends: ClassVar[Attends] = "neighbours"

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        head_dim: int | Literal["split"] = 32,
        kernel_size: int = 3,
        padding: int = 1,
        stride: int = 2,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, head_dim)
        self.kernel_size, self.stride, self.padding = check_window(kernel_size, stride, padding)
        width = self.num_heads * self.head_dim
        self.v: nn.Linear = nn.Linear(dim, width, bias=qkv_bias, device=device, dtype=dtype)
        self.attn: nn.Linear = nn.Linear(
            dim, kernel_size**4 * num_heads, device=device, dtype=dtype
        )
        self.proj: nn.Linear = nn.Linear(width, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop: nn.Dropout = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Compute attention inside the windows, sum over them and project.

        Args:
            x: (B, Y, X, dim), floating point. The number of windows must equal the number of
                pixels of the pooled map, ``ceil(Y / stride)`` by ``ceil(X / stride)``.
            skip: (B, Y, X, dim), the residual stream to which the caller adds the result; read for
                ``captured``, never added here.

        Returns:
            (B, Y, X, dim), in the dtype of the projection.

        Raises:
            ValueError: if ``outlook_attention`` raises one, or ``skip`` is not shaped as ``x``.
        """
        self._check_input(x, skip, "B, Y, X")
        value = self.v(x).unflatten(-1, (self.num_heads, self.head_dim))
        pooled = F.avg_pool2d(x.permute(0, 3, 1, 2), self.stride, ceil_mode=True)
        places = self.kernel_size**2
        logits = self.attn(pooled.permute(0, 2, 3, 1))
        logits = logits.unflatten(-1, (self.num_heads, places, places))
        return self._run_operator(
            self._project,
            *(outlook_attention, outlook_attention_with_stats, value, logits),
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            store={"skip": skip},
        )

    def columns(self, tokens: int) -> int:
        """Return how many entries a softmax row has: the pixels of a window."""
        return self.kernel_size**2

    def extra_repr(self) -> str:
        """Show the sizes in the printed module."""
        window = f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
        return f"{super().extra_repr()}, {window}"
