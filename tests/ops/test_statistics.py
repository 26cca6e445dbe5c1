"""The table of statistics against results of operators and the documentation."""

from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from leaner_kernels import attention_with_stats
from leaner_kernels.ops.statistics import COLUMNS, STATISTICS, AttentionStats, attention_stats

SHAPE = len(STATISTICS), 2, 3


def unpacked(per_head: torch.Tensor) -> AttentionStats:
    return attention_stats(per_head[0], per_head[1], per_head, None)


def test_the_table_has_the_order_of_the_results():
    first, last = AttentionStats._fields.index("lse"), AttentionStats._fields.index("heads")
    assert [s.name for s in STATISTICS] == [*AttentionStats._fields[first + 1 : last]]


def test_every_column_is_in_the_documentation():
    page = Path(__file__).parents[2].joinpath("docs/kappa.md").read_text("utf-8")
    missing = [c.name for c in COLUMNS if f"\n| `{c.name}` | {c.doc} |\n" not in page]
    assert missing == []
    assert {c.statistic for c in COLUMNS} == {s.name for s in STATISTICS}


def test_rows_that_a_finite_mask_hides_count_as_0():
    query = torch.randn(1, 1, 4, 8)
    hidden = torch.zeros(4, 4)
    hidden[:2] = float("-inf")
    finite = hidden.clamp_min(torch.finfo(torch.float32).min)
    expected, actual = (
        attention_with_stats(query, query, query, mask).mean_row_max for mask in (hidden, finite)
    )
    assert expected.isfinite().all()
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("how", ["eager", "compile", "vmap"])
def test_the_buffer_is_unpacked_by_name(how):
    per_head = torch.randn(SHAPE)
    names = [statistic.name for statistic in STATISTICS]

    def statistics(per_head: torch.Tensor) -> list[torch.Tensor]:
        return [getattr(unpacked(per_head), name) for name in names]

    if how == "vmap":
        stats = [t[0] for t in torch.vmap(statistics)(per_head[None])]
    elif how == "compile":
        stats = torch.compile(statistics, fullgraph=True, backend="eager")(per_head)
    else:
        stats = statistics(per_head)
    assert all(map(torch.equal, stats, per_head))


def test_a_fake_buffer_is_unpacked():
    with FakeTensorMode():
        stats = unpacked(torch.empty(SHAPE))
    assert {getattr(stats, s.name).shape for s in STATISTICS} == {SHAPE[1:]}
