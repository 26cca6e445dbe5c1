"""Our attention inside timm's models: one model at a time, in place, weights kept.

    from leaner_kernels.adapters import timm

    print(timm.use(model))  # what was swapped, what was left and why
    ...
    timm.undo(model)

Each class below is timm's of the same name (and file), with a forward that calls our operator, and
with what ``KappaMonitor`` needs. Where its rows are particular:

- Swin and DaViT cut windows before they call their attention, so plain ``attention`` serves. Kappa
  is that of all tokens of a sample, as docs/kappa.md defines it: the blocks, swapped as well, set
  the size of the map. Without them (a block whose forward was replaced on the instance) it is that
  of single windows; ``tokens`` of a row shows which.
- The inner attention of TNT is between the pixels of a patch, so its kappa is that of patches.
- Class attention has one row, so its kappa is 1; its entropy and logits hold more.
- Heads are captured as attention leaves them: before ``norm`` and ``gate`` where there are any.

``QKClip`` and ``ConditioningPenalty`` work on the modules whose ``qkv`` makes the queries and keys
as they are used, not on those that normalize, rotate or bias them apart.
"""

import math
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
from torch.nn import functional as F

from ..nn.capture import Capturing
from ..ops._checks import MAX_HEAD_DIM_CUDA
from ..ops.attention import attention, attention_qkvpacked
from ..ops.attention.checks import is_causal_bias
from ..ops.covariance import (
    channel_attention,
    channel_attention_with_stats,
    cross_covariance_attention,
    cross_covariance_attention_with_stats,
)
from ..ops.outlook import (
    check_window,
    outlook_attention,
    outlook_attention_with_stats,
)
from ..ops.statistics import AttentionStats, evenly_spaced
from . import swap

# torch.fx traces through the modules below as through timm's own: each operator is one node, and
# nothing else decides by what a tensor holds.
torch.fx.wrap("attention_qkvpacked")
torch.fx.wrap("channel_attention")
torch.fx.wrap("cross_covariance_attention")
torch.fx.wrap("outlook_attention")

# The oldest timm that the forwards below were run with: they read attributes of its classes.
if tuple(map(int, version.split(".")[:3])) < (1, 0, 29):
    raise ImportError(f"timm must be 1.0.29 or newer, got {version}")

__all__ = ["Attention", "undo", "use"]


def use(model: nn.Module) -> swap.Swapped:
    """Swap the attention of a timm model, or of any model with timm's modules, for ours.

    Args:
        model: changed in place: its attention modules get our forward. Parameters, names, state
            dict, hooks and optimizers stay as they are, and so does what the model computes.

    Returns:
        What was swapped, what was left and why, and on which parts of it hooks are not called any
        more, as on ``attn_drop``: probabilities are never stored. ``undo()`` takes it back.

    Raises:
        ValueError: nothing can be swapped; the model is as it was.

    Call it before ``fully_shard`` of attention modules themselves, and before what replaces the
    forward of a module; a model compiled before compiles again. timm's ``fused_attn`` makes no
    difference, and a second call none either.
    """
    return swap.swap(model, (*_RULES, *_BLOCKS), _UNSUPPORTED)


def undo(model: nn.Module) -> None:
    """Give all that ``use`` swapped, in this model or the one that it is a copy of, back to timm.

    Args:
        model: changed in place; weights stay, as trained.

    Raises:
        ValueError: a module has been wrapped since, as by ``fully_shard``.
    """
    swap.undo(model, (*_RULES, *_BLOCKS))


@torch.fx.wrap
def _attention_with_any_mask(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **params: Any
) -> Tensor:
    """Call ``attention`` with a mask of any dtype."""
    return attention(q, k, v, _mask_like(attn_mask, q), **params)


