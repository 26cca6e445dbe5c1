"""Calls that must be refused: a valid call of which one argument is broken."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import torch

from tests.fuzz.strategies import Block, Draw, FuzzCase, Limits, Made, Mask, Whole, valid_cases

_INTEGERS = torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool
_OTHERS = *_INTEGERS, torch.complex64, torch.float8_e4m3fn
NO_TENSORS = None, 3.0, "query", [1.0, 2.0], (), {}, object
NO_NUMBERS = "1", None, [1.0], 1j, torch.tensor(1.0), torch.tensor([1.0, 2.0])
NO_COUNTS = "3", None, 1.5, 2.0, math.nan, math.inf, -1, [2], torch.tensor(2), 10**30
NO_FLAGS = "yes", None, 0.5, [], torch.tensor([True, False]), object
# Arguments whose own message no operator of PyTorch gives in place of ours.
WITHOUT = {"scale": (None,), "key_lengths": (None,), "sample": (None,), "attn_mask": (None,)}


def _of_numbers(name: str, value: Any) -> Iterator[Any]:
    if name == "scale":
        yield from (math.nan, math.inf, -math.inf, 10**400, *NO_NUMBERS)
    elif name == "softcap":
        yield from (-1.0, 1e-31, 1e31, True, math.nan, math.inf, 10**400, *NO_NUMBERS)
    elif name == "eps":
        yield from (0, -1e-3, 1e-16, math.nan, math.inf, 10**400, *NO_NUMBERS)
    elif name == "dropout_p":
        yield from (-0.1, 1.0, 1.5, math.nan, math.inf, -(10**400), *NO_NUMBERS)
    elif name == "window_size":
        yield from (0, (), (1,), (2, 2, 2), (0, 1), (1, -1), "77", (1.0, 2), *NO_COUNTS)
    elif name in ("num_landmarks", "iterations", "kernel_size", "stride"):
        yield from (0, 300, *NO_COUNTS)
    elif name == "padding":
        yield from (7, *NO_COUNTS)
    elif name.startswith("max_seqlen"):
        yield from (0, *NO_COUNTS)
    elif name in ("is_causal", "enable_gqa"):
        yield from NO_FLAGS
    elif name == "init":
        yield from ("", "matrices", None, 1, [], {}, torch.tensor(1))


def _of_whole(name: str, value: Whole, most: int) -> Iterator[Any]:
    """``most`` is the largest number that may stand there."""
    value = value._replace(dtype=torch.int32)
    numbers = value.values
    yield from (3, "lengths", object, list(map(float, numbers)) or [0.5], [True, *numbers])
    yield [2**31, *numbers[1:]]
    # A sample is int32; of lengths and starts any integers are taken, but none past int32.
    if name == "sample":
        yield from (list(numbers), value._replace(dtype=torch.int64))
    else:
        yield value._replace(values=(*numbers[:-1], 2**32 + 1), dtype=torch.int64)
        yield (*numbers[:-1], most + 1)
    yield Made(f"two axes of {name}", lambda device: value.make(device)[None])
    yield Made(f"{name} on meta", lambda _: value.make("meta"))
    yield Made(f"{name} that is sparse", lambda device: value.make(device).to_sparse())
    for dtype in (torch.float32, torch.bool, torch.complex64):
        yield value._replace(dtype=dtype)
    if numbers:
        yield value._replace(values=(most + 1, *numbers[1:]))
        yield value._replace(values=(*numbers[:-1], 2**31 - 1))
    if name == "key_lengths":
        yield value._replace(values=(*numbers, 1))
        yield value._replace(values=())
        yield value._replace(values=(0, *numbers[1:]))
        yield value._replace(values=(*numbers[:-1], -1))
    if name.startswith("cu_seqlens"):
        yield value._replace(values=())
        yield value._replace(values=(-1, *numbers[1:]))
        yield value._replace(values=(numbers[-1] + 1, *numbers[1:]))


def _of_tensors(name: str, value: Block, shared: bool) -> Iterator[Any]:
    """``shared`` states that other tensors of the call must agree with this one."""
    shape = value.shape
    yield from NO_TENSORS
    plain = value._replace(layout="plain")
    for dtype in _OTHERS:
        yield Made(
            f"{name} of {dtype}",
            lambda device, dtype=dtype: torch.ones(shape, device=device).to(dtype),
        )
    yield Made(f"sparse {name}", lambda device: plain.make(device).to_sparse())
    yield Made(f"nested {name}", lambda device: torch.nested.nested_tensor([plain.make(device)]))
    yield value._replace(shape=(*shape, 1, 1, 1, 1))
    yield value._replace(shape=())
    if name == "temperature":
        yield value._replace(shape=(shape[0] + 1,))
        yield Made(f"{name} on meta", lambda _: plain.make("meta"))
        return
    for axis in _never_empty(name, len(shape), shared):
        yield value._replace(shape=(*shape[:axis], 0, *shape[axis + 1 :]))
    if shape[-1] > 1:
        yield value._replace(layout="gaps")
    yield value._replace(shape=(*shape[:-1], 129 if name != "logits" else shape[-1] + 1))
    if shared:
        yield Made(f"{name} on meta", lambda _: plain.make("meta"))
        yield value._replace(dtype=torch.float64 if value.dtype != torch.float64 else torch.half)
    else:
        yield value._replace(shape=shape[1:])
    if name in ("value", "logits") and shared:
        # A map may have a row more and as many windows, and its heads any width.
        for axis in (0, 3) if len(shape) == 5 else range(len(shape)):
            yield value._replace(shape=(*shape[:axis], shape[axis] + 1, *shape[axis + 1 :]))


def _never_empty(name: str, axes: int, shared: bool) -> Sequence[int]:
    """Return the axes that are refused when empty: D, three of qkv, and where others disagree."""
    if not shared:
        return (axes - 1, axes - 3) if name == "qkv" else (axes - 1,)
    # A query may have no rows, nor heads that share one of the key.
    return [axis for axis in range(axes) if name != "query" or axis not in (axes - 2, axes - 3)]


def _of_masks(value: Mask | Block, query: Block) -> Iterator[Any]:
    shape = value.shape
    yield from ("mask", 1.0, [True], object)
    yield Made("mask on meta", lambda _: torch.ones(shape, device="meta", dtype=torch.bool))
    yield Made("sparse mask", lambda d: torch.ones(shape, device=d, dtype=torch.bool).to_sparse())
    others = {torch.float64, torch.float16, torch.bfloat16} - {query.dtype}
    for dtype in (torch.int64, torch.uint8, torch.complex64, *sorted(others, key=str)):
        yield Made(f"mask of {dtype}", lambda d, x=dtype: torch.ones(shape, device=d, dtype=x))
    yield value._replace(shape=(3, *(1,) * 6), layout="plain")
    yield value._replace(shape=(*shape[:-1], 777), layout="plain")
    yield value._replace(shape=(*shape[:-1], 0), layout="plain")


def _breakages(case: FuzzCase) -> Iterator[tuple[str, Any]]:
    """Yield names of arguments, and what nobody may pass in their place."""
    given = case.arguments
    first = next(v for v in given.values() if isinstance(v, Block))
    tensors = [n for n, v in given.items() if isinstance(v, Block) and n != "attn_mask"]
    for name, value in given.items():
        broken: Iterator[Any] = iter(())
        if name == "attn_mask":
            broken = iter(()) if value is None else _of_masks(value, first)
        elif isinstance(value, Block):
            broken = _of_tensors(name, value, len(tensors) > 1 and "temperature" not in tensors)
        elif isinstance(value, Whole):
            broken = _of_whole(name, value, _most(case, name, first))
        else:
            broken = _of_numbers(name, value)
        for each in broken:
            if not (each is None and name in WITHOUT) and not _counts_nothing(case, name, each):
                yield name, each
    if "attention" in case.function and "temperature" not in given and "window_size" not in given:
        for each in _of_numbers("dropout_p", 0.0):
            if "query" in given and "num_landmarks" not in given:
                yield "dropout_p", each
    if "num_landmarks" in given:
        yield "num_landmarks", first.shape[2]
    if "window_size" in given:
        yield "window_size", (first.shape[1] + 1, 1)
    if given.get("enable_gqa") and first.shape[-3 + (len(first.shape) == 3)] != 0:
        yield from _of_groups(case, first)


def _counts_nothing(case: FuzzCase, name: str, number: Any) -> bool:
    """Whether it is a ``max_seqlen`` of 0 of sequences that are all empty."""
    starts = case.arguments.get(name.replace("max_seqlen", "cu_seqlens"))
    return name.startswith("max_seqlen") and number == 0 and len(set(starts.values)) < 2


def _of_groups(case: FuzzCase, query: Block) -> Iterator[tuple[str, Any]]:
    axis = 1 if "cu_seqlens" in case.arguments else -3
    if len(query.shape) < 3:
        return
    heads, key_heads = query.shape[axis], case.arguments["key"].shape[axis]
    if heads != key_heads:
        yield "enable_gqa", False


def _most(case: FuzzCase, name: str, first: Block) -> int:
    if name == "sample":
        starts = case.arguments.get("cu_seqlens")
        return (len(starts.values) - 1 if starts else first.shape[0]) - 1
    if name == "cu_seqlens":
        return case.arguments["query"].shape[0]
    if name == "cu_seqlens_k":
        return case.arguments["key"].shape[0]
    columns = case.arguments["key"].shape[-2] if "key" in case.arguments else first.shape[1]
    return columns


@st.composite
def broken_cases(
    draw: Draw,
    function: str,
    limits: Limits = Limits(),  # noqa: B008
    allowed: Callable[[str, Any], bool] = lambda name, value: True,
) -> FuzzCase:
    """Draw a call that must be refused, by the values of its numbers too where these can be read.

    ``allowed(name, value)`` leaves out what cannot be tested: on a GPU lengths are not read back.
    """
    case = draw(valid_cases(function, limits))
    choices = [each for each in _breakages(case) if allowed(*each)]
    # By name first, so that what has many ways to be broken is not all that is broken.
    wrong = draw(st.sampled_from(sorted({name for name, _ in choices})))
    place = draw(st.sampled_from([i for i, (name, _) in enumerate(choices) if name == wrong]))
    arguments = case.arguments | {wrong: choices[place][1]}
    return FuzzCase(function, arguments, valid=False, wrong=wrong)


def outcome(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return what a call gives and None, or None and the one line of its ValueError."""
    try:
        result = call()
    except ValueError as error:
        line = str(error)
    else:
        return result, None
    assert len(line.splitlines()) == 1, line
    return None, line
