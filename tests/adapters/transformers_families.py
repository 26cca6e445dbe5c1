"""Tiny random models of families of transformers, as data: their inputs, what ``use`` makes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

BATCH, TOKENS, VOCAB, WINDOW = 2, 11, 40, 4
# The second sequence holds five tokens fewer.
PADDING = {
    "none": [[1] * 11, [1] * 11],
    "right": [[1] * 11, [1] * 6 + [0] * 5],
    "left": [[1] * 11, [0] * 5 + [1] * 6],
}


class Family(NamedTuple):
    """A family of models.

    Attributes:
        name: of the family.
        architecture: class of transformers.
        sizes: of a tiny one.
        inputs: make the arguments of a forward of what a row of ``PADDING`` states.
        generates: whether ``generate`` continues a text with a cache of keys and values.
        padded: the rows of ``PADDING`` that mean something to it.
        exact: what attention in float64 and its peer in float32 run on.
    """

    name: str
    architecture: str
    sizes: dict[str, Any]
    inputs: Callable[[Tensor], dict[str, Tensor]]
    generates: bool = False
    padded: tuple[str, ...] = ("none", "left")
    exact: str = "sdpa"

    def fresh(self) -> transformers.PreTrainedModel:
        """Return a model as it is constructed."""
        torch.manual_seed(0)
        cls = getattr(transformers, self.architecture)
        return cls(cls.config_class(**self.sizes)).eval()

    def build(self) -> transformers.PreTrainedModel:
        """Return a model with random weights that make its scores differ, in float32."""
        model = self.fresh()
        with torch.no_grad():
            for weights in model.parameters():
                weights.add_(0.2 * torch.randn_like(weights))
        return model


def tokens(mask: Tensor) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids.where(mask.bool(), 0), "attention_mask": mask}


def encoded_and_decoded(mask: Tensor) -> dict[str, Tensor]:
    decoder = tokens(mask[:, 2:9])
    return tokens(mask) | {f"decoder_{name}": given for name, given in decoder.items()}


def audio(mask: Tensor) -> dict[str, Tensor]:
    features = torch.randn(BATCH, 8, 24, generator=torch.Generator().manual_seed(1))
    return {"input_features": features} | {f"decoder_{n}": t for n, t in tokens(mask).items()}


def audio_values(mask: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"input_values": torch.randn(len(mask), 400, generator=generator)}


def pictures(mask: Tensor) -> dict[str, Tensor]:
    shape = (len(mask), 3, 12, 12)
    return {"pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(1))}


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 12}
IMAGES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 12,
    "patch_size": 3,
}
BOTH_SIDES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SLIDING = ["sliding_attention", "full_attention"]

# Of which every attention is swapped.
FAMILIES = [
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        tokens,
        generates=True,
    ),
    Family("llama", "LlamaForCausalLM", GROUPED, tokens, generates=True),
    Family(
        "mistral",
        "MistralForCausalLM",
        GROUPED | {"sliding_window": WINDOW},
        tokens,
        generates=True,
    ),
    Family("qwen3", "Qwen3ForCausalLM", GROUPED, tokens, generates=True),
    Family("phi3", "Phi3ForCausalLM", SIZES | {"num_key_value_heads": 2}, tokens, generates=True),
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        GROUPED | {"sliding_window": WINDOW, "layer_types": SLIDING},
        tokens,
        generates=True,
    ),
    Family("gpt_neox", "GPTNeoXForCausalLM", SIZES, tokens, generates=True),
    Family(
        "opt",
        "OPTForCausalLM",
        SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},
        tokens,
        generates=True,
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        GROUPED
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": WINDOW}
        | {"layer_types": SLIDING, "experts_implementation": "eager"},
        tokens,
        generates=True,
        exact="eager",
    ),
    Family("bert", "BertForMaskedLM", SIZES, tokens),
    Family("roberta", "RobertaForMaskedLM", SIZES, tokens),
    Family(
        "modernbert",
        "ModernBertForMaskedLM",
        SIZES | {"local_attention": WINDOW, "layer_types": SLIDING},
        tokens,
    ),
    Family(
        "t5",
        "T5ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2}
        | {"num_heads": 4, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
        encoded_and_decoded,
        generates=True,
    ),
    Family(
        "bart",
        "BartForConditionalGeneration",
        BOTH_SIDES | {"max_position_embeddings": 64},
        encoded_and_decoded,
        generates=True,
    ),
    Family(
        "nllb_moe",
        "NllbMoeForConditionalGeneration",
        BOTH_SIDES | {"max_position_embeddings": 64, "num_experts": 2},
        encoded_and_decoded,
        generates=True,
        exact="eager",
    ),
    Family(
        "whisper",
        "WhisperForConditionalGeneration",
        BOTH_SIDES | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 64},
        audio,
    ),
    Family("vit", "ViTModel", IMAGES | {"head_dim": 12}, pictures, padded=("none",)),
    Family("dinov2", "Dinov2Model", IMAGES, pictures, padded=("none",)),
]
DISTIL = {"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
DISTIL |= {"max_position_embeddings": 64, "pad_token_id": 0, "attention_dropout": 0.0}
STAGES = {"image_size": 12, "patch_size": 3, "embed_dim": 16, "depths": [1, 1]}
STAGES |= {"num_heads": [2, 4], "window_size": 2}
AUDIO = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
AUDIO |= {"intermediate_size": 48, "conv_dim": (16, 16), "conv_kernel": (10, 3)}
AUDIO |= {"conv_stride": (5, 2), "num_feat_extract_layers": 2, "vocab_size": VOCAB}
AUDIO |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
LATENT = GROUPED | {"head_dim": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
LATENT |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
LATENT |= {"moe_intermediate_size": 16, "v_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"qk_rope_head_dim": 4, "first_k_dense_replace": 2}
SPARSE = {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 8}
GPTJ = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
# So near to the scores that a softcap is felt.
CAPPED = GROUPED | {"attn_logit_softcapping": 0.5}
UNPADDED = ("none",)
# Gemma 2's eager attention has NaN in float64 for a row that sees nothing, left of a padded text.
RIGHT = "none", "right"


def both(mask: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tokens(mask)["input_ids"]} | pictures(mask)


def family(*given: Any, padded: tuple[str, ...] = ("left",), exact: str = "sdpa") -> Family:
    return Family(*given, padded=padded, exact=exact)


FAMILIES += [
    family("qwen2", "Qwen2ForCausalLM", SIZES | {"num_key_value_heads": 2}, tokens),
    family("olmo2", "Olmo2ForCausalLM", SIZES | {"num_key_value_heads": 2}, tokens),
    family("cohere", "CohereForCausalLM", SIZES, tokens),
    family("granite", "GraniteForCausalLM", SIZES, tokens),
    family("phi", "PhiForCausalLM", SIZES, tokens),
    family("gptj", "GPTJModel", GPTJ | {"rotary_dim": 4}, tokens),
    family("stablelm", "StableLmForCausalLM", SIZES | {"num_key_value_heads": 4}, tokens),
    family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        SIZES | {"num_key_value_heads": 2, "sliding_window": WINDOW},
        tokens,
    ),
    family("electra", "ElectraForMaskedLM", SIZES, tokens),
    family("distilbert", "DistilBertForMaskedLM", DISTIL, tokens),
    family("albert", "AlbertForMaskedLM", SIZES | {"embedding_size": 16}, tokens),
    family(
        "mbart",
        "MBartForConditionalGeneration",
        BOTH_SIDES | {"max_position_embeddings": 64},
        encoded_and_decoded,
    ),
    family("clip", "CLIPVisionModel", IMAGES, pictures, padded=UNPADDED),
    family("deit", "DeiTModel", IMAGES, pictures, padded=UNPADDED),
    family("swin", "SwinModel", STAGES, pictures, padded=UNPADDED),
    family("gemma2", "Gemma2ForCausalLM", CAPPED, tokens, padded=RIGHT, exact="eager"),
    family("wav2vec2", "Wav2Vec2Model", AUDIO, audio_values, padded=UNPADDED),
]
SAM_VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SAM_VISION |= {"image_size": 12, "patch_size": 3, "output_channels": 8, "mlp_dim": 16}
SAM_VISION |= {"window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 4}
SAM = {"vision_config": SAM_VISION, "prompt_encoder_config": {"hidden_size": 8, "image_size": 12}}
SAM["prompt_encoder_config"] |= {"patch_size": 3, "mask_input_channels": 4}
SAM |= {"mask_decoder_config": {"hidden_size": 8, "num_attention_heads": 2, "mlp_dim": 16}}
SAM["mask_decoder_config"] |= {"num_hidden_layers": 1, "iou_head_hidden_dim": 8}
GIT = SIZES | {"vision_config": IMAGES}
# Of which some are left: by family, how many, and what for.
PARTLY = [
    family("sam", "SamModel", SAM, pictures, padded=UNPADDED),
    family("git", "GitModel", GIT, both, padded=UNPADDED, exact="eager"),
]
LEFT = {
    "sam": "SamVisionSdpaAttention computes its attention itself",
    "git": "GitSelfAttention computes its attention itself",
}
# Whose heads the kernels do not take.
UNSUPPORTED = [
    family("deepseek_v3", "DeepseekV3ForCausalLM", LATENT, tokens),
    family("gemma2", "Gemma2ForCausalLM", GROUPED | {"head_dim": 136}, tokens, exact="eager"),
    family("deepseek_v32", "DeepseekV32ForCausalLM", LATENT | SPARSE, tokens, exact="eager"),
]
# In which nothing dispatches; a release of transformers may change that.
REFUSED = [
    family("bloom", "BloomModel", {"hidden_size": 32, "n_layer": 1} | SIZES, tokens),
    family("deberta_v2", "DebertaV2Model", SIZES, tokens),
    family("falcon", "FalconModel", SIZES, tokens),
    family(
        "gpt_neo",
        "GPTNeoModel",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64},
        tokens,
    ),
    family("longformer", "LongformerModel", SIZES, tokens),
    family("swinv2", "Swinv2Model", STAGES, pictures, padded=UNPADDED),
]
