"""Measure the cost of training around the model: loop, input and checkpoints. Needs no GPU.

    python -m bench.training [FILE]    # about five minutes on two cores; FILE gets JSON

Each part takes turns with its peer: a bare PyTorch loop, timm's loader, and ``dcp.async_save``. A
ratio is the median over the turns. If a peer is not installed, its row is left out and a line names
it. The pictures are generated. "CPU" marks times of the processor summed over all threads, which
exclude other work on the machine.
"""

import contextlib
import io
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import train  # noqa: F401 - sets how OpenMP waits, before torch loads it
from bench import frames, report
from bench.harness import command

TURNS = 3
SMALL = {"embed_dim": 32, "heads": 2, "head_dim": 16, "depth": 12, "mlp_ratio": 2.0}
STEPS, WARM = 60, 20
PICTURES, BATCH, SIDE = 128, 64, 224
RECIPES = {"plain": None, "paper": "rand-m9-mstd0.5"}
MILLIONS = {"embed_dim": 768, "depth": 14, "heads": 12, "head_dim": 64}  # 101 million parameters


class Row(NamedTuple):
    """A measurement.

    Attributes:
        measured: what.
        unit: unit of both figures.
        ours, theirs: medians.
        peer: whose the second is.
        ratios: ours over the peer's, of each turn.
    """

    measured: str
    unit: str
    ours: float
    theirs: float
    peer: str
    ratios: tuple[float, ...]


Figures = Callable[[], float]


def compared(measured: str, unit: str, ours: Figures, peers: dict[str, Figures]) -> Iterator[Row]:
    """Measure ours and each peer in turns, and yield a row for each peer."""
    runs = {"ours": ours} | peers
    found: dict[str, list[float]] = {name: [] for name in runs}
    for name in list(runs):
        try:
            runs[name]()  # caches, and imports
        except ImportError as error:
            sys.stderr.write(f"{measured}: {name} is left out: {error}\n")
            del runs[name]
    for _ in range(TURNS):
        for name, run in runs.items():
            found[name].append(run())
    own = statistics.median(found["ours"])
    for name in [*runs][1:]:
        ratios = tuple(a / b for a, b in zip(found["ours"], found[name]))
        yield Row(measured, unit, own, statistics.median(found[name]), name, ratios)


def loop(folder: Path) -> Iterator[Row]:
    """Yield the CPU time of a step of a small model, and that of a bare loop."""
    from models.vit import SmallTransformer
    from train.loop import parallel
    from train.loop import train as loop_of
    from train.vit import main

    sizes = {"image_size": 8, "patch_size": 2, "in_chans": 1, "pool": "avg", "init": "xavier"}
    build = partial(SmallTransformer, **sizes, **SMALL, num_classes=10)
    images, labels = torch.randn(1024, 1, 8, 8), torch.randint(0, 10, (1024,))

    def bare(sharded: bool) -> float:
        with parallel.init_distributed() as world:
            way = "fsdp" if sharded else "one"
            model = parallel.make_model(build, world, seed=0, bf16=False, way=way)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            for step in range(STEPS):
                if step == WARM:
                    began = time.process_time()
                part = slice(16 * step % 1008, 16 * step % 1008 + 16)
                loss = F.cross_entropy(model(images[part]), labels[part])
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                loss.item()
                optimizer.step()
                optimizer.zero_grad()
            return 1e3 * (time.process_time() - began) / (STEPS - WARM)

    def ours(shard: str) -> float:
        whole_step, marks = loop_of.optimizer_step, []

        def step(*args: Any) -> Any:
            marks.append(time.process_time())
            return whole_step(*args)

        model = ["--heads", "2", "--depth", "12", "--width", "32", "--batch-size", "16"]
        quiet = ["--kappa-every", "0", "--ckpt-every", "0", "--eval-every", "0", "--workers", "0"]
        run = ["--steps", str(STEPS), "--shard", shard, "--out", str(folder / "loop")]
        patched = mock.patch.object(loop_of, "optimizer_step", step)
        with patched, contextlib.redirect_stdout(io.StringIO()):
            main([*model, *quiet, *run])
        shutil.rmtree(folder / "loop", ignore_errors=True)
        return 1e3 * (marks[-1] - marks[WARM]) / (len(marks) - 1 - WARM)

    unit = "CPU ms a step"
    plain, sharded = {"bare loop": partial(bare, False)}, {"bare FSDP2 loop": partial(bare, True)}
    yield from compared("a step of 12 small blocks", unit, partial(ours, "none"), plain)
    yield from compared("the same under FSDP2", unit, partial(ours, "fsdp"), sharded)


