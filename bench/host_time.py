"""Measure how long the host takes to launch attention and small models on a GPU.

    python -m bench.host_time --gpu FILE   # FILE gets JSON

The calls have one head of 8 tokens and 16 dimensions, so the GPU has almost nothing to compute. A
round is timed until the host has launched all its kernels. Forward and backward are timed as eight
calls in one autograd graph, which share its fixed cost. Times are microseconds a call: the minimum
over many rounds, because other work on the machine can only add to it. Attention is compared with
PyTorch's. Models of 12 narrow blocks are timed for one image or text, with their own attention and,
after ``use``, with ours.
"""

import copy
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import leaner_kernels
from bench.harness import command

CALLS = 8
BLOCKS, WIDTH, MODEL_HEADS, MODEL_TOKENS = 12, 48, 3, 6
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


class HostModel(NamedTuple):
    """A model with its own attention, what puts ours into it, and the inputs of a forward."""

    name: str
    own: nn.Module
    use: Callable[[nn.Module], Any]
    inputs: Sequence[Tensor]


def models() -> list[HostModel]:
    """Return the models that are timed, with random weights, on the default device."""
    import timm
    import transformers

    from leaner_kernels.adapters import pytorch as ours_in_pytorch
    from leaner_kernels.adapters import timm as ours_in_timm
    from leaner_kernels.adapters import transformers as ours_in_transformers

    vit = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        embed_dim=WIDTH,
        depth=BLOCKS,
        num_heads=MODEL_HEADS,
    )
    config = transformers.BertConfig(
        vocab_size=MODEL_TOKENS,
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=MODEL_HEADS,
        intermediate_size=WIDTH,
    )
    layer = nn.TransformerEncoderLayer(WIDTH, MODEL_HEADS, WIDTH, batch_first=True)
    encoder = nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)
    image = torch.randn(1, 3, 32, 32, dtype=torch.bfloat16)
    tokens = torch.randn(1, MODEL_TOKENS, WIDTH, dtype=torch.bfloat16)
    text = torch.arange(MODEL_TOKENS)[None]
    return [
        HostModel("timm's ViT", vit, ours_in_timm.use, [image]),
        HostModel(
            "transformers' BERT", transformers.BertModel(config), ours_in_transformers.use, [text]
        ),
        HostModel("`nn.TransformerEncoder`", encoder, ours_in_pytorch.use, [tokens]),
    ]


def forwards_of(model: HostModel) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what runs a forward without gradients, with our attention and with its own."""
    own = model.own.to(torch.bfloat16).eval()
    ours = copy.deepcopy(own)
    model.use(ours)
    return partial(_infer, ours, model.inputs), partial(_infer, own, model.inputs)


@torch.no_grad()
def _infer(model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    return model(*inputs)


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
    """Return a row for each case and pass: least microseconds a call, ours and the library's."""
    torch.set_num_threads(1)
    sides, calls = {}, {}
    with torch.device(DEVICE):
        for case in cases():
            ours, theirs = rounds_of(case.ours, case.shapes), rounds_of(case.torchs, case.others)
            for kind in PASSES:
                sides[case.name, kind] = ours[kind], theirs[kind]
                calls[case.name, kind] = CALLS
        for model in models():
            key = f"{model.name}, {BLOCKS} blocks", PASSES[0]
            sides[key], calls[key] = forwards_of(model), 1
    least = dict.fromkeys(sides, (float("inf"), float("inf")))
    stop = time.perf_counter() + seconds
    while True:
        for key, (ours, theirs) in sides.items():
            before_ours, before_theirs = least[key]
            ours_us, theirs_us = _least(ours) / calls[key], _least(theirs) / calls[key]
            least[key] = min(before_ours, ours_us), min(before_theirs, theirs_us)
        if time.perf_counter() >= stop:
            break
    return [
        {"call": name, "pass": kind, "ours_us": ours, "pytorch_us": theirs}
        for (name, kind), (ours, theirs) in least.items()
    ]


def _least(run: Callable[[], Any]) -> float:
    """Return microseconds a round: rounds are short, so that some are not interrupted."""
    times = []
    for _ in range(10):
        times.append(timeit.timeit(run, number=1))
        torch.cuda.synchronize()  # queued work would delay the next round
    return 1e6 * min(times[2:])


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
            f"{row['call']:34} {row['pass']:22} ours {row['ours_us']:6.1f} µs, "
            f"the library's {row['pytorch_us']:6.1f} µs, ratio {ratio:.2f}\n"
        )
    command.write(args.gpu, rows, **command.origin())


if __name__ == "__main__":
    main()
