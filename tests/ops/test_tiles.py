"""The data that says which kernel runs a shape: well formed, and read as it is meant."""

import pytest
import torch

from leaner_kernels.ops.attention import tiles
from leaner_kernels.ops.attention.call import Call
from leaner_kernels.ops.attention.kernels import scores
from leaner_kernels.ops.attention.kernels.scores import Tiles

FEATURES = {"mask", "dropout", "shared", "odd", "unaligned"}
KERNELS = {
    *(
        f"{family}_{kind}"
        for family in ("warp_multihead", "multihead", "short")
        for kind in ("forward", "forward_statistics", "backward")
    ),
    "tiled_backward",
}


@pytest.fixture(params=tiles.ARCHITECTURES)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tiles, "capability", lambda _: request.param)
    return request.param


def half(heads: int, tokens: int, dim: int) -> torch.Tensor:
    return torch.empty(1, heads, tokens, dim, dtype=torch.bfloat16, device="meta")


def test_every_rule_is_a_tile(gpu: int) -> None:
    found = tiles.rules(gpu)
    ways = "forward", "forward_statistics", "backward"
    assert found.keys() == KERNELS | {f"{'hopper' if gpu == 90 else 'ampere'}_{w}" for w in ways}
    for kernel, rules in found.items():
        assert rules
        for rule in rules:
            assert rule["dim"] in (16, 32, 64, 128)
            if kernel.startswith("tiled"):
                assert rule.keys() == {"dim", "with", "tile"}
                assert set(rule["with"]) <= {*FEATURES, "varlen"}
                tile = Tiles(**rule["tile"])
                assert tile.BLOCK_M % 16 == tile.BLOCK_N % 16 == 0
                continue
            assert rule.keys() - {"above"} == {"dim", "tokens", "with", "tile"}
            assert set(rule["with"]) <= FEATURES
            if kernel.startswith(("hopper", "ampere")):
                assert rule["tokens"] > rule["above"] >= 64
                kind = tiles.HopperTile if kernel.startswith("hopper") else tiles.AmpereTile
                kind(**rule["tile"])
                continue
            if kernel.startswith("warp_multihead"):
                assert rule["tokens"] == 16
                tiles.WarpMultiheadTile(**rule["tile"])
            elif kernel.startswith("multihead"):
                assert rule["tokens"] <= 64
                tiles.MultiheadTile(ROWS=16, COLS=16, **rule["tile"])
            else:
                tile = tiles.ShortTile(rule["tokens"], **rule["tile"])
                powers = tile.BLOCK, tile.largest_segment, tile.num_warps
                assert all(number & (number - 1) == 0 for number in powers)


def test_the_shapes_of_the_models_run_on_kernels_that_own_heads(gpu: int) -> None:
    nothing = frozenset[str]()
    vit, bert, gpt, tnt = half(16, 197, 64), half(24, 128, 32), half(16, 64, 32), half(4, 16, 10)
    odd = tiles.features(None, None, tnt)
    assert odd == {"odd", "unaligned"}
    for kind in ("forward", "backward"):
        assert tiles.multihead(f"multihead_{kind}", tnt, tnt, odd)
        assert tiles.short(f"short_{kind}", bert, 128, nothing, 0.1)
        assert tiles.short(f"short_{kind}", gpt, 64, nothing, 0.1)
    assert tiles.short("short_forward", vit, 197, nothing, 0.1)
    # dQ, Q and dO of 197 tokens do not fit the registers that ptxas finds for sm_86.
    backward = tiles.short("short_backward", vit, 197, nothing, 0.1)
    assert (backward is None) == (gpu == 86)


def test_a_kernel_for_hopper_runs_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(gpu: int, query: torch.Tensor, key: torch.Tensor, scale: float = 0.1) -> object:
        monkeypatch.setattr(tiles, "capability", lambda _: gpu)
        return tiles.hopper("hopper_backward", query, key, frozenset(), scale)

    vit = half(16, 197, 64)
    assert chosen(90, vit, vit) == tiles.HopperTile(168)
    assert [chosen(gpu, vit, vit) for gpu in (80, 86, 89, 100, 120)] == [None] * 5
    assert chosen(90, half(16, 64, 64), half(16, 64, 64)) is None
    assert chosen(90, half(16, 1, 64), vit) is None
    assert chosen(90, vit, vit, -0.1) is None
    long = half(16, 512, 32)
    assert chosen(90, long, long) is None, "too few programs"
    assert chosen(90, long.expand(20, -1, -1, -1), long)
    assert tiles.hopper("hopper_forward", vit, vit, frozenset(), 0.1) is None, "too few programs"
    many = vit.expand(20, -1, -1, -1)
    assert tiles.hopper("hopper_forward", many, many, frozenset(), 0.1)


