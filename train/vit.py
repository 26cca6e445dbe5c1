"""Train a vision transformer with any number of heads in each layer.

torchrun train/vit.py --heads 16 --depth 7
torchrun train/vit.py --data FOLDER
torchrun train/vit.py --data FOLDER --pretrained timm:vit_tiny_patch16_224
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

if not __package__:  # as a script: from this checkout, ahead of an editable install of another
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.meta_path.insert(0, PathFinder)
import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import papers
from train.checkpoint.shards import copy_part, part_of
from train.config import architecture, flags
from train.config.flags import Settings, flag, number, positive
from train.loop import engine
from train.data.classes import class_numbers, same_classes, shown
from train.data.images import KINDS, NAMES, Images, about, open_images
from train.data.images.augment import Augment, Mix

PROGRAM = "vit.py"
FEW = 10_000  # number of images below which the recipe is "small"


@dataclasses.dataclass(frozen=True)
class ImageSettings(Settings):
    """The settings of a run on images."""

    SAME_AFTER_RESUME: ClassVar[tuple[str, ...]] = (
        *("img_size", "patch_size", "in_chans", "width", "repeats"),
    )
    OWN_GROUP: ClassVar[str] = "images"

    recipe: str | None = flag(
        None,
        str,
        "named set of defaults; chosen from the data if omitted: paper for image files, but small "
        "for fewer than 10,000 of them or with --pretrained",
        choices=("digits", "synthetic", "small", "paper", "deit"),
    )
    data: str = flag("digits", str, KINDS)
    pretrained: str | None = flag(
        None, str, "initial weights: a file, or timm:NAME to download timm's; random if omitted"
    )
    img_size: int | None = flag(
        None, positive, "image size of the model, in pixels per side (from --model)"
    )
    patch_size: int | None = flag(None, positive, "patch size, in pixels per side (from --model)")
    in_chans: int | None = flag(
        None, positive, "input channels: 1 converts images to grey (from --model)"
    )
    width: int | None = flag(
        None, positive, "embedding width, of a model without stages (from --model)"
    )
    crop: float | None = flag(
        None,
        number(float, 0.01, 1),
        "smallest fraction of the image's area that a random crop keeps",
    )
    flip: bool | None = flag(None, None, "mirror training images horizontally at random")
    drop_path: float | None = flag(
        None, number(float, 0, 1, open_high=True), "stochastic depth rate; 0 disables it"
    )
    rand_augment: str | None = flag(
        None,
        str,
        "RandAugment policy in timm's notation, such as rand-m9-mstd0.5; none disables it",
    )
    erase: float | None = flag(
        None,
        number(float, 0, 1),
        "probability of filling a random box of an image with noise; 0 disables it",
    )
    repeats: int | None = flag(
        None,
        positive,
        "repeated augmentation: differently augmented copies of an image per epoch",
    )
    mixup: float | None = flag(None, number(float, 0), "alpha of Mixup; 0 disables it")
    cutmix: float | None = flag(None, number(float, 0), "alpha of CutMix; 0 disables it")
    smoothing: float | None = flag(
        None, number(float, 0, 1, open_high=True), "label smoothing; 0 disables it"
    )


# The values for data sets that are not augmented.
PLAIN_IMAGES: dict[str, Any] = {
    "crop": 0.08,
    "flip": True,
    "drop_path": 0.0,
    "rand_augment": "none",
    "erase": 0.0,
    "repeats": 1,
    "mixup": 0.0,
    "cutmix": 0.0,
    "smoothing": 0.0,
}

RECIPES: dict[str, dict[str, Any]] = {
    "digits": {
        "model": "vit_digits",
        "batch_size": 64,
        "epochs": 12.0,
        # The convolutional models are small, and need a higher learning rate than the ViT.
        "lr": lambda settings: 7e-4 if settings.model == "vit_digits" else 3e-3,
        "warmup": 0.1,
        "weight_decay": 0.05,
        "clip_grad": 1.0,
        "workers": 0,
    },
    "synthetic": {
        "model": "vit_base",
        "batch_size": 128,
        "steps": 100,
        "lr": 1e-3,
        "warmup": 0.1,
        "weight_decay": 0.05,
        "clip_grad": 1.0,
    },
    # From random weights, on so few images that Mixup and small crops leave nothing to learn.
    "small": {
        "model": "xcit_tiny_lean",
        "batch_size": 16,
        "epochs": 20.0,  # for the largest data sets; smaller ones get more epochs
        "lr": lambda settings: 5e-5 if settings.pretrained else 1e-3,
        "warmup": 0.05,
        "weight_decay": 0.05,
        "clip_grad": 1.0,
        "crop": 0.5,
        "smoothing": 0.1,
    },
    # Table 6 of the lean paper, for both sizes of models. It states no clipping; the rate and decay
    # are those that ViT used with batches of 4096 and --clip-grad 1.
    "paper": {
        "model": "vit_base_lean",
        "batch_size": lambda settings: _paper_batch_size(settings.model),
        "epochs": 300.0,
        "lr": 3e-3,
        "warmup": 20 / 300,
        "warmup_lr": 1e-5,
        "weight_decay": 0.3,
        "clip_grad": 0.0,
        "drop_path": 0.1,
        "rand_augment": "rand-m9-mstd0.5",
        "mixup": 0.8,
        "cutmix": 1.0,
        "smoothing": 0.1,
    },
    # Touvron et al. 2021 (arXiv:2012.12877), table 9, and the average of the weights of its code.
    "deit": {
        "model": "deit_base_lean",
        "batch_size": 1024,
        "epochs": 300.0,
        "lr": lambda settings: 5e-4 * settings.batch_size / 512,
        "warmup": 5 / 300,
        "warmup_lr": 1e-6,
        "min_lr": 1e-5,
        "weight_decay": 0.05,
        "clip_grad": 0.0,
        "ema": 0.99996,
        "drop_path": 0.1,
        "rand_augment": "rand-m9-mstd0.5-inc1",
        "erase": 0.25,
        "repeats": 3,
        "mixup": 0.8,
        "cutmix": 1.0,
        "smoothing": 0.1,
    },
}


def make_task(settings: ImageSettings) -> tuple[engine.Task, ImageSettings]:
    """Return what to train, and the settings with every value filled in.

    Raises:
        ValueError: no such model, data or weights, or sizes that do not fit each other.
    """
    if settings.model is not None:
        # Sizes that do not fit are found before data is opened, which may take long.
        _, named = architecture.for_images(settings, _model(settings.model))
        architecture.sized(settings, named)
    weights, sources = None, None
    if settings.pretrained is not None:
        from models import pretrained

        weights = pretrained.read_weights(settings.pretrained)
    if settings.data not in NAMES:
        # Imported late: a run on bundled images needs no code to find and decode files.
        from train.data.images.sources import find_images

        sources = find_images(settings.data)
    if weights is not None and settings.model is None:
        settings = settings.filled(weights.sizes)
    settings = filled(settings, sources and len(sources.train))
    settings, model = architecture.for_images(settings, _model(settings.model))
    settings = architecture.sized(settings, model)
    images = open_images(
        settings.data,
        size=settings.img_size,
        channels=settings.in_chans,
        seed=settings.seed,
        augment=Augment(
            crop=settings.crop,
            flip=settings.flip,
            rand_augment=None if settings.rand_augment == "none" else settings.rand_augment,
            erase=settings.erase,
        ),
        sources=sources,
    )
    build, built, facts = architecture.planned(
        settings,
        model,
        {"num_classes": images.classes},
        drop_path=settings.drop_path,
        drop=settings.dropout,
    )
    facts |= {"tokens": built.num_tokens, "classes": images.classes}
    kept = about(
        images, model.sizes["image_size"], model.sizes["in_chans"], sources and sources.names
    )
    start, files, identity = None, {}, {}
    if sources is not None:
        identity = sources.identity()
        facts |= sources.facts()
        files = sources.files()
    if weights is not None:
        weights, classifier = _with_classes(weights, kept["classes"])
        tensors = weights.fitted(built)
        fresh = [name for name in built.state_dict() if name not in tensors]
        said = f"{settings.pretrained}, but for {', '.join(fresh) or 'nothing'}"
        facts["pretrained"] = f"{said}; {classifier}" if classifier else said
        start = partial(_load, tensors=tensors)
    mix = Mix(images.classes, mixup=settings.mixup, cutmix=settings.cutmix)
    folder = settings.data if settings.data in NAMES else "images"

    task = engine.Task(
        name=f"{settings.model}-{folder}",
        unit="images",
        build=build,
        train=images.train,
        held_out=images.held_out,
        loss=lambda model, batch, seed: _loss(model, images, mix, settings.smoothing, batch, seed),
        score=lambda model, batch: _score(model, images, batch),
        flops_per_item=built.flops_per_image(),
        facts=facts,
        best_of="accuracy",
        repeats=settings.repeats,
        about=kept,
        start=start,
        files=files,
        identity=identity,
    )
    return task, settings


def _model(name: str) -> architecture.Architecture:
    own = architecture.DIGITS | architecture.PICTURES
    return architecture.find(name, own, architecture.VISION)


def filled(settings: ImageSettings, count: int | None = None) -> ImageSettings:
    """Return the settings with the recipe's values where none was given.

    Args:
        settings: from the command line.
        count: number of training images, if they are files.

    The recipe is that of ``--recipe``, otherwise the data's own, and for image files the paper's,
    or ``small`` for few of them and for weights that are trained already.
    """
    name = settings.recipe
    if name is None:
        few = settings.pretrained or (count is not None and count < FEW)
        name = settings.data if settings.data in NAMES else "small" if few else "paper"
    recipe = PLAIN_IMAGES | RECIPES[name]
    if name == "small" and count is not None:
        epochs = min(100, max(20, 12_000 // count))
        recipe["epochs"] = float(epochs // 5 if settings.pretrained else epochs)
    return flags.apply_recipe(settings, name, recipe)


def _with_classes(weights: Any, names: list[str]) -> tuple[Any, str]:
    """Match the classifier of pretrained weights to the classes of the data by name.

    Args:
        weights: of ``models.pretrained``.
        names: names of the classes of the data.

    Returns:
        The weights, without a classifier if the classes differ, and a description for the plan.
    """
    if not weights.classes:
        return weights, "classes by their numbers, because these weights name none"
    if not same_classes(weights.classes, names):
        return weights.with_rows(None), f"its classes are {shown(weights.classes)}"
    rows = class_numbers(names, weights.classes)
    reordered = rows != [*range(len(rows))]
    return weights.with_rows(rows), "classes reordered by their names" if reordered else ""


def _load(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load full weights into a model, sharded or not; parameters without weights keep theirs."""
    own = model.state_dict()
    with torch.no_grad():
        for name, whole in tensors.items():
            copy_part(part_of(own[name]), whole)


