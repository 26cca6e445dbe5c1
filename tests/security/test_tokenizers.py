"""A tokeniser that was made to do harm ends in one line."""

import json

import pytest
from safetensors import safe_open

from tests.train.trained import gpt, letters, run, train_text


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train_text(gpt, folder, "--no-head-bias")
    return folder / "run" / "model.safetensors"


def kept(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["tokenizer"])


def numbered(tokenizer, number):
    """Give the last byte another number."""
    tokenizer["model"]["vocab"]["a"] = number
    return tokenizer


def without_end(tokenizer):
    return tokenizer | {"added_tokens": []}


def empty(tokenizer):
    return tokenizer | {"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}


def merging_what_is_not_there(tokenizer):
    tokenizer["model"]["merges"] = [["q", "zz"]]
    return tokenizer


CHANGES = {
    "a number of four billion": lambda t: numbered(t, 2**32 - 1),
    "a number past 32 bits": lambda t: numbered(t, 2**40),
    "a number below 0": lambda t: numbered(t, -1),
    "no end": without_end,
    "nothing": empty,
    "a merge of nothing": merging_what_is_not_there,
    "a pattern that is none": lambda t: (
        t | {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}}
    ),
    "no JSON": lambda t: "{",
    "nested JSON": lambda t: "[" * 100_000,
    "an unknown model": lambda t: t | {"model": {"type": "Pickle"}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tokenizer_that_is_given_ends_in_one_line(trained, tmp_path, capsys, change):
    tokenizer = CHANGES[change](kept(trained))
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer))
    with pytest.raises(SystemExit):
        run(gpt, "--data", letters(tmp_path), "--tokenizer", path, "--dry-run")
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("gpt.py: error: ")
    assert "--tokenizer" in line
