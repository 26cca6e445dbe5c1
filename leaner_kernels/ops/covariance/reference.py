"""Attention between the channels of a head as XCiT and DaViT write it: the specification.

Letters: B batch, H heads, N tokens, D head dimension. Tensors are (B, H, N, D); scores, and P, are
(B, H, D, D): a softmax over the products that channels have when they are summed over tokens.
Any dtype, float64 included.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def unit(t: Tensor, eps: float) -> Tensor:
    """Return ``t`` with each channel divided by its length over the tokens, at least ``eps``."""
    return F.normalize(t, dim=-2, eps=eps)


def cross_covariance_scores(q: Tensor, k: Tensor, temperature: Tensor, eps: float) -> Tensor:
    """Return XCiT's S: cosines between channels of Q and of K, times a temperature (H,)."""
    return temperature[:, None, None] * (unit(q, eps).mT @ unit(k, eps))


def channel_scores(k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return DaViT's S: products between channels of K and of V."""
    return (scale * k).mT @ v


def forward(s: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return A = values P^T (B, H, N, D), P, and the log-sum-exp (B, H, D) of each row of S."""
    p = torch.softmax(s, dim=-1)
    return values @ p.mT, p, torch.logsumexp(s, dim=-1)


def backward(grad: Tensor, p: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return dS and the gradient of ``values``.

    These derivatives are written out because autograd cannot run inside a dispatcher kernel;
    gradcheck ties them to the functions above.
    """
    dp = grad.mT @ values
    return p * (dp - (p * dp).sum(dim=-1, keepdim=True)), grad @ p


def cross_covariance_backward(
    ds: Tensor, q: Tensor, k: Tensor, temperature: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and the gradient (H,) of the temperature."""
    q_unit, k_unit = unit(q, eps), unit(k, eps)
    dtemperature = (ds * (q_unit.mT @ k_unit)).sum(dim=(0, 2, 3))
    ds = temperature[:, None, None] * ds
    return (
        _unit_backward(k_unit @ ds.mT, q, eps),
        _unit_backward(q_unit @ ds, k, eps),
        dtemperature,
    )


def _unit_backward(grad: Tensor, t: Tensor, eps: float) -> Tensor:
    length = t.norm(dim=-2, keepdim=True)
    along = (grad * unit(t, eps)).sum(dim=-2, keepdim=True)
    # A channel shorter than eps is divided by a constant.
    along = along.masked_fill(length < eps, 0)
    return (grad - along * unit(t, eps)) / length.clamp_min(eps)


def channel_backward(ds: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of K and V through the scores."""
    return scale * (v @ ds.mT), scale * (k @ ds)
