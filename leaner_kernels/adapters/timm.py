"""Our attention inside timm's models: one model at a time, in place, weights kept.

    from leaner_kernels.adapters import timm

    print(timm.use(model))  # what was swapped, what was left and why
    ...
    timm.undo(model)

Each class below is timm's of the same name (and file), with a forward that calls our operator, and
with what ``KappaMonitor`` needs. Where its rows are particular:

- Swin and DaViT cut windows before they call their attention, so plain ``attention`` serves. Kappa
  is that of all tokens of a sample, as docs/kappa.md defines it: the blocks, swapped as well, tell
  of which map the windows are. Without them (a block whose forward was replaced on the instance)
  it is that of single windows; ``tokens`` of a row tells which.
- The inner attention of TNT is between the pixels of a patch, so its kappa is that of patches.
- Class attention has one row, so its kappa is 1; its entropy and logits tell more.
- Heads are captured as attention leaves them: before ``norm`` and ``gate`` where there are any.

``QKClip`` and ``ConditioningPenalty`` work on the modules whose ``qkv`` makes the queries and keys
as they are used, not on those that normalize, rotate or bias them apart.
"""

from functools import partial
from typing import Any

import torch
from timm.layers import attention as layers
from timm.layers.attention_pool import AttentionPoolLatent
from timm.layers.diff_attention import DiffAttention
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models import (
    beit,
    cait,
    davit,
    eva,
    mvitv2,
    pvt_v2,
    swin_transformer,
    swin_transformer_v2,
    swin_transformer_v2_cr,
    tnt,
    twins,
    vision_transformer,
    vision_transformer_relpos,
    vision_transformer_sam,
    volo,
    xcit,
)
from timm.version import __version__ as version
from torch import Tensor, nn

from leaner_kernels.adapters import swap
from leaner_kernels.adapters._timm_bases import (
    BetweenChannels,
    InWindows,
    OfClass,
    OfWindows,
    OnOurs,
    biased_qkv,
    packed_heads,
    refuse_dropout,
    split_heads,
)
from leaner_kernels.ops.covariance import (
    channel_attention,
    channel_attention_with_stats,
    cross_covariance_attention,
    cross_covariance_attention_with_stats,
)
from leaner_kernels.ops.outlook import (
    check_window,
    outlook_attention,
    outlook_attention_with_stats,
)

# Each is one node to torch.fx.
torch.fx.wrap("channel_attention")
torch.fx.wrap("cross_covariance_attention")
torch.fx.wrap("outlook_attention")

# The forwards below read attributes that timm's classes got only then.
if tuple(map(int, version.split(".")[:3])) < (1, 0, 31):
    raise ImportError(f"timm must be 1.0.31 or newer, got {version}")

__all__ = ["Attention", "undo", "use"]


def use(model: nn.Module) -> swap.Swapped:
    """Swap the attention of a timm model, or of any model with timm's modules, for ours.

    Args:
        model: changed in place: its attention modules get our forward. Parameters, names, state
            dict, hooks and optimizers stay as they are, and so does what the model computes.

    Returns:
        What was swapped, and what was left and why; ``undo()`` takes it back.

    Raises:
        ValueError: nothing can be swapped; the model is as it was.

    Call it before ``fully_shard`` of attention modules themselves, and before what replaces the
    forward of a module; a model compiled before compiles again. What timm's ``fused_attn`` says
    makes no difference, and a second call none either.
    """
    return swap.swap(model, (*_RULES, *_BLOCKS), _KNOWN)


def undo(model: nn.Module) -> None:
    """Give all that ``use`` swapped, in this model or the one that it is a copy of, back to timm.

    Args:
        model: changed in place; weights stay, as trained.

    Raises:
        ValueError: a module has been wrapped since, as by ``fully_shard``.
    """
    swap.undo(model, (*_RULES, *_BLOCKS))


