"""Lists of operators: the law they are drawn from, their values, how they are kept and batched."""

import random
import re

import numpy as np
import pytest

from train.data.listops import (
    SPLITS,
    ListLimits,
    Lists,
    baseline,
    decode,
    draw,
    generate,
    open_lists,
)

SHORT = ListLimits(max_depth=4, max_args=5, min_length=8, max_length=60)


def drawn(count: int, limits: ListLimits, seed: int = 0) -> Lists:
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


def test_a_batch_is_padded_to_a_power_of_two():
    assert [ListLimits().padded_length, ListLimits(3, 5, 5, 17).padded_length] == [2048, 16]
    lists = drawn(6, SHORT)
    tokens, lengths, labels = lists.__getitems__([(0, 5), (1, 0)])
    assert (tokens.shape, str(tokens.dtype)) == ((2, 64), "torch.int64")
    assert (str(lengths.dtype), str(labels.dtype)) == ("torch.int32", "torch.int64")
    for row, index in enumerate((5, 0)):
        assert bytes(tokens[row, : lengths[row]].tolist()) == lists[index].tobytes()
        assert not tokens[row, lengths[row] :].any()
        assert labels[row] == lists.labels[index]


def test_lists_are_generated_once_and_a_damaged_file_is_named(tmp_path, monkeypatch):
    sizes = {"train": 5, "dev": 4, "test": 3}
    made = open_lists(sizes, SHORT, 2, tmp_path)
    monkeypatch.setattr("train.data.listops.generate", None)
    kept = open_lists(sizes, SHORT, 2, tmp_path)
    assert [kept[split].digest() for split in SPLITS] == [made[split].digest() for split in SPLITS]
    assert len({part.digest() for part in kept.values()}) == 3
    (file,) = tmp_path.glob("*.npz")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"listops-v3.*\.npz is damaged: remove it"):
        open_lists(sizes, SHORT, 2, tmp_path)


def test_baselines_are_learned_on_the_training_items():
    cues = np.array([1, 1, 1, 2, 2, 3])
    labels = np.array([5, 5, 4, 7, 7, 5])
    test_cues, test_labels = np.array([1, 2, 2, 3]), np.array([5, 7, 5, 4])
    assert baseline(labels, test_labels) == 0.5
    assert baseline(labels, test_labels, cues, test_cues) == 0.5
    assert baseline(labels, test_labels[:2], cues, test_cues[:2]) == 1.0
