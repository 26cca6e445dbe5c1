"""Register the paper's vision models with timm, as ``leaner_`` and the name of ``papers.model``.

``import models.timm`` once; then ``timm.create_model("leaner_xcit_medium_lean", num_classes=10)``
and timm's own scripts know them.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from models import papers

__all__: list[str] = []

# What timm's factory and scripts call our arguments.
_ARGUMENTS = {
    "img_size": "image_size",
    "drop_rate": "drop",
    "drop_path_rate": "drop_path",
    "global_pool": "pool",
}
# What timm's factory passes for its own weights, of which there are none here.
_OF_PRETRAINED = "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"


def _entry(name: str) -> Callable[..., nn.Module]:
    def build(pretrained: bool = False, **arguments: Any) -> nn.Module:
        if pretrained:
            raise ValueError(f"pretrained must be False, got {pretrained!r}: {name} has no weights")
        ours = {
            _ARGUMENTS.get(key, key): value
            for key, value in arguments.items()
            if key not in _OF_PRETRAINED
        }
        model = papers.model(name, **ours)
        # What timm's scripts read of a model: how its images are to be prepared.
        model.num_classes = ours.get("num_classes", 1000)
        model.pretrained_cfg = model.default_cfg = {
            "architecture": f"leaner_{name}",
            "input_size": (model.in_chans, model.image_size, model.image_size),
            "num_classes": model.num_classes,
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
        }
        return model

    build.__name__ = build.__qualname__ = f"leaner_{name}"
    build.__doc__ = f"``papers.model({name!r})``, with timm's names for its arguments or ours."
    return build


def _register() -> None:
    from timm.models import is_model, register_model

    for name in (name for name, row in papers.names().items() if row.takes_images):
        entry = _entry(name)
        if not is_model(entry.__name__):
            globals()[entry.__name__] = register_model(entry)


_register()
