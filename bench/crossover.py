"""Find where PyTorch's attention is faster than ours, and print the rules that dispatch to it.

    python -m bench.crossover --sweep FILE   # on a GPU, about four minutes; writes JSON
    python -m bench.crossover FILE           # prints the GPU's sections of library.toml

The sweep times self-attention without mask, lengths and dropout, as a forward alone and with its
backward. It covers bfloat16, dense and varlen (sequences of one length, packed end to end), dense
bfloat16 again with 8 to 128 programs (batch x heads), and dense float32. Our kernel is compared
with PyTorch's ``scaled_dot_product_attention``, with the backend that it chooses, and with
``torch.nn.attention.varlen``.

The rules belong in ``leaner_kernels/ops/attention/library.toml``. For each kind of call and head
dimension they list the ranges of measured lengths in which PyTorch wins by more than the spread
between two runs. A range that includes the longest length has no end. Between a length at which
PyTorch wins and the next at which it loses, our kernel is called. Each measured number of programs
has a section of its own, which also covers smaller numbers down to the next section.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.attention.cases import AttentionCase
from bench.attention.gate import AttentionProblem
from bench.attention.peers import PEERS
from bench.harness import clock, command
from bench.harness.checked import one_call
from bench.harness.gate import Inputs
from bench.harness.peers import AbsentError
from leaner_kernels.ops import _tiles

SPREAD = 1.03  # two runs of one kernel differ by this much
DEVICE = "cuda"
HEADS, TOKENS_OF_A_BATCH = 16, 2**15
SHORT, LONG, OF_VARLEN = (32, 64, 128, 197), (512, 577, 768, 1024, 2048), (64, 128, 256, 512, 1024)
FEW_PROGRAMS = 8, 16, 64, 128
COMPILING = 10  # processes that fill Triton's cache beforehand
SECONDS = 0.05  # about how long a call is timed


class Shape(NamedTuple):
    """Self-attention.

    Attributes:
        kind: dense or varlen.
        head_dim: D.
        causal: row i sees columns 0 to i.
        tokens: N.
        programs: batch x heads; 0 means 16 heads and enough sequences for 32,768 tokens.
        float32: whether in float32, or in bfloat16.
    """

    kind: str
    head_dim: int
    causal: bool
    tokens: int
    programs: int = 0
    float32: bool = False

    @property
    def case(self) -> AttentionCase:
        """The shape as a case of the benchmarks."""
        heads = min(HEADS, self.programs or HEADS)
        batch = self.programs // heads or max(1, TOKENS_OF_A_BATCH // self.tokens)
        lengths = (self.tokens,) * batch if self.kind == "varlen" else ()
        dtype = torch.float32 if self.float32 else torch.bfloat16
        sizes = batch, heads, self.tokens, self.head_dim, dtype
        return AttentionCase("", DEVICE, *sizes, causal=self.causal, lengths=lengths)

    @property
    def inputs(self) -> Inputs:
        """Random tensors of it."""
        problem = AttentionProblem(self.case, torch.device(DEVICE), copies=1)
        return problem.inputs("varlen" if self.kind == "varlen" else "heads")[0]


def _shapes() -> Iterator[Shape]:
    """Yield every shape, unmeasured ones first, because the sweep may run out of time."""
    causal = False, True
    for dim, lengths in ((64, (64, 128, 197, 256, 512)), (32, (64, 128, 256, 512))):
        few = product(causal, lengths, FEW_PROGRAMS)
        yield from (Shape("dense", dim, *sizes) for sizes in few)
    for dim in (64, 32, 128):
        alike = product(causal, (64, 197, 512, 1024))
        yield from (Shape("dense", dim, *sizes, float32=True) for sizes in alike)
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


def _varlen_kernel(case: AttentionCase, device: torch.device) -> Callable[..., Tensor]:
    """Return the operator below ``attention_varlen``, which never calls a library."""
    starts, kernel = case.offsets(device), torch.ops.leaner_kernels.attention_varlen
    rest = starts, starts, None, case.tokens, case.tokens, 0.0, case.causal, case.scale, -1, -1
    return lambda q, k, v: kernel(q, k, v, *rest)[0]


# The functions to compare, and how to build them, by kind of shape.
SIDES = {
    "dense": {"ours": PEERS["leaner_kernel"].build, "library": PEERS["sdpa"].build},
    "varlen": {"ours": _varlen_kernel, "library": PEERS["torch_varlen"].build},
}


def run_once(shapes: Sequence[Shape]) -> None:
    """Compile our kernels of some shapes, to fill Triton's cache on the disk."""
    for shape in shapes:
        function = SIDES[shape.kind]["ours"](shape.case, torch.device(DEVICE))
        one_call("both", function)(shape.inputs)
    torch.cuda.synchronize()


