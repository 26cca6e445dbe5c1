"""The flags that only training on images has."""

import dataclasses
from typing import ClassVar

from train.config.flags import Settings, flag, number, positive


@dataclasses.dataclass(frozen=True)
class ImageSettings(Settings):
    """What one run on images does."""

    SAME_AFTER_RESUME: ClassVar[tuple[str, ...]] = ("repeats",)

    recipe: str | None = flag(
        None,
        str,
        "what is used where no other flag says otherwise; follows the data: paper for photographs",
        choices=("digits", "synthetic", "paper", "deit"),
    )
    data: str = flag(
        "digits",
        str,
        "digits, synthetic, a folder with train/ and val/ or with train-*.tar and val-*.tar inside,"
        " a pattern of such, hf:NAME or hf-stream:NAME for Hugging Face's",
    )
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
