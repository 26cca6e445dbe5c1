"""Time our attention and PyTorch's over sizes, to find where `attention` should call PyTorch's.

    python -m bench.crossover_sweep FILE    # on a GPU, about two minutes; writes JSON

Self-attention in bfloat16 without mask, lengths and dropout, dense and varlen (sequences of one
length, end to end), forward alone and with its backward: our kernel beside what everybody has,
``scaled_dot_product_attention`` with the backend that it chooses and ``torch.nn.attention.varlen``.
``python -m bench.crossover`` makes rules of it.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import leaner_kernels  # noqa: F401  (registers the operators)
from bench.harness import clock, machine

DEVICE = "cuda"
HEADS, TOKENS_OF_A_BATCH = 16, 2**15
SHORT, LONG, OF_VARLEN = (32, 64, 128, 197), (512, 577, 768, 1024, 2048), (64, 128, 256, 512, 1024)
COMPILING = 10  # processes that fill Triton's cache beforehand
REPLAYS, SECONDS = 7, 0.002


class Shape(NamedTuple):
    """Self-attention of 16 heads over as many sequences as make 32,768 tokens."""

    kind: str  # dense or varlen
    head_dim: int
    causal: bool
    tokens: int

    @property
    def batch(self) -> int:
        """How many sequences."""
        return max(1, TOKENS_OF_A_BATCH // self.tokens)


def _shapes() -> Iterator[Shape]:
    """Yield every shape, the most telling first: a run on borrowed time may end anywhere."""
    causal = False, True
    for dim, lengths in (
        (64, (197, 224, 256, 320, 384, *LONG)),
        (32, (256, 384, *LONG)),
        (48, (197, 256, 384, *LONG)),
        (128, (*SHORT, 256, 384, *LONG)),
        (80, (*SHORT, 256, 384, *LONG)),
        (96, (*SHORT, 256, 384, *LONG)),
        (16, (512, 1024, 2048)),
    ):
        yield from (Shape("dense", dim, *sizes) for sizes in product(causal, lengths))
        if dim in (32, 64, 128):
            yield from (Shape("varlen", dim, *sizes) for sizes in product(causal, OF_VARLEN))


SHAPES = tuple(_shapes())


def calls(shape: Shape) -> tuple[dict[str, Callable[..., Tensor]], list[Tensor]]:
    """Return what is compared, by name, and its tensors: q, k, v and the output's gradient."""
    _, dim, causal, tokens = shape
    options: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    if shape.kind == "dense":
        size = shape.batch, HEADS, tokens, dim
        tensors = [torch.randn(size, **options) for _ in range(4)]
        params = None, 0.0, causal, dim**-0.5, 0.0, -1, -1
        kernel = torch.ops.leaner_kernels.attention
        return {
            "ours": lambda q, k, v: kernel(q, k, v, None, None, *params)[0],
            "library": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal),
        }, tensors
    from torch.nn.attention.varlen import varlen_attn

    size = shape.batch * tokens, HEADS, dim
    tensors = [torch.randn(size, **options) for _ in range(4)]
    starts = torch.arange(shape.batch + 1, device=DEVICE, dtype=torch.int32) * tokens
    starts, longest = (starts, starts), (tokens, tokens)
    window = (-1, 0) if causal else (-1, -1)
    kernel = torch.ops.leaner_kernels.attention_varlen
    params = None, *longest, 0.0, causal, dim**-0.5, -1, -1
    return {
        "ours": lambda q, k, v: kernel(q, k, v, *starts, *params)[0],
        "library": lambda q, k, v: varlen_attn(q, k, v, *starts, *longest, window_size=window),
    }, tensors


def run_once(shapes: Sequence[Shape]) -> None:
    """Compile our kernels of some shapes, which leaves them in Triton's cache on the disk."""
    for shape in shapes:
        functions, (*leaves, grad) = calls(shape)
        leaves = [t.requires_grad_() for t in leaves]
        torch.autograd.grad(functions["ours"](*leaves), leaves, grad)
    torch.cuda.synchronize()


def seconds(call: Callable[[], Any]) -> float:
    """Return the median seconds of a call, of CUDA graphs that replay it."""
    timer = clock.Clock(DEVICE)
    torch.cuda.synchronize()  # the inputs were made on another stream
    with torch.cuda.stream(clock.capture_stream()):
        once = clock.seconds(call, timer, rounds=1)
        timer.calls = max(1, min(50, round(SECONDS / once)))
        run = clock.graph_round(lambda _: call(), [None], timer.calls)
        return clock.seconds(run, timer, REPLAYS)


def gradients(forward: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> Any:
    """Run forward and backward."""
    return torch.autograd.grad(forward(), leaves, grad)


def measure_shape(shape: Shape) -> dict[str, Any]:
    """Return the microseconds of a shape; a library that refuses it has None."""
    functions, (*leaves, grad) = calls(shape)
    leaves = [t.requires_grad_() for t in leaves]
    row: dict[str, Any] = {**shape._asdict(), "batch": shape.batch, "heads": HEADS}
    outs = {}
    for name, function in functions.items():
        try:
            outs[name] = function(*leaves).detach()
            forward = partial(function, *leaves)
            row[f"{name}_forward"] = 1e6 * seconds(forward)
            row[f"{name}_both"] = 1e6 * seconds(partial(gradients, forward, leaves, grad))
        except RuntimeError as error:
            row[f"{name}_forward"] = row[f"{name}_both"] = None
            row[f"{name}_refuses"] = str(error).splitlines()[0][:120]
    if len(outs) == 2:
        row["difference"] = (outs["ours"].float() - outs["library"].float()).abs().max().item()
    return row


def measure(shapes: Sequence[Shape], path: Path, limit: float) -> None:
    """Write the rows of the shapes as they come, until ``limit`` seconds are over."""
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(COMPILING, context) as pool:
        list(pool.map(run_once, [shapes[i::COMPILING] for i in range(COMPILING)]))
    rows: list[dict[str, Any]] = []
    table = {
        "machine_info": machine.facts(),
        "commit_info": machine.commit(),
        "datetime": datetime.now(UTC).isoformat(),
        "rows": rows,
    }
    for shape in shapes:
        if time.monotonic() - began > limit:
            sys.stdout.write(f"{len(shapes) - len(rows)} shapes not reached\n")
            break
        rows.append({k: _rounded(v) for k, v in measure_shape(shape).items()})
        sys.stdout.write(f"{json.dumps(rows[-1])}\n")
        sys.stdout.flush()
        write(table, path)


def write(table: dict[str, Any], path: Path) -> None:
    """Write the table as JSON, a line for each row."""
    head = json.dumps({name: value for name, value in table.items() if name != "rows"})
    rows = ",\n".join(map(json.dumps, table["rows"]))
    path.write_text(f'{head[:-1]}, "rows": [\n{rows}\n]}}\n', "utf-8")


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.crossover_sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="JSON file to write")
    parser.add_argument(
        "--seconds",
        type=float,
        default=150,
        help="start no new shape after this many seconds (150)",
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("bench.crossover_sweep needs a CUDA GPU, but torch finds none")
    measure(SHAPES, options.file, options.seconds)


if __name__ == "__main__":
    main()
