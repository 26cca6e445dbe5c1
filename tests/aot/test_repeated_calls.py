"""Calls like one before: they launch what the first one launched, or are checked again.

Tensors of the CPU say that they lie on a GPU; kernels are neither compiled nor run.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from leaner_kernels import (
    attention,
    attention_qkvpacked,
    attention_qkvpacked_with_stats,
    attention_varlen,
    attention_with_stats,
    channel_attention,
    cross_covariance_attention,
    outlook_attention,
    window_attention,
)
from leaner_kernels.nn import ManyHeadAttention
from leaner_kernels.ops import _launch_cache, _tiles, covariance, outlook, route, window
from leaner_kernels.ops import attention as ops_attention
from leaner_kernels.ops._launch_cache import Launch
from leaner_kernels.ops.attention import biased, dispatch
from tests.aot import pretended_gpu

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("runs without TRITON_INTERPRET=1, on backend cpu", allow_module_level=True)

pytest.importorskip("triton")
STARTS = torch.tensor([0, 5, 64], dtype=torch.int32)


class Launched(NamedTuple):
    """A launch from the cache."""

    entry: _launch_cache.CachedLaunch
    addresses: list[int]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """Launches from the cache, in order, on a GPU that is not there."""
    found: list[Launched] = []
    run = _launch_cache.CachedLaunch.run

    def logged(entry: _launch_cache.CachedLaunch, addresses: Any, results: Any) -> None:
        found.append(Launched(entry, list(addresses)))
        run(entry, addresses, results)

    monkeypatch.setattr(_launch_cache.CachedLaunch, "run", logged)
    route.plans.clear()
    with pretended_gpu.gpu():
        yield found


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Name the operators of the calls that repeated a launch."""
    names: list[str] = []
    repeat = route.repeat

    def noting(form: Any, *args: Any) -> Any:
        results = repeat(form, *args)
        if results is not None:
            names.append(form.name)
        return results

    monkeypatch.setattr(route, "repeat", noting)
    for module in (ops_attention, window, covariance, outlook):
        monkeypatch.setattr(module, "repeat", noting)
    return names


def leaf(*shape: int, apart: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.randn(count + apart).to(dtype)[apart:].view(shape).requires_grad_()


def three(tokens: int = 64, heads: int = 2, **how: Any) -> list[Tensor]:
    return [leaf(2, tokens, heads, 64, **how).transpose(1, 2) for _ in range(3)]


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[int], list[Any]]]] = {
    "attention": (attention, three),
    "packed": (attention_qkvpacked, lambda tokens: [leaf(2, tokens, 3, 2, 64)]),
    "varlen": (attention_varlen, lambda n: [*(leaf(n, 2, 64) for _ in range(3)), STARTS, 64]),
}

FORMS = {"attention": "attention", "packed": "attention_qkvpacked", "varlen": "attention_varlen"}
WITH_PARAMS: list[tuple[str, dict[str, Any]]] = [
    *product(CALLS, [{}, {"is_causal": True}, {"scale": 0.3}]),
    ("attention", {"softcap": 50.0}),
    ("attention", {"window_size": (9, 0)}),
    ("attention", {"dropout_p": 0.1}),
    ("attention", {"attn_mask": torch.ones(64, 1, dtype=torch.bool).tril()[:1]}),
    ("attention", {"key_lengths": torch.tensor([64, 3], dtype=torch.int32)}),
]


def differentiable(args: list[Any]) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor) and a.requires_grad]