def _paper_batch_size(model: str) -> int:
    rows = papers.names()
    return 8 * rows[model].batch if model in rows else 1024


def _loss(
    model: nn.Module,
    images: Images,
    mix: Mix,
    smoothing: float,
    batch: tuple[Tensor, ...],
    seed: int,
) -> Tensor:
    pixels, labels = batch
    mixed, labels = mix(images.prepare(pixels), labels, seed)
    return F.cross_entropy(model(mixed).float(), labels, label_smoothing=smoothing)


def _score(model: nn.Module, images: Images, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return each image's loss, and whether its class is the top-1, or among the top-5."""
    pixels, labels = batch
    logits = model(images.prepare(pixels)).float()
    scores = {
        "loss": F.cross_entropy(logits, labels, reduction="none"),
        "accuracy": logits.argmax(dim=1) == labels,
    }
    if images.classes > 5:
        scores["top5"] = (logits.topk(5).indices == labels.unsqueeze(1)).any(dim=1)
    return scores


@engine.restored()
def main(argv: Sequence[str] | None = None) -> None:
    """Train a vision transformer; see ``--help``."""
    recipes = {name: PLAIN_IMAGES | recipe for name, recipe in RECIPES.items()}
    settings = flags.parse(PROGRAM, __doc__, argv, ImageSettings, recipes=recipes)
    engine.main(PROGRAM, settings, make_task)


if __name__ == "__main__":
    main()
