"""Text of one's own: what follows from how much there is, and what a user then sees."""

import json
import socket
from pathlib import Path

import pytest

from train import bert, gpt
from train.config import own_text

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
def test_a_small_text_is_bytes_for_a_small_model_and_the_plan_says_so(tmp_path, script):
    made, ours = task(script, "--data", write(tmp_path / "my.txt", 60_000))
    assert (ours.recipe, ours.model, made.facts["model"]) == ("small", *[f"{script}_small"] * 2)
    context, dropout = {"gpt": (64, 0.1), "bert": (32, 0.0)}[script]
    assert (ours.epochs, ours.context, ours.batch_size) == (20, context, 16)
    assert ours.dropout == dropout
    assert made.facts["vocab_size"] == made.facts["tokeniser's_tokens"] < 270
    assert made.facts["params"] < 1e6
    assert made.facts["validation"].startswith("the last ")
    said = made.facts["chosen_by_the_data"]
    amount, _, values = said.partition(" bytes of text: ")
    assert 55_000 < int(amount.replace(",", "")) <= 60_000
    lr = f"lr {ours.lr:g}, dropout {dropout:g}"
    sizes = f"model {script}_small, context {context}, batch size 16, epochs 20"
    assert values == f"tokenizer bytes, {sizes}, {lr}"


@pytest.mark.parametrize(("script", "kind"), [("gpt", "bpe"), ("bert", "wordpiece")])
def test_more_text_trains_a_tokeniser_whose_tokens_the_model_has(
    tmp_path, monkeypatch, script, kind
):
    monkeypatch.setattr(own_text, "TRAINED_FROM", 30_000)
    made, ours = task(script, "--data", write(tmp_path / "my.txt", 50_000))
    assert f"tokenizer {kind}" in made.facts["chosen_by_the_data"]
    # Eighteen words need few tokens: the model follows the tokeniser, not what it might have had.
    tokens = made.facts["tokeniser's_tokens"]
    assert made.facts["vocab_size"] == tokens < 512
    assert json.loads(made.files["tokenizer.json"])["model"]["vocab"]
    assert ours.vocab_size is None
    made, _ = task(script, "--data", tmp_path / "my.txt", "--vocab-size", 700)
    assert made.facts["vocab_size"] == 700
    few = {"bpe": 262, "wordpiece": 37}[kind]
    monkeypatch.setattr(own_text, "vocab_size", lambda _size, _kind: few)
    made, _ = task(script, "--data", tmp_path / "my.txt")
    assert made.facts["vocab_size"] == few


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_win_and_the_plan_leaves_them_out(tmp_path, script):
    file = write(tmp_path / "my.txt", 20_000)
    flags = ["--epochs", 2, "--context", 16, "--batch-size", 4, "--tokenizer", "bytes", "--lr", 0.1]
    made, ours = task(script, "--data", file, *flags, "--dropout", 0)
    assert (ours.epochs, ours.context, ours.batch_size, ours.lr, ours.dropout) == (2, 16, 4, 0.1, 0)
    said = made.facts["chosen_by_the_data"]
    assert said.endswith(f"bytes of text: model {script}_small")
    _, ours = task(script, "--data", file, "--steps", 7)
    assert (ours.steps, ours.epochs) == (7, None)


@pytest.mark.parametrize("script", SCRIPTS)
def test_sequences_get_shorter_before_a_text_is_refused(tmp_path, script):
    made, ours = task(script, "--data", write(tmp_path / "my.txt", 300))
    assert ours.context == 16
    longest = {"gpt": 64, "bert": 32}[script]
    assert made.facts["context_made_shorter"] == f"from {longest} to 16: little text"
    assert len(made.held_out) >= 1
    assert len(made.train) >= ours.batch_size
    with pytest.raises(ValueError, match=r"too little text: needs .* got 54 and 6"):
        task(script, "--data", write(tmp_path / "my.txt", 59))
    # What a flag asks for is not changed.
    with pytest.raises(ValueError, match="--data needs at least "):
        task(script, "--data", write(tmp_path / "my.txt", 300), "--context", 64)


def test_the_budget_is_bounded_however_much_text_there_is():
    for size in (10**3, 10**5, 10**6, 10**8, 10**10):
        chosen = own_text.by_amount(size, None, "bpe")
        tokens = size if chosen["tokenizer"] == "bytes" else size / 3
        most = own_text.TOKENS if chosen["tokenizer"] == "bytes" else own_text.PIECES
        # 0.001 is the least number of epochs that a flag takes.
        assert chosen["epochs"] * tokens <= max(1.01 * most, 0.001 * tokens)
        assert chosen["epochs"] <= own_text.EPOCHS
        # As flags, they are what the command line takes.
        assert chosen["epochs"] >= 0.001
    assert [own_text.vocab_size(size, "bpe") for size in (1, 10**6, 10**9)] == [512, 1024, 4096]
    assert own_text.vocab_size(1, "wordpiece") == 2048


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "contains no text: it is empty or blank"),
        (b"short", "too little text"),
        (b"caf\xe9 " * 100, "not UTF-8"),
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
