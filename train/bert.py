"""Pre-train a BERT with any number of heads in each layer.

torchrun train/bert.py --heads 8 --depth 2
torchrun train/bert.py --data my.txt
python examples/glue.py runs/bert_small-pydoc-1
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

if not __package__:  # as a script: from this checkout, ahead of an editable install of another
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.meta_path.insert(0, PathFinder)
import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from train.config import architecture, flags
from train.loop import engine, parallel
from train.config.architecture import Architecture
from train.checkpoint.run_folder import begun_run
from train.data.masking import IGNORED, Masked
from train.loop import Task
from train.config.flags import flag
from train.config.text import MOST_HELD_OUT, TextSettings, is_own, small_run
from train.data.text import open_text, tokenizers
from train.data.text.stream import NoiseTokens, Windows

PROGRAM = "bert.py"
_SPECIALS = {name: number for number, name in enumerate(tokenizers.BERT)}  # of synthetic text


@dataclasses.dataclass(frozen=True)
class BertSettings(TextSettings):
    """The settings of a run of this script."""

    SAME_AFTER_RESUME: ClassVar[tuple[str, ...]] = (
        *TextSettings.SAME_AFTER_RESUME,
        *("mask_rate", "max_density"),
    )
    recipe: str | None = flag(
        None,
        str,
        "named set of defaults; chosen from the data if omitted: small for files; cramming for hf: "
        "and for the paper's models",
        choices=("pydoc", "small", "cramming", "synthetic"),
    )
    context: int | None = flag(None, flags.number(int, 8), "sequence length in tokens")
    mask_rate: float | None = flag(
        None, flags.number(float, 0.01, 1, open_high=True), "fraction of the tokens to predict"
    )
    max_density: float | None = flag(
        None,
        flags.number(float, 0),
        "skip documents with more tokens per character than this; 0 keeps all",
    )


SMALL = {
    "bert_small": Architecture(
        "bert",
        {"embed_dim": 128, "heads": 8, "depth": 2, "head_dim": 16, "mlp_ratio": 4.0},
        "SmallBERT",
    ),
}

_ADAM = {"betas": (0.9, 0.98), "eps": 1e-12, "weight_decay": 0.01, "clip_grad": 0.5}
# The rate rises from a quarter of its peak until three quarters of the run, then falls to zero.
_TRIANGLE = {
    "schedule": "linear",
    "warmup": 0.75,
    "warmup_lr": lambda settings: settings.lr / 4,
}
_MICRO_BATCH = 128  # largest number of sequences in one pass on one GPU

# A model so small that it learns something on a CPU in a minute or two. It has no dropout: the
# masked tokens differ in every pass, and with a dropout of 0.1 the model predicts only byte
# frequencies after five minutes.
_SMALL: dict[str, Any] = {
    "model": "bert_small",
    "documents": 0,
    "tokenizer": "bytes",
    "context": 32,
    "mask_rate": 0.15,
    "max_density": 0.0,
    "batch_size": 16,
    "lr": 2e-3,
    "workers": 0,
    **_ADAM,
    **_TRIANGLE,
}

RECIPES: dict[str, dict[str, Any]] = {
    "pydoc": _SMALL | {"epochs": 3.0, "eval_every": 1.0},
    # As long as ``small_run`` says.
    "small": _SMALL | {"eval_every": None},
    "synthetic": {
        "model": "crammed_bert",
        "context": 128,
        "mask_rate": 0.25,
        "batch_size": _MICRO_BATCH,
        "steps": 100,
        "lr": 1e-3,
        **_ADAM,
        **_TRIANGLE,
    },
    # Geiping and Goldstein 2023 (arXiv:2212.14034), with two differences. There the learning rate
    # and the batch size follow the clock of one day, so that a smaller model reads more tokens;
    # here they follow the tokens, as many as in the upper limit of 900,000 passes. And bf16
    # replaces fp16 with a scaler.
    "cramming": {
        "model": "crammed_bert",
        "documents": 0,
        "tokenizer": "wordpiece",
        "context": 128,
        "mask_rate": 0.25,
        "max_density": 0.25,
        "batch_size": 8192,
        "tokens": 900_000.0 * _MICRO_BATCH * 128,
        "accum": lambda settings: max(1, settings.batch_size // (_MICRO_BATCH * _ranks())),
        # --steps counts steps of the full batch size.
        "batch_size_warmup": lambda settings: 0.0 if settings.steps is not None else 0.6,
        "lr": 1e-3,
        "eval_every": 0.05,
        "ckpt_every": 1000,
        **_ADAM,
        **_TRIANGLE,
    },
}


def _ranks() -> int:
    return parallel.place_in_launch().size


def make_task(settings: BertSettings) -> tuple[Task, BertSettings]:
    """Return what to train, and the settings with every value filled in.

    Raises:
        ValueError: no such model, data or tokeniser, or sizes that do not fit each other.
    """
    settings = _filled(settings)
    small = settings.recipe == "small"
    model = architecture.find(settings.model, SMALL, ("bert",))
    settings = architecture.sized(settings, model)
    model_vocab = settings.vocab_size or model.sizes.get("vocab_size")
    name = settings.data if settings.data in ("pydoc", "synthetic") else "text"
    name = f"{settings.model}-{name}"
    identity: dict[str, str] = {}
    if settings.data == "synthetic":
        vocab_size = model_vocab or 32_768
        source, about, files = NoiseTokens(vocab_size, settings.context), {}, {}
        items, held_out = _masked(source, settings, vocab_size, _SPECIALS, settings.seed), None
    else:
        text = open_text(
            settings.data,
            settings.tokenizer,
            specials=tokenizers.BERT,
            limit=settings.documents,
            vocab_size=settings.vocab_size,
            max_density=settings.max_density or None,
            column=settings.text_column,
            validation=settings.validation,
            most_held_out=MOST_HELD_OUT if small else None,
            run=begun_run(name, settings),
        )
        vocab_size = text.tokenizer.model_size(model_vocab)
        about = text.facts(without=text.tokenizer.specials.values())
        files, identity = text.tokenizer.files(), text.identity
        size, specials = text.tokenizer.vocab_size, text.tokenizer.specials
        items = Windows(text.train, settings.context, seed=settings.seed)
        items = _masked(items, settings, size, specials, settings.seed)
        # The same tokens are masked whatever the seed, so that runs can be compared.
        held_out = _masked(Windows(text.held_out, settings.context), settings, size, specials, 0)
    if small:
        settings = settings.filled(small_run(len(items) * settings.context))
    build, built, facts = architecture.planned(
        settings,
        model,
        {"vocab_size": vocab_size, "sequence_length": settings.context},
        dropout=settings.dropout,
        most_masked=settings.mask_rate,
    )
    # Only the masked tokens get logits.
    unread = settings.context - round(settings.mask_rate * settings.context)
    logits = 2 * built.embed_dim * vocab_size
    task = Task(
        name=name,
        unit="sequences",
        build=build,
        train=items,
        held_out=held_out,
        loss=_masked_loss,
        weight=lambda batch: (batch[-1] != IGNORED).sum(),
        score=_score_masked,
        derive=_over_masked,
        flops_per_item=built.flops_per_sequence() - unread * logits,
        facts=facts | {"context": settings.context, "vocab_size": vocab_size} | about,
        tokens_per_item=settings.context,
        about={"task": "masked token"},
        files=files,
        identity=identity,
    )
    return task, settings


def _filled(settings: BertSettings) -> BertSettings:
    """Return the settings with the recipe's values where none was given."""
    data = settings.data or "pydoc"
    name = settings.recipe
    if name is None:
        small = is_own(data) and settings.model in (None, *SMALL)
        name = "small" if small else data if data in ("pydoc", "synthetic") else "cramming"
    return flags.apply_recipe(settings, name, {"data": data} | RECIPES[name])


