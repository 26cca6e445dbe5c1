"""Pre-train a BERT with any number of heads in each layer, and fine-tune it on GLUE.

torchrun train/bert.py --heads 8 --depth 2
torchrun train/bert.py --data my.txt
torchrun train/bert.py --finetune glue --glue DIR --checkpoint runs/bert_small-pydoc-1
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

if not __package__:  # as a script: from this checkout, ahead of an editable install of another
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.meta_path.insert(0, PathFinder)
import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from leaner_kernels.monitor.files import write_file
from train.config import architecture, flags, own_text
from train.loop import engine
from train import glue
from train.config.architecture import Architecture
from train.glue import metrics, table
from train.checkpoint.run_folder import begun_run
from train.checkpoint.weights import Weights, open_weights
from train.data.masking import IGNORED, Masked
from train.loop import Task
from train.config.flags import flag
from train.data.text import NoiseTokens, Windows, open_text, tokenizers
from train.data.text.cache import build_once
from train.data.text.sources import find_source, size_of

PROGRAM = "bert.py"
_SPECIALS = {name: number for number, name in enumerate(tokenizers.BERT)}  # of synthetic text


@dataclasses.dataclass(frozen=True)
class BertSettings(own_text.TextSettings):
    """What one run of this script does."""

    SAME_AFTER_RESUME: ClassVar[tuple[str, ...]] = (
        *own_text.TextSettings.SAME_AFTER_RESUME,
        *("mask_rate", "max_density"),
        *("finetune", "glue", "checkpoint", "tasks"),
    )
    OWN_GROUP: ClassVar[str] = "text and GLUE"

    recipe: str | None = flag(
        None,
        str,
        "named set of defaults; chosen from the data if omitted: small, which adapts to the amount "
        "of text, for files; cramming for hf: and for the paper's models",
        choices=("pydoc", "small", "cramming", "synthetic"),
    )
    model: str | None = flag(
        None,
        str,
        "bert_small, crammed_bert or crammed_bert_lean; chosen by the recipe if omitted",
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
    finetune: str | None = flag(
        None, str, "fine-tune a pre-trained model instead of pre-training", choices=("glue",)
    )
    glue: str | None = flag(
        None,
        str,
        "data for --finetune: hf:nyu-mll/glue, or a folder with TASK/*.parquet",
    )
    checkpoint: str | None = flag(
        None,
        str,
        "pre-trained model for --finetune: a run of this script, one of its checkpoints, or its "
        "weights",
    )
    tasks: tuple[str, ...] | None = flag(
        None,
        lambda text: tuple(text.split(",")),
        "GLUE tasks for --finetune, separated by commas: cola,rte; all if omitted",
    )


SMALL = {
    "bert_small": Architecture(
        "bert",
        {"embed_dim": 128, "heads": 8, "depth": 2, "head_dim": 16, "mlp_ratio": 4.0},
        "SmallBERT",
    ),
}

_ADAM = {"betas": (0.9, 0.98), "eps": 1e-12, "weight_decay": 0.01, "clip_grad": 0.5}
# From a quarter of the rate up to all of it at three quarters of the run, then down to nothing.
_TRIANGLE = {
    "schedule": "linear",
    "warmup": 0.75,
    "warmup_lr": lambda settings: settings.lr / 4,
}
_MICRO_BATCH = 128  # sequences of one pass on one GPU

RECIPES: dict[str, dict[str, Any]] = {
    # A model and text so small that a CPU learns something in a minute or two.
    "pydoc": {
        "model": "bert_small",
        "documents": 0,
        "tokenizer": "bytes",
        "context": 32,
        "mask_rate": 0.15,
        "max_density": 0.0,
        "batch_size": 16,
        "epochs": 3.0,
        "lr": 2e-3,
        "workers": 0,
        "eval_every": 1.0,
        **_ADAM,
        **_TRIANGLE,
    },
    # What is not here follows the amount of text, but for the dropout: what is masked differs in
    # every pass, and with 0.1 a model so small is still at the frequencies after five minutes.
    "small": {
        "model": "bert_small",
        "documents": 0,
        "context": 32,
        "mask_rate": 0.15,
        "max_density": 0.0,
        "lr": 2e-3,
        "workers": 0,
        **_ADAM,
        **_TRIANGLE,
    },
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
    # Geiping and Goldstein 2023 (arXiv:2212.14034), but for two things. There the rate and the
    # batch follow the clock of a day, which gives a smaller model more tokens; here tokens, as many
    # as the 900,000 passes that were its upper limit. And fp16 with a scaler is bf16.
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
        # --steps is how many there are of full size.
        "batch_size_warmup": lambda settings: 0.0 if settings.steps is not None else 0.6,
        "lr": 1e-3,
        "eval_every": 0.05,
        "ckpt_every": 1000,
        **_ADAM,
        **_TRIANGLE,
    },
}

# The settings for all eight tasks in github.com/JonasGeiping/cramming, GLUE_sane.
GLUE: dict[str, Any] = {
    "context": 128,
    "batch_size": 16,
    "epochs": 5.0,
    "lr": 4e-5,
    "schedule": "cosine",
    "warmup": 0.1,
    "betas": (0.9, 0.98),
    "eps": 1e-6,
    "weight_decay": 0.0,
    "clip_grad": 0.0,
    "dropout": 0.1,
    "eval_every": 1.0,
    "ckpt_every": 2000,
}


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def make_task(settings: BertSettings) -> tuple[Task, BertSettings]:
    """Return what to train, and the settings with every value filled in.

    Raises:
        ValueError: no such model, data or checkpoint, or sizes that do not fit each other.
    """
    return (_pretraining if settings.finetune is None else _finetuning)(settings)


def _pretraining(settings: BertSettings) -> tuple[Task, BertSettings]:
    for name in ("glue", "checkpoint", "tasks"):
        if getattr(settings, name) is not None:
            raise ValueError(f"--{name} needs --finetune glue")
    given, size, chosen = settings, None, {}
    if _recipe(settings) == "small":
        data = settings.data or "pydoc"
        size = size_of(find_source(data, settings.documents or 0, settings.text_column))
    settings = _filled(settings, size)
    model = architecture.find(settings.model, SMALL, ("bert",))
    settings = architecture.sized(settings, model)
    known = settings.vocab_size or model.sizes.get("vocab_size")
    name = settings.data if settings.data in ("pydoc", "synthetic") else "text"
    name = f"{settings.model}-{name}"
    identity: dict[str, str] = {}
    if settings.data == "synthetic":
        vocab_size = known or 32_768
        source, about, files = NoiseTokens(vocab_size, settings.context), {}, {}
        items, held_out = _masked(source, settings, vocab_size, _SPECIALS, settings.seed), None
    else:
        text = open_text(
            settings.data,
            settings.tokenizer,
            specials=tokenizers.BERT,
            limit=settings.documents,
            vocab_size=settings.vocab_size or (size and own_text.vocab_size(size, "wordpiece")),
            max_density=settings.max_density or None,
            column=settings.text_column,
            validation=settings.validation,
            most_held_out=size and own_text.MOST_HELD_OUT,
            run=begun_run(name, settings),
        )
        if size is not None:
            settings, chosen = own_text.fitted(settings, given, text, size)
        if settings.tokenizer != "bytes":
            # A file that has it for as long as it is needed.
            kept = build_once(f"tokenizer-{text.tokenizer.digest[:32]}.json", text.tokenizer.save)
            settings = dataclasses.replace(settings, tokenizer=str(kept))
        vocab_size = text.tokenizer.model_size(known)
        about = text.facts(without=text.tokenizer.specials.values()) | chosen
        files, identity = text.tokenizer.files(), text.identity
        size, specials = text.tokenizer.vocab_size, text.tokenizer.specials
        items = Windows(text.train, settings.context, seed=settings.seed)
        items = _masked(items, settings, size, specials, settings.seed)
        # Always the same tokens are hidden, whatever the seed, so that runs can be compared.
        held_out = _masked(Windows(text.held_out, settings.context), settings, size, specials, 0)
    own = _own(settings, vocab_size)
    build, built, facts = architecture.planned(
        settings, model, own, dropout=settings.dropout, most_masked=settings.mask_rate
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


def _recipe(settings: BertSettings) -> str:
    """Return the recipe's name."""
    data = settings.data or "pydoc"
    if settings.recipe is not None:
        return settings.recipe
    if own_text.is_own(data) and settings.model in (None, *SMALL):
        return "small"
    return data if data in ("pydoc", "synthetic") else "cramming"


