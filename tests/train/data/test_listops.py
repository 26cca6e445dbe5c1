"""Lists of operators: the law they are drawn from, their values, how they are kept."""

import random
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.train.published import write_lists
from train.data.longrange import listops
from train.data.longrange.corpus import SPLITS, Corpus
from train.data.longrange.listops import ListLimits, decode, draw, generate
from train.data.longrange.tasks import baseline

SHORT = ListLimits(max_depth=4, max_args=5, min_length=8, max_length=60)


def drawn(count: int, limits: ListLimits, seed: int = 0) -> Corpus:
    """Return training sequences as they are generated."""
    return generate(seed, {"train": count, "dev": 0, "test": 0}, limits)["train"]


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


@pytest.mark.parametrize(("limits", "count"), [(ListLimits(), 60), (SHORT, 500)])
def test_labels_are_the_values_of_the_lists(limits, count):
    corpus = drawn(count, limits, seed=3)
    assert [value(decode(corpus[i])) for i in range(count)] == corpus.labels.tolist()


def test_each_list_in_a_list_has_its_value_at_its_bracket():
    corpus = drawn(200, replace(SHORT, operators=3), seed=3)
    for tokens in map(corpus.__getitem__, range(len(corpus))):
        text = decode(tokens).split()
        assert "[SM" not in text
        for end, found in enumerate(listops.inner_values(tokens)):
            expected, begin = 0, end
            if text[end] == "]":
                while text[begin : end + 1].count("]") != sum(t[0] == "[" for t in text[begin:end]):
                    begin -= 1
                expected = 1 + value(" ".join(text[begin : end + 1]))
            assert found == expected


@pytest.mark.parametrize("limits", [ListLimits(), SHORT, ListLimits(2, 3, 3, 6)])
def test_lists_stay_within_the_limits(limits):
    corpus = drawn(100 if limits.max_depth > 2 else 20, limits)
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
    count, rng = 2500, random.Random(0)
    sequences, labels, tries = zip(*(draw(rng, ListLimits()) for _ in range(count)))
    shares = np.bincount(labels, minlength=10) / count
    # 10,000 lists gave 8.2 to 8.4%, 17% of class 0 and of class 9, and 35.4 to 36.4%.
    assert shares[0] == pytest.approx(0.17, abs=0.03)
    assert shares[9] == pytest.approx(0.17, abs=0.03)
    first, labels, half = np.array([s[0] for s in sequences]), np.array(labels), count // 2
    right = baseline(labels[:half], labels[half:], first[:half], first[half:])
    assert right == pytest.approx(0.361, abs=0.05)

    published = np.array([drawn_as_published(rng) for _ in range(8000)])
    kept = published[(published > 500) & (published < 2000)]
    share = len(kept) / len(published)
    # Four standard errors of the difference.
    error = (share * (1 - share) * (1 / len(published) + share / count)) ** 0.5
    assert abs(count / sum(tries) - share) < 4 * error
    error = kept.std() * (1 / len(kept) + 1 / count) ** 0.5
    assert abs(np.mean([*map(len, sequences)]) - kept.mean()) < 4 * error


def test_a_list_depends_on_seed_split_and_index_alone():
    few, many = {"train": 5, "dev": 4, "test": 3}, {"train": 9, "dev": 9, "test": 9}
    one, other = generate(2, few, SHORT), generate(2, many, SHORT)
    for split, count in few.items():
        assert np.array_equal(one[split].tokens, other[split].tokens[: len(one[split].tokens)])
        assert np.array_equal(one[split].labels, other[split].labels[:count])
    texts = {decode(other[split][i]) for split in SPLITS for i in range(9)}
    assert len(texts) == 27
    again = generate(3, few, SHORT)
    assert not np.array_equal(again["train"].tokens, one["train"].tokens)


def test_the_lists_of_a_seed_stay_the_same():
    assert decode(drawn(1, ListLimits(3, 3, 6, 12))[0]) == "[SM [SM 0 7 ] 6 ]"


def test_no_list_comes_twice():
    # With operators of two digits there are only 400 lists.
    few = ListLimits(max_depth=2, max_args=2, min_length=3, max_length=5)
    corpora = generate(0, {"train": 200, "dev": 50, "test": 50}, few)
    texts = [decode(corpus[i]) for corpus in corpora.values() for i in range(len(corpus))]
    assert len(set(texts)) == 300
    labels = [label for corpus in corpora.values() for label in corpus.labels]
    assert [value(text) for text in texts] == labels
    assert np.array_equal(corpora["test"].lengths, [4] * 50)
    with pytest.raises(
        ValueError, match=r"sizes must be at most the number of distinct lists .* got 401"
    ):
        generate(0, {"train": 399, "dev": 1, "test": 1}, few)


def test_published_tables_are_read(tmp_path):
    corpus = drawn(6, SHORT)
    write_lists(tmp_path, [(decode(corpus[i]), corpus.labels[i]) for i in range(6)])
    read = listops.read(tmp_path)
    for split, part in zip(SPLITS, ([0, 1, 2, 3], [4], [5])):
        assert read[split].labels.tolist() == corpus.labels[part].tolist()
        assert [decode(read[split][i]) for i in range(len(part))] == [
            decode(corpus[i]) for i in part
        ]