def _masked(
    sequences: Any, settings: BertSettings, vocab_size: int, specials: dict[str, int], seed: int
) -> Masked:
    rate = settings.mask_rate
    return Masked(sequences, vocab_size=vocab_size, specials=specials, rate=rate, seed=seed)


def _masked_loss(model: nn.Module, batch: tuple[Tensor, ...], _seed: int) -> Tensor:
    tokens, targets = batch
    # Nothing is masked if all tokens are special, such as unknown.
    return model(tokens, targets=targets).sum() / (targets != IGNORED).sum().clamp(min=1)


def _score_masked(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return sums over the masked tokens of each sequence: their losses, the hits, and a count."""
    tokens, targets = batch
    masked = targets != IGNORED
    logits, named = model(tokens)[masked].float(), targets[masked]
    each = {
        "loss": F.cross_entropy(logits, named, reduction="none"),
        "accuracy": (logits.argmax(dim=1) == named).float(),
    }
    zero = torch.zeros(targets.shape, device=targets.device)
    sums = {k: zero.masked_scatter(masked, v).sum(dim=1) for k, v in each.items()}
    return sums | {"masked": masked.sum(dim=1)}


def _over_masked(means: dict[str, float]) -> dict[str, float]:
    """Return means over the masked tokens, of which a sequence may have few or none."""
    masked = means.pop("masked")
    return {name: value / masked if masked else math.nan for name, value in means.items()}


@engine.restored()
def main(argv: Sequence[str] | None = None) -> None:
    """Pre-train a BERT; see ``--help``."""
    settings = flags.parse(PROGRAM, __doc__, argv, BertSettings, recipes=RECIPES)
    engine.main(PROGRAM, settings, make_task)


if __name__ == "__main__":
    main()
