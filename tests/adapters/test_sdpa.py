"""The registration behind scaled_dot_product_attention: what is active when, and what is left."""

import logging
import threading
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import attention as registry

import leaner_kernels
from leaner_kernels.adapters import sdpa
from leaner_kernels.adapters.sdpa_operators import OPERATORS
from leaner_kernels.ops import _tiles
from leaner_kernels.ops.attention import aten as ours
from leaner_kernels.ops.attention import sdpa as library
from leaner_kernels.ops.attention.call import Call, Sequences
from tests.replaced_operators import aten, replaced

NAME = "aten::_scaled_dot_product_flash_attention"
pytestmark = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key(NAME, "CUDA"),
    reason="this build of PyTorch has no kernels for CUDA",
)


def kernels() -> list[str]:
    """Where the kernels of all operators were registered."""
    return [str(torch.library.get_kernel(f"aten::{name}", "CUDA")) for name in OPERATORS]


BEFORE = kernels()


class OtherHandle:
    """An implementation like FlashAttention 4: it replaces one operator."""

    def __init__(self) -> None:
        self.library = torch.library.Library("aten", "IMPL", "CUDA")
        with warnings.catch_warnings(action="ignore"):
            self.library.impl(NAME, lambda *_: None, "CUDA")

    def remove(self) -> None:
        self.library._destroy()


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    registry.restore_flash_attention_impl(_raise_warn=False)
    registry._registry._FLASH_ATTENTION_IMPLS.pop("other", None)
    assert kernels() == BEFORE


def test_importing_the_package_registers_a_name_and_replaces_nothing() -> None:
    assert "leaner" in registry.list_flash_attention_impls()
    assert registry.current_flash_attention_impl() is None


def test_activating_twice_and_restoring_brings_back_the_kernels(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    registry.activate_flash_attention_impl("leaner")
    assert not set(kernels()) & set(BEFORE)
    registry.activate_flash_attention_impl("leaner")
    assert registry.current_flash_attention_impl() == "leaner"
    with caplog.at_level(logging.WARNING):
        registry.restore_flash_attention_impl()
    assert not caplog.records
    assert not recwarn.list
    assert kernels() == BEFORE


def test_a_handle_is_removed_once() -> None:
    handle = sdpa.Handle()
    handle.remove()
    handle.remove()
    assert kernels() == BEFORE


def test_blocks_nest_and_end_with_an_exception() -> None:
    with pytest.raises(KeyError), leaner_kernels.use_sdpa(), leaner_kernels.use_sdpa():
        raise KeyError
    assert registry.current_flash_attention_impl() is None
    with leaner_kernels.use_sdpa():
        with leaner_kernels.use_sdpa():
            pass
        assert registry.current_flash_attention_impl() == "leaner"
    assert kernels() == BEFORE


def test_a_block_keeps_ours_active_that_was_active_before() -> None:
    registry.activate_flash_attention_impl("leaner")
    with leaner_kernels.use_sdpa():
        pass
    assert registry.current_flash_attention_impl() == "leaner"


def test_a_block_gives_back_another_implementation() -> None:
    registry.register_flash_attention_impl("other", register_fn=OtherHandle)
    registry.activate_flash_attention_impl("other")
    others = kernels()
    assert others != BEFORE
    with leaner_kernels.use_sdpa():
        assert registry.current_flash_attention_impl() == "leaner"
    assert registry.current_flash_attention_impl() == "other"
    assert kernels() == others


def test_a_block_of_another_thread_keeps_ours_active() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with leaner_kernels.use_sdpa():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with leaner_kernels.use_sdpa():
        thread.start()
        assert entered.wait(10)
    assert registry.current_flash_attention_impl() == "leaner"
    leave.set()
    thread.join()
    assert kernels() == BEFORE


def test_rocm_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(RuntimeError, match=r"^leaner_kernels does not support ROCm.*$"):
        registry.activate_flash_attention_impl("leaner")
    with pytest.raises(RuntimeError, match="ROCm"), leaner_kernels.use_sdpa():
        pass
    assert registry.current_flash_attention_impl() is None


# --- Calls that are not ours ----------------------------------------------------------------------


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.half)


