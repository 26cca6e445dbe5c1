"""Plots of a monitor's rows."""

import pytest

from leaner_kernels import monitor
from leaner_kernels.monitor.page import short_names

pytest.importorskip("matplotlib", reason="plots need matplotlib")


def row(step, layer, kappa, gaussian=1.5, **more):
    return {"step": step, "layer": layer, "kappa": kappa, "kappa_gaussian": gaussian, **more}


def lines(figure):
    return {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}


@pytest.mark.parametrize(("last", "scale"), [(30.0, "linear"), (300.0, "log")])
def test_axis_of_kappa_is_logarithmic_where_it_spans_a_decade(last, scale):
    rows = [
        row(step, "blocks.0.attn", kappa, gaussian=None)
        for step, kappa in enumerate((20.0, None, last))
    ]
    figure = monitor.plot(rows)
    assert figure.axes[0].get_yscale() == scale
    assert lines(figure) == {"blocks.0.attn": [20.0, last]}


def test_rows_without_kappa_are_counted_with_their_reason():
    rows = [
        row(0, "a", 2.0),
        row(0, "b", None, reason="not run"),
        *(row(step, "a", None, reason="not resolved") for step in (1, 2)),
    ]
    title = monitor.plot(rows).axes[0].get_title()
    assert title == "3 of 4 rows left out: 2 not resolved, 1 not run"


def test_what_cannot_be_drawn_is_refused_in_one_line(monkeypatch):
    rows = [row(0, "a", 2.0)]
    with pytest.raises(ValueError, match="no rows"):
        monitor.plot([])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    line = r"^a plot needs the package matplotlib: pip install 'leaner-kernels\[plot\]'$"
    with pytest.raises(ModuleNotFoundError, match=line):
        monitor.plot(rows)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["blocks.0.attn", "blocks.1.attn"], ["blocks.0", "blocks.1"]),
        (["m.enc.layer.0.a.self", "m.enc.layer.10.a.self"], ["layer.0", "layer.10"]),
        (["0.attn", "1.attn"], ["0", "1"]),
        (["attn", "attn#1"], ["attn", "attn#1"]),
        (["a", "a.b"], ["a", "a.b"]),
        (["enc.0.attn", "dec.0.attn"], ["enc", "dec"]),
        (["a.x", "a.x.x"], ["x", "x.x"]),
        (["only.one"], ["only.one"]),
        ([""], [""]),
    ],
)
def test_names_lose_what_they_have_alike_and_stay_different(names, short):
    assert short_names([row(0, name, 1.0) for name in names]) == dict(zip(names, short))
