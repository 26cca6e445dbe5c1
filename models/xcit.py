"""XCiT: attention between channels instead of tokens, with any number of heads in each layer.

Papers: XCiT, El-Nouby et al. 2021 (arXiv:2106.09681); its class attention, CaiT, Touvron et al.
2021 (arXiv:2103.17239); the lean configurations, "Leaner Transformers: More Heads, Less Depth"
(arXiv:2505.20802). Parameter names, shapes and initialisation are those of timm's ``Xcit``: its
weights load unchanged.

Sizes: B images, S pixels a side, P patches a side, N = P^2 tokens, D embed_dim, M hidden units of
the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from leaner_kernels import attention
from leaner_kernels.nn import CrossCovarianceAttention
from models.layers import (
    BatchNorm2d,
    HeadDim,
    Initializer,
    Mlp,
    VisionModel,
    drop_path,
    head_layout,
    require,
    require_rates,
    require_sizes,
)

# Sines and cosines of each coordinate of a patch.
FREQUENCIES = 32


class ConvPatchEmbed(nn.Module):
    """Halve images with 3 x 3 convolutions down to a token a patch: (B, C, S, S) -> (B, N, D)."""

    def __init__(self, patch_size: int, in_chans: int, dim: int, **factory):
        super().__init__()
        halvings = patch_size.bit_length() - 1
        widths = [in_chans, *(dim >> step for step in reversed(range(halvings)))]
        layers = []
        for before, after in pairwise(widths):
            conv = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False, **factory)
            layers += nn.Sequential(conv, BatchNorm2d(after, **factory)), nn.GELU()
        self.proj = nn.Sequential(*layers[:-1])

    def forward(self, images: Tensor) -> Tensor:
        """Return one token per patch, row by row."""
        # Channels last, so that the tokens that come out are contiguous.
        images = images.contiguous(memory_format=torch.channels_last)
        return self.proj(images).flatten(2).transpose(1, 2)


class FourierPosition(nn.Module):
    """Positions as sines and cosines of both coordinates, projected to the width: (1, N, D)."""

    def __init__(self, side: int, dim: int, **factory):
        super().__init__()
        self.side = side
        self.token_projection = nn.Conv2d(2 * FREQUENCIES, dim, 1, **factory)

    def forward(self) -> Tensor:
        """Return the position of every token, row by row."""
        weight = self.token_projection.weight
        float32 = {"device": weight.device, "dtype": torch.float32}
        turns = torch.arange(1, self.side + 1, **float32) / (self.side + 1e-6) * (2 * math.pi)
        octaves = torch.arange(0, FREQUENCIES, 2, **float32) / FREQUENCIES
        angles = turns[:, None] / 10000**octaves
        waves = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1).T
        rows = waves[:, :, None].expand(-1, -1, self.side)
        features = torch.cat([rows, rows.mT]).to(weight.dtype)
        return self.token_projection(features[None]).flatten(2).transpose(1, 2)


class LocalPatchInteraction(nn.Module):
    """Mix each token with its neighbours by two depth-wise convolutions: (B, N, D) -> (B, N, D)."""

    def __init__(self, dim: int, side: int, **factory):
        super().__init__()
        self.side = side
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, **factory)
        self.act = nn.GELU()
        self.bn = BatchNorm2d(dim, **factory)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return a convolution over the neighbours of each token."""
        grid = x.unflatten(1, (self.side, self.side)).permute(0, 3, 1, 2)
        grid = self.conv2(self.bn(self.act(self.conv1(grid))))
        return grid.flatten(2).transpose(1, 2)


