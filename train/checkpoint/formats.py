"""Folders that timm or transformers load by themselves, where the architecture is theirs.

What is written is loaded by that library first and its logits compared: a folder that is in place
gives those of the model.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from train.checkpoint.weights import Info
from train.data.text.tokenizers import kept_tokenizer

# Of timm's models, whose own sizes are replaced: one of each family. VOLO's cannot be.
_OF_TIMM = {
    "vit": ["vit_base_patch16_224"],
    "xcit": ["xcit_small_12_p16_224"],
    "tnt": ["tnt_b_patch16_224"],
    "davit": ["davit_tiny"],
    "volo": [f"volo_d{size}_224" for size in range(1, 6)],
}
# Names of the token that fills up texts; without one the end does.
_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>")
# Logits may differ by rounding alone.
_RELATIVE = 1e-3


def write(kind: str, model: nn.Module, info: Info, out: Path) -> None:
    """Write a folder.

    Args:
        kind: "timm" or "transformers".
        model: in eval mode on the CPU.
        info: of it.
        out: of the folder, which must not be there yet, or be empty.

    Raises:
        ValueError: the library has no such model, or is missing; or ``out`` has something in it.
        OSError: it cannot be written; nothing of it is left.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"OUT must be a new or empty folder, got {out}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        partial = Path(folder) / out.name
        partial.mkdir()
        try:
            again, inputs = (_timm if kind == "timm" else _transformers)(model, info, partial)
        except ImportError as error:
            raise ValueError(
                f"--format {kind} needs the package {kind} ({error}): pip install {kind}"
            ) from None
        _compare(kind, model, again, inputs)
        _follow_umask(partial)
        if out.exists():
            out.rmdir()
        partial.replace(out)


def _compare(
    kind: str, model: nn.Module, again: Callable[[Tensor], Tensor], inputs: Tensor
) -> None:
    with torch.no_grad():
        ours, theirs = model(inputs), again(inputs)
    if ours.shape != theirs.shape or (ours - theirs).abs().max() > _RELATIVE * ours.abs().max():
        raise ValueError(f"{kind} computes other logits with these weights: nothing is written")


