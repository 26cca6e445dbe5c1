"""The page of a run: what its charts and tables hold. tests/page opens it in a browser."""

import itertools
import json
import math
import re
import sys

import pytest

from leaner_kernels.monitor import rows as page_rows
from leaner_kernels.monitor.page import CHART_POINTS, LINE_POINTS, main, read_run, write_page
from leaner_kernels.monitor.rows import parse_row

plotly = pytest.importorskip("plotly", reason="a page needs plotly")


def kappa_row(step, layer, kappa=20.0, **more):
    values = {"kappa_gaussian": 1.5, "entropy": 2.0, "max_logit": 3.0, "columns": 16, "heads": 2}
    return {
        "step": step,
        "layer": layer,
        "kappa": kappa,
        "head_norms": [1.0, 2.0],
        **values,
        **more,
    }


def write(folder, name, rows):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def charts(monkeypatch):
    """The figures that a page draws."""
    drawn = []

    def to_html(figure, **options):
        drawn.append(figure)
        return f"<div>{len(drawn)}</div>"

    monkeypatch.setattr("plotly.io.to_html", to_html)
    return drawn


def titles(path):
    return re.findall(r"<h2>(.*?)</h2>", path.read_text("utf-8"))


def named(chart):
    return {trace["name"]: trace for trace in chart["data"]}


def whole_run(folder):
    metrics = [{"step": step, "loss": 2.0 - step / 10} for step in range(10)]
    metrics[9] |= {"held_out_loss": 1.25, "held_out_accuracy": 0.5}
    write(folder, "metrics", metrics)
    rows = [kappa_row(step, f"blocks.{n}.attn") for step in (0, 4, 8) for n in range(2)]
    write(folder, "kappa", rows)
    write(folder, "kappa_probe", rows[:2])
    alarm = {"step": 4, "kind": "kappa", "message": "step 4: κ of blocks.0.attn is 2e+05"}
    write(folder, "alarms", [alarm])
    summary = {"model": "vit", "params": 1234567, "throughput": 99.5, "unit": "images"}
    summary |= {"seconds": 3725.0, "peak_memory_bytes": 2**30, "settings": {"lr": 0.001}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_run_has_its_charts_facts_and_alarms(tmp_path, charts):
    page = tmp_path / "page.html"
    assert write_page([whole_run(tmp_path / "vit-1")], page) == {}
    assert titles(page) == [
        *("Loss", "Held-out accuracy", "κ of every layer"),
        *("κ of every layer on fixed held-out items", "Entropy of attention"),
        *("Largest attention score (logit)", "Norms of heads, step 8", "Alarms", "Runs"),
    ]
    loss, accuracy, kappa, probe, *_, heads = charts
    assert named(loss)["training"]["y"][-1] == pytest.approx(1.1)
    assert named(loss)["held out"]["x"] == [9]
    assert named(accuracy)["accuracy"]["y"] == [50.0]
    assert named(kappa)["blocks.1"]["x"] == [0, 4, 8]
    assert named(kappa)["blocks.1"]["meta"] == "blocks.1.attn"
    assert named(kappa)["Gaussian heads: 1.5"]["y"] == [1.5, 1.5]
    assert kappa["layout"]["yaxis"]["type"] == "log"
    low, high = kappa["layout"]["yaxis"]["range"]
    assert low < math.log10(1.5) < math.log10(20) < high
    assert named(kappa)["alarms"]["x"] == [4]
    assert "alarms" not in named(probe)
    assert heads["data"][0]["z"] == [[1.0, 2.0]] * 2
    text = page.read_text("utf-8")
    for shown in (
        "1,234,567",
        "99.5 images/s",
        "1 h 2 min",
        "1.00 GiB",
        "0.001",
        "blocks.0.attn is",
    ):
        assert shown in text
    assert "Attention spread evenly has 2.77;" in text
    assert list(tmp_path.glob(".page*")) == []


def test_the_first_table_says_what_was_run_what_it_reached_and_what_kappa_did(tmp_path, charts):
    folder = whole_run(tmp_path / "vit-1")
    scores = {0: (0.9, 0.4), 4: (0.2, 0.99), 9: (0.6, 0.83)}
    metrics = [{"step": s, "loss": 1.0, "lr": 0.1, "grad_norm": 10.0**s} for s in range(10)]
    for step, (loss, accuracy) in scores.items():
        metrics[step] |= {"held_out_loss": loss, "held_out_accuracy": accuracy, "throughput": 9.0}
    write(folder, "metrics", metrics)
    rows = [kappa_row(0, "b.0.attn", 5e6), kappa_row(8, "b.0.attn", 30.0)]
    own = {"reason": "not resolved", "rank": 30.0, "head_dim": 16, "tokens": 64}
    rows += [kappa_row(step, "b.1.attn", None, **own) for step in (0, 8)]
    write(folder, "kappa", rows)
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"command": "train/vit.py --heads <16>", "best_step": 5}
    summary |= {"best_held_out_loss": 0.2, "best_held_out_accuracy": 0.99}
    summary["settings"] = {"ema": 0.99996, "lr": 5e-4, "eps": 1e-12}
    (folder / "summary.json").write_text(json.dumps(summary))
    page = tmp_path / "page.html"
    write_page([folder], page)
    text = page.read_text("utf-8")
    first, _, rest = text.partition("<noscript>")
    for shown in (
        "train/vit.py --heads &lt;16&gt;",
        "best 99.0% at step 4; final 83.0% at step 9; of the best weights, after 5 steps, 99.0%",
        "best 0.2 at step 4; final 0.6 at step 9; of the best weights, after 5 steps, 0.2",
        "<th>κ, b.0</th><td>5e+06 at step 0 → 30 at step 8; Gaussian heads 1.5</td>",
        "<th>κ, b.1</th><td>rank 30 of 32 at step 0 → rank 30 of 32 at step 8; Gaussian",
        "Gaussian heads are the comparison",
    ):
        assert shown in first
    assert "2 of 4 rows left out: 2 not resolved. Of b.1." in rest
    assert "<td>0.99996</td>" in rest
    assert "<td>1e-12</td>" in rest
    by_title = dict(zip(titles(page), charts))
    assert by_title["Learning rate"]["data"][0]["y"] == [0.1] * 10
    assert by_title["Gradient norm"]["data"][0]["x"] == [*range(10)]
    assert by_title["Throughput"]["layout"]["yaxis"]["title"]["text"] == "images a second"
    axis = by_title["κ of every layer"]["layout"]["yaxis"]
    assert (axis["exponentformat"], axis["dtick"]) == ("power", 1)
    assert "tickformat" not in axis


