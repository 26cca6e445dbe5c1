"""train/bert.py: what is hidden from the model, how long it trains, and both its stages."""

import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from models.bert import BERT
from tests.train.forked import on_two_ranks
from tests.train.launch import rows, whole_tensors
from train import bert
from train.checkpoint.weights import open_weights
from train.config import flags
from train.data.masking import IGNORED, Masked
from train.loop.schedule import budget_of, learning_rate

SPECIALS = {"[PAD]": 0, "[SEP]": 1, "[MASK]": 2}
QUICK = ["--context", 32, "--workers", 0, "--kappa-every", 0, "--eval-every", 0]
# A model of one layer and two heads, and batches that grow from 8 to 32.
PRETRAIN = [*QUICK, "--recipe", "pydoc", "--heads", 2, "--depth", 1, "--head-dim", 8]
PRETRAIN += ["--batch-size", 32, "--accum", 4, "--batch-size-warmup", 0.6]


class Sequences:
    """500 sequences of 128 tokens, some of them special."""

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 1000, (500, 128), generator=draw)
        self.tokens[:, ::9] = SPECIALS["[SEP]"]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[torch.Tensor]:
        return (self.tokens[[index for _, index in keys]],)


def masked(rate: float = 0.25, seed: int = 0) -> Masked:
    return Masked(Sequences(), vocab_size=1000, specials=SPECIALS, rate=rate, seed=seed)


def train_here(*args: object) -> None:
    """Run the script in this process."""
    bert.main([str(arg) for arg in args])


def settings_of(*args: object) -> bert.BertSettings:
    return flags.parse("bert.py", "", [str(arg) for arg in args], bert.BertSettings)


def test_a_quarter_of_the_tokens_is_hidden_four_fifths_of_them_behind_the_mask():
    data = masked()
    tokens, targets = data.__getitems__([(0, index) for index in range(500)])
    original = data.sequences.tokens
    chosen = targets != IGNORED
    assert (chosen.sum(dim=1) == 32).all()
    assert torch.equal(targets[chosen], original[chosen])
    assert torch.equal(tokens[~chosen], original[~chosen])
    assert not torch.isin(targets[chosen], torch.tensor(list(SPECIALS.values()))).any()
    # No place is preferred among those that are not special.
    places = chosen.sum(dim=0)[(original != SPECIALS["[SEP]"]).all(dim=0)]
    assert places.min() > 0.6 * places.float().mean()
    kinds = tokens[chosen]
    hidden, kept = kinds == SPECIALS["[MASK]"], kinds == original[chosen]
    shares = [kind.double().mean().item() for kind in (hidden, kept, ~hidden & ~kept)]
    # Four deviations of a share of 16,000 tokens.
    expected = [0.8, 0.1 + 0.1 / 997, 0.1 - 0.1 / 997]
    for share, wanted in zip(shares, expected):
        assert share == pytest.approx(wanted, abs=4 * math.sqrt(wanted * (1 - wanted) / 16_000))
    others = kinds[~hidden & ~kept]
    assert not torch.isin(others, torch.tensor(list(SPECIALS.values()))).any()
    assert len(others.unique()) > 700


def test_what_is_hidden_depends_on_seed_epoch_and_index_alone():
    keys = [(3, 7), (3, 8), (4, 7)]
    tokens, targets = masked(seed=1).__getitems__(keys)
    for row, key in enumerate(keys):
        alone = masked(seed=1).__getitems__([key])
        assert torch.equal(alone[0][0], tokens[row])
        assert torch.equal(alone[1][0], targets[row])
    assert not torch.equal(targets[0], targets[2])
    assert not torch.equal(targets, masked(seed=2).__getitems__(keys)[1])


