"""Train a vision transformer with any number of heads in each layer.

torchrun train/vit.py --heads 16 --depth 7
"""

import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.layers import VisionModel
from train.config import architecture, control, flags, recipes
from train.loop import engine
from train.data.images import Images, open_images
from train.data.images.augment import Augment, Mix
from train.data.images.settings import ImageSettings

PROGRAM = "vit.py"


def make_task(settings: ImageSettings) -> tuple[engine.Task, ImageSettings]:
    """Return what to train, and the settings with every value filled in.

    Raises:
        ValueError: no such model or data, or sizes that do not fit each other.
    """
    settings = recipes.filled(settings)
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
    model, settings, compared = control.applied(settings, model, num_classes=images.classes)
    sizes = architecture.arguments(settings, model)
    sizes |= {"drop_path": settings.drop_path, "drop": settings.dropout}

    def build() -> VisionModel:
        return model.build(**sizes, num_classes=images.classes)

    with torch.device("meta"):
        built = build()
    if torch.cuda.is_available():
        built.check_kernels()
    attention = built.attention_modules().values()
    facts = {
        "model": settings.model,
        **compared,
        "params": built.num_params(),
        "recipe": settings.recipe,
        "depth": settings.depth,
        "width": sizes.get("embed_dim") or sizes["embed_dims"],
        "heads": [a.num_heads for a in attention],
        "head_dim": [a.head_dim for a in attention],
        "head_convention": built.head_convention,
        "tokens": built.num_tokens,
    }
    mix = Mix(images.classes, mixup=settings.mixup, cutmix=settings.cutmix)
    folder = settings.data if settings.data in ("digits", "synthetic") else "images"
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
    )
    return task, settings


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
    settings = flags.parse(PROGRAM, __doc__.splitlines()[0], argv, ImageSettings)
    engine.main(PROGRAM, settings, make_task)


if __name__ == "__main__":
    main()
