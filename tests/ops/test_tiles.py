"""The data of which kernel runs a shape: well formed, and read as it is meant."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from leaner_kernels.ops import _tiles
from leaner_kernels.ops._tiles import Tile
from leaner_kernels.ops.attention import launch
from leaner_kernels.ops.attention.call import Call, features, online_tile

FEATURES = {"mask", "dropout", "shared", "padded_dim", "unaligned"}
KERNELS = {
    *(
        f"{family}_{kind}"
        for family in ("warp_multihead", "short")
        for kind in ("forward", "forward_statistics", "backward")
    ),
    "online_backward",
}


@pytest.fixture(params=_tiles.ARCHITECTURES)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(_tiles, "capability", lambda _: request.param)
    return request.param


def half(heads: int, tokens: int, dim: int) -> torch.Tensor:
    return torch.empty(1, heads, tokens, dim, dtype=torch.bfloat16, device="meta")


def scaled_by(scale: float) -> frozenset[str]:
    return features(None, None, half(1, 16, 16), scale=scale)


def shipped() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield operator, file, kernel and rule of all the data."""
    folder = Path(_tiles.__file__).parent
    for path in sorted(folder.glob("*/tuned/*.toml")):
        operator = path.parent.parent.name
        for kernel, found in _tiles.rules(operator, path.stem).items():
            yield from ((operator, path.stem, kernel, rule) for rule in found)


def test_every_rule_of_every_operator_follows_one_schema() -> None:
    operators = {operator for operator, *_ in shipped()}
    assert operators == {"attention", "covariance", "nystrom", "outlook", "window"}
    for _, file, _, rule in shipped():
        assert file in ("sm_80", "sm_86", "sm_90", "default")
        assert {"tile"} <= rule.keys() <= {"bytes", "dim", "above", "tokens", "with", "tile"}
        assert rule.get("bytes", 2) in (2, 4)
        assert rule.get("dim", 16) in (16, 32, 64, 128)
        assert rule.get("with", []) == sorted(set(rule.get("with", [])))
        tile = rule["tile"]
        assert {"num_warps"} <= tile.options.keys() <= set(_tiles.OPTIONS)
        assert all(type(number) is int for number in tile.options.values())
        assert tile.options["num_warps"] in (1, 2, 4, 8, 16)
        assert tile.constexprs.keys().isdisjoint(_tiles.OPTIONS)


def test_no_rule_hides_behind_one_that_takes_all_its_calls() -> None:
    seen: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for *place, rule in shipped():
        for before in seen.setdefault(tuple(place), []):
            assert not (
                before.get("bytes", 2) == rule.get("bytes", 2)
                and before.get("dim", rule.get("dim")) == rule.get("dim")
                and before.get("above", -1) <= rule.get("above", -1)
                and before.get("tokens", 10**9) >= rule.get("tokens", 10**9)
                and set(before.get("with", ())) >= set(rule.get("with", ()))
            ), (place, rule)
        seen[tuple(place)].append(rule)


def test_a_call_that_no_rule_fits_is_named() -> None:
    meta = torch.device("meta")
    with pytest.raises(
        LookupError, match=r"covariance/tuned gives forward a tile for .*'dim': 256"
    ):
        _tiles.find_tile("covariance", "forward", meta, element_size=2, dim=256)


def test_a_tile_is_constants_and_options() -> None:
    tile = Tile.of(BLOCK_M=64, BLOCK_N=32, num_warps=4, maxnreg=255)
    assert tile.constexprs == {"BLOCK_M": 64, "BLOCK_N": 32}
    assert tile.options == {"num_warps": 4, "maxnreg": 255}
    assert tile["BLOCK_N"] == 32
    assert tile.at_most(BLOCK_M=16, BLOCK_N=64) == tile.replace(BLOCK_M=16)
    assert Tile.of(**tile.arguments) == tile