def _filled(settings: BertSettings, size: int | None = None) -> BertSettings:
    """Return the settings with the recipe's values where none was given; ``size``: of the text."""
    name = _recipe(settings)
    recipe = RECIPES[name]
    if size is not None:
        amount = own_text.by_amount(size, settings.tokenizer, "wordpiece")
        batch_size = min(16, amount["batch_size"])
        recipe = recipe | amount | {"batch_size": batch_size, "dropout": 0.0}
    settings = dataclasses.replace(settings, data=settings.data or "pydoc")
    return flags.fill(settings, name, recipe)


def _masked(
    sequences: Any, settings: BertSettings, vocab_size: int, specials: dict[str, int], seed: int
) -> Masked:
    rate = settings.mask_rate
    return Masked(sequences, vocab_size=vocab_size, specials=specials, rate=rate, seed=seed)


def _own(settings: BertSettings, vocab_size: int) -> dict[str, int]:
    return {"vocab_size": vocab_size, "sequence_length": settings.context}


def _masked_loss(model: nn.Module, batch: tuple[Tensor, ...], _seed: int) -> Tensor:
    tokens, targets = batch
    # None is masked where all are special, such as unknown.
    return model(tokens, targets=targets).sum() / (targets != IGNORED).sum().clamp(min=1)


