"""TNT with any number of heads of any size in each layer.

Paper: "Transformer in Transformer", Han et al. 2021 (arXiv:2103.00112); the lean configurations,
"Leaner Transformers: More Heads, Less Depth" (arXiv:2505.20802). Parameter names, shapes and
initialisation are those of timm's ``TNT`` (the later of its two forms): its weights load unchanged.

Sizes: B images, S pixels a side, P patches, N tokens (patches and class token), D embed_dim; in
each patch m sub-patches of width d, inner_dim; H heads of width E.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leaner_kernels import attention_qkvpacked
from leaner_kernels.nn import Capturing
from models.layers import (
    HeadDim,
    Initializer,
    Mlp,
    VisionModel,
    drop_path,
    head_layout,
    require,
    require_rates,
    require_sizes,
    rising,
)

INNER_MLP_RATIO = 4


class InnerAttention(nn.Module):
    """Self-attention of the sub-patches of each patch: (B * P, m, d) -> (B * P, m, d).

    ``KappaMonitor`` does not monitor it: a sequence here is one patch, so that the few entries of a
    batch that a monitor samples would be single patches of a few images; and depth is traded for
    heads only in the outer attention.
    """

    monitored = False

    def __init__(self, dim: int, heads: int, **factory):
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        width = heads * self.head_dim
        self.qk = nn.Linear(dim, 2 * width, bias=False, **factory)
        self.v = nn.Linear(dim, width, bias=False, **factory)
        self.proj = nn.Linear(width, dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projected heads."""
        return self.proj(attention_qkvpacked(_qkv(self, x)).flatten(2))


class OuterAttention(Capturing):
    """Self-attention of patches and class token: (B, N, D) -> (B, N, D)."""

    def __init__(self, dim: int, heads: int, head_dim: int, **factory):
        super().__init__(dim, heads, head_dim)
        width = heads * head_dim
        self.qk = nn.Linear(dim, 2 * width, bias=False, **factory)
        self.v = nn.Linear(dim, width, bias=False, **factory)
        self.proj = nn.Linear(width, dim, **factory)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Return the projected heads; ``skip``, as ``x``, is the stream they are added to."""

        def finish(heads: Tensor) -> Tensor:
            return self.proj(heads.flatten(2))

        operators = attention_qkvpacked, self._qkvpacked_with_stats
        return self._run(finish, *operators, _qkv(self, x), store={"skip": skip})


def _qkv(attention: InnerAttention | OuterAttention, x: Tensor) -> Tensor:
    """Return (B, N, 3, H, E) of x (B, N, D), for which q and k share a projection but not v.

    The weights, which are smaller than their outputs, are concatenated: one product reads ``x``
    once, and the gradients of all three are one tensor.
    """
    weight = torch.cat([attention.qk.weight, attention.v.weight])
    return F.linear(x, weight).unflatten(-1, (3, attention.num_heads, attention.head_dim))


class Block(nn.Module):
    """One layer: sub-patches attend in their patch, enter its token, and tokens attend."""

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        hidden: int,
        inner_dim: int,
        inner_heads: int,
        inside: int,
        drop_path: float,
        **factory,
    ):
        super().__init__()
        self.norm_in = nn.LayerNorm(inner_dim, **factory)
        self.attn_in = InnerAttention(inner_dim, inner_heads, **factory)
        self.norm_mlp_in = nn.LayerNorm(inner_dim, **factory)
        self.mlp_in = Mlp(inner_dim, INNER_MLP_RATIO * inner_dim, **factory)
        self.norm1_proj = nn.LayerNorm(inside, **factory)
        self.proj = nn.Linear(inside, dim, bias=False, **factory)
        self.norm2_proj = nn.LayerNorm(dim, **factory)
        self.norm_out = nn.LayerNorm(dim, **factory)
        self.attn_out = OuterAttention(dim, heads, head_dim, **factory)
        self.norm_mlp = nn.LayerNorm(dim, **factory)
        self.mlp = Mlp(dim, hidden, **factory)
        self.drop_path = drop_path

    def forward(self, pixels: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sub-patches (B * P, m, d) and the tokens (B, 1 + P, D), both changed."""
        pixels = pixels + self._dropped(self.attn_in(self.norm_in(pixels)))
        pixels = pixels + self._dropped(self.mlp_in(self.norm_mlp_in(pixels)))
        inside = pixels.reshape(len(x), x.shape[1] - 1, -1)
        inside = self.norm2_proj(self.proj(self.norm1_proj(inside)))
        # The class token, the first, has no sub-patches.
        x = x + F.pad(inside, (0, 0, 1, 0))
        # The attention only measures kappa with this stream, as if no sample were dropped.
        x = x + self._dropped(self.attn_out(self.norm_out(x), skip=x))
        return pixels, x + self._dropped(self.mlp(self.norm_mlp(x)))

    def _dropped(self, branch: Tensor) -> Tensor:
        return drop_path(branch, self.drop_path, self.training)


class PixelEmbed(nn.Module):
    """Cut (B, C, S, S) images into patches, and each into sub-patches: (B * P, m, d)."""

    def __init__(self, patch_size: int, stride: int, in_chans: int, inner_dim: int, **factory):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_chans, inner_dim, 7, stride=stride, padding=3, **factory)

    def forward(self, images: Tensor, pixel_pos: Tensor) -> Tensor:
        """Return the sub-patches, row by row, plus their positions (1, d, ...) in the patch."""
        size = self.patch_size
        patches = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        # Contiguous: otherwise the sums with it in every layer would keep its strides.
        return (self.proj(patches) + pixel_pos).flatten(2).transpose(1, 2).contiguous()


