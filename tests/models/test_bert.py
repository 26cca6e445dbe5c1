"""BERT: counts, the published network on shared weights, masks, padding, the classifier."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from models.bert import BERT, sinusoids
from tests.error_budget import assert_computes, by_layer

V, N, D, M = 31, 12, 20, 48
SMALL = {
    "vocab_size": V,
    "sequence_length": N,
    "embed_dim": D,
    "depth": 2,
    "heads": 3,
    "mlp_ratio": M / D,
}
LENGTHS = torch.tensor([N, 7, 1], dtype=torch.int32)


@torch.no_grad()
def bert(seed: int = 0, **kwargs) -> BERT:
    """A small one in which every parameter has a part in the result."""
    torch.manual_seed(seed)
    model = BERT(**SMALL | kwargs)
    for name, param in model.named_parameters():
        param.normal_(mean=float("norm" in name and "weight" in name), std=0.3)
    return model


def some_tokens(count: int = N, batch: int = 3) -> torch.Tensor:
    return torch.randint(V, (batch, count), generator=torch.Generator().manual_seed(1))


def some_targets(tokens: torch.Tensor, share: float = 0.25) -> torch.Tensor:
    """``share`` of each sequence's tokens, rounded up; the others are not masked."""
    order = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)).argsort(1)
    return tokens.where(order < math.ceil(share * tokens.shape[1]), -100)


