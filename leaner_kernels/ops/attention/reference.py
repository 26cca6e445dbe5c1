"""Softmax attention as the paper writes it: the specification, in any dtype, float64 included.

Letters: B batch, H query heads, N query rows, M key columns, D head dimension. Keys and values may
have fewer heads than queries (grouped queries); every function here takes them as they are.
"""

from typing import Any

import torch
from torch import Tensor


def visible(
    rows: int,
    cols: int,
    key_lengths: Tensor | None,
    device: torch.device,
    *,
    is_causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
) -> Tensor | None:
    """Return the boolean (1 or B, 1, N, M) of scores that may be seen, or None when all may.

    ``is_causal`` is aligned top left: row i sees columns 0 to i. A window is aligned bottom right,
    as flash-attention's: row i sees columns i + M - N - window_left to i + M - N + window_right,
    where -1 is no bound. A key is visible if both allow it; if N = M, ``is_causal`` equals a
    ``window_right`` of 0.
    """
    seen = None
    if is_causal or max(window_left, window_right) >= 0:
        seen = torch.ones(rows, cols, dtype=torch.bool, device=device)
        seen = seen.tril() if is_causal else seen
        seen = seen.tril(cols - rows + window_right) if window_right >= 0 else seen
        seen = seen.triu(cols - rows - window_left) if window_left >= 0 else seen
        seen = seen[None, None]
    if key_lengths is not None:
        inside = torch.arange(cols, device=device) < key_lengths[:, None, None, None]
        seen = inside.expand(-1, -1, rows, -1) if seen is None else seen & inside
    return seen


def without_padding(t: Tensor, key_lengths: Tensor | None) -> Tensor:
    """Return keys or values (B, Hkv, M, D) with zeros at or past a length.

    These may be NaN, as in uninitialised memory, and 0 * NaN is NaN.
    """
    if key_lengths is None:
        return t
    past = torch.arange(t.shape[2], device=t.device) >= key_lengths[:, None]
    return t.masked_fill(past[:, None, :, None], 0)


def probabilities(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    *,
    scale: float | None,
    softcap: float = 0.0,
    **visibility: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return P (B, H, N, M), lse (B, H, N) and the scores S, with -inf where a score is hidden.

    ``visibility`` is what ``visible`` takes by name.
    """
    key = key.repeat_interleave(_group(query, key), dim=1)
    s = _scale(scale, query) * (query @ key.mT)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        s = s + attn_mask
    for seen in (
        attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else None,
        visible(query.shape[2], key.shape[2], key_lengths, query.device, **visibility),
    ):
        s = s if seen is None else s.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(s, dim=-1)
    # A row that sees no key has no distribution: its probabilities, and derivatives, are zero.
    unseeing = lse[..., None] == float("-inf")
    p = torch.softmax(s.masked_fill(unseeing, 0), dim=-1).masked_fill(unseeing, 0)
    return p, lse, s


def forward(p: Tensor, value: Tensor, keep: Tensor | None, dropout_p: float) -> Tensor:
    """Return A = dropout(P) V, (B, H, N, D)."""
    value = value.repeat_interleave(_group(p, value), dim=1)
    return dropped(p, keep, dropout_p) @ value


def dropped(p: Tensor, keep: Tensor | None, dropout_p: float) -> Tensor:
    """Return P with the dropped probabilities set to zero and the others scaled up."""
    return p if keep is None else p * keep / (1 - dropout_p)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    p: Tensor,
    keep: Tensor | None,
    dropout_p: float,
    *,
    scale: float | None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dQ, dK, dV and dS (B, H, N, M), the gradient of an additive mask before broadcasting.

    Written out because autograd cannot run inside a dispatcher kernel; gradcheck ties it to the
    forward above.
    """
    group, scale = _group(query, key), _scale(scale, query)
    keys, values = (t.repeat_interleave(group, dim=1) for t in (key, value))
    dp = dropped(grad @ values.mT, keep, dropout_p)
    ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True))
    unbounded = ds
    if softcap:
        u = scale * (query @ keys.mT) / softcap
        # The derivative of tanh: 1 - tanh^2 would cancel where scores are far beyond the softcap.
        unbounded = 4 * torch.sigmoid(2 * u) * torch.sigmoid(-2 * u) * ds
    dk = scale * (unbounded.mT @ query)
    dv = dropped(p, keep, dropout_p).mT @ grad
    dk, dv = (t.unflatten(1, (key.shape[1], group)).sum(dim=2) for t in (dk, dv))
    return scale * (unbounded @ keys), dk, dv, ds


def _group(query: Tensor, key: Tensor) -> int:
    """Return how many query heads share a key head; either count may be zero."""
    return query.shape[1] // max(key.shape[1], 1)


def _scale(scale: float | None, query: Tensor) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def keep_mask(
    seed: Tensor, batch: int, heads: int, rows: int, cols: int, p: float, first: int = 0
) -> Tensor:
    """Return the dropout mask (B, H, N, M): a pure function of the seed and the position.

    Philox 4x32-10 (Salmon et al. 2011), counter (column, row, batch * H + head, 0): the same bits
    as the GPU kernels draw. A score is kept when the top 31 bits reach ``p * 2**31``. With
    ``first``, the entries are those from ``first`` on of a larger batch.
    """
    low = 0xFFFFFFFF
    axes = (cols, 1), (rows, cols), (batch * heads, rows * cols)
    index = torch.arange(batch * heads * rows * cols, device=seed.device)
    c0, c1, c2 = (index // step % size for size, step in axes)
    c2 = c2 + first * heads
    c3 = torch.zeros_like(index)
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        b, a = 0xCD9E8D57 * c2, 0xD2511F53 * c0
        c0, c1 = (b >> 32) & low ^ c1 ^ k0, b & low
        c2, c3 = (a >> 32) & low ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return ((c0 >> 1) >= int(p * 2**31)).view(batch, heads, rows, cols)
