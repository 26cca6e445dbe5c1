"""GPT-2 as trained on TinyStories, with any number of heads of any size in each layer.

Papers: GPT-2, Radford et al. 2019, "Language Models are Unsupervised Multitask Learners";
TinyStories, Eldan and Li 2023 (arXiv:2305.07759); the configurations, "Leaner Transformers: More
Heads, Less Depth" (arXiv:2505.20802), which uses a small variant
(github.com/PraveenRaja42/Tiny-Stories-GPT): pre-norm, ReLU, no bias on queries, keys and values, a
classifier of its own with a bias, dropout in the branches alone.

Sizes: B sequences, N tokens, D embed_dim, V vocabulary, H heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leaner_kernels import attention
from leaner_kernels.nn import ManyHeadAttention
from models.cross_entropy import linear_cross_entropy
from models.layers import (
    Block,
    HeadDim,
    Initializer,
    LanguageModel,
    Mlp,
    head_layout,
    require,
    require_rates,
    require_sizes,
)


class LayerCache:
    """The keys and values of one layer for the tokens read so far.

    Args:
        capacity: the most tokens.

    Attributes:
        length: tokens read.
    """

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self._held: Tensor | None = None

    def extend(self, new: Tensor) -> Tensor:
        """Append keys and values (B, N, 2, H, E) of the next tokens; return those of all."""
        end = self.length + new.shape[1]
        if self._held is None:
            self._held = new.new_empty(len(new), self.capacity, *new.shape[2:])
        self._held[:, self.length : end] = new
        self.length = end
        return self._held[:, :end]


class KVCache:
    """The cache of a GPT for the tokens that it has read, so that it reads each only once.

    Args:
        depth: layers of the model.
        capacity: the most tokens: the model's ``sequence_length``.

    Attributes:
        layers: one ``LayerCache`` for each layer.
    """

    def __init__(self, depth: int, capacity: int):
        self.layers = [LayerCache(capacity) for _ in range(depth)]

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self.layers[0].length


class FeedForward(Mlp):
    """Two linear layers around a ReLU: (..., D) -> (..., D)."""

    def __init__(self, dim: int, hidden: int, dropout: float, **factory):
        super().__init__(dim, hidden, **factory)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward of each token."""
        return self.drop(self.fc2(F.relu(self.fc1(x))))


class CausalBlock(Block):
    """``Block`` in which a token sees itself and earlier ones: (B, N, D) -> (B, N, D)."""

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        """Return ``x`` plus its attention and then plus the feed-forward.

        With a cache, ``x`` holds the tokens after the cached ones, and is added to the cache.
        """
        normed = self.norm1(x)
        if cache is None:
            x = x + self.attn(normed, is_causal=True, skip=x)
        else:
            x = x + _attend_cached(self.attn, normed, cache)
        return x + self.mlp(self.norm2(x))


def _attend_cached(attn: ManyHeadAttention, x: Tensor, cache: LayerCache) -> Tensor:
    """Attend from the tokens of ``x`` (B, N, D) to themselves and those in the cache."""
    batch, tokens, _ = x.shape
    qkv = attn.qkv(x).view(batch, tokens, 3, attn.num_heads, attn.head_dim)
    q = qkv[:, :, 0].transpose(1, 2)
    k, v = cache.extend(qkv[:, :, 1:]).permute(2, 0, 3, 1, 4)
    read = k.shape[2] - tokens
    if read and tokens > 1:
        seen = torch.ones(tokens, read + tokens, dtype=torch.bool, device=x.device).tril(read)
        a = attention(q, k, v, seen)
    else:
        a = attention(q, k, v, is_causal=tokens > 1)
    return attn.proj(a.transpose(1, 2).reshape(batch, tokens, -1))