def _follow_umask(folder: Path) -> None:
    """Let the umask say who may read files that a library made for the user alone."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in folder.iterdir():
        file.chmod(mode)


def _timm(model: nn.Module, info: Info, out: Path) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    import timm

    if info.family not in _OF_TIMM:
        raise ValueError(f"--format timm is for {', '.join(_OF_TIMM)}, got {info.family}")
    sizes = {"in_chans": info.channels, "num_classes": len(info.classes)}
    sizes |= _timm_sizes(model, info)
    views = {
        "input_size": (info.channels, info.image_size, info.image_size),
        "mean": info.mean,
        "std": info.std,
        "interpolation": "bicubic",
        "crop_pct": 224 / 256,
        # Of timm's own weights.
        "tag": "",
        "license": None,
    }
    state, cause = model.state_dict(), ""
    for name in _OF_TIMM[info.family]:
        try:
            with torch.device("meta"):
                theirs = timm.create_model(
                    name, pretrained=False, pretrained_cfg_overlay=views, **sizes
                )
            theirs.load_state_dict(state, assign=True)
            break
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            cause = " ".join(str(error).split())[:200]
    else:
        if info.family == "volo":
            cause = f"it has {', '.join(_OF_TIMM['volo'])} alone"
        raise ValueError(f"timm's {info.family} is not of these sizes: {cause}")
    names = {"label_names": list(info.classes)}
    timm.models.save_for_hf(
        theirs, str(out), model_config=names, model_args=sizes, safe_serialization=True
    )
    again = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    generator = torch.Generator().manual_seed(0)
    return again, torch.randn(2, *views["input_size"], generator=generator)


def _timm_sizes(model: nn.Module, info: Info) -> dict[str, Any]:
    """Return timm's arguments for a model of ours.

    Raises:
        ValueError: its attention is not as wide as its tokens, its layers are not alike, or its
            patches are none of timm's.
    """
    given = info.arguments
    for layer in model.attention_modules().values():
        if layer.num_heads * layer.head_dim != layer.dim:
            raise ValueError(
                f"timm has no attention of another width than its tokens: here {layer.num_heads} "
                f"heads of {layer.head_dim} are {layer.num_heads * layer.head_dim} wide, a token "
                f"{layer.dim}"
            )
    if info.family == "davit":
        stages = [[block.attn for layer in s.blocks for block in layer] for s in model.stages]
        return {
            "embed_dims": [stage[0].dim for stage in stages],
            "depths": [len(stage) // 2 for stage in stages],
            "num_heads": [_heads(stage, "of a stage") for stage in stages],
            "window_size": model.window,
            "mlp_ratio": given.get("mlp_ratio", 4.0),
        }
    image = {"img_size": info.image_size, "patch_size": model.patch_size}
    if info.family == "volo":
        return image
    heads = _heads(model.attention_modules().values(), "for all layers")
    sizes = {"mlp_ratio": given.get("mlp_ratio", 4.0)} | image
    sizes |= {"embed_dim": given["embed_dim"], "depth": given["depth"]}
    if info.family == "tnt":
        return sizes | {
            "num_heads_outer": heads,
            "num_heads_inner": given.get("inner_heads", 4),
            "inner_dim": given.get("inner_dim", 40),
            "first_stride": given.get("inner_stride", 4),
        }
    sizes["num_heads"] = heads
    if info.family == "vit" and given.get("pool", "token") == "avg":
        sizes |= {"global_pool": "avg", "class_token": False}
    if info.family == "xcit":
        if model.patch_size not in (8, 16):
            raise ValueError(f"timm's XCiT has patches of 8 or 16 pixels, got {model.patch_size}")
        sizes |= {"eta": given.get("eta", 1e-5), "cls_attn_layers": given.get("class_depth", 2)}
    return sizes


def _heads(layers: Iterable[nn.Module], of: str) -> int:
    heads = [layer.num_heads for layer in layers]
    if len(set(heads)) > 1:
        raise ValueError(f"timm has one number of heads {of}, got {heads}")
    return heads[0]


def _transformers(
    model: nn.Module, info: Info, out: Path
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    if info.family == "bert":
        raise ValueError(
            "transformers has no Crammed BERT: norms before each branch, a gated feed-forward "
            "without biases and scaled sinusoids fit none of its BERTs"
        )
    if info.family != "gpt":
        raise ValueError(f"--format transformers is for a GPT, got {info.family}: give timm")
    import transformers
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    given, width = info.arguments, model.embed_dim
    heads = {(layer.num_heads, layer.head_dim) for layer in model.attention_modules().values()}
    number, each = next(iter(heads))
    if len(heads) > 1 or number * each != width:
        shown = ", ".join(f"{h} heads of {e}" for h, e in sorted(heads))
        raise ValueError(
            f"transformers' GPT-2 has attention as wide as a token in all layers: here {shown}, "
            f"a token {width}"
        )
    if model.head.bias is not None:
        raise ValueError(
            "transformers' GPT-2 has no bias in its classifier, which this model was trained "
            "with: train with --no-head-bias"
        )
    kept = kept_tokenizer(info.tokenizer, str(info.path), model.vocab_size)
    end = kept.tokenizer.id_to_token(kept.end)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=kept.without_additions(),
        model_max_length=model.sequence_length,
        # What follows a document is what comes before the next one.
        eos_token=end,
        bos_token=end,
        pad_token=next((name for name in _PADS if name in kept.specials), end),
        # generate() goes on at the right end.
        padding_side="left",
    )
    config = GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.sequence_length,
        n_embd=width,
        n_layer=len(model.blocks),
        n_head=number,
        n_inner=model.blocks[0].mlp.fc1.out_features,
        activation_function="relu",
        resid_pdrop=given.get("dropout", 0.0),
        attn_pdrop=given.get("dropout", 0.0),
        embd_pdrop=0.0,
        layer_norm_epsilon=model.norm.eps,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    transformers.utils.logging.disable_progress_bar()
    theirs = GPT2LMHeadModel(config)
    theirs.load_state_dict(_of_gpt2(model))
    theirs.save_pretrained(out)
    tokenizer.save_pretrained(out)
    again = GPT2LMHeadModel.from_pretrained(
        out, local_files_only=True, trust_remote_code=False
    ).eval()
    loaded = AutoTokenizer.from_pretrained(out, local_files_only=True, trust_remote_code=False)
    text = f"One day, 2 + 2 = 4.{end}Ünïcode"
    same = loaded(text)["input_ids"] == kept.encode(text)
    if not same or loaded.eos_token_id != kept.end or len(loaded) > model.vocab_size:
        raise ValueError("transformers reads other tokens with this tokeniser: nothing is written")
    generator = torch.Generator().manual_seed(0)
    size = (2, min(32, model.sequence_length))
    inputs = torch.randint(model.vocab_size, size, generator=generator)
    inputs[:, -1] = kept.end
    return lambda tokens: again(tokens).logits, inputs


# Ours and GPT-2's, whose linear layers are transposed.
_NORMS = {"norm1": "ln_1", "norm2": "ln_2"}
_LINEAR = {
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}


def _of_gpt2(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a GPT under the names and in the shapes of transformers' GPT-2."""
    found = {
        "transformer.wte.weight": model.token_embed.weight,
        "transformer.wpe.weight": model.pos_embed,
        "transformer.ln_f.weight": model.norm.weight,
        "transformer.ln_f.bias": model.norm.bias,
        "lm_head.weight": model.head.weight,
    }
    for layer, block in enumerate(model.blocks):
        prefix = f"transformer.h.{layer}."
        for ours, theirs in _NORMS.items():
            norm = block.get_submodule(ours)
            found[f"{prefix}{theirs}.weight"] = norm.weight
            found[f"{prefix}{theirs}.bias"] = norm.bias
        for ours, theirs in _LINEAR.items():
            linear = block.get_submodule(ours)
            out_features = linear.out_features
            bias = torch.zeros(out_features) if linear.bias is None else linear.bias
            found[f"{prefix}{theirs}.weight"] = linear.weight.t().contiguous()
            found[f"{prefix}{theirs}.bias"] = bias
    return {name: tensor.detach() for name, tensor in found.items()}
