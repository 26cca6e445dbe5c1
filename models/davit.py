"""DaViT: alternating window and channel attention, with any number of heads in each layer.

Papers: DaViT, Ding et al. 2022 (arXiv:2204.03645); the lean configurations, "Leaner Transformers:
More Heads, Less Depth" (arXiv:2505.20802). Parameter names, shapes and initialisation are those of
timm's ``DaVit``: its weights load unchanged.

Sizes: B images, S pixels a side, a map of Y x X tokens (S / 4 a side in the first stage and half as
many, rounded up, in each later one), D the width of a stage, M hidden units of the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice, pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from leaner_kernels.nn import ChannelAttention, WindowAttention
from models.layers import (
    HeadDim,
    Mlp,
    VisionModel,
    drop_path,
    head_layout,
    per_layer,
    require,
    require_rates,
    require_sizes,
    rising,
)


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Apply a convolution to maps whose channels come last: (B, Y, X, D) -> (B, y, x, d)."""
    return conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class Stem(nn.Module):
    """Overlapping patches of 7 x 7 pixels, one every four: (B, C, S, S) -> (B, S/4, S/4, D)."""

    def __init__(self, in_chans: int, dim: int, **factory):
        super().__init__()
        self.conv = nn.Conv2d(in_chans, dim, 7, stride=4, padding=3, **factory)
        self.norm = nn.LayerNorm(dim, **factory)

    def forward(self, images: Tensor) -> Tensor:
        """Return the first map of tokens."""
        return self.norm(self.conv(images).permute(0, 2, 3, 1))


