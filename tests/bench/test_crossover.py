"""The crossover: rules from GPU rows alone, and none where no library wins."""

import json
import tomllib

import pandas as pd
import pytest

from bench import crossover
from tests.bench.test_report import INFO, RESULT, SHAPE, row


@pytest.fixture
def write(tmp_path):
    def write(shapes, name="gpu.json", **changes):
        """``shapes`` maps a case's name to (facts, {peer: seconds})."""
        rows = [
            row(peer, seconds, "both", changes.pop("mode", "graph"), case)
            for case, (_, medians) in shapes.items()
            for peer, seconds in medians.items()
        ]
        cases = {case: SHAPE | facts for case, (facts, _) in shapes.items()}
        path = tmp_path / name
        path.write_text(json.dumps(RESULT | {"cases": cases, "benchmarks": rows} | changes))
        return path

    return write


def derive(tmp_path, *paths):
    output = tmp_path / "library.toml"
    crossover.main([*map(str, paths), "-o", str(output)])
    return tomllib.loads(output.read_text("utf-8")).get("rule", [])


def sizes(tokens, **facts):
    return {"rows": tokens, "tokens": tokens, **facts}


def test_a_rule_begins_where_a_library_wins_for_good(tmp_path, write):
    found = derive(
        tmp_path,
        write(
            {
                "a": (sizes(64), {"leaner_kernel": 1.0, "sdpa_flash": 0.5, "sdpa_cudnn": 2.0}),
                "b": (sizes(197), {"leaner_kernel": 1.0, "sdpa_flash": 3.0, "sdpa_cudnn": 2.0}),
                "c": (sizes(1024), {"leaner_kernel": 1.0, "sdpa_flash": 0.8, "flash_attn_2": 0.7}),
                "d": (sizes(2048), {"leaner_kernel": 1.0, "flash_attn_2": 0.6, "sdpa_cudnn": 0.5}),
                "e": (sizes(4096), {"leaner_kernel": 1.0, "sdpa_cudnn": 0.5}),
            }
        ),
    )
    common = {"capability": 90, "head_dim": 64, "causal": False}
    source = {"source": "bench/results/gpu.json"}
    assert found == [
        {**common, "min_tokens": 1024, "backend": "flash_attn", **source},
        {**common, "min_tokens": 2048, "backend": "cudnn", **source},
    ]


def test_head_dimension_and_causality_have_rules_of_their_own(tmp_path, write):
    fast, slow = ({"leaner_kernel": 1.0, "sdpa_flash": part} for part in (0.5, 1.5))
    found = derive(
        tmp_path,
        write(
            {
                "a": (sizes(512, head_dim=32, causal=True), fast),
                "b": (sizes(512, head_dim=32), slow),
                "c": (sizes(512), fast),
            }
        ),
    )
    assert [(rule["head_dim"], rule["causal"]) for rule in found] == [(32, True), (64, False)]


def test_a_library_must_win_every_case_of_a_length_and_by_a_margin(tmp_path, write):
    shapes = {
        "a": (sizes(512), {"leaner_kernel": 1.0, "sdpa_flash": 0.5, "sdpa_cudnn": 0.9}),
        "b": (sizes(512), {"leaner_kernel": 1.0, "sdpa_flash": 1.1, "sdpa_cudnn": 0.8}),
        "c": (sizes(512, head_dim=32), {"leaner_kernel": 1.0, "sdpa_flash": 0.98}),
    }
    found = derive(tmp_path, write(shapes))
    assert [(rule["backend"], rule["head_dim"]) for rule in found] == [("cudnn", 64)]


@pytest.mark.parametrize(
    "facts", [{"rows": 1}, {"padded": True}, {"lengths": [197, 5]}, {"dtype": "float32"}], ids=str
)
def test_other_calls_give_no_rule_and_write_nothing(facts, tmp_path, write):
    path = write({"a": (facts, {"leaner_kernel": 1.0, "sdpa_flash": 0.5})})
    with pytest.raises(SystemExit, match="nothing is written"):
        derive(tmp_path, path)
    assert not (tmp_path / "library.toml").exists()


def test_without_a_gpu_nothing_is_written(tmp_path, write):
    shapes = {"a": ({"device": "cpu"}, {"leaner_kernel": 1.0, "sdpa_flash": 0.5})}
    path = write(shapes, mode="wall", machine_info=INFO | {"gpu": None})
    with pytest.raises(SystemExit, match=r"measured on a GPU.*nothing is written"):
        derive(tmp_path, path)
    assert not (tmp_path / "library.toml").exists()


def test_the_newest_measurement_of_a_case_counts(tmp_path, write):
    old = {"a": (sizes(512), {"leaner_kernel": 1.0, "sdpa_flash": 0.5})}
    new = {"a": (sizes(512), {"leaner_kernel": 1.0, "sdpa_flash": 2.0})}
    paths = write(new, "new.json"), write(old, "old.json", datetime="2025-01-01")
    assert derive(tmp_path, *paths) == []


def test_rules_for_what_was_not_measured_stay(tmp_path, write):
    old = [
        (80, 64, False, 1024, "flash", "predicted"),
        (90, 64, False, 128, "cudnn", "predicted"),
        (90, 64, True, 512, "cudnn", "predicted"),
    ]
    present = pd.DataFrame(old, columns=crossover.COLUMNS)
    (tmp_path / "library.toml").write_text(crossover.toml(present))
    found = derive(tmp_path, write({"a": (sizes(512), {"leaner_kernel": 1.0, "sdpa_flash": 0.5})}))
    measured = 90, 64, False, 512, "flash", "bench/results/gpu.json"
    assert [tuple(rule.values()) for rule in found] == [old[0], measured, old[2]]


def test_the_committed_rules_rest_on_committed_results_or_are_called_predicted():
    rules = tomllib.loads(crossover.LIBRARY.read_text("utf-8"))["rule"]
    for rule in rules:
        assert [*rule] == crossover.COLUMNS
        assert rule["source"] == "predicted" or (crossover.ROOT / rule["source"]).exists()
