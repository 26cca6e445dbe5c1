"""The condition number of every attention block of a model that has none of our modules.

    python examples/monitor_kappa.py
    python examples/monitor_kappa.py --pretrained google/vit-base-patch16-224 --dtype bfloat16

The model calls PyTorch's scaled_dot_product_attention. KappaMonitor sees these calls while a step
is sampled and computes their heads once more in float32, so that kappa is true in bfloat16 too,
where the outputs themselves show nothing but how they were rounded.
"""

import argparse

import torch
from torch import Tensor, nn

from leaner_kernels import KappaMonitor

# A ViT-B of 224 x 224 pixels, but for its depth.
DIM, HEADS, TOKENS, DEPTH, BATCH = 768, 12, 197, 2, 2


def encoder() -> tuple[nn.Module, Tensor]:
    """Return PyTorch's own encoder with random weights, and a batch for it, (B, N, DIM)."""
    layer = nn.TransformerEncoderLayer(
        DIM, HEADS, 4 * DIM, dropout=0.0, batch_first=True, norm_first=True
    )
    model = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
    return model, torch.randn(BATCH, TOKENS, DIM)


def pretrained(name: str) -> tuple[nn.Module, Tensor]:
    """Return a model of transformers and random pixels (B, 3, Y, X) or tokens (B, N) for it."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(name, attn_implementation="sdpa", trust_remote_code=False)
    size = getattr(model.config, "image_size", None)
    if size is not None:
        return model, torch.rand(BATCH, model.config.num_channels, size, size)
    return model, torch.randint(model.config.vocab_size, (BATCH, TOKENS))


def main() -> None:
    """Print a row for each call of attention."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pretrained", help="a model of transformers; PyTorch's encoder without")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, inputs = pretrained(options.pretrained) if options.pretrained else encoder()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype)
    model = model.to(device, dtype)
    inputs = inputs.to(device, dtype if inputs.is_floating_point() else None)

    monitor = KappaMonitor(model, every=1, samples=BATCH)
    monitor.begin(step=0)
    with torch.no_grad():
        model(inputs)
    rows = monitor.end() + monitor.flush()

    columns = f"{'kappa':>10} {'gaussian':>8} {'eff. rank':>9} {'entropy':>7}  source"
    print(f"{'layer':30} {'heads':>8} {'tokens':>6} {columns}")
    for row in rows:
        kappa = "unresolved" if row["kappa"] is None else f"{row['kappa']:.1f}"
        print(
            f"{row['layer']:30} {row['heads']:>4}x{row['head_dim']:<3} {row['tokens']:>6} "
            f"{kappa:>10} {row['kappa_gaussian'] or float('inf'):>8.2f} "
            f"{row['effective_rank']:>9.1f} {row['entropy']:>7.3f}  {row['source']}"
        )


if __name__ == "__main__":
    main()
