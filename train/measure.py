"""κ of every attention layer of what was trained, on its held-out items or on files.

python -m train.measure RUN_OR_WEIGHTS [--samples N] [--data FILES] [--last]
"""

import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leaner_kernels import KappaMonitor
from leaner_kernels.monitor.table import add_flags, pieces, show
from leaner_kernels.monitor.command_line import as_path, command, first_line, one_line
from leaner_kernels.monitor.files import text_of
from train.checkpoint.weights import Info
from train.config.flags import Parser, one_line_errors, positive
from train.data.images.saved import picture
from train.export import add_last, load
from train.predict import pictures, read_file, tokenizer_of

PROGRAM = "train.measure"
Forward = Callable[[nn.Module, tuple[Tensor, ...]], Any]
# The script that trains each task, and its settings.
_SCRIPTS = {
    "images": ("vit", "ImageSettings"),
    "next token": ("gpt", "GptSettings"),
    "masked token": ("bert", "BertSettings"),
    "long range": ("lra", "LraSettings"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write what was asked for; see ``--help``."""
    parser = command(PROGRAM, __doc__, Parser)
    known = "a run, a checkpoint, a weights file"
    parser.add_argument("weights", metavar="RUN_OR_WEIGHTS", type=as_path, help=known)
    add_last(parser)
    parser.add_argument("--samples", type=positive, default=16, help="items that are measured (16)")
    parser.add_argument(
        "--data", nargs="+", type=as_path, metavar="FILE", help="pictures or texts instead"
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    with one_line_errors(PROGRAM):
        model, info = load(args.weights, last=args.last)
        if args.data is None:
            batch, forward = _held_out(info, args.samples)
        else:
            batch, forward = _of_files(model, info, args.data, args.samples), _run
        batch = tuple(tensor.to(args.device) for tensor in batch)
        monitor = KappaMonitor(
            model.to(args.device), samples=args.samples, head_report=args.head_report
        )
        sys.stderr.write(one_line(f"weights: {info}") + "\n")
        try:
            rows = monitor.measure(batch, forward=forward, step=info.step)
        except (RuntimeError, IndexError) as error:
            raise ValueError(
                f"{info.path} cannot be run on these items: {first_line(error)}"
            ) from error
        try:
            show(rows, args)
        except ImportError as error:
            raise ValueError(str(error)) from None


def _run(model: nn.Module, batch: tuple[Tensor, ...]) -> Any:
    return model(*batch)


def _held_out(info: Info, samples: int) -> tuple[tuple[Tensor, ...], Forward]:
    """Return the first held-out items of the data that was trained on, and what runs them."""
    try:
        if info.task == "sentences":
            data, forward = _sentences(info), lambda model, batch: model(*batch[:2])
        else:
            task = _task(info)
            data, forward = task.held_out, task.score
    except Exception as error:  # settings of a file may be of any type
        raise ValueError(
            f"its held-out items cannot be opened, give --data FILES: {first_line(error)}"
        ) from error
    if data is None:
        raise ValueError(f"{info.settings.get('data')} has no held-out items: give --data FILES")
    keys = [(0, index) for index in range(min(samples, len(data)))]
    return data.__getitems__(keys), forward


def _task(info: Info) -> Any:
    if info.task not in _SCRIPTS:
        raise ValueError(f"no script trains {info.task or 'an unknown task'}")
    name, kind = _SCRIPTS[info.task]
    script = importlib.import_module(f"train.{name}")
    kind = getattr(script, kind)
    known = {field.name for field in dataclasses.fields(kind)}
    saved = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in info.settings.items()
        if key in known
    }
    # The sizes of an arm are among them; nothing is to be started.
    saved |= {"control": None, "kappa_penalty": 0.0, "init_from": None, "freeze": None}
    task, _ = script.make_task(kind(**{k: v for k, v in saved.items() if k in known}))
    return task


def _sentences(info: Info) -> Any:
    from train import glue

    (task,) = glue.chosen(tuple(info.settings["tasks"]))
    length = info.arguments["sequence_length"]
    return glue.open_task(info.settings["glue"], task, tokenizer_of(info), length)[1]


def _of_files(model: nn.Module, info: Info, paths: list[Path], samples: int) -> tuple[Tensor, ...]:
    """Return the input of a model made of files: pictures, or whole pieces of texts."""
    if info.task == "images":
        chosen = pictures(paths)[:samples]
        return (torch.stack([picture(info, read_file(path), str(path)) for path in chosen]),)
    tokenizer = tokenizer_of(info)
    length = model.sequence_length
    tokens: list[int] = []
    for path in paths:
        try:
            tokens += tokenizer.encode(text_of(read_file(path)))
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no text in UTF-8") from None
        if len(tokens) >= length * samples:
            break
    return (pieces(tokens, length, samples),)


if __name__ == "__main__":
    main()
