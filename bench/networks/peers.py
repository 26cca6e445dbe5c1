"""Build timm's and transformers' models of the paper's rows, as peers of ours.

timm splits the width among the heads; where a row widens it, its attention gets projections of that
width around its own computation. Models of transformers are as similar as their options allow. Each
is a module that returns the mean loss of a batch, and its builder describes the differences from
our model.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.attention.operators import cross_covariance
from bench.harness.peers import AbsentError, found
from bench.networks.cases import IGNORED, Batch, masked_of

# What timm calls our arguments, where it has another word.
COMMON = {"image_size": "img_size", "heads": "num_heads"}
WORDS = {
    "vit": COMMON,
    "xcit": COMMON,
    "tnt": {**COMMON, "heads": "num_heads_outer", "inner_heads": "num_heads_inner"},
    "volo": {**COMMON, "depths": "layers"},
    "davit": {"heads": "num_heads", "window": "window_size"},
}


def timm_model(architecture: str, config: Mapping[str, Any]) -> nn.Module:
    """Build timm's model, on the default device, with random weights.

    Args:
        architecture: as in ``papers.MODELS``.
        config: arguments of our constructor.

    Raises:
        AbsentError: timm is not installed, or has no such model.
    """
    if architecture not in BUILDERS:
        raise AbsentError(f"timm has no {architecture}")
    sizes = dict(config)
    head_dim = sizes.pop("head_dim", "split")
    if architecture == "davit":  # takes images of any size
        sizes.pop("image_size", None)
    words = WORDS[architecture]
    return BUILDERS[architecture](head_dim, **{words.get(k, k): v for k, v in sizes.items()})


def _vit(head_dim: int | str, **sizes: Any) -> nn.Module:
    attention = found("timm.layers", "Attention")

    class FixedWidthAttention(attention):
        def __init__(self, *args: Any, **kwargs: Any):
            width = None if head_dim == "split" else head_dim
            super().__init__(*args, attn_head_dim=width, **kwargs)

    model = found("timm.models.vision_transformer", "VisionTransformer")
    model = model(attn_layer=FixedWidthAttention, **sizes)
    for block in model.blocks:
        block.attn.__class__ = attention  # the adapter leaves subclasses alone
    return model


class WideXCA(nn.Module):
    """XCiT's attention with heads of any width, as timm computes it between its projections."""

    def __init__(self, like: nn.Module, dim: int, heads: int, head_dim: int):
        """Take the temperature of timm's own module."""
        super().__init__()
        self.sizes = 3, heads, head_dim
        self.temperature = like.temperature
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, N, dim) of (B, N, dim)."""
        out = cross_covariance(self.qkv(x).unflatten(-1, self.sizes), self.temperature[:, 0, 0])
        return self.proj(out.flatten(2))


def _xcit(head_dim: int | str, **sizes: Any) -> nn.Module:
    # What timm's entry points of the rows set.
    model = found("timm.models.xcit", "Xcit")(eta=1e-5, tokens_norm=True, **sizes)
    dim, heads = sizes["embed_dim"], sizes["num_heads"]
    if head_dim != "split" and head_dim * heads != dim:
        for block in model.blocks:
            block.attn = WideXCA(block.attn, dim, heads, head_dim)
    return model


def _split_only(module: str, name: str, head_dim: int | str, **sizes: Any) -> nn.Module:
    if head_dim != "split":
        raise AbsentError(f"timm's {name} splits its width, and head_dim is {head_dim}")
    return found(f"timm.models.{module}", name)(**sizes)


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "vit": _vit,
    "xcit": _xcit,
    "tnt": partial(_split_only, "tnt", "TNT"),
    "volo": partial(_split_only, "volo", "VOLO"),
    "davit": partial(_split_only, "davit", "DaVit"),
}


# Settings of every configuration: attention that calls PyTorch's, and no dropout.
SDPA = {"attn_implementation": "sdpa"}


class MeanLoss(nn.Module):
    """A model with its head."""

    def __init__(self, model: nn.Module, causal: bool):
        """Keep the model."""
        super().__init__()
        self.model, self.causal = model, causal

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of the tokens that count."""
        # Targets that are shifted already: otherwise a causal model shifts them, and drops one.
        shifted = {"shift_labels": batch.targets, "use_cache": False} if self.causal else {}
        return self.model(batch.tokens, labels=batch.targets, **shifted).loss


