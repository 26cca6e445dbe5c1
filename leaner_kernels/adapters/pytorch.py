"""PyTorch's nn.MultiheadAttention and nn.TransformerEncoderLayer on our kernels.

``use(model)`` swaps those of a model. The two classes here have the constructors and state dicts of
PyTorch's. nn.TransformerDecoderLayer needs no class of its own: its two attentions are swapped.
"""

import math
from functools import reduce, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from ..nn.capture import Capturing
from ..ops._checks import MAX_HEAD_DIM
from ..ops.attention import attention, attention_qkvpacked
from ..ops.attention.checks import is_causal_bias
from ..ops.statistics import AttentionStats
from . import swap

__all__ = ["MultiheadAttention", "TransformerEncoderLayer", "undo", "use"]

_PYTORCHS = nn.MultiheadAttention


def use(model: nn.Module) -> swap.Swapped:
    """Swap every nn.MultiheadAttention and nn.TransformerEncoderLayer of a model, in place.

    Args:
        model: any module; parameters, state dict, hooks and optimizers are unchanged.

    Returns:
        A report of what was swapped, and what was left and why. Print it, or call its ``undo()``.

    Raises:
        ValueError: if nothing was swapped.
    """
    return swap.swap(model, RULES)


def undo(model: nn.Module) -> None:
    """Restore the classes that ``use`` swapped, in the model or a copy; keep trained weights.

    Raises:
        ValueError: if a module was wrapped after it was swapped.
    """
    swap.undo(model, RULES)


