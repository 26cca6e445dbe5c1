"""GPT: counts, the published network on shared weights, the cache, generation, and refusals."""

import copy
import math

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from models.gpt import GPT, KVCache, generate
from tests.error_budget import assert_computes, by_layer

V, N, D = 31, 12, 20
SMALL = {"vocab_size": V, "sequence_length": N, "embed_dim": D, "depth": 2, "heads": 3}


@torch.no_grad()
def gpt(**kwargs) -> GPT:
    """A small one in which every parameter has a part in the result."""
    torch.manual_seed(0)
    model = GPT(**SMALL | kwargs)
    for name, param in model.named_parameters():
        param.normal_(mean=float("norm" in name and "weight" in name), std=0.3)
    return model


def some_tokens(count: int = N, batch: int = 3) -> torch.Tensor:
    return torch.randint(V, (batch, count), generator=torch.Generator().manual_seed(1))


def published(state: dict[str, torch.Tensor], heads: list[int], tokens: torch.Tensor):
    """The repository's network in plain PyTorch, one head after the other: its logits."""
    x = state["token_embed.weight"][tokens] + state["pos_embed"][: tokens.shape[1]]
    dim = x.shape[-1]
    future = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)

    def norm(x, name):
        return F.layer_norm(x, (dim,), state[f"{name}.weight"], state[f"{name}.bias"])

    for layer, count in enumerate(heads):
        block = f"blocks.{layer}"
        y = norm(x, f"{block}.norm1")
        packed = state[f"{block}.attn.qkv.weight"].unflatten(0, (3, count, -1))
        results = []
        for wq, wk, wv in packed.unbind(1):
            q, k, v = y @ wq.T, y @ wk.T, y @ wv.T
            scores = q @ k.transpose(1, 2) * len(wq) ** -0.5
            results.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v)
        x = x + (
            torch.cat(results, -1) @ state[f"{block}.attn.proj.weight"].T
            + state[f"{block}.attn.proj.bias"]
        )
        y = norm(x, f"{block}.norm2")
        y = y @ state[f"{block}.mlp.fc1.weight"].T + state[f"{block}.mlp.fc1.bias"]
        y = y.clamp(min=0) @ state[f"{block}.mlp.fc2.weight"].T
        x = x + y + state[f"{block}.mlp.fc2.bias"]
    return norm(x, "norm") @ state["head.weight"].T + state["head.bias"]


def cast(state, dtype):
    return {name: value.to(dtype, copy=True) for name, value in state.items()}


@pytest.mark.parametrize(("heads", "head_dim"), [([3, 3], "split"), ([4, 4], "split"), ([3, 5], 8)])
@pytest.mark.parametrize("count", [1, 5, N])
def test_logits_are_those_of_the_published_network(heads, head_dim, count):
    model = gpt(heads=heads, head_dim=head_dim)
    tokens, state = some_tokens(count), model.state_dict()
    assert_computes(
        {"logits": model(tokens)},
        lambda dtype: {"logits": published(cast(state, dtype), heads, tokens)},
    )


def test_losses_and_gradients_are_those_of_the_published_network():
    model, tokens = gpt(), some_tokens()
    targets = some_tokens(2 * N)[:, N:].clone()
    targets[1, 4:] = -100
    losses = model(tokens, targets)
    assert losses.dtype == torch.float32
    assert losses[targets == -100].eq(0).all()
    losses.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}

    def reference(dtype):
        leaves = {n: w.requires_grad_() for n, w in cast(model.state_dict(), dtype).items()}
        logits = published(leaves, [3, 3], tokens)
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        losses.mean().backward()
        return by_layer({"losses": losses} | {name: leaf.grad for name, leaf in leaves.items()})

    assert_computes(by_layer({"losses": losses} | gradients), reference)


def test_a_token_does_not_see_those_after_it():
    model, tokens = gpt(), some_tokens()
    logits = model(tokens)
    for changed in range(1, N):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % V
        different = model(other) != logits
        assert not different[:, :changed].any()
        assert different[:, changed].any(dim=1).all()


@pytest.mark.parametrize("ends", [range(1, N + 1), (4, 5, N), (1, N), (N - 1, N), (N,)])
def test_the_cache_gives_the_logits_of_every_position(ends):
    model, tokens = gpt().eval(), some_tokens()
    cache, start, parts = KVCache(2, N), 0, []
    with torch.no_grad():
        for end in ends:
            parts.append(model(tokens[:, start:end], cache=cache))
            start = end
            assert cache.length == end
        assert_computes(
            {"logits": torch.cat(parts, dim=1)},
            lambda dtype: {"logits": copy.deepcopy(model).to(dtype)(tokens)},
        )


