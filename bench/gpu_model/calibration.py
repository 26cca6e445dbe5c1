"""The timing model against times that others have published.

    python -m bench.gpu_model.calibration [OUT.json]

What is timed: FlashAttention 2 out of PyTorch's wheel (``peers``), and kernels as in Triton's
tutorials: a flash forward pass, a matrix product, a softmax, and a copy. ``published.toml`` holds
the published rates and where they stand. Of a kernel that was autotuned the fastest tile counts.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bench.attention.cases import AttentionCase
from bench.gpu_model import machine_code, peers, replay, units
from bench.gpu_model.compile_ahead import compile_launch
from bench.gpu_model.execute import executing

PUBLISHED = Path(__file__).parent / "published.toml"
LINE = "{kernel}, {gpu}, {size}: {predicted} {unit}, {published} published, {error:+.0%}\n"
TENSOR_PASSES = {"forward": 1.0, "backward": 2.5}  # products of a pass, of the forward's two


@triton.jit
def _flash_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale, N,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    start, head = tl.program_id(0) * BLOCK_M, tl.program_id(1)
    rows, cols, dims = start + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    base = head.to(tl.int64) * N * D
    tile = rows[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + base + tile)  # (BLOCK_M, D)
    k_ptrs = k_ptr + base + dims[:, None] + cols[None, :] * D
    v_ptrs = v_ptr + base + cols[:, None] * D + dims[None, :]
    out = tl.zeros([BLOCK_M, D], tl.float32)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for _ in range(0, N, BLOCK_N):
        scores = tl.dot(q, tl.load(k_ptrs))  # (BLOCK_M, BLOCK_N)
        larger = tl.maximum(largest, tl.max(scores, 1) * scale)
        p = tl.math.exp2(scores * scale - larger[:, None])
        shrink = tl.math.exp2(largest - larger)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(q.dtype), tl.load(v_ptrs), out * shrink[:, None])
        largest = larger
        k_ptrs += BLOCK_N * D
        v_ptrs += BLOCK_N * D
    tl.store(out_ptr + base + tile, (out / total[:, None]).to(q.dtype))
    tl.store(lse_ptr + head * N + rows, largest + tl.math.log2(total))


@triton.jit
def _matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Past the end the first ones again: nothing to mask in the loop.
    a_ptrs = a_ptr + (rows % M)[:, None] * K + depth[None, :]
    b_ptrs = b_ptr + depth[:, None] * N + (cols % N)[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, K, BLOCK_K):
        sums = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), sums)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * N
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], sums.to(tl.float16), mask=inside)


@triton.jit
def _rows_kernel(x_ptr, out_ptr, COLS: tl.constexpr, SOFTMAX: tl.constexpr):
    places = tl.program_id(0) * COLS + tl.arange(0, COLS)
    x = tl.load(x_ptr + places)
    if SOFTMAX:
        x = tl.exp(x - tl.max(x, 0))
        x /= tl.sum(x, 0)
    tl.store(out_ptr + places, x)


class Tutorial(NamedTuple):
    """A launch of one of the kernels above: a part is executed, ``times`` as much is timed."""

    launch: Callable[[], None]
    times: float
    memory_bytes: float


def flash(point: dict[str, Any], tile: dict[str, int]) -> Tutorial:
    """Return a flash forward pass; one head is executed, of it one tile of rows."""
    tokens, dim, heads = point["tokens"], point["head_dim"], point["heads"]
    q, k, v = torch.randn(3, tokens, dim).half()
    out, lse = torch.empty_like(q), torch.empty(tokens)
    options = {"BLOCK_M": tile["BLOCK_M"], "BLOCK_N": tile["BLOCK_N"], "D": dim}
    rest = {name: n for name, n in tile.items() if name not in options}

    launch = partial(_flash_fwd_kernel[1, 1], q, k, v, out, lse, 0.18, tokens, **options, **rest)
    moved = heads * tokens * (4 * 2 * dim + 4)
    return Tutorial(launch, heads * tokens / tile["BLOCK_M"], moved)


def matmul(point: dict[str, Any], tile: dict[str, int]) -> Tutorial:
    """Return a product of square matrices, of which one tile is executed."""
    size = point["size"]
    a, b = torch.randn(2, size, size).half()
    c = torch.empty_like(a)

    launch = partial(_matmul_kernel[1, 1], a, b, c, size, size, size, **tile)
    tiles = -(-size // tile["BLOCK_M"]) * -(-size // tile["BLOCK_N"])
    return Tutorial(launch, tiles, 3 * 2 * size * size)


def over_rows(point: dict[str, Any], tile: dict[str, int]) -> Tutorial:
    """Return a copy or a softmax of the rows of a float32 matrix, of which one is executed."""
    rows, cols = point["rows"], point["columns"]
    x = torch.randn(1, cols)
    softmax = point["kernel"] == "softmax"
    launch = partial(_rows_kernel[1,], x, torch.empty_like(x), COLS=cols, SOFTMAX=softmax, **tile)
    return Tutorial(launch, rows, 2 * 4 * rows * cols)


TUTORIALS = {"flash": flash, "matmul": matmul, "softmax": over_rows, "copy": over_rows}


def work_of(tutorial: Tutorial, capability: int) -> replay.Work:
    """Return a tutorial's launch for the model: all its programs do the same."""
    with executing(capability, count=True, check=False) as executions:
        tutorial.launch()
    (execution,) = executions
    used = compile_launch(execution.launch, capability)  # type: ignore[arg-type]
    code, runs = machine_code.of_execution(execution, used.cubin)
    assert runs.known, execution.name
    work = replay.work_of(execution, used, code, runs, tutorial.times)
    return work._replace(memory_bytes=tutorial.memory_bytes)


