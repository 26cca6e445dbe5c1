"""Crammed BERT with any number of heads of any size in each layer.

Papers: BERT, Devlin et al. 2019 (arXiv:1810.04805); its variant for one GPU and one day, Geiping
and Goldstein 2023, "Cramming" (arXiv:2212.14034, github.com/JonasGeiping/cramming); the lean
configuration, "Leaner Transformers: More Heads, Less Depth" (arXiv:2505.20802). Pre-norm, a last
norm and one after the embedding, no biases, a feed-forward gated by GELU, sinusoidal positions
times a learned number, the embedding again as decoder.

Sizes: B sequences, N tokens, D embed_dim, V vocabulary, M hidden units of the feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leaner_kernels.nn import ManyHeadAttention
from leaner_kernels.ops._checks import has_values
from models.cross_entropy import linear_cross_entropy
from models.layers import (
    Block,
    HeadDim,
    Initializer,
    LanguageModel,
    head_layout,
    require,
    require_rates,
    require_sizes,
)

# Cramming's norms; hidden units of its pooler, whatever the width of a token.
_EPS = 1e-12
_POOLED = 1024
IGNORED = -100


class GatedMlp(nn.Module):
    """A feed-forward whose second half of hidden units gates the first: (..., D) -> (..., D)."""

    def __init__(self, dim: int, hidden: int, dropout: float, **factory):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, bias=False, **factory)
        self.fc2 = nn.Linear(hidden // 2, dim, bias=False, **factory)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward of each token."""
        value, gate = self.fc1(x).chunk(2, dim=-1)
        return self.drop(self.fc2(F.gelu(gate) * value))