def test_cramming_is_its_papers_recipe_and_lasts_as_many_tokens_as_it_is_given(monkeypatch):
    ours = bert._filled(settings_of("--recipe", "cramming", "--data", "some.txt", "--tokens", 4e8))
    assert (ours.recipe, ours.model, ours.tokenizer) == ("cramming", "crammed_bert", "wordpiece")
    assert (ours.lr, ours.betas, ours.eps, ours.weight_decay) == (1e-3, (0.9, 0.98), 1e-12, 0.01)
    assert (ours.clip_grad, ours.mask_rate, ours.dropout) == (0.5, 0.25, 0.0)
    budget = budget_of(ours, steps_per_epoch=10**6, tokens_per_item=ours.context)
    tokens = [passes * 128 * ours.context for passes in map(budget.passes_of, range(budget.steps))]
    assert (tokens[0], tokens[-1]) == (128 * 128, 8192 * 128)
    assert sum(tokens) == pytest.approx(4e8, abs=8192 * 128)
    # The batch grows linearly in the tokens seen, and is whole after 60% of them.
    for step, before in enumerate(budget.passes_before[:-1]):
        share = min(1.0, before / (0.6 * budget.passes_before[-1]))
        assert budget.passes_of(step) == pytest.approx(64 * share, abs=1.01)
    # A triangle from a quarter of the rate, over the top at 75% of the tokens, down to nothing.
    rate = [
        learning_rate(
            budget.position(step),
            budget.steps,
            peak=ours.lr,
            warmup=ours.warmup,
            start=ours.warmup_lr,
            schedule=ours.schedule,
        )
        for step in range(budget.steps)
    ]
    mean = sum(r * t for r, t in zip(rate, tokens)) / sum(tokens)
    assert mean == pytest.approx(1e-3 * (0.75 * 0.625 + 0.25 * 0.5), rel=0.01)
    assert rate[0] == pytest.approx(2.5e-4, rel=0.02)
    assert max(rate) == pytest.approx(1e-3, rel=0.02)
    assert budget.position(rate.index(max(rate))) / budget.steps == pytest.approx(0.75, abs=0.01)
    launched = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert bert._filled(settings_of("--recipe", "cramming", "--data", "some.txt")).accum == 8
    assert (
        bert._filled(
            settings_of("--recipe", "cramming", "--data", "some.txt", "--steps", 5)
        ).batch_size_warmup
        == 0.0
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of one letter each, which so follows from the others that can be seen."""
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text("\n\n".join("abcdbadc"[place % 8] * 100 for place in range(100)))
    return path


@pytest.fixture(scope="module")
def pretrained(text, tmp_path_factory) -> Path:
    """The folder of a run on that text, whose batches grow."""
    out = tmp_path_factory.mktemp("pretrained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(out / "cache"))
        train_here(*PRETRAIN, "--data", text, "--epochs", 6, "--lr", 3e-3, "--out", out)
    return out


def test_a_run_that_stopped_while_its_batch_grew_goes_on_with_the_same_batches(
    text, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = [*PRETRAIN, "--data", text, "--tokens", 6 * 32 * 32, "--ckpt-every", 4]
    run += ["--out", tmp_path, "--deterministic", "--resume", "auto"]
    train_here(*run)
    metrics = rows(tmp_path / "metrics.jsonl")
    saved = sorted((tmp_path / "checkpoints").glob("step-*"))
    whole = whole_tensors(saved[-1])["model"]
    # After eight steps the batch is still growing.
    assert [path.name for path in saved] == ["step-00000004", "step-00000008", "step-00000012"]
    assert [row["step"] for row in metrics] == list(range(12))
    shutil.rmtree(saved[-1])
    train_here(*run)
    assert rows(tmp_path / "metrics.jsonl") == metrics
    resumed = whole_tensors(sorted((tmp_path / "checkpoints").glob("step-*"))[-1])["model"]
    for name, value in resumed.items():
        assert torch.equal(value, whole[name]), name


def test_weights_of_another_model_are_refused_by_name(pretrained):
    weights = open_weights(pretrained, "weights")
    sizes = {"vocab_size": 261, "sequence_length": 32, "embed_dim": 128, "heads": 2, "head_dim": 8}
    for own, difference in (
        ({"depth": 2}, r"blocks\.1\.\S+ is absent, in its model float32"),
        (
            {"depth": 1, "mlp_ratio": 2.0},
            r"float32 \(512, 128\), in its model float32 \(256, 128\)",
        ),
        ({"depth": 1, "num_classes": 3}, r"head\.bias is absent, in its model float32 \(3,\)"),
    ):
        with pytest.raises(ValueError, match=difference):
            weights.load(BERT(**sizes | own))


def test_the_scores_are_means_over_masked_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 8, 50, generator=generator)
    tokens = torch.randint(0, 50, (4, 8), generator=generator)
    targets = torch.full_like(tokens, IGNORED)
    # Three hidden in one, one in another, none in two.
    targets[0, :3], targets[2, 5] = tokens[0, :3], tokens[2, 5]
    values = bert._score_masked(lambda _: logits, (tokens, targets))
    assert all(value.shape == (4,) for value in values.values())
    means = bert._over_masked({name: float(v.double().mean()) for name, v in values.items()})
    hidden = targets != IGNORED
    expected = torch.nn.functional.cross_entropy(logits[hidden], targets[hidden])
    right = (logits[hidden].argmax(dim=1) == targets[hidden]).float().mean()
    assert means == pytest.approx({"loss": float(expected), "accuracy": float(right)}, rel=1e-5)


UNEVEN = ["--recipe", "pydoc", "--heads", 2, "--depth", 1, "--head-dim", 8, *QUICK]
UNEVEN += ["--batch-size", 16, "--steps", 3, "--tokenizer", "bytes", "--ckpt-every", 0]


def uneven(folder: Path) -> Path:
    """Write text of which much can never be masked."""
    path = folder / "uneven.txt"
    path.write_text(
        "\n\n".join(f"The kite {i} flew. " + "[PAD]" * (61 * (i % 3)) for i in range(400))
    )
    return path


def work(rank: int, folder: Path) -> None:
    """Take the steps on two ranks."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    train_here(*UNEVEN, "--accum", 2, "--data", uneven(folder), "--out", folder / "two")


@pytest.mark.slow
def test_every_masked_token_counts_alike_in_any_micro_batch_and_on_any_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for accum in (1, 4, 16):
        args = ["--accum", accum, "--data", uneven(tmp_path), "--out", tmp_path / str(accum)]
        train_here(*UNEVEN, *args)
    on_two_ranks("tests.train.test_bert", tmp_path)
    one, *others = (rows(tmp_path / name / "metrics.jsonl") for name in ("1", "4", "16", "two"))
    for other in others:
        for name in ("loss", "grad_norm"):
            curves = [[row[name] for row in curve] for curve in (other, one)]
            assert curves[0] == pytest.approx(curves[1], rel=1e-4)
