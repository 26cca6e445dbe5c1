"""Text of one's own: the recipe of a small run, and what cannot be trained on."""

import socket
from pathlib import Path

import pytest

from train import bert, gpt
from train.config import text

SCRIPTS = {"gpt": gpt, "bert": bert}
WORDS = "the cat sat on a mat and ran to see who was at the door of this old house"
WORDS = WORDS.split()


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def write(path: Path, size: int) -> Path:
    """Write lines of words, ``size`` bytes of them."""
    words = (WORDS[i * i * 7 % 18] + ("\n\n" if i % 40 == 39 else " ") for i in range(size))
    path.write_text("".join(words)[:size])
    return path


def task(script: str, *args: object) -> tuple:
    """Return what a command line would train, and its settings."""
    kind = {"gpt": gpt.GptSettings, "bert": bert.BertSettings}[script]
    module = SCRIPTS[script]
    return module.make_task(module.flags.parse(script, "", [str(a) for a in args], kind))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_text_file_is_bytes_for_a_small_model(tmp_path, script):
    made, ours = task(script, "--data", write(tmp_path / "my.txt", 60_000))
    assert (ours.recipe, ours.model, made.facts["model"]) == ("small", *[f"{script}_small"] * 2)
    sizes = {"gpt": (64, 32, 0.1), "bert": (32, 16, 0.0)}[script]
    assert (ours.context, ours.batch_size, ours.dropout) == sizes
    assert (ours.tokenizer, ours.epochs, ours.eval_every) == ("bytes", 20, 4)
    assert made.facts["vocab_size"] == made.facts["tokeniser's_tokens"] < 270
    assert made.facts["params"] < 1e6
    assert made.facts["validation"].startswith("the last ")


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_win(tmp_path, script):
    file = write(tmp_path / "my.txt", 20_000)
    flags = ["--epochs", 2, "--context", 16, "--batch-size", 4, "--lr", 0.1, "--dropout", 0.2]
    _, ours = task(script, "--data", file, *flags)
    assert (ours.epochs, ours.context, ours.batch_size) == (2, 16, 4)
    assert (ours.lr, ours.dropout) == (0.1, 0.2)
    _, ours = task(script, "--data", file, "--steps", 7)
    assert (ours.steps, ours.epochs) == (7, None)
    trained = {"gpt": "bpe", "bert": "wordpiece"}[script]
    made, _ = task(script, "--data", file, "--tokenizer", trained)
    assert made.facts["vocab_size"] == made.facts["tokeniser's_tokens"] < 512
    made, _ = task(script, "--data", file, "--tokenizer", trained, "--vocab-size", 700)
    assert made.facts["vocab_size"] == 700


def test_a_run_is_as_long_as_the_budget_however_much_text_there_is(tmp_path, monkeypatch):
    for tokens in (10**3, 10**5, 10**6, 10**8, 10**10):
        chosen = text.small_run(tokens)
        # What a flag takes, and at least as many.
        assert 0.001 <= chosen["epochs"] <= text.EPOCHS
        assert chosen["epochs"] * tokens <= max(1.01 * text.TOKENS, 0.001 * tokens)
    monkeypatch.setattr(gpt, "MOST_HELD_OUT", 700)
    made, _ = task("gpt", "--data", write(tmp_path / "my.txt", 20_000))
    assert made.facts["held-out_tokens"] == 700


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"short", "--data needs at least "),
        (None, "no such file or folder"),
    ],
)
def test_what_cannot_be_trained_on_is_one_line(tmp_path, capsys, script, data, message):
    file = tmp_path / "my.txt"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(SystemExit, match="2"):
        SCRIPTS[script].main(["--data", str(file), "--out", str(tmp_path / "run")])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{script}.py: error: --data ")
    assert message in line
    assert not (tmp_path / "run").exists()