class TNT(VisionModel):
    """Classify images: (B, in_chans, image_size, image_size) -> (B, num_classes) logits.

    An inner transformer works on the sub-patches of every patch and feeds the token that stands for
    the patch in an outer one. Only the outer one is widened, split or made shallower.

    Args:
        image_size: pixels a side, a multiple of ``patch_size``.
        patch_size: pixels a side of one patch.
        in_chans: channels of an image.
        num_classes: number of logits.
        embed_dim: width D of a token.
        depth: number of layers, each with an inner and an outer part.
        heads: heads of every outer attention, or one number per layer.
        head_dim: width of one outer head, for all layers or one per layer. A number keeps it fixed,
            so the attention width ``heads * head_dim`` may differ from ``embed_dim`` ("widen").
            ``"split"`` divides the width among the heads: ``embed_dim // heads``, rounded down.
        mlp_ratio: hidden width of the outer feed-forward over ``embed_dim``, rounded down; that of
            the inner one is always 4.
        inner_dim: width d of a sub-patch.
        inner_heads: heads of the inner attention, which always split ``inner_dim``.
        inner_stride: pixels from one sub-patch to the next; a patch has ``patch_size /
            inner_stride``, rounded up, in each direction.
        position_std: deviation of the initial positions of patches. 0.02 is timm's; next to it the
            normalised patches have 1, and with the few steps of a small experiment 1 learns faster.
        drop_path: stochastic depth rate of the last layer, rising linearly from 0 at the first.
            The inner part drops the branch of a patch, the outer one that of an image.
        drop: dropout rate before the classifier.
        device: where parameters live; on ``"meta"`` they are left without values, for
            ``to_empty`` and ``init_weights`` later.
        dtype: dtype of the parameters.

    Attributes:
        blocks: the layers, ``nn.ModuleList`` of ``Block``.
        num_tokens: N, the patches and the class token.
        head_convention: ``"widen"``, ``"split"``, or ``"mixed"`` when outer layers follow neither.

    Raises:
        ValueError: a size out of range, or a sequence whose length is not ``depth``.
    """

    def __init__(
        self,
        *,
        image_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 640,
        depth: int = 12,
        heads: int | Sequence[int] = 10,
        head_dim: HeadDim | Sequence[HeadDim] = "split",
        mlp_ratio: float = 4.0,
        inner_dim: int = 40,
        inner_heads: int = 4,
        inner_stride: int = 4,
        position_std: float = 0.02,
        drop_path: float = 0.0,
        drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        require_sizes(
            image_size=image_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            embed_dim=embed_dim,
            depth=depth,
            inner_dim=inner_dim,
            inner_stride=inner_stride,
        )
        if image_size % patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size {patch_size}, got {image_size}"
            )
        least = math.ceil(inner_dim / 128)
        allowed = f"from {least} to {inner_dim}, to split inner_dim"
        require(least <= inner_heads <= inner_dim, "inner_heads", allowed, inner_heads)
        require(position_std >= 0, "position_std", "at least 0", position_std)
        require_rates(drop_path=drop_path, drop=drop)
        hidden = int(embed_dim * mlp_ratio)
        require(hidden >= 1, "mlp_ratio", f"at least 1/{embed_dim}", mlp_ratio)
        layout = head_layout(heads, head_dim, embed_dim, depth)
        heads, head_dims, self.head_convention = layout

        self.image_size, self.patch_size, self.in_chans = image_size, patch_size, in_chans
        self.embed_dim, self.position_std = embed_dim, position_std
        self.num_tokens = (image_size // patch_size) ** 2 + 1
        inner_side = math.ceil(patch_size / inner_stride)
        inside = inner_side**2 * inner_dim

        meta = {"device": "meta", "dtype": dtype}
        self.pixel_embed = PixelEmbed(patch_size, inner_stride, in_chans, inner_dim, **meta)
        self.norm1_proj = nn.LayerNorm(inside, **meta)
        self.proj = nn.Linear(inside, embed_dim, **meta)
        self.norm2_proj = nn.LayerNorm(embed_dim, **meta)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **meta))
        self.patch_pos = nn.Parameter(torch.empty(1, self.num_tokens, embed_dim, **meta))
        self.pixel_pos = nn.Parameter(torch.empty(1, inner_dim, inner_side, inner_side, **meta))
        self.blocks = nn.ModuleList(
            Block(embed_dim, h, e, hidden, inner_dim, inner_heads, inside, rate, **meta)
            for h, e, rate in zip(heads, head_dims, rising(drop_path, depth))
        )
        self.norm = nn.LayerNorm(embed_dim, **meta)
        self.head_drop = nn.Dropout(drop)
        self.head = nn.Linear(embed_dim, num_classes, **meta)
        self.materialize(device)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, (B, num_classes), of images (B, in_chans, image_size, image_size)."""
        self.check_images(images)
        pixels = self.pixel_embed(images, self.pixel_pos)
        inside = pixels.reshape(len(images), self.num_tokens - 1, -1)
        x = self.norm2_proj(self.proj(self.norm1_proj(inside)))
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.patch_pos
        for block in self.blocks:
            pixels, x = block(pixels, x)
        return self.head(self.head_drop(self.norm(x[:, 0])))

    def _init_own(self, initialize: Initializer) -> None:
        initialize(self.cls_token, nn.init.normal_, std=0.02)
        initialize(self.patch_pos, nn.init.normal_, std=self.position_std)
        initialize(self.pixel_pos, nn.init.normal_, std=0.02)
