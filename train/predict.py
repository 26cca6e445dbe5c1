"""Use a trained model: name pictures, continue text, fill in masks, judge sentences and lists.

python -m train.predict WEIGHTS FILES...
"""

import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leaner_kernels.monitor import files
from leaner_kernels.monitor.files import DATA, files_below, plain, text_of
from leaner_kernels.monitor.pictures import PICTURES
from leaner_kernels.monitor.command_line import as_path, command, one_line
from models.gpt import generate
from train.checkpoint.weights import Info, printable
from train.config.flags import Parser, count, in_utf8, number, one_line_errors, positive
from train.data.images.saved import picture
from train.data.text.tokenizers import Tokenizer, kept_tokenizer
from train.export import add_last, load
from train.gpt import legible

PROGRAM = "train.predict"
EXAMPLES = """examples:
  python -m train.predict runs/vit_digits-digits-1 photographs/ cat.jpg --top 3
  python -m train.predict runs/gpt_small-pydoc-1 --prompt "The module " --tokens 100
  python -m train.predict runs/bert_small-pydoc-1 --prompt "The [MASK]odule is used."
  python -m train.predict runs/bert-glue-1/mrpc --prompt "It rains. ||| It is raining."
  python -m train.predict runs/nystromformer_small-1 --prompt "[MAX 2 9 [MIN 4 7 ] ]"

WEIGHTS is a run's folder, one of its checkpoints, or a safetensors file that it left. Of a run the
weights are taken that were best on its held-out items."""

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Predict; see ``--help``. Returns the exit status: 1 where a file could not be read."""
    args = _parser().parse_args(argv)
    with one_line_errors(PROGRAM):
        model, info = load(args.weights, last=args.last)
        model = model.to(args.device)
        predict = {
            "images": _name_pictures,
            "next token": _continue,
            "masked token": _fill_in,
            "sentences": _judge,
            "long range": _judge_sequences,
        }.get(info.task)
        if predict is None:
            raise ValueError(f"{info.path} is of {info.task or 'an unknown task'}: not known here")
        if info.task == "images" and args.prompt is not None:
            raise ValueError(f"{info.path} takes pictures, and no --prompt")
        whole, said = True, False
        for row in predict(model, info, args):
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
    parser.add_argument("weights", metavar="WEIGHTS", type=as_path)
    parser.add_argument(
        "files", metavar="FILE", type=as_path, nargs="*", help="pictures, folders of them, or texts"
    )
    add_last(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--top", type=positive, default=5, help="how many labels or tokens (5)")
    parser.add_argument(
        "--prompt", action="append", type=in_utf8, help="text, instead of a file of it"
    )
    parser.add_argument("--tokens", type=count, default=100, help="that a GPT adds (100)")
    parser.add_argument(
        "--temperature", type=number(float, 0), default=0.8, help="0 takes the likeliest (0.8)"
    )
    parser.add_argument("--top-k", type=positive, help="draw among the likeliest tokens alone")
    parser.add_argument("--seed", type=count, default=0, help="of what is drawn (0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def _shown(row: Row) -> str:
    """Return a row as text: its name, and below it a table or what was written."""
    if "text" in row:
        return row["text"]
    if "value" in row:
        return f"{one_line(row['name'])}\n  {row['value']:.3f}"
    lines = [row["name"] if "masks" in row else one_line(row["name"])]
    for group in row["masks"] if "masks" in row else [row["labels"]]:
        if "masks" in row:
            lines.append("  [MASK]")
        wide = max(len(each["label"]) for each in group)
        lines += [f"  {each['label']:<{wide}}  {each['probability']:7.2%}" for each in group]
    return "\n".join(lines)


def pictures(paths: Sequence[Path]) -> list[Path]:
    """Return the files that were named, and all pictures in the folders that were."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(f for f in files_below(path) if f.suffix.lower() in PICTURES)
            if not inside:
                raise ValueError(f"{path} holds no picture")
            found += inside
        else:
            found.append(path)
    if not found:
        raise ValueError("no files: give pictures, or folders of them")
    return found


def read_file(path: Path) -> bytes:
    """Return what is in a file.

    Raises:
        ValueError: it cannot be read, or is too large.
    """
    try:
        return files.read_file(path, DATA)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def tokenizer_of(info: Info) -> Tokenizer:
    """Return the tokeniser kept with a model.

    Raises:
        ValueError: there is none, it is not readable, or has more tokens than the model.
    """
    if info.tokenizer is None:
        raise ValueError(f"{info.path} has no tokeniser")
    return kept_tokenizer(info.tokenizer, str(info.path), info.arguments.get("vocab_size", 0))


def texts(args: argparse.Namespace) -> Iterator[tuple[str, str | ValueError]]:
    """Yield the names and texts of prompts and files; an error for one that cannot be read."""
    if not args.files and args.prompt is None:
        raise ValueError("no text: give --prompt or files of text")
    for prompt in args.prompt or ():
        yield printable(prompt), plain(prompt)
    for path in args.files:
        try:
            yield str(path), text_of(read_file(path))
        except UnicodeDecodeError:
            yield str(path), ValueError(f"{path} is no text in UTF-8")
        except ValueError as error:
            yield str(path), error


def _say(message: str) -> None:
    sys.stderr.write(f"{PROGRAM}: {message}\n")


def _say_lost(tokenizer: Tokenizer, name: str, text: str) -> None:
    (size,), (lost,) = tokenizer.lost([(text, tokenizer.encode(text))])
    if lost:
        _say(f"{name}: {lost} of {size} bytes have no token and are lost")