def published(state: dict[str, torch.Tensor], heads: list[int], tokens, lengths=None):
    """Cramming's network in plain PyTorch: what leaves its last norm."""

    def norm(x, name):
        return F.layer_norm(x, (D,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-12)

    x = state["token_embed.weight"][tokens]
    for position in range(tokens.shape[1]):
        for pair in range(D // 2):
            angle = position / 10000 ** (2 * pair / D)
            x[:, position, 2 * pair] += state["pos_scale"][0] * math.sin(angle)
            x[:, position, 2 * pair + 1] += state["pos_scale"][0] * math.cos(angle)
    x = norm(x, "embed_norm")
    for layer, count in enumerate(heads):
        block = f"blocks.{layer}"
        packed = norm(x, f"{block}.norm1") @ state[f"{block}.attn.qkv.weight"].T
        q, k, v = packed.unflatten(-1, (3, count, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if lengths is not None:
            padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
            scores = scores.masked_fill(padding[:, None, None], -math.inf)
        a = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + a @ state[f"{block}.attn.proj.weight"].T
        both = norm(x, f"{block}.norm2") @ state[f"{block}.mlp.fc1.weight"].T
        gated = both[..., : M // 2] * F.gelu(both[..., M // 2 :])
        x = x + gated @ state[f"{block}.mlp.fc2.weight"].T
    return norm(x, "norm")


def decoded(state, heads, tokens, lengths=None):
    return published(state, heads, tokens, lengths) @ state["token_embed.weight"].T


def classified(state, heads, tokens, lengths=None):
    first = published(state, heads, tokens, lengths)[:, 0]
    pooled = torch.tanh(first @ state["pooler.weight"].T + state["pooler.bias"])
    return pooled @ state["head.weight"].T + state["head.bias"]


def cast(state, dtype):
    return {name: value.to(dtype, copy=True) for name, value in state.items()}


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize(("heads", "head_dim"), [([3, 3], "split"), ([3, 5], 8)])
@pytest.mark.parametrize(("classes", "oracle"), [(None, decoded), (4, classified)])
def test_logits_are_those_of_the_published_network(heads, head_dim, lengths, classes, oracle):
    model = bert(heads=heads, head_dim=head_dim, num_classes=classes)
    tokens, state = some_tokens(), model.state_dict()
    assert_computes(
        {"logits": model(tokens, lengths)},
        lambda dtype: {"logits": oracle(cast(state, dtype), heads, tokens, lengths)},
    )


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_losses_and_gradients_of_masked_tokens_are_those_of_all_logits(lengths):
    model, tokens = bert(), some_tokens()
    targets = some_targets(tokens)
    targets[0] = -100  # fewer than there may be
    losses = model(tokens, lengths, targets)
    assert losses.dtype == torch.float32
    assert losses[targets == -100].eq(0).all()
    assert losses[targets != -100].gt(0).all()
    losses.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}

    def reference(dtype):
        leaves = {n: w.requires_grad_() for n, w in cast(model.state_dict(), dtype).items()}
        logits = decoded(leaves, [3, 3], tokens, lengths)
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        losses.sum().backward()
        return by_layer({"losses": losses} | {name: leaf.grad for name, leaf in leaves.items()})

    assert_computes(by_layer({"losses": losses} | gradients), reference)


def test_only_masked_tokens_get_logits():
    model = bert().to("meta")
    tokens = some_tokens().to("meta")
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets=tokens)
    # The vocabulary is filled up to 64.
    spared = 2 * D * (3 * N * V - 3 * N // 4 * 64)
    assert 3 * model.flops_per_sequence() - counter.get_total_flops() == spared


@pytest.mark.parametrize(("share", "most"), [(0.25, 9), (0.5, 18), (0.26, 12), (1.0, 36)])
def test_a_cpu_refuses_more_masked_tokens_than_there_may_be(share, most):
    model, tokens = bert(most_masked=share), some_tokens()
    targets = torch.full_like(tokens, -100)
    targets.view(-1)[:most] = 1
    assert model(tokens, targets=targets).count_nonzero() == most
    if most < targets.numel():
        targets.view(-1)[most] = 1
        with pytest.raises(ValueError, match=f"at most {most} of 36 tokens, got {most + 1} "):
            model(tokens, targets=targets)


@pytest.mark.parametrize("classes", [None, 4])
def test_padding_changes_nothing_for_the_other_tokens(classes):
    model, tokens = bert(num_classes=classes), some_tokens()
    padding = torch.arange(N) >= LENGTHS[:, None]
    other = (tokens + 5) % V
    other = other.where(padding, tokens)
    kept = slice(None) if classes else ~padding
    logits = model(tokens, LENGTHS)
    assert torch.equal(model(other, LENGTHS)[kept], logits[kept])
    assert not torch.equal(model(other)[kept], model(tokens)[kept])
    for row, length in enumerate(LENGTHS.tolist()):
        alone = model(tokens[row : row + 1, :length])[0]
        padded = logits[row] if classes else logits[row, :length]
        torch.testing.assert_close(padded, alone)


@pytest.mark.parametrize("count", [None, 5])
@pytest.mark.parametrize("classes", [None, 4])
def test_flops_per_sequence_is_the_sum_of_the_products(count, classes):
    model = bert(heads=[3, 5], head_dim=[6, 8], num_classes=classes)
    n = count or N
    layers = [8 * n * D * a + 4 * n * n * a + 3 * n * D * M for a in (18, 40)]
    ends = 2 * n * D * V if classes is None else 2 * 1024 * (D + classes)
    assert model.flops_per_sequence(count) == sum(layers) + ends


@pytest.mark.parametrize("dim", [20, 7])
def test_positions_are_sines_and_cosines(dim):
    table = sinusoids(9, dim)
    assert table.shape == (9, dim)
    for position in range(9):
        for column in range(dim):
            angle = position / 10000 ** ((column - column % 2) / dim)
            wave = math.cos if column % 2 else math.sin
            assert table[position, column] == pytest.approx(wave(angle), abs=1e-6)


def test_what_does_not_fit_is_refused():
    model = bert()
    for tokens in (some_tokens(N + 1), some_tokens()[0], some_tokens().int(), some_tokens()[:0]):
        with pytest.raises(ValueError, match=r"tokens must be \(B, N\) int64 with N in \[1, 12\]"):
            model(tokens)
    with pytest.raises(ValueError, match=r"targets must be \(3, 12\) int64, got \(3, 5\)"):
        model(some_tokens(), targets=some_tokens(5))
    with pytest.raises(ValueError, match="targets must be None for a model with num_classes"):
        bert(num_classes=4)(some_tokens(), targets=some_tokens())
    with pytest.raises(ValueError, match=r"key_lengths must be in \[1, 12\], got 13"):
        model(some_tokens(), LENGTHS + 1)
