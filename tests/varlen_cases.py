"""Packed batches of awkward lengths, and what the reference makes of each sequence alone.

One table serves every backend; ``tests/ops/test_varlen.py`` runs it.
"""

from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leaner_kernels.ops.attention import op
from leaner_kernels.ops.statistics import AttentionStats
from tests import attention_cases, error_budget


class VarlenTestCase(NamedTuple):
    """Sizes as in the kernels; ``before`` and ``after`` count tokens that no sequence owns."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    dim: int
    kv_heads: int | None = None
    key_lengths: tuple[int, ...] | None = None
    causal: bool = False
    dropout_p: float = 0.0
    before: int = 0
    after: int = 0
    # The longest sequence is shorter than ``max_seqlen`` by this much.
    slack: int = 0
    window: tuple[int, int] = (-1, -1)


CASES = (
    VarlenTestCase("one token", (1,), 1, 1),
    VarlenTestCase("images of many sizes", (49, 1, 197, 16), 2, 64),
    VarlenTestCase(
        "an empty sequence first, amid and last", (0, 5, 0, 20, 0), 2, 16, before=2, after=3
    ),
    VarlenTestCase("nothing but padding", (0, 0), 2, 16, after=40),
    VarlenTestCase("texts, causal", (16, 300, 0, 49), 2, 32, causal=True, after=7),
    VarlenTestCase("inner tokens of TNT", (16, 16, 16), 4, 10, slack=50),
    VarlenTestCase("grouped queries", (20, 3, 41), 6, 16, kv_heads=2, after=2),
    VarlenTestCase("head_dim 80, crossed", (33, 7, 16), 2, 80, key_lengths=(17, 49, 1), before=1),
    VarlenTestCase("head_dim 128, causal", (40, 34), 1, 128, causal=True, slack=1),
    VarlenTestCase(
        "rows without keys, keys without rows", (5, 0, 9), 2, 16, key_lengths=(0, 6, 70)
    ),
    VarlenTestCase(
        "one query, many keys", (1, 1), 4, 16, kv_heads=2, key_lengths=(300, 2), after=1
    ),
    VarlenTestCase("causal, crossed", (33, 50), 1, 16, key_lengths=(70, 13), causal=True),
    VarlenTestCase("dropout", (37, 1, 70), 2, 16, dropout_p=0.3, after=5),
    VarlenTestCase(
        "dropout with everything",
        (17, 0, 40),
        4,
        64,
        kv_heads=2,
        key_lengths=(33, 4, 40),
        causal=True,
        dropout_p=0.5,
        before=3,
        after=30,
        slack=20,
    ),
)
NAMES = [case.name for case in CASES]
WINDOW_CASES = (
    VarlenTestCase("window", (49, 1, 197, 16), 2, 64, before=2, after=3, window=(20, 4)),
    VarlenTestCase("window, causal", (16, 300, 0), 2, 32, causal=True, window=(65, -1)),
    VarlenTestCase(
        "window, crossed",
        (33, 7, 0, 90),
        4,
        16,
        kv_heads=2,
        key_lengths=(17, 149, 5, 30),
        slack=20,
        window=(5, 8),
    ),
    VarlenTestCase("window, dropout", (70, 13), 2, 16, dropout_p=0.3, window=(-1, 3)),
)
STATISTICS = AttentionStats._fields[2:-1]


class Inputs(NamedTuple):
    """Tensors in the dtype under test, and the arguments that go with them."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor
    max_seqlen: int
    max_seqlen_k: int
    seed: Tensor | None
    sample: Tensor
    dropout_p: float
    is_causal: bool
    scale: float
    window: tuple[int, int] = (-1, -1)

    @property
    def operands(self) -> tuple[Any, ...]:
        """What the operators take before ``sample``."""
        return *self[:3], *self[4:6], self.seed

    @property
    def params(self) -> tuple[Any, ...]:
        """What the operators take last."""
        return self.max_seqlen, self.max_seqlen_k, *self[10:13], *self.window


def case_named(name: str) -> VarlenTestCase:
    return CASES[NAMES.index(name)]


def starts_of(lengths: tuple[int, ...], before: int, device: str) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=before)), dtype=torch.int32, device=device)


def make_inputs(
    case: VarlenTestCase, dtype: torch.dtype, device: str = "cpu", gap: int = 3
) -> Inputs:
    """Build strided tensors that are NaN wherever no sequence owns the token.

    Kernels that copy 16 bytes at a time want a ``gap`` between heads that is a multiple of 16.
    """
    torch.manual_seed(0)
    key_lengths = case.key_lengths or case.lengths
    kv_heads = case.kv_heads or case.heads

    def tokens(lengths: tuple[int, ...], heads: int) -> Tensor:
        inside = slice(case.before, case.before + sum(lengths))
        shape = case.before + sum(lengths) + case.after, heads, case.dim
        # A view into a larger block, as a packed projection would give, and NaN around it.
        block = torch.full((shape[0], heads + 1, case.dim + gap), float("nan"), dtype=dtype)
        view = block.to(device)[:, :heads, : case.dim]
        view[inside] = torch.randn(sum(lengths), heads, case.dim).to(dtype).to(device)
        return view

    return Inputs(
        tokens(case.lengths, case.heads),
        tokens(key_lengths, kv_heads),
        tokens(key_lengths, kv_heads),
        tokens(case.lengths, case.heads),
        starts_of(case.lengths, case.before, device),
        starts_of(key_lengths, case.before, device),
        max(1, *case.lengths) + case.slack,
        max(1, *key_lengths) + case.slack,
        torch.tensor([0x123456789ABCDEF], device=device) if case.dropout_p else None,
        torch.tensor([len(case.lengths) - 1, -1, 0], dtype=torch.int32, device=device),
        case.dropout_p,
        case.causal,
        case.dim**-0.5,
        case.window,
    )


