"""Every kernel of softmax attention, compiled for cards this machine does not have.

The specialisations are those that the launchers ask for: a recorder stands in for the kernel.
"""

import os
from typing import NamedTuple

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from leaner_kernels.ops.attention import backward, forward, operators
from tests.aot.resources import SHARED_LIMIT, Recorder, compile_launch


class Flavour(NamedTuple):
    """What a launch asks for, and the head dimensions it is compiled with."""

    dims: tuple[int, ...]
    causal: bool = False
    lengths: bool = False
    mask: bool = False
    dropout: bool = False


FLAVOURS = {
    "plain": Flavour((16, 32, 64, 128)),
    "causal with lengths": Flavour((10, 30, 42, 80), causal=True, lengths=True),
    "mask, dropout and lengths": Flavour((10, 32, 48, 80), lengths=True, mask=True, dropout=True),
}
KINDS = "forward", "statistics", "capture", "backward"
CASES = [
    pytest.param(kind, flavour, dim, dtype, id=f"{kind}-{name}-{dim}-{str(dtype)[6:]}")
    for kind in KINDS
    for name, flavour in FLAVOURS.items()
    for dim in flavour.dims
    for dtype in (torch.bfloat16, torch.float32)
]
CASES.append(
    pytest.param("backward", FLAVOURS["plain"], 64, torch.float16, id="backward-plain-64-float16")
)


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    found = {
        "forward": Recorder(forward._attention_fwd_kernel),
        "backward": Recorder(backward._attention_bwd_kernel),
    }
    monkeypatch.setattr(forward, "_attention_fwd_kernel", found["forward"])
    monkeypatch.setattr(backward, "_attention_bwd_kernel", found["backward"])
    return found


def launch(kind: str, flavour: Flavour, dim: int, dtype: torch.dtype) -> None:
    """Call the launcher on ViT-B's sequence; only shapes, strides and dtypes matter."""
    batch, rows, heads = 2, 197, 12
    query, key, value = operators.split_packed(torch.empty(batch, rows, 3, heads, dim, dtype=dtype))
    mask = torch.empty(batch, heads, rows, rows, dtype=dtype) if flavour.mask else None
    lengths = torch.ones(batch, dtype=torch.int32) if flavour.lengths else None
    seed = torch.zeros(1, dtype=torch.int64) if flavour.dropout else None
    dropout_p = 0.1 if flavour.dropout else 0.0
    arguments = query, key, value, mask, lengths, seed, dropout_p, flavour.causal, dim**-0.5
    out, lse = operators.new_out(query), torch.empty(batch, heads, rows)
    sample = torch.zeros(1, dtype=torch.int32)
    *stats, captured = operators.new_stats(query, sample)
    if kind == "capture":
        forward.launch_capture(*arguments, sample, captured)
    elif kind == "backward":
        *grads, dmask = operators.new_gradients(query, key, value, mask, mask is not None)
        backward.launch(out, *arguments, out, lse, *grads, None if mask is None else dmask)
    else:
        forward.launch(*arguments, out, lse, stats if kind == "statistics" else None)


@pytest.mark.parametrize(("kind", "flavour", "dim", "dtype"), CASES)
def test_kernel_fits_every_supported_card(
    kind: str, flavour: Flavour, dim: int, dtype: torch.dtype, recorders: dict[str, Recorder]
) -> None:
    launch(kind, flavour, dim, dtype)
    recorder = recorders["backward" if kind == "backward" else "forward"]
    (arguments,) = recorder.launches
    for capability, shared_limit in SHARED_LIMIT.items():
        used = compile_launch(recorder.kernel, arguments, capability)
        assert (used.stack, used.local) == (0, 0), f"sm_{capability} spills: {used}"
        assert used.shared <= shared_limit, f"sm_{capability}: {used}"


def test_a_tile_that_is_too_large_is_noticed(
    monkeypatch: pytest.MonkeyPatch, recorders: dict[str, Recorder]
) -> None:
    """The measurement can fail: 128 x 128 scores in four warps cannot stay in registers."""
    monkeypatch.setitem(forward.TILES, (2, 64), forward.Tiles(128, 128, 4, 2))
    launch("statistics", FLAVOURS["plain"], 64, torch.bfloat16)
    (arguments,) = recorders["forward"].launches
    assert compile_launch(recorders["forward"].kernel, arguments, 80).stack > 0
