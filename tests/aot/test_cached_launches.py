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
    pytest.skip("runs without TRITON_INTERPRET=1, on backend cpu", allow_module_level=True)

from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from bench.attention.operators import OperatorCase
from bench.gpu_model.launches import OperatorCall, call_of, dense_call, filled, varlen_call
from leaner_kernels.ops import _tiles, route
from leaner_kernels.ops.attention import aten, op
from tests import shared_lse
from tests.aot import pretended_gpu
from tests.attention_cases import sharing_lse

BF16 = torch.bfloat16


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

    with pretended_gpu.driver(launcher, device=0), caches(dict):
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
        patch.setattr(route, "plans", kind())
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


class Request(NamedTuple):
    """A call, with what its capture and its backward are given.

    ``grad`` is the gradient of the output, or its dtype; ``out`` is what the backward takes as the
    output, that of the forward when omitted.
    """

    call: OperatorCall
    sample: Tensor
    grad: Tensor | torch.dtype = BF16
    stats: bool = True
    out: Tensor | None = None
    lse_alone: bool = False  # for calls on (B, H, N, D)

    def run(self) -> list[Any]:
        """Run the operators, and return what goes in and comes out."""
        call = self.call
        if self.lse_alone:
            grad = self.grad
            with sharing_lse():
                first, lse = shared_lse.forward_with_lse(op.Dense, call.inputs, call.params)
                grads = shared_lse.backward_from_lse(
                    op.Dense, grad, call.inputs, call.params, out=first, lse=lse
                )
            return [*call.inputs, first, lse, grad, *grads]
        first, kept = call.attend(*call.inputs, *call.params)
        results = call.with_stats(*call.inputs, self.sample, *call.params) if self.stats else ()
        out = first if self.out is None else self.out
        grad = first.to(self.grad) if isinstance(self.grad, torch.dtype) else self.grad
        grads = call.gradients(grad, call.inputs, out, kept)
        return [*call.inputs, first, kept, self.sample, *results, out, grad, *grads]


def draw(rng: random.Random) -> Request:
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
    inputs = query, key, value, mask, lengths, seed
    call = dense_call(*inputs, params=(dropout_p, causal, scale, softcap), window=window_size)
    return Request(
        call._replace(rest=(kind == "additive" and rng.random() < 0.5,)),
        torch.empty(4, dtype=torch.int32)[:: rng.choice([1, 2, 4])],
        # Not what autograd gives, but the operator takes it.
        new(heads, "g").to(rng.choice([dtype, dtype, torch.float32])),
        stats=rng.random() < 0.3,
        lse_alone=rng.random() < 0.3,
    )


def test_a_cached_launch_is_what_triton_would_launch(launched: list[Launched]) -> None:
    rng, cached = random.Random(0), 0
    for _ in range(400):
        request = draw(random.Random(rng.randrange(200)))  # so that kinds repeat
        cached += check(launched, request.run)
    assert cached > 400


def sample(slots: int) -> Tensor:
    return torch.zeros(slots, dtype=torch.int32)


def ragged(
    tokens: int = 300,
    sequences: int = 3,
    longest: int = 128,
    slots: int = 2,
    causal: bool = False,
    dropout_p: float = 0.0,
    offset: int = 0,
    grad: torch.dtype = BF16,
) -> list[Any]:
    """Run a call on sequences of any length, ``offset`` elements off."""
    flat = torch.empty(tokens * 3 * 2 * 64 + offset, dtype=BF16, device="meta")[offset:]
    seed = torch.empty(1, dtype=torch.int64) if dropout_p else None
    params = dropout_p, causal, 0.125
    call = varlen_call(flat.view(tokens, 3, 2, 64), sequences, longest, seed, params)
    return Request(call._replace(inputs=(*filled(call.inputs),)), sample(slots), grad).run()


def dense(rows: int = 64, shifted: str = "", grad: torch.dtype = BF16, slots: int = 2) -> list[Any]:
    """Run a call; tensors whose letters are in ``shifted`` lie one element off."""

    def new(name: str, dtype: torch.dtype = BF16) -> Tensor:
        offset = int(name in shifted)
        flat = torch.empty(2 * rows * 4 * 64 + offset, dtype=dtype)[offset:]
        return flat.view(2, rows, 4, 64).transpose(1, 2)

    call = dense_call(*map(new, "qkv"), None, None, None, params=(0.0, False, 0.125, 0.0))
    return Request(call, sample(slots), new("g", grad), out=new("o")).run()


OPERATORS = {
    "window": OperatorCase("window", "cuda", "window", 2, 14, 2, 32, BF16),
    "outlook": OperatorCase("outlook", "cuda", "outlook", 2, 8, 2, 32, BF16),
    "channel": OperatorCase("channel", "cuda", "channel", 2, 7, 2, 32, BF16),
}


def registered(name: str, slots: int = 2, grad: torch.dtype = BF16) -> list[Any]:
    """Run a call of an operator of ``ops.operator``."""
    call = call_of(OPERATORS[name])
    return Request(call._replace(inputs=(*filled(call.inputs),)), sample(slots), grad).run()


# What differs from a first call, and how many of its launches are one with that call's: forward,
# statistics and capture do not know the gradient, and of slots the capture alone does.
OTHERS = [
    *((ragged, {}, other, 0) for other in ({"longest": 129}, {"sequences": 4}, {"tokens": 304})),
    *((ragged, {}, other, 0) for other in ({"offset": 1}, {"causal": True}, {"dropout_p": 0.1})),
    (ragged, {}, {"slots": 3}, 2),
    (ragged, {}, {"grad": torch.float32}, 3),
    *(
        (dense, {"rows": rows}, other, alike)
        for rows in (16, 197, 1024)
        for other, alike in (
            ({"grad": torch.float32}, 3),
            ({"slots": 3}, 2),
            *(({"shifted": name}, 0) for name in "qkv"),
            *(({"shifted": name}, 3) for name in "og"),
        )
    ),
    *(
        (registered, {"name": name}, other, None)
        for name in OPERATORS
        for other in ({"slots": 3}, {"grad": torch.float32})
    ),
]


