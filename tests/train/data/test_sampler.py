"""What a step trains on depends on the seed and the step, and on nothing else."""

import multiprocessing

import numpy as np
import pytest
import torch
from PIL import Image

from train.data.images import open_images
from train.data.loader import loading
from train.data.sampler import BatchSampler, BatchSplit, held_out_share

CPU = torch.device("cpu")


def keys_of_steps(ranks: int, accum: int, first: int = 0, last: int = 5) -> list[set]:
    """The items of every step, over all ranks and passes."""
    split = BatchSplit(24, ranks, accum)
    orders = [
        list(BatchSampler(100, split, seed=3, rank=rank, first=first, last=last))
        for rank in range(ranks)
    ]
    steps = []
    for at in range(0, (last - first) * accum, accum):
        micro_batches = [keys for order in orders for keys in order[at : at + accum]]
        assert all(len(keys) == split.micro_batch for keys in micro_batches)
        steps.append({key for keys in micro_batches for key in keys})
    return steps


def digits(seed: int = 0, size: int = 8, channels: int = 1):
    return open_images("digits", size=size, channels=channels, seed=seed)


@pytest.mark.parametrize(("ranks", "accum"), [(2, 1), (1, 3), (4, 2)])
def test_ranks_and_passes_share_the_items_of_one_process(ranks, accum):
    steps = keys_of_steps(ranks, accum)
    assert all(len(keys) == 24 for keys in steps)
    assert steps == keys_of_steps(1, 1)


def test_an_epoch_takes_no_item_twice_and_the_next_has_another_order():
    steps = keys_of_steps(1, 1, last=8)  # 4 batches of 24 in 100
    epochs = [set().union(*steps[:4]), set().union(*steps[4:])]
    assert [len(epoch) for epoch in epochs] == [96, 96]
    assert {epoch for epoch, _ in epochs[0]} == {0}
    assert {epoch for epoch, _ in epochs[1]} == {1}
    assert {i for _, i in steps[0]} != {i for _, i in steps[4]}


def test_a_resumed_order_continues_where_the_whole_one_would_be():
    assert keys_of_steps(2, 1, first=3, last=6) == keys_of_steps(2, 1, last=6)[3:]


@pytest.mark.parametrize(("length", "ranks"), [(364, 1), (364, 2), (9, 4), (3, 4)])
def test_every_held_out_item_counts_once_and_every_rank_does_as_many_batches(length, ranks):
    shares = [held_out_share(length, 8, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    assert all(len(keys) == 8 for share in shares for keys, _ in share)
    counted = [key for share in shares for keys, valid in share for key in keys[:valid]]
    assert sorted(counted) == [(0, i) for i in range(length)]


def test_augmentation_depends_on_the_seed_the_epoch_and_the_item_alone():
    train = digits().train
    alone, _ = train.__getitems__([(4, 7)])
    among, _ = train.__getitems__([(4, 1), (4, 7), (4, 2)])
    assert torch.equal(alone[0], among[1])
    assert not torch.equal(alone[0], train.__getitems__([(5, 7)])[0][0])
    assert not torch.equal(alone[0], digits(seed=1).train.__getitems__([(4, 7)])[0][0])


def test_held_out_digits_are_fixed_stratified_and_not_trained_on():
    images = digits(seed=0)
    assert torch.equal(images.held_out.images, digits(seed=1).held_out.images)
    assert (len(images.train), len(images.held_out)) == (1433, 364)
    share = images.held_out.labels.bincount() / images.train.labels.bincount()
    assert (share - 364 / 1433).abs().max() < 0.01
    trained = {image.numpy().tobytes() for image in images.train.images}
    assert not any(image.numpy().tobytes() in trained for image in images.held_out.images)


def test_workers_are_gone_after_loading_even_when_it_is_cut_short():
    order = BatchSampler(1000, BatchSplit(10, 1, 1), seed=0, rank=0, first=0, last=50)
    with loading(digits().train, order, workers=2, device=CPU) as batches:
        next(batches)
        workers = multiprocessing.active_children()
        assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers)


def test_loading_leaves_the_global_generator_alone(folder):
    images = open_images(str(folder), size=16, channels=3, seed=0)
    order = BatchSampler(len(images.train), BatchSplit(2, 1, 1), seed=0, rank=0, first=0, last=2)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with loading(images.train, order, workers=0, device=CPU) as batches:
        assert len(list(batches)) == 2
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def folder(tmp_path):
    """Two classes of four coloured images each, in two sizes."""
    generator = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("cats", "dogs"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(4):
                pixels = generator.integers(0, 256, (40 + 8 * i, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png")
    return tmp_path


def test_a_folder_gives_crops_that_depend_on_seed_epoch_and_item(folder):
    images = open_images(str(folder), size=16, channels=3, seed=0)
    assert (images.classes, len(images.train), len(images.held_out)) == (2, 8, 8)
    pixels, labels = images.train.__getitems__([(0, 0), (0, 5), (1, 0)])
    assert (pixels.shape, pixels.dtype) == ((3, 3, 16, 16), torch.uint8)
    assert labels.tolist() == [0, 1, 0]
    assert torch.equal(pixels[1], images.train.__getitems__([(0, 5)])[0][0])
    assert not torch.equal(pixels[0], pixels[2])
    held_out = [images.held_out.__getitems__([(epoch, 0)])[0] for epoch in (0, 1)]
    assert torch.equal(*held_out)