def test_of_many_layers_the_first_table_has_the_mean(tmp_path, charts):
    rows = [kappa_row(step, f"b.{n}.attn", 4.0 + 5 * step) for step in (0, 1) for n in range(20)]
    page = tmp_path / "page.html"
    write_page([write(tmp_path / "run", "kappa", rows)], page)
    first = page.read_text("utf-8").partition("<noscript>")[0]
    assert "<th>κ, geometric mean of 20 layers</th><td>4 at step 0 → 9 at step 1</td>" in first
    assert "<th>κ of Gaussian heads</th><td>1.5</td>" in first
    assert "b.0" not in first


def test_runs_are_compared_in_one_chart_a_quantity_and_one_panel_of_kappa_each(tmp_path, charts):
    first, second = (whole_run(tmp_path / name) for name in ("a", "b"))
    write(
        second, "kappa", [kappa_row(0, "x", 4.0), kappa_row(0, "y", 9.0), kappa_row(0, "z", None)]
    )
    page = tmp_path / "page.html"
    write_page([first, second], page)
    assert titles(page)[:4] == [
        *("Loss", "Held-out accuracy", "κ, geometric mean over layers", "κ of every layer: a"),
    ]
    assert "κ of every layer: b" in titles(page)
    assert {"a, training", "b, training"} <= named(charts[0]).keys()
    mean = named(charts[2])
    assert mean["a"]["y"] == pytest.approx([20.0] * 3)
    assert mean["b"]["y"] == pytest.approx([6.0])
    colours = [named(charts[0])[f"{name}, training"]["line"]["color"] for name in "ab"]
    assert colours == [mean[name]["line"]["color"] for name in "ab"]
    assert len(set(colours)) == 2
    ranges = [
        c["layout"]["yaxis"].get("range") for c in charts if c["layout"]["yaxis"].get("range")
    ]
    assert len(ranges) == 4
    assert all(each == ranges[0] for each in ranges)
    assert "1 of 3 rows left out: 1 not resolved." in page.read_text("utf-8")


