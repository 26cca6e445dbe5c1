"""The page of a run: what its charts and tables hold, and that nothing in it runs."""

import itertools
import json
import re
import sys
from collections import Counter
from html import escape
from html.parser import HTMLParser

import pytest

from leaner_kernels.monitor import page as page_of_runs
from leaner_kernels.monitor.page import CHART_POINTS, LINE_POINTS, main, write_page

pytest.importorskip("matplotlib", reason="a page needs matplotlib")


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
    """The charts that a page draws, drawn or not."""
    drawn = []
    monkeypatch.setattr(page_of_runs, "_svg", lambda chart, ends: drawn.append(chart) or "<svg/>")
    return drawn


def titles(path):
    return re.findall(r"<h2>(.*?)</h2>", path.read_text("utf-8"))


def named(chart):
    """Return steps and values of each line by its name."""
    return {line.name: [*map(list, zip(*line.points))] for line in chart.lines}


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
    write_page([whole_run(tmp_path / "vit-1")], page)
    assert titles(page) == [
        *("Loss", "Held-out accuracy", "κ of every layer"),
        *("κ of every layer on fixed held-out items", "Entropy of attention"),
        *("Largest attention score (logit)", "Norm of each head, step 8", "Alarms", "Run"),
    ]
    loss, accuracy, kappa, probe, *_, heads = charts
    assert named(loss)["training"][1][-1] == pytest.approx(1.1)
    assert named(loss)["held out"] == [[9], [1.25]]
    assert named(accuracy)["accuracy"] == [[9], [0.5]]
    assert named(kappa)["blocks.1"][0] == [0, 4, 8]
    assert {line.title for line in kappa.lines} == {"blocks.0.attn", "blocks.1.attn", ""}
    assert named(kappa)["Gaussian heads: 1.5"][1] == [1.5] * 3
    assert kappa.scale == "log"
    assert [alarm["step"] for alarm in kappa.alarms] == [4]
    assert not probe.alarms
    assert heads.norms == {"blocks.0": [1.0, 2.0], "blocks.1": [1.0, 2.0]}
    text = page.read_text("utf-8")
    for shown in (
        "1,234,567",
        "99.5 images per second",
        "1:02:05",
        "1.00 GiB",
        "0.001",
        "blocks.0.attn is",
    ):
        assert shown in text
    assert "At most log(columns), if attention is spread evenly;" in text
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
    first, _, rest = text.partition('<div class="charts">')
    for shown in (
        "train/vit.py --heads &lt;16&gt;",
        "best 99.0% at step 4; final 83.0% at step 9",
        "best 0.2 at step 4; final 0.6 at step 9",
        "<th>layer</th><th>step 0</th><th>step 8</th><th>Gaussian heads</th>",
        "<th>b.0</th><td>5e+06</td><td>30</td><td>1.5</td>",
        "<th>b.1</th><td>rank 30 of 32</td><td>rank 30 of 32</td><td>1.5</td>",
        "Gaussian heads are the comparison",
    ):
        assert shown in first
    assert "2 of 4 rows left out: 2 not resolved." in rest
    assert "<td>0.99996</td>" in rest
    assert "<td>1e-12</td>" in rest
    by_title = dict(zip(titles(page), charts))
    assert named(by_title["Learning rate"])[""][1] == [0.1] * 10
    assert named(by_title["Gradient norm"])[""][0] == [*range(10)]
    assert named(by_title["Throughput"])[""][1] == [9.0] * 3


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
    assert mean["a"][1] == pytest.approx([20.0] * 3)
    assert mean["b"][1] == pytest.approx([6.0])
    loss, kappa = ({line.name: line.colour for line in chart.lines} for chart in charts[::2][:2])
    colours = [loss[f"{name}, training"] for name in "ab"]
    assert colours == [kappa[name] for name in "ab"]
    assert len(set(colours)) == 2
    text = page.read_text("utf-8")
    assert "1 of 3 rows left out: 1 not resolved." in text
    assert "<td>20 at step 0 → 20 at step 8; Gaussian heads 1.5</td>" in text
    assert "<td>4 at step 0; Gaussian heads 1.5</td>" in text


def test_the_report_of_heads_has_charts_where_rows_have_it(tmp_path, charts):
    rows = [
        kappa_row(step, layer, head_correlation=0.25, isotropy=0.5)
        for step in (0, 4)
        for layer in ("a", "b")
    ]
    write(tmp_path / "one", "kappa", rows)
    write_page([tmp_path / "one"], tmp_path / "page.html")
    shown = {chart.title: named(chart) for chart in charts}
    assert shown["Correlation of heads"]["a"] == [[0, 4], [0.25, 0.25]]
    assert shown["Isotropy of heads"]["b"] == [[0, 4], [0.5, 0.5]]
    charts.clear()
    write(tmp_path / "two", "kappa", rows[2:])
    write_page([tmp_path / "one", tmp_path / "two"], tmp_path / "page.html")
    shown = {chart.title: named(chart) for chart in charts}
    assert shown["Isotropy of heads, mean over layers"]["two"] == [[4], [0.5]]


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
    assert named(loss) == {"training": [[2, 4], [1.0, 0.8]], "held out": [[2, 4], [0.9, 0.7]]}
    assert named(accuracy)["accuracy"][1] == [0.4]


