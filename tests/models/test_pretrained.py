"""Weights of timm and of files: which parts are changed to fit a model, and what is refused."""

import json
import sys

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed, resample_abs_pos_embed_nhwc
from timm.models.vision_transformer import VisionTransformer as TimmViT

from models import papers, pretrained
from models.tnt import TNT
from models.vit import VisionTransformer
from models.volo import VOLO

SIZES = {"image_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "heads": 3, "head_dim": 8}


def theirs(**more) -> TimmViT:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    return TimmViT(**sizes | {"num_classes": 7} | more)


def weights(**more) -> pretrained.Weights:
    return pretrained.Weights("w.pth", theirs(**more).state_dict())


def test_weights_of_the_same_classes_give_the_same_logits():
    model, oracle = VisionTransformer(**SIZES, num_classes=7), theirs().eval()
    model.load_state_dict(weights().fitted(model))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.eval()(images), oracle(images))


@pytest.mark.parametrize("classes", [3, 0])
def test_a_classifier_of_other_classes_is_left_out(classes):
    model = VisionTransformer(**SIZES, num_classes=5, device="meta")
    fitted = weights(num_classes=classes).fitted(model)
    assert model.state_dict().keys() - fitted.keys() == {"head.weight", "head.bias"}


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_positions_are_resized_as_timm_does_and_the_class_token_kept(pool):
    model = VisionTransformer(**SIZES | {"image_size": 48, "pool": pool}, device="meta")
    found = weights(class_token=pool == "token", global_pool=pool)
    fitted, before = found.fitted(model)["pos_embed"], found.tensors["pos_embed"]
    prefix = int(pool == "token")
    expected = resample_abs_pos_embed(before, [6, 6], num_prefix_tokens=prefix)
    assert torch.equal(fitted, expected)
    assert fitted.shape == model.pos_embed.shape
    assert torch.equal(fitted[:, :prefix], before[:, :prefix])


def test_positions_of_volo_and_tnt_are_resized_too():
    sizes = {"depths": (1, 1), "embed_dims": (16, 24), "heads": 2, "patch_size": 4, "stem_dim": 8}
    before = VOLO(**sizes, image_size=32).state_dict()
    fitted = pretrained.Weights("w", before).fitted(VOLO(**sizes, image_size=48, device="meta"))
    assert torch.equal(
        fitted["pos_embed"], resample_abs_pos_embed_nhwc(before["pos_embed"], [6, 6])
    )
    sizes = {"patch_size": 8, "embed_dim": 24, "depth": 1, "heads": 3, "head_dim": 8}
    before = TNT(**sizes, image_size=32).state_dict()
    fitted = pretrained.Weights("w", before).fitted(TNT(**sizes, image_size=48, device="meta"))
    expected = resample_abs_pos_embed(before["patch_pos"], [6, 6], num_prefix_tokens=1)
    assert torch.equal(fitted["patch_pos"], expected)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"depth": 1}, r"--pretrained w\.pth lacks the parameter blocks\.1\.norm1\.weight of the"),
        ({"depth": 3}, r"w\.pth has a parameter blocks\.2\.norm1\.weight that the model lacks"),
        ({"embed_dim": 48}, r"cls_token must have shape \(1, 1, 24\) .* got \(1, 1, 48\)"),
        ({"patch_size": 4}, r"patch_embed\.proj\.weight must have .* got \(24, 3, 4, 4\)"),
    ],
)
def test_wrong_weights_are_refused_by_the_first_name_that_does_not_fit(theirs, message):
    with pytest.raises(ValueError, match=message):
        weights(**theirs).fitted(VisionTransformer(**SIZES, device="meta"))


def test_files_of_both_kinds_are_read(tmp_path):
    state = theirs().state_dict()
    torch.save({"model": state, "epoch": 3}, tmp_path / "w.pth")
    settings = {"model": "vit_base", "heads": [3, 3], "lr": 1.0, "width": None}
    save_file(state, tmp_path / "w.safetensors", {"settings": json.dumps(settings)})
    pickled, safe = (
        pretrained.read_weights(str(tmp_path / name)) for name in ("w.pth", "w.safetensors")
    )
    assert pickled.tensors.keys() == safe.tensors.keys() == state.keys()
    assert torch.equal(safe.tensors["cls_token"], pickled.tensors["cls_token"])
    assert (pickled.sizes, safe.sizes) == ({}, {"model": "vit_base", "heads": [3, 3]})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.pth", None, r"must be a weights file or timm:NAME, got '.*none\.pth'"),
        ("w.pth", b"no weights", r"w\.pth is not a readable weights file: .+"),
        ("w.safetensors", b"no weights", r"w\.safetensors is not a readable weights file: .+"),
        (
            "list.pth",
            [1, 2],
            r"list\.pth is not a readable weights file: must contain a dict of tensors",
        ),
    ],
)
def test_what_is_no_weights_is_one_line(tmp_path, name, content, message):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    with pytest.raises(ValueError, match=message) as refused:
        pretrained.read_weights(str(tmp_path / name))
    assert "\n" not in str(refused.value)


def test_a_name_of_timm_brings_the_sizes_of_its_vit(monkeypatch):
    created = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: created(name))
    found = pretrained.read_weights("timm:vit_tiny_patch16_224")
    assert found.sizes | {"mlp_ratio": 4.0} == found.sizes
    heads = {"heads": found.sizes["heads"][0], "head_dim": found.sizes["head_dim"][0]}
    sizes = {"embed_dim": found.sizes["width"], "depth": found.sizes["depth"]} | heads
    model = papers.model("vit_base", **sizes, num_classes=3, device="meta")
    assert model.state_dict().keys() - found.fitted(model).keys() == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("fate", "message"),
    [
        ("offline", r"timm:vit_tiny_patch16_224 cannot be downloaded: no network$"),
        ("unknown", r"timm:vit_tiny_patch17: timm has no weights of that name$"),
        (
            "no timm",
            r"needs the package timm: pip install 'leaner-kernels\[timm\]'$",
        ),
    ],
)
def test_weights_of_timm_that_cannot_be_had_are_one_line(monkeypatch, fate, message):
    def fail(*_, **__):
        raise FileNotFoundError("no network\nat all")

    monkeypatch.setattr(timm, "create_model", fail)
    if fate == "no timm":
        monkeypatch.setitem(sys.modules, "timm", None)
    name = "vit_tiny_patch17" if fate == "unknown" else "vit_tiny_patch16_224"
    with pytest.raises(ValueError, match=message):
        pretrained.read_weights(f"timm:{name}")
