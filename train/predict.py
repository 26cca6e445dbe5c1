"""Use a trained model: classify pictures and sequences, continue, fill in or score text.

python train/predict.py runs/vit_digits-digits-1 cat.jpg photographs/
python train/predict.py runs/xcit_tiny_lean-images-1 data/val
python train/predict.py runs/gpt_small-pydoc-1 "The module " --tokens 100 --temperature 0.8
python train/predict.py runs/gpt_small-pydoc-1 book.txt --score
python train/predict.py runs/bert_small-pydoc-1 "The [MASK]odule is used."
python train/predict.py runs/nystromformer_small-1 "[MAX 2 9 [MIN 4 7 ] ]"
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

if not __package__:  # as a script: from this checkout, ahead of an editable install of another
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.meta_path.insert(0, PathFinder)
import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import argparse
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers as library
import torch
from torch import Tensor, nn

from leaner_kernels.monitor.command_line import one_line, take_every_character
from train.data.files import files_below, plain, read_file
from train.data.pictures import PICTURES
from models.gpt import generate
from train.checkpoint.weights import LONGEST_NAME, Info, printable
from train.config.flags import Parser, count, number, one_line_errors, positive
from train.data.classes import composed
from train.data.images.saved import model_input
from train.data.longrange import TASKS, encode, grey_pixels, pad, padded
from train.data.text.tokenizers import Tokenizer
from train.export import load
from train.gpt import legible
from train.loop import engine

PROGRAM = "predict.py"
TOP = 5  # classes that are printed
BATCH = 64  # pictures that are classified together


@engine.restored()
def main(argv: Sequence[str] | None = None) -> None:
    """Predict; see ``--help``."""
    take_every_character(PROGRAM)
    args = _parser().parse_args(argv)
    with one_line_errors(PROGRAM), torch.inference_mode():
        model, info = load(args.run, last=args.last)
        if args.score and info.task != "next token":
            raise ValueError(f"--score is for runs of train/gpt.py, got {args.run}")
        if info.task == "images":
            predict = _classify_pictures
        elif info.task == "long range":
            pictures = TASKS[_long_range(info)[0]].text_columns is None
            predict = _classify_pictures if pictures else _classify_sequences
        elif info.task == "masked token":
            predict = _fill_in
        elif info.task == "next token":
            predict = _score if args.score else _continue
        else:
            raise ValueError(f"{info.path} was trained on an unknown task, {info.task!r:.40}")
        sys.stderr.write(f"weights: {one_line(info.path)}, step {info.step}\n")
        for line in predict(model.to(args.device), info, args):
            sys.stdout.write(f"{line}\n")


def _parser() -> argparse.ArgumentParser:
    first, _, commands = (__doc__ or "").partition("\n")
    examples = f"examples:\n{commands.strip()}"
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(PROGRAM, description=first, epilog=examples, formatter_class=raw)
    flag = parser.add_argument
    flag("run", help="run folder, checkpoint or safetensors file of a run")
    text = "a picture, a folder of pictures, a text, or a text file; for a folder with a subfolder "
    text += "for each class, the accuracy and the confusion matrix are printed too"
    flag("inputs", nargs="+", metavar="input", help=text)
    flag("--last", action="store_true", help="use the newest weights of a run, not the best")
    flag("--score", action="store_true", help="print the loss of text instead of continuing it")
    flag("--tokens", type=count, default=200, help="number of tokens to generate (200)")
    text = "divisor of the logits before sampling; 0 takes the likeliest token (0.8)"
    flag("--temperature", type=number(float, 0), default=0.8, help=text)
    flag("--top-k", type=positive, help="sample among this many likeliest tokens; all if omitted")
    flag("--seed", type=count, default=0, help="seed of the sampling (0)")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    flag("--device", type=_device, default=default, help=f"cuda, cuda:N or cpu ({default})")
    return parser


def _device(text: str) -> str:
    gpus = torch.cuda.device_count()
    devices = ["cpu", *(f"cuda:{place}" for place in range(gpus)), *["cuda"][:gpus]]
    if text not in devices:
        raise argparse.ArgumentTypeError(f"must be cpu or one of the {gpus} GPUs, got {text!r}")
    return text


def _long_range(info: Info) -> tuple[str, int]:
    """Return the task of the Long-Range Arena, and the number of tokens read of an item.

    Runs from before these were settings used lists.
    """
    task = info.settings.get("task") or "listops"
    length = info.settings.get("length") or info.arguments.get("sequence_length")
    if task not in TASKS or type(length) is not int or not 1 <= length <= 1 << 20:
        raise ValueError(f"{info.path} does not name its task and length of the Long-Range Arena")
    return task, length


def _best(logits: Tensor, names: Sequence[str]) -> str:
    """Return the likeliest names and their probabilities, given logits (names,)."""
    best = logits.float().softmax(0).topk(min(TOP, len(names)))
    pairs = zip(best.indices.tolist(), best.values.tolist())
    return ", ".join(f"{names[place]} {share:.1%}" for place, share in pairs)


def _classify_pictures(model: nn.Module, info: Info, args: argparse.Namespace) -> Iterator[str]:
    """Yield the likeliest classes of each picture, then the accuracy on labelled pictures."""
    predicted: dict[str, Counter[str]] = {}
    pictures, unread = [*_pictures(args.inputs, info.classes)], 0
    for start in range(0, len(pictures), BATCH):
        inputs, read = [], []
        for path, label in pictures[start : start + BATCH]:
            try:
                inputs.append(_input_of(info, path))
                read.append((path, label))
            except (ValueError, OSError) as error:
                unread += 1
                sys.stderr.write(f"{PROGRAM}: {one_line(error)}\n")
        if not read:
            continue
        batch = (torch.cat(tensors).to(args.device) for tensors in zip(*inputs))
        for (path, label), logits in zip(read, model(*batch)):
            if label is not None:
                predicted.setdefault(label, Counter())[info.classes[int(logits.argmax())]] += 1
            yield f"{one_line(path)}: {_best(logits, info.classes)}"
    if predicted:
        right = sum(counts[name] for name, counts in predicted.items())
        total = sum(counts.total() for counts in predicted.values())
        yield f"accuracy {right / total:.2%} of {total} pictures"
    for name, counts in sorted(predicted.items()):
        others = ", ".join(f"{other} {number}" for other, number in counts.most_common())
        yield f"  {name}: accuracy {counts[name] / counts.total():.1%}; predicted {others}"
    if unread:
        raise ValueError(f"{unread} pictures cannot be read; they are named above")


def _input_of(info: Info, path: Path) -> tuple[Tensor, ...]:
    """Return one picture as a batch for its model."""
    content = read_file(path)
    if info.task == "images":
        return (model_input(info, content, lambda: str(path))[None],)
    return pad([[grey_pixels(content, lambda: str(path))]], padded(_long_range(info)[1]))


def _pictures(inputs: Sequence[str], classes: Sequence[str]) -> Iterator[tuple[Path, str | None]]:
    """Yield the pictures of files and folders, each with the class that its folder names."""
    for path in map(Path, inputs):
        if not path.is_dir():
            yield path, None
            continue
        pictures = sorted(file for file in files_below(path) if file.suffix.lower() in PICTURES)
        if not pictures:
            raise ValueError(f"{path} contains no pictures")
        folders = [file.relative_to(path).parts[0] for file in pictures if file.parent != path]
        labels = {name: printable(composed(name), LONGEST_NAME) for name in folders}
        unknown = sorted(name for name, label in labels.items() if label not in classes)
        if unknown:
            message = f"{path} has the folder {unknown[0]}, which is not a class of the model"
            if len(unknown) < len(labels):
                raise ValueError(message)
            sys.stderr.write(f"{PROGRAM}: {one_line(message)}: no accuracy\n")
        for file in pictures:
            yield file, None if unknown else labels.get(file.relative_to(path).parts[0])


def _texts(inputs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each input, which is a file or the text itself."""
    for text in inputs:
        path = Path(text)
        if os.path.exists(text):
            try:
                yield text, plain(read_file(path).decode("utf-8-sig"))
            except UnicodeDecodeError:
                raise ValueError(f"{path} is not text in UTF-8") from None
        elif re.fullmatch(r"\S+\.\w{1,5}", text) or (os.sep in text and not re.search(r"\s", text)):
            raise ValueError(f"{text}: no such file; to pass it as text, add a space")
        else:
            yield printable(text), plain(text)