def place(address: int, tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return which tensor an address lies in, and how far from its start; None for scratch."""
    for number, t in enumerate(tensors):
        storage = t.untyped_storage()
        if 0 <= (offset := address - storage.data_ptr()) < storage.nbytes():
            return number, offset
    return None


def placed(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return an argument of a kernel with places instead of tensors and addresses."""
    if isinstance(value, Tensor):
        return place(value.data_ptr(), tensors)
    if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
        return place(value[0].data_ptr(), tensors), *value[1:]
    return value


OTHERS: dict[str, Callable[[], tuple[Callable[..., Tensor], list[Tensor]]]] = {
    "window_attention": lambda: (
        partial(window_attention, window_size=7),
        [leaf(2, 14, 14, 3, 2, 32)],
    ),
    "channel_attention": lambda: (channel_attention, [leaf(2, 49, 3, 2, 32)]),
    "cross_covariance_attention": lambda: (
        cross_covariance_attention,
        [leaf(2, 49, 3, 2, 32), leaf(2, 1, 1)],
    ),
    "outlook_attention": lambda: (
        outlook_attention,
        [leaf(2, 8, 8, 2, 32), leaf(2, 8, 8, 2, 9, 9)],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators_repeat_their_launches_too(
    name: str, launches: list[Launched], short: list[str]
) -> None:
    """A repeated call once took 90 microseconds more, by way of PyTorch's dispatcher."""
    layouts = []
    for _ in range(2):
        function, leaves = OTHERS[name]()
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, torch.empty_like(out))
        assert [grad.shape for grad in grads] == [t.shape for t in leaves]
        layouts.append([(t.shape, t.stride(), t.dtype) for t in (out, *grads)])
        addresses = [t.data_ptr() for t in leaves]
    assert short == [name]
    assert layouts[0] == layouts[1]
    forward, backward = launches
    assert set(addresses) <= {*forward.addresses, *backward.addresses}


def test_a_module_that_hands_its_bias_over_repeats_its_launches(
    launches: list[Launched], short: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(biased, "ENABLED", True)
    biased._sums_bias.cache_clear()
    started: list[Launch] = []
    first = Launch.first

    def noting(launch: Launch, *args: Any) -> Any:
        started.append(launch)
        return first(launch, *args)

    monkeypatch.setattr(Launch, "first", noting)
    module = ManyHeadAttention(128, 2, 64, dtype=torch.bfloat16)
    for _ in range(3):
        module.zero_grad()
        module(leaf(2, 197, 128)).sum().backward()
        assert all(p.grad is not None for p in module.parameters())
    backward = started[-1].arguments
    assert backward["bias_ptr"].shape == (2, 9, 2, 64)
    assert len(started) == 2
    assert len(launches) == 4
    assert short == ["attention_qkvpacked_biased"] * 2
    # Of other lengths the layer is called as it is.
    module(leaf(2, 300, 128)).sum().backward()
    assert started[-1].arguments.get("bias_ptr") is None


class Stream:
    """A stream that notes what waits for what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log of launches by stream, and of what each stream waits for."""
    log: list[str] = []
    current, side = Stream("current", log), Stream("side", log)
    active = [current]

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        active.append(stream)
        yield
        active.pop()

    def start(launch: Launch, *args: Any) -> Any:
        kind = "capture" if launch.arguments.get("CAPTURE") else "forward"
        log.append(f"{kind} on {active[-1].name}")
        return first(launch, *args)

    def run(entry: _launch_cache.CachedLaunch, *args: Any) -> None:
        log.append(f"again on {active[-1].name}")
        again(entry, *args)

    first, again = Launch.first, _launch_cache.CachedLaunch.run
    monkeypatch.setattr(Launch, "first", start)
    monkeypatch.setattr(_launch_cache.CachedLaunch, "run", run)
    monkeypatch.setattr(route, "_side_stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return log


def test_a_capture_may_run_beside_its_forward(launches: list[Launched], streams: list[str]) -> None:
    q, sample = leaf(2, 3, 64, 32), torch.tensor([1], dtype=torch.int32)
    for launched in ("capture", "again"):
        streams.clear()
        attention_with_stats(q, q, q, sample=sample)
        second = "forward" if launched == "capture" else "again"
        assert streams == [
            "side waits for current",
            f"{launched} on side",
            f"{second} on current",
            "current waits for side",
        ]
    streams.clear()
    attention_with_stats(q, q, q)
    assert streams == ["forward on current"]


def test_the_stream_of_a_capture_is_waited_for_when_the_forward_fails(
    launches: list[Launched], streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(launch: Launch, *_: Any) -> None:
        if not launch.arguments.get("CAPTURE"):
            raise RuntimeError("out of memory")

    monkeypatch.setattr(Launch, "first", fail)
    q, sample = leaf(2, 3, 64, 32), torch.tensor([1], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="out of memory"):
        attention_with_stats(q, q, q, sample=sample)
    assert streams == ["side waits for current", "current waits for side"]


def test_a_capture_follows_its_forward() -> None:
    assert not route.CAPTURES_BESIDE
    assert route._side_stream(torch.device("cuda", 0)) is None


@pytest.mark.parametrize("order", ["contiguous", "as the output"])
@pytest.mark.parametrize("tokens", [64, 65, 300])
@pytest.mark.parametrize(("name", "params"), WITH_PARAMS, ids=str)
def test_a_repeated_call_gives_the_kernels_what_the_first_one_gave(
    name: str,
    tokens: int,
    params: dict[str, Any],
    order: str,
    launches: list[Launched],
    short: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function, new = CALLS[name]
    started: list[Launch] = []
    first = Launch.first

    def noting(launch: Launch, *args: Any, **names: Any) -> Any:
        started.append(launch)
        return first(launch, *args, **names)

    monkeypatch.setattr(Launch, "first", noting)
    seed = torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(route, "draw_seed", lambda p, _: seed if p else None)
    turns = []
    for _ in range(2):
        args = new(tokens)
        out = function(*args, **params)
        grad = torch.empty_like(out) if order != "contiguous" else torch.empty(out.shape).to(out)
        grads = torch.autograd.grad(out, differentiable(args), grad)
        known = [t for t in (*args, out, grad, *grads) if isinstance(t, Tensor)]
        turns.append((known, [(t.shape, t.stride(), t.dtype) for t in (out, *grads)]))
    (tensors, layouts), (tensors_again, layouts_again) = turns
    assert short == [FORMS[name]]
    assert layouts == layouts_again
    for launch, repeated in zip(started, launches, strict=True):
        entry, arguments = repeated.entry, repeated.entry._arguments.copy()
        before = len(arguments) - len(launch.kernel.arg_names)
        for at, index, offset in entry._pointers:
            arguments[at] = place(repeated.addresses[index] + offset, tensors_again)
        for at, index, offset, strides in entry._views:
            arguments[at] = place(repeated.addresses[index] + offset, tensors_again), *strides
        expected = [placed(launch.arguments[n], tensors) for n in launch.kernel.arg_names]
        assert arguments[before:] == expected


def test_rules_are_asked_apart_for_calls_with_and_without_a_backward(
    launches: list[Launched], short: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.use_deterministic_algorithms(False)  # which every other test has on, and which keeps ours
    asked: list[bool] = []
    monkeypatch.setattr(
        dispatch, "find_rule_of_library", lambda *_, **call: asked.append(call["backward"])
    )
    q = leaf(2, 3, 64, 32)
    with _tiles.assume(90):
        for recorded in (False, False, True, True):
            with torch.set_grad_enabled(recorded):
                attention(q, q, q)
    assert asked == [False, True]
    assert short == ["attention", "attention"]


@pytest.mark.parametrize("name", ["attention", "attention_qkvpacked"])
def test_a_repeated_call_of_pytorch_is_neither_checked_nor_dispatched_again(
    name: str, launches: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.use_deterministic_algorithms(False)
    asked, checked = [], []
    rule = dispatch.Rule(1, None, "a test")
    monkeypatch.setattr(
        dispatch, "find_rule_of_library", lambda *_, **call: asked.append(call["backward"]) or rule
    )
    for check in ("checked_dense", "checked_packed"):
        function = getattr(ops_attention, check)
        monkeypatch.setattr(
            ops_attention, check, lambda *a, f=function, **k: checked.append(f) or f(*a, **k)
        )
    qkv = torch.randn(2, 64, 3, 4, 32, dtype=torch.bfloat16)
    q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for _ in range(3):
        if name == "attention":
            out = attention(q, k, v)
        else:
            out = attention_qkvpacked(qkv).transpose(1, 2)
        torch.testing.assert_close(out.cpu(), expected.cpu())
    assert (len(asked), len(checked)) == (1, 1)
    assert launches == []
    torch.use_deterministic_algorithms(True)  # which another signature has: ours, from now on
    attention(q, k, v)
    attention(q, k, v)
    assert len(launches) == 1


def test_a_repeated_float32_call_comes_back_without_the_memory_efficient_kernel(
    launches: list[Launched],
) -> None:
    torch.use_deterministic_algorithms(False)
    leaves = torch.randn(3, 2, 4, 64, 32)
    attention(*leaves)
    attention(*leaves)
    assert launches == []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        attention(*leaves)
        attention(*leaves)
    assert len(launches) == 1  # the second of them


@pytest.mark.parametrize("again", [False, True])
def test_a_float32_call_of_pytorch_keeps_second_derivatives(
    launches: list[Launched], again: bool
) -> None:
    torch.use_deterministic_algorithms(False)
    leaves = [leaf(2, 4, 64, 32, dtype=torch.float32) for _ in range(3)]
    for _ in range(1 + again):
        out = attention(*leaves)
    assert launches == []
    assert "TwiceDifferentiable" in type(out.grad_fn).__name__


OLD = {
    "attention": lambda: attention_with_stats(*three()),
    "qkvpacked": lambda: attention_qkvpacked_with_stats(leaf(2, 64, 3, 4, 32)),
    "varlen": lambda: attention_varlen(*[leaf(64, 2, 64)] * 3, STARTS, 64),
    "softcap": lambda: attention(*three(), softcap=9.0),
}


@pytest.mark.parametrize("call", OLD.values(), ids=OLD)
def test_a_gpu_that_triton_does_not_compile_for_is_refused_in_one_line(
    call: Callable[[], Any], launches: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tiles, "capability", lambda _: 70)
    with pytest.raises(ValueError, match=r"of compute capability 7.5 or newer, got 7.0$") as error:
        call()
    assert "\n" not in str(error.value)


def test_a_whole_number_as_softcap_reaches_the_backward_as_a_float(
    launches: list[Launched], short: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton would compile for an integer, for which the kernel is not written."""
    inputs, given = three(), []

    backward = dispatch.prepare_backward

    def logged(grad: Tensor, call: Any, *results: Any) -> Any:
        given.append(call.softcap)
        return backward(grad, call, *results)

    monkeypatch.setattr(dispatch, "prepare_backward", logged)
    for _ in range(2):
        out = attention(*inputs, softcap=1)
        torch.autograd.grad(out, inputs, torch.empty_like(out))
    assert short == ["attention"]
    assert [(type(softcap), softcap) for softcap in given] == [(float, 1.0)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_starts_that_are_converted_repeat_at_addresses_of_their_own(
    dtype: torch.dtype, launches: list[Launched], short: list[str]
) -> None:
    starts = STARTS.to(dtype)
    for _ in range(3):
        attention_varlen(*[leaf(64, 2, 64)] * 3, starts, 64)
    assert short == ["attention_varlen"] * 2
    for launch in launches:
        assert (starts.data_ptr() in launch.addresses) is (dtype == torch.int32)


def test_a_mask_that_autocast_casts_is_not_read_where_the_callers_lies(
    launches: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lengths that are converted, its second call took a float32 mask for a bfloat16 one."""
    signatures: list[Any] = []

    def noting(operator: Any, signature: Any, arguments: Any, *_: Any) -> Tensor:
        signatures.append(signature)
        return arguments.query

    monkeypatch.setattr(ops_attention.op, "compute_plain", noting)
    torch.set_autocast_enabled("cuda", True)
    try:
        attention(*three(), torch.zeros(64), key_lengths=[64, 3])
        attention(*three(), key_lengths=[64, 3])
    finally:
        torch.set_autocast_enabled("cuda", False)
    with_mask, without = signatures
    assert with_mask is None
    assert without is not None


class Names(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapped(Tensor):
    """A subclass, of which the dispatcher is to hear."""


@pytest.mark.parametrize("mode", [Names, Functions])
def test_a_mode_sees_the_operators(mode: Any, launches: list[Launched], short: list[str]) -> None:
    inputs, names = three(), []
    for _ in range(2):
        out = attention(*inputs)
        torch.autograd.grad(out, inputs, torch.empty_like(out))
    assert short == ["attention"]
    launches.clear()
    with mode(names):
        attention(*inputs)
    assert any("leaner_kernels.attention" in n.replace("::", ".") for n in names)
    assert (short, launches) == (["attention"], [])
    out = attention(*inputs)
    launches.clear()
    if mode is Names:
        with mode(names):
            torch.autograd.grad(out, inputs, torch.empty_like(out))
        assert any("attention_backward" in name for name in names)
        assert launches == []


def test_a_default_device_hides_nothing(launches: list[Launched], short: list[str]) -> None:
    inputs = three()
    for _ in range(2):
        attention(*inputs)
    with torch.device("cpu"):
        attention(*inputs)
        with Functions([]):
            attention(*inputs)
    assert short == ["attention"] * 2


def test_what_is_not_plain_goes_through_the_operators(
    launches: list[Launched], short: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = three()
    for _ in range(2):
        attention(*inputs)
        attention(*(t[0] for t in inputs))
    # Folded into four axes, what has three is a call of its own kind, which then repeats.
    assert short == ["attention"] * 2
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            attention(*inputs)
        attention(*(t.detach().as_subclass(Wrapped) for t in inputs))
        attention(*(torch._neg_view(t.detach()) for t in inputs))
        torch.func.vmap(attention)(*(t.detach()[None] for t in inputs))
        with torch.autograd.forward_ad.dual_level():
            attention(*inputs)
    assert short == ["attention"] * 2


def test_each_refusal_stays(launches: list[Launched], short: list[str]) -> None:
    query, key, value = three()
    (qkv,) = CALLS["packed"][1](64)
    for flag in (True, False):
        for _ in range(2):
            attention(query, key, value, None, 0.0, flag)
            attention_qkvpacked(qkv, is_causal=flag)
    assert len(short) == 4
    other = leaf(2, 2, 64, 64, dtype=torch.float32)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: attention(query, key, value, None, 0.0, 1), "is_causal must be True or False"),  # pyright: ignore[reportArgumentType]
        (lambda: attention_qkvpacked(qkv, is_causal=1), "is_causal must be True or False"),  # pyright: ignore[reportArgumentType]
        (lambda: attention(query, key, value, scale="1"), "scale must be a finite number"),  # pyright: ignore[reportArgumentType]
        (lambda: attention(query, key, value, scale=[1]), "scale must be a finite number"),  # pyright: ignore[reportArgumentType]
        (lambda: attention(query, key, value, dropout_p="0"), "dropout_p must be in"),  # pyright: ignore[reportArgumentType]
        (lambda: attention(query, key, other), "value must be torch.bfloat16"),
        (lambda: attention(query, key, 3), "value must be a tensor"),  # pyright: ignore[reportArgumentType]
        (lambda: attention(query, key[:, :1], value), "key and value must have the same shape"),
        (lambda: attention_qkvpacked(qkv.to_sparse()), "qkv must be a dense tensor"),
        (lambda: attention_qkvpacked(qkv[:, :, :2]), "qkv must be "),
        *(
            (partial(attention, query, key, value, window_size=window), "window_size must be")
            for window in ((True, 0), (1.0, 0), ([1], 0))
        ),
    ]
    attention(query, key, value, window_size=(1, 0))
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    assert len(short) == 4


def test_second_derivatives_come_from_the_operator(
    launches: list[Launched], short: list[str]
) -> None:
    inputs = three(tokens=16)
    for _ in range(2):
        out = attention(*inputs)
        grad = torch.randn(out.shape).to(out)
        torch.autograd.grad(out, inputs, grad)
    out = attention(*inputs)
    assert short == ["attention"] * 2
    launches.clear()
    first = torch.autograd.grad(out, inputs, grad, create_graph=True)
    assert launches == []
    assert all(t.requires_grad for t in first)
    second = torch.autograd.grad(sum(t.float().sum() for t in first), inputs)
    assert [t.shape for t in second] == [t.shape for t in inputs]


def test_another_gradient_than_before_is_another_kind(
    launches: list[Launched], short: list[str]
) -> None:
    inputs = three()
    out = attention(*inputs)
    grads = torch.empty_like(out), torch.empty(out.shape).to(out), torch.ones(()).to(out)
    grads = *grads[:2], grads[2].expand(out.shape), leaf(*out.shape, apart=1).detach()
    entries = []
    for _ in range(2):
        for grad in grads:
            out = attention(*inputs)
            launches.clear()
            torch.autograd.grad(out, inputs, grad)
            entries.append([each.entry for each in launches])
    first, second, expanded, shifted = entries[4:]
    assert [len(each) for each in entries[4:]] == [1] * 4
    assert second == expanded  # which has been copied
    assert first != second
    assert shifted not in (first, second)


def test_a_hook_that_saves_another_layout_goes_another_way(launches: list[Launched]) -> None:
    inputs = three()
    for _ in range(2):
        out = attention(*inputs)
        grad = torch.empty_like(out)
        torch.autograd.grad(out, inputs, grad)
    usual = launches[-1].entry
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda t: t):
        out = attention(*inputs)
    torch.autograd.grad(out, inputs, grad)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda t: t):
        out = attention(*inputs)
    launches.clear()
    torch.autograd.grad(out, inputs, grad)
    assert [each.entry is usual for each in launches] == [False]