class MaskedLoss(nn.Module):
    """A ``BertForMaskedLM`` whose head computes logits of the masked tokens alone."""

    def __init__(self, model: nn.Module):
        """Keep the model."""
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of the masked tokens; every sequence has as many of them."""
        hidden, targets = self.model.bert(batch.tokens)[0].flatten(0, 1), batch.targets.flatten()
        count = len(batch.tokens) * masked_of(batch.tokens.shape[1])
        # A number of tokens that is known ahead: a boolean index would synchronise.
        masked = (targets != IGNORED).byte().argsort(descending=True, stable=True)[:count]
        return F.cross_entropy(self.model.cls(hidden[masked]), targets[masked])


def _hidden(config: Mapping[str, Any]) -> int:
    return int(config["embed_dim"] * config["mlp_ratio"])


def bert(config: Mapping[str, Any], masked: bool = False) -> nn.Module:
    """Return ``BertForMaskedLM``; its feed-forward of two layers has the weights of our gated one.

    Norms after the residual, biases, learned positions, a layer before the decoder, and logits of
    every token, or with ``masked`` of the masked ones as ours.
    """
    settings = found("transformers", "BertConfig")(
        vocab_size=config["vocab_size"],
        hidden_size=config["embed_dim"],
        num_hidden_layers=config["depth"],
        num_attention_heads=config["heads"],
        max_position_embeddings=config["sequence_length"],
        intermediate_size=_hidden(config) * 3 // 4,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **SDPA,
    )
    model = found("transformers", "BertForMaskedLM")(settings)
    return MaskedLoss(model) if masked else MeanLoss(model, causal=False)


def gpt2(config: Mapping[str, Any]) -> nn.Module:
    """Return ``GPT2LMHeadModel``, with our heads where they do not divide the width.

    A classifier of its own with a bias, biases of q, k and v, logits in float32.
    """
    dim, heads = config["embed_dim"], config["heads"]
    settings = found("transformers", "GPT2Config")(
        vocab_size=config["vocab_size"],
        n_positions=config["sequence_length"],
        n_embd=dim,
        n_layer=config["depth"],
        n_head=1,
        n_inner=_hidden(config),
        activation_function="relu",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        tie_word_embeddings=False,
        loss_type="ForCausalLM",
        **{f"{name}_token_id": 0 for name in ("bos", "eos")},
        **SDPA,
    )
    model = found("transformers", "GPT2LMHeadModel")(settings)
    linear = found("transformers.pytorch_utils", "Conv1D")
    head_dim = config.get("head_dim", "split")
    head_dim = dim // heads if head_dim == "split" else head_dim
    width = heads * head_dim
    for block in model.transformer.h:
        attn = block.attn
        attn.num_heads, attn.head_dim, attn.split_size = heads, head_dim, width
        attn.scaling = head_dim**-0.5
        attn.c_attn, attn.c_proj = linear(3 * width, dim), linear(dim, width)
    model.lm_head = nn.Linear(dim, config["vocab_size"])
    return MeanLoss(model, causal=True)


# By architecture; docstrings say how each differs from ours.
TRANSFORMERS = {"bert": bert, "gpt": gpt2}


def transformers_model(
    architecture: str, config: Mapping[str, Any], device: torch.device, masked: bool = False
) -> nn.Module:
    """Build a model of transformers with random weights from a fixed seed.

    Args:
        architecture: as in ``papers.MODELS``.
        config: arguments of our constructor.
        device: where.
        masked: of ``bert``, which alone takes it.

    Raises:
        AbsentError: transformers is not installed, or has no such model.
    """
    torch.manual_seed(0)
    options = {"masked": True} if masked else {}
    return TRANSFORMERS[architecture](config, **options).to(device)
