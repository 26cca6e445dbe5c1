"""Train a GPT with any number of heads in each layer.

torchrun train/gpt.py --heads 16 --depth 4
torchrun train/gpt.py --data my.txt
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

from train.data.files import plain
from models.gpt import generate
from train.checkpoint.run_folder import begun_run
from train.config import architecture, flags
from train.loop import engine
from train.config.architecture import Architecture
from train.config.text import MOST_HELD_OUT, TextSettings, is_own, small_run
from train.data.loader import DataSet
from train.config.flags import flag
from train.data.text import Text, open_text, tokenizers
from train.data.text.stream import NoiseTokens, RandomWindows, Windows

PROGRAM = "gpt.py"
HELD_OUT_BATCHES = 200  # if windows are drawn at random
SAMPLE_TOKENS, TEMPERATURE = 200, 0.8  # length of a generated text


@dataclasses.dataclass(frozen=True)
class GptSettings(TextSettings):
    """The settings of a run on text."""

    SAME_AFTER_RESUME: ClassVar[tuple[str, ...]] = (
        *TextSettings.SAME_AFTER_RESUME,
        *("windows", "head_bias"),
    )

    recipe: str | None = flag(
        None,
        str,
        "named set of defaults; chosen from the data if omitted: repository for tinystories; "
        "small for files; modern for hf: and for the paper's models",
        choices=("pydoc", "small", "repository", "modern", "synthetic"),
    )
    context: int | None = flag(None, flags.positive, "sequence length in tokens (from --model)")
    windows: str | None = flag(
        None,
        str,
        "all cuts the text into sequences that cover it once per epoch, at a new offset each time; "
        "random draws sequences from anywhere",
        choices=("all", "random"),
    )
    head_bias: bool | None = flag(
        None,
        None,
        "add a bias to the classifier; a model without it can be exported to transformers' GPT-2",
    )
    prompt: str = flag("", flags.in_utf8, "beginning of each sample; a new document if empty")
    samples: int = flag(3, flags.count, "number of texts to generate at the end; 0 disables it")


# Bytes of one small text, learned in a minute on two cores.
SMALL = {
    "gpt_small": Architecture(
        "gpt",
        {
            "sequence_length": 64,
            "embed_dim": 128,
            "depth": 3,
            "heads": 8,
            "head_dim": 16,
            "mlp_ratio": 4.0,
        },
    ),
}

# Warm-up, half a cosine and AdamW as most GPTs are trained since Brown et al. 2020
# (arXiv:2005.14165).
_MODERN: dict[str, Any] = {
    "documents": 0,
    "windows": "all",
    "lr": 1e-3,
    "min_lr": 1e-4,
    "warmup": 0.02,
    "weight_decay": 0.1,
    "betas": (0.9, 0.95),
    "clip_grad": 1.0,
    "eval_every": 0.1,
}

_SMALL: dict[str, Any] = _MODERN | {
    "tokenizer": "bytes",
    "model": "gpt_small",
    "batch_size": 32,
    "lr": 3e-3,
    "min_lr": 0.0,
    "warmup": 0.1,
    "workers": 0,
}

RECIPES: dict[str, dict[str, Any]] = {
    "pydoc": _SMALL | {"data": "pydoc", "epochs": 3.0, "eval_every": 1.0},
    # As long as ``small_run`` says.
    "small": _SMALL
    | {
        "dropout": 0.1,
        "eval_every": None,
        # As in transformers' GPT-2, so that the model can be exported to it.
        "head_bias": False,
    },
    # github.com/PraveenRaja42/Tiny-Stories-GPT, whose variant the lean paper trains. Two things
    # differ: its AdamW decays norms, biases and positions too, and a newline separates its stories.
    "repository": {
        "data": "tinystories",
        "documents": 12_000,
        "tokenizer": "gpt2",
        "model": "gpt2_tinystories",
        "windows": "random",
        "batch_size": 128,
        "steps": 2000,
        "lr": 3e-4,
        "schedule": "constant",
        "weight_decay": 0.01,
        "dropout": 0.2,
        "eval_every": 1.0,
    },
    "modern": _MODERN
    | {
        "data": "tinystories",
        "tokenizer": "gpt2",
        "model": "gpt2_tinystories",
        "context": 512,
        "batch_size": 128,
        "epochs": 1.0,
    },
    "synthetic": _MODERN
    | {
        "data": "synthetic",
        "tokenizer": "gpt2",
        "model": "gpt2_tinystories",
        "batch_size": 128,
        "steps": 100,
    },
}


def make_task(settings: GptSettings) -> tuple[engine.Task, GptSettings]:
    """Return what to train, and the settings with every value filled in.

    Raises:
        ValueError: no such model, data or tokeniser, or sizes that do not fit each other.
    """
    settings = _filled(settings)
    small = settings.recipe == "small"
    model = architecture.find(settings.model, SMALL, ("gpt",))
    settings = architecture.sized(settings, model)
    context = settings.context or model.sizes["sequence_length"]
    settings = dataclasses.replace(settings, context=context)
    bundled = settings.data in ("pydoc", "tinystories", "synthetic")
    name = f"{settings.model}-{settings.data if bundled else 'text'}"
    model_vocab = settings.vocab_size or model.sizes.get("vocab_size")
    text = per_byte = None
    about: dict[str, Any] = {}
    if settings.data == "synthetic":
        vocab_size = model_vocab or 257
        training, held_out = NoiseTokens(vocab_size, context + 1), None
    else:
        text = open_text(
            settings.data,
            settings.tokenizer,
            specials=tokenizers.GPT,
            limit=settings.documents,
            vocab_size=settings.vocab_size,
            column=settings.text_column,
            validation=settings.validation,
            most_held_out=MOST_HELD_OUT if small else None,
            run=begun_run(name, settings),
        )
        vocab_size = text.tokenizer.model_size(model_vocab)
        training, held_out = _windows(settings, text)
        per_byte, about = _tokens_per_byte(text), text.facts()
        # The scores of always predicting the token frequencies of the training text.
        trivial = _derive({"loss": about["unigram_loss"]}, per_byte)
        prompt = len(text.tokenizer.encode(plain(settings.prompt)))
        if prompt > context and settings.samples:
            about["prompt_cut_to_the_context"] = f"the last {context} of {prompt} tokens"
        about |= {f"unigram_{name}": value for name, value in trivial.items()}
    if small:
        settings = settings.filled(small_run(len(training) * context))
    build, built, facts = architecture.planned(
        settings,
        model,
        {"vocab_size": vocab_size, "sequence_length": context},
        dropout=settings.dropout,
        head_bias=settings.head_bias,
    )
    facts |= {"context": settings.context, "vocab_size": vocab_size, **about}
    task = engine.Task(
        name=name,
        unit="sequences",
        build=build,
        train=training,
        held_out=held_out,
        loss=lambda model, batch, _seed: _losses(model, batch).mean(),
        score=lambda model, batch: {"loss": _losses(model, batch).mean(dim=1)},
        derive=lambda means: _derive(means, per_byte),
        flops_per_item=built.flops_per_sequence(),
        tokens_per_item=settings.context,
        facts=facts,
        about={"task": "next token"},
        files={} if text is None else text.tokenizer.files(),
        identity={} if text is None else text.identity,
        finish=_sampler(settings, text),
    )
    return task, settings


def _filled(settings: GptSettings) -> GptSettings:
    """Return the settings with the recipe's values where none was given."""
    data = settings.data or "pydoc"
    follows = {"pydoc": "pydoc", "tinystories": "repository", "synthetic": "synthetic"}
    if is_own(data) and settings.model in (None, *SMALL):
        follows[data] = "small"
    name = settings.recipe or follows.get(data, "modern")
    recipe = {"data": "pydoc", "head_bias": True} | RECIPES[name]
    if is_own(data) and recipe["tokenizer"] == "gpt2":
        # The data come from the Hub, and only named data are downloaded.
        recipe["tokenizer"] = "bpe"
    return flags.apply_recipe(settings, name, recipe)