def test_rows_of_one_step_are_merged(tmp_path, charts):
    """A trainer that logs and evaluates at one step writes two rows, in either order."""
    rows = [
        {"step": 2, "loss": 1.0},
        {"step": 2, "held_out_loss": 0.9, "held_out_accuracy": 0.4},
        {"step": 4, "held_out_loss": 0.7, "loss": None},
        {"step": 4, "loss": 0.8, "held_out_loss": None},
        {"step": 4, "train_runtime": 3.0},
    ]
    run = write(tmp_path / "run", "metrics", rows)
    write_page([run], tmp_path / "page.html")
    loss, accuracy = charts
    assert (named(loss)["training"]["x"], named(loss)["training"]["y"]) == ([2, 4], [1.0, 0.8])
    assert (named(loss)["held out"]["x"], named(loss)["held out"]["y"]) == ([2, 4], [0.9, 0.7])
    assert named(accuracy)["accuracy"]["y"] == [40.0]


def test_of_a_step_that_was_repeated_the_newest_values_count(tmp_path, charts):
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 1, "loss": 2.5}]
    write_page([write(tmp_path / "run", "metrics", rows)], tmp_path / "page.html")
    assert named(charts[0])["training"]["y"] == [2.5, 2.0]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path, charts):
    for parent in "ab":
        (tmp_path / parent).mkdir()
    runs = [write(tmp_path / parent / "run", "kappa", [kappa_row(0, "x")]) for parent in "ab"]
    write_page(runs, tmp_path / "page.html")
    assert {str(run) for run in runs} <= named(charts[0]).keys()


def test_kappa_alone_is_enough(tmp_path, charts):
    folder = write(tmp_path / "trainer", "kappa", [kappa_row(0, "x")])
    write_page([folder], tmp_path / "page.html")
    assert titles(tmp_path / "page.html")[0] == "κ of every layer"
    assert "0, not finished" in (tmp_path / "page.html").read_text("utf-8")


def test_a_long_run_is_thinned_evenly_to_its_last_step_and_says_so(tmp_path, charts):
    folder = tmp_path / "long"
    write(folder, "metrics", [{"step": step, "loss": 1.0} for step in range(20_000)])
    rows = [kappa_row(step, f"l.{n}") for step in range(400) for n in range(100)]
    write(folder, "kappa", rows)
    write_page([folder], tmp_path / "page.html")
    steps = named(charts[0])["training"]["x"]
    assert len(steps) == LINE_POINTS
    assert (steps[0], steps[-1]) == (0, 19_999)
    assert {b - a for a, b in itertools.pairwise(steps)} == {10, 11}
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "Of lines of up to 20,000 points 2,000 each are drawn, evenly spaced." in text
    points = sum(len(trace["x"]) for trace in charts[1]["data"])
    assert CHART_POINTS / 2 < points <= CHART_POINTS + 2


def test_of_a_long_run_few_rows_are_parsed_and_every_evaluation_is_shown(
    tmp_path, charts, monkeypatch
):
    folder, parsed = tmp_path / "long", []
    losses = [{"step": step, "loss": 1.0} for step in range(20_000)]
    for step in range(999, 20_000, 1000):
        losses[step]["held_out_loss"] = 2.0
    write(folder, "metrics", losses)
    rows = [kappa_row(step, f"l.{n}") for step in range(400) for n in range(100)]
    write(folder, "kappa", rows)
    monkeypatch.setattr(
        page_rows, "parse_row", lambda *a, **k: parsed.append(a) or parse_row(*a, **k)
    )
    write_page([read_run(folder)], tmp_path / "page.html")
    assert len(parsed) < 1.6 * (LINE_POINTS * 3 + CHART_POINTS), "no more than what is drawn"
    assert named(charts[0])["held out"]["x"] == [*range(999, 20_000, 1000)]
    layers = named(charts[1])
    for n in range(100):
        steps = layers[f"l.{n}"]["x"]
        assert (steps[0], steps[-1], len(steps)) == (0, 399, 200), "whole steps are read"
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "Of lines of up to 400 points 200 each are drawn, evenly spaced." in text


