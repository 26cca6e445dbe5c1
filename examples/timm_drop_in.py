"""A model of timm on these kernels: swap its attention, see κ of every layer, and swap it back.

    python examples/timm_drop_in.py --model vit_small_patch16_224 --pretrained

Without --pretrained nothing is downloaded; the weights are then as timm initializes them.
"""

import argparse

import timm
import torch

from leaner_kernels import KappaMonitor
from leaner_kernels.adapters import timm as adapter


def main() -> None:
    """Print what was swapped, how far the logits are from timm's, and a row per layer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="vit_small_patch16_224", help="any name of timm's")
    parser.add_argument("--pretrained", action="store_true", help="download timm's weights")
    parser.add_argument("--batch", type=int, default=2, help="images, of noise")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = timm.create_model(options.model, pretrained=options.pretrained).eval()
    images = torch.randn(options.batch, *model.default_cfg["input_size"])
    with torch.no_grad():
        before = model(images)

    report = adapter.use(model)
    print(report)
    with torch.no_grad():
        swapped = model(images)
    print(
        f"largest logit {before.abs().max():.3g}, largest difference from timm's "
        f"{(swapped - before).abs().max():.1e}"
    )

    # One training step, as anyone's: only begin and end are new.
    monitor = KappaMonitor(model, every=1, samples=2)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.01)
    labels = torch.randint(model.num_classes, (options.batch,))
    monitor.begin(0)
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    rows = monitor.end() + monitor.flush()
    print(f"{'layer':>20} {'κ of the heads':>15} {'entropy':>8} {'largest logit':>14}")
    for row in rows:
        kappa = "past precision" if row["kappa"] is None else f"{row['kappa']:.1f}"
        numbers = f"{row['entropy']:>8.2f} {row['max_logit']:>14.2f}"
        print(f"{row['layer']:>20} {kappa:>15} {numbers}")

    report.undo()
    print(f"undone: {type(model.get_submodule(rows[0]['layer']))}, its weights as trained")


if __name__ == "__main__":
    main()