def _windows(settings: GptSettings, text: Text) -> tuple[DataSet, DataSet]:
    """Return sequences to train on and sequences held out, one token longer than the context."""
    length, seed = settings.context + 1, settings.seed
    if settings.windows == "all":
        training = Windows(text.train, length, stride=settings.context, seed=seed)
        return training, Windows(text.held_out, length, stride=settings.context)
    epoch = len(text.train) // settings.context
    held_out = HELD_OUT_BATCHES * settings.batch_size
    return (
        RandomWindows(text.train, length, count=epoch, seed=seed),
        RandomWindows(text.held_out, length, count=held_out, seed=seed),
    )


def _tokens_per_byte(text: Text) -> float | None:
    """Return the tokens per byte of the held-out text, or None if unknown."""
    lengths = text.bytes_per_token
    if lengths is None:
        return None
    size = (text.held_out.counts(len(lengths)) @ lengths).item()
    return len(text.held_out) / size if size else None


def _derive(means: dict[str, float], per_byte: float | None) -> dict[str, float]:
    """Return the mean loss in nats per token, its perplexity, and its bits per byte of text."""
    loss = means["loss"]
    # A loss that large is useless, but must not stop a run.
    measures = {"loss": loss, "perplexity": math.exp(min(loss, 700))}
    if per_byte is not None:
        measures["bits_per_byte"] = loss * per_byte / math.log(2)
    return measures


def _losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the cross-entropy of each token after the first: (B, N - 1)."""
    (tokens,) = batch
    return model(tokens[:, :-1], tokens[:, 1:])


def _sampler(settings: GptSettings, text: Text | None) -> Any:
    """Return a function that generates text after training, or None."""
    if text is None or settings.samples == 0:
        return None
    prompt = text.tokenizer.encode(plain(settings.prompt)) or [text.tokenizer.end]

    def sample(model: nn.Module) -> dict[str, Any]:
        device = next(model.parameters()).device
        tokens = torch.tensor([prompt] * settings.samples, device=device)
        drawn = generate(
            model,
            tokens,
            SAMPLE_TOKENS,
            temperature=TEMPERATURE,
            # Every rank draws the same.
            generator=torch.Generator(device).manual_seed(settings.seed),
        )
        start = 0 if settings.prompt else 1
        return {"samples": [legible(text.tokenizer.decode(row[start:])) for row in drawn.tolist()]}

    return sample


def legible(text: str) -> str:
    """Replace control characters: a model that has learned little generates any byte."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


@engine.restored()
def main(argv: Sequence[str] | None = None) -> None:
    """Train a GPT; see ``--help``."""
    recipes = {name: {"head_bias": True} | recipe for name, recipe in RECIPES.items()}
    settings = flags.parse(PROGRAM, __doc__, argv, GptSettings, recipes=recipes)
    engine.main(PROGRAM, settings, make_task)


if __name__ == "__main__":
    main()
