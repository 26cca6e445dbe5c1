"""Every kernel of softmax attention, compiled for cards this machine does not have.

The specialisations are those that the CUDA operators launch: of each combination of features here,
and of each case of the benchmark, which is also held to the committed table.
"""

import json
import os
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from bench import resources
from bench.cases import Case
from bench.compile_ahead import CARDS, compile_launch
from leaner_kernels.ops.attention.operators import split_packed

TABLE = json.loads(resources.TABLE.read_text("utf-8"))
SEQUENCES, HEADS, GROUP = 2, 12, 3
BF16, FP32 = torch.bfloat16, torch.float32


class Flavour(NamedTuple):
    """Features of a call, and the head dimensions that it is compiled with."""

    dims: tuple[int, ...]
    dtype: torch.dtype
    tokens: int = 197
    causal: bool = False
    lengths: bool = False
    mask: bool = False
    dropout: bool = False
    shared_keys: bool = False
    ragged: bool = False

    def call(self, dim: int) -> resources.Call:
        """Return the call; only shapes, strides and dtypes matter."""
        knobs = 0.1 if self.dropout else 0.0, self.causal, dim**-0.5
        seed = torch.zeros(1, dtype=torch.int64) if self.dropout else None
        packed = torch.empty(SEQUENCES, self.tokens, 3, HEADS, dim, dtype=self.dtype, device="meta")
        if self.ragged:
            return resources.varlen_call(packed.flatten(0, 1), SEQUENCES, self.tokens, seed, knobs)
        mask, lengths = None, None
        if self.mask:
            shape = SEQUENCES, HEADS, self.tokens, self.tokens
            mask = torch.empty(shape, dtype=self.dtype, device="meta")
        if self.lengths:
            lengths = torch.empty(SEQUENCES, dtype=torch.int32, device="meta")
        query, key, value = split_packed(packed)
        if self.shared_keys:
            key, value = key[:, : HEADS // GROUP], value[:, : HEADS // GROUP]
        return resources.dense_call(query, key, value, mask, lengths, seed, knobs=knobs)


# Every pair of tiles is compiled once: by dtype, by what fills its registers, by head dimension up
# to a power of two. In bfloat16 the plain ones are cases of the benchmark.
FLAVOURS = {
    "plain": Flavour((16, 32, 64, 128), FP32),
    "plain, half": Flavour((16,), BF16),
    "causal with lengths": Flavour((10, 30, 42, 80), BF16, causal=True, lengths=True),
    "causal with lengths, single": Flavour((30, 80), FP32, causal=True, lengths=True),
    "mask, dropout and lengths": Flavour(
        (10, 32, 48, 80), BF16, lengths=True, mask=True, dropout=True
    ),
    "mask, dropout and lengths, single": Flavour(
        (10, 48), FP32, lengths=True, mask=True, dropout=True
    ),
    "short, mask, dropout and lengths": Flavour(
        (10, 32), BF16, tokens=49, lengths=True, mask=True, dropout=True
    ),
    "long, mask, dropout and lengths": Flavour(
        (10, 48), BF16, tokens=1009, lengths=True, mask=True, dropout=True
    ),
    "long, causal with shared keys": Flavour(
        (32, 80), BF16, tokens=1009, causal=True, lengths=True, shared_keys=True
    ),
    "ragged, causal with dropout": Flavour((10, 64), BF16, causal=True, dropout=True, ragged=True),
    "ragged, single": Flavour((64,), FP32, dropout=True, ragged=True),
}
KINDS = "forward", "statistics", "capture", "backward"
CALLS = [
    pytest.param(kind, flavour, dim, id=f"{kind}-{name}-{dim}")
    for kind in KINDS
    for name, flavour in FLAVOURS.items()
    for dim in flavour.dims
]


@pytest.mark.parametrize(("kind", "flavour", "dim"), CALLS)
def test_kernel_fits_every_supported_card(kind: str, flavour: Flavour, dim: int) -> None:
    for card in resources.SUPPORTED:
        found = flavour.call(dim).launches(card)[kind]
        assert found, f"sm_{card}: nothing is launched"
        for launch in found:
            used = compile_launch(launch, card)
            assert (used.stack, used.spills) == (0, 0), f"sm_{card} {launch.name} spills: {used}"
            assert used.shared <= CARDS[card].shared_per_program, f"sm_{card}: {used}"
            assert used.programs_per_sm >= 1, f"sm_{card}: {used}"


@pytest.mark.parametrize("card", resources.SUPPORTED, ids="sm_{}".format)
@pytest.mark.parametrize("case", resources.cuda_cases(), ids=lambda case: case.name)
def test_case_of_the_benchmark_stays_within_the_committed_table(case: Case, card: int) -> None:
    rows = list(resources.rows([case], [card]))
    assert {row["launch"] for row in rows} == set(KINDS)
    assert [fault for row in rows for fault in resources.faults(row, TABLE)] == []


def test_a_tile_that_is_too_large_is_noticed() -> None:
    """The measurement can fail: 128 x 128 scores in four warps cannot stay in registers."""
    (launch,) = Flavour((64,), BF16, tokens=1009).call(64).launches(80)["statistics"]
    too_large = {**launch.kwargs, "BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4}
    used = compile_launch(replace(launch, kwargs=too_large), 80)
    assert used.stack > 0
    assert used.spills > 0