class Attention(OnOurs, layers.Attention):
    """timm.layers.Attention; also for ``VisionTransformer(attn_layer=Attention)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        layers.Attention.__init__(self, *args, **kwargs)
        self._prepare()

    def _prepare(self) -> None:
        self._size(self.qkv.in_features, self.head_dim, plain=self._norms_nothing())

    def _norms_nothing(self) -> bool:
        return isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend between the tokens of (B, N, dim), as timm's."""
        gate = None if self.gate is None else self.gate(x).sigmoid()
        finish = partial(self._finish, gate=gate)
        params = {"dropout_p": self._dropout_p(), "is_causal": is_causal}
        projected = self.qkv(x)
        if attn_mask is None and self._norms_nothing():
            return self._attend_packed(finish, packed_heads(projected, self.num_heads), **params)
        q, k, v = split_heads(projected, self.num_heads, 3)
        return self._attend(finish, self.q_norm(q), self.k_norm(k), v, attn_mask, **params)


class RelPosAttention(OnOurs, vision_transformer_relpos.RelPosAttention):
    """timm.models.vision_transformer_relpos.RelPosAttention."""

    def _prepare(self) -> None:
        self._size(self.qkv.in_features, self.head_dim)

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Attend between the tokens of (B, N, dim), with a bias for relative positions."""
        own: Any = self.rel_pos
        # As timm's fused attention, which asks for the shared bias only where there is no other.
        bias = shared_rel_pos if own is None else own.get_bias()
        q, k, v = split_heads(self.qkv(x), self.num_heads, 3)
        dropout_p = self._dropout_p()
        return self._attend(
            self._finish, self.q_norm(q), self.k_norm(k), v, bias, dropout_p=dropout_p
        )


class _Rotary(OnOurs):
    """AttentionRope and EvaAttention, which differ in how they project."""

    def _prepare(self: Any) -> None:
        projection = self.q_proj if self.qkv is None else self.qkv
        self._size(projection.in_features, self.head_dim)

    def _queries_keys_values(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        if self.qkv is not None:
            return split_heads(biased_qkv(self, x), self.num_heads, 3)
        # Keys and values may have fewer heads.
        widths = (p(x).unflatten(-1, (-1, self.head_dim)) for p in self._projections())
        return tuple(each.transpose(1, 2) for each in widths)

    def _projections(self: Any) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj

    def _shares_keys(self: Any) -> bool:
        return self.qkv is None and self.k_proj.out_features != self.q_proj.out_features

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
        q, k, v = self._queries_keys_values(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (self._rotate(t, rope).type_as(v) for t in (q, k))
        return self._attend(
            partial(self._finish, gate=gate),
            *(q, k, v, attn_mask),
            dropout_p=self._dropout_p(),
            is_causal=is_causal,
            enable_gqa=self._shares_keys(),
        )


class AttentionRope(_Rotary, layers.AttentionRope):
    """timm.layers.AttentionRope."""


class EvaAttention(_Rotary, eva.EvaAttention):
    """timm.models.eva.EvaAttention."""


class BeitAttention(OnOurs, beit.Attention):
    """timm.models.beit.Attention."""

    def _prepare(self) -> None:
        self._size(self.qkv.in_features, self.proj.in_features // self.num_heads)

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Attend between the tokens of (B, N, dim), with a bias for relative positions."""
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()
            bias = own if bias is None else own + bias
        projected, dropout_p = biased_qkv(self, x), self._dropout_p()
        if bias is None:
            qkv = packed_heads(projected, self.num_heads)
            return self._attend_packed(self._finish, qkv, dropout_p=dropout_p)
        q, k, v = split_heads(projected, self.num_heads, 3)
        return self._attend(self._finish, q, k, v, bias, dropout_p=dropout_p)


class ClassAttn(OfClass, cait.ClassAttn):
    """timm.models.cait.ClassAttn, which XCiT uses as well."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend from the first token of (B, N, dim) to all: (B, 1, dim)."""
        (k,), (v,) = (split_heads(p(x), self.num_heads) for p in (self.k, self.v))
        return self._attend_from_first(x, k, v)


class VoloClassAttention(OfClass, volo.ClassAttention):
    """timm.models.volo.ClassAttention."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend from the first token of (B, N, dim) to all: (B, 1, dim)."""
        k, v = split_heads(self.kv(x), self.num_heads, 2)
        return self._attend_from_first(x, k, v)


