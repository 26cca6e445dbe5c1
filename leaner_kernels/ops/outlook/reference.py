"""Outlook attention as VOLO writes it: the specification, in any dtype, float64 included.

Letters: B batch, Y by X map of H heads of dimension D; y by x windows of K * K pixels, in row-major
order. ``window`` is (kernel size, stride, padding).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

Window = tuple[int, int, int]


def num_windows(size: int, window: Window) -> int:
    """Return how many windows an axis of ``size`` pixels has."""
    kernel_size, stride, padding = window
    return (size + 2 * padding - kernel_size) // stride + 1


def unfold(pixels: Tensor, window: Window) -> Tensor:
    """Return each window's pixels, (B, y, x, H, K * K, D), of (B, Y, X, H, D), zeros outside."""
    kernel_size, stride, padding = window
    batch, y, x, heads, dim = pixels.shape
    # Heads become entries of the batch, which may be empty.
    channels_first = pixels.permute(0, 3, 4, 1, 2).flatten(0, 1)
    patches = F.unfold(channels_first, kernel_size, stride=stride, padding=padding)
    count = num_windows(y, window), num_windows(x, window)
    return patches.view(batch, heads, dim, kernel_size**2, *count).permute(0, 4, 5, 1, 3, 2)


def fold(patches: Tensor, size: tuple[int, int], window: Window) -> Tensor:
    """Return (B, Y, X, H, D), where each pixel sums what all windows have at its place."""
    kernel_size, stride, padding = window
    batch, y, x, heads, _, dim = patches.shape
    columns = patches.permute(0, 3, 5, 4, 1, 2)
    columns = columns.reshape(batch * heads, dim * kernel_size**2, y * x)
    summed = F.fold(columns, size, kernel_size, stride=stride, padding=padding)
    return summed.view(batch, heads, dim, *size).permute(0, 3, 4, 1, 2).contiguous()


def probabilities(logits: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return P (B, y, x, H, K * K, K * K), lse (B, H, y, x, K * K) and the scores S."""
    s = scale * logits
    lse = torch.logsumexp(s, dim=-1)
    return torch.softmax(s, dim=-1), lse.permute(0, 3, 1, 2, 4), s


def forward(p: Tensor, value: Tensor, window: Window) -> Tensor:
    """Return A (B, Y, X, H, D): each window's pixels are P times its values, windows are summed."""
    return fold(p @ unfold(value, window), (value.shape[1], value.shape[2]), window)


def backward(
    grad: Tensor, value: Tensor, p: Tensor, scale: float, window: Window
) -> tuple[Tensor, Tensor]:
    """Return dV and the gradient of the logits.

    Written out because autograd cannot run inside a dispatcher kernel; gradcheck ties it to the
    forward above. Unfolding and folding are each other's gradients.
    """
    grads = unfold(grad, window)
    dp = grads @ unfold(value, window).mT
    ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True))
    return fold(p.mT @ grads, (value.shape[1], value.shape[2]), window), scale * ds
