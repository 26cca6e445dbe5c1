"""Nyströmformer for the Long-Range Arena, with any number of heads of any size in each layer.

Paper: Xiong et al. 2021 (arXiv:2102.03902); the lean configurations, "Leaner Transformers: More
Heads, Less Depth" (arXiv:2505.20802). Layers, pooling, classifier and initialisation are those of
mlpen/Nystromformer, LRA/code; parameters are named as in this package's other models. The paper's
counts are those without the convolution, which the released configurations have.

Sizes: B samples, N tokens, D embed_dim, M hidden units of the MLP and of the classifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leaner_kernels.nn import ManyHeadAttention, NystromAttention
from models.layers import (
    Block,
    HeadDim,
    Initializer,
    LanguageModel,
    Mlp,
    draw_conv_default,
    head_layout,
    require,
    require_rates,
    require_sizes,
)


class FeedForward(Mlp):
    """``Mlp`` with dropout after each of its layers: (..., D) -> (..., D)."""

    def __init__(self, dim: int, hidden: int, dropout: float, **factory):
        super().__init__(dim, hidden, **factory)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward of each token."""
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))


class Nystromformer(LanguageModel):
    """Classify sequences, or pairs of them: (B, N) or (B, 2, N) -> (B, num_classes) logits.

    Args:
        vocab_size: number of distinct tokens.
        sequence_length: the longest sequence; with Nyström attention a multiple of
            ``num_landmarks``, or no more than them. The Long-Range Arena's lengths are rounded up
            to a power of two.
        embed_dim: width D of a token.
        depth: number of layers.
        heads: heads of every layer, or one number per layer.
        head_dim: width of one head, for all layers or one per layer. A number keeps it fixed
            ("widen"); ``"split"`` divides the width among the heads, rounded down.
        mlp_ratio: hidden width of feed-forward and classifier over ``embed_dim``, rounded down.
        num_classes: number of logits.
        num_landmarks: number of landmarks of Nyström attention, at least 1.
        attention: ``"nystrom"``, or ``"softmax"`` between all tokens.
        conv_kernel_size: tokens under the convolution that Nyström attention adds, odd; None adds
            none. The released configurations have 35.
        init: of the pseudo-inverse, as in ``NystromAttention``: ``"batch"`` is the published code's
            default, in which the samples of a batch are not independent.
        pairs: classify two sequences together, as in the Retrieval task.
        dropout: rate after the embeddings, attention and both layers of the feed-forward; and of
            the probabilities of softmax attention.
        device: where parameters live; on ``"meta"`` they are left without values, for
            ``to_empty`` and ``init_weights`` later.
        dtype: dtype of the parameters.

    Attributes:
        blocks: the layers, ``nn.ModuleList`` of ``Block``.
        head_convention: ``"widen"``, ``"split"``, or ``"mixed"`` when layers follow neither.

    Raises:
        ValueError: a size out of range, or a sequence whose length is not ``depth``.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 32,
        sequence_length: int = 2048,
        embed_dim: int = 64,
        depth: int = 2,
        heads: int | Sequence[int] = 2,
        head_dim: HeadDim | Sequence[HeadDim] = 32,
        mlp_ratio: float = 2.0,
        num_classes: int = 10,
        num_landmarks: int = 64,
        attention: Literal["nystrom", "softmax"] = "nystrom",
        conv_kernel_size: int | None = None,
        init: Literal["matrix", "batch"] = "matrix",
        pairs: bool = False,
        dropout: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        require_sizes(
            vocab_size=vocab_size,
            sequence_length=sequence_length,
            embed_dim=embed_dim,
            depth=depth,
            num_classes=num_classes,
        )
        nystrom = attention == "nystrom"
        require(nystrom or attention == "softmax", "attention", "'nystrom' or 'softmax'", attention)
        if conv_kernel_size is not None and not nystrom:
            raise ValueError(
                f"conv_kernel_size must be None with softmax attention, got {conv_kernel_size}"
            )
        require_rates(dropout=dropout)
        hidden = int(embed_dim * mlp_ratio)
        require(hidden >= 1, "mlp_ratio", f"at least 1/{embed_dim}", mlp_ratio)
        layout = head_layout(heads, head_dim, embed_dim, depth)
        heads, head_dims, self.head_convention = layout
        self.vocab_size, self.sequence_length = vocab_size, sequence_length
        self.embed_dim, self.pairs, self.init = embed_dim, pairs, init

        # Parameters get their values once, in init_weights, so that a seed gives the same model
        # whether it is built here or on the meta device first.
        meta = {"device": "meta", "dtype": dtype}

        def new_attention(num_heads: int, width: int) -> ManyHeadAttention | NystromAttention:
            common = {"proj_drop": dropout, **meta}
            if not nystrom:
                return ManyHeadAttention(embed_dim, num_heads, width, attn_drop=dropout, **common)
            return NystromAttention(
                embed_dim, num_heads, width, num_landmarks, conv_kernel_size, init=init, **common
            )

        self.embed = nn.Embedding(vocab_size, embed_dim, **meta)
        self.pos_embed = nn.Parameter(torch.empty(sequence_length, embed_dim, **meta))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                new_attention(h, e),
                FeedForward(embed_dim, hidden, dropout, **meta),
                **meta,
            )
            for h, e in zip(heads, head_dims)
        )
        if nystrom and sequence_length > num_landmarks and sequence_length % num_landmarks:
            raise ValueError(
                f"sequence_length must be a multiple of num_landmarks {num_landmarks}, "
                f"got {sequence_length}"
            )
        self.norm = nn.LayerNorm(embed_dim, **meta)
        self.head = nn.Sequential(
            nn.Linear((4 if pairs else 1) * embed_dim, hidden, **meta),
            nn.ReLU(),
            nn.Linear(hidden, num_classes, **meta),
        )
        self.materialize(device)

    def forward(self, tokens: Tensor, key_lengths: Tensor | None = None) -> Tensor:
        """Return the logits, (B, num_classes).

        Args:
            tokens: (B, N) int64, with ``pairs`` (B, 2, N). The published code pads every sequence
                to ``sequence_length``, and N matters: the landmarks are means of N / num_landmarks
                places, and pooling divides by N.
            key_lengths: (B,) int32, with ``pairs`` (B, 2): how many tokens are not padding, each in
                [1, N]. The contents of the padding do not matter. None means that all tokens count.

        Raises:
            ValueError: tokens or lengths of another shape.
        """
        self.check_tokens(tokens)
        if key_lengths is not None and key_lengths.shape != tokens.shape[:-1]:
            raise ValueError(
                f"key_lengths must be {tuple(tokens.shape[:-1])}, got {tuple(key_lengths.shape)}"
            )
        if not self.pairs:
            return self.head(self._pooled(tokens, key_lengths))
        if self.init == "batch":
            # The published code takes the batch maximum separately for the first and the second
            # sequences.
            lengths = (None, None) if key_lengths is None else key_lengths.T.contiguous()
            first, second = map(self._pooled, tokens.unbind(1), lengths)
        else:
            lengths = None if key_lengths is None else key_lengths.flatten()
            pooled = self._pooled(tokens.flatten(0, 1), lengths)
            first, second = pooled.unflatten(0, (-1, 2)).unbind(1)
        return self.head(torch.cat([first, second, first * second, first - second], dim=-1))

    def _pooled(self, tokens: Tensor, key_lengths: Tensor | None) -> Tensor:
        """Return the mean (B, D) over the N tokens (B, N), padding counted as zeros."""
        x = self.drop(self.embed(tokens) + self.pos_embed[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x, key_lengths)
        x = self.norm(x)
        if key_lengths is not None:
            padded = torch.arange(tokens.shape[1], device=x.device) >= key_lengths[:, None]
            x = x.masked_fill(padded[..., None], 0)
        return x.mean(dim=1)

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise ValueError unless there are tokens (B, N), or with ``pairs`` (B, 2, N)."""
        if not self.pairs:
            super().check_tokens(tokens)
        elif tokens.ndim != 3 or tokens.shape[1] != 2:
            raise ValueError(f"tokens must be (B, 2, N) for pairs, got {tuple(tokens.shape)}")
        else:
            super().check_tokens(tokens.flatten(0, 1))

    def _init_own(self, initialize: Initializer) -> None:
        initialize(self.embed.weight, nn.init.normal_, std=0.02)
        initialize(self.pos_embed, nn.init.normal_, std=0.02)

    def _init_layer(self, name: str, layer: nn.Conv2d | nn.Linear, initialize: Initializer) -> None:
        """Fill a layer as PyTorch does."""
        draw_conv_default(layer, initialize)

    def flops_per_sequence(self, tokens: int | None = None) -> int:
        """Return the FLOPs of one sample's forward, as ``LanguageModel``: of both of a pair.

        Args:
            tokens: in a sequence; ``sequence_length`` when omitted.
        """
        if not self.pairs:
            return super().flops_per_sequence(tokens)
        shape = (1, 2, self.sequence_length if tokens is None else tokens)
        return self._count_flops(torch.empty(shape, dtype=torch.int64, device="meta"))
