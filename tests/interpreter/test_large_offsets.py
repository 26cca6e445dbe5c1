"""Tensors of more than 2**31 elements, and rows far apart, in Triton's interpreter.

Its 32-bit numbers wrap as a GPU's do, and here each that would ends the launch. Of the tensors
only what a test writes takes memory, and of their launches only the last programs run.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs with --backend interpreter", allow_module_level=True)

import triton
import triton.language as tl

from leaner_kernels.ops import route
from leaner_kernels.ops._checks import MAX_ROW_STRIDE
from leaner_kernels.ops._tiles import Tile
from leaner_kernels.ops.attention import op
from leaner_kernels.ops.attention.call import Call, Gradients
from leaner_kernels.ops.attention.checks import MAX_MASK_STRIDE
from leaner_kernels.ops.attention.kernels import online as online_kernels
from leaner_kernels.ops.attention.kernels import short
from leaner_kernels.ops.route import OPERATORS, Results, launchers
from tests.interpreter import online
from tests.placement import sparse, without_wrapping

HALF, SINGLE = torch.float16, torch.float32
FAR = 2**31  # elements


def last_entry(batch: int, *shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """Return a huge batch of zeros whose last entry is random."""
    t = sparse((batch, *shape), dtype)
    assert t.numel() > FAR, t.numel()
    t[-1] = torch.randn(shape).to(dtype)
    return t


def run_both(
    run: Callable[..., tuple[Tensor, ...]],
    big: tuple[Any, ...],
    small: tuple[Any, ...],
    programs: Callable[[int], Iterable[int]],
) -> None:
    """Assert that ``run`` leaves in the last entry of a huge batch what it makes of it alone."""
    with without_wrapping():
        expected = run(*small)
    with without_wrapping(programs):
        found = run(*big)
    for number, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        assert wanted.isfinite().all()
        assert wanted.count_nonzero() > wanted.numel() // 2
        assert torch.equal(actual[-1], wanted[-1]), number


def last(count: int) -> Callable[[int], Iterable[int]]:
    return lambda grid: range(grid - count, grid)


def last_of_halves(count: int) -> Callable[[int], Iterable[int]]:
    """Of programs that own keys, and then of those that own rows."""
    return lambda grid: [*range(grid // 2 - count, grid // 2), *range(grid - count, grid)]


def test_what_would_wrap_is_told() -> None:
    """The kernel of this test, and not the others, counts in 32 bits."""
    out = sparse((FAR + 8,), torch.int8)
    with pytest.raises(Exception, match="int32 overflow"), without_wrapping():
        _store_far[(1,)](out, FAR // 4, 4)


@triton.jit
def _store_far(ptr, stride, times):
    tl.store(ptr + times * stride, 1)


# --- Softmax attention ---------------------------------------------------------------------------

HEADS, TOKENS, DIM = 4, 17, 16
SPARE = 3  # programs that fill what no sequence owns
BATCH = FAR // (HEADS * TOKENS * DIM) + 1


def call_of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Call:
    lengths = torch.full((len(query),), TOKENS - 2, dtype=torch.int32)
    return Call(query, key, value, mask, lengths, None, 0.0, False, 0.25)


def statistics_of(call: Call) -> list[Tensor]:
    shape = tuple(call.query.shape)
    return [sparse(shape[:3], SINGLE), sparse((5, *shape[:2]), SINGLE)]


def attend(kernels: str, *inputs: Tensor) -> tuple[Tensor, ...]:
    call = call_of(*inputs)
    out, max_log_sum = (sparse(tuple(shape), d) for shape, d in results_of(inputs[0]))
    results = out, max_log_sum, *statistics_of(call)
    if kernels == "online":
        found = online.prepare(call, *results)
        found.start()
        return *results[:3], found.arguments["parts_ptr"]
    tile = short_tile(TOKENS, 16)
    short.prepare_forward(tile, call, Results(*results)).start()
    *others, stats = results
    return *others, stats.movedim(1, 0)  # the batch's axis first, as of the others


def short_tile(tokens: int, block: int) -> Tile:
    sizes = {"tokens": tokens, "BLOCK": block, "largest_segment": block}
    return Tile.of(**sizes, num_warps=4, num_stages=1)


def results_of(query: Tensor) -> tuple[tuple[Any, torch.dtype], ...]:
    return (query.shape, query.dtype), ((*query.shape[:3], 2), SINGLE)


@pytest.mark.parametrize(("kernels", "programs"), [("online", 4), ("short", 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_huge_batch_attends(kernels: str, programs: int, masked: bool) -> None:
    torch.manual_seed(0)
    big = [last_entry(BATCH, HEADS, TOKENS, DIM) for _ in range(3)]
    if masked:
        big.append(last_entry(BATCH, HEADS, TOKENS, TOKENS))
    small = [t[-1:] for t in big]
    run_both(lambda *inputs: attend(kernels, *inputs), (*big,), (*small,), last(programs))


def attend_backward(kernels: str, *inputs: Tensor) -> tuple[Tensor, ...]:
    *tensors, grad, out, max_log_sum = inputs
    call = call_of(*tensors)
    found = [sparse(tuple(call.query.shape), HALF) for _ in range(3)]
    ds = sparse((*out.shape[:3], TOKENS), SINGLE)
    if kernels == "online":
        online.backward(grad, call, out, max_log_sum, *found, ds)
    else:
        tile = short_tile(TOKENS, 16)
        saved, gradients = Results(out, max_log_sum), Gradients(*found, ds)
        short.prepare_backward(tile, grad, call, saved, gradients).start()
    return *found, ds


@pytest.mark.parametrize(
    ("kernels", "programs"),
    [("online", last_of_halves(4)), ("short", last(4))],
    ids=["online", "short"],
)
def test_a_huge_batch_has_gradients(kernels: str, programs: Callable[[int], Iterable[int]]) -> None:
    torch.manual_seed(0)
    big = [last_entry(BATCH, HEADS, TOKENS, DIM) for _ in range(3)]
    big.append(last_entry(BATCH, HEADS, TOKENS, TOKENS))
    out, max_log_sum, *_ = attend("online", *(t[-1:] for t in big))
    big += [last_entry(BATCH, HEADS, TOKENS, DIM) for _ in range(2)]
    big.append(sparse((BATCH, HEADS, TOKENS, 2), SINGLE))
    big[-2][-1], big[-1][-1] = out[0], max_log_sum[0]
    small = [t[-1:] for t in big]
    run_both(lambda *inputs: attend_backward(kernels, *inputs), (*big,), (*small,), programs)


def test_many_samples_are_captured() -> None:
    torch.manual_seed(0)
    big = [last_entry(BATCH, HEADS, TOKENS, DIM) for _ in range(3)]
    slots = FAR // (HEADS * TOKENS * DIM) + 1
    sample = sparse((slots,), torch.int32)
    sample[-1] = BATCH - 1

    def capture(sample: Tensor, *inputs: Tensor) -> tuple[Tensor]:
        heads = sparse((len(sample), TOKENS, HEADS * DIM), SINGLE)
        online.capture(call_of(*inputs), sample, heads)
        return (heads,)

    small = torch.zeros(1, dtype=torch.int32), *(t[-1:] for t in big)
    run_both(capture, (sample, *big), small, last(HEADS))


@mock.patch.object(online_kernels, "SPARE_PROGRAMS", SPARE)
def test_a_huge_packed_batch_attends_and_has_gradients() -> None:
    """The last sequence and the padding behind it begin past 2**31 elements."""
    torch.manual_seed(0)
    heads, tokens = 2, FAR // (2 * DIM) + 2 * TOKENS
    own = slice(tokens - 2 * TOKENS, tokens - TOKENS)
    big = [sparse((tokens, heads, DIM), HALF) for _ in range(4)]
    small = [torch.randn(TOKENS, heads, DIM).half() for _ in big]
    for t, values in zip(big, small):
        t[own] = values
    starts = torch.tensor([0, 5, own.start, own.stop], dtype=torch.int32)
    one = torch.tensor([0, TOKENS], dtype=torch.int32)
    params = TOKENS, TOKENS, 0.0, True, 0.25, -1, -1

    def run(query, key, value, grad, starts, out=None, max_log_sum=None):
        operands = query, key, value, starts, starts, None
        if out is None:
            return route.forward_on_gpu(op.Varlen, False, *operands, *params)
        return route.backward_on_gpu(op.Varlen, grad, *operands, out, max_log_sum, *params)

    def programs(grid: int) -> list[int]:
        owners = grid - SPARE
        ends = (owners,) if owners == 3 * heads else (owners // 2, owners)
        return [*(n for end in ends for n in range(end - heads, end)), *range(owners, grid)]

    with without_wrapping():
        out, max_log_sum = run(*small, one)
        gradients = run(*small, one, out, max_log_sum)
    with without_wrapping(programs):
        found, found_max_log_sum = run(*big, starts)
        found_gradients = run(*big, starts, found, found_max_log_sum)
    assert torch.equal(found_max_log_sum[:, own], max_log_sum)
    for actual, wanted in zip((found, *found_gradients), (out, *gradients), strict=True):
        assert wanted.count_nonzero() > wanted.numel() // 2
        assert torch.equal(actual[own], wanted)


def far_rows(t: Tensor, stride: int = MAX_ROW_STRIDE) -> Tensor:
    """Return (1, H, N, D) again with rows so far apart that a head spans 2**31 elements."""
    heads, dim = t.shape[1], t.shape[3]
    far = sparse(tuple(t.shape), t.dtype, (stride, dim, stride, 1))
    assert heads * dim <= stride
    return far.copy_(t)


@pytest.mark.parametrize("kernels", ["short", "online"])
def test_rows_of_a_tile_and_of_a_mask_may_lie_far_apart(kernels: str) -> None:
    torch.manual_seed(0)
    tokens = {"short": 250, "online": 70}[kernels]
    near = [torch.randn(1, 1, tokens, DIM).half() for _ in range(4)]
    mask = torch.randn(1, 1, tokens, tokens).half()
    far_mask = sparse((1, 1, tokens, tokens), HALF, (1, 1, MAX_MASK_STRIDE, MAX_MASK_STRIDE - 1))

    def run(make: Callable[[Tensor], Tensor], mask, query, key, value, grad) -> tuple[Tensor, ...]:
        call = Call(query, key, value, mask, None, None, 0.0, False, 0.25)
        out, *grads = (make(torch.zeros_like(near[0])) for _ in range(4))
        max_log_sum = sparse((1, 1, tokens, 2), SINGLE)
        ds = sparse((1, 1, tokens, tokens), SINGLE)
        if kernels == "short":
            tile = short_tile(tokens, 256)
            results, gradients = Results(out, max_log_sum), Gradients(*grads, ds)
            short.prepare_forward(tile, call, results).start()
            short.prepare_backward(tile, grad, call, results, gradients).start()
        else:
            online.prepare(call, out, max_log_sum).start()
            online.backward(grad, call, out, max_log_sum, *grads, ds)
        return out, max_log_sum, *grads, ds

    far_mask.copy_(mask)
    with without_wrapping():
        expected = run(lambda t: t, mask, *near)
        found = run(far_rows, far_mask, *map(far_rows, near))
    for actual, wanted in zip(found, expected):
        assert wanted.count_nonzero() > wanted.numel() // 2
        assert torch.equal(actual, wanted)


# --- The other operators --------------------------------------------------------------------------


def run_operator(name: str, *numbers: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Return what launches forward and backward on tensors and the gradient of the output."""
    attend, _, differentiate = launchers(OPERATORS[name])

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        *tensors, grad = inputs
        out, lse = attend(*tensors, *numbers)
        gradients = differentiate(grad, *tensors, lse, *numbers)
        return out, lse, *(gradients if isinstance(gradients, tuple) else (gradients,))

    return run