SHORT = (half(1, 2, 17, 64),) * 3
LONG = (half(1, 2, 4096, 64),) * 3
LEFT: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "long sequences": (LONG, {}),
    "float32": (tuple(t.float() for t in SHORT), {}),
    "wide heads": ((half(1, 2, 17, 256),) * 3, {"scale": 0.5}),
    "a value of another width": ((*SHORT[:2], half(1, 2, 17, 32)), {}),
    "causal, crossed": ((SHORT[0], *(half(1, 2, 9, 64),) * 2, 0.0, True), {}),
    "a debug mask": ((*SHORT, 0.25, False, True), {}),
    "a negative scale": ((*SHORT, 0.25, True), {"scale": -1.0}),
    "nothing is kept": ((*SHORT, 1.0), {}),
    "no batch": ((half(0, 2, 17, 64),) * 3, {}),
}


@pytest.mark.parametrize("case", LEFT)
def test_a_call_that_is_not_ours_arrives_below_as_it_was_made(case: str) -> None:
    torch.use_deterministic_algorithms(False)  # they rule out libraries
    args, kwargs = LEFT[case]
    with replaced() as below:
        for _ in range(2):  # the decision is remembered
            aten._scaled_dot_product_flash_attention(*args, **kwargs)
    assert len(below) == 2
    for name, arrived, options in below:
        assert name == NAME.removeprefix("aten::")
        assert len(arrived) == len(args)
        for actual, expected in zip(arrived, args, strict=True):
            assert actual is expected or (not torch.is_tensor(actual) and actual == expected)
        assert options == kwargs


