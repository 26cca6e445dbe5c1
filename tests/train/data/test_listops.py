"""Lists of operators: the law they are drawn from, their values, how they are kept."""

import random
import re

import numpy as np
import pytest

from tests.train.published import write_lists
from train.data.longrange import listops
from train.data.longrange.corpus import SPLITS, Corpus, cached
from train.data.longrange.listops import IDS, ListLimits, check, decode, draw, encode, generate

SHORT = ListLimits(max_depth=4, max_args=5, min_length=8, max_length=60)


def value(text: str) -> int:
    """Rewrite innermost lists by their values until one digit is left."""

    def rewrite(found: re.Match) -> str:
        numbers = sorted(int(word) for word in found[2].split())
        rules = {
            "MIN": lambda: numbers[0],
            "MAX": lambda: numbers[-1],
            "MED": lambda: int(np.median(numbers)),
            "SM": lambda: sum(numbers) % 10,
        }
        return str(rules[found[1]]())

    rewrites = 1
    while rewrites:
        text, rewrites = re.subn(r"\[(MIN|MAX|MED|SM)((?: \d)+) \]", rewrite, text)
    return int(text)


def drawn_as_published(rng: random.Random, depth: int = 1) -> int:
    """Return the length of a tree drawn by recursion, node by node."""
    if depth == 10 or rng.random() > 0.25:
        return 1
    return 2 + sum(drawn_as_published(rng, depth + 1) for _ in range(rng.randint(2, 10)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[MAX 4 3 [MIN 2 3 ] 1 0 ]", 4),
        ("[MED 1 2 [SM 9 8 ] 3 ]", 2),
        ("[MED 9 8 [MIN 7 5 ] ]", 8),
    ],
)
def test_the_evaluator_that_judges_knows_examples(text, expected):
    assert value(text) == expected


@pytest.mark.parametrize(("limits", "count"), [(ListLimits(), 60), (SHORT, 500)])
def test_labels_are_the_values_of_the_lists(limits, count):
    corpus = draw(3, 0, limits, 0, count)
    assert [value(decode(corpus[i])) for i in range(count)] == corpus.labels.tolist()


@pytest.mark.parametrize("limits", [ListLimits(), SHORT, ListLimits(2, 3, 3, 6)])
def test_lists_stay_within_the_limits(limits):
    corpus = draw(0, 0, limits, 0, 100)
    assert limits.min_length < corpus.lengths.min()
    assert corpus.lengths.max() < limits.max_length
    depths, arguments = [], []
    for i in range(len(corpus)):
        text = decode(corpus[i])
        steps = [word.startswith("[") - (word == "]") for word in text.split()]
        depths.append(max(np.cumsum(steps)) + 1)
        while lists := re.findall(r"\[[A-Z]+((?: \d)+) \]", text):
            arguments += [len(found.split()) for found in lists]
            text = re.sub(r"\[[A-Z]+(?: \d)+ \]", "0", text)
    assert max(depths) <= limits.max_depth
    assert (min(arguments), max(arguments)) == (2, limits.max_args)


def test_the_sampler_follows_the_published_law():
    count = 2500
    found = check(0, count, processes=1)
    # 10,000 lists gave 8.2 to 8.4%, 17% of class 0 and of class 9, and 35.4 to 36.4%.
    assert found["class_shares"][0] == pytest.approx(0.17, abs=0.03)
    assert found["class_shares"][9] == pytest.approx(0.17, abs=0.03)
    assert found["first_operator"] == pytest.approx(0.361, abs=0.05)

    rng = random.Random(0)
    lengths = np.array([drawn_as_published(rng) for _ in range(8000)])
    kept = lengths[(lengths > 500) & (lengths < 2000)]
    share = len(kept) / len(lengths)
    # Four standard errors of the difference.
    error = (share * (1 - share) * (1 / len(lengths) + share / count)) ** 0.5
    assert abs(found["acceptance"] - share) < 4 * error
    error = kept.std() * (1 / len(kept) + 1 / count) ** 0.5
    assert abs(found["mean_length"] - kept.mean()) < 4 * error


def test_digits_and_operators_are_uniform():
    corpus = draw(0, 0, ListLimits(), 0, 200)
    counts = np.bincount(corpus.tokens, minlength=16)
    assert counts[0] == 0
    for ids in (range(1, 11), range(11, 15)):
        shares = counts[list(ids)] / counts[list(ids)].sum()
        assert shares == pytest.approx(1 / len(ids), rel=0.05)