class TntAttention(OnOurs, tnt.Attention):
    """timm.models.tnt.Attention, of patches and of the pixels of each."""

    def _prepare(self) -> None:
        if self.hidden_dim != self.v.out_features:
            raise ValueError(
                f"values must be as wide as queries and keys, {self.hidden_dim} in all, "
                f"got {self.v.out_features}"
            )
        self._size(self.qk.in_features, self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the tokens of (B, N, dim)."""
        q, k = split_heads(self.qk(x), self.num_heads, 2)
        (v,) = split_heads(self.v(x), self.num_heads)
        return self._attend(self._finish, q, k, v, dropout_p=self._dropout_p())


class OutlookAttention(OnOurs, volo.OutlookAttention):
    """timm.models.volo.OutlookAttention."""

    attends = "neighbours"

    def _prepare(self) -> None:
        refuse_dropout(self)
        check_window(self.kernel_size, self.stride, self.padding)
        self._size(self.v.in_features, self.v.out_features // self.num_heads)

    def columns(self, tokens: int) -> int:
        """Return how many entries a softmax row has: the pixels of a window."""
        return self.kernel_size**2

    def forward(self, x: Tensor) -> Tensor:
        """Attend inside the windows of (B, Y, X, dim), and sum over them."""
        value = self.v(x).unflatten(-1, (self.num_heads, -1))
        pooled = self.pool(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        places = self.kernel_size**2
        logits = self.attn(pooled).unflatten(-1, (self.num_heads, places, places))
        return self._run(
            self._finish,
            *(outlook_attention, outlook_attention_with_stats, value, logits),
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
        )


class VoloAttention(OnOurs, volo.Attention):
    """timm.models.volo.Attention."""

    def _prepare(self) -> None:
        self._size(self.qkv.in_features, self.proj.in_features // self.num_heads, plain=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the pixels of (B, Y, X, dim)."""

        def of_map(heads: Tensor) -> Tensor:
            return self._finish(heads.unflatten(1, x.shape[1:3]))

        qkv = packed_heads(self.qkv(x).flatten(1, 2), self.num_heads)
        return self._attend_packed(of_map, qkv, dropout_p=self._dropout_p())


class XCA(BetweenChannels, xcit.XCA):
    """timm.models.xcit.XCA."""

    def _prepare(self) -> None:
        refuse_dropout(self)
        super()._prepare()

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the channels of (B, N, dim)."""
        qkv = packed_heads(self.qkv(x), self.num_heads)
        operators = cross_covariance_attention, cross_covariance_attention_with_stats
        return self._run(self._finish, *operators, qkv, self.temperature)


class DavitChannelAttention(BetweenChannels, davit.ChannelAttention):
    """timm.models.davit.ChannelAttention."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the channels of (B, N, dim)."""
        qkv = packed_heads(self.qkv(x), self.num_heads)
        return self._run(self._finish, channel_attention, channel_attention_with_stats, qkv)


class DavitChannelAttentionV2(BetweenChannels, davit.ChannelAttentionV2):
    """timm.models.davit.ChannelAttentionV2."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the channels of (B, N, dim)."""
        # Our operator scores keys against values and mixes queries, as the first version does.
        qkv = packed_heads(self.qkv(x), self.num_heads).roll(1, dims=2)
        width = x.shape[1] if self.dynamic_scale else self.head_dim
        operators = channel_attention, channel_attention_with_stats
        return self._run(self._finish, *operators, qkv, scale=width**-0.5)


class DavitWindowAttention(InWindows, davit.WindowAttention):
    """timm.models.davit.WindowAttention."""

    def _prepare(self) -> None:
        self._size(self.dim, self.dim // self.num_heads, plain=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the tokens of each window, (B * windows, N, dim)."""
        return self._attend_packed(self._finish, packed_heads(self.qkv(x), self.num_heads))


class DavitSpatialBlock(OfWindows, davit.SpatialBlock):
    """timm.models.davit.SpatialBlock."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what timm's does of (B, dim, Y, X)."""
        self._tell(x, rows_axis=2)
        return super().forward(x)


class SwinWindowAttention(InWindows, swin_transformer.WindowAttention):
    """timm.models.swin_transformer.WindowAttention."""

    def _prepare(self) -> None:
        self._size(self.dim, self.proj.in_features // self.num_heads, plain=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend between the tokens of each window, (B * windows, N, dim).

        The mask of shifted windows, (windows, N, N), is added to the bias.
        """
        bias = self._get_rel_pos_bias()
        if mask is not None:
            each = bias + mask[:, None]
            bias = each.repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
        q, k, v = split_heads(self.qkv(x), self.num_heads, 3)
        return self._attend(self._finish, q, k, v, bias, dropout_p=self._dropout_p())


class SwinBlock(OfWindows, swin_transformer.SwinTransformerBlock):
    """timm.models.swin_transformer.SwinTransformerBlock."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what timm's does of (B, Y, X, dim)."""
        self._tell(x, rows_axis=1)
        return super().forward(x)


def _rule(cls: type[nn.Module], new_class: Any, what: str) -> swap.Rule:
    return swap.Rule(cls, new_class, what, new_class._prepare)


_WINDOWS = "attention between the tokens of each window that timm cuts"
_POSITIONS = "attention between tokens, positions as a mask"
_CLASS = "attention from the class token"
_RULES = (
    _rule(layers.Attention, Attention, "attention between tokens"),
    _rule(layers.AttentionRope, AttentionRope, "attention between rotated tokens"),
    _rule(eva.EvaAttention, EvaAttention, "attention between rotated tokens"),
    _rule(beit.Attention, BeitAttention, _POSITIONS),
    _rule(vision_transformer_relpos.RelPosAttention, RelPosAttention, _POSITIONS),
    _rule(xcit.XCA, XCA, "cross_covariance_attention between channels"),
    _rule(cait.ClassAttn, ClassAttn, _CLASS),
    _rule(tnt.Attention, TntAttention, "attention between patches, or the pixels of each"),
    _rule(volo.OutlookAttention, OutlookAttention, "outlook_attention between neighbours"),
    _rule(volo.Attention, VoloAttention, "attention between tokens"),
    _rule(volo.ClassAttention, VoloClassAttention, _CLASS),
    _rule(davit.WindowAttention, DavitWindowAttention, _WINDOWS),
    _rule(davit.ChannelAttention, DavitChannelAttention, "channel_attention between channels"),
    _rule(davit.ChannelAttentionV2, DavitChannelAttentionV2, "channel_attention between channels"),
    _rule(
        swin_transformer.WindowAttention,
        SwinWindowAttention,
        f"{_WINDOWS}, positions and shifts as a mask",
    ),
)
_BLOCKS = (
    swap.Rule(davit.SpatialBlock, DavitSpatialBlock),
    swap.Rule(swin_transformer.SwinTransformerBlock, SwinBlock),
)
_COSINES = "scores are cosines, with a learned temperature"
_FEWER_KEYS = "keys and values are of a smaller map"
_FUSED_MLP = "its attention and MLP share their projections"
_KNOWN: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: "leaner_kernels.adapters.pytorch swaps it",
    DiffAttention: "the difference of two softmaxes",
    AttentionPoolLatent: "pooling by learned queries",
    cait.TalkingHeadAttn: "talking heads: scores of all heads are mixed around the softmax",
    mvitv2.MultiScaleAttention: _FEWER_KEYS,
    pvt_v2.Attention: _FEWER_KEYS,
    swin_transformer_v2.WindowAttention: _COSINES,
    swin_transformer_v2_cr.WindowMultiHeadAttention: _COSINES,
    twins.GlobalSubSampleAttn: _FEWER_KEYS,
    vision_transformer.DiffParallelScalingBlock: _FUSED_MLP,
    vision_transformer.ParallelScalingBlock: _FUSED_MLP,
    vision_transformer_sam.Attention: "positions that depend on the queries",
}
