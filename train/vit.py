"""Train a vision transformer with any number of heads in each layer.

torchrun train/vit.py --heads 16 --depth 7
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where the checkout is not installed
import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from models import papers
from train.config import architecture, control, flags
from train.config.flags import Settings, flag, number, positive
from train.loop import engine
from train.data.images import KINDS, NAMES, Images, open_images, saved
from train.data.images.augment import Augment, Mix

PROGRAM = "vit.py"


@dataclasses.dataclass(frozen=True)
class ImageSettings(Settings):
    """What one run on images does."""

    SAME_AFTER_RESUME: ClassVar[tuple[str, ...]] = ("repeats",)
    OWN_GROUP: ClassVar[str] = "images"

    recipe: str | None = flag(
        None,
        str,
        "what is used where no other flag does; follows the data: paper for photographs",
        choices=("digits", "synthetic", "paper", "deit"),
    )
    data: str = flag("digits", str, KINDS)
    drop_path: float | None = flag(
        None, number(float, 0, 1, open_high=True), "rate of stochastic depth"
    )
    rand_augment: str | None = flag(
        None, str, "none, or RandAugment as timm writes it: rand-m9-mstd0.5"
    )
    erase: float | None = flag(
        None, number(float, 0, 1), "probability of filling a box of an image with noise"
    )
    repeats: int | None = flag(
        None, positive, "times that an epoch takes an image, each changed otherwise"
    )
    mixup: float | None = flag(None, number(float, 0), "alpha of Mixup; 0 does without")
    cutmix: float | None = flag(None, number(float, 0), "alpha of CutMix; 0 does without")
    smoothing: float | None = flag(
        None, number(float, 0, 1, open_high=True), "share of a label spread over all classes"
    )


# Nothing but the images as they are.
PLAIN_IMAGES: dict[str, Any] = {
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
        # The convolutional models are too small to be trained as slowly as the ViT.
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
    # Table 6 of the lean paper, for both sizes of models. It states no clipping; the rate and decay
    # are those that ViT used with batches of 4096 and --clip-grad 1.
    "paper": {
        "model": "vit_base",
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
        "model": "deit_base",
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
        ValueError: no such model or data, or sizes that do not fit each other.
    """
    settings = filled(settings)
    model = architecture.find(settings.model, architecture.DIGITS, architecture.VISION)
    # Sizes that do not fit are found before data is opened, which may take long.
    settings = control.sized(settings, model)
    images = open_images(
        settings.data,
        size=model.sizes["image_size"],
        channels=model.sizes["in_chans"],
        seed=settings.seed,
        augment=Augment(
            rand_augment=None if settings.rand_augment == "none" else settings.rand_augment,
            erase=settings.erase,
        ),
    )
    settings, build, built, facts = control.planned(
        settings,
        model,
        {"num_classes": images.classes},
        drop_path=settings.drop_path,
        drop=settings.dropout,
    )
    facts |= {"tokens": built.num_tokens, "classes": images.classes}
    if images.classes == 1:
        facts["warning"] = "the data has one class: there is nothing to tell apart"
    mix = Mix(images.classes, mixup=settings.mixup, cutmix=settings.cutmix)
    folder = settings.data if settings.data in NAMES else "images"
    task = engine.Task(
        name=f"{settings.model}{control.suffix(settings)}-{folder}",
        unit="images",
        build=build,
        train=images.train,
        held_out=images.held_out,
        loss=lambda model, batch, seed: _loss(model, images, mix, settings.smoothing, batch, seed),
        score=lambda model, batch: _score(model, images, batch),
        flops_per_item=built.flops_per_image(),
        facts=facts,
        repeats=settings.repeats,
        about=saved.about(images, model.sizes["image_size"], model.sizes["in_chans"]),
    )
    return task, settings


def filled(settings: ImageSettings) -> ImageSettings:
    """Return the settings with the recipe's values where none was given.

    The recipe is that of ``--recipe``, otherwise the data's own, and for photographs the paper's.
    """
    name = settings.recipe
    if name is None:
        name = settings.data if settings.data in NAMES else "paper"
    return flags.fill(settings, name, PLAIN_IMAGES | RECIPES[name])


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
    """Return each image's loss, and whether its class is the first, or among the first five."""
    pixels, labels = batch
    logits = model(images.prepare(pixels)).float()
    scores = {
        "loss": F.cross_entropy(logits, labels, reduction="none"),
        "accuracy": logits.argmax(dim=1) == labels,
    }
    if images.classes > 5:
        scores["top5"] = (logits.topk(5).indices == labels.unsqueeze(1)).any(dim=1)
    return scores


def main(argv: Sequence[str] | None = None) -> None:
    """Train a vision transformer; see ``--help``."""
    settings = flags.parse(PROGRAM, __doc__, argv, ImageSettings, recipes=RECIPES)
    engine.main(PROGRAM, settings, make_task)


if __name__ == "__main__":
    main()