def last_of(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the last entry of each tensor."""
    return tuple(None if t is None else t[-1:] for t in inputs)


def of_each_entry(batch: int) -> Callable[[int], Iterable[int]]:
    """Of grids that are as many programs for each entry of a batch."""
    return lambda grid: range(grid - grid // batch, grid)


@pytest.mark.parametrize("name", ["cross_covariance_attention", "channel_attention"])
def test_channels_of_a_huge_batch(name: str) -> None:
    torch.manual_seed(0)
    qkv, grad = (last_entry(BATCH, TOKENS, *t, HEADS, DIM) for t in ((3,), ()))
    temperature = [torch.rand(HEADS) + 1] if name == "cross_covariance_attention" else []
    run = run_operator(name, 1e-3)

    def of_qkv(qkv: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        return run(qkv, *temperature, grad)[:3]

    run_both(of_qkv, (qkv, grad), last_of((qkv, grad)), last(HEADS))


def test_windows_of_a_huge_batch() -> None:
    torch.manual_seed(0)
    map_size, heads = (4, 2), 2
    batch = FAR // (8 * heads * DIM) + 1
    inputs = tuple(last_entry(batch, *map_size, *t, heads, DIM, dtype=HALF) for t in ((3,), ()))

    def programs(grid: int) -> Iterable[int]:
        count = batch * 2 * heads
        return range(grid - (4 if grid == count else 1), grid)

    run_both(run_operator("window_attention", 2, 2, 0.25), inputs, last_of(inputs), programs)


LOOK_OUT = 2, 1, 0, 1.5


def test_a_huge_batch_looks_out() -> None:
    torch.manual_seed(0)
    heads, dim, batch = 2, 16, FAR // (9 * 2 * 16) + 1
    value, grad = (last_entry(batch, 4, 4, heads, dim) for _ in range(2))
    inputs = value, last_entry(batch, 3, 3, heads, 4, 4), grad
    run = run_operator("outlook_attention", *LOOK_OUT)
    # A forward has one program for each head, a backward two.
    run_both(run, inputs, last_of(inputs), of_each_entry(batch))


def test_a_gradient_may_be_a_view_of_something_huge() -> None:
    torch.manual_seed(0)
    value, near = torch.randn(2, 1, 4, 4, 1, 16).half()
    logits = torch.randn(1, 3, 3, 1, 4, 4).half()
    far = sparse(tuple(near.shape), HALF, (1, 2**30, 2**28, 16, 1)).copy_(near)
    run = run_operator("outlook_attention", *LOOK_OUT)
    run_both(run, (value, logits, far), (value, logits, near), range)
