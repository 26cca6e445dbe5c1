"""BERT: counts, the published network on shared weights, masks, padding, the classifier."""

import copy
import math

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from leaner_kernels import KappaMonitor
from models.bert import BERT, load_encoder, sinusoids
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
CLASSIFIER = {"pooler.weight", "pooler.bias", "head.weight", "head.bias"}
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


@pytest.mark.parametrize(
    ("depth", "heads", "head_dim", "params", "convention"),
    [
        (16, 12, "split", 119_589_889, "split"),
        (16, 12, 64, 119_589_889, "widen"),
        (10, 24, "split", 84_182_017, "split"),
        (10, 24, 64, 107_774_977, "widen"),
    ],
)
def test_rows_have_the_audited_parameters(depth, heads, head_dim, params, convention):
    model = BERT(depth=depth, heads=heads, head_dim=head_dim, device="meta")
    assert model.num_params() == params
    assert model.head_convention == convention


def test_every_layer_has_the_heads_asked_for():
    model = BERT(**SMALL | {"heads": [3, 5], "head_dim": ["split", 7]}, device="meta")
    assert [(b.attn.num_heads, b.attn.head_dim) for b in model.blocks] == [(3, 6), (5, 7)]
    assert model.head_convention == "mixed"
    assert list(model.attention_modules()) == ["blocks.0.attn", "blocks.1.attn"]


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


def test_a_masked_token_too_many_has_a_loss_that_shows(monkeypatch):
    # As on a GPU, whose targets are not read back.
    monkeypatch.setattr("models.bert.has_values", lambda _: False)
    model, tokens = bert(), some_tokens()
    targets = some_targets(tokens, 0.4)
    losses = model(tokens, targets=targets)
    masked = (targets != -100).view(-1).nonzero()[:, 0]
    expected = bert(most_masked=1.0)(tokens, targets=targets)
    assert losses.view(-1)[masked[9:]].isnan().all()
    torch.testing.assert_close(losses.view(-1)[masked[:9]], expected.view(-1)[masked[:9]])
    assert losses[targets == -100].eq(0).all()


def test_no_value_is_read_back_on_the_way_to_the_losses():
    # Reading one would raise here, and make the host wait on a GPU.
    with FakeTensorMode():
        model = BERT(**SMALL)
        tokens = torch.zeros(3, N, dtype=torch.int64)
        losses = model(tokens, targets=tokens)
        losses.sum().backward()
    assert losses.shape == (3, N)
    assert all(p.grad.shape == p.shape for p in model.parameters())


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


def test_a_classifier_takes_over_everything_but_its_head():
    trained, model = bert(), bert(seed=1, num_classes=4)
    before = copy.deepcopy(model.state_dict())
    unmatched = copy.deepcopy(model).load_state_dict(trained.state_dict(), strict=False)
    assert (set(unmatched.missing_keys), unmatched.unexpected_keys) == (CLASSIFIER, [])
    load_encoder(model, trained.state_dict())
    after = model.state_dict()
    for name in after:
        source = before if name in CLASSIFIER else trained.state_dict()
        assert torch.equal(after[name], source[name]), name
    # And from one task to another with another number of classes.
    other = bert(seed=2, num_classes=2)
    load_encoder(other, model.state_dict())
    assert torch.equal(other.token_embed.weight, trained.token_embed.weight)
    assert other.head.out_features == 2


def test_the_decoder_stays_the_embedding_in_a_sharded_model(tmp_path):
    trained, tokens = bert(seed=1), some_tokens()
    targets = some_targets(tokens)
    trained(tokens, targets=targets).sum().backward()
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model = BERT(**SMALL, device="meta")
        for part in (*model.blocks, model):
            fully_shard(part)
        model.to_empty(device="cpu")
        model.init_weights()
        load_encoder(model, trained.state_dict())
        model(tokens, targets=targets).sum().backward()
        for (name, p), expected in zip(model.named_parameters(), trained.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), expected.grad, msg=name)
        assert torch.equal(model.positions, trained.positions)
    finally:
        dist.destroy_process_group()


