"""Load weights from timm or a file into a vision model with other classes or another size.

The originals have timm's parameter names (docs/models.md), so nothing is renamed; learned positions
are resized. A classifier of other classes is left out, and its rows follow class names if a run
wrote these.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leaner_kernels.extras import how_to_install
from models.positions import POSITIONS, resizing

# The modules that map features to classes.
_HEADS = "head.", "aux_head."
_SIZES = "heads", "head_dim", "depth", "mlp_ratio", "img_size", "patch_size", "in_chans", "width"
# Largest value of a size, so that a number in a file cannot exhaust memory or time.
_MOST = 1 << 14


@dataclass(frozen=True)
class Weights:
    """Weights by the names of parameters and buffers.

    Attributes:
        name: their source, as the user gave it.
        tensors: on the host.
        sizes: of the model that they are of, by the names of the scripts' flags; empty if unknown.
        classes: their names, in the order of the classifier's rows; empty if unknown.
    """

    name: str
    tensors: dict[str, Tensor]
    sizes: dict[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()

    def with_rows(self, rows: Sequence[int] | None) -> "Weights":
        """Return weights whose classifier has these rows of the present one, or no classifier.

        Args:
            rows: one of the present rows for each new one; None leaves the classifier out.

        Raises:
            ValueError: the classifier has another number of rows than ``classes`` has names.
        """
        tensors = dict(self.tensors)
        for name in [name for name in tensors if name.startswith(_HEADS)]:
            tensor = tensors.pop(name)
            if rows is None:
                continue
            if tensor.dim() == 0 or len(tensor) != len(self.classes):
                raise ValueError(
                    f"--pretrained {self.name}: {name} must have a row for each of its "
                    f"{len(self.classes)} classes, got shape {tuple(tensor.shape)}"
                )
            tensors[name] = tensor[list(rows)]
        classes = () if rows is None else tuple(self.classes[row] for row in rows)
        return replace(self, tensors=tensors, classes=classes)

    def fitted(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights for a model: its state, without a classifier of other classes.

        Args:
            model: of ``models``, also on the meta device.

        Raises:
            ValueError: names the first parameter that one has and the other has not, or in
                another shape, or as whole numbers.
        """
        wanted, weights = model.state_dict(), dict(self.tensors)
        for name, tensor in wanted.items():
            if name.startswith(_HEADS):
                if name in weights and len(weights[name]) != len(tensor):
                    del weights[name]
                if name not in weights:
                    continue
            if name not in weights:
                raise ValueError(
                    f"--pretrained {self.name} lacks the parameter {name} of the model"
                )
            if weights[name].is_floating_point() != tensor.is_floating_point():
                raise ValueError(
                    f"--pretrained {self.name}: {name} must be {tensor.dtype} as in the model, got "
                    f"{weights[name].dtype}"
                )
            if weights[name].shape == tensor.shape:
                continue
            resize = resizing(weights[name].shape, tensor.shape) if name in POSITIONS else None
            if resize is None:
                raise ValueError(
                    f"--pretrained {self.name}: {name} must have shape {tuple(tensor.shape)} as in "
                    f"the model, got {tuple(weights[name].shape)}"
                )
            weights[name] = resize(weights[name])
        if unknown := [n for n in weights if n not in wanted and not n.startswith(_HEADS)]:
            raise ValueError(
                f"--pretrained {self.name} has a parameter {unknown[0]} that the model lacks"
            )
        return {name: tensor for name, tensor in weights.items() if name in wanted}


def read_weights(name: str) -> Weights:
    """Read weights.

    Args:
        name: ``timm:`` and a name of timm's, which downloads them unless they are in the Hub's
            cache; or a file: safetensors, such as those of a run, or what PyTorch's
            ``save`` wrote of tensors alone, bare or under ``model`` or ``state_dict``.

    Raises:
        ValueError: no such file or name, nothing that can be read, or no network.
    """
    if name.startswith("timm:"):
        return _of_timm(name, name.removeprefix("timm:"))
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--pretrained must be a weights file or timm:NAME, got {name!r}")
    try:
        return _safetensors(name, path) if path.suffix == ".safetensors" else _pickled(name, path)
    except Exception as error:  # readers raise nearly any exception for a damaged file
        cause = first_line(error)
        raise ValueError(f"--pretrained {name} is not a readable weights file: {cause}") from None