def sequence_inputs(inputs: Inputs, number: int) -> attention_cases.Inputs | None:
    """Return sequence ``number`` as the last entry of a batch, None without rows or keys.

    With dropout it is entry ``number``, after zeros: every entry has a mask of its own.
    """
    place = 0 if inputs.seed is None else number
    (row, row_end), (col, col_end) = (
        starts[number : number + 2].tolist() for starts in (inputs.cu_seqlens, inputs.cu_seqlens_k)
    )
    if row == row_end or col == col_end:
        return None

    def entry(t: Tensor, first: int, last: int) -> Tensor:
        one = t[first:last].transpose(0, 1).cpu()
        batch = one.new_zeros(place + 1, *one.shape)
        batch[-1] = one
        return batch

    return attention_cases.Inputs(
        entry(inputs.query, row, row_end),
        entry(inputs.key, col, col_end),
        entry(inputs.value, col, col_end),
        entry(inputs.grad, row, row_end),
        None,
        None,
        None if inputs.seed is None else inputs.seed.cpu(),
        torch.tensor([place], dtype=torch.int32),
        inputs.dropout_p,
        inputs.is_causal,
        inputs.scale,
        window=inputs.window,
    )


def assemble(inputs: Inputs, dtype: torch.dtype, *, fused: bool = False) -> dict[str, Tensor]:
    """Run the reference on each sequence alone and join them; ``fused`` as in attention_cases.

    What no sequence owns, and what an empty one has, is what the public docstrings promise.
    """
    query, key = inputs.query, inputs.key
    (tokens, heads, dim), number_of = query.shape, len(inputs.cu_seqlens) - 1
    wanted = inputs.sample[inputs.sample >= 0].tolist()
    found = {
        "out": torch.zeros(query.shape, dtype=dtype),
        "dq": torch.zeros(query.shape, dtype=dtype),
        "dk": torch.zeros(key.shape, dtype=dtype),
        "dv": torch.zeros(key.shape, dtype=dtype),
        "lse": torch.full((heads, tokens), float("-inf"), dtype=dtype),
        **{name: torch.zeros(number_of, heads, dtype=dtype) for name in STATISTICS},
        "heads": torch.zeros(len(wanted), inputs.max_seqlen, heads * dim, dtype=dtype),
    }
    found["max_logit"].fill_(float("-inf"))
    for number in range(number_of):
        alone = sequence_inputs(inputs, number)
        if alone is None:
            continue
        results = attention_cases.reference_results(alone, dtype, fused=fused)
        rows, cols = (
            slice(*starts[number : number + 2].tolist())
            for starts in (inputs.cu_seqlens, inputs.cu_seqlens_k)
        )
        for name, where in (("out", rows), ("dq", rows), ("dk", cols), ("dv", cols)):
            found[name][where] = results[name][-1].transpose(0, 1)
        found["lse"][:, rows] = results["lse"][-1]
        for name in STATISTICS:
            found[name][number] = results[name][-1]
        for slot in [i for i, w in enumerate(wanted) if w == number]:
            captured = results["heads"][-1]
            found["heads"][slot, : len(captured)] = captured
    return found


def peers_of(inputs: Inputs, dtype: torch.dtype) -> dict[str, tuple[Tensor, ...]]:
    """Return, for every result, what correct arithmetic may make of it: see error_budget."""
    runs = [partial(assemble, inputs, torch.float64, fused=each) for each in (False, True)]
    return error_budget.peers_of(runs, dtype, attention_cases.FLOAT32_RESULTS)


def check(inputs: Inputs, found: dict[str, Tensor]) -> None:
    """Assert that all results are there and within the error budget."""
    exact, peers = assemble(inputs, torch.float64), peers_of(inputs, inputs.query.dtype)
    assert found.keys() == exact.keys()
    error_budget.assert_all_within_budget(found, peers, exact)


def run_operators(inputs: Inputs) -> dict[str, Tensor]:
    """Run ``attention_varlen_with_stats`` and its backward on the device of the inputs."""
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    results = torch.ops.leaner_kernels.attention_varlen_with_stats(
        *leaves, *inputs.operands[3:], inputs.sample, *inputs.params
    )
    out, lse, per_head, heads, _ = results
    found = {"out": out, "lse": lse, **dict(zip(STATISTICS, per_head, strict=True)), "heads": heads}
    grads = torch.autograd.grad(found["out"], leaves, inputs.grad)
    return finish(inputs, found | dict(zip(("dq", "dk", "dv"), grads, strict=True)))


def finish(inputs: Inputs, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Look at the slots of a negative index, and leave them out."""
    unwritten = found["heads"][inputs.sample < 0]
    assert unwritten.isnan().all(), "a slot with a negative index was written"
    return found | {"heads": found["heads"][inputs.sample >= 0]}


def lengths_of(starts: Tensor) -> list[int]:
    return [stop - start for start, stop in pairwise(starts.tolist())]


def run_sharing_lse(inputs: Inputs) -> dict[str, Tensor]:
    """Run a forward and a backward that share the output and the log-sum-exp, by kernels."""
    with attention_cases.sharing_lse():
        shared = inputs.grad, inputs.operands, inputs.params
        found = attention_cases.share_lse(op.Varlen, *shared)
    return found | {"lse": attention_cases.as_reference(found["lse"])}
