"""Compare what training costs beside the model with what it costs in other hands: no GPU needed.

    python -m bench.training [--json FILE] [--rounds 3] [--only PART ...]

Loop: CPU time of a step of train/vit.py beside a loop of ten lines over the same model, plain and
under FSDP2. Input: pictures and tokens per second of CPU time. Checkpoints: how long the training
thread stands still, and how long until the file is there. Logs: how long a resume takes.

Every round runs both sides, one after the other, on one core; shown is the median of a side and of
the ratios of the rounds, with the least and the most. Inputs are generated.
"""

import argparse
import importlib.util
import io
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from bench.harness import machine

ROOT = machine.ROOT
DEPTH, BATCH, WARM, STEPS = 12, 4, 20, 300
SIZES = {
    **{"image_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 192, "pool": "avg"},
    **{"init": "xavier", "heads": 2, "depth": DEPTH, "head_dim": 16, "mlp_ratio": 2.0},
    "num_classes": 10,
}
PICTURES, SIDE, AT_ONCE = 256, 224, 64
POLICIES = {"plain": None, "paper": "rand-m9-mstd0.5"}
TOKENS, CONTEXT, SEQUENCES, BATCHES = 5_000_000, 256, 32, 400
# About a hundred million parameters, and with AdamW's moments 1.2 GB.
LARGE = {"embed_dim": 768, "depth": 14, "heads": 12, "head_dim": 64}
LOG_STEPS = 100_000


class Comparison(NamedTuple):
    """Something that is measured on both sides.

    Attributes:
        part: of ``PARTS``.
        what: is measured.
        unit: of the values; "per CPU second" is better if higher, everything else if lower.
        peer: what it is compared with.
        ours: measures us.
        theirs: measures the peer; None where it is not installed.
        values: what a measurement's tuple holds, where it is several rows' at once.
    """

    part: str
    what: str
    unit: str
    peer: str
    ours: Callable[[], tuple[float, ...]]
    theirs: Callable[[], tuple[float, ...]] | None
    values: tuple[str, ...] = ("",)


def _cpu() -> float:
    return time.process_time()


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# The loop.


def _loop(scratch: Path) -> Iterator[Comparison]:
    for how, name in (("none", "plain parameters"), ("fsdp", "FSDP2, one process")):
        yield Comparison(
            *("loop", f"step of {DEPTH} blocks, {name}", "CPU ms", "a bare loop, the same"),
            partial(_our_step, scratch / "run", how),
            partial(_bare_step, how),
        )


def _our_step(folder: Path, shard: str) -> tuple[float]:
    """Return milliseconds of CPU time of a step of train/vit.py on the bundled digits."""
    few, many = (_seconds_of_run(folder, shard, steps) for steps in (WARM, WARM + STEPS))
    return (1e3 * (many - few) / STEPS,)


def _seconds_of_run(folder: Path, shard: str, steps: int) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    flags = ["--model", "vit_digits", "--depth", DEPTH, "--heads", 2, "--head-dim", 16]
    flags += ["--batch-size", BATCH, "--steps", steps, "--eval-every", 0, "--kappa-every", 0]
    flags += ["--workers", 0, "--shard", shard, "--ckpt-every", 0, "--out", folder]
    command = [sys.executable, ROOT / "train" / "vit.py", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"train/vit.py ended with status {done.returncode}: {done.stderr[-500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _bare_step(shard: str) -> tuple[float]:
    """Return the same of a loop of PyTorch alone, over data in memory."""
    from train.config.architecture import SmallTransformer
    from train.loop import parallel

    pictures, labels = torch.randn(1024, 1, 8, 8), torch.randint(0, 10, (1024,))
    with parallel.world() as world:
        way = "fsdp" if shard == "fsdp" else "one"
        build = partial(SmallTransformer, **SIZES)
        model = parallel.make_model(build, world, seed=0, bf16=False, way=way)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        begin = 0.0
        for step in range(WARM + STEPS):
            if step == WARM:
                begin = _cpu()
            batch = slice(step % 200 * BATCH, (step % 200 + 1) * BATCH)
            loss = F.cross_entropy(model(pictures[batch]), labels[batch])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            loss.item()
            optimizer.step()
            optimizer.zero_grad()
    return (1e3 * (_cpu() - begin) / STEPS,)


# Input.


def _write_pictures(root: Path) -> None:
    """Write JPEGs of 500 x 375 pixels and about 100 kB: smooth shapes and noise."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(PICTURES):
        small = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC))
        noisy = smooth + rng.normal(0, 12, smooth.shape)
        for part in ("train", "val"):
            file = root / part / f"class{number % 8}" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            if part == "train" or number < 16:
                pixels = noisy.clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(file, quality=90)


def _images(scratch: Path) -> Iterator[Comparison]:
    root = scratch / "pictures"
    _write_pictures(root)
    peers = {"timm": _timm_loader, "torchvision": _torchvision_loader}
    for recipe, policy in POLICIES.items():
        for peer, loader in peers.items():
            yield Comparison(
                *("images", f"pictures, {recipe}", "per CPU second", peer),
                partial(_our_pictures, root, policy),
                partial(_their_pictures, loader, root / "train", policy)
                if _installed(peer)
                else None,
            )
    if _installed("datasets"):
        shards = scratch / "shards"
        _write_shards(root / "train", shards)
        yield Comparison(
            *("images", "pictures of shards, plain", "per CPU second", "webdataset"),
            partial(_our_pictures, f"hf-stream:{shards}", None),
            partial(_their_pictures, _webdataset_loader, shards, None)
            if _installed("webdataset")
            else None,
        )


def _their_pictures(
    loader: Callable[[Path, str | None], Any], root: Path, policy: str | None
) -> tuple[float]:
    return (_rate(loader(root, policy)),)


def _our_pictures(root: Any, policy: str | None) -> tuple[float]:
    from train.data.images import open_images
    from train.data.images.augment import Augment
    from train.data.loader import loading
    from train.data.sampler import Split, make_sampler

    augment = Augment(rand_augment=policy)
    data = open_images(str(root), size=SIDE, channels=3, seed=0, augment=augment).train
    split = Split(AT_ONCE, 1, 1)
    order = make_sampler(data, split, seed=0, rank=0, first=0, last=len(data) // AT_ONCE)
    with loading(data, order, workers=0, device=torch.device("cpu")) as batches:
        return (_rate(batch.tensors for batch in batches),)


def _rate(batches: Any) -> float:
    """Return items per second of CPU time, without those of the first batch."""
    count, begin = 0, None
    for batch in batches:
        if begin is None:
            begin = _cpu()
            continue
        count += len(batch[0])
    return count / (_cpu() - begin)


def _timm_loader(root: Path, policy: str | None) -> Any:
    from timm.data import create_dataset, create_loader

    return create_loader(
        create_dataset("", root=str(root.parent), split="train", is_training=True),
        **{"input_size": (3, SIDE, SIDE), "batch_size": AT_ONCE, "is_training": True},
        **{"no_aug": False, "scale": (0.08, 1.0), "hflip": 0.5, "color_jitter": 0.0},
        **{"auto_augment": policy, "interpolation": "bicubic", "num_workers": 0},
        **{"device": torch.device("cpu"), "pin_memory": False, "persistent_workers": False},
    )


def _torchvision_view(policy: str | None) -> Any:
    from torchvision.transforms import InterpolationMode, v2

    changed = [v2.RandAugment(magnitude=9)] if policy else []
    bicubic = InterpolationMode.BICUBIC
    return v2.Compose(
        [
            v2.RandomResizedCrop(SIDE, interpolation=bicubic, antialias=True),
            *(v2.RandomHorizontalFlip(), *changed, v2.PILToTensor()),
            v2.ToDtype(torch.float, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


def _torchvision_loader(root: Path, policy: str | None) -> Any:
    from torchvision.datasets import ImageFolder

    data = ImageFolder(str(root), _torchvision_view(policy))
    return torch.utils.data.DataLoader(data, AT_ONCE, shuffle=True, drop_last=True)


def _write_shards(pictures: Path, root: Path) -> None:
    """Write the pictures as tars and as parquet files, 32 in each."""
    import tarfile

    import datasets

    datasets.disable_progress_bars()
    files = sorted(pictures.rglob("*.jpg"))
    (root / "tars").mkdir(parents=True)
    for shard in range(0, len(files), 32):
        rows = [(file.read_bytes(), int(file.parent.name[5:])) for file in files[shard:][:32]]
        with tarfile.open(root / "tars" / f"{shard // 32:04}.tar", "w") as tar:
            for number, (content, label) in enumerate(rows):
                for ending, data in (("jpg", content), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{number:04}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        classes = datasets.ClassLabel(names=[*map(str, range(8))])
        features = datasets.Features({"image": datasets.Image(), "label": classes})
        images = [{"bytes": content, "path": None} for content, _ in rows]
        columns = {"image": images, "label": [label for _, label in rows]}
        table = datasets.Dataset.from_dict(columns, features)
        for part in ("train", "validation") if shard == 0 else ("train",):
            table.to_parquet(root / "data" / f"{part}-{shard // 32:05}-of-00008.parquet")


def _webdataset_loader(root: Path, policy: str | None) -> Any:
    import webdataset

    tars = sorted(map(str, (root / "tars").glob("*.tar")))
    view = _torchvision_view(policy)
    data = webdataset.WebDataset(tars, shardshuffle=len(tars)).shuffle(1000).decode("pil")
    rows = data.to_tuple("jpg", "cls").map_tuple(view, int).batched(AT_ONCE)
    return webdataset.WebLoader(rows, batch_size=None, num_workers=0)


def _text(scratch: Path) -> Iterator[Comparison]:
    path = scratch / "tokens.bin"
    np.random.default_rng(0).integers(0, 50_257, TOKENS).astype(np.uint16).tofile(path)
    yield Comparison(
        *("text", f"tokens, {CONTEXT} each", "per CPU second", "a memmap and torch.stack"),
        partial(_our_tokens, path),
        partial(_memmap_tokens, path),
    )


def _our_tokens(path: Path) -> tuple[float]:
    from train.data.loader import loading
    from train.data.sampler import BatchSampler, Split
    from train.data.text import RandomWindows, TokenStream

    tokens = TokenStream(path, "uint16", 0, TOKENS)
    data = RandomWindows(tokens, CONTEXT + 1, count=SEQUENCES * BATCHES, seed=0)
    split = Split(SEQUENCES, 1, 1)
    order = BatchSampler(len(data), split, seed=0, rank=0, first=0, last=BATCHES)
    with loading(data, order, workers=0, device=torch.device("cpu")) as batches:
        rows = ((b.tensors[0][:, :-1], b.tensors[0][:, 1:]) for b in batches)
        return (CONTEXT * _rate(rows),)


def _memmap_tokens(path: Path) -> tuple[float]:
    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(BATCHES):
            tokens = np.memmap(path, np.uint16, mode="r")
            starts = torch.randint(TOKENS - CONTEXT - 1, (SEQUENCES,)).tolist()
            rows = [
                [torch.from_numpy(tokens[s + o :][:CONTEXT].astype(np.int64)) for s in starts]
                for o in (0, 1)
            ]
            yield torch.stack(rows[0]), torch.stack(rows[1])

    return (CONTEXT * _rate(batches()),)


# Checkpoints and logs.


def _checkpoints(scratch: Path) -> Iterator[Comparison]:
    with _large_model() as (world, model, optimizer):
        folder = scratch / "checkpoints"
        parameters = sum(p.numel() for p in model.parameters())
        yield Comparison(
            *("checkpoints", f"{parameters / 1e6:.0f}M parameters", "s", "dcp.async_save"),
            partial(_our_save, folder / "ours", world, model, optimizer),
            partial(_dcp_save, folder / "dcp", world, model, optimizer),
            ("save returns after", "longest pause after it", "on disk after"),
        )


@contextmanager
def _large_model() -> Iterator[tuple[Any, nn.Module, Any]]:
    from train.config.architecture import VisionTransformer
    from train.loop import parallel
    from train.loop.optimizer import make_optimizer

    with parallel.world() as world:
        build = partial(VisionTransformer, **LARGE)
        model = parallel.make_model(build, world, seed=0, bf16=False)
        yield world, model, make_optimizer(model, lr=1e-3, weight_decay=0.05)


def _pauses(begin: float, written: Callable[[], Any]) -> tuple[float, float, float]:
    """Return seconds until now, the longest pause of this thread until then, and until written."""
    blocked = time.perf_counter() - begin
    waiting = Thread(target=written)
    waiting.start()
    longest, before = 0.0, time.perf_counter()
    while waiting.is_alive():
        sum(range(2000))
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    return blocked, longest, before - begin


def _our_save(folder: Path, world: Any, model: nn.Module, optimizer: Any) -> tuple[float, ...]:
    from train.checkpoint.checkpoints import Checkpoints

    with Checkpoints(folder, world, keep=1, log=sys.stderr.write) as checkpoints:
        checkpoints.save(1, model, optimizer, {}, {"settings": {}})
        checkpoints.wait()  # the first one makes room for the copy
        begin = time.perf_counter()
        checkpoints.save(2, model, optimizer, {}, {"settings": {}})
        measured = _pauses(begin, checkpoints.wait)
    shutil.rmtree(folder)
    return measured


def _dcp_save(folder: Path, world: Any, model: nn.Module, optimizer: Any) -> tuple[float, ...]:
    from torch.distributed import checkpoint

    from train.loop.optimizer import moments

    state = {"model": model.state_dict(), "optimizer": moments(optimizer)}
    begin = time.perf_counter()
    saved = checkpoint.async_save(state, checkpoint_id=str(folder), process_group=world.host_group)
    measured = _pauses(begin, saved.result)
    shutil.rmtree(folder)
    return measured


def _logs(scratch: Path) -> Iterator[Comparison]:
    path = scratch / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(LOG_STEPS):
            row = {"step": step, "epoch": step / 89, "loss": 2.0 + step % 7, "lr": 1e-3}
            row |= {"grad_norm": 1.0 + step % 3, "throughput": 512.0, "data_wait": 0.001}
            file.write(json.dumps(row) + "\n")
    yield Comparison(
        *("logs", f"resume of a log of {LOG_STEPS:,} steps", "s", "json.loads of each line"),
        partial(_our_resume, path),
        partial(_read_all, path),
    )


def _our_resume(path: Path) -> tuple[float]:
    from leaner_kernels.monitor.rows import METRICS_ROW
    from train.logs.report import JsonLines

    begin = time.perf_counter()
    JsonLines(path, LOG_STEPS, SimpleNamespace(log=sys.stderr.write), **METRICS_ROW)
    return (time.perf_counter() - begin,)


def _read_all(path: Path) -> tuple[float]:
    begin = time.perf_counter()
    with path.open() as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == LOG_STEPS
    return (time.perf_counter() - begin,)


PARTS = {
    "loop": _loop,
    "images": _images,
    "text": _text,
    "checkpoints": _checkpoints,
    "logs": _logs,
}


def measure(parts: list[str], rounds: int, scratch: Path) -> list[dict[str, Any]]:
    """Return a row for each value of each comparison: medians, and the ratios of the rounds."""
    torch.set_num_threads(1)
    rows = []
    for part in parts:
        for case in PARTS[part](scratch):
            pairs = [(case.ours(), case.theirs() if case.theirs else None) for _ in range(rounds)]
            rows += [_row(case, value, place, pairs) for place, value in enumerate(case.values)]
            for row in rows[-len(case.values) :]:
                sys.stderr.write(f"{row}\n")
    return rows


def _row(case: Comparison, value: str, place: int, pairs: list[Any]) -> dict[str, Any]:
    ours = [own[place] for own, _ in pairs]
    theirs = [other[place] for _, other in pairs if other is not None]
    ratios = [one / other for one, other in zip(ours, theirs) if other]
    row: dict[str, Any] = {"part": case.part, "case": ": ".join(filter(None, (case.what, value)))}
    row |= {"unit": case.unit, "ours": statistics.median(ours), "peer": case.peer}
    if not theirs:
        return row | {"peer": f"{case.peer}, not installed"}
    row |= {"theirs": statistics.median(theirs), "rounds": len(pairs)}
    if ratios:
        row |= {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return row


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file to write the result to; else it is shown")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of measurements (3)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], help="parts (all)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        # What a data set keeps of itself, too.
        os.environ |= dict.fromkeys(("XDG_CACHE_HOME", "HF_HOME"), scratch)
        rows = measure(options.only, options.rounds, Path(scratch))
    packages = ("timm", "torchvision", "webdataset", "Pillow", "simplejpeg", "datasets")
    result = {
        "training": rows,
        "datetime": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.facts(),
        "packages": {name: machine.installed(name) for name in packages},
        "commit": machine.commit(),
    }
    text = json.dumps(result, indent=2) + "\n"
    options.json.write_text(text) if options.json else sys.stdout.write(text)


if __name__ == "__main__":
    main()
