"""The tables of which kernel runs a shape: well formed, read as they are meant, and all needed."""

import re
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch

from leaner_kernels.ops import _gluon, _tiles
from leaner_kernels.ops._tiles import Rule, Tile, Tiles, rule
from leaner_kernels.ops.attention import dispatch
from leaner_kernels.ops.attention.call import Call, Sequences
from leaner_kernels.ops.attention.dispatch import features, online_tile
from leaner_kernels.ops.attention.kernels import online_backward
from tests.tile_tables import PACKAGE, TABLES

FEATURES = {"mask", "dropout", "shared", "padded_dim", "unaligned"}
in_gluon = pytest.mark.skipif(not _gluon.AVAILABLE, reason="this Triton has no Gluon")


every_table = pytest.mark.parametrize("name", TABLES)


@pytest.fixture(params=_tiles.ARCHITECTURES)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(_tiles, "capability", lambda _: request.param)
    return request.param


def half(heads: int, tokens: int, dim: int) -> torch.Tensor:
    return torch.empty(1, heads, tokens, dim, dtype=torch.bfloat16, device="meta")


def scaled_by(scale: float) -> frozenset[str]:
    return features(None, None, half(1, 16, 16), scale=scale)


@every_table
def test_every_rule_is_a_tile(name: str) -> None:
    _, tiles = TABLES[name]
    names = [row.tile.constexprs.keys() - {"PAIRED", "IN_REGISTERS"} for row in tiles.rules]
    assert all(constants == names[0] for constants in names)
    for row in tiles.rules:
        assert row.size in (2, 4)
        assert row.dim in (16, 32, 64, 128, _tiles.ANY)
        assert row.gpus is None or set(row.gpus) <= set(_tiles.ARCHITECTURES)
        options = row.tile.options
        assert options["num_warps"] in (1, 2, 4, 8, 16)
        # Gluon has no stages.
        of_gluon = name.startswith(("hopper", "ampere", "warp_multihead"))
        assert ("num_stages" in options) == (not of_gluon)
        assert all(type(number) is int for number in options.values())


@every_table
def test_every_rule_changes_what_some_call_gets(name: str) -> None:
    """A rule that can go while every call keeps its tile is stale."""
    _, tiles = TABLES[name]
    needed = set()
    for kind in kinds_of_call(tiles):
        taking = [row for row in tiles.rules if row.fits(*kind)]
        if len(taking) == 1 or (taking and given(name, taking[0]) != given(name, taking[1])):
            needed.add(id(taking[0]))
    assert [row for row in tiles.rules if id(row) not in needed] == []


def kinds_of_call(tiles: Tiles) -> Iterator[tuple[Any, ...]]:
    """Yield a call on each side of every threshold of a table."""
    limits = {limit for row in tiles.rules for limit in (row.tokens, row.tokens + 1)}
    names = sorted(frozenset[str]().union(*(row.takes for row in tiles.rules)))
    wanted = [frozenset(some) for n in range(len(names) + 1) for some in combinations(names, n)]
    yield from product((None, *_tiles.ARCHITECTURES), (2, 4), (16, 32, 64, 128), limits, wanted)


def given(name: str, row: Rule) -> tuple[Tile, int | None]:
    """Return a rule's tile, and the most tokens where a kernel's segments are cut for them."""
    return row.tile, row.tokens if name.startswith("short") else None


@pytest.mark.parametrize(("softmax", "most"), [(True, 150), (False, 60)])
def test_the_tables_fit_in_a_head(softmax: bool, most: int) -> None:
    written = sum(
        len(re.findall(r"^ +rule\(", path.read_text("utf-8"), re.MULTILINE))
        for path in PACKAGE.glob("*/**/*.py")
        if ("attention" in path.parts) == softmax
    )
    assert 0 < written <= most


def test_a_call_that_no_rule_takes_is_named() -> None:
    _, tiles = TABLES["covariance_forward"]
    with pytest.raises(LookupError, match=r"covariance_forward a tile for .*'dim': 256"):
        tiles.tile(torch.device("meta"), size=2, dim=256)


def test_the_first_rule_that_takes_a_call_gives_its_tile() -> None:
    tiles = Tiles(
        "some",
        rule(dim=32, tokens=64, gpus=(80,), BLOCK=1),
        rule(dim=32, tokens=64, takes=("mask",), BLOCK=2),
        rule(dim=64, size=4, BLOCK=3),
        num_warps=4,
    )

    def chosen(**call: Any) -> int | None:
        call = {"size": 2, "dim": 32, "tokens": 64} | call
        row = tiles.find(torch.device("meta"), **call)
        return None if row is None else row.tile["BLOCK"]

    assert chosen() == 2, "on the meta device as on Hopper"
    with _tiles.assume(80):
        assert chosen() == 1
        assert chosen(dim=16, tokens=1) == 1
        assert chosen(features=frozenset({"mask"})) == 2
        assert chosen(features=frozenset({"dropout"})) is None
        assert chosen(tokens=65) == chosen(dim=64) == chosen(size=4) == 3
        assert chosen(dim=128) is None
    assert all(row.tile.options == {"num_warps": 4} for row in tiles.rules)


