"""Tables of measured attention of any kind, what each peer keeps for a backward, and its goals."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.pages.markdown import (
    Goal,
    goal,
    goal_table,
    in_unit,
    name,
    number,
    ratio,
    table,
)
from bench.pages.rows import MeasuredRow, by, fastest

# What everybody has without us, the first of them that a table holds.
BASELINES = "timm", "sdpa", "sdpa_padded"
# Of attention alone, forward and backward, against the fastest of timm and PyTorch.
GOAL_BLOCK, BLOCKS = 1.5, ("cross_covariance", "channel", "window", "outlook")
LEGEND = """\
Medians in µs with the interquartile range. *graph* replays a CUDA graph: the kernels alone. *eager*
calls from Python: what a user feels. *wall* is host time on a CPU. On a GPU the inputs rotate
through twice the memory that the L2 cache holds. *copy* and *matrix* are the useful bytes and FLOPs
per second, as a part of what a large copy and a large matrix product reach on the same machine in
the same session (CPU cases stay in cache, so *copy* can pass 100%). *× default* and *× best peer*
say how many times faster a row is than what everybody has (PyTorch's default
`scaled_dot_product_attention`; for the operators of XCiT, DaViT and VOLO timm's own code between
its projections, for a *block* timm's module), and than the fastest row of the table that is not
ours: below 1 is a loss. Rows of this project are bold. Every row passed the correctness gate,
gradients included, before it was timed. Where sequences differ in length, *padded* peers get inputs
that are padded already, and only rows within a sequence count as work. On windows, *sdpa* gets them
cut already and leaves them so, while *timm* cuts q, k and v, which its model does before its
projection. *leaner_kernel* is the operator below `attention`, which never calls a library;
*leaner_stats_unsampled* a step on which no entry is captured. Of *nystrom*, *sdpa* is exact softmax
attention of the same tensors, which an approximation has to beat.
"""
MEMORY = """\
Bytes for each token that autograd saves in a forward until its backward, each storage once: memory
of the *inputs* and of the *output*, which their neighbours in a model may keep anyway, and what is
*kept* for this backward alone. *peak* is the most that a forward and backward held on the GPU
beside its inputs, in MiB.
"""


@dataclass(frozen=True)
class AttentionRow(MeasuredRow):
    """One measured number; times in seconds, fractions of the machine's measured ceilings."""

    direction: str
    mode: str
    peer: str
    ours: bool
    median: float
    iqr: float
    copy_fraction: float
    matrix_fraction: float
    bytes: float
    flops: float
    tflop_per_s: float
    copy_gb_per_s: float
    matrix_tflop_per_s: float
    joules: float | None = None
    kernels: Sequence[str] = ()

    @property
    def intensity(self) -> float:
        """Useful FLOP for each useful byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class MemoryRow(MeasuredRow):
    """What a peer keeps for its backward: bytes for each token; peak in bytes of the whole call."""

    peer: str
    ours: bool
    inputs: float
    out: float
    own: float
    peak_memory_bytes: int | None

    @staticmethod
    def derived(values: dict[str, Any]) -> dict[str, Any]:
        """Return the bytes that are kept, for each token."""
        return {part: size / values["tokens"] for part, size in values["kept_bytes"].items()}


# By case, direction and mode, fastest first.
Groups = dict[tuple[str, str, str], list[AttentionRow]]


def groups_of(rows: Iterable[AttentionRow]) -> Groups:
    """Group rows by case, direction and mode, fastest first."""
    found = by(rows, "case", "direction", "mode")
    return {key: sorted(group, key=lambda row: row.median) for key, group in found.items()}


def baseline_of(group: Iterable[AttentionRow]) -> AttentionRow | None:
    """Return what everybody has, where sequences differ in length on padded inputs."""
    found = {row.peer: row for row in group}
    return next((found[name] for name in BASELINES if name in found), None)


def best_peer(group: Iterable[AttentionRow]) -> AttentionRow | None:
    """Return the fastest row that is not ours."""
    return fastest(row for row in group if not row.ours)


def our_best(group: Iterable[AttentionRow]) -> AttentionRow | None:
    """Return the fastest row that is ours."""
    return fastest(row for row in group if row.ours)


def faster(row: AttentionRow, than: AttentionRow | None) -> str:
    """Return how many times faster a row is, or a dash without the other."""
    return ratio(than and than.median, row.median)


def shape(case: dict[str, Any]) -> str:
    """Return the size of a case, B·H·N·D, the dtype, and what else it is.

    N is 1×197 where one query meets 197 keys, 49…256 where sequences differ in length, and 14² on a
    square map.
    """
    if "op" in case:
        return f"{case['op'].replace('_', ' ')}, {case['size']}, {case['dtype']}"
    tokens = str(case["tokens"])
    if case["lengths"]:
        tokens = f"{min(case['lengths'])}…{tokens}"
    elif case["rows"] != case["tokens"]:
        tokens = f"{case['rows']}×{tokens}"
    size = f"{case['batch']}·{case['heads']}·{tokens}·{case['head_dim']}"
    kinds = [kind for kind in ("causal", "padded") if case[kind]]
    return " ".join([size, case["dtype"], *kinds])


def time_table(group: Sequence[AttentionRow]) -> Iterator[str]:
    """Render the rows of one case, direction and mode."""
    energy = any(row.joules is not None for row in group)
    head = ["", "median", "IQR", "copy", "matrix", "× default", "× best peer"] + ["mJ"] * energy
    baseline, peer = baseline_of(group), best_peer(group)
    cells = (
        (
            name(row),
            number(row.median * 1e6),
            number(row.iqr * 1e6),
            f"{row.copy_fraction:.0%}",
            f"{row.matrix_fraction:.0%}",
            faster(row, baseline),
            faster(row, peer),
            "–" if row.joules is None else number(row.joules * 1e3),
        )
        for row in group
    )
    return table(head, (row[: len(head)] for row in cells))


def overview(groups: Groups) -> Iterator[tuple[tuple[str, str, str], tuple[str, ...]]]:
    """Yield case, direction and mode with our fastest row and how it stands against the others."""
    for key, group in groups.items():
        ours = our_best(group)
        if ours is not None:
            peer = best_peer(group)
            versus = faster(ours, peer) + (f" {peer.peer}" if peer else "")
            standing = f"{ours.copy_fraction:.0%}", faster(ours, baseline_of(group)), versus
            yield key, (ours.peer, number(ours.median * 1e6), *standing)


def overview_table(groups: Groups) -> Iterator[str]:
    """Render ``overview``."""
    head = "", "", "ours", "median", "copy", "× default", "× best peer"
    rows = ((case, ", ".join(how), *cells) for (case, *how), cells in overview(groups))
    return table(head, rows, left=3)


def goals(groups: Groups, cases: dict[str, dict[str, Any]]) -> Iterator[Goal]:
    """Yield the goal of each operator of XCiT, DaViT and VOLO: forward and backward, on a GPU."""
    for (case, direction, mode), group in groups.items():
        ours, peer = our_best(group), best_peer(group)
        has_goal = cases[case].get("op", "").removesuffix("_block") in BLOCKS
        if has_goal and (direction, mode) == ("both", "graph") and ours and peer:
            times = peer.median / ours.median
            text = f"{case}: {GOAL_BLOCK} × the fastest peer, {peer.peer}"
            yield goal(text, f"{times:.2f} ×", times >= GOAL_BLOCK)


def memory_tables(rows: Iterable[MemoryRow], cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Render what was kept, a table for each case, the least first."""
    for case, group in by(rows, "case").items():
        peak = any(row.peak_memory_bytes is not None for row in group)
        head = ["", "kept", "output", "inputs"] + ["peak"] * peak
        cells = (
            (
                name(row),
                *(f"{part:,.0f}" for part in (row.own, row.out, row.inputs)),
                in_unit(row.peak_memory_bytes, 2**20, ",.0f"),
            )
            for row in sorted(group, key=lambda row: row.own)
        )
        yield from (f"#### {case} ({shape(cases[case])}), memory", "")
        yield from table(head, (row[: len(head)] for row in cells))


def tables(
    rows: Sequence[AttentionRow], memory: Sequence[MemoryRow], cases: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """Render the rows of one machine."""
    groups = groups_of(rows)
    if groups:
        yield from ("### Our fastest row of each table below", "", *overview_table(groups))
    for (case, direction, mode), group in groups.items():
        yield from (f"### {case} ({shape(cases[case])}), {direction}, {mode}", "")
        yield from time_table(group)
    if memory:
        yield from ("### Memory kept for the backward", "", MEMORY, *memory_tables(memory, cases))
    yield from goal_table("Goals of the operators of vision models", goals(groups, cases))
