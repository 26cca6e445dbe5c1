"""Monitor κ in a training loop of your own, on a plain PyTorch model: rows, alarms and the page.

    python examples/monitor_your_model.py
    python examples/monitor_your_model.py --lr 0.1 --out runs/too-fast

A small transformer learns which of its tokens has the largest first feature. The monitor only
reads: on a CPU the trained weights are the same bit for bit without it. With --lr 0.1 training is
unstable, attention collapses, and an alarm names the layer and the step.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

try:
    import matplotlib  # noqa: F401 - draws the page
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install '.[plot]'") from None

from leaner_kernels.monitor.run_log import RunLog
from leaner_kernels.monitor.table import table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, FEATURES, DIM, HEADS, DEPTH, BATCH = 32, 16, 64, 8, 3, 64


class Largest(nn.Module):
    """Score tokens, (B, TOKENS, FEATURES) -> (B, TOKENS); nothing in it is of this library."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, DIM)
        self.positions = nn.Parameter(torch.randn(TOKENS, DIM))
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.score = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a logit for each token: how likely its first feature is the largest."""
        return self.score(self.encoder(self.embed(x) + self.positions))[..., 0]


def main() -> None:
    """Train, print κ of every layer before and after, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (300)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW (0.001)")
    parser.add_argument("--out", type=Path, default=Path("runs/own"), help="folder (runs/own)")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Largest().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    # RunLog holds a KappaMonitor and writes its files: kappa.jsonl, metrics.jsonl, alarms.jsonl and
    # page.html. Here it samples every fifth step, and measures 16 entries of the batch.
    # With Accelerate or DDP pass the prepared model, and construct a RunLog on every process.
    log = RunLog(model, options.out, every=5, samples=16)
    measured = []
    for step in range(options.steps):
        x = torch.randn(BATCH, TOKENS, FEATURES, device=DEVICE)
        # The block holds the forward and the backward of one optimizer step.
        with log.monitor.step(step) as rows:
            loss = nn.functional.cross_entropy(model(x), x[..., 0].argmax(1))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.log(step, {"loss": loss.item()})
        # A sampled step has a row for each layer; the steps between have none. On a GPU rows arrive
        # a few steps late. RunLog compares them with earlier rows and warns if one is alarming.
        log.take(rows)
        measured += rows
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    log.close()

    # "Gaussian" is κ of independent random heads. Far above it, heads share directions.
    for step in (measured[0]["step"], measured[-1]["step"]):
        print(f"step {step}:\n{table(row for row in measured if row['step'] == step)}")
    # The file exists from the first alarm on.
    alarms = options.out / "alarms.jsonl"
    for line in alarms.read_text("utf-8").splitlines() if alarms.exists() else ():
        print("ALARM:", json.loads(line)["message"])
    print(f"open {options.out / 'page.html'} in a browser")


if __name__ == "__main__":
    main()