def _mask_like(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None or mask.dtype == torch.bool or is_causal_bias(mask):
        return mask
    return mask.to(q.dtype)


class _TimmCapturing(Capturing):
    """A timm module that calls our operator, with statistics where it captures or tracks logits."""

    # QKClip and ConditioningPenalty take the modules that have it on the instance: ours have it
    # where ``qkv`` alone makes the queries and keys, and nothing is done to them afterwards.
    track_logits = False
    _plain: Any = False

    def _prepare(self: Any) -> None:
        own = hasattr(self, "head_dim")
        head_dim = self.head_dim if own else self.proj.in_features // self.num_heads
        self._set_up(self.qkv.in_features, head_dim, self._plain)

    def _set_up(self: Any, dim: int, head_dim: int, plain: bool = False) -> None:
        self._set_sizes(dim, self.num_heads, head_dim)
        if not plain:
            del self.track_logits

    def _dropout_p(self: Any) -> float:
        return self.attn_drop.p if self.training else 0.0

    def _project(self: Any, heads: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return (..., dim) of (..., H, D)."""
        a = heads.flatten(-2)
        if hasattr(self, "norm"):
            a = self.norm(a)
        a = self.proj(a if gate is None else a * gate)
        return self.proj_drop(a) if hasattr(self, "proj_drop") else a

    def _attend_qkvpacked(self, finish: Any, qkv: Tensor, **params: Any) -> Tensor:
        """Attend within each batch entry of (B, N, 3, H, D); ``finish`` gets (B, N, H, D)."""
        return self._run(finish, attention_qkvpacked, self._qkvpacked_with_stats, qkv, **params)

    def _attend(
        self,
        finish: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        **params: Any,
    ) -> Tensor:
        """Attend as ``attention`` does, from (B, H, N, D); ``finish`` gets (B, N, H, D)."""

        def of_rows(out: Tensor) -> Tensor:
            return finish(out.transpose(1, 2))

        def measure(q: Tensor, k: Tensor, v: Tensor, mask: Any, **params: Any) -> AttentionStats:
            return self._attention_with_stats(q, k, v, _mask_like(mask, q), **params)

        tensors = q, k, v, attn_mask
        return self._run(of_rows, _attention_with_any_mask, measure, *tensors, **params)


def _refuse_dropout(module: Any) -> None:
    """Raise ValueError for dropout of probabilities, which our operator here does not have."""
    if module.attn_drop.p > 0:
        raise ValueError(f"no dropout of these probabilities: attn_drop is {module.attn_drop.p}")


def _split_heads(projected: Tensor, heads: int, parts: int = 1) -> tuple[Tensor, ...]:
    """Return ``parts`` times (B, H, N, D), views of (B, N, parts * H * D)."""
    return projected.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _qkvpacked(projected: Tensor, heads: int) -> Tensor:
    """Return (B, N, 3, H, D), a view of (B, N, 3 * H * D)."""
    return projected.unflatten(-1, (3, heads, -1))


def _biased_qkv(module: Any, x: Tensor) -> Tensor:
    """Project as BEiT and EVA do, whose keys have no bias that is trained."""
    if getattr(module, "q_bias", None) is None:
        return module.qkv(x)
    bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
    if module.qkv_bias_separate:
        return module.qkv(x) + bias
    return F.linear(x, module.qkv.weight, bias)


class _ClassAttention(_TimmCapturing):
    """The class attention of CaiT, XCiT and VOLO: one row."""

    def _prepare(self: Any) -> None:
        self._set_up(self.q.in_features, self.q.out_features // self.num_heads)
        self.num_keys = 1

    def columns(self: Any, tokens: int) -> int:
        """Return how many entries a softmax row has: those of the newest captured forward."""
        return self.num_keys

    def _attend_from_first(self: Any, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from the first token of (B, N, dim) to (B, H, N, D) of all: (B, 1, dim)."""
        if self.capture_samples > 0:
            self.num_keys = x.shape[1]
        (q,) = _split_heads(self.q(x[:, :1]), self.num_heads)
        return self._attend(self._project, q, k, v, dropout_p=self._dropout_p())


class _ChannelAttention(_TimmCapturing):
    attends = "channels"

    def _prepare(self: Any) -> None:
        # DaViT's second version calls them groups.
        heads = self.groups if hasattr(self, "groups") else self.num_heads
        head_dim = self.qkv.in_features // heads
        if head_dim > (most := MAX_HEAD_DIM_CUDA):
            raise ValueError(f"heads of at most {most} channels on a GPU, got {head_dim}")
        self._set_sizes(self.qkv.in_features, heads, head_dim)
        del self.track_logits

    def columns(self, tokens: int) -> int:
        """Return how many entries a softmax row has: the channels of a head."""
        return self.head_dim


class _WindowedAttention(_TimmCapturing):
    """Attention on windows, (B * windows, N, dim), those of a map side by side.

    A captured batch entry is a map where a ``_WindowBlock`` around sets ``map_size``, else a
    window.
    """

    attends = "windows"

    def _set_up(self: Any, dim: int, head_dim: int, plain: bool = False) -> None:
        super()._set_up(dim, head_dim, plain)
        self.map_size = None

    def columns(self: Any, tokens: int) -> int:
        """Return how many entries a softmax row has: the tokens of a window."""
        return self.window_size[0] * self.window_size[1]

    def _select_sample(self: Any, batch: int, device: torch.device) -> tuple[Tensor | None, bool]:
        if self.capture_samples <= 0:
            return super()._select_sample(batch, device)
        maps, windows = 0, 0
        if self.map_size is not None:
            maps, windows = self.map_size[0], math.prod(self._windows_of_map())
        if batch == 0 or batch != maps * windows:
            # No block around, or one that never came to its attention.
            self.map_size = None
            return super()._select_sample(batch, device)
        sample = evenly_spaced(maps, self.capture_samples, device)
        places = torch.arange(windows, dtype=torch.int32, device=device)
        return (sample[:, None] * windows + places).flatten(), True

    @torch.no_grad()
    def _store_capture(
        self: Any,
        stats: AttentionStats,
        sample: Tensor | None,
        output: Tensor,
        **others: Any,
    ) -> None:
        if sample is not None and self.map_size is not None:
            output = self._windows_to_maps(output.index_select(0, sample))
            stats = stats._replace(heads=self._windows_to_maps(stats.heads))
            sample = torch.arange(output.shape[0], dtype=torch.int32, device=output.device)
            self.map_size = None
        super()._store_capture(stats, sample, output, **others)

    def _windows_of_map(self: Any) -> tuple[int, int]:
        sizes = zip(self.map_size[1:], self.window_size)
        down, right = (-(-size // window) for size, window in sizes)
        return down, right

    def _windows_to_maps(self: Any, windows: Tensor) -> Tensor:
        """Return (S, Y * X, width), without the filling, of (S * windows, N, width)."""
        _, rows, cols = self.map_size
        down, right = self._windows_of_map()
        tiles = windows.unflatten(0, (-1, down, right)).unflatten(3, self.window_size)
        whole = tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return whole[:, :rows, :cols].flatten(1, 2)


class _WindowBlock(nn.Module):
    """A block that cuts windows, and sets ``map_size`` of its attention: (B, Y, X)."""

    def _set_map_size(self: Any, x: Tensor, rows_axis: int) -> None:
        # The block may outlive the swap of its attention, where ``fully_shard`` has wrapped it.
        if getattr(self.attn, "capture_samples", 0) > 0:
            self.attn.map_size = x.shape[0], *x.shape[rows_axis : rows_axis + 2]


class Attention(_TimmCapturing, layers.Attention):
    """timm.layers.Attention; also for ``VisionTransformer(attn_layer=Attention)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        layers.Attention.__init__(self, *args, **kwargs)
        self._prepare()

    @property
    def _plain(self) -> bool:
        return isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend between the tokens of (B, N, dim), as timm's."""
        gate = None if self.gate is None else self.gate(x).sigmoid()
        finish = partial(self._project, gate=gate)
        params = {"dropout_p": self._dropout_p(), "is_causal": is_causal}
        projected = self.qkv(x)
        if attn_mask is None and self._plain:
            return self._attend_qkvpacked(finish, _qkvpacked(projected, self.num_heads), **params)
        q, k, v = _split_heads(projected, self.num_heads, 3)
        return self._attend(finish, self.q_norm(q), self.k_norm(k), v, attn_mask, **params)


class RelPosAttention(_TimmCapturing, vision_transformer_relpos.RelPosAttention):
    """timm.models.vision_transformer_relpos.RelPosAttention."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Attend between the tokens of (B, N, dim), with a bias for relative positions."""
        own: Any = self.rel_pos
        # As timm's fused attention, which reads the shared bias only where there is no other.
        bias = shared_rel_pos if own is None else own.get_bias()
        q, k, v = _split_heads(self.qkv(x), self.num_heads, 3)
        dropout_p = self._dropout_p()
        return self._attend(
            self._project, self.q_norm(q), self.k_norm(k), v, bias, dropout_p=dropout_p
        )


class _RotaryAttention(_TimmCapturing):
    """AttentionRope and EvaAttention, which differ in how they project."""

    def _prepare(self: Any) -> None:
        projection = self.q_proj if self.qkv is None else self.qkv
        self._set_up(projection.in_features, self.head_dim)

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
        projected, dropout_p = _biased_qkv(self, x), self._dropout_p()
        if bias is None:
            qkv = _qkvpacked(projected, self.num_heads)
            return self._attend_qkvpacked(self._project, qkv, dropout_p=dropout_p)
        q, k, v = _split_heads(projected, self.num_heads, 3)
        return self._attend(self._project, q, k, v, bias, dropout_p=dropout_p)


class ClassAttn(_ClassAttention, cait.ClassAttn):
    """timm.models.cait.ClassAttn, which XCiT uses as well."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend from the first token of (B, N, dim) to all: (B, 1, dim)."""
        (k,), (v,) = (_split_heads(p(x), self.num_heads) for p in (self.k, self.v))
        return self._attend_from_first(x, k, v)


class VoloClassAttention(_ClassAttention, volo.ClassAttention):
    """timm.models.volo.ClassAttention."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend from the first token of (B, N, dim) to all: (B, 1, dim)."""
        k, v = _split_heads(self.kv(x), self.num_heads, 2)
        return self._attend_from_first(x, k, v)


class TntAttention(_TimmCapturing, tnt.Attention):
    """timm.models.tnt.Attention, of patches and of the pixels of each."""

    def _prepare(self) -> None:
        if self.hidden_dim != self.v.out_features:
            raise ValueError(
                f"values must be as wide as queries and keys, {self.hidden_dim} in all, "
                f"got {self.v.out_features}"
            )
        self._set_up(self.qk.in_features, self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the tokens of (B, N, dim)."""
        q, k = _split_heads(self.qk(x), self.num_heads, 2)
        (v,) = _split_heads(self.v(x), self.num_heads)
        return self._attend(self._project, q, k, v, dropout_p=self._dropout_p())


class OutlookAttention(_TimmCapturing, volo.OutlookAttention):
    """timm.models.volo.OutlookAttention."""

    attends = "neighbours"

    def _prepare(self) -> None:
        _refuse_dropout(self)
        check_window(self.kernel_size, self.stride, self.padding)
        self._set_up(self.v.in_features, self.v.out_features // self.num_heads)

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

    def _prepare(self) -> None:
        _refuse_dropout(self)
        super()._prepare()

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


class DavitChannelAttentionV2(_ChannelAttention, davit.ChannelAttentionV2):
    """timm.models.davit.ChannelAttentionV2."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the channels of (B, N, dim)."""
        # Our operator scores keys against values and mixes queries, as the first version does.
        qkv = _qkvpacked(self.qkv(x), self.num_heads).roll(1, dims=2)
        width = x.shape[1] if self.dynamic_scale else self.head_dim
        operators = channel_attention, channel_attention_with_stats
        return self._run_operator(self._project, *operators, qkv, scale=width**-0.5)


class DavitWindowAttention(_WindowedAttention, davit.WindowAttention):
    """timm.models.davit.WindowAttention."""

    def _prepare(self) -> None:
        self._set_up(self.dim, self.dim // self.num_heads, plain=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the tokens of each window, (B * windows, N, dim)."""
        return self._attend_qkvpacked(self._project, _qkvpacked(self.qkv(x), self.num_heads))


class DavitSpatialBlock(_WindowBlock, davit.SpatialBlock):
    """timm.models.davit.SpatialBlock."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what timm's does of (B, dim, Y, X)."""
        self._set_map_size(x, rows_axis=2)
        return super().forward(x)


class SwinWindowAttention(_WindowedAttention, swin_transformer.WindowAttention):
    """timm.models.swin_transformer.WindowAttention."""

    def _prepare(self) -> None:
        self._set_up(self.dim, self.proj.in_features // self.num_heads, plain=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend between the tokens of each window, (B * windows, N, dim).

        The mask of shifted windows, (windows, N, N), is added to the bias.
        """
        bias = self._get_rel_pos_bias()
        if mask is not None:
            bias = (bias + mask[:, None]).repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
        q, k, v = _split_heads(self.qkv(x), self.num_heads, 3)
        return self._attend(self._project, q, k, v, bias, dropout_p=self._dropout_p())


class SwinBlock(_WindowBlock, swin_transformer.SwinTransformerBlock):
    """timm.models.swin_transformer.SwinTransformerBlock."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what timm's does of (B, Y, X, dim)."""
        self._set_map_size(x, rows_axis=1)
        return super().forward(x)


def _rule(cls: type[nn.Module], new_class: Any, what: str) -> swap.Rule:
    return swap.Rule(cls, new_class, what, new_class._prepare, silent=_silent)


def _silent(module: Any) -> list[str]:
    """Return the parts of a swapped module that are not called, as in timm's fused attention."""
    names = ["attn_drop", "softmax", "rel_pos", "unfold"]
    names += ["q_norm", "k_norm"] if getattr(module, "_plain", False) else []
    return [name for name, _ in module.named_children() if name in names]


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
_UNSUPPORTED: dict[type[nn.Module], str] = {
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
