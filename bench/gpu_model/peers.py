"""FlashAttention 2 as PyTorch's wheel holds it, timed by the same model as the kernels here.

``libtorch_cuda.so`` has its machine code for each GPU. There is no PTX to execute beside it, but
how often its loops run follows from the shape: the tiles stand in the kernels' names, each product
of tiles is so many HMMA, each tile that is fetched so many LDGSTS.

Source of the tiles and of when each is chosen: PyTorch's
``aten/src/ATen/native/transformers/cuda/flash_attn``, ``flash_fwd_launch_template.h`` and
``flash_bwd_launch_template.h``.
"""

import functools
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import networkx as nx
import torch

from bench.attention.cases import AttentionCase
from bench.gpu_model import compile_ahead, library, machine_code, replay, units
from bench.gpu_model.compile_ahead import WARP
from bench.gpu_model.machine_code import MachineCode

REGISTERS = re.compile(r"Function (\S+):\s+REG:(\d+)")
NAMES = re.compile(rb"\.text\.(_ZN13pytorch_flash\w+)")
BFLOAT16 = "EN7cutlass10bfloat16_tE"
HMMA = 16 * 8 * 16  # multiplications of a warp's product
COPY = 16  # bytes of a lane
LSE_STORES = 4  # rows of a lane


class NotThereError(RuntimeError):
    """PyTorch holds no such kernel for the GPU."""


class Kernel(NamedTuple):
    """One of PyTorch's: a name to find it by, and the shared memory that its launch requests."""

    pattern: str
    warps: int
    shared: int


class Peer(NamedTuple):
    """Predicted: the launch that computes, and those that only move bytes to and from memory."""

    timing: replay.Timing
    bytes_seconds: float
    programs_per_sm: int

    @property
    def seconds(self) -> float:
        """Of all of it."""
        return self.bytes_seconds + self.timing.seconds