def test_weights_of_another_model_are_refused_and_change_nothing():
    model = bert(num_classes=4)
    before = copy.deepcopy(model.state_dict())
    weights = bert(seed=1, depth=1).state_dict()
    with pytest.raises(ValueError, match=r"missing \['blocks.1.attn.proj.weight', .* got \[\]"):
        load_encoder(model, weights)
    with pytest.raises(ValueError, match=r"missing \[\], got \['decoder.bias'\]"):
        load_encoder(model, bert(seed=1).state_dict() | {"decoder.bias": torch.zeros(V)})
    with pytest.raises(ValueError, match=r"token_embed.weight must be \(31, 20\), got \(40, 20\)"):
        load_encoder(model, bert(seed=1, vocab_size=40).state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_dropout_is_where_it_is_published_and_only_while_training():
    model, tokens = bert(dropout=0.25, num_classes=4), some_tokens()
    assert [block.attn.attn_drop for block in model.blocks] == [0.25] * 2
    drops = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    assert [drop.p for drop in drops] == [0.25] * 6
    assert torch.equal(model.eval()(tokens), bert(num_classes=4)(tokens))
    # Each of them alone, and none.
    model.train()
    places = [(drop, "p") for drop in drops] + [(b.attn, "attn_drop") for b in model.blocks]
    for chosen in (None, *places):
        for module, rate in places:
            setattr(module, rate, 0.25 if (module, rate) == chosen else 0.0)
        assert torch.equal(model(tokens), model(tokens)) == (chosen is None)


def test_a_few_steps_lower_the_loss_of_masked_tokens():
    torch.manual_seed(0)
    model, targets = BERT(**SMALL), some_targets(some_tokens())
    tokens = some_tokens().masked_fill(targets != -100, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(tokens, targets=targets).sum() / (targets != -100).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(V), abs=0.2)
    assert losses[-1] < 0.5


def test_a_monitor_gives_a_row_for_each_layer():
    model = bert(heads=[3, 5])
    monitor = KappaMonitor(model, every=1, samples=2)
    monitor.begin(0)
    model(some_tokens(), LENGTHS.clamp(min=9)).sum().backward()
    rows = monitor.end()
    assert [row["layer"] for row in rows] == ["blocks.0.attn", "blocks.1.attn"]
    assert [row["heads"] for row in rows] == [3, 5]
    assert all(row["resolved"] and row["kappa"] > 1 for row in rows)


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


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_positions_are_computed_in_float32_whatever_the_default_dtype_is(default):
    expected = sinusoids(N, D)
    torch.set_default_dtype(default)
    try:
        table, model = sinusoids(N, D), bert()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(table, expected)
    assert torch.equal(model.positions, expected.to(default))


@pytest.mark.parametrize("classes", [None, 4])
def test_a_model_built_on_the_meta_device_gets_the_same_weights_later(classes):
    model = BERT(**SMALL, num_classes=classes, device="meta")
    model.to_empty(device="cpu")
    model.init_weights(torch.Generator().manual_seed(3))
    torch.manual_seed(3)
    other = BERT(**SMALL, num_classes=classes)
    expected = other.state_dict()
    assert "positions" not in expected
    assert torch.equal(model.positions, other.positions)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_weights_begin_as_published():
    torch.manual_seed(0)
    model = BERT(embed_dim=96, vocab_size=300, depth=2, num_classes=3)
    for name, value in model.state_dict().items():
        if name == "pos_scale":
            assert value.item() == pytest.approx(96**-0.5)
        elif "norm" in name:
            assert value.eq(float("weight" in name)).all()
        elif name.endswith("bias"):
            assert value.eq(0).all()
        else:
            assert value.std() == pytest.approx(0.02, rel=0.05), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
        ({"embed_dim": -1}, "embed_dim must be at least 1, got -1"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"heads": [3]}, r"heads must be one value or 2 \(one per layer\), got 1"),
        ({"heads": 21}, "heads must be at most 20 to split embed_dim, got 21 in layer 0"),
        ({"mlp_ratio": 0.05}, "mlp_ratio must be an even number over 20, got 0.05"),
        ({"mlp_ratio": 1.05}, "mlp_ratio must be an even number over 20, got 1.05"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
        ({"most_masked": 0.0}, r"most_masked must be in \(0, 1\], got 0.0"),
    ],
)
def test_a_bad_size_is_named_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        BERT(**SMALL | arguments, device="meta")
    assert "\n" not in str(error.value)


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