class Downsample(nn.Module):
    """Join each 2 x 2 tokens into one of another width: (B, Y, X, D) -> (B, Y/2, X/2, d)."""

    def __init__(self, dim: int, out_dim: int, **factory):
        super().__init__()
        self.norm = nn.LayerNorm(dim, **factory)
        self.conv = nn.Conv2d(dim, out_dim, 2, stride=2, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the smaller map; an odd last row or column is joined with zeros."""
        _, rows, cols, _ = x.shape
        return convolve(self.conv, F.pad(self.norm(x), (0, 0, 0, cols % 2, 0, rows % 2)))


class ConvPosition(nn.Module):
    """Add a depth-wise 3 x 3 convolution, which encodes positions; keep the shape."""

    def __init__(self, dim: int, **factory):
        super().__init__()
        self.proj = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map with its positions."""
        return x + convolve(self.proj, x)


class Block(nn.Module):
    """One attention of either kind and a feed-forward, positions before both; (B, Y, X, D) kept."""

    def __init__(
        self,
        attn: WindowAttention | ChannelAttention,
        hidden: int,
        drop_path: float,
        **factory,
    ):
        super().__init__()
        dim = attn.dim
        self.cpe1 = ConvPosition(dim, **factory)
        self.norm1 = nn.LayerNorm(dim, **factory)
        self.attn = attn
        self.cpe2 = ConvPosition(dim, **factory)
        self.norm2 = nn.LayerNorm(dim, **factory)
        self.mlp = Mlp(dim, hidden, **factory)
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus positions and attention, and then positions and feed-forward."""
        drop = partial(drop_path, rate=self.drop_path, training=self.training)
        x = self.cpe1(x)
        if isinstance(self.attn, WindowAttention):
            x = x + drop(self.attn(self.norm1(x), skip=x))
        else:
            # Channels attend over all tokens of the map, whose order does not matter.
            tokens = x.flatten(1, 2)
            tokens = tokens + drop(self.attn(self.norm1(tokens), skip=tokens))
            x = tokens.view_as(x)
        x = self.cpe2(x)
        return x + drop(self.mlp(self.norm2(x)))


class Stage(nn.Module):
    """Layers at one resolution, each a block of windows and then one of channels."""

    def __init__(self, downsample: nn.Module, layers: Sequence[nn.Module]):
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map at the resolution of this stage: (B, Y, X, D)."""
        return self.blocks(self.downsample(x))


class Head(nn.Module):
    """Average over the map, norm and classify: (B, Y, X, D) -> (B, num_classes)."""

    def __init__(self, dim: int, num_classes: int, drop: float, **factory):
        super().__init__()
        self.norm = nn.LayerNorm(dim, **factory)
        self.drop = nn.Dropout(drop)
        self.fc = nn.Linear(dim, num_classes, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc(self.drop(self.norm(x.mean(dim=(1, 2)))))


class DaViT(VisionModel):
    """Classify images: (B, in_chans, image_size, image_size) -> (B, num_classes) logits.

    Args:
        image_size: pixels a side, a multiple of 4. A map that windows do not tile is padded with
            zeros; one of odd sides before it is halved, too.
        in_chans: channels of an image.
        num_classes: number of logits.
        embed_dims: width of a token in each stage; as many stages as widths.
        depths: layers of each stage. A layer is a block of window attention and one of channel
            attention.
        heads: heads in every layer, in each stage, or in each layer; both attentions of a layer
            have as many.
        head_dim: width of one head, in every layer, in each stage or in each layer. ``"split"``
            divides the width of the stage among the heads, rounded down. A number keeps it fixed,
            so the attention width ``heads * head_dim`` may differ from that of the stage
            ("widen").
        mlp_ratio: hidden width of the feed-forward over that of the stage, rounded down.
        window: tokens a side of a window.
        drop_path: stochastic depth rate of the last layer, rising linearly from 0 at the first.
        drop: dropout rate before the classifier.
        device: where parameters live; on ``"meta"`` they are left without values, for
            ``to_empty`` and ``init_weights`` later.
        dtype: dtype of the parameters.

    Attributes:
        blocks: the layers of all stages in order, each the pair of its two ``Block``.
        embed_dim: width of the last stage.
        num_tokens: tokens of the map in the first stage.
        head_convention: ``"widen"``, ``"split"``, or ``"mixed"`` when layers follow neither.

    Raises:
        ValueError: a size out of range, or a sequence of none of the lengths above.
    """

    def __init__(
        self,
        *,
        image_size: int = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dims: Sequence[int] = (128, 256, 512, 1024),
        depths: Sequence[int] = (1, 1, 9, 1),
        heads: int | Sequence[int] = (4, 8, 16, 32),
        head_dim: HeadDim | Sequence[HeadDim] = "split",
        mlp_ratio: float = 4.0,
        window: int = 7,
        drop_path: float = 0.0,
        drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        require_sizes(
            image_size=image_size, in_chans=in_chans, num_classes=num_classes, window=window
        )
        if image_size % 4:
            raise ValueError(f"image_size must be a multiple of 4, got {image_size}")
        for name, stages in {"embed_dims": embed_dims, "depths": depths}.items():
            positive = len(stages) >= 1 and min(stages) >= 1
            require(positive, name, "at least 1 in each stage", list(stages))
        if len(embed_dims) != len(depths):
            raise ValueError(
                f"embed_dims and depths must have one value per stage each, got {len(embed_dims)} "
                f"and {len(depths)}"
            )
        require_rates(drop_path=drop_path, drop=drop)
        narrowest = min(embed_dims)
        require(int(narrowest * mlp_ratio) >= 1, "mlp_ratio", f"at least 1/{narrowest}", mlp_ratio)
        dims = per_layer("embed_dims", embed_dims, depths)
        layout = head_layout(heads, head_dim, dims, depths)
        heads, head_dims, self.head_convention = layout

        self.image_size, self.in_chans, self.embed_dim = image_size, in_chans, embed_dims[-1]
        self.window = window
        self.num_tokens = (image_size // 4) ** 2

        meta = {"device": "meta", "dtype": dtype}
        rates = rising(drop_path, sum(depths))
        layers = []
        for dim, h, e, rate in zip(dims, heads, head_dims, rates):
            spatial = WindowAttention(dim, h, e, window_size=window, **meta)
            channel = ChannelAttention(dim, h, e, **meta)
            hidden = int(dim * mlp_ratio)
            layers.append(
                nn.Sequential(*(Block(a, hidden, rate, **meta) for a in (spatial, channel)))
            )
        entries = [Downsample(*widths, **meta) for widths in pairwise(embed_dims)]
        queue = iter(layers)
        self.stem = Stem(in_chans, embed_dims[0], **meta)
        self.stages = nn.Sequential(
            *(
                Stage(entry, list(islice(queue, count)))
                for entry, count in zip([nn.Identity(), *entries], depths)
            )
        )
        self.head = Head(embed_dims[-1], num_classes, drop, **meta)
        self.materialize(device)

    @property
    def blocks(self) -> list[nn.Sequential]:
        """The layers of all stages in order."""
        return [layer for stage in self.stages for layer in stage.blocks]

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, (B, num_classes), of images (B, in_chans, image_size, image_size)."""
        self.check_images(images)
        return self.head(self.stages(self.stem(images)))