def test_damaged_lines_are_skipped_and_counted_and_half_a_line_is_not(tmp_path, charts, capsys):
    folder = whole_run(tmp_path / "run")
    with (folder / "kappa.jsonl").open("a") as file:
        file.write('{"step": 9}\n\n{"step": 12, "lay')
    (folder / "summary.json").write_text('{"model"')
    main([str(folder)])
    said = capsys.readouterr()
    assert said.out == f"written to {folder / 'page.html'}\n"
    assert f"{folder / 'kappa.jsonl'}: 2 damaged lines skipped" in said.err
    text = (folder / "page.html").read_text("utf-8")
    assert re.search(r"damaged lines in kappa.jsonl</th><td>2, skipped", text)
    assert named(charts[2])["blocks.0"]["x"] == [0, 4, 8]


def test_names_are_text_in_every_chart_where_plotly_takes_some_html(tmp_path, charts):
    hostile = "<a href=x>&lt;b"
    folder = write(tmp_path / hostile, "kappa", [kappa_row(0, hostile), kappa_row(0, "y")])
    write(folder, "metrics", [{"step": 0, "loss": 1.0}])
    write(folder, "alarms", [{"step": 0, "kind": hostile, "message": hostile}])
    for runs in ([folder], [folder, write(tmp_path / "other", "kappa", [kappa_row(0, "x")])]):
        charts.clear()
        write_page(runs, tmp_path / "page.html")
        shown = [
            text
            for trace in itertools.chain.from_iterable(chart["data"] for chart in charts)
            for key in ("name", "meta", "text", "y")
            for text in ([trace[key]] if isinstance(trace.get(key), str) else trace.get(key, ()))
            if isinstance(text, str)
        ]
        assert any("&lt;a href=x&gt;&amp;lt;b" in text for text in shown)
        assert [text for text in shown if "<" in text or "&lt;b" in text.replace("&amp;", "")] == []


def test_what_cannot_be_written_is_refused_in_one_line(tmp_path, monkeypatch):
    run = write(tmp_path / "run", "kappa", [kappa_row(0, "x")])
    empty = write(tmp_path / "empty", "kappa", [])
    for arguments, message in (
        ([tmp_path / "none"], f"no such folder: {tmp_path / 'none'}"),
        ([run, tmp_path / "none", "--out", tmp_path / "p"], f"no such folder: {tmp_path / 'none'}"),
        ([empty], f"no rows in {empty}: neither in kappa.jsonl nor in metrics.jsonl"),
        ([run, run], "a page of 2 runs needs --out"),
        ([run, "--out", tmp_path / "no" / "p"], f"no such folder: {tmp_path / 'no'}"),
        ([run, "--out", empty], f"{tmp_path / '.empty.partial'}: Is a directory"),
    ):
        with pytest.raises(SystemExit) as refused:
            main([str(argument) for argument in arguments])
        assert refused.value.code == message
    assert not [*tmp_path.rglob("*.html"), *tmp_path.glob(".*")]
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(SystemExit, match=r"needs the package plotly: pip install plotly$"):
        main([str(run)])


def test_values_that_are_not_numbers_leave_no_hole_in_a_page(tmp_path, charts):
    folder = write(tmp_path / "run", "metrics", [{"step": 0, "loss": None}, {"step": 1, "loss": 2}])
    missing = dict.fromkeys(("kappa", "kappa_gaussian", "entropy", "max_logit", "columns"))
    rows = [kappa_row(0, "x") | missing | {"head_norms": [None, 1.0], "reason": "not run"}]
    rows += [{"step": 1, "layer": "y"}]
    write(folder, "kappa", rows)
    write_page([folder], tmp_path / "page.html")
    assert "2 of 2 rows left out" in (tmp_path / "page.html").read_text("utf-8")