def seconds(point: dict[str, Any]) -> float:
    """Predict the time of a published row."""
    gpu = units.GPUS.get(point["gpu"]) or units.OTHER_GPUS[point["gpu"]]
    if point["kernel"] in TUTORIALS:
        tutorial = TUTORIALS[point["kernel"]]
        works = [work_of(tutorial(point, tile), gpu.capability) for tile in point["tiles"]]
        return min(replay.time(work, gpu).seconds for work in works)
    case = AttentionCase(
        *("published", "cuda", point["heads"] // 32, 32, point["tokens"], point["head_dim"]),
        dtype=torch.bfloat16,
        causal=point["causal"],
    )
    return getattr(peers, point["kernel"])(case, gpu).seconds


def rate(point: dict[str, Any], seconds: float) -> float:
    """Return what is published of a row, if it takes so long: TFLOP/s, or GB/s of rows."""
    if point["kernel"] in ("softmax", "copy"):
        return 2 * 4 * point["rows"] * point["columns"] / seconds / 1e9
    if point["kernel"] == "matmul":
        return 2 * point["size"] ** 3 / seconds / 1e12
    flops = 4 * point["heads"] * point["tokens"] ** 2 * point["head_dim"]
    passes = TENSOR_PASSES.get(point["kernel"], 1.0)
    return flops * passes * (0.5 if point["causal"] else 1.0) / seconds / 1e12


def points() -> Iterator[dict[str, Any]]:
    """Yield the published rows, one for each size of a series."""
    for series in tomllib.loads(PUBLISHED.read_text("utf-8"))["series"]:
        base = {name: value for name, value in series.items() if name != "rates"}
        for size, published in series["rates"].items():
            point = base | {series["over"]: int(size), "published": published}
            if "elements" in series:
                point["heads"] = series["elements"] // int(size)
            yield point


def rows() -> Iterator[dict[str, Any]]:
    """Yield what is published and what the model predicts."""
    for point in points():
        try:
            predicted = rate(point, seconds(point))
        except peers.NotThereError as error:
            sys.stderr.write(f"{point['name']}, {point['gpu']}: {error}\n")
            continue
        yield {
            "kernel": point["name"],
            "gpu": point["gpu"],
            "size": point[point["over"]],
            "unit": "GB/s" if "columns" in point else "TFLOP/s",
            "published": point["published"],
            "predicted": round(predicted, 1),
            "error": round(predicted / point["published"] - 1, 3),
            "source": point["source"],
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each published row; write them on request."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_model.calibration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("output", nargs="?", type=Path)
    given = parser.parse_args(argv)
    found = []
    for row in rows():
        found.append(row)
        sys.stdout.write(LINE.format(**row))
        sys.stdout.flush()
    if given.output:
        lines = ",\n".join(map(json.dumps, found))
        versions = json.dumps({name: version(name) for name in ("triton", "torch")})
        text = f'{{"versions": {versions},\n"rows": [\n{lines}\n]}}\n'
        given.output.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
