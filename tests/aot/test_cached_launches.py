"""The launch cache against Triton: a launch from it is the one that Triton would have made.

Everything of Triton runs but the compiler and the driver: its binder, its specialisation, its
cache and what a compiled kernel does with its arguments.
"""

import os
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from bench import host_time
from leaner_kernels.ops import _launch
from leaner_kernels.ops.attention import op
from leaner_kernels.ops.covariance import launch as covariance
from leaner_kernels.ops.nystrom import launch as nystrom
from leaner_kernels.ops.operator import Results
from leaner_kernels.ops.outlook import launch as outlook
from leaner_kernels.ops.statistics import STATISTICS
from leaner_kernels.ops.window import launch as window

PASSES = {form: op.on_gpu(form) for form in (op.Dense, op.Packed, op.Varlen)}


class Launched(NamedTuple):
    """What arrived at the driver; ``function`` is a name for all that Triton specialised on."""

    grid: tuple[int, int, int]
    stream: int
    function: Any
    numbers: tuple[Any, ...]
    addresses: tuple[Any, ...]
    hooks: tuple[Any, ...]


# One for all tests: Triton keeps what the first of them compiled.
LOG: list[Launched] = []


def flat(kinds: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the kind and value of what a kernel takes: views in parts, and no constants."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from flat(kind, value)
        elif kind != "constexpr":
            yield kind, value


@pytest.fixture
def launched() -> Iterator[list[Launched]]:
    """What arrives at the driver, in order."""

    def launcher(source: Any) -> Callable[..., None]:
        kinds = list(source.signature.values())

        def run(x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
            values = rest[-len(kinds) :]
            _, *given = rest[: -len(kinds)]
            what, *hooks = given
            assert len(hooks) == 2
            for hook in hooks:  # as the launcher does, before and after
                if hook is not None:
                    hook(what)
            # A pointer is a tensor from Triton's binder, an address from the cache.
            taken = list(flat(kinds, values))
            numbers = tuple(v for k, v in taken if k[0] != "*")
            addresses = tuple(
                v.data_ptr() if isinstance(v, Tensor) else v for k, v in taken if k[0] == "*"
            )
            fixed = (x, y, z), stream, function
            LOG.append(Launched(*fixed, numbers, addresses, tuple(given)))

        return run

    with host_time.driver(launcher, device=0), caches(dict):
        LOG.clear()
        yield LOG


class Forgetful(dict[Any, Any]):
    """A cache that finds nothing."""

    def get(self, *_: Any) -> None:
        return None

    def setdefault(self, _: Any, value: Any = None) -> Any:
        return value


class Kept(TorchDispatchMode):
    """Keeps what is allocated, so that no two tensors of a run have one address."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Any] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.tensors.append(result := function(*args, **(kwargs or {})))
        return result


@contextmanager
def caches(kind: type[dict[Any, Any]]) -> Iterator[None]:
    """Have other caches, empty ones of ``kind``, and at the end those of before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "_entries", kind())
        patch.setattr(op, "_plans", kind())
        patch.setattr(op, "_backwards", kind())
        yield


def launches_of(log: list[Launched], run: Callable[[], Sequence[Any]]) -> list[Launched]:
    """Return what ``run`` launches, with places among the tensors it returns for addresses."""
    log.clear()
    with Kept():
        tensors = [t for t in run() if t is not None]
        return [
            one._replace(addresses=tuple(place(address, tensors) for address in one.addresses))
            for one in log
        ]


def place(address: int, tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return which tensor an address lies in, and how far from its start; None for scratch."""
    for number, t in enumerate(tensors):
        storage = t.untyped_storage()
        if 0 <= (offset := address - storage.data_ptr()) < storage.nbytes():
            return number, offset
    return None


def from_cache(one: Launched) -> bool:
    """Whether a launch went around Triton, which passes its hooks, empty or not."""
    return one.hooks == (None, None, None)


def check(log: list[Launched], run: Callable[[], Sequence[Any]]) -> int:
    """Compare what is launched now with what Triton launches; return how many came from a cache."""
    actual = launches_of(log, run)
    with caches(Forgetful):
        expected = launches_of(log, run)
    assert not any(map(from_cache, expected))
    assert [one[:5] for one in actual] == [one[:5] for one in expected] != []
    return sum(map(from_cache, actual))


def draw(rng: random.Random) -> dict[str, Any]:
    """Return a call; few shapes and many flavours, so that kinds nearly repeat."""
    batch, heads = 2, 4
    rows, dim = rng.choice([(16, 10), (64, 32), (197, 64), (300, 64)])
    dtype = rng.choice([torch.bfloat16, torch.bfloat16, torch.float32])
    kv_heads = rng.choice([heads, heads, heads // 2])

    shifted = rng.choice(["", "", "", "q", "kg"])

    def new(heads: int, name: str) -> Tensor:
        offset = int(name in shifted)  # an address that is no multiple of 16
        flat = torch.empty(batch * heads * rows * dim + offset, dtype=dtype)[offset:]
        return flat.view(batch, rows, heads, dim).transpose(1, 2)

    query, key, value = new(heads, "q"), new(kv_heads, "k"), new(kv_heads, "v")
    mask = None
    kind = rng.choice(["none", "none", "boolean", "additive", "line"])
    if kind != "none":
        shape = (rows,) if kind == "line" else (batch, 1, rows, rows)
        mask = torch.empty(shape, dtype=torch.bool if kind == "boolean" else dtype)
    causal = mask is None and rng.random() < 0.3
    dropout_p = rng.choice([0.0, 0.0, 0.0, 0.1, 0.2])
    lengths = torch.empty(2 * batch, dtype=torch.int32)
    lengths = rng.choice([None, None, lengths[:batch], lengths[::2]])
    seed = torch.empty(1, dtype=torch.int64) if dropout_p else None
    scale, softcap = rng.choice([0.125, 0.125, 0.3, -0.1]), rng.choice([0.0, 0.0, 0.0, 30.0])
    window_size = rng.choice([(-1, -1), (-1, -1), (-1, -1), (7, 0)])
    return {
        "tensors": (query, key, value, mask, lengths, seed),
        "numbers": (dropout_p, causal, scale, softcap, *window_size),
        # Not what autograd gives, but the operator takes it.
        "grad": new(heads, "g").to(rng.choice([dtype, dtype, torch.float32])),
        "sample": torch.empty(4, dtype=torch.int32)[:: rng.choice([1, 2, 4])],
        "rest": (kind == "additive" and rng.random() < 0.5,),
        "stats": rng.random() < 0.3,
    }


def run(
    form: Any,
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    grad: Tensor | torch.dtype,
    sample: Tensor,
    rest: tuple[bool, ...] = (),
    stats: bool = True,
    out: Tensor | None = None,
) -> list[Any]:
    """Run the operators of softmax attention, and return what goes in and comes out.

    Args:
        form: of the operators.
        tensors: their inputs.
        numbers: likewise.
        grad: of the output, or its dtype.
        sample: of the operator with statistics.
        rest: whether the mask gets a gradient.
        stats: whether the operator with statistics runs.
        out: what the backward is given as the output; that of the forward when omitted.
    """
    attend, with_stats, differentiate = PASSES[form]
    first, max_log_sum = attend(*tensors, *numbers)
    results = with_stats(*tensors, sample, *numbers) if stats else ()
    out = first if out is None else out
    grad = first.to(grad) if isinstance(grad, torch.dtype) else grad
    grads = differentiate(grad, *tensors, out, max_log_sum, *numbers, *rest)
    grads = (grads,) if isinstance(grads, Tensor) else grads
    return [*tensors, first, max_log_sum, sample, *results, out, grad, *grads]


def test_a_cached_launch_is_what_triton_would_launch(launched: list[Launched]) -> None:
    rng, cached = random.Random(0), 0
    for _ in range(400):
        call = draw(random.Random(rng.randrange(200)))  # so that kinds repeat
        cached += check(launched, lambda: run(op.Dense, **call))  # noqa: B023 - runs here
    assert cached > 400


class Ragged(NamedTuple):
    """Arguments of a call on sequences of any length."""

    tokens: int = 300
    sequences: int = 3
    longest: int = 128
    slots: int = 2
    causal: bool = False
    dropout_p: float = 0.0
    offset: int = 0
    grad: torch.dtype = torch.bfloat16

    def run(self) -> list[Any]:
        elements = self.tokens * 3 * 2 * 64
        flat = torch.empty(elements + self.offset, dtype=torch.bfloat16)[self.offset :]
        query, key, value = flat.view(self.tokens, 3, 2, 64).unbind(1)
        starts = torch.empty(self.sequences + 1, dtype=torch.int32)
        seed = torch.empty(1, dtype=torch.int64) if self.dropout_p else None
        sample = torch.empty(self.slots, dtype=torch.int32)
        tensors = query, key, value, starts, starts, seed
        numbers = self.longest, self.longest, self.dropout_p, self.causal, 0.125, -1, -1
        return run(op.Varlen, tensors, numbers, self.grad, sample)


@pytest.mark.parametrize(
    "other",
    [
        Ragged(longest=129),
        Ragged(sequences=4),
        Ragged(slots=3),
        Ragged(tokens=304),
        Ragged(offset=1),
        Ragged(causal=True),
        Ragged(dropout_p=0.1),
        Ragged(grad=torch.float32),
    ],
    ids=str,
)
def test_packed_sequences_of_another_kind_share_no_entry(
    other: Ragged, launched: list[Launched]
) -> None:
    Ragged().run()
    # Statistics and capture are one entry; the backward is another.
    alike = 2 * (other.slots != Ragged().slots) + 3 * (other.grad != Ragged().grad)
    assert check(launched, other.run) == alike
    assert check(launched, other.run) == 4
    assert check(launched, Ragged().run) == 4


class Dense(NamedTuple):
    """Arguments of a call: which tensors lie one element off, the gradient's dtype, slots."""

    rows: int = 64
    shifted: str = ""
    grad: torch.dtype = torch.bfloat16
    slots: int = 2

    def new(self, name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        offset = int(name in self.shifted)
        flat = torch.empty(2 * self.rows * 4 * 64 + offset, dtype=dtype)[offset:]
        return flat.view(2, self.rows, 4, 64).transpose(1, 2)

    def run(self) -> list[Any]:
        tensors, numbers = (*map(self.new, "qkv"), None, None, None), (0.0, False, 0.125, 0.0)
        sample, grad = torch.empty(self.slots, dtype=torch.int32), self.new("g", self.grad)
        numbers = *numbers, -1, -1
        return run(op.Dense, tensors, numbers, grad, sample, (False,), out=self.new("o"))


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (Dense(grad=torch.float32), 3),
        (Dense(slots=3), 2),
        *((Dense(shifted=name), 0) for name in "qkv"),
        (Dense(shifted="o"), 3),
        (Dense(shifted="g"), 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [16, 197, 1024])
def test_calls_of_another_kind_share_no_entry(
    rows: int, other: Dense, alike: int, launched: list[Launched]
) -> None:
    first, other = Dense(rows), other._replace(rows=rows)
    first.run()
    assert check(launched, other.run) == alike
    assert check(launched, other.run) == 4
    assert check(launched, first.run) == 4


@pytest.mark.parametrize("offsets", [(2, 4), (4, 2)])
def test_packed_heads_at_another_distance_from_alignment_share_no_entry(
    offsets: tuple[int, int], launched: list[Launched]
) -> None:
    """K lies 8 bytes after Q: of Q at 8 it is aligned, of Q at 4 it is not."""

    def run(offset: int) -> list[Tensor]:
        rows = torch.zeros(33 * 16, dtype=torch.bfloat16)[offset : offset + 32 * 16].view(1, 32, 16)
        qkv = rows[..., :12].unflatten(-1, (3, 1, 4))
        forward, _, backward = op.on_gpu(op.Packed)
        rest = None, None, 0.0, False, None, -1, -1
        out, kept = forward(qkv, *rest)
        return [qkv, out, kept, backward(out, qkv, None, None, out, kept, *rest[2:])]

    first, other = offsets
    run(first)
    assert check(launched, lambda: run(other)) == 0
    assert check(launched, lambda: run(other)) == 2


def window_call(slots: int, grad: torch.dtype, window_: int = 7) -> list[Any]:
    qkv = torch.empty(2, 14, 14, 3, 2, 32, dtype=torch.bfloat16)
    out, lse = torch.empty(2, 14, 14, 2, 32, dtype=qkv.dtype), torch.empty(2, 2, 14, 14)
    return registered(window, (qkv,), (window_, window_, 0.2), out, lse, 14 * 14, slots, grad)


def outlook_call(slots: int, grad: torch.dtype) -> list[Any]:
    value = torch.empty(2, 8, 8, 2, 32, dtype=torch.bfloat16)
    logits = torch.empty(2, 4, 4, 2, 9, 9, dtype=torch.bfloat16)
    out, lse = torch.empty_like(value), torch.empty(2, 2, 4, 4, 9)
    return registered(outlook, (value, logits), (3, 2, 1, 0.2), out, lse, 64, slots, grad)


def channel_call(slots: int, grad: torch.dtype) -> list[Any]:
    qkv = torch.empty(2, 50, 3, 2, 32, dtype=torch.bfloat16)
    out, lse = torch.empty(2, 50, 2, 32, dtype=qkv.dtype), torch.empty(2, 2, 32)
    return registered(covariance.channel, (qkv,), (0.2,), out, lse, 50, slots, grad)


def nystrom_call(slots: int, grad: torch.dtype) -> list[Any]:
    inputs = *(torch.zeros(2, 2, 64, 32, dtype=torch.bfloat16) for _ in range(3)), None
    out, lse = torch.zeros(2, 64, 2, 32, dtype=torch.bfloat16), torch.zeros(2, 2, 64)
    return registered(nystrom, inputs, (16, 0.2, 6, False), out, lse, 64, slots, grad)


def registered(
    operator: Any,
    inputs: tuple[Any, ...],
    params_: tuple[Any, ...],
    out: Tensor,
    lse: Tensor,
    tokens: int,
    slots: int,
    grad: torch.dtype,
) -> list[Any]:
    """Run forward, forward with a capture, and backward, as ``ops.operator`` calls them."""
    stats, heads = torch.empty(len(STATISTICS), 2, 2), torch.empty(slots, tokens, 64)
    sample, do = torch.zeros(slots, dtype=torch.int32), out.to(grad)
    operator.forward(inputs, params_, Results(out, lse))
    operator.forward(inputs, params_, Results(out, lse, stats, heads, sample))
    grads = [torch.empty_like(t) for t in inputs if t is not None]
    operator.backward(do, inputs, params_, lse, grads)
    return [*inputs, out, lse, stats, heads, sample, do, *grads]


@pytest.mark.parametrize("call", [window_call, outlook_call, channel_call, nystrom_call])
def test_captures_and_gradients_of_every_operator_are_cached(
    call: Callable[..., list[Any]], launched: list[Launched]
) -> None:
    launches = len(launches_of(launched, lambda: call(2, torch.bfloat16)))
    for other in ((3, torch.bfloat16), (2, torch.float32)):
        found = check(launched, lambda: call(*other))  # noqa: B023 - runs here
        assert 0 < found < launches
        assert check(launched, lambda: call(*other)) == launches  # noqa: B023
    assert check(launched, lambda: call(2, torch.bfloat16)) == launches


def test_a_cached_launch_calls_the_hooks_that_there_are(launched: list[Launched]) -> None:
    call, ran = Dense(), []
    call.run()

    def enter(what: Any) -> None:
        ran.append(("enter", what.get()["name"]))

    def leave(what: Any) -> None:
        ran.append(("exit", what.get()["name"]))

    chains = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    assert all(chain is not None for chain in chains)
    for chain, hook in zip(chains, (enter, leave)):
        chain.add(hook)
    try:
        found = launches_of(launched, call.run)
    finally:
        for chain, hook in zip(chains, (enter, leave)):
            chain.remove(hook)
    assert [kind for kind, _ in ran] == ["enter", "exit"] * len(found)
    assert all(name.endswith("_kernel") for _, name in ran)
    assert not any(map(from_cache, found))


def test_the_cache_keeps_no_tensor_alive(launched: list[Launched]) -> None:
    for _ in range(2):
        with Kept() as kept:
            Ragged(dropout_p=0.1).run()
            Dense(1024).run()
        made = [weakref.ref(t) for t in kept.tensors if isinstance(t, Tensor)]
        kept.tensors.clear()
        assert len(launched) >= 8
        assert len(made) > 40
        assert not any(one() is not None for one in made)
