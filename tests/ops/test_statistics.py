"""The table of statistics against results of operators and the documentation."""

from pathlib import Path

import torch

from leaner_kernels import attention_with_stats
from leaner_kernels.ops.statistics import COLUMNS, STATISTICS, AttentionStats


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
