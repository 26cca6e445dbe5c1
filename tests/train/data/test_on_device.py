"""Pictures changed on the device look as those that Pillow changed, and nothing waits for them."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.data.test_photographs import photograph
from tests.train.image_files import photographs, write_folder
from train.data.images import augment, open_images
from train.data.images.augment import Augment, PixelsToInput, RandAugment, seeded
from train.data.images.on_device import OnDevice

SIZE = 64
POLICIES = "rand-m9-mstd101-n1-p1", "rand-m9-mstd101-n1-p1-inc1"
OPS = [(policy, op) for policy in POLICIES for op in RandAugment(policy, SIZE).ops]


def batch(count: int) -> torch.Tensor:
    pictures = [np.array(photograph(SIZE, SIZE, seed)) for seed in range(count)]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def changed(op, images: torch.Tensor, resample: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the device makes of images by one operation, and what Pillow does."""
    op.kwargs["resample"] = [Image.Resampling[resample]]
    on_device = OnDevice(Augment(rand_augment=POLICIES[0]), SIZE)
    on_device.rand_augment.ops = [op]
    with seeded(3):
        drawn = [on_device.rand_augment.draw() for _ in images]
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    expected = [
        np.array(op.aug_fn(picture, *arguments, **op.kwargs))
        for picture, ((op, arguments),) in zip(pictures, drawn, strict=True)
    ]
    return on_device(images, 3), torch.from_numpy(np.stack(expected)).permute(0, 3, 1, 2)


@pytest.mark.parametrize(("policy", "op"), OPS, ids=lambda value: getattr(value, "name", ""))
def test_every_operation_does_what_pillow_does_with_each_pictures_own_draws(policy, op):
    images = batch(12)
    before = images.clone()
    ours, theirs = changed(op, images, "BILINEAR")
    error = (ours.int() - theirs.int()).abs()
    # Coordinates of single precision put a few pixels on the other side of an edge.
    assert (error <= 1).float().mean() >= 0.999
    assert not torch.equal(theirs, images)
    assert torch.equal(images, before)


@pytest.mark.parametrize("name", ["Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"])
def test_bicubic_interpolation_differs_from_pillows_by_less_than_a_grey_level(name):
    # Pillow's cubic has the slope -1 at a distance of one pixel, PyTorch's -0.75.
    op = next(op for _, op in OPS if op.name == name)
    ours, theirs = changed(op, batch(12), "BICUBIC")
    error = (ours.int() - theirs.int()).float()
    assert error.abs().mean() < 1
    assert error.mean().abs() < 0.05


def test_a_batch_is_changed_by_its_seed_alone_each_picture_by_its_own_draws():
    change = OnDevice(Augment(rand_augment="rand-m9-n3-mstd0.5-inc1", erase=0.25), SIZE)
    images = batch(1).expand(40, -1, -1, -1)
    states = random.getstate(), torch.get_rng_state()
    first = change(images, 1)
    assert torch.equal(first, change(images, 1))
    assert not torch.equal(first, change(images, 2))
    assert len({picture.numpy().tobytes() for picture in first}) > 30
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_operations_follow_one_another_as_they_were_drawn():
    images = batch(16)
    change = OnDevice(Augment(rand_augment="rand-m9-n4-mstd0.5-p1"), SIZE)
    for op in change.rand_augment.ops:
        op.kwargs["resample"] = [Image.Resampling.BILINEAR]
    with seeded(5):
        drawn = [change.rand_augment.draw() for _ in images]
    ours = change(images, 5)
    for picture, image, ops in zip(ours, images, drawn):
        expected = Image.fromarray(image.permute(1, 2, 0).numpy())
        for op, arguments in ops:
            expected = op.aug_fn(expected, *arguments, **op.kwargs)
        error = (picture.permute(1, 2, 0).int() - torch.from_numpy(np.array(expected)).int()).abs()
        # A level of difference grows where a later operation steepens the contrast.
        assert error.float().mean() < 2.5, [op.name for op, _ in ops]


def test_erasing_fills_boxes_with_noise_as_often_and_as_large_as_on_the_cpu():
    images = batch(1).expand(400, -1, -1, -1).contiguous()
    ours = OnDevice(Augment(erase=0.5), SIZE)(images, 0)
    theirs = images.clone()
    with seeded(1):
        for picture in theirs:
            if random.random() < 0.5:
                augment._erase(picture)
    noise, areas = [], []
    for changed in (ours, theirs):
        masks = (changed != images).any(1)
        areas.append(masks.flatten(1).float().mean(1).sort().values)
        noise.append(PixelsToInput(3)(changed.movedim(1, 0)[:, masks][None, :, :, None]))
    assert (areas[0] - areas[1]).abs().mean() < 0.03
    assert noise[0].mean() == pytest.approx(noise[1].mean().item(), abs=0.02)
    assert noise[0].std() == pytest.approx(noise[1].std().item(), abs=0.02)
    # The box of a picture is one.
    for mask in (ours != images).any(1):
        rows, cols = mask.nonzero().unbind(1)
        if len(rows):
            inner = mask[rows.min() : rows.max() + 1, cols.min() : cols.max() + 1]
            assert inner.float().mean() > 0.95


class Unread(TorchDispatchMode):
    """Refuses what would make the host wait for a device, or read from it."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.__name__.split(".")[0] not in self.WAITS, func
        if func.__name__ in ("index.Tensor", "index_put_.default"):
            assert all(t is None or t.dtype != torch.bool for t in args[1]), func
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device():
    change = OnDevice(Augment(rand_augment="rand-m9-n6-mstd0.5-p1", erase=0.5), SIZE)
    with Unread():
        change(batch(24), 0)
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            batch(1).max().item()


def test_what_the_device_does_is_not_done_by_workers_too(tmp_path):
    write_folder(tmp_path, "train", photographs("train", 12))
    write_folder(tmp_path, "val", photographs("val", 6))
    plain, on_cpu, on_device = (
        open_images(str(tmp_path), size=32, channels=3, seed=0, augment=changes)
        for changes in (
            Augment(),
            Augment("rand-m9-p1", 1.0),
            Augment("rand-m9-p1", 1.0, on="device"),
        )
    )
    keys = [(0, index) for index in range(12)]
    pixels, _ = on_device.train.__getitems__(keys)
    assert torch.equal(pixels, plain.train.__getitems__(keys)[0])
    assert not torch.equal(pixels, on_cpu.train.__getitems__(keys)[0])
    assert on_cpu.change(pixels, 1) is pixels
    assert (on_device.change(pixels, 1) != pixels).flatten(1).any(1).all()


def test_an_operation_that_only_the_cpu_has_is_named():
    with pytest.raises(
        ValueError, match=r"--augment-on device has no GaussianBlur, of rand-m9-t3a"
    ):
        OnDevice(Augment(rand_augment="rand-m9-t3a"), SIZE)
    desaturated = RandAugment("rand-m9-t3a-p1-n1", SIZE).ops[1]
    ours, theirs = changed(desaturated, batch(4), "BILINEAR")
    assert torch.equal(ours, theirs)