def test_every_rule_is_a_tile(gpu: int) -> None:
    found = _tiles.rules("attention", f"sm_{gpu}")
    ways = "forward", "forward_statistics", "backward"
    assert found.keys() == KERNELS | {f"{'hopper' if gpu == 90 else 'ampere'}_{w}" for w in ways}
    for kernel, rules in found.items():
        assert rules
        for rule in rules:
            assert rule["dim"] in (16, 32, 64, 128)
            names = rule["tile"].constexprs.keys()
            if kernel.startswith("online"):
                assert rule.keys() == {"dim", "with", "tile"}
                assert set(rule["with"]) <= {*FEATURES, "varlen"}
                assert names == {"BLOCK_M", "BLOCK_N"}
                assert all(size % 16 == 0 for size in rule["tile"].constexprs.values())
                continue
            assert rule.keys() - {"above"} == {"dim", "tokens", "with", "tile"}
            assert set(rule["with"]) <= FEATURES
            # Gluon has no stages.
            in_gluon = kernel.startswith(("hopper", "ampere", "warp_multihead"))
            assert ("num_stages" in rule["tile"].options) == (not in_gluon)
            if kernel.startswith(("hopper", "ampere")):
                assert rule["tokens"] > rule["above"] >= 64
                if kernel.startswith("ampere"):
                    assert names == {"STEP", "BLOCK"}
                else:
                    assert names <= {"PAIRED" if "forward" in kernel else "IN_REGISTERS"}
                    assert rule["tile"].options["num_warps"] == 4
            elif kernel.startswith("warp_multihead"):
                assert rule["tokens"] == 16
                assert names == {"HEADS"}
            else:
                assert names == {"BLOCK", "largest_segment"}
                powers = *rule["tile"].constexprs.values(), rule["tile"].options["num_warps"]
                assert all(number & (number - 1) == 0 for number in powers)


def test_the_shapes_of_the_models_run_on_kernels_that_own_heads(gpu: int) -> None:
    nothing = frozenset[str]()
    vit, bert, gpt, tnt = half(16, 197, 64), half(24, 128, 32), half(16, 64, 32), half(4, 16, 10)
    odd = features(None, None, tnt)
    assert odd == {"padded_dim", "unaligned"}
    for kind in ("forward", "backward"):
        assert launch.short_tile(f"short_{kind}", tnt, 16, odd)
        assert launch.short_tile(f"short_{kind}", bert, 128, nothing)
        assert launch.short_tile(f"short_{kind}", gpt, 64, nothing)
    assert launch.short_tile("short_forward", vit, 197, nothing)
    # dQ, Q and dO of 197 tokens do not fit the registers that ptxas finds for sm_86.
    backward = launch.short_tile("short_backward", vit, 197, nothing)
    assert (backward is None) == (gpu == 86)


def test_a_kernel_for_hopper_runs_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(gpu: int, query: torch.Tensor, key: torch.Tensor, scale: float = 0.1) -> object:
        monkeypatch.setattr(_tiles, "capability", lambda _: gpu)
        return launch.hopper_tile("hopper_backward", query, key, scaled_by(scale))

    vit = half(16, 197, 64)
    assert chosen(90, vit, vit) == Tile.of(num_warps=4, maxnreg=168)
    assert [chosen(gpu, vit, vit) for gpu in (80, 86, 89, 100, 120)] == [None] * 5
    assert chosen(90, half(16, 64, 64), half(16, 64, 64)) is None
    assert chosen(90, half(16, 1, 64), vit) is None
    assert chosen(90, vit, vit, -0.1) is None
    long = half(16, 512, 32)
    assert chosen(90, long, long) is None, "too few programs"
    assert chosen(90, long.expand(20, -1, -1, -1), long)
    assert launch.hopper_tile("hopper_forward", vit, vit, frozenset()) is None, "too few programs"
    many = vit.expand(20, -1, -1, -1)
    assert launch.hopper_tile("hopper_forward", many, many, frozenset())


def test_a_kernel_for_ampere_runs_on_ampere_and_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = half(16, 197, 64)
    found = {}
    for gpu in (75, 80, 86, 87, 89, 90, 100, 120):
        monkeypatch.setattr(_tiles, "capability", lambda _, gpu=gpu: gpu)
        found[gpu] = launch.ampere_tile("ampere_backward", vit, vit, frozenset())
    assert {gpu for gpu, tile in found.items() if tile} == {80, 86, 87, 89}
    assert found[89] == found[86] == Tile.of(STEP=16, BLOCK=64, num_warps=4, maxnreg=255)


