"""Train a small model at too high a learning rate, with and without QK-Clip.

    python examples/qk_clip.py

Both runs start from the same weights and see the same data. Without QK-Clip the attention logits
grow. With it, the query and key weights of each head whose largest logit passed the threshold are
scaled down after the optimizer step. The script prints the largest logit before the scaling, so it
may exceed the threshold, here by up to a half.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leaner_kernels import QKClip
from leaner_kernels.nn import ManyHeadAttention

VOCABULARY, TOKENS, BATCH, DIM = 16, 32, 16, 64
# No head reaches this threshold: QKClip then only reports the logits.
NEVER = 1e30


class Block(nn.Module):
    """Attention and a multilayer perceptron, each around a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = ManyHeadAttention(DIM, num_heads=4, head_dim=16)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, N, DIM) from (B, N, DIM)."""
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A causal language model of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(TOKENS, DIM)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(DIM))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens, (B, N, VOCABULARY), from (B, N)."""
        return self.head(self.blocks(self.tokens(tokens) + self.places.weight[: tokens.shape[1]]))


def train(threshold: float, steps: int, lr: float) -> list[tuple[float, float]]:
    """Return the loss and the largest logit of every step, clipping heads above the threshold."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    clip = QKClip(model, threshold=threshold)
    generator = torch.Generator().manual_seed(1)
    curve = []
    for _ in range(steps):
        # The second half repeats the first, so the model must attend to predict it.
        half = torch.randint(VOCABULARY, (BATCH, TOKENS // 2), generator=generator)
        tokens = torch.cat([half, half], dim=1)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        peaks = torch.cat(list(clip.step().values()))
        curve.append((loss.item(), peaks.max().item()))
    clip.close()
    return curve


def main() -> None:
    """Train twice and print both curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (100)")
    parser.add_argument(
        "--lr", type=float, default=0.02, help="learning rate, too high on purpose (0.02)"
    )
    parser.add_argument("--threshold", type=float, default=20.0, help="largest logit allowed (20)")
    args = parser.parse_args()
    free, clipped = (train(t, args.steps, args.lr) for t in (NEVER, args.threshold))
    print("step   loss  max logit   with QK-Clip:  loss  max logit")
    for step in sorted({*range(0, args.steps, max(1, args.steps // 8)), args.steps - 1}):
        (loss, peak), (loss_clipped, peak_clipped) = free[step], clipped[step]
        print(f"{step:4d} {loss:6.3f} {peak:10.1f} {loss_clipped:20.3f} {peak_clipped:10.1f}")


if __name__ == "__main__":
    main()