STARTS = torch.tensor([0, 5, 17], dtype=torch.int32)
TOKENS = (half(17, 2, 64),) * 3
OTHERS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "cuDNN, long": ("_scaled_dot_product_cudnn_attention", (*LONG, None, True), {}),
    "cuDNN, a boolean mask": (
        "_scaled_dot_product_cudnn_attention",
        (*SHORT, torch.ones(17, 17, dtype=torch.bool), True, 0.5),
        {"scale": 0.5},
    ),
    "cuDNN, a causal mask and another": (
        "_scaled_dot_product_cudnn_attention", (*SHORT, half(17, 17), False, 0.0, True), {},
    ),
    "memory-efficient, no mask": (
        "_scaled_dot_product_efficient_attention", (*SHORT, None, True, 0.0, True), {"scale": 0.5},
    ),
    "memory-efficient, float32": (
        "_scaled_dot_product_efficient_attention",
        (*(t.float() for t in SHORT), torch.zeros(17, 17), True),
        {},
    ),
    "flash, dense": (
        "_flash_attention_forward", (*SHORT, None, None, 17, 17, 0.0, False, False), {},
    ),
    "varlen, a window": (
        "_flash_attention_forward", (*TOKENS, STARTS, STARTS, 12, 12, 0.0, False, False),
        {"window_size_left": 3, "window_size_right": 0},
    ),
    "varlen, lengths of the keys": (
        "_flash_attention_forward", (*TOKENS, STARTS, STARTS, 12, 12, 0.0, False, False),
        {"seqused_k": STARTS[1:]},
    ),
    "varlen, causal, other starts of keys": (
        "_flash_attention_forward", (*TOKENS, STARTS, STARTS.clone(), 12, 12, 0.0, True, False), {},
    ),
    "varlen, causal, dropout": (
        "_flash_attention_forward", (*TOKENS, STARTS, STARTS, 12, 12, 0.25, True, False), {},
    ),
    "varlen, starts of 64 bits": (
        "_flash_attention_forward",
        (*TOKENS, STARTS.long(), STARTS.long(), 12, 12, 0.0, False, False),
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_so_does_a_call_of_another_operator(case: str) -> None:
    torch.use_deterministic_algorithms(False)
    name, args, kwargs = OTHERS[case]
    with replaced() as below:
        getattr(aten, name)(*args, **kwargs)
    (call,) = below
    assert call.name == name
    assert call.kwargs == kwargs
    pairs = zip(call.args, args, strict=True)
    assert all(a is b or (not torch.is_tensor(b) and a == b) for a, b in pairs)


@pytest.mark.parametrize("capability", [75, 80, 90, 100])
def test_the_rule_is_that_of_explain(capability: int) -> None:
    torch.use_deterministic_algorithms(False)
    ours_of_all = []
    for tokens, causal, backward in product((64, 300, 2048), (False, True), (False, True)):
        t = half(4, 8, tokens, 64)
        options = {"is_causal": causal, "backward": backward, "capability": capability}
        route = leaner_kernels.explain(t, t, t, **options).forward.implementation
        call = Call(t, t, t, None, None, None, 0.0, causal, None)
        with _tiles.assume(capability):
            ours_of_all.append(ours.takes(call, backward))
        assert ours_of_all[-1] == (route != "sdpa")
    assert any(ours_of_all) == (capability >= 80)


def test_before_8_0_every_call_is_left() -> None:
    torch.use_deterministic_algorithms(False)
    with replaced(75) as below:
        aten._scaled_dot_product_flash_attention(*SHORT)
        aten._scaled_dot_product_flash_attention(*SHORT, 0.1)
    assert len(below) == 2


def test_attention_reaches_the_kernels_below_where_it_calls_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def through_flash(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        return aten._scaled_dot_product_flash_attention(q, k, v)[0]

    monkeypatch.setattr(library, "_sdpa", through_flash)
    call = Call(*SHORT, None, None, None, 0.0, False, None)
    with replaced() as below:
        assert library.library_attention(call, False).shape == SHORT[0].shape
        assert len(below) == 1
        assert not library.passing.on


def test_varlen_attention_reaches_the_kernels_below_where_it_calls_pytorch() -> None:
    starts = torch.tensor([0, 5, 17], dtype=torch.int32)
    sequences = Sequences(starts, starts, 12, 12)
    call = Call(*TOKENS, None, None, None, 0.0, True, None, sequences=sequences)
    with replaced() as below, mock.patch("leaner_kernels.ops.attention.sdpa._fill_with_zeros"):
        library.varlen_attention(call)
    assert [call.name for call in below] == ["_flash_attention_forward"]


def test_other_threads_keep_our_kernels_while_one_calls_those_below() -> None:
    def other_thread() -> None:
        thread = threading.Thread(target=run, args=SHORT)
        thread.start()
        thread.join()

    run = aten._scaled_dot_product_flash_attention
    with replaced(), mock.patch.object(ours, "forward", return_value=None) as attend:
        library._below_ours(run, *SHORT)
        assert not attend.call_count
        library._below_ours(other_thread)
        assert attend.call_count == 1


def test_a_backward_with_dropout_of_pytorchs_forward_is_pytorchs() -> None:
    query, lse = SHORT[0], torch.zeros(1, 2, 17)
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    arguments = query, *SHORT, query, lse, None, None, 17, 17, 0.1, False, *state
    with replaced() as below:
        aten._scaled_dot_product_flash_attention_backward(*arguments)
    assert [call.name for call in below] == [f"{NAME.removeprefix('aten::')}_backward"]


def test_the_lowest_mask_stays_finite_in_what_a_backward_reads() -> None:
    lse = torch.tensor([1.5, torch.finfo(torch.float32).min, -torch.inf])
    first, second = ours.rows_of(lse, hidden=True, scaled=True).unbind(-1)
    assert (second * 1.4427).isfinite().all()  # kernels take it to base 2
    assert torch.equal((first + second)[:2], lse[:2])
    assert first[2] == torch.finfo(torch.float32).max


def test_a_release_of_pytorch_has_every_operator_that_is_replaced() -> None:
    for name in OPERATORS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"), name
