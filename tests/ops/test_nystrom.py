"""Nyström attention: error budget on every backend that runs it, truths, padding, errors."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from leaner_kernels import condition_number
from leaner_kernels.ops.nystrom import (
    nystrom_attention,
    nystrom_attention_with_stats,
    reference,
)
from tests.backends import BFLOAT16, CPU, FLOAT16, GPU, Target, executed, on_cpu, on_gpu
from tests.gpu.draws import randn
from tests.operators import (
    NYSTROM,
    Inputs,
    amid_nan,
    check,
    make_inputs,
    reference_results,
    run,
    run_function,
    sample_of,
)

REPEATS = 20  # on a GPU, of a test that the same call gives the same bits


class NystromTestCase(NamedTuple):
    """Sizes as in the kernels; the rest is what the operator takes."""

    name: str
    batch: int
    tokens: int
    heads: int
    dim: int
    landmarks: int
    lengths: tuple[int, ...] | None = None
    scale: float = 0.3
    iterations: int = 6
    whole_batch: bool = False

    def make(self, dtype: torch.dtype, device: str) -> Inputs:
        """Return its tensors, views of one packed projection whose padding is NaN too."""
        numbers = torch.randn(self.batch, self.tokens, 3, self.heads, self.dim)
        numbers *= torch.linspace(0.5, 2, self.dim)
        # Neighbours are alike, as tokens are: the means of noise are nearly zero.
        for axis in (0, 1):
            numbers[:, :, axis] += numbers[:, :, axis].cumsum(dim=1) / self.tokens**0.5
        lengths = None
        if self.lengths is not None:
            lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
            for entry, length in zip(numbers, self.lengths):
                entry[length:] = float("nan")
        qkv = amid_nan(numbers, (0, 2, 0, 1, 5), dtype, device).permute(2, 0, 3, 1, 4)
        grad = torch.randn(self.batch, self.tokens, self.heads, self.dim).to(device, dtype)
        params = self.landmarks, self.scale, self.iterations, self.whole_batch
        return Inputs(NYSTROM, (*qkv, lengths), params, grad, sample_of(self.batch, device))


CASES = (
    NystromTestCase("two tokens, one landmark", 1, 2, 1, 1, 1, iterations=1),
    NystromTestCase("segments of two", 1, 32, 1, 32, 16),
    NystromTestCase("head_dim 20, padded tiles", 1, 96, 1, 20, 24, (50,), iterations=3),
    NystromTestCase("one token of a sequence", 2, 30, 1, 8, 10, (1, 30), iterations=2),
    NystromTestCase("padding inside a segment", 1, 160, 1, 16, 4, (139,), iterations=2),
    NystromTestCase("whole batch", 2, 48, 2, 16, 8, scale=-0.4, whole_batch=True),
    NystromTestCase(
        "whole batch, padded", 2, 36, 1, 12, 12, (15, 35), iterations=1, whole_batch=True
    ),
)
CPU_CASES = (
    NystromTestCase("head_dim 128", 1, 96, 1, 128, 24, (77,), scale=0.1),
    NystromTestCase("256 landmarks", 1, 512, 1, 8, 256),
)
# The Long-Range Arena's rows, and the ends of the range.
GPU_CASES = tuple(
    NystromTestCase(
        f"{tokens}, {landmarks} landmarks, {whole_batch}",
        2,
        tokens,
        2,
        dim,
        landmarks,
        lengths=(tokens, tokens * 2 // 3),
        scale=0.1,
        whole_batch=whole_batch,
    )
    for tokens, landmarks, dim in (
        (1024, 64, 32),
        (2048, 32, 32),
        (4096, 128, 32),
        (1024, 256, 64),
        (1056, 48, 40),
    )
    for whole_batch in (False, True)
)


# --- The error budget -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "target"),
    [
        *on_cpu(CASES),
        *on_cpu(CPU_CASES, [torch.float32]),
        *executed(CASES, set()),
        *on_gpu(CASES + GPU_CASES),
    ],
)
def test_results_stay_within_the_error_budget(case: NystromTestCase, target: Target) -> None:
    """The output, every gradient, every statistic and the captured heads."""
    results, inputs = run(case, target), make_inputs(case, target.dtype)
    check(inputs, results, *([run_function(inputs)] if target.backend == CPU else []))


@pytest.mark.parametrize(("case", "target"), on_gpu(GPU_CASES, [BFLOAT16]))
def test_the_same_call_gives_the_same_bits(case: NystromTestCase, target: Target) -> None:
    first = run(case, target)
    for _ in range(REPEATS):
        torch.testing.assert_close(run(case, target), first, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("case", "target"),
    on_gpu([NystromTestCase("kappa", 1, 64, 2, 16, 32, scale=0.014)], [BFLOAT16, FLOAT16]),
)
def test_the_capture_shows_condition_numbers_that_half_precision_hides(
    case: NystromTestCase, target: Target
) -> None:
    heads = reference_results(make_inputs(case, target.dtype), torch.float64)["heads"]
    wanted = condition_number(heads).kappa
    assert wanted.min().item() > 1e5
    captured = condition_number(run(case, target)["heads"]).kappa.cpu().double()
    torch.testing.assert_close(captured, wanted, rtol=0.01, atol=0)


@pytest.mark.backends(GPU)
def test_a_second_call_has_lengths_of_its_own() -> None:
    qkv = [randn(4, 4, 96, 32) for _ in range(3)]
    lengths = torch.tensor([96, 40, 96, 1], dtype=torch.int32)
    for key_lengths in (None, lengths, lengths.flip(0)):
        there = None if key_lengths is None else key_lengths.cuda()
        exact = [t.cpu().double() for t in qkv]
        expected = nystrom_attention(*exact, 12, key_lengths=key_lengths)
        actual = nystrom_attention(*qkv, 12, key_lengths=there).cpu().double()
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.backends(GPU)
def test_autocast_rounds_the_inputs_alone() -> None:
    qkv = [randn(4, 4, 96, 32) for _ in range(3)]
    with torch.autocast("cuda", torch.bfloat16):
        found = nystrom_attention(*qkv, 12)
    assert torch.equal(found, nystrom_attention(*(t.bfloat16() for t in qkv), 12))


# --- Truths that need no second implementation ----------------------------------------------------


INITS = "matrix", "batch"
LENGTHS = torch.tensor([7, 12], dtype=torch.int32)


def tensors(
    *shape: int, dtype: torch.dtype = torch.float64, requires_grad: bool = False
) -> list[Tensor]:
    """Return query, key and value (B, H, N, D), views of one packed projection."""
    torch.manual_seed(0)
    batch, heads, tokens, dim = shape
    packed = torch.randn(batch, tokens, 3, heads, dim, dtype=dtype)
    parts = packed.permute(2, 0, 3, 1, 4).unbind(0)
    return [t.detach().requires_grad_(requires_grad) for t in parts]


def call(measured: bool, *given, **options) -> Tensor:
    if measured:
        return nystrom_attention_with_stats(*given, **options).out
    return nystrom_attention(*given, **options)


def test_enough_iterations_give_the_pseudo_inverse() -> None:
    """What the method is named after: K1 K2^+ K3 V."""
    query, key, value = tensors(2, 2, 24, 6)
    query, key = 3 * query, 3 * key
    q_land, k_land = (t.unflatten(2, (4, 6)).mean(dim=3) for t in (query, key))
    k1, k2, k3 = (
        torch.softmax(x @ y.mT / math.sqrt(6), dim=-1)
        for x, y in ((query, k_land), (q_land, k_land), (q_land, key))
    )
    out = nystrom_attention(query, key, value, 4, iterations=32)
    torch.testing.assert_close(out, k1 @ torch.linalg.pinv(k2) @ k3 @ value)


def test_one_token_a_segment_that_repeats_is_softmax_attention() -> None:
    """Tokens that are their own landmarks, twice each: nothing is approximated."""
    query, key, value = (t.repeat_interleave(2, dim=2) for t in tensors(2, 2, 5, 6))
    out = nystrom_attention(3 * query, 3 * key, value, 5, iterations=32)
    expected = nn.functional.scaled_dot_product_attention(3 * query, 3 * key, value)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("init", INITS)
def test_only_the_whole_batch_couples_samples(init: str) -> None:
    given = tensors(2, 2, 12, 5)
    both = nystrom_attention(*given, 4, init=init, iterations=2)
    apart = [
        nystrom_attention(*(t[b : b + 1] for t in given), 4, init=init, iterations=2)
        for b in (0, 1)
    ]
    assert torch.allclose(both, torch.cat(apart)) == (init == "matrix")


def test_padded_tokens_change_nothing_but_their_number() -> None:
    """Not even nan there does; that they are there counts, in the means, as published."""
    given = tensors(2, 2, 12, 5, requires_grad=True)
    options = {"key_lengths": LENGTHS, "iterations": 3}
    out = nystrom_attention(*given, 4, **options)
    grads = torch.autograd.grad(out.square().sum(), given)
    assert all((g[0, :, 7:] == 0).all() and g[0, :, :7].abs().min() > 0 for g in grads)
    spoiled = [t.detach().clone().requires_grad_() for t in given]
    for t in spoiled:
        t.data[0, :, 7:] = float("nan")
    for measured in (False, True):
        other = call(measured, *spoiled, 4, **options)
        torch.testing.assert_close(other, out)
        torch.testing.assert_close(torch.autograd.grad(other.square().sum(), spoiled), grads)
    # Every padded query is zero: its row of the first softmax is uniform.
    stats = nystrom_attention_with_stats(*given, 4, **options)
    torch.testing.assert_close(stats.lse[0, :, 7:], torch.full((2, 5), math.log(4)))


# --- The published layer --------------------------------------------------------------------------


def published(module: nn.Module, x: Tensor, lengths: Tensor | None) -> Tensor:
    """Run Hugging Face's layer on (B, N, D), with padding as the authors' code treats it.

    Their layer multiplies queries and keys by the mask; Hugging Face's relies on inputs and biases.
    """
    mask = None
    if lengths is not None:
        past = torch.arange(x.shape[1]) >= lengths[:, None]
        x = x.masked_fill(past[..., None], 0)
        mask = torch.zeros(past.shape, dtype=x.dtype).masked_fill(past, -1e9)[:, None, None]
    return module(x, mask)[0]


@pytest.mark.parametrize("lengths", [None, (40, 64, 1)], ids=["whole", "padded"])
@pytest.mark.parametrize("init", INITS)
def test_equals_the_published_layer_on_its_weights(init: str, lengths: tuple | None) -> None:
    """Output, and gradients of input and weights, in float64."""
    theirs = pytest.importorskip("transformers.models.nystromformer.modeling_nystromformer")
    config = pytest.importorskip("transformers").NystromformerConfig(
        hidden_size=24,
        num_attention_heads=3,
        num_landmarks=8,
        segment_means_seq_len=64,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    module = theirs.NystromformerSelfAttention(config).double()
    module.conv_kernel_size = None
    module.init_option = {"matrix": "exact", "batch": "original"}[init]
    weights = [layer.weight for layer in (module.query, module.key, module.value)]
    for layer in (module.query, module.key, module.value):
        nn.init.zeros_(layer.bias)
        layer.weight.data *= 4
    x = torch.randn(3, 64, 24, dtype=torch.float64, requires_grad=True)
    key_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)

    qkv = [(x @ w.T).unflatten(2, (3, 8)).transpose(1, 2) for w in weights]
    ours = nystrom_attention(*qkv, 8, key_lengths=key_lengths, init=init)
    ours, expected = ours.transpose(1, 2).flatten(2), published(module, x, key_lengths)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(ours)
    found, wanted = (
        torch.autograd.grad(out, [x, *weights], grad, retain_graph=True) for out in (ours, expected)
    )
    torch.testing.assert_close(found, wanted)


def test_the_written_out_derivative_of_the_inverse_shares_a_tie() -> None:
    """As PyTorch's maximum does: every column of a uniform matrix has the largest sum."""
    for whole_batch in (False, True):
        k2 = torch.full((2, 1, 4, 4), 0.25, dtype=torch.float64, requires_grad=True)
        found = reference.iterates(k2, 2, whole_batch)
        grad = torch.randn(2, 1, 4, 4, dtype=torch.float64)
        (expected,) = torch.autograd.grad(found[-1], k2, grad)
        with torch.no_grad():
            actual = reference.iterates_backward(grad, k2, found, whole_batch)
        torch.testing.assert_close(actual, expected)


