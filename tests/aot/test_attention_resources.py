"""Every kernel of softmax attention, compiled for GPUs this machine does not have.

The specialisations are those that the CUDA operators launch: of each combination of features here,
and of each case of the benchmark, which is also held to the committed table.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("runs without TRITON_INTERPRET=1, on backend cpu", allow_module_level=True)

from bench import resources
from bench.attention.cases import CASES, AttentionCase
from bench.gpu_model.candidates import CANDIDATES
from bench.gpu_model.compile_ahead import (
    GPUS,
    Launch,
    compile_launch,
    recorded,
    tuned,
)
from bench.gpu_model.launches import OperatorCall, call_of, dense_call, varlen_call
from leaner_kernels.ops import _gluon, _tiles
from leaner_kernels.ops._tiles import Rule
from leaner_kernels.ops.attention import dispatch, op
from leaner_kernels.ops.attention.call import Call
from leaner_kernels.ops.attention.kernels import MAX_ENTRIES
from leaner_kernels.ops.attention.op import new_out, split_qkv
from leaner_kernels.ops.route import Results
from tests import shared_lse
from tests.attention_cases import sharing_lse
from tests.resource_limits import faults
from tests.tile_tables import TABLES

TABLE = json.loads(resources.TABLE.read_text("utf-8"))
SEQUENCES, HEADS, GROUP = 24, 12, 3
BF16, FP32 = torch.bfloat16, torch.float32
OTHERS = 89, 100, 120  # GPUs that rules of others serve


class Flavour(NamedTuple):
    """Features of a call, and the head dimensions that it is compiled with."""

    dims: tuple[int, ...]
    dtype: torch.dtype
    tokens: int = 1009
    causal: bool = False
    lengths: bool = False
    mask: bool = False
    dropout: bool = False
    shared_keys: bool = False
    ragged: bool = False
    softcap: float = 0.0
    window: tuple[int, int] = (-1, -1)

    def call(self, dim: int) -> OperatorCall:
        """Return the call; only shapes, strides and dtypes matter."""
        params = 0.1 if self.dropout else 0.0, self.causal, dim**-0.5
        seed = torch.zeros(1, dtype=torch.int64) if self.dropout else None
        packed = torch.empty(SEQUENCES, self.tokens, 3, HEADS, dim, dtype=self.dtype, device="meta")
        if self.ragged:
            flat = packed.flatten(0, 1)
            return varlen_call(flat, SEQUENCES, self.tokens, seed, params, self.window)
        mask, lengths = None, None
        if self.mask:
            shape = SEQUENCES, HEADS, self.tokens, self.tokens
            mask = torch.empty(shape, dtype=self.dtype, device="meta")
        if self.lengths:
            lengths = torch.empty(SEQUENCES, dtype=torch.int32, device="meta")
        query, key, value = split_qkv(packed)
        if self.shared_keys:
            key, value = key[:, : HEADS // GROUP], value[:, : HEADS // GROUP]
        inputs, params = (query, key, value, mask, lengths, seed), (*params, self.softcap)
        return dense_call(*inputs, params=params, window=self.window)


# Every pair of tiles of the kernels that walk over any length is compiled once: by dtype, by what
# fills its registers, by head dimension up to a power of two.
FLAVOURS = {
    "plain": Flavour((16, 32, 64, 128), FP32),
    "plain, half": Flavour((16,), BF16),  # the benchmark has the others
    "causal with lengths": Flavour((10, 42, 80), BF16, causal=True, lengths=True),
    "causal with lengths, single": Flavour((30, 80), FP32, causal=True, lengths=True),
    "mask, dropout and lengths": Flavour(
        (10, 32, 48, 80), BF16, lengths=True, mask=True, dropout=True
    ),
    "mask, dropout and lengths, single": Flavour(
        (10, 48), FP32, lengths=True, mask=True, dropout=True
    ),
    "causal with shared keys": Flavour(
        (32, 64, 80), BF16, causal=True, lengths=True, shared_keys=True
    ),
    "ragged, causal with dropout": Flavour((10, 64), BF16, causal=True, dropout=True, ragged=True),
    "ragged, single": Flavour((64,), FP32, dropout=True, ragged=True),
    "softcap": Flavour((16, 32, 64, 128), BF16, causal=True, shared_keys=True, softcap=50.0),
    "softcap, single": Flavour((16, 64, 128), FP32, causal=True, softcap=50.0),
    "softcap, mask and dropout": Flavour(
        (10, 48, 80), BF16, lengths=True, mask=True, dropout=True, softcap=50.0
    ),
    "window": Flavour((32, 64, 128), BF16, shared_keys=True, window=(256, 0)),
    "window of both sides, single": Flavour((16, 64), FP32, window=(100, 100)),
    "window, ragged with dropout": Flavour(
        (64,), BF16, dropout=True, ragged=True, window=(128, 128)
    ),
}
RELOADED = 80
KINDS = "forward", "statistics", "capture", "backward"
# A capture has the statistics too.
NIGHTLY = {"statistics": [pytest.mark.nightly]}
CALLS = [
    pytest.param(kind, flavour, dim, id=f"{kind}-{name}-{dim}", marks=NIGHTLY.get(kind, []))
    for kind in KINDS
    for name, flavour in FLAVOURS.items()
    for dim in flavour.dims
]


# The benchmark's cases compile the most used of them for sm_80 in each commit.
@pytest.mark.parametrize(
    "gpus",
    [(90,), pytest.param((80, 86), marks=pytest.mark.nightly)],
    ids=["Hopper", "Ampere"],
)
@pytest.mark.parametrize(("kind", "flavour", "dim"), CALLS)
def test_kernel_fits_every_supported_gpu(
    kind: str, flavour: Flavour, dim: int, gpus: tuple[int, ...]
) -> None:
    wanted = [gpu for gpu in gpus if gpu in resources.SUPPORTED]
    if not wanted:
        pytest.skip(f"none of {gpus} is among --gpus")
    for gpu in wanted:
        found = flavour.call(dim).launches(gpu)[kind]
        assert found, f"sm_{gpu}: nothing is launched"
        for one in found:
            used = compile_launch(one, gpu)
            assert not used.faults, f"sm_{gpu} {one.name}: {used.faults}, {used}"
            assert used.shared <= GPUS[gpu].shared_per_program, f"sm_{gpu}: {used}"
            assert used.programs_per_sm >= 1, f"sm_{gpu}: {used}"


def marks(gpu: int, kernel: str = "") -> list[pytest.MarkDecorator]:
    """Leave to the nightly run what sm_80, sm_90 or sm_120 have too."""
    shared = gpu in (86, 89, 100) or (gpu == 80 and kernel.startswith("short"))
    return [pytest.mark.nightly] if shared else []


def rules() -> Iterator[Any]:
    """Yield each rule of some GPUs or some lengths, with each head dimension that it serves.

    ``FLAVOURS`` has the other rules of the kernels for any length.
    """
    for kernel, (operator, tiles) in TABLES.items():
        own = {"hopper": (90,), "ampere": (80, 86)}.get(kernel.split("_")[0], resources.SUPPORTED)
        gpus = [gpu for gpu in resources.SUPPORTED if gpu in own]
        of_attention = [row for row in tiles.rules if operator == "attention"]
        for row, gpu, dim in product(of_attention, gpus, (16, 32, 64, 128)):
            takes = row.takes
            if dim < 64 and "unaligned" not in takes:
                takes -= {"padded_dim"}  # what does not fill these tiles is no multiple of 16
            anywhere = row.gpus is None and row.tokens == _tiles.ANY
            limits = gpu, 2, dim, row.tokens, takes
            first = next((other for other in tiles.rules if other.fits(*limits)), None)
            if not anywhere and first is row:
                name = f"sm_{gpu}-{kernel}-{dim}-{row.tokens}-{'+'.join(sorted(takes))}"
                yield pytest.param(gpu, kernel, row, dim, id=name, marks=marks(gpu, kernel))


def flavour_of(row: Rule, block_dim: int) -> tuple[Flavour, int]:
    """Return the most features that a rule allows a call, and a head dimension that has them."""
    features, mask = row.takes, "mask" in row.takes
    tokens = Flavour._field_defaults["tokens"] if row.tokens == _tiles.ANY else row.tokens
    shared = "shared" in features
    flavour = Flavour((), BF16, tokens, not mask, True, mask, "dropout" in features, shared)
    dims = {16: 10, 32: 30, 64: 50, 128: 100} if "unaligned" in features else {64: 48, 128: 80}
    return flavour, dims.get(block_dim, block_dim) if "padded_dim" in features else block_dim


def selecting(kernel: str) -> AbstractContextManager[None]:
    """Select a kernel that no call gets by itself."""
    candidate = next((one for one in CANDIDATES.values() if kernel in one.kernels), None)
    return candidate.selected() if candidate else nullcontext()


@pytest.mark.parametrize(
    "others", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["longest", "others"]
)
@pytest.mark.parametrize(("gpu", "kernel", "row", "block_dim"), list(rules()))
def test_every_rule_fits_its_gpus(
    gpu: int,
    kernel: str,
    row: Rule,
    block_dim: int,
    others: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The longest call that each takes is compiled, with all that it may bring, and ``others``."""
    family = re.split("_(?=forward|backward)", kernel)[0]
    kind = kernel.removeprefix(f"{family}_")
    # A kernel in Gluon comes before others, which calls that it does not take still get.
    of_gluon = "hopper", "hopper_resident", "hopper_tma", "ampere", "warp_multihead"
    monkeypatch.setattr(_gluon, "AVAILABLE", family in of_gluon)
    monkeypatch.setattr(_gluon, "KEEPS_FENCES", True)
    kind = {"forward_statistics": "statistics"}.get(kind, kind)
    flavour, dim = flavour_of(row, block_dim)
    with selecting(kernel):
        (first,) = flavour.call(dim).launches(gpu)[kind]
    assert {"online": "attention"}.get(family, family) in first.name
    launches = [] if others else [first]
    if others and family == "hopper_tma":
        with selecting(kernel):
            for tokens in (100, 128, 197, 224):
                launches += flavour._replace(tokens=tokens).call(dim).launches(gpu)[kind]
    if others and "varlen" in row.takes:
        ragged = flavour._replace(lengths=False, ragged=True)
        launches += ragged.call(dim).launches(gpu)[kind]
    if others and family in ("hopper", "hopper_resident", "ampere"):
        # A few tokens after whole tiles of 64 are a tail, of which 16 and 32 are the sizes.
        shorter = flavour._replace(tokens=(row.tokens - 48))
        if not flavour.mask:
            launches += shorter.call(dim).launches(gpu)[kind]
        else:
            # A mask that learns leaves no tail in the backward; causality goes with none.
            launches += shorter.call(dim)._replace(rest=(False,)).launches(gpu)[kind]
            apart = shorter._replace(mask=False, causal=True)
            launches += apart.call(dim).launches(gpu)[kind]
    if not launches:
        pytest.skip("the longest call is all that it takes")
    for one in launches:
        used = compile_launch(one, gpu)
        assert used.shared <= GPUS[gpu].shared_per_program
        if family == "hopper_tma":
            # Some numbers of its loops are loaded again, 2% of their instructions. A GPU decides.
            assert used.looped_spills <= RELOADED
            continue
        assert not used.faults, f"{one.name}: {used.faults}, {used}"


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param(gpu, id=f"sm_{gpu}", marks=marks(gpu))
        for gpu in (*resources.SUPPORTED, *OTHERS)
    ],
)
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.device == "cuda"], ids=lambda case: case.name
)
def test_case_of_the_benchmark_stays_within_the_committed_table(
    case: AttentionCase, gpu: int
) -> None:
    rows = list(resources.rows([case], [gpu]))
    assert {row["launch"] for row in rows} == set(KINDS)
    found = [fault for row in rows for fault in faults(row, TABLE)]
    if gpu == 100 and case.name in ("vit_huge", "long_2048_wide"):
        # Outside of loops; a Triton that tiles were not chosen with may need none.
        assert len(found) == 1 if tuned() else len(found) <= 1
        assert all("208 bytes of stack" in fault for fault in found)
        return
    assert found == []


