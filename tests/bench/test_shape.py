"""`python -m bench.shape`: its tables, its JSON and what it needs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import frames, report, shape
from bench.attention.cases import AttentionCase
from bench.attention.catalogue import ATTENTION_CASES, HEADLINE, LABELS, ON_GPU
from bench.attention.peers import PEERS, eager_attention
from bench.harness.peers import Peer

ROOT = Path(__file__).resolve().parents[2]
SMALL = AttentionCase("small", "cpu", 2, 2, 9, 4, torch.float32)
CASES = [SMALL, *(case for case in ATTENTION_CASES if case.name in ("cpu_ragged", "cpu_xca"))]
# Modules of the benchmarks that a machine where only a shape is timed need not have.
BLOCKED = "pytest", "pandas", "hypothesis", "tabulate", "scipy", "matplotlib"


@pytest.fixture(scope="module")
def measured():
    """Return the cases as measured, and what is printed of them."""
    measurements = shape.Measurements()
    return measurements, "".join(shape.paper(CASES, measurements, 60))


def lines_of(text):
    """Return the cells of the rows of each table, by its direction and the row's first cell."""
    tables = re.split(r"^(forward|forward and backward):\n\n", text, flags=re.MULTILINE)
    return {
        direction: {row[0]: row for row in (re.split(r"  +", line) for line in body.splitlines())}
        for direction, body in zip(tables[1::2], tables[2::2], strict=True)
    }


def test_every_case_has_a_row_in_both_directions(measured):
    tables = lines_of(measured[1])
    assert tables.keys() == {"forward", "forward and backward"}
    for rows in tables.values():
        assert {"small", "cpu_ragged", "cpu_xca"} <= rows.keys()
        assert rows["small"][1] == "2·2·9·4 float32"
        # A CPU has none of our kernels: attention calls PyTorch's, so neither is faster.
        assert re.fullmatch(r"PyTorch \([\d,.]+\)", rows["small"][2])
        assert rows["small"][4] == "1"
        assert rows["small"][7] == "sdpa"
        assert rows["small"][6] != "ours"
        assert rows["cpu_xca"][7] == "our kernel"


def test_ratios_and_winners_follow_from_the_times(measured):
    rows = lines_of(measured[1])["forward"]
    times = measured[0].medians(CASES[2], "forward")
    name, *_, winner, _ = rows["cpu_xca"]
    assert winner == {"leaner": "ours"}.get(next(iter(times)), next(iter(times)))
    assert float(rows[name][4]) == pytest.approx(times["timm"] / times["leaner"], rel=0.01)


def test_the_json_is_a_result_that_the_report_reads(measured, tmp_path, capsys):
    path = tmp_path / "2026-01-01-cpu-shape.json"
    measured[0].write(path)
    timed = frames.timed([frames.read(path)])
    assert {*timed["case"]} == {"small", "cpu_ragged", "cpu_xca"}
    assert {*timed["stage"]} == {"forward", "both"}
    assert {*timed["mode"]} == {"wall"}
    kernel = timed[(timed["peer"] == "leaner_kernel") & (timed["stage"] == "both")]
    assert kernel["median"].item() == measured[0].medians(SMALL, "both")["leaner_kernel"]
    assert kernel["ours"].item()
    assert 0 < kernel["copy_fraction"].item() < 1
    content = json.loads(path.read_text())
    assert content["machine_info"]["versions"]["torch"] == torch.__version__
    assert content["commit_info"]["source"]
    absent = {entry["peer"]: entry["status"] for entry in content["unmeasured"]}
    assert absent["sdpa_cudnn"] == "absent"
    report.main([str(path)])
    assert "| 2·2·9·4 float32 |" in capsys.readouterr().out


def test_the_table_of_readme_is_measured_with_both_of_ours_and_each_backend_of_pytorch():
    assert {*HEADLINE} <= {*LABELS} <= {*ON_GPU}
    assert {*shape.PAPER_PEERS} >= {*report.OWN_KERNELS, "sdpa_cudnn", "sdpa_flash", "torch_varlen"}
    for name in HEADLINE:
        peers = {*shape.peers_of(ON_GPU[name])} & {*shape.PAPER_PEERS}
        assert peers & {*shape.PUBLIC}
        assert peers & {*report.OWN_KERNELS}
        assert peers & {*frames.DEFAULTS}


def test_time_that_is_spent_is_stated_for_every_peer_that_is_left_out():
    measurements = shape.Measurements()
    text = "".join(shape.paper([SMALL], measurements, -1))
    assert lines_of(text)["forward"]["small"][:2] == ["small", "2·2·9·4 float32"]
    assert measurements.entries == []
    assert {entry["status"] for entry in measurements.unmeasured} == {"not run"}
    assert {"sdpa", "leaner_attention"} <= {entry["peer"] for entry in measurements.unmeasured}


def wrong(q, k, v):
    return 2 * eager_attention(q, k, v, None, 0.5)


def broken(q, k, v):
    raise RuntimeError("no such kernel\nand more")


@pytest.mark.parametrize(
    ("function", "reason"),
    [(wrong, "out is off by"), (broken, "both: RuntimeError: no such kernel")],
)
def test_a_kernel_of_ours_that_is_wrong_or_fails_is_named_and_the_rest_is_measured(
    function, reason, monkeypatch, capsys, tmp_path
):
    monkeypatch.setitem(PEERS, "leaner_kernel", Peer(lambda case, device: function, ours=True))
    path = tmp_path / "a.json"
    with pytest.raises(SystemExit) as ended:
        shape.main(["1,1,8,8", "--float32", "--json", str(path)])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert re.search(rf"^wrong: leaner_kernel in 1x1x8x8: {reason}", out, re.MULTILINE)
    assert re.search(r"^sdpa .* 1 ", out, re.MULTILINE)
    assert "sdpa" in {entry["name"] for entry in json.loads(path.read_text())["benchmarks"]}


def test_a_shape_is_timed_without_the_packages_of_the_other_benchmarks(tmp_path):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({BLOCKED!r}));"
        " from bench import shape; shape.main(['1,1,8,8', '--causal'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^peer +forward and backward, µs +× sdpa, both", done.stdout, re.MULTILINE)
    assert re.search(r"^forward: \w+ is fastest, [\d.]+ times as fast as sdpa$", done.stdout, re.M)
    assert "attention runs sdpa forward and sdpa backward" in done.stdout
    assert PEERS["leaner_kernel"].about in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of SHAPE, --paper and --profile"),
        (["1,1,8,8", "--paper"], "give one of SHAPE, --paper and --profile"),
        (["1,1,8"], "shape must be four integers, batch,heads,tokens,head_dim: 1,1,8"),
        (["1,1,8,x"], "shape must be four integers"),
        (["1,1,0,8"], "every size must be at least 1: 1,1,0,8"),
        (["1,1,8,8", "--float16", "--float32"], "not allowed with argument"),
        (["1,1,8,8", "--json", "/nowhere/a.json"], "--json: /nowhere is not a folder"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as refused:
        shape.main(arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [["--paper"], ["--profile", "vit_base"]])
def test_without_a_gpu_what_needs_one_is_refused_in_one_line(arguments):
    line = f"bench.shape {arguments[0]} needs a CUDA GPU, but torch finds none"
    with pytest.raises(SystemExit, match=line):
        shape.main(arguments)