def continued_naively(model: GPT, tokens: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """The likeliest tokens, everything the model sees read again for each."""
    for _ in range(new_tokens):
        logits = model(tokens[:, -N:])[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens


@pytest.mark.parametrize("count", [1, 5, N, N + 3])
def test_the_likeliest_continuation_also_past_the_longest_sequence(count):
    model, tokens = gpt().eval(), some_tokens(count)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param *= 4 if "embed" in name else not name.endswith("bias")
    expected = continued_naively(model, tokens, N + 4)
    # Not one token over and over: a wrong window or position would show.
    assert len(expected[:, count:].unique()) > 4
    for _ in range(2):
        assert torch.equal(generate(model, tokens, N + 4, temperature=0), expected)
    assert torch.equal(generate(model, tokens, N + 4, top_k=1), expected)
    for least in (1e-4, 1e-45, 1e-300):
        assert torch.equal(generate(model, tokens, N + 4, temperature=least), expected)
    assert torch.equal(generate(model, tokens, 0), tokens)


def test_tokens_are_drawn_from_the_models_distribution():
    model, start = gpt().eval(), some_tokens(3, batch=1)

    def draws(**options):
        generator = torch.Generator().manual_seed(3)
        repeated = start.expand(4000, -1)
        return generate(model, repeated, 1, generator=generator, **options)[:, -1]

    logits = model(start)[0, -1].detach()
    for temperature, top_k in ((1.0, None), (2.0, None), (1.0, 3)):
        expected = logits / temperature
        if top_k is not None:
            expected[expected < expected.topk(top_k).values[-1]] = -math.inf
        expected = expected.softmax(0)
        tokens = draws(temperature=temperature, top_k=top_k)
        shares = tokens.bincount(minlength=V) / 4000
        assert (shares - expected).abs().max() < 0.035  # over four deviations of a share
        assert shares[expected == 0].eq(0).all()
    assert torch.equal(draws(), draws())


def test_generation_calls_the_model_once_a_token_and_reads_none_twice():
    model, read = gpt(), []
    model.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    generate(model, some_tokens(4), N)
    assert read == [4] + [1] * (N - 4) + [N] * 3


def test_a_sharded_model_generates_as_a_whole_one(tmp_path):
    tokens = some_tokens(4)
    expected = generate(gpt(), tokens, N, temperature=0)
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model = gpt()
        for part in (*model.blocks, model):
            fully_shard(part)
        assert torch.equal(generate(model, tokens, N, temperature=0), expected)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("training", [True, False])
def test_generation_is_without_dropout_and_leaves_the_mode_as_it_was(training):
    model, tokens = gpt(dropout=0.5).train(training), some_tokens(4)
    expected = continued_naively(gpt().eval(), tokens, 9)
    assert torch.equal(generate(model, tokens, 9, temperature=0), expected)
    assert model.training is training
    with pytest.raises(IndexError):
        generate(model, tokens + V, 1)
    assert model.training is training


@pytest.mark.parametrize("count", [None, 5])
def test_flops_per_sequence_is_the_sum_of_the_products(count):
    model = gpt(heads=[3, 5], head_dim=[6, 8])
    n = count or N
    layers = [8 * n * D * a + 4 * n * n * a + 4 * n * D * 4 * D for a in (18, 40)]
    assert model.flops_per_sequence(count) == sum(layers) + 2 * n * D * V


def test_tokens_that_do_not_fit_are_refused():
    model, cache = gpt().eval(), KVCache(2, N)
    for tokens in (some_tokens(N + 1), some_tokens()[0], some_tokens().int(), some_tokens()[:0]):
        with pytest.raises(ValueError, match=r"tokens must be \(B, N\) int64 with N in \[1, 12\]"):
            model(tokens)
    model(some_tokens(7), cache=cache)
    with pytest.raises(ValueError, match="tokens must be at most 5 after the 7 in the cache, got"):
        model(some_tokens(6), cache=cache)
    with pytest.raises(ValueError, match=r"targets must be \(3, 12\) int64, got \(3, 5\)"):
        model(some_tokens(), some_tokens(5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": torch.zeros(2, 0, dtype=torch.int64)}, r"tokens must be \(B, N\), got \(2, 0"),
        ({"new_tokens": -1}, "new_tokens must be at least 0, got -1"),
        ({"temperature": -0.5}, "temperature must be at least 0, got -0.5"),
        ({"top_k": 0}, r"top_k must be in \[1, 31\], got 0"),
        ({"top_k": 32}, r"top_k must be in \[1, 31\], got 32"),
    ],
)
def test_generation_refuses_what_it_cannot_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(gpt(), **{"tokens": some_tokens(), "new_tokens": 1} | arguments)