class GPT(LanguageModel):
    """Predict each sequence's next tokens: (B, N) int64 -> (B, N, vocab_size) logits.

    Args:
        vocab_size: number of tokens that there are.
        sequence_length: the most tokens that it sees, as many as have positions.
        embed_dim: width D of a token.
        depth: number of layers.
        heads: heads of every layer, or one number per layer.
        head_dim: width of one head, for all layers or one per layer. A number keeps it fixed, so
            the attention width ``heads * head_dim`` may differ from ``embed_dim`` ("widen").
            ``"split"`` divides the width among the heads: ``embed_dim // heads``, rounded down, so
            12 heads at width 512 are 42 wide and the attention 504.
        mlp_ratio: hidden width of the feed-forward over ``embed_dim``, rounded down.
        dropout: rate for attention probabilities and after both branches of a layer.
        head_bias: the classifier has a bias, as in the variant above and not in GPT-2.
        device: where parameters live; on ``"meta"`` they are left without values, for
            ``to_empty`` and ``init_weights`` later.
        dtype: dtype of the parameters.

    Attributes:
        blocks: the layers, ``nn.ModuleList`` of ``CausalBlock``.
        head_convention: ``"widen"``, ``"split"``, or ``"mixed"`` when layers follow neither.

    Raises:
        ValueError: a size out of range, or a sequence whose length is not ``depth``.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 50257,
        sequence_length: int = 64,
        embed_dim: int = 512,
        depth: int = 12,
        heads: int | Sequence[int] = 12,
        head_dim: HeadDim | Sequence[HeadDim] = "split",
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        head_bias: bool = True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        require_sizes(
            vocab_size=vocab_size, sequence_length=sequence_length, embed_dim=embed_dim, depth=depth
        )
        require_rates(dropout=dropout)
        hidden = int(embed_dim * mlp_ratio)
        require(hidden >= 1, "mlp_ratio", f"at least 1/{embed_dim}", mlp_ratio)
        layout = head_layout(heads, head_dim, embed_dim, depth)
        heads, head_dims, self.head_convention = layout

        self.vocab_size, self.sequence_length = vocab_size, sequence_length
        self.embed_dim = embed_dim
        meta = {"device": "meta", "dtype": dtype}
        self.token_embed = nn.Embedding(vocab_size, embed_dim, **meta)
        self.pos_embed = nn.Parameter(torch.empty(sequence_length, embed_dim, **meta))
        options = {"qkv_bias": False, "attn_drop": dropout, "proj_drop": dropout, **meta}
        self.blocks = nn.ModuleList(
            CausalBlock(
                embed_dim,
                ManyHeadAttention(embed_dim, h, e, **options),
                FeedForward(embed_dim, hidden, dropout, **meta),
                **meta,
            )
            for h, e in zip(heads, head_dims)
        )
        self.norm = nn.LayerNorm(embed_dim, **meta)
        self.head = nn.Linear(embed_dim, vocab_size, bias=head_bias, **meta)
        self.materialize(device)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Return the logits of the next token at each position, or the losses.

        Args:
            tokens: (B, N) int64.
            targets: (B, N) int64: the token after each, -100 where it does not matter.
            cache: cache of the earlier tokens, to which these are added; for a model in eval mode,
                without gradients. Nothing is captured then.

        Returns:
            Logits (B, N, V); with ``targets`` the cross-entropy of each token, (B, N) float32, 0
            where ignored, computed with few logits in memory by ``linear_cross_entropy``.

        Raises:
            ValueError: tokens of another shape or dtype, or more than have positions.
        """
        self.check_tokens(tokens)
        read = 0 if cache is None else cache.length
        end = read + tokens.shape[1]
        if end > self.sequence_length:
            raise ValueError(
                f"tokens must be at most {self.sequence_length - read} after the {read} in the "
                f"cache, got {tokens.shape[1]}"
            )
        x = self.token_embed(tokens) + self.pos_embed[read:end]
        for layer, block in enumerate(self.blocks):
            x = block(x) if cache is None else block(x, cache.layers[layer])
        x = self.norm(x)
        if targets is None:
            return self.head(x)
        return linear_cross_entropy(x, self.head.weight, targets, self.head.bias)

    def _init_own(self, initialize: Initializer) -> None:
        initialize(self.pos_embed, nn.init.normal_, std=0.02)
        initialize(self.token_embed.weight, nn.init.normal_, std=0.02)


@torch.no_grad()
def generate(
    model: GPT,
    tokens: Tensor,
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue sequences token by token, each drawn from the model's distribution.

    Past ``sequence_length`` the model sees only the newest tokens. Their positions then change with
    every token, so that cached results cannot be reused.

    Args:
        model: may be sharded by FSDP; then every rank must call this with equally long sequences
            and the same number of new tokens. Its training mode is restored.
        tokens: (B, N) int64, N at least 1.
        new_tokens: how many to add.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample only among the ``top_k`` likeliest tokens.
        generator: source of randomness, on the device of ``tokens``.

    Returns:
        (B, N + new_tokens) int64, beginning with ``tokens``.

    Raises:
        ValueError: an argument out of range.
    """
    require(tokens.ndim == 2 and tokens.numel() > 0, "tokens", "(B, N)", tuple(tokens.shape))
    require(new_tokens >= 0, "new_tokens", "at least 0", new_tokens)
    require(temperature >= 0, "temperature", "at least 0", temperature)
    in_vocabulary = top_k is None or 1 <= top_k <= model.vocab_size
    require(in_vocabulary, "top_k", f"in [1, {model.vocab_size}]", top_k)
    was_training = model.training
    cache, unread = KVCache(len(model.blocks), model.sequence_length), tokens
    try:
        model.eval()
        # Compiled blocks would be compiled again for every length.
        with torch.compiler.set_stance("force_eager"):
            for _ in range(new_tokens):
                if tokens.shape[1] <= model.sequence_length:
                    logits = model(unread, cache=cache)
                else:
                    logits = model(tokens[:, -model.sequence_length :])
                unread = _draw_next(logits[:, -1], temperature, top_k, generator)
                tokens = torch.cat([tokens, unread], dim=1)
    finally:
        model.train(was_training)
    return tokens


def _draw_next(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Return one token for each row of logits (B, V): (B, 1) int64."""
    if temperature == 0:
        return logits.argmax(dim=1, keepdim=True)
    logits, names = logits.float().topk(top_k or logits.shape[1], dim=1)
    # Subtract the largest logit, the first: divided by a tiny temperature, logits would be
    # infinite.
    logits = (logits - logits[:, :1]) / max(temperature, torch.finfo(torch.float32).tiny)
    chosen = torch.multinomial(torch.softmax(logits, 1), 1, generator=generator)
    return names.gather(1, chosen)