@pytest.mark.parametrize(
    ("call", "first", "other", "alike"),
    [pytest.param(*row, id=f"{row[0].__name__}-{row[1]}-{row[2]}") for row in OTHERS],
)
def test_calls_of_another_kind_share_no_entry(
    call: Callable[..., list[Any]],
    first: dict[str, Any],
    other: dict[str, Any],
    alike: int | None,
    launched: list[Launched],
) -> None:
    """``alike`` is not counted of operators whose launches are many: some are, and not all."""
    launches = len(launches_of(launched, lambda: call(**first)))
    found = check(launched, lambda: call(**first | other))
    assert found == alike if alike is not None else 0 < found < launches
    assert check(launched, lambda: call(**first | other)) == launches
    assert check(launched, lambda: call(**first)) == launches


@pytest.mark.parametrize("offsets", [(2, 4), (4, 2)])
def test_packed_heads_at_another_distance_from_alignment_share_no_entry(
    offsets: tuple[int, int], launched: list[Launched]
) -> None:
    """K lies 8 bytes after Q: of Q at 8 it is aligned, of Q at 4 it is not."""

    def run(offset: int) -> list[Tensor]:
        rows = torch.zeros(33 * 16, dtype=torch.bfloat16)[offset : offset + 32 * 16].view(1, 32, 16)
        qkv = rows[..., :12].unflatten(-1, (3, 1, 4))
        forward, _, backward = route.launchers(op.Packed)
        rest = None, None, 0.0, False, None, -1, -1
        out, kept = forward(qkv, *rest)
        return [qkv, out, kept, backward(out, qkv, None, None, out, kept, *rest[2:])]

    first, other = offsets
    run(first)
    assert check(launched, lambda: run(other)) == 0
    assert check(launched, lambda: run(other)) == 2


def test_a_cached_launch_calls_the_hooks_that_there_are(launched: list[Launched]) -> None:
    ran: list[tuple[str, str]] = []
    dense()

    def enter(what: Any) -> None:
        ran.append(("enter", what.get()["name"]))

    def leave(what: Any) -> None:
        ran.append(("exit", what.get()["name"]))

    chains = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    assert all(chain is not None for chain in chains)
    for chain, hook in zip(chains, (enter, leave)):
        chain.add(hook)
    try:
        found = launches_of(launched, dense)
    finally:
        for chain, hook in zip(chains, (enter, leave)):
            chain.remove(hook)
    assert [kind for kind, _ in ran] == ["enter", "exit"] * len(found)
    assert all(name.endswith("_kernel") for _, name in ran)
    assert not any(map(from_cache, found))


def test_the_cache_keeps_no_tensor_alive(launched: list[Launched]) -> None:
    for _ in range(2):
        with Kept() as kept:
            ragged(dropout_p=0.1)
            dense(1024)
        made = [weakref.ref(t) for t in kept.tensors if isinstance(t, Tensor)]
        kept.tensors.clear()
        assert len(launched) >= 8
        assert len(made) > 40
        assert not any(one() is not None for one in made)


def pytorchs_operator(rng: random.Random) -> list[Any]:
    """Run a call of one of PyTorch's own operators, forward and backward."""
    form = rng.choice([aten.Fused, aten.Efficient, aten.FusedVarlen])
    rows, dim = rng.choice([(16, 16), (64, 32), (197, 64)])
    shifted = rng.choice(["", "", "q", "g"])

    def new(name: str) -> Tensor:
        offset = int(name in shifted)
        flat = torch.empty(2 * rows * 4 * dim + offset, dtype=BF16)[offset:]
        if form is aten.FusedVarlen:
            return flat.view(2 * rows, 4, dim)
        return flat.view(2, 4, rows, dim)

    dropout_p, causal = rng.choice([0.0, 0.1]), rng.random() < 0.3
    mask_grad = False
    if form is aten.FusedVarlen:
        starts = torch.tensor([0, rows, 2 * rows], dtype=torch.int32)
        rest = starts, starts
        numbers = aten.VarlenNumbers(rows, rows, dropout_p, causal, None)
    else:
        masked = not causal and rng.random() < 0.5
        mask_grad = masked and form is aten.Efficient and rng.random() < 0.5
        mask = torch.zeros(2, 4, rows, rows, dtype=BF16) if masked else None
        rest, numbers = (mask, None), aten.Numbers(dropout_p, causal, None)
    tensors, grad = (*map(new, "qkv"), *rest), new("g")
    results = aten.forward(form, tensors, numbers, True)
    assert results is not None
    saved = results._asdict()
    gradients = aten.backward(form, grad, tensors, numbers, **saved, mask_grad=mask_grad)
    assert gradients is not None
    return [*tensors, grad, *results, *gradients]


def test_a_cached_launch_of_pytorchs_operators_is_what_triton_would_launch(
    launched: list[Launched],
) -> None:
    rng, cached = random.Random(0), 0
    for _ in range(150):
        seed = rng.randrange(60)  # so that kinds repeat
        with _tiles.assume(90):
            cached += check(launched, lambda: pytorchs_operator(random.Random(seed)))  # noqa: B023
    assert cached > 150