def measure_shape(shape: Shape) -> dict[str, Any]:
    """Return the microseconds of a shape, None for a library that refuses it."""
    case, inputs = shape.case, shape.inputs
    row: dict[str, Any] = {**shape._asdict(), "batch": case.batch, "heads": case.heads}
    outs = []
    for name, build in SIDES[shape.kind].items():
        try:
            function = build(case, torch.device(DEVICE))
            outs.append(function(*inputs.leaves).detach().float())
            for direction in ("forward", "both"):
                call = one_call(direction, function)
                row[f"{name}_{direction}"] = 1e6 * clock.timed(call, [inputs], DEVICE, SECONDS)
        except (AbsentError, RuntimeError) as error:
            row[f"{name}_forward"] = row[f"{name}_both"] = None
            row[f"{name}_refuses"] = str(error).splitlines()[0][:120]
    if len(outs) == 2:
        row["difference"] = (outs[0] - outs[1]).abs().max().item()
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}


def sweep(path: Path, limit: float) -> None:
    """Write the rows of all shapes as they come, until ``limit`` seconds are over."""
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(COMPILING, context) as pool:
        list(pool.map(run_once, [SHAPES[i::COMPILING] for i in range(COMPILING)]))
    origin, rows = command.origin(), []
    for shape in SHAPES:
        if time.monotonic() - began > limit:
            sys.stdout.write(f"{len(SHAPES) - len(rows)} shapes not reached\n")
            break
        rows.append(measure_shape(shape))
        sys.stdout.write(f"{json.dumps(rows[-1])}\n")
        sys.stdout.flush()
        command.write(path, rows, **origin)


def read(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the capability of the GPU and the rows of a file.

    Raises:
        SystemExit: it cannot be read or is no sweep, in one line.
    """
    try:
        table = json.loads(path.read_text("utf-8"))
        capability = table["machine_info"]["gpu"]["compute_capability"]
        return int(capability.replace(".", "")), list(table["rows"])
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: not written by bench.crossover ({error!r})") from None


def ranges(times: dict[int, float]) -> list[list[int]]:
    """Return [first, last] of each range of lengths in which PyTorch wins; 0 means no end.

    Args:
        times: PyTorch's time over ours, by length.
    """
    lengths = sorted(times)
    runs = []
    for wins, run in groupby(lengths, key=lambda length: times[length] * SPREAD < 1):
        found = list(run)
        if wins:
            runs.append([found[0], 0 if found[-1] == lengths[-1] else found[-1]])
    return runs


def rules(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a rule for each kind of call and head dimension that was measured."""
    for kind, causal, direction in product(("dense", "varlen"), (False, True), ("forward", "both")):
        alike = [row for row in rows if (row["kind"], row["causal"]) == (kind, causal)]
        for dim in sorted({row["head_dim"] for row in alike}):
            times = {
                row["tokens"]: row[f"library_{direction}"] / row[f"ours_{direction}"]
                for row in alike
                if row["head_dim"] == dim
                and None not in (row[f"library_{direction}"], row[f"ours_{direction}"])
            }
            yield {
                "varlen": kind == "varlen",
                "causal": causal,
                "backward": direction == "both",
                "head_dim": dim,
                "tokens": ranges(times),
            }


def section(path: Path) -> str:
    """Return the rules of a sweep's GPU as ``library.toml`` has them, few programs first."""
    capability, rows = read(path)
    groups = {(row.get("float32", False), row.get("programs", 0)) for row in rows}
    sections, first = [], 1
    # Zero stands for many programs, which come last.
    for float32, programs in sorted(groups, key=lambda group: (group[0], group[1] or _tiles.ANY)):
        head = f"[[gpus]]\ncapabilities = [{capability}]\n"
        if programs:
            # From ENOUGH_PROGRAMS on, other kernels of ours run.
            largest = programs == max(count for _, count in groups)
            last = _tiles.ENOUGH_PROGRAMS - 1 if largest else programs
            head, first = f"{head}programs = [{first}, {last}]\n", last + 1
        head += "float32 = true\n" * float32
        lines = [f'{head}source = "bench/results/{path.name}"', "rules = ["]
        alike = (float32, programs)
        chosen = [r for r in rows if (r.get("float32", False), r.get("programs", 0)) == alike]
        for rule in rules(chosen):
            fields = ", ".join(f"{name} = {json.dumps(value)}" for name, value in rule.items())
            lines.append(f"  {{ {fields} }},")
        sections.append("\n".join([*lines, "]", ""]))
    return "\n".join(sections)


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep, or read a file and print the rules."""
    parser = command.parser("bench.crossover", __doc__)
    parser.add_argument("result", nargs="?", type=Path, help="JSON file of --sweep")
    parser.add_argument("--sweep", type=Path, metavar="FILE", help="time every shape, into FILE")
    parser.add_argument(
        "--seconds",
        type=float,
        default=300,
        help="with --sweep, start no new shape after this many seconds (300)",
    )
    options = parser.parse_args(arguments)
    if bool(options.result) == bool(options.sweep):
        parser.error("give either --sweep FILE or the file of a sweep")
    if options.sweep:
        command.need_pytorchs_attention("bench.crossover --sweep")
        command.need_gpu("bench.crossover --sweep")
        sweep(options.sweep, options.seconds)
    else:
        sys.stdout.write(section(options.result))


if __name__ == "__main__":
    main()