def test_a_tile_is_constants_and_options() -> None:
    tile = Tile.of(BLOCK_M=64, BLOCK_N=32, num_warps=4, maxnreg=255)
    assert tile.constexprs == {"BLOCK_M": 64, "BLOCK_N": 32}
    assert tile.options == {"num_warps": 4, "maxnreg": 255}
    assert tile["BLOCK_N"] == 32
    assert tile.at_most(BLOCK_M=16, BLOCK_N=64) == tile.replace(BLOCK_M=16)
    assert Tile.of(**tile.arguments) == tile


def test_the_shapes_of_the_models_run_on_kernels_that_own_heads(gpu: int) -> None:
    nothing = frozenset[str]()
    bert, gpt, tnt = half(24, 128, 32), half(16, 64, 32), half(4, 16, 10)
    odd = features(None, None, tnt)
    assert odd == {"padded_dim", "unaligned"}
    for kernel in ("short_forward", "short_forward_statistics", "short_backward"):
        assert dispatch.short_tile(kernel, tnt, tnt, odd)
        assert dispatch.short_tile(kernel, gpt, gpt, nothing)
    # Those in Gluon come first, but on Ampere have no head dimension that does not fill its tile.
    for query in (bert, half(12, 197, 48)):
        tile = dispatch.short_tile("short_forward", query, query, features(None, None, query))
        assert (tile is None) == (gpu == 90)


def chosen(gpu: int, query: torch.Tensor, key: torch.Tensor | None = None, **rest: Any) -> str:
    """Return the kernel of the backward on a GPU."""
    key = query if key is None else key
    call = Call(query, key, key, None, None, None, 0.0, False, 0.1)._replace(**rest)
    like = torch.empty_like(query)
    with _tiles.assume(gpu):
        return dispatch.choose_backward(call, like, like, like, key, key).kernel


def forward_of(gpu: int, query: torch.Tensor, with_stats: bool = False, **rest: Any) -> str:
    call = Call(query, query, query, None, None, None, 0.0, False, 0.1)._replace(**rest)
    with _tiles.assume(gpu):
        return dispatch.choose_forward(call, with_stats).kernel


@in_gluon
def test_wgmma_runs_on_hopper_alone_and_mma_on_later_gpus_too() -> None:
    vit = half(16, 197, 64)
    kernels = {gpu: chosen(gpu, vit) for gpu in (75, 80, 86, 87, 89, 90, 100, 103, 120)}
    assert kernels.pop(90) == "hopper_resident_backward"
    assert kernels.pop(75) == "online_backward"
    assert set(kernels.values()) == {"ampere_backward"}


@in_gluon
def test_programs_that_own_a_head_take_enough_heads_of_as_many_rows_as_keys() -> None:
    vit = half(16, 197, 64)
    assert chosen(90, half(16, 64, 64)) == "short_backward"
    assert {chosen(gpu, half(16, 1, 64), vit) for gpu in (80, 90)} == {"online_backward"}
    assert chosen(90, vit, scale=-0.1) == "online_backward"
    long = half(16, 512, 32)
    assert chosen(90, long) == "online_backward", "too few programs"
    assert chosen(90, long.expand(20, -1, -1, -1)) == "hopper_backward"
    assert forward_of(90, vit) == "online_forward", "too few programs"
    assert forward_of(90, vit.expand(20, -1, -1, -1)) == "hopper_forward"


@in_gluon
def test_programs_own_a_head_of_a_varlen_sequence_on_hopper() -> None:
    starts = torch.empty(4, dtype=torch.int32, device="meta")
    tokens = torch.empty(500, 4, 64, dtype=torch.bfloat16, device="meta")

    def varlen(
        longest: int = 256, cols: int | None = None, gpu: int = 90, q: Any = tokens, **rest: Any
    ) -> str:
        sequences = Sequences(starts, starts, longest, longest if cols is None else cols)
        return chosen(gpu, q, sequences=sequences, **rest)

    assert varlen() == varlen(65) == varlen(is_causal=True) == "hopper_backward"
    assert varlen(257) == "online_backward", "too few programs"
    assert varlen(64) == varlen(cols=100) == varlen(gpu=80) == "online_backward"
    assert varlen(window=(9, 9)) == varlen(q=tokens.float()) == "online_backward"
    assert varlen(q=tokens[..., :60]) == "online_backward"
    shared, sequences = tokens[:, :2], Sequences(starts, starts, 256, 256)
    assert chosen(90, tokens, shared, sequences=sequences) == "online_backward"


