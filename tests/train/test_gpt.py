"""A GPT learns the text it is given, on any number of processes, and goes on where it stopped."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.train.forked import on_two_ranks
from tests.train.launch import rows, tensors_of
from train import gpt
from train.data import text
from train.data.text.stream import RandomWindows, TokenStream
from train.loop import train as loop
from train.loop.setup import Run

# Two layers of two heads, which see eight bytes.
TINY = ["--heads", 2, "--depth", 2, "--head-dim", 8, "--context", 8, "--batch-size", 32]
TINY += ["--eval-every", 0, "--kappa-every", 2, "--samples", 0]
SHORT = [*TINY, "--documents", 4]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def train_here(*args: object) -> None:
    """Run the script in this process."""
    gpt.main([str(arg) for arg in args])


def refused(*args: object, capsys: pytest.CaptureFixture) -> str:
    """Run the script, which must stop with one line, and return that."""
    with pytest.raises(SystemExit, match="2"):
        train_here(*args)
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def curve(out: Path) -> list[dict]:
    return rows(out / "metrics.jsonl")


def counted(part: TokenStream) -> Counter[int]:
    """Return how often each token is in the file."""
    return Counter(np.fromfile(part.path, part.dtype)[part.begin : part.end].tolist())


def test_a_short_run_is_better_than_the_frequencies_of_the_bytes(tmp_path, capsys):
    small = ["--depth", 1, "--context", 32, "--batch-size", 16, "--kappa-every", 0]
    train_here(*small, "--steps", 60, "--samples", 2, "--out", tmp_path)
    done = summary(tmp_path)
    # The baseline again, from the text itself.
    data = text.open_text("pydoc", "bytes", specials=text.tokenizers.GPT)
    train, held_out = (counted(part) for part in (data.train, data.held_out))
    total = sum(train.values()) + 257
    unigram = -sum(n * math.log((train[t] + 1) / total) for t, n in held_out.items())
    assert done["unigram_loss"] == pytest.approx(unigram / len(data.held_out), rel=1e-9)
    assert done["held_out_loss"] < done["unigram_loss"] - 0.2
    # Nearly every token is a byte: bits per byte are nats per token in other units.
    bytes_held_out = sum(n for token, n in held_out.items() if token < 256)
    per_byte = len(data.held_out) / bytes_held_out / math.log(2)
    assert done["held_out_bits_per_byte"] == pytest.approx(done["held_out_loss"] * per_byte)
    assert done["held_out_perplexity"] == pytest.approx(math.exp(done["held_out_loss"]))
    assert done["tokens_per_second"] == pytest.approx(32 * done["throughput"])
    assert len(set(done["samples"])) == 2
    assert all(len(sample.encode()) >= 40 for sample in done["samples"])
    assert "unigram loss" in capsys.readouterr().out


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory):
    """Six steps in one process, checkpoints of each second one, and samples."""
    out = tmp_path_factory.mktemp("six")
    train_here(*SIX, "--out", out)
    return out


SIX = [*SHORT, "--steps", 6, "--ckpt-every", 2, "--samples", 2]


def work(_rank: int, folder: Path) -> None:
    """What each of two ranks does."""
    train_here(*SIX, "--out", folder / "run")


@pytest.mark.slow
def test_two_processes_have_the_losses_and_the_samples_of_one(six_steps, tmp_path):
    on_two_ranks("tests.train.test_gpt", tmp_path)
    one, two = curve(six_steps), curve(tmp_path / "run")
    for name in ("loss", "grad_norm"):
        curves = [[row[name] for row in curve] for curve in (two, one)]
        assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert two[-1]["held_out_loss"] == pytest.approx(one[-1]["held_out_loss"], rel=1e-4)
    assert summary(tmp_path / "run")["samples"] == summary(six_steps)["samples"]
    assert len(two) == 6


def test_a_run_with_dropout_resumes_to_the_same_bits(tmp_path, monkeypatch):
    run = [*SHORT, "--dropout", 0.3, "--deterministic", "--ckpt-every", 2, "--steps", 4]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train_here(*run, "--out", whole)
    save = loop.save

    def save_and_die(run: Run, *args: object) -> None:
        save(run, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            train_here(*run, "--out", stopped)
    assert len(curve(stopped)) == 2
    train_here(*run, "--out", stopped, "--resume", "auto")
    assert curve(stopped) == curve(whole)
    last = Path("checkpoints") / "step-00000004"
    assert tensors_of(stopped / last) == tensors_of(whole / last) != {}
    # And dropout dropped something.
    train_here(*run[:-2], "--dropout", 0, "--steps", 1, "--out", tmp_path / "none")
    assert curve(tmp_path / "none")[0]["loss"] != curve(whole)[0]["loss"]


def task(*args: object) -> tuple:
    """Return what a command line would train, and its settings."""
    settings = gpt.flags.parse("gpt.py", "", [str(arg) for arg in args], gpt.GptSettings)
    return gpt.make_task(settings)


def stories(tmp_path: Path) -> Path:
    """As many small stories as 200 batches need, and a vocabulary of GPT-2's form."""
    file = tmp_path / "stories.txt"
    file.write_text("<|endoftext|>".join(f"Once {i} cats sat on a mat.\n\n" for i in range(400)))
    return file