def sharing_launches(case: AttentionCase, gpu: int) -> dict[str, Launch]:
    """Return the launches of a forward and a backward that share the log-sum-exp alone."""
    call, form = call_of(case), op.Varlen if case.ragged else op.Dense
    tensors, numbers = call.inputs, call.params
    capability = mock.patch.object(_tiles, "capability", return_value=gpu)
    with capability, sharing_lse(), recorded() as launches:
        out, lse = shared_lse.forward_with_lse(form, tensors, numbers)
        shared_lse.backward_from_lse(form, out, tensors, numbers, out=out, lse=lse)
    return dict(zip(("forward", "backward"), launches, strict=True))


# Every kernel that stores or loads row statistics is among these.
SHARING = ("vit_base", 90), ("vit_base", 80), ("gpt2_64", 90), ("gpt2_512", 90), ("tnt", 90)


@pytest.mark.parametrize(
    ("case", "gpu"),
    [
        pytest.param(
            case,
            gpu,
            id=f"sm_{gpu}-{case.name}",
            marks=() if (case.name, gpu) in SHARING else pytest.mark.nightly,
        )
        for case, gpu in product(CASES, resources.SUPPORTED)
        if case.device == "cuda"
    ],
)
def test_kernels_that_share_the_log_sum_exp_take_no_more_than_those_of_pairs(
    case: AttentionCase, gpu: int
) -> None:
    for kind, one in sharing_launches(case, gpu).items():
        used = compile_launch(one, gpu)
        row = dict(zip(resources.KEYS, (case.name, kind, gpu, one.name)))
        row |= {figure: getattr(used, figure) for figure in resources.FIGURES}
        assert faults(row, TABLE) == []


