"""Train one small model on one task, in minutes on one core, and write its results.

    python studies/train_small.py --task python --depth 6 --heads 8 --mlp-ratio 2 --out runs/lean

A task is read from this Python's installation or generated:

- ``pictures``: which open cells of a drawn maze its start reaches. A maze has 5 × 5 noisy cells of
  4 × 4 pixels. Every cell is a patch, and the model classifies each. A seed gives 1,250 mazes to
  learn from, each with other noise whenever it is seen. All seeds are measured on the same mazes:
  1,024 of 2,000 during training, and 10,000 others after it.
- ``python``: the next byte of the standard library's files; every tenth file is held out.
- ``listops``: the value of each list at its closing bracket. Lists are nested, of MIN, MAX and MED,
  with at most 40 symbols, such as [MAX 2 9 [MIN 4 7 ] ]. The held-out value is that of the whole
  list.

AdamW in float32; the rate rises over a tenth of the steps and falls in half a cosine. A seed gives
the initial weights and the order of the items. The loss and the accuracy of the first validation
items (held-out ones, if a task has no others), and kappa, are measured before training and after
each twentieth of the steps. The training loss is the mean over the last twentieth.
"""

import argparse
import json
import math
import os
import resource
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leaner_kernels import measure
from models.gpt import GPT
from models.vit import SmallTransformer
from train.data import listops

CACHE = Path(__file__).resolve().parent.parent / "runs" / "data"
PROBED = 16  # held-out items for kappa
CHECKS = 20  # measurements of a run, after equal parts of its steps
CHECKED = 25_600  # held-out tokens for each measurement
CONTEXT = 64  # bytes that a model of the task python sees
LONGEST = 40  # symbols of a list
# Without sums modulo ten, which take more steps to learn than there are.
LISTS = listops.ListLimits(
    max_depth=4, max_args=4, min_length=9, max_length=LONGEST + 1, operators=3
)
SIZES = {"train": 100_000, "dev": 10, "test": 5000}
CELLS = 5  # a side of a maze
PIXELS = 4  # a side of a cell
NOISE = 1.2  # standard deviation of a pixel
WALLS = 0.42  # share of the cells
TRAINING_MAZES = 1250
NOISES = 1 << 30  # indices of each training maze, for other noise
VALIDATION_MAZES = 2000
HELD_OUT_MAZES = 10_000


@dataclass(frozen=True)
class Task:
    """Items to learn, items to measure, and how a model is called with them.

    Attributes:
        held_out: items as a batch has them, tensors of equal length.
        validation: others for the measurements during training, or None for the held-out ones.
        pick: takes indices of training items, gives a batch.
        items: how many indices there are.
        tokens: tokens of an item, padding included, on average over training.
        scores: logits (predictions, classes) and targets (predictions,) of a batch.
    """

    held_out: tuple[Tensor, ...]
    pick: Callable[[np.ndarray], tuple[Tensor, ...]]
    items: int
    tokens: float
    scores: Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, Tensor]]
    validation: tuple[Tensor, ...] | None = None

    @property
    def checked(self) -> tuple[Tensor, ...]:
        """Return the items that are measured during training."""
        return self.held_out if self.validation is None else self.validation


class MazeTransformer(SmallTransformer):
    """A ViT that classifies every patch: (B, 1, S, S) images -> (B, P, 2) logits.

    Its positions start as sines and cosines of the row and the column, so that a patch finds its
    neighbours from the first step. Learned from noise, they take most of a short training.
    """

    def __init__(self, **sizes: Any):
        side = CELLS * PIXELS
        super().__init__(
            image_size=side, patch_size=PIXELS, in_chans=1, num_classes=2, pool="avg", **sizes
        )

    @property
    def sequence_length(self) -> int:
        """Return the number of patches."""
        return self.num_tokens

    def flops_per_sequence(self) -> int:
        """Return the FLOPs of one image's forward, as ``flops_per_image`` counts them."""
        return self.flops_per_image()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Give every parameter its initial value."""
        super().init_weights(generator)
        waves = self.embed_dim // 4
        rates = 2 / 10 ** torch.linspace(0, 1, waves)
        angles = torch.arange(CELLS).unsqueeze(1) * rates
        of_side = math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], 1)
        rows = of_side.repeat_interleave(CELLS, 0)
        columns = of_side.repeat(CELLS, 1)
        self.pos_embed.zero_()
        self.pos_embed[0, :, : 4 * waves] = torch.cat([rows, columns], 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of every patch, row by row."""
        self.check_images(images)
        x = self.patch_embed(images) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.fc_norm(x))