class Block(nn.Module):
    """One layer: channels attend, neighbours mix, each token feeds forward; (B, N, D) kept."""

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        hidden: int,
        side: int,
        drop_path: float,
        **factory,
    ):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, **factory)
        self.attn = CrossCovarianceAttention(dim, heads, head_dim, **factory)
        self.norm3 = nn.LayerNorm(dim, eps=1e-6, **factory)
        self.local_mp = LocalPatchInteraction(dim, side, **factory)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, **factory)
        self.mlp = Mlp(dim, hidden, **factory)
        self.gamma1 = nn.Parameter(torch.empty(dim, **factory))
        self.gamma3 = nn.Parameter(torch.empty(dim, **factory))
        self.gamma2 = nn.Parameter(torch.empty(dim, **factory))
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus its attention, then its neighbours' part and then the feed-forward."""
        drop = partial(drop_path, rate=self.drop_path, training=self.training)
        attended = self.attn(self.norm1(x), skip=x, layer_scale=self.gamma1)
        x = x + drop(self.gamma1 * attended)
        x = x + drop(self.gamma3 * self.local_mp(self.norm3(x)))
        return x + drop(self.gamma2 * self.mlp(self.norm2(x)))


class ClassAttention(nn.Module):
    """Attend from the first token to all: (B, 1 + N, D) -> (B, 1, D)."""

    # One query leaves one row of heads, whose condition number is 1.
    monitored = False

    def __init__(self, dim: int, heads: int, **factory):
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        width = self.num_heads * self.head_dim
        self.q = nn.Linear(dim, width, **factory)
        self.k = nn.Linear(dim, width, **factory)
        self.v = nn.Linear(dim, width, **factory)
        self.proj = nn.Linear(width, dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of attention from the class token."""
        sizes = self.num_heads, self.head_dim
        projected = self.q(x[:, :1]), self.k(x), self.v(x)
        q, k, v = (t.unflatten(-1, sizes).transpose(1, 2) for t in projected)
        return self.proj(attention(q, k, v).transpose(1, 2).flatten(2))


class ClassBlock(nn.Module):
    """One layer that changes only the class token, except for norms; keeps (B, 1 + N, D)."""

    def __init__(self, dim: int, heads: int, hidden: int, **factory):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, **factory)
        self.attn = ClassAttention(dim, heads, **factory)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, **factory)
        self.mlp = Mlp(dim, hidden, **factory)
        self.gamma1 = nn.Parameter(torch.empty(dim, **factory))
        self.gamma2 = nn.Parameter(torch.empty(dim, **factory))

    def forward(self, x: Tensor) -> Tensor:
        """Return all tokens, the class token having attended and fed forward."""
        normed = self.norm1(x)
        x = x + self.gamma1 * torch.cat([self.attn(normed), normed[:, 1:]], dim=1)
        x = self.norm2(x)
        token = x[:, :1]
        # The patches double because the original adds them to themselves; weights expect it.
        return torch.cat([token + self.gamma2 * self.mlp(token), 2 * x[:, 1:]], dim=1)


class XCiT(VisionModel):
    """Classify images: (B, in_chans, image_size, image_size) -> (B, num_classes) logits.

    Layers of cross-covariance attention work on the patches; class attention then gathers them into
    a class token, which is classified.

    Args:
        image_size: pixels a side, a multiple of ``patch_size``.
        patch_size: pixels a side of one patch, a power of two from 2: each convolution of the patch
            embedding halves the image.
        in_chans: channels of an image.
        num_classes: number of logits.
        embed_dim: width D of a token.
        depth: number of layers of cross-covariance attention.
        heads: heads of each of these layers, or one number per layer.
        head_dim: width of one head, for all layers or one per layer. A number keeps it fixed, so
            the attention width ``heads * head_dim`` may differ from ``embed_dim`` ("widen").
            ``"split"`` divides the width among the heads: ``embed_dim // heads``, rounded down.
        mlp_ratio: hidden width of the feed-forward over ``embed_dim``, rounded down.
        class_depth: number of layers of class attention.
        class_heads: their heads, which always split ``embed_dim``; those of the last
            cross-covariance layer when omitted.
        eta: initial value of the scales of every residual branch. 1e-5 is that of all models with
            24 layers; with the few steps of a small experiment, 1.0 learns faster.
        drop_path: stochastic depth rate of every cross-covariance layer.
        drop: dropout rate before the classifier.
        device: where parameters live; on ``"meta"`` they are left without values, for
            ``to_empty`` and ``init_weights`` later.
        dtype: dtype of the parameters.

    Attributes:
        blocks: the layers of cross-covariance attention, ``nn.ModuleList`` of ``Block``.
        cls_attn_blocks: the layers of class attention, ``nn.ModuleList`` of ``ClassBlock``.
        num_tokens: N, the patches. Class attention has the class token too.
        head_convention: ``"widen"``, ``"split"``, or ``"mixed"`` when layers follow neither; the
            class attention does not count.

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
        embed_dim: int = 512,
        depth: int = 24,
        heads: int | Sequence[int] = 8,
        head_dim: HeadDim | Sequence[HeadDim] = 64,
        mlp_ratio: float = 4.0,
        class_depth: int = 2,
        class_heads: int | None = None,
        eta: float = 1e-5,
        drop_path: float = 0.0,
        drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        require_sizes(
            image_size=image_size,
            in_chans=in_chans,
            num_classes=num_classes,
            embed_dim=embed_dim,
            depth=depth,
            class_depth=class_depth,
        )
        power_of_two = patch_size >= 2 and patch_size & (patch_size - 1) == 0
        require(power_of_two, "patch_size", "a power of two from 2", patch_size)
        if image_size % patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size {patch_size}, got {image_size}"
            )
        narrowest = patch_size // 2
        require(embed_dim >= narrowest, "embed_dim", f"at least {narrowest}", embed_dim)
        require_rates(drop_path=drop_path, drop=drop)
        hidden = int(embed_dim * mlp_ratio)
        require(hidden >= 1, "mlp_ratio", f"at least 1/{embed_dim}", mlp_ratio)
        layout = head_layout(heads, head_dim, embed_dim, depth)
        heads, head_dims, self.head_convention = layout
        class_heads = heads[-1] if class_heads is None else class_heads
        fits = 1 <= class_heads <= embed_dim and embed_dim // class_heads <= 128
        if not fits:
            raise ValueError(
                f"class_heads must split embed_dim {embed_dim} into widths of 1 to 128, "
                f"got {class_heads}"
            )

        self.image_size, self.patch_size, self.in_chans = image_size, patch_size, in_chans
        self.embed_dim, self.eta = embed_dim, eta
        side = image_size // patch_size
        self.num_tokens = side**2

        meta = {"device": "meta", "dtype": dtype}
        self.patch_embed = ConvPatchEmbed(patch_size, in_chans, embed_dim, **meta)
        self.pos_embed = FourierPosition(side, embed_dim, **meta)
        self.blocks = nn.ModuleList(
            Block(embed_dim, h, e, hidden, side, drop_path, **meta)
            for h, e in zip(heads, head_dims)
        )
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **meta))
        self.cls_attn_blocks = nn.ModuleList(
            ClassBlock(embed_dim, class_heads, hidden, **meta) for _ in range(class_depth)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6, **meta)
        self.head_drop = nn.Dropout(drop)
        self.head = nn.Linear(embed_dim, num_classes, **meta)
        self.materialize(device)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, (B, num_classes), of images (B, in_chans, image_size, image_size)."""
        self.check_images(images)
        x = self.patch_embed(images)
        x = x + self.pos_embed()
        for block in self.blocks:
            x = block(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.cls_attn_blocks:
            x = block(x)
        return self.head(self.head_drop(self.norm(x[:, 0])))

    def _init_own(self, initialize: Initializer) -> None:
        initialize(self.cls_token, nn.init.normal_, std=0.02)
        for module in self.modules():
            if isinstance(module, CrossCovarianceAttention):
                nn.init.ones_(module.temperature)
            elif isinstance(module, Block | ClassBlock):
                for scale in module.parameters(recurse=False):
                    nn.init.constant_(scale, self.eta)