def test_a_long_run_is_thinned_evenly_to_its_last_step_and_says_so(tmp_path, charts):
    folder = tmp_path / "long"
    write(folder, "metrics", [{"step": step, "loss": 1.0} for step in range(20_000)])
    rows = [kappa_row(step, f"l.{n}") for step in range(400) for n in range(100)]
    write(folder, "kappa", rows)
    write_page([folder], tmp_path / "page.html")
    steps = named(charts[0])["training"][0]
    assert len(steps) == LINE_POINTS
    assert (steps[0], steps[-1]) == (0, 19_999)
    assert {b - a for a, b in itertools.pairwise(steps)} == {40, 41}
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<th>metrics.jsonl</th><td>500 of 20,000 steps are shown, evenly spaced</td>" in text
    assert "<th>kappa.jsonl</th><td>20 of 400 steps" in text
    assert sum(len(line.points) for line in charts[1].lines) == CHART_POINTS + 20


def test_damaged_lines_are_skipped_and_counted_and_half_a_line_is_not(tmp_path, charts, capsys):
    folder = whole_run(tmp_path / "run")
    with (folder / "kappa.jsonl").open("a") as file:
        file.write('{"step": 9}\n\n{"step": 12, "lay')
    (folder / "summary.json").write_text('{"model"')
    main([str(folder)])
    said = capsys.readouterr()
    assert said.out == f"written to {folder / 'page.html'}\n"
    text = (folder / "page.html").read_text("utf-8")
    assert re.search(r"damaged lines in kappa.jsonl</th><td>2, skipped", text)
    assert named(charts[2])["blocks.0"][0] == [0, 4, 8]


class Elements(HTMLParser):
    """The elements of a page, by name, and all their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = Counter(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs


def test_names_are_text_and_nothing_runs_or_is_asked_of_a_network(tmp_path):
    hostile = "<img src=x onerror=f()>$x"
    closing = "</title></svg></style><script>f()</script>"
    folder = whole_run(tmp_path / hostile)
    rows = [kappa_row(step, layer) for step in (0, 4) for layer in (hostile, closing)]
    write(folder, "kappa", rows)
    write(folder, "alarms", [{"step": 0, "kind": closing, "message": closing}])
    summary = {"model": hostile, "unit": closing, hostile: 1, "settings": {closing: hostile}}
    (folder / "summary.json").write_text(json.dumps(summary))
    other = write(tmp_path / "other", "kappa", [kappa_row(0, "x")])
    for runs in ([folder], [folder, other]):
        write_page(runs, tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text("utf-8")
        assert escape(closing) in text
        found = Elements(text)
        assert found.tags["svg"] == found.tags["figure"] >= 6
        assert not {"img", "script", "a", "iframe"} & found.tags.keys()
        assert [name for name, _ in found.attributes if name.startswith("on")] == []
        links = [value for name, value in found.attributes if name in ("src", "href", "xlink:href")]
        assert [link for link in links if not link.startswith(("data:image/png", "#"))] == []
        assert "default-src 'none'" in text
        assert "script-src" not in text


def test_lines_are_drawn_with_names_and_last_values_and_a_page_is_small(tmp_path):
    folder = whole_run(tmp_path / "run")
    rows = [
        kappa_row(step, f"blocks.{n}.attn", 2.0 + step % 7 + n)
        for step in range(0, 5000, 10)
        for n in range(24)
    ]
    write(folder, "kappa", rows)
    write(folder, "kappa_probe", rows)
    write(folder, "metrics", [{"step": s, "loss": 1 + s % 13, "lr": 0.1} for s in range(5000)])
    write_page([folder], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert len(text) < 300_000
    assert text.count("<title>blocks.3.attn: ") == 4
    assert text.count("<title>step 4: κ of blocks.0.attn is 2e+05</title>") == 3
    path = re.search(r"<title>blocks.3.attn: 11 at step 4990</title><path d=\"(M[^\"]+)", text)
    assert path[1].count("L") > 50
    assert '<li style="--line:#' in text
    ticks = [float(tick) for tick in re.findall(r"<text [^>]*>([\d.]+)</text>", text)]
    assert {1.0, 2.0, 5.0, 10.0, 20.0} <= set(ticks)


def test_what_cannot_be_written_is_refused_in_one_line(tmp_path, monkeypatch):
    run = write(tmp_path / "run", "kappa", [kappa_row(0, "x")])
    empty = write(tmp_path / "empty", "kappa", [])
    for arguments, message in (
        ([tmp_path / "none"], f"no such folder: {tmp_path / 'none'}"),
        ([run, tmp_path / "none", "--out", tmp_path / "p"], f"no such folder: {tmp_path / 'none'}"),
        ([empty], f"no rows in kappa.jsonl or metrics.jsonl of {empty}"),
        ([run, run], "2"),
        ([run, "--out", tmp_path / "no" / "p"], f"'{tmp_path / 'no' / '.p.partial'}'"),
        ([run, "--out", empty], "Is a directory"),
    ):
        with pytest.raises(SystemExit) as refused:
            main([str(argument) for argument in arguments])
        assert message in str(refused.value.code)
    assert not [*tmp_path.rglob("*.html"), *tmp_path.glob(".*")]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        SystemExit,
        match=r"^a page needs the package matplotlib: pip install 'leaner-kernels\[plot\]'$",
    ):
        main([str(run)])
