"""Our attention inside timm's models: one model at a time, in place, weights kept.

    from leaner_kernels.adapters import timm

    print(timm.use(model))  # what was swapped, what was left and why
    ...
    timm.undo(model)

Each class below extends timm's class of the same name and file. Its forward calls our operator, and
it has the attributes that ``KappaMonitor`` needs. Some rows need care:

- Swin and DaViT cut windows before they call their attention, so plain ``attention`` serves. Kappa
  is measured over all tokens of a map, whose size the swapped blocks set. If a block cannot be
  swapped, because its forward was replaced on the instance, kappa is that of single windows;
  ``tokens`` of a row shows which.
- The inner attention of TNT is between the pixels of a patch, so its kappa is that of patches.
- Heads are captured directly after attention, before any ``norm`` and ``gate``.

``QKClip`` and ``ConditioningPenalty`` support the modules whose ``qkv`` produces the final queries
and keys, not those that normalize, rotate or bias them afterwards.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..extras import needed_by
from ..nn.capture import Capturing
from ..ops.attention import attention, attention_qkvpacked
from ..ops.attention.checks import is_causal_bias
from ..ops.covariance import (
    channel_attention,
    channel_attention_with_stats,
    cross_covariance_attention,
    cross_covariance_attention_with_stats,
)
from ..ops.outlook import check_window, outlook_attention, outlook_attention_with_stats
from ..ops.statistics import AttentionStats, evenly_spaced
from . import swap

with needed_by(__name__):
    from timm.layers import attention as layers
    from timm.layers.pos_embed_sincos import apply_rot_embed_cat
    from timm.models import beit, davit, eva, swin_transformer, tnt, volo, xcit
    from timm.version import __version__ as version

# torch.fx traces through the modules below as through timm's own; each operator is one node.
torch.fx.wrap("attention_qkvpacked")
torch.fx.wrap("channel_attention")
torch.fx.wrap("cross_covariance_attention")
torch.fx.wrap("outlook_attention")

# The oldest timm with which the forwards below were tested: they read attributes of its classes.
if tuple(map(int, version.split(".")[:3])) < (1, 0, 29):
    raise ImportError(f"timm must be 1.0.29 or newer, got {version}")

__all__ = ["Attention", "undo", "use"]


def use(model: nn.Module) -> swap.Swapped:
    """Swap the attention of a timm model, or of any model with timm's modules, for ours.

    Args:
        model: changed in place: its attention modules get our forward. Parameters, names, state
            dict, hooks, optimizers and the computed function do not change. Hooks on ``attn_drop``
            and other parts that receive probabilities are no longer called.

    Returns:
        What was swapped, and what was left and why. ``undo()`` takes it back.

    Raises:
        ValueError: nothing can be swapped; the model is as it was.

    Call it before ``fully_shard`` is applied to attention modules themselves, and before anything
    replaces the forward of a module. A compiled model is compiled again. ``torch.fx`` traces a
    swapped model. timm's ``fused_attn`` has no effect, nor has a second call.
    """
    return swap.swap(model, (*_RULES, *_BLOCKS))


def undo(model: nn.Module) -> None:
    """Restore timm's attention after ``use``, in a model or a copy of it; keep trained weights.

    Raises:
        ValueError: a module has been wrapped since, as by ``fully_shard``.
    """
    swap.undo(model, (*_RULES, *_BLOCKS))


class _TimmCapturing(Capturing):
    """A timm module that calls our operator, with statistics if it captures or tracks logits."""

    # QKClip and ConditioningPenalty accept modules that have this attribute on the instance. These
    # are the modules in which ``qkv`` alone produces the queries and keys, unchanged afterwards.
    track_logits = False
    _plain: Any = False
    _drops = True

    def _prepare(self: Any) -> None:
        if not self._drops and hasattr(self, "attn_drop") and self.attn_drop.p > 0:
            raise ValueError(
                f"attention dropout is not supported here, got attn_drop {self.attn_drop.p}"
            )
        width = self.proj.in_features
        self._set_sizes(self.proj.out_features, self.num_heads, width // self.num_heads)
        if not self._plain:
            del self.track_logits

    def _dropout_p(self: Any) -> float:
        return (self._modules.get("attn_drop") or self.attn_drop).p if self.training else 0.0

    def _project(self: Any, heads: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return (..., dim) of (..., H, D)."""
        a, modules = heads.flatten(-2), self._modules
        # A part may have been replaced by a function, which ``_modules`` lacks.
        norm = modules["norm"] if "norm" in modules else getattr(self, "norm", None)
        drop = modules["proj_drop"] if "proj_drop" in modules else getattr(self, "proj_drop", None)
        if norm is not None:
            a = norm(a)
        a = (modules.get("proj") or self.proj)(a if gate is None else a * gate)
        return a if drop is None else drop(a)

    def _attend_qkvpacked(self, finish: Any, qkv: Tensor, **params: Any) -> Tensor:
        """Attend within each batch entry of (B, N, 3, H, D); ``finish`` gets (B, N, H, D)."""
        return self._run(finish, attention_qkvpacked, self._qkvpacked_with_stats, qkv, **params)

    def _attend(
        self, finish: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **params: Any
    ) -> Tensor:
        """Attend as ``attention`` does, from (B, H, N, D); ``finish`` gets (B, N, H, D)."""
        tensors = q, k, v, _mask_like(attn_mask, q)

        def of_rows(out: Tensor) -> Tensor:
            return finish(out.transpose(1, 2))

        return self._run(of_rows, _attention, self._attention_with_stats, *tensors, **params)


