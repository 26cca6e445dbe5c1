"""Tiny models of timm, one at least of each family whose attention the adapter swaps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from timm.models.beit import Beit
from timm.models.davit import DaVit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.tnt import TNT
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer
from timm.models.volo import VOLO
from timm.models.xcit import Xcit
from torch import nn

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
VIT |= {"mlp_ratio": 2.0, "num_classes": 5}
TNT_SIZES = {key: size for key, size in VIT.items() if key != "num_heads"}
TNT_SIZES |= {"inner_dim": 12, "num_heads_inner": 2, "num_heads_outer": 3}
STAGES = {"embed_dims": (16, 32), "depths": (1, 1), "num_heads": (2, 4), "num_classes": 5}
VOLO_SIZES = {"layers": [2, 1], "img_size": 32, "embed_dims": [16, 24], "num_heads": [2, 3]}
VOLO_SIZES |= {"stem_hidden_dim": 8, "downsamples": (True, False), "num_classes": 5}
SWIN = {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 4)}
SWIN |= {"window_size": 4, "drop_path_rate": 0.0, "num_classes": 5}


@dataclass(frozen=True)
class TimmCase:
    """One model.

    Attributes:
        family: as in the table of compatible models.
        name: of what sets it apart in its family.
        build: its class.
        sizes: what that is called with.
        swapped: how many modules the adapter swaps.
        left: how many attention modules it leaves.
    """

    family: str
    name: str
    build: Callable[..., nn.Module]
    sizes: dict[str, Any]
    swapped: int
    left: int = 0

    def model(self, **changed: Any) -> nn.Module:
        return self.build(**self.sizes | changed)

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


CASES = [
    TimmCase("vit", "plain", VisionTransformer, VIT, 2),
    TimmCase(
        "vit",
        "normalized",
        VisionTransformer,
        VIT | {"qk_norm": True, "scale_attn_norm": True, "reg_tokens": 2, "global_pool": "avg"},
        2,
    ),
    TimmCase("vit", "parallel", VisionTransformer, VIT | {"block_fn": ParallelThingsBlock}, 4),
    TimmCase("deit", "distilled", VisionTransformerDistilled, VIT, 2),
    TimmCase("beit", "relative", Beit, VIT | {"use_rel_pos_bias": True, "init_values": 0.1}, 2),
    TimmCase("beit", "shared", Beit, VIT | {"use_shared_rel_pos_bias": True}, 2),
    TimmCase(
        "beit",
        "both",
        Beit,
        VIT | {"use_rel_pos_bias": True, "use_shared_rel_pos_bias": True, "qkv_bias": False},
        2,
    ),
    TimmCase("eva", "rotary", Eva, VIT | {"use_rot_pos_emb": True, "qk_norm": True}, 2),
    TimmCase(
        "eva",
        "apart, inner norm",
        Eva,
        VIT | {"use_rot_pos_emb": True, "qkv_fused": False, "scale_attn_inner": True},
        2,
    ),
    TimmCase(
        "eva",
        "grouped queries",
        Eva,
        VIT | {"use_rot_pos_emb": True, "attn_type": "rope", "qkv_fused": False, "num_kv_heads": 1},
        2,
    ),
    TimmCase("xcit", "plain", Xcit, VIT | {"tokens_norm": True, "cls_attn_layers": 1}, 2, 1),
    TimmCase("tnt", "plain", TNT, TNT_SIZES, 4),
    TimmCase("volo", "plain", VOLO, VOLO_SIZES | {"outlook_attention": (True, False)}, 3, 2),
    TimmCase("davit", "first", DaVit, STAGES | {"window_size": 3}, 4),
    TimmCase("swin", "shifted", SwinTransformer, SWIN, 3),
    TimmCase("swin", "widened heads", SwinTransformer, SWIN | {"head_dim": 12}, 3),
]
FAMILIES = ("vit", "deit", "beit", "eva", "xcit", "tnt", "volo", "davit", "swin")
