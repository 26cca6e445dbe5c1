"""Measure how long the host takes to issue attention on a GPU, beside PyTorch's.

    python -m bench.host_time --gpu FILE   # FILE gets JSON

One head of 8 tokens of 16 numbers leaves next to nothing to compute; a round is timed until the
host has issued it. A forward and backward are eight calls in one graph, whose fixed cost they
share. Microseconds a call, the least of many rounds: other work on the machine only adds.
"""

import sys
import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import leaner_kernels
from bench.harness import command

CALLS = 8
BATCH, HEADS, TOKENS, DIM = 1, 1, 8, 16
DEVICE = "cuda"
PASSES = "forward, no gradient", "forward", "forward and backward"


class HostCase(NamedTuple):
    """A call of ours and PyTorch's, each with the shapes of the tensors that it takes."""

    name: str
    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    others: Sequence[tuple[int, ...]]


def cases() -> list[HostCase]:
    """Return what is timed."""
    separate = [(BATCH, HEADS, TOKENS, DIM)] * 3
    packed = [(BATCH, TOKENS, 3, HEADS, DIM)]
    lengths = torch.full((BATCH,), TOKENS, dtype=torch.int32)
    seen = torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool)
    starts = torch.tensor([0, TOKENS // 2, TOKENS], dtype=torch.int32)

    def packed_torch(qkv: Tensor) -> Tensor:
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return sdpa(query, key, value).transpose(1, 2)

    def varlen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return leaner_kernels.attention_varlen(query, key, value, starts, TOKENS // 2)

    tokens = [(TOKENS, HEADS, DIM)] * 3
    ours, ours_packed = leaner_kernels.attention, leaner_kernels.attention_qkvpacked
    with_lengths = partial(ours, key_lengths=lengths)
    with_mask = partial(sdpa, attn_mask=seen)
    return [
        HostCase("`attention_qkvpacked`", ours_packed, packed_torch, packed, packed),
        HostCase("`attention`", ours, sdpa, separate, separate),
        HostCase("`attention`, key_lengths", with_lengths, with_mask, separate, separate),
        HostCase("`attention_varlen`", varlen, sdpa, tokens, separate),
    ]


def rounds_of(
    call: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]]
) -> dict[str, Callable[[], Any]]:
    """Return, for each of ``PASSES``, what makes ``CALLS`` calls."""

    def new(grad: bool) -> list[list[Tensor]]:
        return [
            [torch.randn(s, dtype=torch.bfloat16, requires_grad=grad) for s in shapes]
            for _ in range(CALLS)
        ]

    plain, leaves = new(False), new(True)
    flat = [leaf for each in leaves for leaf in each]
    grads = [torch.randn_like(call(*each)) for each in plain]

    def forward(inputs: list[list[Tensor]]) -> Callable[[], Any]:
        return lambda: [call(*each) for each in inputs]

    def both() -> Any:
        return torch.autograd.grad(forward(leaves)(), flat, grads)

    return dict(zip(PASSES, (forward(plain), forward(leaves), both)))


def measure(seconds: float) -> list[dict[str, Any]]:
    """Return a row for each case and pass: least microseconds a call, ours and PyTorch's."""
    torch.set_num_threads(1)
    sides = {}
    with torch.device(DEVICE):
        for case in cases():
            ours, theirs = rounds_of(case.ours, case.shapes), rounds_of(case.torchs, case.others)
            sides |= {(case.name, kind): (ours[kind], theirs[kind]) for kind in PASSES}
    least = dict.fromkeys(sides, (float("inf"), float("inf")))
    stop = time.perf_counter() + seconds
    while True:
        for key, (ours, theirs) in sides.items():
            least[key] = min(least[key][0], _least(ours)), min(least[key][1], _least(theirs))
        if time.perf_counter() >= stop:
            break
    return [
        {"call": name, "pass": kind, "ours_us": ours, "pytorch_us": theirs}
        for (name, kind), (ours, theirs) in least.items()
    ]


def _least(run: Callable[[], Any]) -> float:
    """Return microseconds a call: rounds are short, so that some are not interrupted."""
    times = []
    for _ in range(10):
        times.append(timeit.timeit(run, number=1))
        torch.cuda.synchronize()  # what is queued would hold the next round up
    return 1e6 * min(times[2:]) / CALLS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = command.parser("bench.host_time", __doc__)
    parser.add_argument(
        "--seconds", type=float, default=30, help="duration of the measurement in seconds (30)"
    )
    parser.add_argument(
        "--gpu", type=Path, metavar="FILE", required=True, help="write the results to FILE"
    )
    args = parser.parse_args(arguments)
    command.need_pytorchs_attention("bench.host_time")
    command.need_gpu("bench.host_time")
    rows = measure(args.seconds)
    for row in rows:
        ratio = row["ours_us"] / row["pytorch_us"]
        sys.stdout.write(
            f"{row['call']:26} {row['pass']:22} ours {row['ours_us']:6.1f} µs, "
            f"PyTorch's {row['pytorch_us']:6.1f} µs, ratio {ratio:.2f}\n"
        )
    command.write(args.gpu, rows, **command.origin())


if __name__ == "__main__":
    main()
