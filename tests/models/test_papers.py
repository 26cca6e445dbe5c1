"""The rows of the paper: counts as built, as audited and as printed."""

import sys
from pathlib import Path

import pytest

from models import papers
from tests.models.parity import timm_vit

ROOT = Path(__file__).resolve().parents[2]
TABLES = [row for row in papers.ROWS.values() if row.audited_params is not None]
# Printed to one decimal, but not the count of any reading, or cut instead of rounded: their notes
# say so.
MISPRINTED = {
    ("volo_d3", "original"),
    ("davit_base", "lean"),
    ("crammed_bert", "original"),
    ("crammed_bert", "lean"),
    ("gpt2_tinystories", "original"),
    ("gpt2_tinystories", "lean"),
    *(
        (f"nystromformer_{task}", "original")
        for task in ("text", "retrieval", "image", "pathfinder")
    ),
    *((f"nystromformer_{task}", "lean") for task in ("text", "retrieval", "image", "pathfinder")),
}
UNITS = {"params_m": 6, "params_k": 3}


def timm_params(config: dict) -> int:
    return sum(p.numel() for p in timm_vit(**config, device="meta").parameters())


@pytest.mark.parametrize("entry", TABLES, ids=lambda entry: f"{entry.row}-{entry.variant}")
def test_every_row_has_exactly_the_audited_parameters(entry):
    model = papers.build(entry.row, entry.variant, device="meta")
    assert model.num_params() == entry.audited_params
    assert model.head_convention == entry.convention
    if entry.architecture == "vit":
        assert model.num_params() == timm_params(entry.config)
    unit, printed = next((10**d, entry.printed[k]) for k, d in UNITS.items() if k in entry.printed)
    agrees = round(entry.audited_params / unit, 1) == printed
    assert agrees == ((entry.row, entry.variant) not in MISPRINTED)


def test_the_vision_rows_are_those_of_tables_4_and_5():
    families = "vit_base deit_base vit_large deit_large xcit_medium xcit_large tnt_base volo_d3"
    expected = [*families.split(), "volo_d4", "davit_base", "davit_large"]
    assert [row.row for row in TABLES if row.variant == "lean" and row.takes_images] == expected


def test_a_name_builds_its_row():
    lean = papers.model("xcit_medium_lean", device="meta", depth=2)
    assert [len(lean.blocks), lean.blocks[0].attn.num_heads] == [2, 16]
    assert papers.model("tnt_base", device="meta").num_params() == 65_428_680
    point = papers.model("figure3_depth8_heads14", device="meta")
    assert [len(point.blocks), point.blocks[0].attn.num_heads] == [8, 14]
    with pytest.raises(ValueError, match=r"model must be one of vit_base, .*, got 'vit_huge'"):
        papers.model("vit_huge")


def test_the_documented_table_is_the_one_that_is_computed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["models.papers", "--markdown"])
    papers.main()
    assert capsys.readouterr().out in (ROOT / "docs" / "models.md").read_text()


def test_the_published_counts_are_those_of_the_paper():
    audited = {key: row.audited_params for key, row in papers.ROWS.items()}
    assert audited["vit_base", "original"] == audited["deit_base", "original"] == 86_567_656
    assert audited["vit_base", "lean"] == audited["deit_base", "lean"] == 40_112_872
    assert audited["vit_large", "original"] == audited["deit_large", "original"] == 203_614_184
    assert audited["vit_large", "lean"] == audited["deit_large", "lean"] == 98_597_864


def test_the_misprints_in_the_notes_are_what_the_model_counts():
    split = papers.build("vit_base", "lean", head_dim="split", device="meta")
    assert f"{split.num_params():,}" in papers.ROWS["vit_base", "lean"].note
    note = papers.ROWS["vit_large", "original"].note
    for overrides in ({"mlp_ratio": 4.0}, {}, {"mlp_ratio": 4.0, "depth": 16}):
        large = papers.build("vit_large", "original", device="meta", **overrides)
        assert f"{large.num_params():,}" in note


@pytest.mark.parametrize(("row", "points"), [("figure3", 18), ("figure4", 16), ("figure5", 6)])
def test_figures_are_variants_of_vit_base(row, points):
    entries = [entry for entry in papers.ROWS.values() if entry.row == row]
    assert len(entries) == points
    for entry in entries:
        model = papers.build(row, entry.variant, device="meta")
        assert entry.variant.startswith(f"depth{len(model.blocks)}_")
        assert model.num_params() == timm_params(entry.config)
    variant, known = {
        "figure3": ("depth12_heads12", "original"),
        "figure4": ("depth12_mlp_ratio4", "original"),
        "figure5": ("depth7_mlp_ratio2", "lean"),
    }[row]
    of_table = papers.build("vit_base", known, device="meta").num_params()
    assert papers.build(row, variant, device="meta").num_params() == of_table


@pytest.mark.parametrize(
    ("row", "of"), [("figure8", "nystromformer_listops"), ("figure9", "nystromformer_text")]
)
def test_figures_8_and_9_vary_heads_and_layers_of_nystromformers(row, of):
    entries = [entry for entry in papers.ROWS.values() if entry.row == row]
    assert len(entries) == 8
    audited = papers.ROWS[of, "original"].audited_params, papers.ROWS[of, "lean"].audited_params
    # A head of 32 in a width of 64 has q, k and v with biases, and its part of the projection.
    head = 3 * (64 * 32 + 32) + 32 * 64
    layer = audited[0] - audited[1] + 2 * head  # two of two heads against one of four
    for entry in entries:
        depth, heads = entry.config["depth"], entry.config["heads"]
        counted = papers.build(row, entry.variant, device="meta").num_params()
        one_layer = audited[1] + (heads - 4) * head
        assert counted == one_layer + (depth - 1) * (layer + (heads - 2) * head)


def test_presets_beyond_a_billion_parameters_have_equal_budgets():
    assert len(papers.PRESETS) == 4
    for row in dict.fromkeys(row for row, _ in papers.PRESETS):
        counts = {}
        for variant in ("original", "lean"):
            model = papers.build(row, variant, device="meta")
            counts[variant] = model.num_params()
            assert counts[variant] == papers.PRESETS[row, variant].audited_params
            if row == "vit_1b":
                assert counts[variant] == timm_params(papers.PRESETS[row, variant].config)
        assert counts["lean"] == pytest.approx(counts["original"], rel=2e-4)
        assert counts["lean"] > 1e9


def test_figure_3_counts_are_those_of_its_note():
    counts = [
        papers.build("figure3", f"depth8_heads{heads}", device="meta").num_params() / 1e6
        for heads in (14, 18)
    ]
    assert "{:.2f}M to {:.2f}M".format(*counts) in papers.ROWS["figure3", "depth8_heads14"].note


@pytest.mark.parametrize(
    ("row", "variant", "message"),
    [
        ("vit_huge", "lean", "row must be one of vit_base, deit_base, .*, got 'vit_huge'"),
        ("vit_base", "fat", "variant of vit_base must be one of original, lean, got 'fat'"),
        ("figure3", "lean", "variant of figure3 must be one of depth12_heads2, .*, got 'lean'"),
    ],
)
def test_an_unknown_row_or_variant_is_named_in_one_line(row, variant, message):
    with pytest.raises(ValueError, match=message) as error:
        papers.build(row, variant)
    assert "\n" not in str(error.value)
