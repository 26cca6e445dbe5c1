"""Build transformers' models of the paper's language rows, as close as their options allow.

Each is a module of a batch that returns the mean loss; ``differences`` states in which way it is
another model than ours.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness.peers import found
from bench.networks.language_cases import Batch

# What every configuration is given: attention that calls PyTorch's, and no dropout.
SDPA = {"attn_implementation": "sdpa"}


class MaskedModel(nn.Module):
    """BERT or ModernBERT with its head for masked tokens."""

    def __init__(self, model: nn.Module):
        """Keep the model."""
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of the tokens that count."""
        return self.model(batch.tokens, labels=batch.targets).loss

    def logits(self, batch: Batch) -> Tensor:
        """Return (B, N, V)."""
        return self.model(batch.tokens).logits


class CausalModel(MaskedModel):
    """GPT-2 with its head."""

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of all tokens."""
        # Targets that are shifted already: otherwise the model shifts them, and drops one.
        given = {"labels": batch.targets, "shift_labels": batch.targets, "use_cache": False}
        return self.model(batch.tokens, **given).loss


def _head_dim(config: Mapping[str, Any]) -> int:
    given = config.get("head_dim", "split")
    return config["embed_dim"] // config["heads"] if given == "split" else given


def _hidden(config: Mapping[str, Any]) -> int:
    return int(config["embed_dim"] * config["mlp_ratio"])


def bert(config: Mapping[str, Any]) -> nn.Module:
    """Return ``BertForMaskedLM``; two layers of its feed-forward have the weights of our three."""
    settings = found("transformers", "BertConfig")(
        vocab_size=config["vocab_size"],
        hidden_size=config["embed_dim"],
        num_hidden_layers=config["depth"],
        num_attention_heads=config["heads"],
        intermediate_size=_hidden(config) * 3 // 4,
        max_position_embeddings=config["sequence_length"],
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **SDPA,
    )
    return MaskedModel(found("transformers", "BertForMaskedLM")(settings))


def modernbert(config: Mapping[str, Any]) -> nn.Module:
    """Return ``ModernBertForMaskedLM``, gated and without biases as ours, all attention global."""
    special = ("pad", "bos", "eos", "cls", "sep")
    settings = found("transformers", "ModernBertConfig")(
        vocab_size=config["vocab_size"],
        hidden_size=config["embed_dim"],
        num_hidden_layers=config["depth"],
        num_attention_heads=config["heads"],
        intermediate_size=_hidden(config) // 2,
        max_position_embeddings=config["sequence_length"],
        layer_types=["full_attention"] * config["depth"],
        sparse_prediction=True,
        **{f"{name}_token_id": 0 for name in special},
        **SDPA,
    )
    return MaskedModel(found("transformers", "ModernBertForMaskedLM")(settings))


def gpt2(config: Mapping[str, Any]) -> nn.Module:
    """Return ``GPT2LMHeadModel``, with our heads where they do not divide the width."""
    dim, heads = config["embed_dim"], config["heads"]
    settings = found("transformers", "GPT2Config")(
        vocab_size=config["vocab_size"],
        n_positions=config["sequence_length"],
        n_embd=dim,
        n_layer=config["depth"],
        n_head=1,
        n_inner=_hidden(config),
        activation_function="relu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        loss_type="ForCausalLM",
        bos_token_id=0,
        eos_token_id=0,
        **SDPA,
    )
    model = found("transformers", "GPT2LMHeadModel")(settings)
    linear = found("transformers.pytorch_utils", "Conv1D")
    head_dim = _head_dim(config)
    width = heads * head_dim
    for block in model.transformer.h:
        attn = block.attn
        attn.num_heads, attn.head_dim, attn.split_size = heads, head_dim, width
        attn.scaling = head_dim**-0.5
        attn.c_attn, attn.c_proj = linear(3 * width, dim), linear(dim, width)
    model.lm_head = nn.Linear(dim, config["vocab_size"])
    return CausalModel(model)


Build = Callable[[Mapping[str, Any]], nn.Module]
# By architecture: name, how it is built, and in what it differs from ours.
TRANSFORMERS: dict[str, dict[str, tuple[Build, str]]] = {
    "bert": {
        "transformers": (
            bert,
            "BERT: norms after the residual, biases, learned positions, a feed-forward of two "
            "layers with the weights of the gated one, a layer before the decoder, logits of every "
            "token",
        ),
        "transformers_modernbert": (
            modernbert,
            "ModernBERT: rotary positions, norms without bias, a layer before the decoder; logits "
            "of the masked tokens alone, as ours",
        ),
    },
    "gpt": {
        "transformers": (
            gpt2,
            "GPT-2 with our heads put in, and a classifier of its own with a bias: q, k and v have "
            "biases; logits in float32",
        ),
    },
}


def differences(architecture: str, name: str) -> str:
    """Return in what a model of transformers is another than ours."""
    return TRANSFORMERS[architecture][name][1]


def transformers_model(
    architecture: str, name: str, config: Mapping[str, Any], device: torch.device
) -> nn.Module:
    """Build a model of transformers with random weights from a fixed seed.

    Args:
        architecture: as in ``papers.MODELS``.
        name: one of its ``TRANSFORMERS``.
        config: arguments of our constructor.
        device: where.

    Raises:
        AbsentError: transformers is not installed, or has no such model.
    """
    torch.manual_seed(0)
    return TRANSFORMERS[architecture][name][0](config).to(device)