def mazes(generator: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Draw mazes: (count, 1, side, side) float32 images and (count, cells) int64 targets.

    A wall is 1, an open cell 0 and the start -2. The target of an open cell is 1 if steps to a side
    lead there from the start and 0 if not, that of a wall -100.
    """
    shape = count, CELLS, CELLS
    walls = generator.random(shape) < WALLS
    start = np.arange(count), generator.integers(CELLS * CELLS, size=count)
    walls.reshape(count, -1)[start] = False
    reached = np.zeros(shape, bool)
    reached.reshape(count, -1)[start] = True
    reached = spread(reached, ~walls)
    cells = walls.astype(np.float32)
    cells.reshape(count, -1)[start] = -2
    images = torch.from_numpy(cells.repeat(PIXELS, 1).repeat(PIXELS, 2)).unsqueeze(1)
    targets = np.where(walls, -100, reached).astype(np.int64).reshape(count, -1)
    return images, torch.from_numpy(targets)


def add_noise(generator: np.random.Generator, images: Tensor) -> Tensor:
    """Return images with normal noise on every pixel."""
    return images + NOISE * torch.from_numpy(generator.standard_normal(images.shape, np.float32))


def spread(reached: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Return which free cells are reached by steps to a side: all (count, CELLS, CELLS) bool."""
    while True:
        wider = reached | (step_to_sides(reached) & free)
        if (wider == reached).all():
            return reached
        reached = wider


def step_to_sides(cells: np.ndarray) -> np.ndarray:
    """Return which cells lie beside one of the given: both (count, CELLS, CELLS) bool."""
    beside = np.zeros_like(cells)
    beside[:, 1:] |= cells[:, :-1]
    beside[:, :-1] |= cells[:, 1:]
    beside[:, :, 1:] |= cells[:, :, :-1]
    beside[:, :, :-1] |= cells[:, :, 1:]
    return beside


def pictures(seed: int = 0) -> Task:
    """Return the task of the mazes; the indices of a batch give its mazes and their noise."""

    def noisy(key: int, count: int) -> tuple[Tensor, Tensor]:
        generator = np.random.default_rng(key)
        images, targets = mazes(generator, count)
        return add_noise(generator, images), targets

    images, targets = mazes(np.random.default_rng([1, seed]), TRAINING_MAZES)

    def pick(chosen: np.ndarray) -> tuple[Tensor, ...]:
        own = torch.from_numpy(chosen % TRAINING_MAZES)
        return add_noise(np.random.default_rng(chosen + 1), images[own]), targets[own]

    def scores(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        images, targets = batch
        return model(images)[targets >= 0], targets[targets >= 0]

    return Task(
        noisy(2, HELD_OUT_MAZES),
        pick,
        TRAINING_MAZES * NOISES,
        CELLS * CELLS,
        scores,
        noisy(0, VALIDATION_MAZES),
    )


def python_bytes(context: int = CONTEXT, every: int = 1) -> Task:
    """Return the task of the standard library's bytes: 4.7 MB in some 170 files.

    Training takes every ``every``-th of the files that are not held out.
    """
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [np.frombuffer(path.read_bytes() + b"\0", np.uint8) for path in paths]
    held_out = np.concatenate(parts[9::10])
    seen = [part for number, part in enumerate(parts) if number % 10 != 9]
    train = np.concatenate(seen[::every])

    def windows(text: np.ndarray, starts: np.ndarray) -> tuple[Tensor]:
        rows = np.lib.stride_tricks.sliding_window_view(text, context + 1)[starts]
        return (torch.from_numpy(rows.astype(np.int64)),)

    def scores(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        (rows,) = batch
        return model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()

    starts = np.arange(0, len(held_out) - context, context)
    step = -(-len(starts) * context // 100_000)  # some 100 kB are measured
    return Task(
        windows(held_out, starts[::step]),
        lambda chosen: windows(train, chosen),
        len(train) - context,
        context,
        scores,
    )


def lists() -> Task:
    """Return the task of ListOps, in lists short enough for few steps.

    A batch has tokens and targets (items, LONGEST), 0 where nothing is to be predicted.
    """
    splits = listops.open_lists(SIZES, LISTS, seed=0, folder=CACHE)

    def longest_first(part: listops.Lists) -> tuple[Tensor, Tensor]:
        tokens, targets = np.zeros((2, len(part), LONGEST), np.int64)
        for row, item in enumerate(np.argsort(-part.lengths, kind="stable")):
            own = part[item]
            tokens[row, : len(own)] = own
            targets[row, : len(own)] = inner_values(own)
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def scores(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        tokens, targets = batch
        return model(tokens)[targets > 0], targets[targets > 0]

    train = longest_first(splits["train"])
    lengths = np.sort(splits["train"].lengths)[::-1]

    def neighbours(chosen: np.ndarray) -> tuple[Tensor, ...]:
        """Return lists of nearly one length, so that little padding is computed."""
        begin = min(chosen[0], len(lengths) - len(chosen))
        return tuple(part[begin : begin + len(chosen), : lengths[begin]] for part in train)

    tokens, values = longest_first(splits["test"])
    inner = tokens.roll(-1, dims=1) > 0
    inner[:, -1] = False
    held_out = tokens, values.masked_fill(inner, 0)
    return Task(held_out, neighbours, len(lengths), lengths.mean(), scores)


def inner_values(tokens: np.ndarray) -> np.ndarray:
    """Return the id of the value of each list at its closing bracket, 0 elsewhere: (tokens,) uint8.

    The last one is the value of the whole list.
    """
    symbols = listops.SYMBOLS
    values = np.zeros(len(tokens), np.uint8)
    open_lists: list[tuple[int, list[int]]] = [(0, [])]
    for place, token in enumerate(tokens.tolist()):
        symbol = symbols[token - 1]
        if symbol in listops.OPERATORS:
            open_lists.append((listops.OPERATORS.index(symbol), []))
            continue
        value = token - 1
        if symbol == "]":
            value = listops.apply(*open_lists.pop())
            values[place] = 1 + value
        open_lists[-1][1].append(value)
    return values


TASKS: dict[str, Callable[[], Task]] = {
    "pictures": pictures,
    "python": python_bytes,
    "listops": lists,
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--task", choices=list(TASKS), required=True, help="task to learn")
    text = f"sequence length of --task python, in bytes ({CONTEXT})"
    add("--context", type=int, default=CONTEXT, help=text)
    text = "train on every N-th file of --task python (1)"
    add("--every-file", type=int, default=1, metavar="N", help=text)
    add("--depth", type=int, default=10, help="number of layers (10)")
    add("--heads", type=_numbers, default=[6], help="heads: one value, or one per layer (6)")
    text = "width of a head: one value, or one per layer (16)"
    add("--head-dim", type=_numbers, default=[16], help=text)
    add("--mlp-ratio", type=float, default=4.0, help="hidden width of the MLP over --width (4)")
    add("--width", type=int, default=96, help="embedding width (96)")
    add("--steps", type=int, default=1000, help="optimizer steps (1000)")
    add("--batch-size", type=int, default=32, help="items per step (32)")
    add("--lr", type=float, default=1e-3, help="peak learning rate (0.001)")
    add("--device", default="cpu", help="cpu or cuda (cpu)")
    add("--seed", type=int, default=0, help="seed of the initial weights and the data order (0)")
    add("--resume", help="accepted and ignored: a short run always starts over")
    add("--out", type=Path, required=True, help="folder to write the results to")
    args = parser.parse_args(argv)
    if args.every_file < 1:
        parser.error(f"--every-file must be at least 1, got {args.every_file}")
    return args


def _numbers(text: str) -> list[int]:
    return [*map(int, text.split(","))]


def build(args: argparse.Namespace) -> nn.Module:
    """Return the model of a task and sizes, on the default device."""
    heads, head_dim = (of[0] if len(of) == 1 else of for of in (args.heads, args.head_dim))
    sizes: dict[str, Any] = {
        "embed_dim": args.width,
        "depth": args.depth,
        "mlp_ratio": args.mlp_ratio,
    }
    sizes |= {"heads": heads, "head_dim": head_dim}
    if args.task == "pictures":
        return MazeTransformer(**sizes)
    if args.task == "python":
        return GPT(vocab_size=256, sequence_length=args.context, **sizes)
    return GPT(vocab_size=1 + len(listops.SYMBOLS), sequence_length=LONGEST, **sizes)


def main(argv: Sequence[str] | None = None) -> None:
    """Train one model from the command line."""
    args = arguments(argv)
    if args.task == "python":
        task = python_bytes(args.context, args.every_file)
    elif args.task == "pictures":
        task = pictures(args.seed)
    else:
        task = TASKS[args.task]()
    start_memory = _peak_memory(args.device)
    torch.manual_seed(args.seed)
    model = build(args).to(args.device)
    rows: list[dict] = []
    curve: list[tuple[float, float]] = []
    checking = np.zeros(2)  # seconds that the checks took, of the clock and of the processor

    def clocks() -> np.ndarray:
        return np.array([time.perf_counter(), time.process_time()])

    def check(step: int) -> None:
        nonlocal checking
        began = clocks()
        count = CHECKED // model.sequence_length
        part = tuple(of[:count] for of in task.checked)
        curve.append(_evaluate(model, task, part, args.device))
        rows.extend(_kappas(model, task, args.device, step))
        checking = checking + clocks() - began

    check(0)
    started = clocks() - checking
    train_loss = _train(model, task, args, check)
    seconds, cpu = (clocks() - started - checking).tolist()
    loss, accuracy = _evaluate(model, task, task.held_out, args.device)
    validation = loss
    if task.validation is not None:
        validation, _ = _evaluate(model, task, task.validation, args.device)
    summary = {
        "held_out_loss": loss,
        "held_out_accuracy": accuracy,
        "validation_loss": validation,
        "train_loss": train_loss,
        "losses": [loss for loss, _ in curve],
        "accuracies": [share for _, share in curve],
        "params": sum(parameter.numel() for parameter in model.parameters()),
        # A backward takes twice the products of a forward; a shorter item its part of the longest.
        "train_flops": 3
        * model.flops_per_sequence()
        * (task.tokens / model.sequence_length)
        * (args.batch_size * args.steps),
        "peak_memory_bytes": _peak_memory(args.device) - start_memory,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "torch": torch.__version__,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({name: row[name] for name in ("step", "layer", "kappa")}) for row in rows)
    (args.out / "kappa_probe.jsonl").write_text("".join(line + "\n" for line in lines))
    whole = args.out / ".summary.json"
    whole.write_text(json.dumps(summary, indent=1) + "\n")
    whole.rename(args.out / "summary.json")
    sys.stdout.write(json.dumps(summary) + "\n")


def _train(
    model: nn.Module, task: Task, args: argparse.Namespace, check: Callable[[int], None]
) -> float:
    """Train a model, and call ``check`` with the steps that are done at each of CHECKS times.

    Returns:
        The mean training loss between the last two of them.
    """
    recent, mean = [], math.nan
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    betas = (0.9, 0.95)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=betas, fused=True)
    order = np.random.default_rng(args.seed)
    checked = {round(args.steps * part / CHECKS) for part in range(1, CHECKS + 1)}
    for step in range(args.steps):
        model.train()
        rise = min(1.0, (step + 1) / (0.1 * args.steps))
        rate = args.lr * rise * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = task.pick(order.integers(task.items, size=args.batch_size))
        loss = F.cross_entropy(*task.scores(model, _on(batch, args.device)))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.detach())
        if step + 1 in checked:
            check(step + 1)
            mean, recent = torch.stack(recent).mean().item(), []
    return mean


@torch.no_grad()
def _evaluate(
    model: nn.Module, task: Task, items: tuple[Tensor, ...], device: str
) -> tuple[float, float]:
    """Return the mean loss of the predictions of items, and the share that is right."""
    model.eval()
    losses, right = [], []
    for batch in zip(*(part.split(200) for part in items)):
        logits, targets = task.scores(model, _on(batch, device))
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        right.append(logits.argmax(dim=1) == targets)
    return torch.cat(losses).double().mean().item(), torch.cat(right).double().mean().item()


def _kappas(model: nn.Module, task: Task, device: str, step: int) -> list[dict]:
    batch = _on(tuple(part[:PROBED] for part in task.checked), device)
    return measure(model, batch, forward=task.scores, samples=PROBED, step=step)


def _on(batch: tuple[Tensor, ...], device: str) -> tuple[Tensor, ...]:
    return tuple(part.to(device) for part in batch)


def _peak_memory(device: str) -> int:
    """Return the most bytes so far: of the process, or of the tensors on a GPU."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()