def _labels(logits: Tensor, names: Sequence[str], top: int) -> list[Row]:
    probabilities = logits.float().softmax(0)
    best = probabilities.topk(min(top, len(probabilities)))
    return [
        {"label": names[place] if place < len(names) else str(place), "probability": p}
        for p, place in zip(best.values.tolist(), best.indices.tolist())
    ]


@torch.no_grad()
def _name_pictures(model: nn.Module, info: Info, args: argparse.Namespace) -> Iterator[Row]:
    for path in pictures(args.files):
        try:
            pixels = picture(info, read_file(path), str(path))
        except ValueError as error:
            yield {"error": str(error).removeprefix("--data holds ")}
            continue
        logits = model(pixels[None].to(args.device))[0]
        yield {"name": str(path), "labels": _labels(logits, info.classes, args.top)}


def _each_text(args: argparse.Namespace, predict: Callable[[str, str], Row]) -> Iterator[Row]:
    for name, text in texts(args):
        if isinstance(text, ValueError):
            yield {"error": str(text)}
            continue
        try:
            yield predict(name, text)
        except ValueError as error:
            yield {"error": f"{name}: {error}"}


def _continue(model: nn.Module, info: Info, args: argparse.Namespace) -> Iterator[Row]:
    tokenizer = tokenizer_of(info)

    def predict(name: str, text: str) -> Row:
        given = tokenizer.encode(text) or [tokenizer.end]
        if len(given) > model.sequence_length:
            seen = f"the last {model.sequence_length} of {len(given)} tokens"
            _say(f"{name}: the model sees {seen}")
        _say_lost(tokenizer, name, text)
        drawn = generate(
            model,
            torch.tensor([given], device=args.device),
            args.tokens,
            temperature=args.temperature,
            top_k=args.top_k and min(args.top_k, model.vocab_size),
            generator=torch.Generator(args.device).manual_seed(args.seed),
        )
        written = tokenizer.decode(drawn[0, len(given) :].tolist())
        return {"name": name, "text": legible(text + written)}

    yield from _each_text(args, predict)


@torch.no_grad()
def _fill_in(model: nn.Module, info: Info, args: argparse.Namespace) -> Iterator[Row]:
    tokenizer = tokenizer_of(info)
    mask = tokenizer.specials.get("[MASK]")
    names = [legible(tokenizer.decode([token])) for token in range(tokenizer.vocab_size)]

    def predict(name: str, text: str) -> Row:
        tokens = tokenizer.encode(text)
        _say_lost(tokenizer, name, text)
        places = [place for place, token in enumerate(tokens) if token == mask]
        if not places:
            raise ValueError("there is no [MASK] in it")
        if len(tokens) > model.sequence_length:
            raise ValueError(f"{len(tokens)} tokens, the model takes {model.sequence_length}")
        logits = model(torch.tensor([tokens], device=args.device))[0]
        # What stands for no text is never an answer.
        logits[:, [*tokenizer.specials.values()]] = -torch.inf
        logits = logits[:, : tokenizer.vocab_size]
        filled = [
            logits[place].argmax().item() if token == mask else token
            for place, token in enumerate(tokens)
        ]
        return {
            "name": legible(tokenizer.decode(filled)),
            "masks": [_labels(logits[place], names, args.top) for place in places],
        }

    yield from _each_text(args, predict)


@torch.no_grad()
def _judge(model: nn.Module, info: Info, args: argparse.Namespace) -> Iterator[Row]:
    from train import glue
    from train.glue.rows import encode

    tokenizer = tokenizer_of(info)
    name_of_task = info.settings.get("tasks") or [""]
    task = glue.TASKS.get(name_of_task[0])
    sentences = len(task.columns) if task else 1

    def predict(name: str, text: str) -> Row:
        parts = [part.strip() for part in text.split("|||")]
        if len(parts) != sentences:
            raise ValueError(f"{sentences} sentences, with ||| between, got {len(parts)}")
        (ids,), cut = encode(tokenizer, [[part] for part in parts], model.sequence_length)
        if cut:
            _say(f"{name}: cut to the {model.sequence_length} tokens that the model sees")
        _say_lost(tokenizer, name, text)
        tokens = torch.from_numpy(ids).long()[None].to(args.device)
        logits = model(tokens)[0]
        if task is not None and task.is_regression:
            return {"name": name, "value": logits.item()}
        return {"name": name, "labels": _labels(logits, info.classes, args.top)}

    yield from _each_text(args, predict)


@torch.no_grad()
def _judge_sequences(model: nn.Module, info: Info, args: argparse.Namespace) -> Iterator[Row]:
    from train.data.longrange.tasks import TASKS, batch_of

    task, length = info.settings.get("task"), info.settings.get("length")
    if task not in TASKS:
        raise ValueError(f"{info.path} is of no task of the Long-Range Arena that is known here")
    paths = args.files
    if TASKS[task].pixels is not None:
        if args.prompt is not None:
            raise ValueError(f"{info.path} takes pictures, and no --prompt")
        paths = pictures(paths)
    elif not paths and args.prompt is None:
        raise ValueError("no text: give --prompt or files of text")
    contents = [(printable(text), lambda text=text: text.encode()) for text in args.prompt or ()]
    contents += [(str(path), lambda path=path: read_file(path)) for path in paths]
    for name, content in contents:
        try:
            tokens, lengths, cut = batch_of(task, content(), name, length)
        except ValueError as error:
            yield {"error": str(error)}
            continue
        if cut:
            _say(f"{name}: cut to the {lengths.max().item()} tokens that the model sees")
        logits = model(tokens.to(args.device), lengths.to(args.device))[0]
        yield {"name": name, "labels": _labels(logits, TASKS[task].names, args.top)}


if __name__ == "__main__":
    sys.exit(main())
