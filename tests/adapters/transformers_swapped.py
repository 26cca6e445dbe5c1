"""More families of transformers, as data: what ``use`` makes of each."""

from torch import Tensor

from tests.adapters.transformers_families import (
    BOTH_SIDES,
    GROUPED,
    IMAGES,
    SIZES,
    VOCAB,
    WINDOW,
    Family,
    audio_values,
    encoded_and_decoded,
    pictures,
    tokens,
)

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
GPTJ = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GEMMA2 = "Gemma2ForCausalLM", "Gemma2Config"
# So near to the scores that a softcap is felt.
CAPPED = GROUPED | {"attn_logit_softcapping": 0.5}
UNPADDED = ("none",)
# Gemma 2's eager attention has NaN in float64 for a row that sees nothing, left of a padded text.
RIGHT = "none", "right"


def both(mask: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tokens(mask)["input_ids"]} | pictures(mask)


def family(*given, padded=("left",), exact="sdpa"):
    return Family(*given, padded=padded, exact=exact)


# Of which every attention is swapped.
SWAPPED = [
    family("qwen2", "Qwen2ForCausalLM", "Qwen2Config", SIZES | {"num_key_value_heads": 2}, tokens),
    family("olmo2", "Olmo2ForCausalLM", "Olmo2Config", SIZES | {"num_key_value_heads": 2}, tokens),
    family("cohere", "CohereForCausalLM", "CohereConfig", SIZES, tokens),
    family("granite", "GraniteForCausalLM", "GraniteConfig", SIZES, tokens),
    family("phi", "PhiForCausalLM", "PhiConfig", SIZES, tokens),
    family("gptj", "GPTJModel", "GPTJConfig", GPTJ | {"rotary_dim": 4}, tokens),
    family(
        "stablelm",
        "StableLmForCausalLM",
        "StableLmConfig",
        SIZES | {"num_key_value_heads": 4},
        tokens,
    ),
    family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        SIZES | {"num_key_value_heads": 2, "sliding_window": WINDOW},
        tokens,
    ),
    family("electra", "ElectraForMaskedLM", "ElectraConfig", SIZES, tokens),
    family("distilbert", "DistilBertForMaskedLM", "DistilBertConfig", DISTIL, tokens),
    family("albert", "AlbertForMaskedLM", "AlbertConfig", SIZES | {"embedding_size": 16}, tokens),
    family(
        "mbart",
        "MBartForConditionalGeneration",
        "MBartConfig",
        BOTH_SIDES | {"max_position_embeddings": 64},
        encoded_and_decoded,
    ),
    family("clip", "CLIPVisionModel", "CLIPVisionConfig", IMAGES, pictures, padded=UNPADDED),
    family("deit", "DeiTModel", "DeiTConfig", IMAGES, pictures, padded=UNPADDED),
    family("swin", "SwinModel", "SwinConfig", STAGES, pictures, padded=UNPADDED),
    family("gemma2", *GEMMA2, CAPPED, tokens, padded=RIGHT, exact="eager"),
    family("wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config", AUDIO, audio_values, padded=UNPADDED),
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
    family("sam", "SamModel", "SamConfig", SAM, pictures, padded=UNPADDED),
    family("git", "GitModel", "GitConfig", GIT, both, padded=UNPADDED, exact="eager"),
]
LEFT = {
    "sam": "SamVisionSdpaAttention computes its attention itself",
    "git": "GitSelfAttention computes its attention itself",
}
# Whose calls fall back, and why.
FALLBACKS = [
    family("gemma", "GemmaForCausalLM", "GemmaConfig", GROUPED | {"head_dim": 136}, tokens),
    family("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT, tokens),
    family("gemma2", *GEMMA2, GROUPED | {"head_dim": 136}, tokens, padded=RIGHT, exact="eager"),
]
# In which nothing dispatches; a release of transformers may change that.
REFUSED = [
    family("bloom", "BloomModel", "BloomConfig", {"hidden_size": 32, "n_layer": 1} | SIZES, tokens),
    family("deberta_v2", "DebertaV2Model", "DebertaV2Config", SIZES, tokens),
    family("falcon", "FalconModel", "FalconConfig", SIZES, tokens),
    family(
        "gpt_neo",
        "GPTNeoModel",
        "GPTNeoConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64},
        tokens,
    ),
    family("longformer", "LongformerModel", "LongformerConfig", SIZES, tokens),
    family("swinv2", "Swinv2Model", "Swinv2Config", STAGES, pictures, padded=UNPADDED),
]