def _classify_sequences(model: nn.Module, info: Info, args: argparse.Namespace) -> Iterator[str]:
    """Yield the likeliest classes of each text, or of each pair if the task has pairs."""
    task, length = _long_range(info)
    several, texts = len(TASKS[task].text_columns), [*_texts(args.inputs)]
    if len(texts) % several:
        raise ValueError(f"task {task} reads pairs of texts, got {len(texts)}")
    for start in range(0, len(texts), several):
        own = texts[start : start + several]
        batch = pad([[encode(text, task, length) for _, text in own]], padded(length))
        logits = model(*(tensor.to(args.device) for tensor in batch))[0]
        yield f"{' | '.join(name for name, _ in own)}: {_best(logits, info.classes)}"


def _tokenizer(info: Info) -> Tokenizer:
    if info.tokenizer is None:
        raise ValueError(f"{info.path} has no tokenizer")
    return Tokenizer(library.Tokenizer.from_str(info.tokenizer), str(info.path))


def _continue(model: nn.Module, info: Info, args: argparse.Namespace) -> Iterator[str]:
    """Yield each text with the model's continuation."""
    tokenizer = _tokenizer(info)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    drawing = {"temperature": args.temperature, "top_k": args.top_k, "generator": generator}
    for _, text in _texts(args.inputs):
        prompt = tokenizer.encode(text) or [tokenizer.end]
        tokens = torch.tensor([prompt], device=args.device)
        drawn = generate(model, tokens, args.tokens, **drawing)[0, len(prompt) :]
        yield legible(text + tokenizer.decode(drawn.tolist()))