def forward(case: AttentionCase, gpu: units.GPU) -> Peer:
    """Predict a forward pass.

    Raises:
        NotThereError: PyTorch has no machine code of it.
    """
    rows = cols = 128
    flags = _flags(case, rows, cols)
    tile = f"Li{case.head_dim}ELi{rows}ELi{cols}ELi4ELb0ELb0{BFLOAT16}"
    shared = 2 * case.head_dim * (rows + 2 * cols)
    kernel = Kernel(
        rf"flash_fwd_kernelI\d+Flash_fwd_kernel_traitsI{tile}.*EE{flags}Lb0E", 4, shared
    )
    row_tiles, col_tiles = -(-case.rows // rows), -(-case.tokens // cols)
    each = 2 * rows * cols * case.head_dim // HMMA // kernel.warps
    fetch = 2 * cols * case.head_dim // (COPY * WARP * kernel.warps)
    fill = case.tokens / (cols * col_tiles)
    trips = [min(n + 1, col_tiles) if case.causal else col_tiles for n in range(row_tiles)]
    stores = 2 * rows * case.head_dim // (COPY * WARP * kernel.warps) + LSE_STORES
    known = [{"HMMA": each * n, "LDGSTS": fetch * (1 + 2 * n), "STG": stores} for n in trips]
    return _time(case, gpu, kernel, known, case.bytes("forward"), fill, 0.0)


def backward(case: AttentionCase, gpu: units.GPU) -> Peer:
    """Predict a backward pass: of its three launches two move bytes, which are all that counts.

    The first reads dO and O and clears dQ in float32, the last turns that into dQ.

    Raises:
        NotThereError: PyTorch has no machine code of it.
    """
    dim, cols = case.head_dim, 128
    large = compile_ahead.GPUS[gpu.capability].shared_per_program >= 144 * 1024
    rows = 64 if dim == 64 and not large else 128
    values_stay = dim == 32 or not large
    warps_of = {(64, 128): "Li4ELi4ELi4E", (64, 64): "Li2ELi4ELi4E", (32, 128): "Li4ELi4ELi4E"}
    if (dim, rows) not in warps_of:
        raise NotThereError(f"no backward of head dimension {dim} is known")
    flags = _flags(case, rows, cols)
    tile = f"Li{dim}ELi{rows}ELi{cols}ELi8E{warps_of[dim, rows]}Lb{int(values_stay)}ELb0{BFLOAT16}"
    keys, scores = 2 * 2 * cols * dim, 2 * rows * cols
    rest = scores + max(scores, 2 * rows * dim)
    kept = max(keys, keys // 2 + rest) if values_stay else keys + rest
    kernel = Kernel(
        rf"flash_bwd_dq_dk_dv_loop_seqk_parallel_kernelI\d+Flash_bwd_kernel_traitsI{tile}.*EE{flags}",
        8,
        3 * 2 * rows * dim + kept,
    )
    row_tiles, col_tiles = -(-case.rows // rows), -(-case.tokens // cols)
    lanes = WARP * kernel.warps
    each = 5 * rows * cols * dim // HMMA // kernel.warps
    fetch, first = (2 * n * dim // (COPY * lanes) for n in (rows, cols))
    known = []
    for n in range(col_tiles):
        trips = row_tiles - (n * cols // rows if case.causal else 0)
        adds = rows * dim // lanes * trips
        known.append(
            {
                "HMMA": each * trips,
                "LDGSTS": 2 * first + 2 * fetch * trips,
                "RED": adds,
                "STG": 2 * first,
            }
        )
    element = case.batch * case.heads * dim
    padded = element * 128 * -(-case.tokens // 128)
    read, accumulated = 2 * element * case.tokens, 4 * padded
    # dO, O and the sums; the sums, and dQ.
    others = 2 * read + 2 * accumulated + read
    fill = case.tokens / (cols * col_tiles)
    return _time(case, gpu, kernel, known, 6 * read + 2 * accumulated, fill, others)


def _flags(case: AttentionCase, rows: int, cols: int) -> str:
    """Return the flags at the end of a kernel's name, as far as both directions have them.

    Dropout, causality, windows, ALiBi, lengths that fill tiles, head dimension that does, softcap.
    """
    even = case.rows % rows == 0 and case.tokens % cols == 0
    return f"Lb0ELb{int(case.causal)}ELb0ELb0ELb{int(even)}ELb1ELb0E"


def _time(
    case: AttentionCase,
    gpu: units.GPU,
    kernel: Kernel,
    known: list[dict[str, int]],
    memory_bytes: float,
    fill: float,
    other_bytes: float,
) -> Peer:
    """Time programs of each kind, ``known`` their counts; every sequence has one of each."""
    code, registers = machine_code_of(kernel.pattern, gpu.capability)
    limits = compile_ahead.GPUS[gpu.capability]
    resident = compile_ahead.programs_per_sm(limits, registers, kernel.shared, WARP * kernel.warps)
    traces = []
    for counts in known:
        if counts in known[: len(traces)]:
            traces.append(traces[known.index(counts)])
            continue
        traces.append(shortest(code, counts))
        if not traces[-1]:
            raise NotThereError(f"no way through {kernel.pattern} has {counts}")
    work = replay.Work(
        code,
        traces,
        kernel.warps,
        case.batch * case.heads * len(known),
        resident,
        {("LDGSTS", "?", 0): replay.Access(bytes=COPY * WARP * fill)},
        memory_bytes,
    )
    rate = gpu.bytes_per_s * units.ATTAINED_BYTES
    return Peer(replay.time(work, gpu), other_bytes / rate, resident)


def shortest(code: MachineCode, counts: dict[str, int]) -> list[int]:
    """Return the shortest way through a kernel that has so many of some instructions, numbered.

    Empty where there is none.
    """
    names = list(counts)
    has = [
        tuple(
            sum(one.name in (name, name + "G") for one in code.instructions[start:end])
            for name in names
        )
        for start, end in code.blocks
    ]
    ways = defaultdict(list)
    for start, to in code.edges:
        ways[start].append(to)
    end = len(code.blocks)
    first = 0, tuple(counts[name] - n for name, n in zip(names, has[0]))
    graph, states = nx.DiGraph(), [first]  # a block, and what is left behind it
    for block, left in states:
        for to in ways[block]:
            rest = tuple(n - used for n, used in zip(left, has[to])) if to < end else left
            if min(rest) < 0 or (to == end and any(rest)):
                continue
            if (to, rest) not in graph and to < end:
                states.append((to, rest))
            graph.add_edge((block, left), (to, rest), length=len(range(*code.blocks[block])))
    last = end, (0,) * len(names)
    if last not in graph:
        return []
    path = nx.shortest_path(graph, first, last, weight="length")
    return [n for block, _ in path[:-1] for n in range(*code.blocks[block])]


@functools.cache
def machine_code_of(pattern: str, capability: int) -> tuple[MachineCode, int]:
    """Return a kernel's machine code and the registers of its threads.

    Raises:
        NotThereError: PyTorch holds none, or more than one, of such a name.
    """
    found = [
        (path, name)
        for path, names in kernels(capability).items()
        for name in names
        if re.search(pattern, name)
    ]
    if len(found) != 1:
        raise NotThereError(f"PyTorch holds {len(found)} kernels {pattern} for sm_{capability}")
    path, name = found[0]
    cubin = path.read_bytes()
    registers = dict(REGISTERS.findall(compile_ahead.dump(cubin, "cuobjdump", "-res-usage")))
    text = compile_ahead.dump(cubin, "nvdisasm", "-c", "-hex")
    section = next(s for s in text.split("\n.text.") if s.startswith(name + ":"))
    return machine_code.parse(section), int(registers[name])


@functools.cache
def kernels(capability: int) -> dict[Path, list[str]]:
    """Return the names of kernels for a GPU by file, taken out of PyTorch's library at first use.

    Raises:
        NotThereError: this PyTorch was built without CUDA.
    """
    source = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if not source.exists():
        raise NotThereError("this PyTorch was built without CUDA")
    folder = library.BUILD / f"torch-{torch.__version__}-sm_{capability}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            tool = compile_ahead.cuda_tools() / "cuobjdump"
            wanted = [tool, "-xelf", f"sm_{capability}.cubin", source]
            try:
                compile_ahead.command(wanted, cwd=scratch)
            except subprocess.CalledProcessError as error:
                message = f"cuobjdump finds no code for sm_{capability}: {error.stderr.strip()}"
                raise NotThereError(message) from None
            kept = Path(scratch) / "kept"
            kept.mkdir()
            for path, _ in _named(Path(scratch)):
                path.rename(kept / path.name)
            try:
                kept.rename(folder)
            except OSError:
                if not folder.exists():  # otherwise another process was sooner
                    raise
    return dict(_named(folder))


def _named(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    for path in sorted(folder.glob("*.cubin")):
        names = {name.decode() for name in NAMES.findall(path.read_bytes())}
        if any(BFLOAT16 in name for name in names):
            yield path, sorted(names)
