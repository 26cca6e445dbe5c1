"""Classify pictures or continue text with a trained model.

python -m train.predict WEIGHTS FILES...
"""

import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leaner_kernels.monitor import files
from leaner_kernels.monitor.files import DATA, files_below, plain, text_of
from leaner_kernels.monitor.pictures import PICTURES, decode
from leaner_kernels.monitor.command_line import as_path, command, one_line
from models.gpt import generate
from train.checkpoint.weights import Info, printable
from train.config.flags import Parser, count, in_utf8, number, one_line_errors, positive
from train.data.images import DigitsToInput
from train.data.images.augment import EvaluationView
from train.data.images.photographs import Pixels
from train.data.text.tokenizers import kept_tokenizer
from train.export import add_last, load
from train.gpt import legible

PROGRAM = "train.predict"
EXAMPLES = """examples:
  python -m train.predict runs/vit_digits-digits-1 photographs/ cat.jpg --top 3
  python -m train.predict runs/gpt_small-pydoc-1 --prompt "The module " --tokens 100

WEIGHTS is a run folder, one of its checkpoints, or a safetensors file from it. A run folder stands
for the weights with the best score on the held-out items."""

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Predict; see ``--help``. Returns the exit status: 1 where a file could not be read."""
    args = _parser().parse_args(argv)
    with one_line_errors(PROGRAM):
        model, info = load(args.weights, last=args.last)
        predict = {"images": _name_pictures, "next token": _continue}.get(info.task)
        if predict is None:
            raise ValueError(
                f"{info.path} must be a model of images or of the next token, got one of the task "
                f"{info.task or 'unknown'}: load it with train.export.load"
            )
        if info.task == "images" and args.prompt is not None:
            raise ValueError(
                f"--prompt needs a language model, got {info.path}, which takes pictures"
            )
        whole, said = True, False
        for row in predict(model.to(args.device), info, args):
            if not said:
                sys.stderr.write(one_line(f"weights: {info}") + "\n")
                said = True
            if "error" in row:
                whole = False
                sys.stderr.write(one_line(f"{PROGRAM}: {row['error']}") + "\n")
            elif args.json:
                sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
            else:
                sys.stdout.write(_shown(row) + "\n")
            sys.stdout.flush()
    return 0 if whole else 1


def _parser() -> argparse.ArgumentParser:
    parser = command(
        PROGRAM,
        __doc__,
        Parser,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("weights", metavar="WEIGHTS", type=as_path, help="trained model, see below")
    parser.add_argument(
        "files",
        metavar="FILE",
        type=as_path,
        nargs="*",
        help="pictures, folders of pictures, or text files",
    )
    add_last(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--top", type=positive, default=5, help="number of labels to print (5)")
    parser.add_argument(
        "--prompt",
        action="append",
        type=in_utf8,
        help="text to continue, instead of a file; may be repeated",
    )
    parser.add_argument(
        "--tokens", type=count, default=100, help="number of tokens to generate (100)"
    )
    parser.add_argument(
        "--temperature",
        type=number(float, 0),
        default=0.8,
        help="sampling temperature; 0 picks the most likely token (0.8)",
    )
    parser.add_argument(
        "--top-k", type=positive, help="sample only from this many of the most likely tokens (all)"
    )
    parser.add_argument("--seed", type=count, default=0, help="seed of the sampling (0)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="device to run on (cuda if available, otherwise cpu)",
    )
    return parser


def _shown(row: Row) -> str:
    """Return a row as text: what was written, or a name and a table below it."""
    if "text" in row:
        return row["text"]
    wide = max(len(label["label"]) for label in row["labels"])
    lines = [f"  {label['label']:<{wide}}  {label['probability']:7.2%}" for label in row["labels"]]
    return "\n".join([one_line(row["name"]), *lines])


def picture(info: Info, content: bytes, name: str) -> Tensor:
    """Return what a model takes of one picture: (channels, image_size, image_size) float32.

    A photograph is resized and cut as held-out ones are. A digit is taken as grey, 8 x 8 pixels,
    light on dark.

    Args:
        info: of the model.
        content: of the picture's file.
        name: of it, for a message.

    Raises:
        ValueError: it is no picture.
    """
    if info.pixels == "digit":
        image = decode(content, lambda: name)
        grey = np.asarray(image.convert("L").resize((8, 8)), dtype=np.float32) / 255
        prepare = DigitsToInput(info.mean[0], info.std[0], info.image_size, info.channels)
        return prepare(torch.from_numpy(grey)[None, None])[0]
    pixels = Pixels(EvaluationView(info.image_size))(content, lambda: name).float() / 255
    if info.channels == 1:
        pixels = pixels.mean(0, keepdim=True)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (info.mean, info.std))
    return (pixels - mean) / std


def _pictures(paths: Sequence[Path]) -> list[Path]:
    """Return the files that were named, and all pictures in the folders that were."""
    chosen: list[Path] = []
    for path in paths:
        inside = [path]
        if path.is_dir():
            inside = sorted(f for f in files_below(path) if f.suffix.lower() in PICTURES)
        if not inside:
            raise ValueError(f"{path} holds no pictures: give pictures, or folders of them")
        chosen += inside
    if not chosen:
        raise ValueError("no files: give pictures, or folders of them")
    return chosen


def _read_file(path: Path) -> bytes:
    try:
        return files.read_file(path, DATA)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


@torch.no_grad()
def _name_pictures(model: nn.Module, info: Info, args: argparse.Namespace) -> Iterator[Row]:
    for path in _pictures(args.files):
        try:
            pixels = picture(info, _read_file(path), str(path))
        except ValueError as error:
            yield {"error": str(error).removeprefix("--data holds ")}
            continue
        probabilities = model(pixels[None].to(args.device))[0].float().softmax(0)
        best = probabilities.topk(min(args.top, len(probabilities)))
        labels = [
            {"label": info.classes[place], "probability": probability}
            for probability, place in zip(best.values.tolist(), best.indices.tolist())
        ]
        yield {"name": str(path), "labels": labels}


def _continue(model: nn.Module, info: Info, args: argparse.Namespace) -> Iterator[Row]:
    if info.tokenizer is None:
        raise ValueError(
            f"{info.path} contains no tokeniser: give a run folder or weights exported from one"
        )
    if not args.files and args.prompt is None:
        raise ValueError("no text: give --prompt or files of text")
    vocab_size = info.arguments.get("vocab_size", 0)
    tokenizer = kept_tokenizer(info.tokenizer, str(info.path), vocab_size)
    prompts = [(printable(prompt), lambda text=prompt: plain(text)) for prompt in args.prompt or ()]
    prompts += [(str(path), lambda path=path: text_of(_read_file(path))) for path in args.files]
    for name, read in prompts:
        try:
            text = read()
        except UnicodeDecodeError:
            yield {"error": f"{name} is not text in UTF-8"}
            continue
        except ValueError as error:
            yield {"error": str(error)}
            continue
        tokens = tokenizer.encode(text) or [tokenizer.end]
        if len(tokens) > model.sequence_length:
            seen = f"the last {model.sequence_length} of {len(tokens)} tokens"
            sys.stderr.write(one_line(f"{PROGRAM}: {name}: the model sees {seen}") + "\n")
        drawn = generate(
            model,
            torch.tensor([tokens], device=args.device),
            args.tokens,
            temperature=args.temperature,
            top_k=args.top_k and min(args.top_k, model.vocab_size),
            generator=torch.Generator(args.device).manual_seed(args.seed),
        )
        written = tokenizer.decode(drawn[0, len(tokens) :].tolist())
        yield {"name": name, "text": legible(text + written)}


if __name__ == "__main__":
    sys.exit(main())
