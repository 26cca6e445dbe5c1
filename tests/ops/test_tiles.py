"""The tables of which kernel runs a shape: well formed, read as they are meant, and all needed."""

import re
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch

from leaner_kernels.ops import _gluon, _tiles, gpus
from leaner_kernels.ops._tiles import Rule, Tile, Tiles, rule
from leaner_kernels.ops.attention import dispatch
from leaner_kernels.ops.attention.call import Call
from tests.tile_tables import PACKAGE, TABLES

in_gluon = pytest.mark.skipif(not _gluon.AVAILABLE, reason="this Triton has no Gluon")


every_table = pytest.mark.parametrize("name", TABLES)


@pytest.fixture(params=gpus.TUNED_GPUS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(_tiles, "capability", lambda _: request.param)
    return request.param


def half(heads: int, tokens: int, dim: int) -> torch.Tensor:
    return torch.empty(1, heads, tokens, dim, dtype=torch.bfloat16, device="meta")


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
    yield from product((None, *gpus.TUNED_GPUS), (2, 4), (16, 32, 64, 128), limits, wanted)


def given(name: str, row: Rule) -> tuple[Tile, int | None]:
    """Return a rule's tile, and the most tokens where a kernel's segments are cut for them."""
    return row.tile, row.tokens if name.startswith("short") else None


@pytest.mark.parametrize(("softmax", "most"), [(True, 152), (False, 60)])
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


def chosen(gpu: int, query: torch.Tensor, key: torch.Tensor | None = None, **rest: Any) -> str:
    """Return the kernel of the backward on a GPU."""
    key = query if key is None else key
    call = Call(query, key, key, None, None, None, 0.0, False, 0.1)._replace(**rest)
    like = torch.empty_like(query)
    with _tiles.assume(gpu):
        return dispatch.choose_backward(call, like, like, (like, key, key)).kernel


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


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        (70, None),
        (75, None),
        (80, 80),
        (86, 86),
        (89, 86),
        (90, 90),
        (100, 80),
        (103, 80),
        (120, 86),
    ],
)
def test_a_gpu_gets_the_rules_whose_limits_it_keeps(capability: int, expected: int | None) -> None:
    assert _tiles.gpu_of(capability).tiles == expected