def _score_masked(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return sums over the masked tokens of each sequence: loss, right ones, and how many."""
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
    """Return means over masked tokens: of them a sequence may have few, or none."""
    masked = means.pop("masked")
    return {name: value / masked if masked else math.nan for name, value in means.items()}


def _finetuning(settings: BertSettings) -> tuple[Task, BertSettings]:
    """Return one task of GLUE to be fine-tuned on; ``settings.tasks`` names it."""
    (wanted,) = glue.chosen(settings.tasks)
    pretrained = open_weights(settings.checkpoint, "--checkpoint")
    settings = _of_the_checkpoint(settings, pretrained)
    settings = flags.fill(settings, "glue", GLUE)
    model = architecture.find(settings.model, SMALL, ("bert",))
    settings = architecture.sized(settings, model)
    tokenizer = tokenizers.open_tokenizer(settings.tokenizer, None, specials=tokenizers.BERT)
    items, held_out = glue.open_task(settings.glue, wanted, tokenizer, settings.context)
    known = settings.vocab_size or model.sizes.get("vocab_size")
    own, dropout = _own(settings, tokenizer.model_size(known)), {"dropout": settings.dropout}
    _, headless, _ = architecture.planned(settings, model, own, **dropout)
    build, built, facts = architecture.planned(
        settings, model, own, **dropout, num_classes=wanted.classes
    )
    # The head is new, and nothing else.
    fresh = {name for name, _ in built.named_parameters()}
    fresh -= {name for name, _ in headless.named_parameters()}
    from_where = {
        "task": wanted.name,
        "checkpoint": str(pretrained.path),
        "pretraining_steps": pretrained.step,
    }
    task = Task(
        name=f"{settings.model}-{wanted.name}",
        unit="sentences",
        build=build,
        train=items,
        held_out=held_out,
        loss=lambda model, batch, _seed: _finetuning_loss(model, wanted, batch),
        score=lambda model, batch: _score_task(model, wanted, batch),
        flops_per_item=built.flops_per_sequence(items.mean_length()),
        facts={
            **from_where,
            **facts,
            **items.facts("training_sentences"),
            **held_out.facts("held-out_sentences"),
            "context": settings.context,
            "vocab_size": built.vocab_size,
        },
        derive=lambda means: metrics.derive(wanted, means),
        start=lambda model: pretrained.load(model, fresh),
        about={"task": "sentences", "classes": wanted.names},
        identity={
            f"the tokeniser {settings.tokenizer}": tokenizer.digest,
            f"the training set under {settings.glue}": items.digest,
            f"the held-out set under {settings.glue}": held_out.digest,
        },
        files=tokenizer.files(),
    )
    return task, settings


# What the checkpoint gives and no flag may.
_FROM_CHECKPOINT = ("model", "heads", "depth", "head_dim", "mlp_ratio", "vocab_size")


def _of_the_checkpoint(settings: BertSettings, pretrained: Weights) -> BertSettings:
    """Return the settings with the model and the tokenizer of the run that was pre-trained."""
    for name in _FROM_CHECKPOINT:
        if getattr(settings, name) is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--finetune uses the model of --checkpoint: leave out --{flag}")
    saved = pretrained.settings
    if "mask_rate" not in saved or saved.get("finetune") is not None:
        raise ValueError(f"--checkpoint must be pre-trained by this script, got {pretrained.path}")
    own = {name: _hashable(saved[name]) for name in _FROM_CHECKPOINT}
    beside = pretrained.run / "tokenizer.json"
    tokenizer = settings.tokenizer or (str(beside) if beside.exists() else saved["tokenizer"])
    if tokenizer != "bytes" and not Path(tokenizer).exists():
        raise ValueError(
            f"--tokenizer must be the tokenizer.json of --checkpoint, got {tokenizer}, which does "
            "not exist"
        )
    return dataclasses.replace(settings, data=settings.glue, tokenizer=tokenizer, **own)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _finetuning_loss(model: nn.Module, task: glue.GlueTask, batch: tuple[Tensor, ...]) -> Tensor:
    tokens, lengths, labels, _ = batch
    return metrics.item_loss(task, model(tokens, lengths), labels).mean()


def _score_task(
    model: nn.Module, task: glue.GlueTask, batch: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    tokens, lengths, labels, parts = batch
    return metrics.item_values(task, model(tokens, lengths), labels, parts)


def _sum_up(summaries: dict[str, dict[str, Any]], folder: Path) -> None:
    """Show the scores of all tasks beside the paper's, and write them to ``summary.json``."""
    measures = {
        name: {
            key.removeprefix("held_out_"): value
            for key, value in summary.items()
            if key.startswith("held_out_")
        }
        for name, summary in summaries.items()
    }
    one = next(iter(summaries.values()))
    Console(width=100).print(table.shown(measures, one["model"]))
    about = ("model", "depth", "heads", "head_dim", "head_convention", "checkpoint")
    whole = {
        **{name: one[name] for name in about},
        "glue": table.in_percent(measures),
        "paper": {variant: table.printed(variant) for variant in ("original", "lean")},
        "measures": measures,
    }
    write_file(folder / "summary.json", json.dumps(whole, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Pre-train or fine-tune a BERT; see ``--help``."""
    settings = flags.parse(PROGRAM, __doc__, argv, BertSettings, recipes=RECIPES)
    if settings.finetune is None:
        engine.main(PROGRAM, settings, make_task)
        return
    with flags.one_line_errors(PROGRAM):
        for name in ("glue", "checkpoint"):
            if getattr(settings, name) is None:
                raise ValueError(f"--finetune glue needs --{name}")
        for name in ("seeds", "kappa_penalty"):
            if getattr(settings, name) != getattr(BertSettings, name):
                raise ValueError(
                    f"--finetune glue does not support --{name.replace('_', '-')}: leave it out"
                )
        tasks = glue.chosen(settings.tasks)
    runs = {t.name: dataclasses.replace(settings, tasks=(t.name,)) for t in tasks}
    engine.several(PROGRAM, runs, make_task, name="bert-glue", sum_up=_sum_up)


if __name__ == "__main__":
    main()