def test_a_tile_that_is_too_large_is_noticed() -> None:
    """The measurement can fail: 128 x 128 scores in four warps cannot stay in registers."""
    (shipped,) = Flavour((64,), BF16).call(64).launches(80)["statistics"]
    too_large = {**shipped.kwargs, "BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4}
    used = compile_launch(replace(shipped, kwargs=too_large), 80)
    assert used.stack > 0
    assert used.spills > 0


def test_a_plan_passes_arguments_as_triton_binds_them() -> None:
    """A compiled kernel takes by position what Triton's binder makes of names and constants."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    for tokens in (16, 64, 197, 1009):
        for kind in ("forward", "backward"):
            (one,) = Flavour((64,), BF16, tokens=tokens).call(64).launches(90)[kind]
            kernel, backend = one.kernel, make_backend(GPUTarget("cuda", 90, 32))
            binder = create_function_from_signature(kernel.signature, kernel.params, backend)
            bound, _, _ = binder(**one.kwargs)
            assert list(bound) == kernel.arg_names
            assert all(bound[name] is one.kwargs[name] for name in kernel.arg_names)


def test_only_rows_that_can_be_copied_whole_go_to_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tiles, "capability", lambda _: 90)

    def backward(query: Tensor, key: Tensor, grad: Tensor) -> str:
        out, dq, dk = new_out(query), new_out(query), new_out(key)
        call = Call(query, key, key, None, None, None, 0.0, False, 0.1)
        return dispatch.choose_backward(call, grad, out, (dq, dk, dk)).kernel

    def rows(batch: int = 2, heads: int = 4, stride: int = 64, **options: Any) -> Tensor:
        options = {"dtype": BF16, "device": "meta"} | options
        strides = 197 * heads * stride, 197 * stride, stride, 1
        return torch.empty_strided((batch, heads, 197, 64), strides, **options)

    plain = rows()
    assert backward(plain, plain, plain) == "hopper_resident_backward"
    far = rows(1, 1, stride=2**23 - 16)
    assert backward(far, far, far) == "hopper_resident_backward"
    assert backward(plain, rows(heads=2), plain) == "online_backward"
    assert backward(plain, plain, rows(dtype=FP32)) == "online_backward"
    assert backward(plain, plain, rows(stride=72)) == "online_backward"
    many = rows(batch=MAX_ENTRIES + 1, heads=1)
    assert backward(many, many, many) == "online_backward"
    long = torch.empty_strided((300, 1, 577, 64), (64, 64, 2**22, 1), dtype=BF16, device="meta")
    assert backward(long, long, long) == "online_backward"
    monkeypatch.setattr(_gluon, "AVAILABLE", False)
    assert backward(plain, plain, plain) == "online_backward"


def test_short_heads_of_whole_words_go_to_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tiles, "capability", lambda _: 90)

    def kernels(query: Tensor, key: Tensor | None = None, **rest: Any) -> set[str]:
        key = query if key is None else key
        call = Call(query, key, key, None, None, None, 0.0, False, 0.1)._replace(**rest)
        kept = torch.empty(*query.shape[:3], 2, device="meta")
        results, grads = Results(new_out(query), kept), map(new_out, (query, key, key))
        with recorded() as launches:
            dispatch.prepare_forward(call, results).start()
            gradients = op.DenseGradients(*grads)
            dispatch.prepare_backward(new_out(query), call, results, gradients).start()
        return {re.split("_(?=fwd|bwd)", one.name)[0][1:] for one in launches}

    def heads(count: int = 4, tokens: int = 16, dim: int = 10, dtype: Any = BF16) -> Tensor:
        return torch.empty(3, tokens, count, dim, dtype=dtype, device="meta").transpose(1, 2)

    for plain in (heads(), heads().contiguous(), heads(dim=32), heads(7, 1, 2), heads(1, 9, 64)):
        assert kernels(plain) == {"warp_multihead"}
    lengths = torch.ones(3, dtype=torch.int32, device="meta")
    assert kernels(heads(), is_causal=True, key_lengths=lengths) == {"warp_multihead"}
    assert kernels(heads(dim=9)) == {"short"}
    assert kernels(heads(dim=128)) == {"short"}
    assert kernels(heads(tokens=17)) == {"short"}
    assert kernels(heads(), heads(tokens=15)) == {"short"}
    assert kernels(heads(), heads(2)) == {"short", "attention"}
    assert kernels(heads(), scale=-0.1) == {"attention"}
    assert kernels(heads(dtype=FP32)) == {"attention"}
    mask = torch.ones(16, 16, dtype=torch.bool, device="meta")
    assert kernels(heads(), attn_mask=mask) == {"short"}
    seed = torch.ones(1, dtype=torch.int64, device="meta")
    assert kernels(heads(), seed=seed, dropout_p=0.1) == {"short"}
    odd = torch.empty(3, 16, 41, dtype=BF16, device="meta")[..., :40]
    assert kernels(odd.unflatten(2, (4, 10)).transpose(1, 2)) == {"short"}
