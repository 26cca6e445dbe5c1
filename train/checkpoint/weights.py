"""Trained weights and the model that they belong to: a file, a checkpoint or a run folder.

The metadata of a file hold, as text, all that is needed to use it: the model's family and sizes,
the names of its classes, the conversion of pictures to inputs, its tokeniser, its step and its
scores. A file may come from anyone. It consists of tensors and JSON of bounded size, and nothing in
it is executed.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch import distributed as dist

from leaner_kernels.monitor.run_files import new_file, open_own, read_own, read_summary, sync
from models import papers
from train.checkpoint.checkpointer import newest_first, newest_intact, read_train_state
from train.checkpoint.shards import (
    DTYPES,
    cause,
    copy_part,
    in_order,
    load_tensors,
    part_of,
    pieces_of_file,
    saved_tensors,
    whole_of,
)
from train.data.files import open_file
from train.loop import Task

# The file of a run's folder with the weights that scored best on its held-out items.
BEST = "model_best.safetensors"

# Largest header of a file, in bytes: a tokeniser of 250,000 tokens takes 20 MB.
_HEADER = 64 << 20
# Largest value of a model's size, and of the side of a picture.
_SIZE, _SIDE = 1 << 20, 4096
# Longest name of a class, in characters: that of a folder, so that names are never cut.
LONGEST_NAME = 255
# Largest number of elements that a model computes when it is built, such as sinusoids.
_COMPUTED = 1 << 26


@dataclass(frozen=True)
class Info:
    """The model and training of weights.

    Attributes:
        path: path of the file, or of the checkpoint's folder.
        family: key of ``models.papers.MODELS``.
        arguments: arguments of the family's constructor.
        settings: settings of the run, as JSON types.
        task: "images", "next token", "masked token" or "long range".
        classes: names of the classes, in the order of the logits; empty if there are no classes.
        image_size: pixels a side; None of a model of text.
        channels: number of channels of a picture.
        mean, std: normalisation of each channel, for pixels in [0, 1].
        pixels: how a picture becomes pixels: "photograph" (resized, then its centre) or "digit".
        tokenizer: JSON of the library ``tokenizers``, bytes included; None without text.
        step: step of their newest row in ``metrics.jsonl``, as on the page of the run. This is one
            less than the number of steps done, by which a checkpoint is named.
        scores: their scores, such as held_out_accuracy; empty if unknown.
    """

    path: Path
    family: str
    arguments: dict[str, Any]
    settings: dict[str, Any]
    task: str
    step: int
    classes: tuple[str, ...] = ()
    image_size: int | None = None
    channels: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    pixels: str | None = None
    tokenizer: str | None = field(default=None, repr=False)
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the test items, or else on the held-out ones."""
        return self._reached("accuracy")

    @property
    def loss(self) -> float | None:
        """Mean loss of the test items, or else of the held-out ones."""
        return self._reached("loss")

    def _reached(self, name: str) -> float | None:
        return self.scores.get(f"test_{name}", self.scores.get(f"held_out_{name}"))


def about(task: Task) -> dict[str, Any]:
    """Return the description of a task to store with its weights, without its tokeniser."""
    build = getattr(task.build, "func", None)
    modules = {kind.__module__ for kind in getattr(build, "__mro__", ())}
    family = next((name for name in papers.MODELS if f"models.{name}" in modules), None)
    if family is None:
        return dict(task.about)
    return {"family": family, "arguments": task.build.keywords, **task.about}


def metadata(
    settings: Mapping[str, Any],
    step: int,
    about: Mapping[str, Any],
    tokenizer: str | None,
    scores: Mapping[str, float],
) -> dict[str, str]:
    """Return the metadata of a file of weights, which is text by name."""
    finite = {k: v for k, v in scores.items() if isinstance(v, int | float) and math.isfinite(v)}
    found = {
        "format": "pt",
        "model": str(settings.get("model", "unknown")),
        "step": str(step),
        "settings": json.dumps(settings),
        "about": json.dumps(about),
        "scores": json.dumps(finite),
    }
    return found if tokenizer is None else found | {"tokenizer": tokenizer}