# --- What is refused ------------------------------------------------------------------------------


X = torch.randn(2, 3, 12, 8)
BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "three axes": (
        lambda: nystrom_attention(X, X[0], X, 4),
        r"key must be \(B, H, N, D\), got \(3, 12, 8\)",
    ),
    "other tokens": (
        lambda: nystrom_attention(X, X, X[:, :, :8], 4),
        r"value must be \(2, 3, 12, 8\) torch.float32 on cpu as query is, got \(2, 3, 8, 8\)",
    ),
    "other dtype": (
        lambda: nystrom_attention(X, X.double(), X, 4),
        r"key must be .* torch.float32 on cpu as query is, got \(2, 3, 12, 8\) torch.float64",
    ),
    "no landmarks": (
        lambda: nystrom_attention(X, X, X, 0),
        r"num_landmarks must be a whole number of at least 1, got 0",
    ),
    "a landmark for each token": (
        lambda: nystrom_attention(X, X, X, 12),
        "num_landmarks must be less than the 12 tokens and divide them, got 12",
    ),
    "unequal segments": (
        lambda: nystrom_attention(X, X, X, 5),
        "num_landmarks must be less than the 12 tokens and divide them, got 5",
    ),
    "no iterations": (
        lambda: nystrom_attention(X, X, X, 4, iterations=0),
        r"iterations must be a whole number of at least 1, got 0",
    ),
    "another start": (
        lambda: nystrom_attention(X, X, X, 4, init="exact"),
        "init must be one of matrix, batch, got 'exact'",
    ),
    "a length of zero": (
        lambda: nystrom_attention(X, X, X, 4, key_lengths=LENGTHS - 7),
        r"key_lengths must be in \[1, 12\], got 0",
    ),
    "sample past the batch": (
        lambda: nystrom_attention_with_stats(
            X, X, X, 4, sample=torch.tensor([2], dtype=torch.int32)
        ),
        "sample must be below 2, got 2",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused(name: str) -> None:
    function, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message):
        function()
