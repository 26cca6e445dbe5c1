"""What a run uses where no flag says otherwise, as data; the recipes of images."""

from collections.abc import Mapping
from typing import Any, TypeVar

from train.config.flags import Settings
from train.data.images.settings import ImageSettings

# What every recipe starts from.
PLAIN: dict[str, Any] = {
    "dropout": 0.0,
    "accum": 1,
    "batch_size_warmup": 0.0,
    "schedule": "cosine",
    "warmup": 0.0,
    "warmup_lr": 0.0,
    "min_lr": 0.0,
    "weight_decay": 0.0,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "cycle_momentum": False,
    "clip_grad": 0.0,
    "ema": 0.0,
    "eval_every": 5.0,
    "ckpt_every": 100,
}

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
        "batch_size": lambda settings: 512 if _is_large(settings.model) else 1024,
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

# The rows of the paper's table of large models.
_LARGE = ("vit_large", "deit_large", "xcit_large", "volo_d4", "davit_large")


_Settings = TypeVar("_Settings", bound=Settings)


def filled(settings: ImageSettings) -> ImageSettings:
    """Return the settings of images with the recipe's values where none was given.

    The recipe is that of ``--recipe``, otherwise the data's own, and for photographs the paper's.
    """
    name = settings.recipe
    if name is None:
        name = settings.data if settings.data in ("digits", "synthetic") else "paper"
    return fill(settings, name, PLAIN_IMAGES | RECIPES[name])


def fill(settings: _Settings, name: str, recipe: Mapping[str, Any]) -> _Settings:
    """Return the settings with a recipe's values, and then those of ``PLAIN``, where none is given.

    Args:
        settings: from the command line.
        name: of the recipe.
        recipe: values of flags by the name of their field; one that follows from others is a
            function of the settings, called when all else is filled in.
    """
    recipe = {"recipe": name} | PLAIN | dict(recipe)
    fixed = {key: value for key, value in recipe.items() if not callable(value)}
    settings = settings.filled(fixed)
    for key, value in recipe.items():
        if callable(value):
            settings = settings.filled({key: value(settings)})
    return settings


def _is_large(model: str) -> bool:
    return model.startswith(_LARGE)