@dataclass(frozen=True)
class Weights:
    """Weights on disk.

    Attributes:
        path: path of the file, or of the checkpoint ``RUN/checkpoints/step-00000100``.
        flag: that named it, for messages.
        settings: settings of the run, as JSON types.
        step: as in ``Info``.
        about: description of their model, as ``about`` returns it.
        tokenizer: as in ``Info``.
        scores: likewise.
        shapes: shapes of every tensor by its name in the model.
        dtypes: likewise.
    """

    path: Path
    flag: str
    settings: dict[str, Any]
    step: int
    about: dict[str, Any]
    tokenizer: str | None
    scores: dict[str, float]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Return tensors by name, whole, on the host.

        Raises:
            ValueError: they cannot be read.
        """
        if self.path.is_dir():
            tensors = {n: torch.empty(self.shapes[n], dtype=self.dtypes[n]) for n in names}
            load_tensors(self.path, {f"model.{n}": part_of(t) for n, t in tensors.items()})
            return tensors
        try:
            with safe_open(self.path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot load {self.path}: {_line(error)}") from None

    def info(self) -> Info:
        """Return the ``Info`` of the weights.

        Raises:
            ValueError: if it is missing, or was not written by a run.
        """
        if "family" not in self.about:
            raise ValueError(
                f"{self.path} does not name its model, because an older version wrote it: load it "
                "with that version"
            )
        try:
            images = self.about["images"] if self.about.get("task") == "images" else {}
            classes = self.about.get("classes") or ()
            info = Info(
                path=self.path,
                family=self.about["family"],
                arguments=dict(self.about["arguments"]),
                settings=self.settings,
                task=str(self.about.get("task", "")),
                step=self.step,
                classes=tuple(printable(name, LONGEST_NAME) for name in classes),
                image_size=images.get("size"),
                channels=images.get("channels"),
                mean=tuple(map(float, images["mean"])) if "mean" in images else None,
                std=tuple(map(float, images["std"])) if "std" in images else None,
                pixels=images.get("pixels"),
                tokenizer=self.tokenizer,
                scores={printable(k): float(v) for k, v in self.scores.items()},
            )
            if info.task == "images":
                _check_images(info)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{self.path} has an invalid description of its model: {_line(error)}"
            ) from None
        return info

    def check(self, own: Mapping[str, Tensor]) -> None:
        """Check that the tensors are those of a model, whose state is ``own``.

        Raises:
            ValueError: one has another shape or dtype, is missing or is unknown.
        """
        for name in sorted(own.keys() | self.shapes.keys()):
            theirs = self.dtypes.get(name), self.shapes.get(name)
            ours = (own[name].dtype, tuple(own[name].shape)) if name in own else (None, None)
            if theirs != ours:
                raise ValueError(
                    f"{self.path}: {printable(name)} is {_of(*theirs)}, in its model {_of(*ours)}"
                )

    def load(self, model: nn.Module) -> None:
        """Put the weights of a file into a model of their architecture, sharded or not.

        Every rank calls it.

        Raises:
            ValueError: they are not those of the model, by name, shape and dtype.
        """
        own = model.state_dict()
        self.check(own)
        with torch.no_grad():
            for name, weight in own.items():
                copy_part(part_of(weight), self.read([name])[name])


def open_weights(path: str | Path, flag: str, *, last: bool = False) -> Weights:
    """Find weights and read their description; verify every byte of a checkpoint.

    Args:
        path: path of a safetensors file, of a checkpoint, or of a run, whose best weights on the
            held-out items are taken.
        flag: flag that gave the path, for messages.
        last: of a run take the newest weights instead, as where it has no best ones: its
            ``model.safetensors`` if it is finished, else its newest intact checkpoint.

    Raises:
        ValueError: there are none, or they are damaged.
    """
    path = Path(path)
    if not last and (path / BEST).is_file():
        return _of_file(path / BEST, flag, open_own)
    exported = path / "model.safetensors"
    if exported.is_file() and ((path / "summary.json").exists() or not _has_checkpoints(path)):
        return _of_file(exported, flag, open_own)
    if path.is_file():
        return _of_file(path, flag)
    return _of_checkpoint(newest_intact(path, flag), flag)


def _has_checkpoints(run: Path) -> bool:
    return bool(newest_first(run / "checkpoints"))


def _of_checkpoint(path: Path, flag: str) -> Weights:
    train_state = read_train_state(path)
    run = path.parent.parent
    saved = saved_tensors(path)
    own = {k.removeprefix("model."): v for k, v in saved.items() if k.startswith("model.")}
    tokenizer = run / "tokenizer.json"
    kept = tokenizer.is_file()
    about = train_state.get("about")
    return Weights(
        path=path,
        flag=flag,
        settings=train_state["settings"],
        step=train_state["step"] - 1,
        about=about if isinstance(about, dict) else {},
        tokenizer=_text(tokenizer) if kept else None,
        scores=_scores(run / "summary.json", train_state["step"]),
        shapes={name: tensor.size for name, tensor in own.items()},
        dtypes={name: tensor.dtype for name, tensor in own.items()},
    )


def _text(path: Path) -> str:
    try:
        return read_own(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text in UTF-8: {error}") from None


def _scores(summary: Path, step: int) -> dict[str, float]:
    """Return the scores of a run, if it ended with these weights."""
    try:
        found = read_summary(summary)
        if found["steps"] != step:
            return {}
        return {
            name: value
            for name, value in found.items()
            if name.startswith(("held_out_", "test_")) and isinstance(value, float)
        }
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _of_file(path: Path, flag: str, open_it: Callable[[Path], IO[bytes]] = open_file) -> Weights:
    try:
        with open_it(path) as file:
            size = int.from_bytes(file.read(8), "little")
        if size > _HEADER:
            raise ValueError(f"its header must have at most {_HEADER:,} bytes, got {size:,}")
        with safe_open(path, framework="pt") as file:
            entries = file.metadata() or {}
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in parts.items()}
            dtypes = {name: _dtype(part.get_dtype()) for name, part in parts.items()}
        if not entries.keys() >= {"settings", "step"}:
            raise ValueError("its metadata must have settings and step, as a run writes them")
        settings, about, scores = (
            _json(entries.get(name, "{}"), name) for name in ("settings", "about", "scores")
        )
        step = int(entries["step"][:20])
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{flag} {path} is not a weights file of a run: {_line(error)}") from None
    tokenizer = entries.get("tokenizer")
    return Weights(path, flag, settings, step, about, tokenizer, scores, shapes, dtypes)


def _dtype(code: str) -> torch.dtype:
    if code not in DTYPES:
        raise ValueError(f"its tensors have an unsupported dtype, got {printable(code)}")
    return DTYPES[code]


def _json(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} in its metadata is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} in its metadata is not a JSON object")
    return value


def export_weights(model: nn.Module, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the whole weights of a sharded model: float32, under the names of its parameters.

    Every rank calls it. One tensor at a time is gathered, and rank 0 writes it. Statistics of batch
    norms are among them, and tied weights are there under each name.

    Args:
        model: sharded by FSDP2, or not.
        path: path of the file; one that is there stays until the new one is whole.
        metadata: text by name, as ``metadata`` returns it.

    Raises:
        OSError: on rank 0, the file cannot be written.
    """
    weights = model.state_dict()
    dtypes = {n: torch.float32 if w.is_floating_point() else w.dtype for n, w in weights.items()}
    layout = {name: (dtypes[name], weights[name].shape) for name in in_order(dtypes)}
    gathered = ((dtypes[name], whole_of(weights[name])) for name in layout)
    try:
        if dist.get_rank() == 0:
            on_host = (w.detach().to("cpu", dtype).contiguous() for dtype, w in gathered)
            with new_file(path) as file:
                file.writelines(pieces_of_file(layout, on_host, metadata))
                file.flush()
                sync(file.fileno())
    except OSError as error:
        raise OSError(f"{path} not written: {cause(error)}") from None
    finally:
        # Every rank gathers all tensors, whether or not rank 0 can write.
        for _ in gathered:
            pass


