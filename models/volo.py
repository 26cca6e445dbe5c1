"""VOLO with any number of heads of any size in each layer.

Paper: "VOLO: Vision Outlooker for Visual Recognition", Yuan et al. 2021 (arXiv:2106.13112); the
lean configurations, "Leaner Transformers: More Heads, Less Depth" (arXiv:2505.20802). Parameter
names, shapes and initialisation are those of timm's ``VOLO``: its weights load unchanged.

Sizes: B images, S pixels a side, Y and X rows and columns of the finer map, N tokens of the
coarser one, D the width of a stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from leaner_kernels import attention
from leaner_kernels.nn import ManyHeadAttention, OutlookAttention
from models.layers import (
    BatchNorm2d,
    Block,
    HeadDim,
    Initializer,
    Mlp,
    VisionModel,
    head_layout,
    require,
    require_rates,
    require_sizes,
    rising,
)

CLASS_LAYERS = 2


class PatchEmbed(nn.Module):
    """Three convolutions at half size, then patches: (B, C, S, S) -> (B, Y, X, D)."""

    def __init__(self, patch_size: int, in_chans: int, stem_dim: int, dim: int, **factory):
        super().__init__()
        layers = []
        for chans, kernel, stride in ((in_chans, 7, 2), (stem_dim, 3, 1), (stem_dim, 3, 1)):
            conv = nn.Conv2d(
                chans, stem_dim, kernel, stride, padding=kernel // 2, bias=False, **factory
            )
            layers += [conv, BatchNorm2d(stem_dim, **factory), nn.ReLU(inplace=True)]
        self.conv = nn.Sequential(*layers)
        self.proj = nn.Conv2d(stem_dim, dim, patch_size // 2, stride=patch_size // 2, **factory)

    def forward(self, images: Tensor) -> Tensor:
        """Return the map, channels last."""
        images = images.contiguous(memory_format=torch.channels_last)
        # Contiguous, or the sums with it in every layer would keep its strides.
        return self.proj(self.conv(images)).permute(0, 2, 3, 1).contiguous()


class Downsample(nn.Module):
    """Join 2 x 2 tokens into one of another width: (B, Y, X, D) -> (B, Y / 2, X / 2, D')."""

    def __init__(self, dim: int, out_dim: int, **factory):
        super().__init__()
        self.proj = nn.Conv2d(dim, out_dim, 2, stride=2, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the coarser map."""
        return self.proj(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class ClassAttention(nn.Module):
    """Attention from the class token to all tokens: (B, 1 + N, D) -> (B, 1, D).

    One query leaves one row of heads, whose condition number is 1: nothing to capture.
    """

    monitored = False

    def __init__(self, dim: int, heads: int, **factory):
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        width = heads * self.head_dim
        self.kv = nn.Linear(dim, 2 * width, bias=False, **factory)
        self.q = nn.Linear(dim, width, bias=False, **factory)
        self.proj = nn.Linear(width, dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of attention from the class token, which is the first."""
        heads = self.num_heads, self.head_dim
        k, v = self.kv(x).unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4).unbind(0)
        q = self.q(x[:, :1]).unflatten(-1, heads).transpose(1, 2)
        return self.proj(attention(q, k, v).transpose(1, 2).flatten(2))


class ClassBlock(nn.Module):
    """One pre-norm layer that changes the class token alone: (B, 1 + N, D) -> (B, 1 + N, D)."""

    def __init__(self, dim: int, heads: int, hidden: int, **factory):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, **factory)
        self.attn = ClassAttention(dim, heads, **factory)
        self.norm2 = nn.LayerNorm(dim, **factory)
        self.mlp = Mlp(dim, hidden, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens with the class token changed."""
        token = x[:, :1] + self.attn(self.norm1(x))
        token = token + self.mlp(self.norm2(token))
        return torch.cat([token, x[:, 1:]], dim=1)


class VOLO(VisionModel):
    """Classify images: (B, in_chans, image_size, image_size) -> (B, num_classes) logits.

    Outlookers on a map of patches, transformer layers on a map of half as many rows and columns,
    two class-attention layers. The logits are those of the class token plus half the largest
    logits of an auxiliary classifier over all tokens, in training as in evaluation: VOLO's own
    training gives the auxiliary classifier a label for every token and mixes tokens of images,
    which needs labels that the lean paper does not use.

    Args:
        image_size: pixels a side, a multiple of ``2 * patch_size``, so that 2 x 2 patches join
            into one token without a rest.
        patch_size: pixels a side of one patch on the finer map, even: the stem halves the image.
        in_chans: channels of an image.
        num_classes: number of logits.
        embed_dims: width D of each stage: the first of outlookers, the others of transformer
            layers, which share one map and so one width.
        depths: layers of each stage, at least two stages.
        heads: heads of every layer, or one number per stage or per layer.
        head_dim: width of one head, for all layers or one per stage or per layer. A number keeps
            it fixed, so the attention width ``heads * head_dim`` may differ from the stage's
            ("widen"). ``"split"`` divides the stage's width among the heads, rounded down.
        mlp_ratio: hidden width of the feed-forward over the stage's width, rounded down.
        class_heads: heads of the class-attention layers, which always split the width; those of
            the last transformer layer when omitted.
        stem_dim: channels of the stem.
        drop_path: stochastic depth rate of the last transformer layer, rising linearly from 0 at
            the first outlooker; as in VOLO's code, outlookers themselves drop nothing, and
            neither do the class-attention layers.
        drop: dropout rate before the classifiers.
        device: where parameters live; on ``"meta"`` they are left without values, for
            ``to_empty`` and ``init_weights`` later.
        dtype: dtype of the parameters.

    Attributes:
        num_tokens: N, tokens of the transformer stages, without the class token.
        head_convention: ``"widen"``, ``"split"``, or ``"mixed"`` when layers follow neither.

    Raises:
        ValueError: a size out of range, or a sequence of another length.
    """

    def __init__(
        self,
        *,
        image_size: int = 224,
        patch_size: int = 8,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dims: Sequence[int] = (256, 512, 512, 512),
        depths: Sequence[int] = (8, 8, 16, 4),
        heads: int | Sequence[int] = (8, 16, 16, 16),
        head_dim: HeadDim | Sequence[HeadDim] = "split",
        mlp_ratio: float = 3.0,
        class_heads: int | None = None,
        stem_dim: int = 64,
        drop_path: float = 0.0,
        drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        depths, embed_dims = list(depths), list(embed_dims)
        require_sizes(
            image_size=image_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            stem_dim=stem_dim,
        )
        require(patch_size % 2 == 0, "patch_size", "even", patch_size)
        if image_size % (2 * patch_size):
            raise ValueError(
                f"image_size must be a multiple of 2 * patch_size, {2 * patch_size}, "
                f"got {image_size}"
            )
        require(len(depths) >= 2, "depths", "of at least 2 stages", depths)
        require(min(depths) >= 1, "depths", "at least 1 in every stage", depths)
        fits = len(embed_dims) == len(depths) and len(set(embed_dims[1:])) == 1
        one_each = f"{len(depths)} widths, equal from the second on"
        require(fits, "embed_dims", one_each, embed_dims)
        require(min(embed_dims) >= 1, "embed_dims", "at least 1", embed_dims)
        require_rates(drop_path=drop_path, drop=drop)
        narrow, dim = embed_dims[0], embed_dims[-1]
        least = min(narrow, dim)
        require(least * mlp_ratio >= 1, "mlp_ratio", f"at least 1/{least}", mlp_ratio)
        layout = head_layout(heads, head_dim, embed_dims, depths)
        heads, head_dims, self.head_convention = layout
        class_heads = heads[-1] if class_heads is None else class_heads
        allowed = f"from {math.ceil(dim / 128)} to {dim}, to split width {dim}"
        require(math.ceil(dim / 128) <= class_heads <= dim, "class_heads", allowed, class_heads)

        self.image_size, self.patch_size, self.in_chans = image_size, patch_size, in_chans
        self.embed_dims = embed_dims
        side = image_size // (2 * patch_size)
        self.num_tokens = side**2

        meta = {"device": "meta", "dtype": dtype}
        self.patch_embed = PatchEmbed(patch_size, in_chans, stem_dim, narrow, **meta)
        self.pos_embed = nn.Parameter(torch.empty(1, side, side, dim, **meta))

        def layer(width: int, attn: nn.Module, rate: float) -> Block:
            mlp = Mlp(width, int(width * mlp_ratio), **meta)
            return Block(width, attn, mlp, drop_path=rate, **meta)

        blocks = []
        for h, e, rate in zip(heads, head_dims, rising(drop_path, len(heads))):
            if len(blocks) < depths[0]:
                blocks.append(layer(narrow, OutlookAttention(narrow, h, e, **meta), 0.0))
            else:
                attn = ManyHeadAttention(dim, h, e, qkv_bias=False, **meta)
                blocks.append(layer(dim, attn, rate))
        stages = [
            nn.Sequential(*blocks[end - depth : end])
            for end, depth in zip(accumulate(depths), depths)
        ]
        self.network = nn.ModuleList([stages[0], Downsample(narrow, dim, **meta), *stages[1:]])
        self.post_network = nn.ModuleList(
            ClassBlock(dim, class_heads, int(dim * mlp_ratio), **meta) for _ in range(CLASS_LAYERS)
        )
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim, **meta))
        self.aux_head = nn.Linear(dim, num_classes, **meta)
        self.norm = nn.LayerNorm(dim, **meta)
        self.head_drop = nn.Dropout(drop)
        self.head = nn.Linear(dim, num_classes, **meta)
        self.materialize(device)

    @property
    def blocks(self) -> list[nn.Module]:
        """The outlookers, the transformer layers and the class-attention layers, in order."""
        outlookers, _, *stages = self.network
        return [*outlookers, *(block for stage in stages for block in stage), *self.post_network]

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, (B, num_classes), of images (B, in_chans, image_size, image_size)."""
        self.check_images(images)
        outlookers, downsample, *stages = self.network
        x = downsample(outlookers(self.patch_embed(images))) + self.pos_embed
        x = x.flatten(1, 2)
        for stage in stages:
            x = stage(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.post_network:
            x = block(x)
        x = self.norm(x)
        logits = self.head(self.head_drop(x[:, 0]))
        # One more draw for all tokens, the class token among them, is timm's order.
        return logits + 0.5 * self.aux_head(self.head_drop(x)[:, 1:]).max(dim=1).values

    def _init_own(self, initialize: Initializer) -> None:
        initialize(self.pos_embed, nn.init.normal_, std=0.02)
        initialize(self.cls_token, nn.init.normal_, std=0.02)