@in_gluon
def test_statistics_of_long_sequences_have_a_kernel_on_hopper() -> None:
    long = half(16, 577, 64).expand(20, -1, -1, -1)
    assert forward_of(90, long, True) == "hopper_long_forward_statistics"
    assert forward_of(90, long) == "online_forward", "PyTorch's is faster"
    assert forward_of(80, long, True) == "ampere_forward_statistics"
    assert forward_of(90, long[:2], True) == "online_forward", "too few programs"
    wide = half(16, 577, 128).expand(20, -1, -1, -1)
    assert forward_of(90, wide, True) == forward_of(90, long, True, scale=-1.0) == "online_forward"
    short = half(16, 384, 64).expand(20, -1, -1, -1)
    assert forward_of(90, short, True) == "hopper_forward_statistics"


@in_gluon
def test_warps_own_short_heads_where_rows_are_as_many_as_keys() -> None:
    tnt = half(4, 16, 10)
    kernels = {gpu: chosen(gpu, tnt) for gpu in (75, 80, 86, 89, 90, 100, 120)}
    assert kernels.pop(75) == "online_backward"
    assert set(kernels.values()) == {"warp_multihead_backward"}
    assert chosen(90, tnt, half(4, 15, 10)) == "short_backward"
    assert chosen(90, half(4, 17, 10)) == "short_backward"
    assert chosen(90, half(4, 16, 9)) == "short_backward"
    assert chosen(90, tnt, scale=-0.1) == "online_backward"


def test_long_rows_have_tiles_by_gpu_and_by_what_a_call_brings(gpu: int) -> None:
    def tuned(q: torch.Tensor, **rest: object) -> bool:
        """Whether the rule is one of some GPUs."""
        call = Call(q, q, q, None, None, None, 0.0, True, 0.1)._replace(**rest)
        tile = online_tile("online_backward", call)
        return any(tile is row.tile for row in online_backward.TILES.rules if row.gpus)

    long = half(4, 1024, 32)
    assert tuned(long)
    call = Call(long, long, long, None, None, None, 0.0, True, 0.1)
    assert online_tile("online_backward", call)["BLOCK_N"] == 64
    assert tuned(half(4, 1024, 64)) == (gpu != 86)
    assert tuned(half(4, 1024, 80)) == (gpu != 90)
    assert not tuned(long, seed=torch.zeros(1), dropout_p=0.1)
    mask = torch.ones(1024, 1024, dtype=torch.bool)
    assert not tuned(long, attn_mask=mask, is_causal=False)
    assert not tuned(long, scale=-0.1)
    assert not tuned(long, softcap=30.0)
    assert not tuned(torch.empty(1, 4, 1024, 32, device="meta"))  # float32


def test_a_stride_that_hides_where_rows_start_is_unaligned(gpu: int) -> None:
    apart = torch.empty(1, 2, 64, 65, dtype=torch.bfloat16, device="meta")[..., :64]
    assert features(None, None, half(2, 64, 64)) == frozenset()
    assert features(None, None, half(2, 64, 64), apart) == {"unaligned"}


@pytest.mark.parametrize("scale", [0.0, -0.125, 1e-40])
def test_a_maximum_before_scaling_needs_a_positive_scale(gpu: int, scale: float) -> None:
    query = half(4, 64, 64)
    wanted = scaled_by(scale)
    assert wanted == {"scale"}
    assert dispatch.short_tile("short_forward", query, query, wanted) is None
    assert dispatch.short_tile("short_forward", query, query, scaled_by(1e-20))


def test_what_no_rule_takes_is_left_to_the_kernels_for_any_length(gpu: int) -> None:
    single = torch.empty(1, 2, 64, 64, device="meta")
    assert dispatch.short_tile("short_forward", single, single, frozenset()) is None
    assert (
        dispatch.short_tile("short_forward", half(2, 1024, 64), half(2, 1024, 64), frozenset())
        is None
    )
    everything = frozenset(FEATURES)
    assert (
        dispatch.short_tile("short_forward", half(2, 197, 42), half(2, 197, 42), everything) is None
    )


def test_a_feature_asks_for_the_rule_that_names_it(gpu: int) -> None:
    mask, seed = torch.empty(1), torch.empty(1)
    query = half(2, 64, 48)
    assert features(mask, None, query) == {"mask", "padded_dim"}
    assert features(None, seed, half(2, 64, 64)) == {"dropout"}
    plain = dispatch.short_tile("short_backward", half(2, 64, 64), half(2, 64, 64), frozenset())
    dropout = dispatch.short_tile(
        "short_backward", half(2, 64, 64), half(2, 64, 64), frozenset({"dropout"})
    )
    assert plain is not None
    assert dropout is not None


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(75, None), (80, 80), (86, 86), (89, 86), (90, 90), (100, 80), (103, 80), (120, 86)],
)
def test_a_gpu_gets_the_rules_whose_limits_it_keeps(capability: int, expected: int | None) -> None:
    assert _tiles.architecture(capability) == expected
