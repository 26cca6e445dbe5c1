"""Kappa of a saved model: ``python -m leaner_kernels.monitor NAME_OR_FOLDER --data FILES``."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import KappaMonitor, plot
from .command_line import as_path, command, first_line, one_line
from .files import DATA, SETTINGS, check_below, files_below, parse_json, read_file, text_of
from .pictures import PICTURES, decode
from .table import table

# Inputs of models of transformers, of which one may need several.
_INPUTS = (
    *("input_ids", "pixel_values", "input_features", "input_values", "bbox"),
    "decoder_input_ids",
)
EXAMPLES = """examples:
  python -m leaner_kernels.monitor vit_base_patch16_224 --data photographs/
  python -m leaner_kernels.monitor ~/models/my-bert --data *.txt --head-report --plot kappa.png
  python -m leaner_kernels.monitor vit_tiny_patch16_224 --random-weights --data cat.jpg

NAME is one of timm's or of the Hub's, whose weights are downloaded unless they are in the cache;
FOLDER holds a config.json and weights, as save_pretrained of transformers or timm's
save_for_hf writes them. Nothing is downloaded for a folder."""


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, and write what was asked for. Returns the exit status."""
    parser = command(
        "python -m leaner_kernels.monitor",
        "κ of every attention layer of a saved model, in eval mode, in float32.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="NAME_OR_FOLDER")
    parser.add_argument(
        "--data", nargs="+", type=as_path, required=True, help="images or text files, or folders"
    )
    parser.add_argument("--samples", type=int, default=8, help="images or pieces of text (8)")
    parser.add_argument("--tokens", type=int, default=512, help="of a piece of text, at most (512)")
    parser.add_argument(
        "--random-weights", action="store_true", help="of a NAME of timm: load none"
    )
    parser.add_argument(
        "--head-report",
        action="store_true",
        help="also how correlated and isotropic the heads are, which explains a high κ",
    )
    to_file: Any = {"type": as_path, "metavar": "FILE"}
    parser.add_argument("--json", **to_file, help="write the rows, as JSON lines")
    parser.add_argument("--plot", **to_file, help="draw κ over layers: png, svg, pdf")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    # A host that cannot be reached is one line in the end, not one for each retry.
    logging.disable(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        rows = measured(args)
        sys.stdout.write(table(rows) + "\n")
        if args.json is not None:
            args.json.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        if args.plot is not None:
            plot(rows, args.plot, over="layers")
        sys.stdout.flush()
    except (OSError, ValueError, RuntimeError, ImportError, MemoryError) as error:
        sys.stderr.write(f"error: {one_line(first_line(error))}\n")
        return 1
    finally:
        logging.disable(logging.NOTSET)
    return 0


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of the model and data that the arguments name."""
    if args.samples < 1 or args.tokens < 2:
        raise ValueError("--samples must be at least 1 and --tokens at least 2")
    paths = list(_files(args.data))
    if not paths:
        raise ValueError(f"no files in {', '.join(map(str, args.data))}")
    with _loading(args.model):
        model, batch = _model_and_batch(args, paths)
    device = torch.device(args.device)
    model = model.float().to(device)
    batch = {name: value.to(device) for name, value in batch.items()}
    monitor = KappaMonitor(model, samples=args.samples, head_report=args.head_report)
    return monitor.measure(batch, forward=_forward)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turn what a library raises of a configuration into a ``ValueError``: that may be anything."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, MemoryError):
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{name} cannot be loaded: {cause}") from error


def _forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Run a model, which may need more than pictures or text; ValueError if it fails."""
    try:
        model(**batch)
    except Exception as error:
        first = first_line(error)
        others = [name for name in _INPUTS if name in signature(model.forward).parameters]
        needs = " and ".join(name for name in others if name not in batch)
        raise ValueError(
            f"{type(model).__name__} cannot be run with {' and '.join(batch)} alone"
            f"{f', it also takes {needs}' if needs else ''}: call leaner_kernels.measure(model, "
            f"inputs) with all inputs, or save the part to be measured as a model "
            f"({type(error).__name__}: {first})"
        ) from error


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(files_below(path))
        elif path.is_file():
            yield path
        else:
            raise ValueError(f"{path} is no file and no folder")


def _model_and_batch(
    args: argparse.Namespace, paths: list[Path]
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    folder = Path(args.model).expanduser()
    config: dict[str, Any] = {}
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise ValueError(f"{folder} has no config.json: it is no saved model")
        check_below(folder)
        config = parse_json(read_file(file, SETTINGS))
        if not isinstance(config, dict):
            raise ValueError(f"{file} is no JSON object")
        if args.random_weights:
            raise ValueError("--random-weights is for a NAME of timm")
        if "architecture" in config:
            return _of_timm(f"local-dir:{folder}", True, args, paths)
        if "model_type" not in config:
            raise ValueError(
                f"{file} is neither of transformers (model_type) nor timm (architecture)"
            )
        # Whatever the configuration names, nothing is to be fetched for a folder.
        os.environ["HF_HUB_OFFLINE"] = "1"
        return _of_transformers(str(folder), args, paths)
    if folder.exists():
        raise ValueError(f"{folder} is a file: give the folder with its config.json")
    if _is_of_timm(args.model):
        return _of_timm(args.model, not args.random_weights, args, paths)
    if args.random_weights:
        raise ValueError(f"timm has no model {args.model!r}")
    return _of_transformers(args.model, args, paths)


def _is_of_timm(name: str) -> bool:
    try:
        import timm
    except ImportError:
        return False
    return timm.is_model(name)


def _of_timm(
    name: str, pretrained: bool, args: argparse.Namespace, paths: list[Path]
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import timm
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    images = _pictures(name, paths, args.samples)
    try:
        model = timm.create_model(name, pretrained=pretrained)
    except (OSError, RuntimeError, ValueError) as error:
        if name.startswith("local-dir:") or not pretrained:
            raise
        raise ValueError(
            f"the weights of {name} cannot be had ({type(error).__name__}): give a folder, or "
            "--random-weights"
        ) from error
    config = resolve_model_data_config(model)
    # Of a model made for other pictures than its pretrained configuration names.
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is not None:
        config["input_size"] = (config["input_size"][0], *size)
    transform: Any = create_transform(**config, is_training=False)
    mode = "L" if config["input_size"][0] == 1 else "RGB"
    return model, {"x": torch.stack([transform(image.convert(mode)) for image in images])}


def _pictures(name: str, paths: list[Path], samples: int) -> list[Any]:
    """Return the first pictures of the files, in RGB."""
    chosen = [path for path in paths if path.suffix.lower() in PICTURES][:samples]
    if not chosen:
        raise ValueError(f"{name} takes images, and there are none among {len(paths)} files")
    return [decode(read_file(path, DATA), lambda path=path: str(path)) for path in chosen]


def _of_transformers(
    name: str, args: argparse.Namespace, paths: list[Path]
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    model = AutoModel.from_pretrained(name, trust_remote_code=False)
    if model.main_input_name == "pixel_values":
        images = _pictures(name, paths, args.samples)
        processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        return model, dict(processor(images, return_tensors="pt"))
    if model.main_input_name != "input_ids":
        raise ValueError(f"{name} takes {model.main_input_name}, which is neither images nor text")
    texts = [path for path in paths if path.suffix.lower() not in PICTURES]
    if not texts:
        raise ValueError(f"{name} takes text, and there is none among {len(paths)} files")
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    ids = _token_ids(tokenizer, texts, model.config, args)
    batch = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
    return model, batch


def _token_ids(
    tokenizer: Any, texts: list[Path], config: Any, args: argparse.Namespace
) -> torch.Tensor:
    """Return whole pieces of the texts, (S, N), one after another; without padding."""
    limits = (tokenizer.model_max_length, getattr(config, "max_position_embeddings", None))
    length = min(args.tokens, *(limit for limit in limits if limit))
    ids: list[int] = []
    for path in texts:
        try:
            ids += tokenizer(text_of(read_file(path, DATA)), truncation=False, verbose=False)[
                "input_ids"
            ]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8") from error
        if len(ids) >= length * args.samples:
            break
    length = min(length, len(ids))
    if length < 2:
        raise ValueError("the text has fewer than two tokens")
    count = min(args.samples, len(ids) // length)
    return torch.tensor(ids[: count * length]).view(count, length)


if __name__ == "__main__":
    sys.exit(main())
