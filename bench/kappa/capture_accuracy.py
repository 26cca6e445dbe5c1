"""Measure the accuracy of kappa of a bfloat16 ViT, for every way to capture it.

A ViT-B at initialisation sees a photograph in bfloat16. The truth is attention in float64 on the
model's own queries, keys and values; what differs is only how the heads' outputs are read.

    python -m bench.kappa.capture_accuracy                     # prints the last layer's, as a table
    python -m bench.kappa.capture_accuracy --json bench/results/capture_accuracy.json
    python -m bench.kappa.capture_accuracy --plot docs/images/kappa_hooks.png

The last command measures nothing: it draws what the second wrote.
"""

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import command
from leaner_kernels import attention_with_stats, condition_number
from leaner_kernels.ops.attention import op, reference
from models.vit import VisionTransformer

HEADS, LAYERS = (2, 4, 12, 16), 4
READINGS = {
    "hook": "hook on the bfloat16 output",
    "single": "float32 output, P in one bfloat16",
    "split": "P in three bfloat16, as kernels capture",
    "captured": "captured on a CPU",
}
RESULTS = Path(__file__).parents[1] / "results" / "capture_accuracy.json"


def photograph() -> Tensor:
    """Return (1, 3, 224, 224) in [-1, 1]: a photograph that comes with scikit-learn."""
    try:
        from sklearn.datasets import load_sample_image
    except ImportError:
        raise SystemExit("the photograph needs scikit-learn: pip install scikit-learn") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the array is read-only; nothing writes to it
        image = torch.from_numpy(load_sample_image("china.jpg")).permute(2, 0, 1)[None] / 127.5 - 1
    return F.interpolate(image, (224, 224), mode="bilinear", antialias=True)


def measure(image: Tensor, heads: int, device: str = "cpu") -> list[dict[str, float]]:
    """Return kappa in each of the first layers of a ViT-B with ``heads`` heads of width 64.

    Beside ``truth``, attention in float64, it is of what each of ``READINGS`` reads: ``captured``
    is ``attention_with_stats(..., sample=...).heads``, ``split`` the kernels' arithmetic with
    float32 sums, ``single`` has float32 sums and output too.
    """
    torch.manual_seed(0)
    model = VisionTransformer(depth=LAYERS, heads=heads).to(device, torch.bfloat16).eval()
    projected: list[Tensor] = []
    for block in model.blocks:
        block.attn.qkv.register_forward_hook(lambda _, inputs, out: projected.append(out))
    with torch.no_grad():
        model(image.to(device, torch.bfloat16))
    return [_read(heads, layer, qkv) for layer, qkv in enumerate(projected)]


def _read(heads: int, layer: int, qkv: Tensor) -> dict[str, float]:
    q, k, v = op.split_qkv(qkv.unflatten(-1, (3, heads, 64)))
    sample = torch.zeros(1, dtype=torch.int32, device=q.device)
    stats = attention_with_stats(q, k, v, sample=sample)
    q, k, v = (t.cpu() for t in (q, k, v))
    p, _, _ = reference.probabilities(q.double(), k.double(), None, None, False, 64**-0.5)
    high = p.bfloat16().float()
    middle = (p.float() - high).bfloat16().float()
    low = (p.float() - high - middle).bfloat16().float()
    return {
        "heads": heads,
        "layer": layer,
        "truth": _kappa(p @ v.double()),
        "captured": condition_number(stats.heads).kappa.item(),
        "split": _kappa(high @ v.float() + middle @ v.float() + low @ v.float()),
        "single": _kappa(high @ v.float()),
        "hook": _kappa(stats.out.float()),
    }


def _kappa(a: Tensor) -> float:
    """Return the condition number of (1, H, N, D) heads side by side."""
    return condition_number(a.transpose(1, 2).flatten(2)).kappa.item()


def draw(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw what each way of reading reports over the truth, and its relative error, as a PNG."""
    import pandas as pd
    from matplotlib.figure import Figure

    reported = pd.DataFrame(rows).set_index("truth")[[*READINGS]].rename(columns=READINGS)
    errors = reported.div(reported.index, axis="index").sub(1).abs()
    figure = Figure(figsize=(9, 4), dpi=100, layout="constrained")
    titles = "reported κ", "relative error of κ"
    for panel, frame, title in zip(figure.subplots(1, 2), (reported, errors), titles):
        frame.plot(ax=panel, style=["v", "s", "D", "o"], ms=5, loglog=True, legend=False)
        panel.set(xlabel="true condition number κ", ylabel=title)
        panel.grid(alpha=0.3)
    figure.axes[0].plot(reported.index, reported.index, color="black", lw=1, label="truth")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path)


def table(rows: Sequence[Mapping[str, float]]) -> str:
    """Return a line for each number of heads, of the last layer, as Markdown."""
    lines = [("heads", "exact κ", "captured", "hook on the bfloat16 output"), ("--:",) * 4]
    for row in rows:
        if row["layer"] == LAYERS - 1:
            kappas = (f"{row[name]:,.0f}" for name in ("truth", "captured", "hook"))
            lines.append((str(row["heads"]), *kappas))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write JSON, or draw what was measured."""
    parser = command.parser("bench.kappa.capture_accuracy", __doc__)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the rows of all layers to FILE"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PNG",
        help="plot the recorded results to PNG instead of measuring",
    )
    flags = parser.parse_args(arguments)
    if flags.plot is not None:
        draw(json.loads(RESULTS.read_text("utf-8"))["rows"], flags.plot)
        return
    image = photograph()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [reading for heads in HEADS for reading in measure(image, heads, device)]
    sys.stdout.write(table(rows))
    if flags.json is not None:
        whole = {"torch": torch.__version__, "device": device, "rows": rows}
        flags.json.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
