"""Nyströmformer: counts, the published network on shared weights, padding, kappa and refusals."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from leaner_kernels.nn.nystrom import NystromAttention
from models.nystromformer import Nystromformer
from tests.error_budget import assert_computes, by_layer
from tests.models.parity import randomize

SMALL = {"vocab_size": 11, "sequence_length": 32, "embed_dim": 24, "heads": [2, 3], "head_dim": 8}
LENGTHS = (32, 20, 5)


def small(**kwargs) -> Nystromformer:
    return Nystromformer(**SMALL | {"num_landmarks": 8, "num_classes": 4} | kwargs)


def batch(pairs: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (3, 2) if pairs else (3,)
    tokens = torch.randint(11, (*shape, 32), generator=generator)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    return tokens, torch.stack([lengths, lengths.flip(0)], dim=1) if pairs else lengths


def pseudo_inverse(k2: Tensor, init: str) -> Tensor:
    columns = k2.sum(dim=-2)
    largest = columns.max() if init == "batch" else columns.max(dim=-1).values[..., None, None]
    z, one = k2.transpose(-1, -2) / largest, torch.eye(k2.shape[-1], dtype=k2.dtype)
    for _ in range(6):
        kz = k2 @ z
        z = z / 4 @ (13 * one - kz @ (15 * one - kz @ (7 * one - kz)))
    return z


def published_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, landmarks: int | None, init: str
) -> Tensor:
    """Heads (B, H, N, D) by the published rules; mask (B, N) is 1 where there is no padding."""
    dim, tokens = q.shape[-1], q.shape[-2]
    hidden = 1e9 * (1 - mask[:, None, None, :])
    if landmarks is None:
        return torch.softmax(q @ k.transpose(-1, -2) / dim**0.5 - hidden, dim=-1) @ v
    q, k = (t * mask[:, None, :, None] / dim**0.25 for t in (q, k))
    if landmarks == tokens:
        return torch.softmax(q @ k.transpose(-1, -2) - hidden, dim=-1) @ v
    segments = (*q.shape[:2], landmarks, tokens // landmarks, dim)
    q_land, k_land = (t.reshape(segments).mean(dim=-2) for t in (q, k))
    k1 = torch.softmax(q @ k_land.transpose(-1, -2), dim=-1)
    k2 = torch.softmax(q_land @ k_land.transpose(-1, -2), dim=-1)
    k3 = torch.softmax(q_land @ k.transpose(-1, -2) - hidden, dim=-1)
    z = pseudo_inverse(k2, init)
    return (k1 @ z) @ (k3 @ v)


def published_encoding(
    weights: dict[str, Tensor], tokens: Tensor, mask: Tensor, config: dict
) -> Tensor:
    """The pooled (B, D) of the published network, whose weights have our names."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[name + ".weight"], weights[name + ".bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[name + ".weight"], weights[name + ".bias"])

    x = weights["embed.weight"][tokens] + weights["pos_embed"][None]
    for layer, heads in enumerate(SMALL["heads"]):
        name = f"blocks.{layer}."
        q, k, v = (
            t.unflatten(-1, (heads, -1)).transpose(1, 2)
            for t in linear(name + "attn.qkv", norm(name + "norm1", x)).chunk(3, dim=-1)
        )
        landmarks = None if config["attention"] == "softmax" else config["num_landmarks"]
        a = published_attention(q, k, v, mask, landmarks, config["init"])
        if config["conv_kernel_size"]:
            kernel = weights[name + "attn.conv.weight"]
            padding = (config["conv_kernel_size"] // 2, 0)
            a = a + F.conv2d(v * mask[:, None, :, None], kernel, padding=padding, groups=heads)
        x = x + linear(name + "attn.proj", a.transpose(1, 2).flatten(2))
        hidden = F.gelu(linear(name + "mlp.fc1", norm(name + "norm2", x)))
        x = x + linear(name + "mlp.fc2", hidden)
    return (norm("norm", x) * mask[..., None]).mean(dim=1)


def published(weights: dict[str, Tensor], tokens: Tensor, mask: Tensor, config: dict) -> Tensor:
    """The logits (B, K) of the published network."""
    if config["pairs"]:
        first, second = (
            published_encoding(weights, tokens[:, i], mask[:, i], config) for i in (0, 1)
        )
        x = torch.cat([first, second, first * second, first - second], dim=-1)
    else:
        x = published_encoding(weights, tokens, mask, config)
    hidden = torch.relu(F.linear(x, weights["head.0.weight"], weights["head.0.bias"]))
    return F.linear(hidden, weights["head.2.weight"], weights["head.2.bias"])


def results(logits: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The logits, and the gradients of a random loss, layer by layer."""
    loss = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    gradients = torch.autograd.grad((logits * loss).sum(), list(weights.values()))
    return by_layer({"logits": logits, **dict(zip(weights, gradients))})


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {"init": "batch", "conv_kernel_size": 5},
        {"init": "matrix", "conv_kernel_size": 5},
        {"init": "batch"},
        {"init": "matrix"},
        {"num_landmarks": 32, "conv_kernel_size": 5},
        {"attention": "softmax"},
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_it_computes_what_the_published_network_does(config, pairs):
    config = {"attention": "nystrom", "num_landmarks": 8, "conv_kernel_size": None} | config
    config = {"init": "matrix", "pairs": pairs} | config
    torch.manual_seed(0)
    model = randomize(small(**config))
    tokens, lengths = batch(pairs)
    mask = (torch.arange(32) < lengths[..., None]).float()
    weights = dict(model.named_parameters())

    def reference(dtype):
        copies = {n: w.detach().to(dtype).requires_grad_() for n, w in weights.items()}
        return results(published(copies, tokens, mask.to(dtype), config), copies)

    assert_computes(results(model(tokens, lengths), weights), reference)


@pytest.mark.parametrize("landmarks", [8, 32])
def test_attention_equals_that_of_transformers(landmarks):
    pytest.importorskip("transformers", reason="compares with transformers' module")
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    torch.manual_seed(0)
    config = NystromformerConfig(
        hidden_size=24,
        num_attention_heads=3,
        num_landmarks=landmarks,
        segment_means_seq_len=32,
        conv_kernel_size=5,
        attention_probs_dropout_prob=0.0,
    )
    theirs = NystromformerSelfAttention(config)
    ours = NystromAttention(24, 3, "split", landmarks, conv_kernel_size=5, init="batch")
    state = {"conv.weight": theirs.conv.weight}
    for kind in ("weight", "bias"):
        parts = [getattr(getattr(theirs, p), kind) for p in ("query", "key", "value")]
        state[f"qkv.{kind}"] = torch.cat(parts)
    state |= {"proj.weight": torch.eye(24), "proj.bias": torch.zeros(24)}
    ours.load_state_dict(state)
    x = torch.randn(3, 32, 24)

    def reference(dtype):
        torch.set_default_dtype(dtype)  # in which transformers makes an identity matrix
        try:
            return {"out": theirs.to(dtype)(x.to(dtype))[0]}
        finally:
            torch.set_default_dtype(torch.float32)

    with torch.no_grad():
        assert_computes({"out": ours(x)}, reference)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("attention", ["nystrom", "softmax"])
def test_what_the_padding_holds_does_not_matter(attention, pairs):
    torch.manual_seed(0)
    conv = 5 if attention == "nystrom" else None
    model = small(attention=attention, conv_kernel_size=conv, pairs=pairs)
    tokens, lengths = batch(pairs)
    padding = torch.arange(32) >= lengths[..., None]
    other = torch.where(padding, (tokens + 1) % 11, tokens)
    assert torch.equal(model(tokens, lengths), model(other, lengths))
    assert not torch.equal(model(tokens), model(other))


@pytest.mark.parametrize("init", ["matrix", "batch"])
def test_samples_are_independent_unless_the_whole_batch_starts_the_inverse(init):
    torch.manual_seed(0)
    module = NystromAttention(24, 3, 8, num_landmarks=8, init=init).double()
    x = 4 * torch.randn(3, 32, 24).double()
    alone, together = module(x[:1]), module(x)[:1]
    assert (alone - together).abs().max() < 1e-12 or init == "batch"
    assert (alone - together).abs().max() > 1e-6 or init == "matrix"


@pytest.mark.parametrize("pairs", [1, 2])
def test_flops_per_sequence_is_the_sum_of_the_products(pairs):
    sizes = {"sequence_length": 64, "num_landmarks": 16, "heads": 3, "depth": 2}
    model = small(**sizes, conv_kernel_size=5, pairs=pairs == 2, device="meta")
    N, m, D, A, M, H = 64, 16, 24, 24, 48, 3
    landmarks = 8 * N * m * A + 4 * m * m * A
    inverse = 6 * 4 * 2 * m**3 * H
    per_layer = 8 * N * D * A + landmarks + inverse + 2 * 5 * N * A + 4 * N * D * M
    head = 2 * (4 if pairs == 2 else 1) * D * M + 2 * M * 4
    assert model.flops_per_sequence() == 2 * per_layer * pairs + head
    softmax = small(**sizes, attention="softmax", pairs=pairs == 2, device="meta")
    per_layer = 8 * N * D * A + 4 * N * N * A + 4 * N * D * M
    assert softmax.flops_per_sequence() == 2 * per_layer * pairs + head
    tokens = torch.empty(1, *([2] if pairs == 2 else []), 32, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.eval()(tokens)
    assert model.flops_per_sequence(32) == counter.get_total_flops()


@torch.no_grad()
def test_initial_values_are_the_published_ones():
    torch.manual_seed(0)
    model = Nystromformer(conv_kernel_size=35, vocab_size=512, head_dim=64)
    for table in (model.embed.weight, model.pos_embed):
        assert float(table.std()) == pytest.approx(0.02, rel=0.03)
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    assert len(layers) == 2 * 5 + 2
    for layer in layers:
        bound = layer.weight[0].numel() ** -0.5
        assert 0.9 * bound < float(layer.weight.abs().max()) <= bound
        if layer.bias is not None:
            assert 0.4 * bound < float(layer.bias.abs().max()) <= bound


@pytest.mark.parametrize(
    ("shape", "lengths", "pairs", "message"),
    [
        ((2, 33), None, False, r"N in \[1, 32\], got \(2, 33\)"),
        ((2, 2, 32), None, False, r"tokens must be \(B, N\) int64"),
        ((2, 32), None, True, r"tokens must be \(B, 2, N\) for pairs, got \(2, 32\)"),
        ((2, 2, 33), None, True, r"N in \[1, 32\], got \(4, 33\)"),
        ((2, 12), None, False, "num_landmarks must be less than the 12 tokens and divide them"),
        ((2, 32), (3,), False, r"key_lengths must be \(2,\), got \(3,\)"),
        ((2, 2, 32), (2,), True, r"key_lengths must be \(2, 2\), got \(2,\)"),
    ],
)
def test_bad_input_is_refused(shape, lengths, pairs, message):
    lengths = None if lengths is None else torch.ones(lengths, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        small(pairs=pairs)(torch.zeros(shape, dtype=torch.int64), lengths)
