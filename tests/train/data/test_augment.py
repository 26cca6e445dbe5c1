"""What changes an image or mixes a batch draws from its seed alone, and does what it says."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from train.data.images.augment import (
    Augment,
    Mix,
    PixelsToInput,
    RandAugment,
    TrainingView,
    seeded,
)


def picture() -> Image.Image:
    draw = np.random.default_rng(0)
    return Image.fromarray(draw.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize((60, 50))


def viewed(seed: int, **augment: object) -> torch.Tensor:
    view = TrainingView(32, Augment(**augment))
    with seeded(seed):
        top, left, height, width, _ = view.region(60, 50)
        return view(np.array(picture())[top : top + height, left : left + width])


def test_a_lent_seed_decides_every_draw_and_leaves_no_trace():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    with seeded(1):
        first = random.random()
    with seeded(1):
        assert random.random() == first
    with seeded(2):
        assert random.random() != first
    assert random.random() == expected


def alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether Kolmogorov and Smirnov's test takes two samples for draws of one law."""
    steps = np.unique(np.concatenate([one, other]))
    below = [np.searchsorted(np.sort(of), steps, "right") / len(of) for of in (one, other)]
    # A limit that one pair in a million passes.
    return abs(below[0] - below[1]).max() <= 2.7 * (1 / len(one) + 1 / len(other)) ** 0.5


@pytest.mark.parametrize("size", [(500, 375), (300, 900), (1000, 100)])
def test_crops_are_distributed_as_torchvisions_are(size):
    view, count = TrainingView(224, Augment()), 4000
    theirs = v2.RandomResizedCrop(224)
    image = torch.empty(3, *size[::-1], dtype=torch.uint8, device="meta")
    with torch.random.fork_rng(devices=()), seeded(0):
        torch.manual_seed(0)
        ours = np.array([view.region(*size)[:4] for _ in range(count)])
        drawn = [theirs.make_params([image]) for _ in range(count)]
    expected = np.array([[crop[k] for k in ("top", "left", "height", "width")] for crop in drawn])
    for one, other in zip(ours.T, expected.T):
        assert alike(one, other)


def test_a_crop_is_decoded_at_the_smallest_size_that_need_not_be_enlarged():
    view = TrainingView(224, Augment())
    with seeded(0):
        crops = [view.region(4000, 3000) for _ in range(200)]
    assert {crop.reduction for crop in crops} == {2, 4, 8}
    for crop in crops:
        side = min(crop.height, crop.width)
        assert side >= 224 * crop.reduction
        assert crop.reduction == 8 or side < 2 * 224 * crop.reduction
        assert not any(place % crop.reduction for place in crop[:4])


POSTERIZING = "m9-mstd0.5-inc1", "m0", "m10-inc1", "m20-mmax20-inc1", "m30-mmax30"


@pytest.mark.parametrize("policy", POSTERIZING)
def test_posterize_keeps_one_to_eight_bits_at_every_magnitude(policy):
    augment = RandAugment(f"rand-{policy}", 32)
    augment.ops = [op for op in augment.ops if op.name.startswith("Posterize")]
    pixels = np.array(picture())
    for seed in range(300):
        with seeded(seed):
            assert len(np.unique(augment(pixels))) > 1


def test_erasing_fills_one_box_with_noise_as_often_as_it_is_asked_to():
    pairs = [(viewed(seed), viewed(seed, erase=0.25)) for seed in range(100)]
    changed = [(one != other).any(0) for one, other in pairs]
    share = sum(mask.any().item() for mask in changed) / len(changed)
    assert 0.1 < share < 0.45
    for mask in changed:
        rows, cols = mask.nonzero().unbind(1)
        if len(rows):
            box = mask[rows.min() : rows.max() + 1, cols.min() : cols.max() + 1]
            assert box.float().mean() > 0.95  # noise may hit the pixel's own value
    noise = [other[:, mask] for (_, other), mask in zip(pairs, changed)]
    units = PixelsToInput(3)(torch.cat(noise, 1)[None, :, :, None])
    assert units.mean().abs() < 0.1
    assert 0.8 < units.std() < 1.1  # cut at about two deviations


def mixed(mix: Mix, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that are as bright as their class, mixed."""
    labels = torch.tensor([0, 1, 2, 3, 4])
    images = labels[:, None, None, None].expand(5, 3, 8, 8).float().clone()
    return mix(images, labels, seed)


# Mixup leaves an even image even; CutMix does where its box is empty or everything.
@pytest.mark.parametrize(
    ("alphas", "fewest", "most"),
    [
        ({"mixup": 0.8}, 20, 20),
        ({"cutmix": 1.0}, 0, 6),
        ({"mixup": 0.8, "cutmix": 1.0}, 5, 17),
    ],
)
def test_labels_are_mixed_as_the_images_are(alphas, fewest, most):
    even = 0
    for seed in range(20):
        images, labels = mixed(Mix(5, **alphas), seed)
        torch.testing.assert_close(labels.sum(1), torch.ones(5))
        torch.testing.assert_close(images.mean((1, 2, 3)), labels @ torch.arange(5.0))
        even += bool((images.flatten(1).std(1) < 1e-5).all())
    assert fewest <= even <= most


@pytest.mark.parametrize("policy", ["m9", "rand-x3", "augmix-m3", "rand-m9-w0"])
def test_a_policy_that_timm_does_not_know_is_refused(policy):
    with pytest.raises(
        ValueError, match=f"--rand-augment must be none or a policy of timm .* got '{policy}'"
    ):
        viewed(0, rand_augment=policy)