def build_model(weights: Weights, info: Info) -> nn.Module:
    """Return the model with its weights loaded, in eval mode on the CPU.

    Raises:
        ValueError: no such model, or a tensor has another shape or dtype, is missing or is unknown.
    """
    where = f"{weights.path} has an invalid description of its model"
    _check_arguments(info, len(weights.shapes), where)
    kind = papers.constructor(info.family)
    try:
        with torch.device("meta"):
            built = kind(**info.arguments)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
        raise ValueError(f"{where}: {_line(error)}") from None
    own = built.state_dict()
    weights.check(own)
    computed = sum(b.numel() for name, b in built.named_buffers() if name not in own)
    if computed > _COMPUTED:
        raise ValueError(
            f"{where}: its buffers must have at most {_COMPUTED:,} elements, got {computed:,}"
        )
    model = kind(**info.arguments)
    model.load_state_dict(weights.read(list(weights.shapes)))
    return model.eval()


def _of(dtype: torch.dtype | None, shape: tuple[int, ...] | None) -> str:
    return "absent" if dtype is None else f"{str(dtype).removeprefix('torch.')} {shape}"


def _check_arguments(info: Info, tensors: int, where: str) -> None:
    """Check sizes, so that a number in a file cannot exhaust memory or time."""
    if not isinstance(info.family, str) or info.family not in papers.MODELS:
        raise ValueError(f"{where}: unknown family {printable(info.family)}")
    for name, value in info.arguments.items():
        values = value if isinstance(value, list) else [value]
        # Every layer has tensors of its own.
        most = tensors if "depth" in name else _SIDE if name == "image_size" else _SIZE
        fits = name not in ("device", "dtype") and len(values) <= max(tensors, 4)
        fits = fits and all(_plain(single, most) for single in values)
        whole = [single for single in values if isinstance(single, int)]
        if not fits or ("depth" in name and sum(whole) > tensors):
            raise ValueError(f"{where}: unsupported value of {name}, got {printable(value)}")