def test_a_list_depends_on_seed_split_and_index_alone():
    alone = draw(5, 1, SHORT, 7, 8)
    among = draw(5, 1, SHORT, 0, 20)
    assert np.array_equal(alone[0], among[7])
    assert alone.labels[0] == among.labels[7]
    for other in (draw(6, 1, SHORT, 7, 8), draw(5, 2, SHORT, 7, 8)):
        assert not np.array_equal(alone.tokens, other.tokens)


def test_processes_and_sizes_do_not_change_the_lists(monkeypatch):
    alone = generate(2, {"train": 600, "dev": 20, "test": 30}, SHORT, processes=1)
    monkeypatch.setattr(listops, "_CHUNK", 100 * SHORT.max_length)
    shared = generate(2, {"train": 600, "dev": 20, "test": 30}, SHORT, processes=2)
    for split in SPLITS:
        assert np.array_equal(alone[split].tokens, shared[split].tokens)
        assert np.array_equal(alone[split].labels, shared[split].labels)
    longer = generate(2, {"train": 700, "dev": 20, "test": 30}, SHORT, processes=1)
    assert np.array_equal(longer["test"].tokens, alone["test"].tokens)
    assert np.array_equal(longer["train"][599], alone["train"][599])


def test_no_list_comes_twice():
    # With operators of two digits there are only 400 lists.
    few = ListLimits(max_depth=2, max_args=2, min_length=3, max_length=5)
    corpora = generate(0, {"train": 200, "dev": 50, "test": 50}, few, processes=1)
    texts = [decode(corpus[i]) for corpus in corpora.values() for i in range(len(corpus))]
    assert len(set(texts)) == 300
    labels = [label for corpus in corpora.values() for label in corpus.labels]
    assert [value(text) for text in texts] == labels
    assert np.array_equal(corpora["test"].lengths, [4] * 50)
    with pytest.raises(ValueError, match=r"sizes must be at most what differs .* got 401"):
        generate(0, {"train": 399, "dev": 1, "test": 1}, few, processes=1)


@pytest.mark.parametrize(
    "bad", [{"max_depth": 1}, {"max_args": 1}, {"min_length": 1999}, {"max_length": 4}]
)
def test_limits_that_nothing_fits_are_refused(bad):
    with pytest.raises(ValueError, match="limits must leave room"):
        ListLimits(**bad)


def test_the_ids_of_the_symbols_are_fixed():
    assert encode("( ( ( [MAX 0 ) 9 ) ] )").tolist() == [12, 1, 10, 15]
    assert [IDS[s] for s in ("[MIN", "[MAX", "[MED", "[SM", "]")] == [11, 12, 13, 14, 15]


def test_published_tables_are_read(tmp_path):
    corpus = draw(0, 0, SHORT, 0, 6)
    write_lists(tmp_path, [(decode(corpus[i]), corpus.labels[i]) for i in range(6)])
    read = listops.read(tmp_path)
    for split, part in zip(SPLITS, ([0, 1, 2, 3], [4], [5])):
        assert read[split].labels.tolist() == corpus.labels[part].tolist()
        assert [decode(read[split][i]) for i in range(len(part))] == [
            decode(corpus[i]) for i in part
        ]


@pytest.mark.parametrize(
    ("row", "message"),
    [("[MAX 1 2 }\t2", "'}'"), ("[MAX 1 2 ]\tx", "not in list"), ("[MAX 1 2 ]", "Target")],
)
def test_a_damaged_table_is_refused_by_its_line(tmp_path, row, message):
    write_lists(tmp_path, [("[MAX 1 2 ]", 2)] * 3)
    (tmp_path / "basic_val.tsv").write_text(f"Source\tTarget\n[MIN 1 2 ]\t1\n{row}\n")
    with pytest.raises(ValueError, match=f"basic_val.tsv line 3 must hold .*{message}"):
        listops.read(tmp_path)


def test_a_cached_file_is_made_once_and_never_half(tmp_path):
    made = []

    def make() -> dict[str, Corpus]:
        made.append(draw(len(made), 0, SHORT, 0, 3))
        return dict.fromkeys(SPLITS, made[-1])

    def fail() -> dict[str, Corpus]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path / "a" / "lists.npz", fail)
    for _ in range(2):
        read = cached(tmp_path / "a" / "lists.npz", make)
    assert len(made) == 1
    assert np.array_equal(read["dev"].tokens, made[0].tokens)
    assert np.array_equal(read["dev"][2], made[0][2])
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["lists.lock", "lists.npz"]
