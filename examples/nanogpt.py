"""Train a small GPT on the bytes of text files, measure κ of every layer, and generate text.

    python examples/nanogpt.py
    python examples/nanogpt.py --data my_notes/*.md --steps 2000

Without --data the text is the source code of Python's standard library. The architecture is that of
GPT-2. In 300 steps the model learns the layout of code and some words, but no sense.
"""

import argparse
import sysconfig
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from leaner_kernels import KappaMonitor, attention, gaussian_condition_number

CONTEXT, DIM, HEADS, DEPTH, BATCH = 64, 96, 12, 3, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    """Causal self-attention of HEADS heads: (B, N, DIM) -> (B, N, DIM)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each token to itself and those before it."""
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, D)
        return self.proj(attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, N, DIM) from (B, N, DIM)."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predict the next byte: (B, N) integers -> (B, N, 256) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)
        blocks = [Block() for _ in range(DEPTH)]
        self.layers = nn.Sequential(*blocks, nn.LayerNorm(DIM), nn.Linear(DIM, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte at each position."""
        return self.layers(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])


@torch.no_grad()
def write(model: GPT, prompt: str, length: int) -> str:
    """Return the prompt and ``length`` more bytes, each drawn from the model's distribution."""
    tokens = torch.tensor([list(prompt.encode())], device=DEVICE)
    for _ in range(length):
        logits = model(tokens[:, -CONTEXT:])[:, -1]
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.8).softmax(1), 1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main() -> None:
    """Train, print loss and κ of every layer now and then, and generate text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="+", type=Path, help="text files (the standard library)")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (300)")
    parser.add_argument("--every", type=int, default=50, help="steps between reports (50)")
    parser.add_argument("--prompt", default="def ", help="start of the generated text")
    options = parser.parse_args()
    torch.manual_seed(0)
    files = options.data or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray(b"".join(file.read_bytes() for file in files))
    if len(text) <= CONTEXT:
        parser.error(f"--data must have more than {CONTEXT} bytes of text, got {len(text)}")
    data = torch.frombuffer(text, dtype=torch.uint8)
    model = GPT().to(DEVICE)
    params = sum(p.numel() for p in model.parameters())
    print(f"{len(data):,} bytes of text, {params:,} parameters, on {DEVICE}")
    print(f"κ of independent Gaussian heads: {gaussian_condition_number(CONTEXT, DIM):.1f}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    monitor = KappaMonitor(model, every=options.every, samples=4)
    start = perf_counter()
    for step in range(options.steps + 1):
        places = torch.randint(len(data) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)
        batch = data[places].long().to(DEVICE)
        monitor.begin(step)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows = monitor.end()
        if step % options.every == 0:
            rows += monitor.flush()  # on a GPU, wait for the measurements
            # κ is None where float32 cannot resolve it.
            kappas = " ".join(f"{row['kappa'] or float('inf'):.0f}" for row in rows)
            print(f"step {step}: loss {loss:.3f}, κ {kappas}, {perf_counter() - start:.1f} s")
    print(write(model, options.prompt, 400))


if __name__ == "__main__":
    main()