@torch.fx.wrap
def _attention(*args: Any, **params: Any) -> Tensor:
    return attention(*args, **params)


@torch.fx.wrap
def _mask_like(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a mask; convert an additive one to the dtype of the queries."""
    if mask is None or mask.dtype == torch.bool or is_causal_bias(mask):
        return mask
    return mask.to(q.dtype)


def _split_heads(projected: Tensor, heads: int, parts: int = 1) -> tuple[Tensor, ...]:
    """Return ``parts`` times (B, H, N, D), views of (B, N, parts * H * D)."""
    return projected.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _qkvpacked(projected: Tensor, heads: int) -> Tensor:
    """Return (B, N, 3, H, D), a view of (B, N, 3 * H * D)."""
    return torch.unflatten(projected, -1, (3, heads, -1))  # the method is a Python function


def _biased_qkv(module: Any, x: Tensor) -> Tensor:
    """Project as in BEiT and EVA, whose keys have no trained bias."""
    if getattr(module, "q_bias", None) is None:
        return module.qkv(x)
    bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
    if module.qkv_bias_separate:
        return module.qkv(x) + bias
    return F.linear(x, module.qkv.weight, bias)


class _ChannelAttention(_TimmCapturing):
    attends = "channels"
    _drops = False

    def columns(self, tokens: int) -> int:
        """Return how many entries a softmax row has: the channels of a head."""
        return self.head_dim


class _WindowedAttention(_TimmCapturing):
    """Attention on windows, (B * windows, N, dim); the windows of a map are consecutive.

    A captured batch entry is a map if an enclosing ``_WindowBlock`` sets ``map_size``, else a
    window.
    """

    attends = "windows"
    _plain = True

    def _prepare(self: Any) -> None:
        super()._prepare()
        self.map_size = None

    def columns(self: Any, tokens: int) -> int:
        """Return how many entries a softmax row has: the tokens of a window."""
        return math.prod(self.window_size)

    def _select_sample(self: Any, batch: int, device: torch.device) -> tuple[Tensor | None, bool]:
        if self.map_size is not None and self.capture_samples > 0:
            maps, windows = self.map_size[0], math.prod(self._windows_of_map())
            if 0 < batch == maps * windows:
                sample = evenly_spaced(maps, self.capture_samples, device)
                places = torch.arange(windows, dtype=torch.int32, device=device)
                return (sample[:, None] * windows + places).flatten(), True
        # No enclosing block, or its forward ended before the attention.
        self.map_size = None
        return super()._select_sample(batch, device)

    @torch.no_grad()
    def _store_capture(
        self: Any, stats: AttentionStats, sample: Tensor | None, output: Tensor, **others: Any
    ) -> None:
        if sample is not None and self.map_size is not None:
            output = self._windows_to_maps(output.index_select(0, sample))
            stats = stats._replace(heads=self._windows_to_maps(stats.heads))
            sample = torch.arange(output.shape[0], dtype=torch.int32, device=output.device)
            self.map_size = None
        super()._store_capture(stats, sample, output, **others)

    def _windows_of_map(self: Any) -> tuple[int, ...]:
        sizes = zip(self.map_size[1:], self.window_size)
        return tuple(math.ceil(size / window) for size, window in sizes)

    def _windows_to_maps(self: Any, windows: Tensor) -> Tensor:
        """Return (S, Y * X, width) of (S * windows, N, width), without the padding of the map."""
        _, rows, cols = self.map_size
        tiles = windows.unflatten(0, (-1, *self._windows_of_map()))
        whole = tiles.unflatten(3, self.window_size).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return whole[:, :rows, :cols].flatten(1, 2)


class _WindowBlock(nn.Module):
    """A block that cuts a map into windows, and sets ``map_size`` (B, Y, X) of its attention."""

    _rows_axis: int

    def forward(self: Any, x: Tensor) -> Tensor:
        """Compute the same as timm's block."""
        # The block may outlive the swap of its attention if ``fully_shard`` has wrapped it.
        if getattr(self.attn, "capture_samples", 0) > 0:
            self.attn.map_size = x.shape[0], *x.shape[self._rows_axis :][:2]
        return super().forward(x)


class Attention(_TimmCapturing, layers.Attention):
    """timm.layers.Attention; also for ``VisionTransformer(attn_layer=Attention)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        layers.Attention.__init__(self, *args, **kwargs)
        self._prepare()

    @property
    def _plain(self) -> bool:
        q_norm, k_norm = self._modules.get("q_norm"), self._modules.get("k_norm")
        return isinstance(q_norm, nn.Identity) and isinstance(k_norm, nn.Identity)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend between the tokens of (B, N, dim), as timm's."""
        # nn.Module looks up ``self.qkv`` in Python, which takes ten times as long. For one image,
        # the forward takes as long as its host code.
        modules: Any = self._modules
        gate = None if self.gate is None else self.gate(x).sigmoid()
        finish = self._project if gate is None else partial(self._project, gate=gate)
        projected = (modules.get("qkv") or self.qkv)(x)
        params = {"dropout_p": self._dropout_p(), "is_causal": is_causal}
        if attn_mask is None and self._plain:
            qkv = torch.unflatten(projected, -1, (3, self.num_heads, -1))
            operators = attention_qkvpacked, self._qkvpacked_with_stats
            return self._run(finish, *operators, qkv, **params)
        q, k, v = _split_heads(projected, self.num_heads, 3)
        return self._attend(finish, self.q_norm(q), self.k_norm(k), v, attn_mask, **params)


class _RotaryAttention(_TimmCapturing):
    """AttentionRope and EvaAttention, which differ in how they project."""

    def _split_inputs(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        if self.qkv is not None:
            return _split_heads(_biased_qkv(self, x), self.num_heads, 3)
        # Keys and values may have fewer heads.
        projected = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        return tuple(t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in projected)

    def _rotate(self: Any, t: Tensor, rope: Tensor) -> Tensor:
        before, rest = t.split([self.num_prefix_tokens, t.shape[2] - self.num_prefix_tokens], dim=2)
        rest = apply_rot_embed_cat(rest, rope, half=self.rotate_half)
        return torch.cat([before, rest], dim=2)

    def forward(
        self: Any,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend between the tokens of (B, N, dim), as timm's."""
        gate = None if self.gate is None else self.gate(x).sigmoid()
        q, k, v = self._split_inputs(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (self._rotate(t, rope).type_as(v) for t in (q, k))
        return self._attend(
            partial(self._project, gate=gate),
            *(q, k, v, attn_mask),
            dropout_p=self._dropout_p(),
            is_causal=is_causal,
            enable_gqa=self.qkv is None and self.k_proj.out_features != self.q_proj.out_features,
        )


class AttentionRope(_RotaryAttention, layers.AttentionRope):
    """timm.layers.AttentionRope."""


class EvaAttention(_RotaryAttention, eva.EvaAttention):
    """timm.models.eva.EvaAttention."""


class BeitAttention(_TimmCapturing, beit.Attention):
    """timm.models.beit.Attention."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Attend between the tokens of (B, N, dim), with a bias for relative positions."""
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()
            bias = own if bias is None else own + bias
        q, k, v = _split_heads(_biased_qkv(self, x), self.num_heads, 3)
        return self._attend(self._project, q, k, v, bias, dropout_p=self._dropout_p())


class TntAttention(_TimmCapturing, tnt.Attention):
    """timm.models.tnt.Attention, between patches and between the pixels of a patch."""

    def _prepare(self) -> None:
        if self.hidden_dim != self.v.out_features:
            raise ValueError(
                f"values must have the width of queries and keys, {self.hidden_dim}, "
                f"got {self.v.out_features}"
            )
        super()._prepare()

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the tokens of (B, N, dim)."""
        q, k = _split_heads(self.qk(x), self.num_heads, 2)
        (v,) = _split_heads(self.v(x), self.num_heads)
        return self._attend(self._project, q, k, v, dropout_p=self._dropout_p())


class OutlookAttention(_TimmCapturing, volo.OutlookAttention):
    """timm.models.volo.OutlookAttention."""

    attends = "neighbours"
    _drops = False

    def _prepare(self) -> None:
        check_window(self.kernel_size, self.stride, self.padding)
        super()._prepare()

    def columns(self, tokens: int) -> int:
        """Return how many entries a softmax row has: the pixels of a window."""
        return self.kernel_size**2

    def forward(self, x: Tensor) -> Tensor:
        """Attend inside the windows of (B, Y, X, dim), and sum over them."""
        value = self.v(x).unflatten(-1, (self.num_heads, -1))
        pooled = self.pool(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        places = self.kernel_size**2
        logits = self.attn(pooled).unflatten(-1, (self.num_heads, places, places))
        return self._run_operator(
            self._project,
            *(outlook_attention, outlook_attention_with_stats, value, logits),
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
        )


class VoloAttention(_TimmCapturing, volo.Attention):
    """timm.models.volo.Attention."""

    _plain = True

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the pixels of (B, Y, X, dim)."""

        def of_map(heads: Tensor) -> Tensor:
            return self._project(heads.unflatten(1, x.shape[1:3]))

        qkv = _qkvpacked(self.qkv(x).flatten(1, 2), self.num_heads)
        return self._attend_qkvpacked(of_map, qkv, dropout_p=self._dropout_p())


class XCA(_ChannelAttention, xcit.XCA):
    """timm.models.xcit.XCA."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the channels of (B, N, dim)."""
        qkv = _qkvpacked(self.qkv(x), self.num_heads)
        operators = cross_covariance_attention, cross_covariance_attention_with_stats
        return self._run_operator(self._project, *operators, qkv, self.temperature)


class DavitChannelAttention(_ChannelAttention, davit.ChannelAttention):
    """timm.models.davit.ChannelAttention."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the channels of (B, N, dim)."""
        qkv = _qkvpacked(self.qkv(x), self.num_heads)
        return self._run_operator(
            self._project, channel_attention, channel_attention_with_stats, qkv
        )


class DavitWindowAttention(_WindowedAttention, davit.WindowAttention):
    """timm.models.davit.WindowAttention."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the tokens of each window, (B * windows, N, dim)."""
        return self._attend_qkvpacked(self._project, _qkvpacked(self.qkv(x), self.num_heads))


class DavitSpatialBlock(_WindowBlock, davit.SpatialBlock):
    """timm.models.davit.SpatialBlock, of (B, dim, Y, X)."""

    _rows_axis = 2


class SwinBlock(_WindowBlock, swin_transformer.SwinTransformerBlock):
    """timm.models.swin_transformer.SwinTransformerBlock, of (B, Y, X, dim)."""

    _rows_axis = 1


class SwinWindowAttention(_WindowedAttention, swin_transformer.WindowAttention):
    """timm.models.swin_transformer.WindowAttention."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend between the tokens of each window, (B * windows, N, dim).

        The mask of shifted windows, (windows, N, N), is added to the bias.
        """
        bias = self._get_rel_pos_bias()
        if mask is not None:
            bias = (bias + mask[:, None]).repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
        q, k, v = _split_heads(self.qkv(x), self.num_heads, 3)
        return self._attend(self._project, q, k, v, bias, dropout_p=self._dropout_p())


_TOKENS = "attention between tokens"
_WINDOWS = "attention between the tokens of each window that timm cuts"
_RULES = tuple(
    swap.Rule(cls, new_class, what, new_class._prepare)
    for cls, new_class, what in (
        (layers.Attention, Attention, _TOKENS),
        (layers.AttentionRope, AttentionRope, "attention between rotated tokens"),
        (eva.EvaAttention, EvaAttention, "attention between rotated tokens"),
        (beit.Attention, BeitAttention, f"{_TOKENS}, positions as a mask"),
        (xcit.XCA, XCA, "cross_covariance_attention between channels"),
        (tnt.Attention, TntAttention, "attention between patches, or the pixels of each"),
        (volo.OutlookAttention, OutlookAttention, "outlook_attention between neighbours"),
        (volo.Attention, VoloAttention, _TOKENS),
        (davit.WindowAttention, DavitWindowAttention, _WINDOWS),
        (davit.ChannelAttention, DavitChannelAttention, "channel_attention between channels"),
        (
            swin_transformer.WindowAttention,
            SwinWindowAttention,
            f"{_WINDOWS}, positions and shifts as a mask",
        ),
    )
)
_BLOCKS = (
    swap.Rule(davit.SpatialBlock, DavitSpatialBlock),
    swap.Rule(swin_transformer.SwinTransformerBlock, SwinBlock),
)