def _score(model: nn.Module, info: Info, args: argparse.Namespace) -> Iterator[str]:
    """Yield the loss of each text, in sequences as long as the model's, one after another."""
    tokenizer, length = _tokenizer(info), model.sequence_length
    for name, text in _texts(args.inputs):
        tokens = torch.tensor([[tokenizer.end, *tokenizer.encode(text)]], device=args.device)
        if tokens.shape[1] == 1:
            raise ValueError(f"{name} must have at least one token, got none")
        total = 0.0
        for start in range(0, tokens.shape[1] - 1, length):
            part = tokens[:, start : start + length + 1]
            total += model(part[:, :-1], part[:, 1:]).double().sum().item()
        loss = total / (tokens.shape[1] - 1)
        line = f"{name}: {tokens.shape[1] - 1} tokens, loss {loss:.4f} nats a token"
        if tokenizer.decode(tokens[0, 1:].tolist()) == text:  # otherwise some bytes have no token
            line += f", {total / math.log(2) / len(text.encode()):.4f} bits per byte"
        yield f"{line}, perplexity {math.exp(min(loss, 700)):.5g}"


def _fill_in(model: nn.Module, info: Info, args: argparse.Namespace) -> Iterator[str]:
    """Yield the likeliest tokens of each [MASK] of each text."""
    tokenizer = _tokenizer(info)
    names = [legible(tokenizer.decode([token])) for token in range(tokenizer.vocab_size)]
    for name, text in _texts(args.inputs):
        tokens = tokenizer.encode(text)
        masked = [p for p, token in enumerate(tokens) if token == tokenizer.specials.get("[MASK]")]
        if not masked or len(tokens) > model.sequence_length:
            raise ValueError(
                f"{name} must have a [MASK] and at most {model.sequence_length} tokens, got "
                f"{len(masked)} and {len(tokens)}"
            )
        logits = model(torch.tensor([tokens], device=args.device))[0, :, : len(names)]
        logits[:, [*tokenizer.specials.values()]] = -torch.inf  # they do not represent text
        for place in masked:
            yield f"{name}: {_best(logits[place], names)}"


if __name__ == "__main__":
    main()
