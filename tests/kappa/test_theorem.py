"""Theorem 3.2 against drawn heads: where it holds, by how much, and what it does at h * d = N."""

import math

import pytest

from leaner_kernels.kappa import theorem

# Finite sizes stay below the limit of large ones: at N = 128 by about 9% at a ratio of 3/2.
AWAY, TOLERANCE = 1.5, 0.12


@pytest.fixture(scope="module")
def rows():
    return theorem.measure(tokens=128, head_dim=32, heads=(1, 2, 3, 4, 6, 12), split_width=384)


def test_kappa_follows_the_theorem_away_from_the_edge(rows):
    away = [row for row in rows if max(row.width, 128) / min(row.width, 128) >= AWAY]
    assert {row.convention for row in away} == {"widen", "split", "edge"}
    for row in away:
        assert row.predicted * (1 - TOLERANCE) < row.median < row.predicted, row
        assert row.low <= row.median <= row.high


def test_more_heads_first_raise_kappa_and_then_lower_it(rows):
    kappa = {row.heads: row.median for row in rows if row.convention == "widen"}
    assert kappa[1] < kappa[2] < kappa[3] < kappa[4] > kappa[6] > kappa[12]


def test_dividing_a_fixed_width_changes_nothing(rows):
    split = [row for row in rows if row.convention == "split"]
    medians = [row.median for row in split]
    assert {row.width for row in split} == {384}
    assert max(medians) < 1.03 * min(medians)


def test_kappa_of_a_square_matrix_is_finite_and_grows_with_its_size():
    for tokens in (32, 128):
        row = theorem.measure_one("widen", 4, tokens // 4, tokens, seeds=400)
        assert math.isinf(row.predicted)
        # Over 400 draws the median strays by about 7% (one deviation), the geometric mean by 5%.
        assert row.median == pytest.approx(theorem.SQUARE_MEDIAN * tokens, rel=0.25)
        limit = math.exp(theorem.SQUARE_LOG_MEAN) * tokens
        assert row.geometric_mean == pytest.approx(limit, rel=0.2)


def test_the_command_prints_a_table_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    sizes = ["--tokens=16", "--head-dim=8", "--heads=1,2,3", "--seeds=5", "--split-width=24"]
    theorem.main([*sizes, "--out", str(plot := tmp_path / "theorem.png")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("N = 16 tokens, 5 draws")
    assert [" ".join(line.split()[:4]) for line in lines[2:8]] == [
        *("widen 1 8 8", "widen 2 8 16", "widen 3 8 24"),
        *("split 1 24 24", "split 2 12 24", "split 3 8 24"),
    ]
    assert lines[3].endswith("blow-up")
    assert lines[-2].startswith("widen at h * d = N: median")
    assert f"of a large square matrix {3.671 * 16:.4g};" in lines[-1]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_count_that_is_not_allowed_is_named(capsys):
    with pytest.raises(SystemExit) as refused:
        theorem.main(["--heads", "1,0"])
    assert refused.value.code == 2
    assert "heads must be counts from 1 to the split width 768: 1,0" in capsys.readouterr().err