def test_a_kernel_for_ampere_runs_on_ampere_and_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = half(16, 197, 64)
    found = {}
    for gpu in (75, 80, 86, 87, 89, 90, 100, 120):
        monkeypatch.setattr(tiles, "capability", lambda _, gpu=gpu: gpu)
        found[gpu] = tiles.ampere("ampere_backward", vit, vit, frozenset(), 0.1)
    assert {gpu for gpu, tile in found.items() if tile} == {80, 86, 87, 89}
    assert found[89] == found[86] == tiles.AmpereTile(16, 255)


def test_warps_own_short_heads_where_rows_are_as_many_as_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tnt, odd = half(4, 16, 10), frozenset({"odd", "unaligned"})

    def chosen(gpu: int, query: torch.Tensor, key: torch.Tensor, scale: float = 0.1) -> object:
        monkeypatch.setattr(tiles, "capability", lambda _: gpu)
        return tiles.warp_multihead("warp_multihead_forward", query, key, odd, scale)

    assert [bool(chosen(gpu, tnt, tnt)) for gpu in (75, 80, 86, 89, 90, 100)] == [
        *(False, True, True, True, True, False)
    ]  # fmt: skip
    assert chosen(90, tnt, half(4, 15, 10)) is None
    assert chosen(90, half(4, 17, 10), half(4, 17, 10)) is None
    assert chosen(90, tnt, tnt, -0.1) is None


def test_long_rows_have_tiles_by_gpu_and_by_what_a_call_brings(gpu: int) -> None:
    def chosen(q: torch.Tensor, **rest: object) -> Tiles | None:
        call = Call(q, q, q, None, None, None, 0.0, True, 0.1)._replace(**rest)
        arguments = scores.shared_arguments(call)
        return scores.tuned_tiles("tiled_backward", call, arguments, varlen=False)

    long = half(4, 1024, 32)
    tile = chosen(long)
    assert tile is not None
    assert tile.BLOCK_N == 64
    assert (chosen(half(4, 1024, 64)) is None) == (gpu == 86)
    assert (chosen(half(4, 1024, 80)) is None) == (gpu == 90)
    assert chosen(long, seed=torch.zeros(1), dropout_p=0.1) is None
    mask = torch.ones(1024, 1024, dtype=torch.bool)
    assert chosen(long, attn_mask=mask, is_causal=False) is None
    assert chosen(long, scale=-0.1) is None
    assert chosen(torch.empty(1, 4, 1024, 32, device="meta")) is None  # float32


def test_rows_and_keys_have_tiles_of_their_own(gpu: int) -> None:
    tile = tiles.multihead("multihead_forward", half(4, 1, 32), half(4, 30, 32), frozenset())
    assert tile is not None
    assert (tile.ROWS, tile.COLS) == (16, 32)


def test_a_stride_that_hides_where_rows_start_is_unaligned(gpu: int) -> None:
    apart = torch.empty(1, 2, 64, 65, dtype=torch.bfloat16, device="meta")[..., :64]
    assert tiles.features(None, None, half(2, 64, 64)) == frozenset()
    assert tiles.features(None, None, half(2, 64, 64), apart) == {"unaligned"}


def test_gpus_before_ampere_are_left_to_the_kernels_for_any_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "capability", lambda _: 75)
    assert tiles.short("short_forward", half(2, 64, 64), 64, frozenset(), 0.1) is None


@pytest.mark.parametrize("scale", [0.0, -0.125, 1e-40])
def test_a_maximum_before_scaling_needs_a_positive_scale(gpu: int, scale: float) -> None:
    assert tiles.short("short_forward", half(4, 64, 64), 64, frozenset(), scale) is None


def test_what_no_rule_takes_is_left_to_the_kernels_for_any_length(gpu: int) -> None:
    single = torch.empty(1, 2, 64, 64, device="meta")
    assert tiles.short("short_forward", single, 64, frozenset(), 0.1) is None
    assert tiles.multihead("multihead_forward", single, single, frozenset()) is None
    assert tiles.short("short_forward", half(2, 1024, 64), 1024, frozenset(), 0.1) is None
    everything = frozenset(FEATURES)
    assert tiles.short("short_forward", half(2, 197, 42), 197, everything, 0.1) is None


def test_a_feature_asks_for_the_rule_that_names_it(gpu: int) -> None:
    mask, seed = torch.empty(1), torch.empty(1)
    query = half(2, 64, 48)
    assert tiles.features(mask, None, query) == {"mask", "odd"}
    assert tiles.features(None, seed, half(2, 64, 64)) == {"dropout"}
    plain = tiles.short("short_backward", half(2, 64, 64), 64, frozenset(), 0.1)
    dropout = tiles.short("short_backward", half(2, 64, 64), 64, frozenset({"dropout"}), 0.1)
    assert plain is not None
    assert dropout is not None


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(80, 80), (86, 86), (87, 86), (89, 86), (90, 90), (100, 90), (103, 90), (120, 86)],
)
def test_a_gpu_gets_the_data_whose_limits_it_keeps(capability: int, expected: int) -> None:
    assert tiles.architecture(capability) == expected