def _safetensors(name: str, path: Path) -> Weights:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    sizes = _sizes(_object(metadata, "settings"), len(tensors))
    classes = _object(metadata, "about").get("classes", [])
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"its classes must be a list of names, got {repr(classes)[:40]}")
    return Weights(name, tensors, sizes, tuple(classes))


def _object(metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    """Return an entry of a run's metadata, which is a JSON object; empty without it."""
    try:
        saved = json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        saved = None
    if not isinstance(saved, dict):
        raise ValueError(f"{key} in its metadata must be a JSON object")
    return saved


def _sizes(saved: Mapping[str, Any], tensors: int) -> dict[str, Any]:
    """Return the sizes among a run's settings: every layer has tensors of its own."""
    sizes = {key: saved[key] for key in ("model", *_SIZES) if saved.get(key) is not None}
    for key, value in sizes.items():
        if not _fits(key, value, tensors):
            raise ValueError(f"its settings have an invalid {key}, got {repr(value)[:40]}")
    return sizes


def _fits(key: str, value: Any, tensors: int) -> bool:
    if key == "model":
        return isinstance(value, str)
    if key == "mlp_ratio":
        return type(value) in (int, float) and 0 < value <= _MOST
    if key in ("heads", "head_dim", "depth") and isinstance(value, list):
        most = tensors if key == "depth" else _MOST
        return 0 < len(value) <= tensors and all(_whole(number, most) for number in value)
    if key in ("heads", "head_dim"):
        return False
    return _whole(value, tensors if key == "depth" else _MOST)


def _whole(value: Any, most: int) -> bool:
    return type(value) is int and 0 < value <= most


def _pickled(name: str, path: Path) -> Weights:
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("model", "state_dict"):
        if isinstance(saved, Mapping) and isinstance(saved.get(key), Mapping):
            saved = saved[key]
    if not isinstance(saved, Mapping) or not all(isinstance(t, Tensor) for t in saved.values()):
        raise ValueError(f"must contain a dict of tensors by name, got {type(saved).__name__}")
    return Weights(name, dict(saved))


def _of_timm(name: str, model: str) -> Weights:
    try:
        import timm
        from huggingface_hub.utils import logging
        from timm.models import is_model_pretrained
    except ImportError:
        raise ValueError(
            f"--pretrained {name} needs the package timm: {how_to_install('timm')}"
        ) from None
    if not is_model_pretrained(model):
        raise ValueError(f"--pretrained {name}: timm has no weights of that name")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # otherwise it prints a line for every attempt to connect
    try:
        built = timm.create_model(model, pretrained=True)
    except (OSError, RuntimeError, ValueError) as error:
        cause = first_line(error)
        raise ValueError(f"--pretrained {name} cannot be downloaded: {cause}") from None
    finally:
        logging.set_verbosity(verbosity)
    return Weights(name, built.state_dict(), _sizes_of(built))


def _sizes_of(model: nn.Module) -> dict[str, Any]:
    """Return the sizes of timm's plain ViT by the names of flags, or nothing for other models."""
    from timm.models.vision_transformer import VisionTransformer

    if type(model) is not VisionTransformer:
        return {}
    block = model.blocks[0]
    return {
        "model": "vit_base",
        "depth": len(model.blocks),
        "heads": (block.attn.num_heads,),
        "head_dim": (block.attn.head_dim,),
        "mlp_ratio": block.mlp.fc1.out_features / model.embed_dim,
        "img_size": model.patch_embed.img_size[0],
        "patch_size": model.patch_embed.patch_size[0],
        "in_chans": model.patch_embed.proj.in_channels,
        "width": model.embed_dim,
    }


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, or its type if it has no message."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