def test_warps_own_short_heads_where_rows_are_as_many_as_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tnt, odd = half(4, 16, 10), frozenset({"padded_dim", "unaligned"})

    def chosen(gpu: int, query: torch.Tensor, key: torch.Tensor, scale: float = 0.1) -> object:
        monkeypatch.setattr(_tiles, "capability", lambda _: gpu)
        wanted = odd | scaled_by(scale)
        return launch.warp_multihead_tile("warp_multihead_forward", query, key, wanted)

    assert [bool(chosen(gpu, tnt, tnt)) for gpu in (75, 80, 86, 89, 90, 100)] == [
        *(False, True, True, True, True, True)
    ]  # fmt: skip
    assert chosen(90, tnt, half(4, 15, 10)) is None
    assert chosen(90, half(4, 17, 10), half(4, 17, 10)) is None
    assert chosen(90, tnt, tnt, -0.1) is None


def test_long_rows_have_tiles_by_gpu_and_by_what_a_call_brings(gpu: int) -> None:
    def chosen(q: torch.Tensor, **rest: object) -> bool:
        """Whether the tile is of the architecture."""
        call = Call(q, q, q, None, None, None, 0.0, True, 0.1)._replace(**rest)
        tile = online_tile("online_backward", call, varlen=False)
        own = _tiles.rules("attention", f"sm_{gpu}")["online_backward"]
        return any(tile is rule["tile"] for rule in own)

    long = half(4, 1024, 32)
    assert chosen(long)
    call = Call(long, long, long, None, None, None, 0.0, True, 0.1)
    assert online_tile("online_backward", call, varlen=False)["BLOCK_N"] == 64
    assert chosen(half(4, 1024, 64)) == (gpu != 86)
    assert chosen(half(4, 1024, 80)) == (gpu != 90)
    assert not chosen(long, seed=torch.zeros(1), dropout_p=0.1)
    mask = torch.ones(1024, 1024, dtype=torch.bool)
    assert not chosen(long, attn_mask=mask, is_causal=False)
    assert not chosen(long, scale=-0.1)
    assert not chosen(long, softcap=30.0)
    assert not chosen(torch.empty(1, 4, 1024, 32, device="meta"))  # float32


def test_a_stride_that_hides_where_rows_start_is_unaligned(gpu: int) -> None:
    apart = torch.empty(1, 2, 64, 65, dtype=torch.bfloat16, device="meta")[..., :64]
    assert features(None, None, half(2, 64, 64)) == frozenset()
    assert features(None, None, half(2, 64, 64), apart) == {"unaligned"}


def test_gpus_before_ampere_are_left_to_the_kernels_for_any_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_tiles, "capability", lambda _: 75)
    assert launch.short_tile("short_forward", half(2, 64, 64), 64, frozenset()) is None


@pytest.mark.parametrize("scale", [0.0, -0.125, 1e-40])
def test_a_maximum_before_scaling_needs_a_positive_scale(gpu: int, scale: float) -> None:
    query = half(4, 64, 64)
    wanted = scaled_by(scale)
    assert wanted == {"scale"}
    assert launch.short_tile("short_forward", query, 64, wanted) is None
    assert launch.short_tile("short_forward", query, 64, scaled_by(1e-20))


def test_what_no_rule_takes_is_left_to_the_kernels_for_any_length(gpu: int) -> None:
    single = torch.empty(1, 2, 64, 64, device="meta")
    assert launch.short_tile("short_forward", single, 64, frozenset()) is None
    assert launch.short_tile("short_forward", half(2, 1024, 64), 1024, frozenset()) is None
    everything = frozenset(FEATURES)
    assert launch.short_tile("short_forward", half(2, 197, 42), 197, everything) is None


def test_a_feature_asks_for_the_rule_that_names_it(gpu: int) -> None:
    mask, seed = torch.empty(1), torch.empty(1)
    query = half(2, 64, 48)
    assert features(mask, None, query) == {"mask", "padded_dim"}
    assert features(None, seed, half(2, 64, 64)) == {"dropout"}
    plain = launch.short_tile("short_backward", half(2, 64, 64), 64, frozenset())
    dropout = launch.short_tile("short_backward", half(2, 64, 64), 64, frozenset({"dropout"}))
    assert plain is not None
    assert dropout is not None


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(80, 80), (86, 86), (87, 86), (89, 86), (90, 90), (100, 90), (103, 90), (120, 86)],
)
def test_a_gpu_gets_the_data_whose_limits_it_keeps(capability: int, expected: int) -> None:
    assert _tiles.architecture(capability) == expected
