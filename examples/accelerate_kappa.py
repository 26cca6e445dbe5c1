"""Kappa of every layer while a loop of Hugging Face's Accelerate trains.

    python examples/accelerate_kappa.py --out runs/accelerate
    accelerate launch examples/accelerate_kappa.py --out runs/accelerate

A transformer learns which of its tokens is the largest. Every ten updates kappa of all layers is
measured in the training itself, and no bit of it changes.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

try:
    from accelerate import Accelerator
except ModuleNotFoundError:
    raise SystemExit("accelerate is missing: pip install accelerate matplotlib") from None

from leaner_kernels.monitor.run_log import RunLog
from leaner_kernels.monitor.table import table

TOKENS, DIM, HEADS, DEPTH, BATCH = 12, 32, 8, 2, 64


class Largest(nn.Module):
    """Scores of the positions, (B, N), of numbers, (B, N)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, DIM)
        self.position = nn.Parameter(torch.randn(TOKENS, DIM))
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.score = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        return self.score(self.encoder(self.embed(x[..., None]) + self.position))[..., 0]


def main() -> None:
    """Train, and print kappa of every layer at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder of the rows and the page")
    options = parser.parse_args()
    torch.manual_seed(0)
    numbers = torch.randn(4096, TOKENS)
    data = torch.utils.data.TensorDataset(numbers, numbers.argmax(dim=1))
    accelerator = Accelerator()
    model = Largest()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    folder = options.out or Path(tempfile.mkdtemp())
    log = RunLog(model, folder, every=10, samples=16)
    for step, (x, y) in zip(range(options.steps), batches):
        with log.monitor.step(step) as rows:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        log.take(rows)
        log.log(step, {"loss": loss.item()})
        if rows and accelerator.is_main_process:
            print(f"step {step}: loss {loss.item():.3f}\n{table(rows)}")
    log.close()


if __name__ == "__main__":
    main()
