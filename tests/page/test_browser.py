"""The page of a run in a browser: headless Chromium, which draws it and runs its scripts."""

import json
import os
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from leaner_kernels.monitor.page import write_page

pytest.importorskip("plotly", reason="a page needs plotly")
NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
if CHROMIUM is None:
    reason = f"no browser: none of {', '.join(NAMES)} is installed"
    if os.environ.get("LEANER_CHROMIUM") == "required":
        raise FileNotFoundError(reason)
    pytest.skip(reason, allow_module_level=True)

HOSTILE = "<img src=x onerror=document.title='hacked'>"
CLOSING = "</script><script>document.title='hacked'</script>"


def dom_of(page: Path, profile: Path) -> str:
    """Return the document as it is when all scripts ran."""
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
    ]
    command += ["--virtual-time-budget=10000", "--window-size=1300,2000", "--dump-dom"]
    done = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    # Plotly's own source has the words that the tests look for.
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


def write_run(folder: Path, layers: list[str], steps: int = 12) -> Path:
    folder.mkdir(parents=True)

    def lines(name, rows):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    metrics = [{"step": step, "loss": 2 - step / steps} for step in range(steps)]
    metrics[-1] |= {"held_out_loss": 1.2, "held_out_accuracy": 0.7}
    lines("metrics", metrics)
    rows = [
        {
            **{"step": step, "layer": layer, "kappa": 20.0 + step + n, "kappa_gaussian": 1.7},
            **{"entropy": 2.0, "max_logit": 3.0 + n, "head_norms": [1.0, 2.0, 3.0], "columns": 16},
        }
        for step in range(0, steps, 4)
        for n, layer in enumerate(layers)
    ]
    lines("kappa", rows)
    lines("kappa_probe", rows)
    lines("alarms", [{"step": 4, "kind": CLOSING, "message": f"κ of {layers[0]} is 2e+05"}])
    summary = {"model": HOSTILE, "data": CLOSING, HOSTILE: 1, "settings": {CLOSING: HOSTILE}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


class Elements(HTMLParser):
    """The elements of a document, by name, and all their attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs


def traces(dom: str) -> int:
    return dom.count('class="trace scatter ')


def test_every_line_and_the_heat_map_of_a_run_are_drawn(tmp_path):
    page = tmp_path / "page.html"
    write_page([write_run(tmp_path / "vit", [f"blocks.{n}.attn" for n in range(4)])], page)
    dom = dom_of(page, tmp_path / "profile")
    assert dom.count('class="plotly-graph-div js-plotly-plot"') == 7
    # Loss, held-out loss, alarms; accuracy; four layers, one prediction, alarms; these without
    # alarms; four layers and alarms; four layers.
    assert traces(dom) == 3 + 1 + 6 + 5 + 5 + 4
    assert len(re.findall(r'<path class="js-line" d="M[^"]+L', dom)) >= 1 + 5 + 5 + 4 + 4
    assert len(re.findall(r'class="point"', dom)) > 4 * 4 * 3
    assert dom.count('class="hm"') == 1
    assert dom.count(">blocks.3</text>") >= 4
    assert ">Gaussian heads: 1.7</text>" in dom
    assert "<title>vit</title>" in dom


def test_runs_are_drawn_side_by_side(tmp_path):
    page = tmp_path / "page.html"
    write_page([write_run(tmp_path / name, ["a", "b"]) for name in ("one", "two")], page)
    dom = dom_of(page, tmp_path / "profile")
    assert dom.count('class="plotly-graph-div js-plotly-plot"') == 2 + 1 + 2 * 2 + 2 + 2
    assert dom.count(">two, training</text>") == 1
    assert dom.count('class="hm"') == 2


def test_a_long_run_is_drawn(tmp_path):
    page = tmp_path / "page.html"
    write_page([write_run(tmp_path / "long", ["a", "b"], steps=20_000)], page)
    dom = dom_of(page, tmp_path / "profile")
    assert traces(dom) == 3 + 1 + 4 + 3 + 3 + 2
    assert "2,000 each are drawn" in dom


def test_names_run_no_script_and_ask_no_network(tmp_path):
    page = tmp_path / "page.html"
    link = '<a href="https://a.b">x</a>'
    folder = write_run(tmp_path / HOSTILE, [HOSTILE, CLOSING, link])
    write_page([folder], page)
    text = page.read_text("utf-8")
    dom = dom_of(page, tmp_path / "profile")
    assert traces(dom) == 3 + 1 + 5 + 4 + 4 + 3
    assert f">{escape(HOSTILE, quote=False)}</text>" in dom
    # A name that was taken as HTML would have changed the title.
    assert f"<title>{escape(HOSTILE, quote=False)}</title>" in dom
    found = Elements(dom)
    assert "svg" in found.tags
    assert "img" not in found.tags
    assert [name for name, _ in found.attributes if name.startswith("on")] == []
    links = [value for name, value in found.attributes if name in ("src", "href", "xlink:href")]
    assert [link for link in links if not link.startswith("data:")] == []
    assert "default-src 'none'" in dom
    own = max(text.split("<script>"), key=len)
    assert own.lstrip().startswith("/**\n* plotly.js")
    rest = text.replace(own, "").replace(escape(link), "")  # as text, in the first table
    assert "://" not in rest