def test_the_recipe_of_the_repository_is_what_it_trains_with(tmp_path):
    pytest.importorskip("tokenizers", reason="byte pairs need the package tokenizers")
    flags = ["--recipe", "repository", "--data", stories(tmp_path), "--tokenizer", "bpe"]
    for model, params in {"": 89_160_785, "_lean": 64_150_609}.items():
        made, settings = task(*flags, "--model", f"gpt2_tinystories{model}")
        # Little text gives few byte pairs; the model still has room for as many as GPT-2's.
        assert made.facts["params"] == params
        assert made.facts["tokeniser's_tokens"] < 1000
        assert made.facts["vocab_size"] == 50_257
        # What the run's folder keeps can be given as --tokenizer.
        assert json.loads(made.files["tokenizer.json"])["model"]["type"] == "BPE"
    assert (settings.context, settings.batch_size, settings.steps) == (64, 128, 2000)
    assert (settings.lr, settings.schedule, settings.warmup) == (3e-4, "constant", 0)
    assert (settings.weight_decay, settings.betas, settings.clip_grad) == (0.01, (0.9, 0.999), 0)
    assert (settings.dropout, settings.documents) == (0.2, 12_000)
    assert len(made.held_out) == 200 * 128
    assert isinstance(made.train, RandomWindows)
    assert made.train.tokens == made.train.tokens.part(0, len(made.train.tokens))
    assert made.train.tokens.end == made.held_out.tokens.begin


def test_the_loss_is_that_of_each_next_token_given_those_before():
    made, _ = task(*SHORT)
    model = made.build()
    (tokens,) = batch = made.train.__getitems__([(0, 0), (0, 5)])
    # Token by token, from nothing but the tokens before it.
    expected = torch.stack(
        [
            torch.stack(
                [F.cross_entropy(model(row[None, :i])[0, -1], row[i]) for i in range(1, len(row))]
            )
            for row in tokens
        ]
    )
    torch.testing.assert_close(made.loss(model, batch, 0), expected.mean())
    torch.testing.assert_close(made.score(model, batch)["loss"], expected.mean(dim=1))


def test_samples_go_on_from_the_prompt(tmp_path):
    made, settings = task(*SHORT, "--samples", 2, "--prompt", "The [/b] é")
    with torch.device("cpu"):
        model = made.build()
    samples = made.finish(model)["samples"]
    assert len(samples) == 2
    assert samples[0] != samples[1]
    assert all(sample.startswith("The [/b] é") for sample in samples)
    assert made.finish(model)["samples"] == samples
    assert settings.prompt == "The [/b] é"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "vit_base"], "--model must be one of gpt_small, or a row of the paper"),
        (
            ["--vocab-size", 256],
            "--vocab-size must be at least the 257 tokens of --tokenizer bytes",
        ),
        (["--context", 100_000], "--data needs at least "),
        (["--windows", "some"], "invalid choice: 'some'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, capsys, flags, message):
    assert message in refused(*TINY, *flags, "--out", tmp_path, capsys=capsys)