class MultiheadAttention(Capturing, nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` with heads that ``KappaMonitor`` can capture.

    Options and parameter names are those of PyTorch, but ``add_bias_kv`` and ``add_zero_attn``,
    which raise a ValueError. ``head_dim``, ``embed_dim / num_heads``, is from 1 to 128, and
    ``dropout`` is in [0, 1). With ``need_weights=False``, two things differ. There is one path for
    training and evaluation, so that results do not change without autograd. A row without a visible
    key attends to nothing, so that its output is the bias of ``out_proj``, or zero without one.
    With ``need_weights=True`` it is NaN, as in PyTorch.

    Raises:
        ValueError: if a count, width or probability is outside these ranges.

    ``Capturing`` describes the attributes for ``KappaMonitor``.
    Source: arXiv:1706.03762, section 3.2.2; PyTorch's documentation for the options.
    """

    @wraps(_PYTORCHS.__init__)
    def __init__(self, embed_dim, num_heads, *args, **kwargs) -> None:
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        # The name in torch.nn may have been replaced by this class.
        super(Capturing, self).__init__(embed_dim, num_heads, *args, **kwargs)
        _prepare(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        skip: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Project, compute attention and project back.

        The first eight arguments are those of PyTorch's forward: query (B, N, embed_dim) with
        ``batch_first``, (N, B, embed_dim) or (N, embed_dim), and masks that are boolean (True is
        hidden) or additive. The kernels never form the matrix of weights, so that PyTorch computes
        a call with ``need_weights``; a capture then comes from a second call, without gradients and
        dropout. With ``is_causal``, the mask must be given, but is not always read. ``skip`` is
        shaped as ``query``, the residual stream to which the caller adds the result; read for
        ``captured``, never added here.

        Returns:
            The output, shaped as ``query``, and the weights: (B, N, M), or (B, num_heads, N, M)
            without the average, or None.

        Raises:
            ValueError: if a shape is not supported, or ``attention`` raises one.
        """
        if isinstance(query, Proxy):
            masks = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            return swap.node_of(self, query, key, value, *masks)
        if attn_mask is not None and is_causal_bias(attn_mask):
            raise ValueError("attn_mask must hold numbers, got a CausalBias, which has none")
        if need_weights:
            masks = key_padding_mask, True, attn_mask, average_attn_weights, is_causal
            output, weights = super().forward(query, key, value, *masks)
            if self.capture_samples > 0 or self.track_logits:
                with torch.no_grad():
                    _, stats, sample = self._attend(
                        query, key, value, key_padding_mask, attn_mask, is_causal, 0.0
                    )
                    self._keep_batches(stats, sample, output, skip)
            return output, weights
        masks = key_padding_mask, attn_mask, is_causal
        dropout_p = self.dropout if self.training else 0.0
        a, stats, sample = self._attend(query, key, value, *masks, dropout_p)
        # Back to the order of the input before the projection, which returns contiguous memory.
        a = a.flatten(-2)
        a = a[0] if query.dim() == 2 else a if self.batch_first else a.transpose(0, 1)
        output = F.linear(a, self.out_proj.weight, self.out_proj.bias)
        if stats is not None:
            self._keep_batches(stats, sample, output, skip)
        return output, None

    def columns(self, tokens: int) -> int:
        """Return the number of entries of a softmax row: in cross-attention, the number of keys."""
        return tokens if self._keys is None else self._keys

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        dropout_p: float,
    ) -> tuple[Tensor, AttentionStats | None, Tensor | None]:
        """Return the heads (B, N, H, D), any statistics, and the sampled batch entries."""
        self._check(query, key, value)
        if query is key and key is value and self._qkv_same_embed_dim:
            qkv = self._split(F.linear(query, self.in_proj_weight, self.in_proj_bias), 3)
            q, k, v = qkv.unbind(2)
        else:
            qkv = None
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self._qkv_same_embed_dim:
                weights = self.in_proj_weight.chunk(3)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            parts = zip((query, key, value), weights, biases, strict=True)
            q, k, v = (self._split(F.linear(*part), 1) for part in parts)
        batch, rows, cols = q.shape[0], q.shape[1], k.shape[1]
        scores = batch, self.num_heads, rows, cols
        mask, is_causal = _one_mask(attn_mask, key_padding_mask, is_causal, scores, q.dtype)
        sample, measured = self._select_sample(batch, q.device)
        if measured:
            self._keys = None if key is query else cols
        params = {"dropout_p": dropout_p, "is_causal": is_causal}
        if qkv is not None and mask is None:
            if measured:
                stats = self._qkvpacked_with_stats(qkv, sample=sample, **params)
                return stats.out, stats, sample
            return attention_qkvpacked(qkv, **params), None, sample
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if measured:
            stats = self._attention_with_stats(q, k, v, mask, sample=sample, **params)
            return stats.out.transpose(1, 2), stats, sample
        return attention(q, k, v, mask, **params).transpose(1, 2), None, sample

    def _split(self, projected: Tensor, parts: int) -> Tensor:
        """Return a view (B, N, H, D), or (B, N, 3, H, D) of three parts."""
        sizes = (self.num_heads, self.head_dim)
        heads = self._batches(projected)
        return heads.unflatten(-1, sizes if parts == 1 else (parts, *sizes))

    def _batches(self, x: Tensor) -> Tensor:
        """Return a view (B, N, width) of a tensor in the order of the input."""
        return x[None] if x.dim() == 2 else x if self.batch_first else x.transpose(0, 1)

    def _keep_batches(
        self, stats: Any, sample: Tensor | None, output: Tensor, skip: Tensor | None
    ) -> None:
        skip = None if skip is None else self._batches(skip)
        self._store_capture(stats, sample, self._batches(output), skip)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.is_nested:
            raise ValueError(
                "query must not be nested: construct the encoder with enable_nested_tensor=False"
            )
        inputs = [("query", query, self.embed_dim)]
        if not (query is key is value and self._qkv_same_embed_dim):
            inputs += [("key", key, self.kdim), ("value", value, self.vdim)]
        for name, t, width in inputs:
            if query.dim() not in (2, 3) or t.dim() != query.dim() or t.shape[-1] != width:
                raise ValueError(
                    f"{name} must be ({'B, N, ' if query.dim() == 3 else 'N, '}{width}), "
                    f"got {tuple(t.shape)}"
                )


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """``torch.nn.TransformerEncoderLayer`` with ``MultiheadAttention``; same constructor.

    It has one path. PyTorch's second path, for inference, calls a fused layer without attention.
    The nested tensor that ``nn.TransformerEncoder`` makes of a padded batch in inference is padded
    for the layer, and its result is nested again.

    Raises:
        ValueError: if heads are wider than 128, or a dropout is outside [0, 1).

    Source: arXiv:1706.03762, section 3.1; ``norm_first`` after arXiv:2002.04745.
    """

    @wraps(nn.TransformerEncoderLayer.__init__)
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # Not constructed again, so that the same seed gives the weights of PyTorch's layer.
        self.self_attn.__class__ = MultiheadAttention
        _prepare(self.self_attn)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Apply attention and the feed-forward block, each with a residual connection.

        ``src`` is (B, N, d_model) with ``batch_first``, otherwise (N, B, d_model); or
        (N, d_model). With ``batch_first`` and without masks it may be nested, of strided layout.
        Masks are those of PyTorch.

        Raises:
            ValueError: if ``MultiheadAttention`` raises one.
        """
        if isinstance(src, Proxy):
            return swap.node_of(self, src, src_mask, src_key_padding_mask, is_causal)
        whole = src_mask is None and src_key_padding_mask is None
        if src.is_nested and src.layout is torch.strided and whole and self.self_attn.batch_first:
            padded = src.to_padded_tensor(0.0)
            lengths = src._nested_tensor_size()[:, 0].to(src.device)
            hidden = torch.arange(padded.shape[1], device=src.device) >= lengths[:, None]
            out = TransformerEncoderLayer.forward(self, padded, src_key_padding_mask=hidden)
            nest = torch._nested_tensor_from_mask  # pyright: ignore[reportPrivateImportUsage]
            return nest(out, ~hidden)

        def attend(x: Tensor) -> Tensor:
            masks = src_key_padding_mask, False, src_mask
            output, _ = self.self_attn(x, x, x, *masks, is_causal=is_causal, skip=src)
            return self.dropout1(output)

        if self.norm_first:
            x = src + attend(self.norm1(src))
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(src + attend(src))
        return self.norm2(x + self._ff_block(x))


def _one_mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    scores: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> tuple[Tensor | None, bool]:
    """Combine masks into one for ``attention`` (True is visible) or None; return ``is_causal`` too.

    ``attn_mask`` is not read if ``is_causal`` is set and there is no padding. ``scores`` is (B, H,
    N, M).
    """
    batch, heads, rows, cols = scores
    if is_causal and attn_mask is None:
        raise ValueError("is_causal=True describes attn_mask: give attn_mask too, got None")
    if is_causal and key_padding_mask is None:
        return None, True
    masks = []
    if attn_mask is not None:
        if attn_mask.shape not in ((rows, cols), (batch * heads, rows, cols)):
            raise ValueError(
                f"attn_mask must be {(rows, cols)} or {(batch * heads, rows, cols)}, "
                f"got {tuple(attn_mask.shape)}"
            )
        masks.append(attn_mask.unflatten(0, (batch, heads)) if attn_mask.dim() == 3 else attn_mask)
    if key_padding_mask is not None:
        if key_padding_mask.shape not in ((batch, cols), (cols,) if batch == 1 else ()):
            raise ValueError(
                f"key_padding_mask must be {(batch, cols)}, got {tuple(key_padding_mask.shape)}"
            )
        masks.append(key_padding_mask.view(batch, 1, 1, cols))
    for mask in masks:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"masks must be boolean or floating point, got {mask.dtype}")
    if not masks:
        return None, False
    if all(mask.dtype == torch.bool for mask in masks):
        return ~reduce(torch.logical_or, masks), False
    nothing = torch.zeros((), dtype=dtype, device=masks[0].device)
    added = (
        nothing.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else mask.to(dtype)
        for mask in masks
    )
    return reduce(torch.add, added), False


def _check_attention(module: Any) -> None:
    """Raise ValueError if a MultiheadAttention cannot be swapped."""
    if module.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {module.head_dim} is above {MAX_HEAD_DIM}")
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("add_bias_kv and add_zero_attn are not supported")
    if not 0 <= module.dropout < 1:
        raise ValueError(f"dropout {module.dropout} is not in [0, 1)")


def _prepare(module: Any) -> None:
    _check_attention(module)
    module._set_sizes(module.embed_dim, module.num_heads, module.head_dim)
    module._keys = None


def _check_layer(module: Any) -> None:
    if type(module.self_attn) not in (_PYTORCHS, MultiheadAttention):
        raise ValueError(f"its self_attn is a {type(module.self_attn).__name__}")
    _check_attention(module.self_attn)


RULES = (
    swap.Rule(_PYTORCHS, MultiheadAttention, "attention between tokens", _prepare),
    swap.Rule(
        nn.TransformerEncoderLayer,
        TransformerEncoderLayer,
        "a layer with one path, through its self_attn",
        _check_layer,
    ),
)