class BERT(LanguageModel):
    """Predict masked tokens, or classify sequences: (B, N) int64 -> logits.

    Args:
        vocab_size: number of distinct tokens.
        sequence_length: the longest sequence.
        embed_dim: width D of a token.
        depth: number of layers.
        heads: heads of every layer, or one number per layer.
        head_dim: width of one head, for all layers or one per layer. A number keeps it fixed, so
            the attention width ``heads * head_dim`` may differ from ``embed_dim`` ("widen").
            ``"split"`` divides the width among the heads: ``embed_dim // heads``, rounded down.
        mlp_ratio: hidden width M of the feed-forward over ``embed_dim``; M must be even, its second
            half gates the first.
        dropout: rate for the embedding, attention probabilities, after both branches of a layer
            and before the classifier.
        num_classes: logits of a sequence, 1 for regression; None predicts masked tokens.
        most_masked: the largest share of tokens, rounded up over the batch, that ``targets`` mask:
            a fixed number of tokens get logits, so that the host need not wait for the number of
            masked ones.
        device: device of the parameters; on ``"meta"`` they have no values until ``to_empty`` and
            ``init_weights``.
        dtype: dtype of the parameters.

    Attributes:
        blocks: the layers, ``nn.ModuleList`` of ``Block``.
        head_convention: ``"widen"``, ``"split"``, or ``"mixed"`` when layers follow neither.

    Raises:
        ValueError: a size out of range, or a sequence whose length is not ``depth``.
    """

    positions: Tensor

    def __init__(
        self,
        *,
        vocab_size: int = 32768,
        sequence_length: int = 128,
        embed_dim: int = 768,
        depth: int = 16,
        heads: int | Sequence[int] = 12,
        head_dim: HeadDim | Sequence[HeadDim] = "split",
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        num_classes: int | None = None,
        most_masked: float = 0.25,
        device=None,
        dtype=None,
    ):
        super().__init__()
        require_sizes(
            vocab_size=vocab_size,
            sequence_length=sequence_length,
            embed_dim=embed_dim,
            depth=depth,
            num_classes=1 if num_classes is None else num_classes,
        )
        require_rates(dropout=dropout)
        require(0 < most_masked <= 1, "most_masked", "in (0, 1]", most_masked)
        hidden = int(embed_dim * mlp_ratio)
        even = hidden >= 2 and hidden % 2 == 0
        require(even, "mlp_ratio", f"an even number over {embed_dim}", mlp_ratio)
        layout = head_layout(heads, head_dim, embed_dim, depth)
        heads, head_dims, self.head_convention = layout

        self.vocab_size, self.sequence_length = vocab_size, sequence_length
        self.embed_dim, self.num_classes, self.most_masked = embed_dim, num_classes, most_masked
        meta = {"device": "meta", "dtype": dtype}
        self.token_embed = nn.Embedding(vocab_size, embed_dim, **meta)
        self.pos_scale = nn.Parameter(torch.empty(1, **meta))
        positions = torch.empty(sequence_length, embed_dim, **meta)
        self.register_buffer("positions", positions, persistent=False)
        self.embed_norm = nn.LayerNorm(embed_dim, eps=_EPS, **meta)
        self.embed_drop = nn.Dropout(dropout)
        options = {"qkv_bias": False, "proj_bias": False, **meta}
        options |= {"attn_drop": dropout, "proj_drop": dropout}
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                ManyHeadAttention(embed_dim, h, e, **options),
                GatedMlp(embed_dim, hidden, dropout, **meta),
                eps=_EPS,
                **meta,
            )
            for h, e in zip(heads, head_dims)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=_EPS, **meta)
        if num_classes is not None:
            self.pooler = nn.Linear(embed_dim, _POOLED, **meta)
            self.pool_drop = nn.Dropout(dropout)
            self.head = nn.Linear(_POOLED, num_classes, **meta)
        self.materialize(device)

    def forward(
        self, tokens: Tensor, key_lengths: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Return logits, or the losses of the masked tokens.

        Args:
            tokens: (B, N) int64.
            key_lengths: (B,) int32, each in [1, N]: tokens at or past a length are padding, which
                no other token sees.
            targets: (B, N) int64: the original token at each masked place, -100 elsewhere; only if
                ``num_classes`` is None.

        Returns:
            With ``num_classes`` the logits (B, num_classes), read from the first token; otherwise
            logits (B, N, V), or with ``targets`` the cross-entropy of each token, (B, N) float32, 0
            where not masked, for which only masked tokens get logits.

        Raises:
            ValueError: an argument of another shape or dtype, or, on the CPU, more tokens masked
                than ``most_masked``. A GPU does not read the number back: excess tokens have a loss
                of NaN there.
        """
        self.check_tokens(tokens)
        if targets is not None:
            self._check_targets(tokens, targets)
        x = self.token_embed(tokens)
        x = x + self.pos_scale * self.positions[: tokens.shape[1]].to(x.dtype)
        x = self.embed_drop(self.embed_norm(x))
        for block in self.blocks:
            x = block(x, key_lengths)
        x = self.norm(x)
        if self.num_classes is not None:
            return self.head(self.pool_drop(torch.tanh(self.pooler(x[:, 0]))))
        if targets is None:
            return F.linear(x, self.token_embed.weight)
        return self._masked_losses(x, targets)

    def _most(self, targets: Tensor) -> int:
        """Return the largest number of ``targets`` (B, N) that may be masked."""
        return len(targets) * math.ceil(self.most_masked * targets.shape[1])

    def _check_targets(self, tokens: Tensor, targets: Tensor) -> None:
        if self.num_classes is not None:
            raise ValueError("targets must be None for a model with num_classes, got a tensor")
        if targets.shape != tokens.shape or targets.dtype != torch.int64:
            raise ValueError(
                f"targets must be {tuple(tokens.shape)} int64, "
                f"got {tuple(targets.shape)} {targets.dtype}"
            )
        if has_values(targets):
            masked = int((targets != IGNORED).sum())
            if masked > self._most(targets):
                raise ValueError(
                    f"targets must mask at most {self._most(targets)} of {targets.numel()} tokens, "
                    f"got {masked} (most_masked is {self.most_masked:g})"
                )

    def _masked_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the losses (B, N) of tokens (B, N, D), of which few are masked."""
        flat = targets.flatten()
        # Masked tokens come first, in order; the tokens that fill up the number have no loss.
        first = (
            (flat != IGNORED).byte().argsort(descending=True, stable=True)[: self._most(targets)]
        )
        chosen = x.flatten(0, 1).index_select(0, first)
        found = linear_cross_entropy(chosen, self.token_embed.weight, flat[first])
        losses = found.new_full((len(flat),), math.nan).scatter(0, first, found)
        return losses.view(targets.shape).masked_fill(targets == IGNORED, 0)

    def _init_own(self, initialize: Initializer) -> None:
        nn.init.constant_(self.pos_scale, self.embed_dim**-0.5)
        self.positions.copy_(sinusoids(*self.positions.shape))
        initialize(self.token_embed.weight, nn.init.normal_, std=0.02)


def sinusoids(tokens: int, dim: int) -> Tensor:
    """Return positions (tokens, dim) float32: sines in even columns, cosines in odd ones.

    Source: Vaswani et al. 2017, section 3.5 (arXiv:1706.03762).
    """
    columns = torch.arange(0, dim, 2, dtype=torch.float32)
    rates = torch.exp(columns * (-math.log(10000.0) / dim))
    angles = torch.arange(tokens)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[:, :dim]


class SmallBERT(BERT):
    """A BERT whose matrices start as N(0, 1 / D), which suits the small model with D = 128.

    With the usual 0.02, which suits D = 768, positions drown out the tokens: the loss on held-out
    bytes is 2.60 after 1,000 steps of 1,024 tokens, but 2.44 after 600 with this choice.
    """

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Give every parameter its initial value."""
        super().init_weights(generator)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.mul_(self.embed_dim**-0.5 / 0.02)
