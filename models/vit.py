"""ViT and DeiT with any number of heads of any size in each layer.

Papers: ViT, Dosovitskiy et al. 2021 (arXiv:2010.11929); DeiT, Touvron et al. 2021
(arXiv:2012.12877), here undistilled and so the same network; the lean configurations, "Leaner
Transformers: More Heads, Less Depth" (arXiv:2505.20802). Parameter names, shapes and
initialisation are those of timm's ``VisionTransformer``: its weights load unchanged.

Sizes: B images, S pixels a side, P patches, N tokens, D embed_dim, M hidden units of the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from leaner_kernels.nn import ManyHeadAttention
from models.layers import (
    Block,
    HeadDim,
    Initializer,
    Mlp,
    VisionModel,
    head_layout,
    lecun_normal_,
    require,
    require_rates,
    require_sizes,
    rising,
)


class PatchEmbed(nn.Module):
    """Cut (B, C, S, S) images into patches and project each to a token: (B, P, D)."""

    def __init__(self, patch_size: int, in_chans: int, dim: int, **factory):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride=patch_size, **factory)

    def forward(self, images: Tensor) -> Tensor:
        """Return one token per patch, row by row."""
        return self.proj(images).flatten(2).transpose(1, 2)


class VisionTransformer(VisionModel):
    """Classify images: (B, in_chans, image_size, image_size) -> (B, num_classes) logits.

    Args:
        image_size: pixels a side, a multiple of ``patch_size``.
        patch_size: pixels a side of one patch.
        in_chans: channels of an image.
        num_classes: number of logits.
        embed_dim: width D of a token.
        depth: number of layers.
        heads: heads of every layer, or one number per layer.
        head_dim: width of one head, for all layers or one per layer. A number keeps it fixed, so
            the attention width ``heads * head_dim`` may differ from ``embed_dim`` ("widen").
            ``"split"`` divides the width among the heads: ``embed_dim // heads``, rounded down, so
            12 heads at width 512 are 42 wide and the attention 504.
        mlp_ratio: hidden width of the feed-forward over ``embed_dim``, rounded down.
        pool: ``"token"`` reads the class token; ``"avg"`` has none and averages all tokens before
            the last norm.
        drop_path: stochastic depth rate of the last layer, rising linearly from 0 at the first.
        drop: dropout rate before the classifier.
        init: scheme of ``init_weights``.
        device: where parameters live; on ``"meta"`` they are left without values, for
            ``to_empty`` and ``init_weights`` later.
        dtype: dtype of the parameters.

    Attributes:
        blocks: the layers, ``nn.ModuleList`` of ``Block``.
        num_tokens: N, the patches and the class token.
        head_convention: ``"widen"``, ``"split"``, or ``"mixed"`` when layers follow neither.

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
        embed_dim: int = 768,
        depth: int = 12,
        heads: int | Sequence[int] = 12,
        head_dim: HeadDim | Sequence[HeadDim] = 64,
        mlp_ratio: float = 4.0,
        pool: Literal["token", "avg"] = "token",
        drop_path: float = 0.0,
        drop: float = 0.0,
        init: Literal["trunc_normal", "xavier"] = "trunc_normal",
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
        )
        if image_size % patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size {patch_size}, got {image_size}"
            )
        require(pool in ("token", "avg"), "pool", "'token' or 'avg'", pool)
        require(init in ("trunc_normal", "xavier"), "init", "'trunc_normal' or 'xavier'", init)
        require_rates(drop_path=drop_path, drop=drop)
        hidden = int(embed_dim * mlp_ratio)
        require(hidden >= 1, "mlp_ratio", f"at least 1/{embed_dim}", mlp_ratio)
        layout = head_layout(heads, head_dim, embed_dim, depth)
        heads, head_dims, self.head_convention = layout

        self.image_size, self.patch_size, self.in_chans = image_size, patch_size, in_chans
        self.embed_dim, self.pool, self.init = embed_dim, pool, init
        num_patches = (image_size // patch_size) ** 2
        self.num_tokens = num_patches + (pool == "token")

        # Parameters get their values once, in init_weights, so that a seed gives the same model
        # whether it is built here or on the meta device first.
        meta = {"device": "meta", "dtype": dtype}
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim, **meta)
        if pool == "token":
            self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **meta))
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_tokens, embed_dim, **meta))
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                ManyHeadAttention(embed_dim, h, e, **meta),
                Mlp(embed_dim, hidden, **meta),
                eps=1e-6,
                drop_path=rate,
                **meta,
            )
            for h, e, rate in zip(heads, head_dims, rising(drop_path, depth))
        )
        norm = nn.LayerNorm(embed_dim, eps=1e-6, **meta)
        self.norm = norm if pool == "token" else nn.Identity()
        self.fc_norm = norm if pool == "avg" else nn.Identity()
        self.head_drop = nn.Dropout(drop)
        self.head = nn.Linear(embed_dim, num_classes, **meta)
        self.materialize(device)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, (B, num_classes), of images (B, in_chans, image_size, image_size)."""
        self.check_images(images)
        x = self.patch_embed(images)
        if self.pool == "token":
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        x = x[:, 0] if self.pool == "token" else x.mean(dim=1)
        return self.head(self.head_drop(self.fc_norm(x)))

    def _init_own(self, initialize: Initializer) -> None:
        initialize(self.pos_embed, nn.init.normal_, std=0.02)
        if self.pool == "token":
            initialize(self.cls_token, nn.init.normal_, std=1e-6)

    def _init_layer(self, name: str, layer: nn.Conv2d | nn.Linear, initialize: Initializer) -> None:
        """Fill a layer as timm does.

        ``"trunc_normal"`` is its default; ``"xavier"`` its ``weight_init="jax"``, after ViT's own
        code: Xavier-uniform weights, the patch projection LeCun-normal, the classifier 0.
        """
        if self.init == "trunc_normal":
            super()._init_layer(name, layer, initialize)
            return
        nn.init.zeros_(layer.bias)
        if isinstance(layer, nn.Conv2d):
            initialize(layer.weight, lecun_normal_)
        elif layer is self.head:
            nn.init.zeros_(layer.weight)
        else:
            initialize(layer.weight, nn.init.xavier_uniform_)
            if ".mlp." in name:
                initialize(layer.bias, nn.init.normal_, std=1e-6)


class SmallTransformer(VisionTransformer):
    """A ViT whose positions start as large as its patches.

    Patches of 4 standardised pixels under LeCun-normal weights have unit variance. Positions of
    deviation 0.02 drown in that: after 10 epochs 43% of held-out digits are right instead of 94%.
    """

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Give every parameter its initial value."""
        super().init_weights(generator)
        self.pos_embed.mul_(1 / 0.02)