def write_pictures(folder: Path) -> None:
    """Write JPEGs of some 100 kB and 500 pixels, smooth with noise, in folders of two classes."""
    from PIL import Image

    for split, number in (("train", PICTURES), ("val", 2)):
        for i in range(number):
            draw = np.random.default_rng([i, number])
            coarse = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            pixels = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.int16)
            pixels = pixels + draw.normal(0, 12, (375, 500, 1)).astype(np.int16)
            path = folder / split / f"class{i % 2}" / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def pictures(folder: Path) -> Iterator[Row]:
    """Yield pictures per CPU second in this process, and those of timm's loader."""
    write_pictures(folder)
    for recipe, policy in RECIPES.items():
        ours, timm = (partial(_rate, make, folder, policy) for make in (_of_ours, _of_timm))
        yield from compared(f"pictures, {recipe}", "a CPU second", ours, {"timm": timm})


def _rate(make: Callable[..., Any], folder: Path, policy: str | None) -> float:
    with make(folder, policy) as loader:
        began = time.process_time()
        count = sum(len(batch[0]) for batch in islice(loader, PICTURES // BATCH))
        return count / (time.process_time() - began)


@contextlib.contextmanager
def _of_ours(folder: Path, policy: str | None) -> Iterator[Any]:
    from train.data.images import open_images
    from train.data.images.augment import Augment
    from train.data.loader import loading
    from train.data.sampler import BatchSampler, BatchSplit

    augment = Augment(rand_augment=policy)
    found = open_images(str(folder), size=SIDE, channels=3, seed=0, augment=augment)
    batch_split = BatchSplit(BATCH, 1, 1)
    last = PICTURES // BATCH
    sampler = BatchSampler(len(found.train), batch_split, seed=0, rank=0, first=0, last=last)
    with loading(found.train, sampler, workers=0, device=torch.device("cpu")) as batches:
        yield (batch.tensors for batch in batches)


@contextlib.contextmanager
def _of_timm(folder: Path, policy: str | None) -> Iterator[Any]:
    from timm.data import create_dataset, create_loader

    data = create_dataset("", root=str(folder), split="train", is_training=True)
    yield create_loader(
        data,
        (3, SIDE, SIDE),
        BATCH,
        is_training=True,
        scale=(0.08, 1.0),
        color_jitter=0.0,
        auto_augment=policy,
        interpolation="bicubic",
        num_workers=0,
        persistent_workers=False,
        pin_memory=False,
        device=torch.device("cpu"),
    )


def checkpoints(folder: Path) -> Iterator[Row]:
    """Yield the time of a checkpoint of a model and AdamW's moments, and that of DCP's."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from models.vit import VisionTransformer
    from train.checkpoint.checkpointer import Checkpointer
    from train.loop import parallel
    from train.loop.optimizer import make_optimizer

    with parallel.init_distributed() as world:
        build = partial(VisionTransformer, **MILLIONS)
        model = parallel.make_model(build, world, seed=0, bf16=False)
        optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.05)
        peer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for name, share in optimizer.shares.items():
            peer.state[model.get_parameter(name)] = optimizer.state[share]
        saved = {}

        def ours() -> dict[str, float]:
            with Checkpointer(folder / "ours", world, keep=1, log=sys.stderr.write) as found:
                found.prepare(model, optimizer, {})
                found.staging.join()  # in a run, while the steps before the first save go on
                return _twice(
                    lambda step: found.save(step, model, optimizer, {}, {"settings": {}}),
                    found.wait,
                    folder / "ours",
                )

        def theirs() -> dict[str, float]:
            def save(step: int) -> None:
                weights, moments = get_state_dict(model, peer)
                state = {"model": weights, "optimizer": moments}
                saved["future"] = dcp.async_save(
                    state,
                    checkpoint_id=str(folder / "dcp" / str(step)),
                    process_group=world.host_group,
                )

            return _twice(save, lambda: saved["future"].result(), folder / "dcp")

        found = [(ours(), theirs()) for _ in range(TURNS)]
    params = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    for kind in found[0][0]:
        own, others = zip(*((a[kind], b[kind]) for a, b in found))
        ratios = tuple(a / b for a, b in zip(own, others))
        middle = map(statistics.median, (own, others))
        yield Row(f"checkpoint of {params:.0f} million: {kind}", "s", *middle, "DCP", ratios)


def _twice(save: Callable[[int], Any], wait: Callable[[], Any], to: Path) -> dict[str, float]:
    """Return seconds that the first ``save`` and the next one block, and of the whole first one."""
    shutil.rmtree(to, ignore_errors=True)
    blocked, whole = [], []
    for step in (1, 2):
        began = time.perf_counter()
        save(step)
        blocked.append(time.perf_counter() - began)
        wait()
        whole.append(time.perf_counter() - began)
    shutil.rmtree(to, ignore_errors=True)
    first, later = blocked
    return {"the first blocks training": first, "the next blocks it": later, "all": whole[0]}


PARTS = loop, pictures, checkpoints


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON if a file is named."""
    parser = command.parser("bench.training", __doc__)
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="JSON file to write the results to"
    )
    flags = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for part in PARTS:
        with tempfile.TemporaryDirectory() as folder:
            rows += part(Path(folder))
    content = [row._asdict() for row in rows]
    if flags.file is not None:
        command.write(flags.file, content, **command.origin())
    sys.stdout.write(frames.markdown(report.training(content)) + "\n")


if __name__ == "__main__":
    main()