def _plain(value: Any, most: int) -> bool:
    if isinstance(value, str):
        return len(value) <= 32
    if isinstance(value, bool) or value is None:
        return True
    return isinstance(value, int | float) and 0 <= value <= most


def _check_images(info: Info) -> None:
    own = info.image_size, info.channels, len(info.mean), len(info.std)
    arguments = info.arguments
    channels = arguments.get("in_chans", 3)
    if own != (arguments.get("image_size", 224), channels, channels, channels):
        raise ValueError(f"its images have size, channels, means and stds {own}, unlike its model")
    if len(info.classes) not in (0, arguments.get("num_classes", len(info.classes))):
        raise ValueError(
            f"its classes must be {arguments['num_classes']} as in its model, got "
            f"{len(info.classes)}"
        )
    if not all(map(math.isfinite, info.mean)) or not all(0 < s < math.inf for s in info.std):
        raise ValueError("its mean must be finite and its std positive and finite")
    if info.pixels not in ("photograph", "digit"):
        raise ValueError(f"its pixels must be photograph or digit, got {printable(info.pixels)}")


def printable(value: Any, most: int = 80) -> str:
    """Return a value as one line of bounded length, without characters that control a terminal."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in str(value)[: most + 1])
    return text if len(text) <= most else text[: most - 3] + "..."


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
