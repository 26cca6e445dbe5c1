"""Swap the attention of a timm model, time a training step before and after, and measure κ.

    python examples/timm_drop_in.py
    python examples/timm_drop_in.py --model vit_base_patch16_224 --pretrained

With --pretrained timm downloads its weights; otherwise they are random. On a CPU our attention
calls PyTorch's, so both times are alike.
"""

import argparse

try:
    import timm
except ModuleNotFoundError:
    raise SystemExit("timm is missing: pip install '.[timm]'") from None

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from leaner_kernels import KappaMonitor
from leaner_kernels.adapters import timm as adapter
from leaner_kernels.monitor.table import table

MODEL = "vit_small_patch16_224"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Update the weights once, in bfloat16 on a GPU."""
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    """Print the swapped modules, the difference of the logits, both times and κ of each layer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=MODEL, help=f"name of a timm model ({MODEL})")
    parser.add_argument("--pretrained", action="store_true", help="download the weights")
    batch = 128 if DEVICE == "cuda" else 2
    parser.add_argument("--batch", type=int, default=batch, help=f"images in a batch ({batch})")
    options = parser.parse_args()

    torch.manual_seed(0)
    try:
        model = timm.create_model(options.model, pretrained=options.pretrained).to(DEVICE)
    except (OSError, RuntimeError) as error:
        print(f"no pretrained weights ({type(error).__name__}): the weights are random")
        model = timm.create_model(options.model).to(DEVICE)
    images = torch.randn(options.batch, *model.default_cfg["input_size"], device=DEVICE)
    labels = torch.randint(model.num_classes, (options.batch,), device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    task = model, optimizer, images, labels
    # blocked_autorange warms up, repeats the step for a second, and synchronizes on a GPU.
    timer = Timer("train_step(*task)", globals={"train_step": train_step, "task": task})

    before = timer.blocked_autorange(min_run_time=1).median
    with torch.no_grad():
        theirs = model.eval()(images)
        print(report := adapter.use(model))  # the one line that swaps the attention
        ours = model(images)
    model.train()
    after = timer.blocked_autorange(min_run_time=1).median
    print(f"largest logit {theirs.abs().max():.3g}, difference {(ours - theirs).abs().max():.1e}")
    print(
        f"training step: {1e3 * before:.1f} ms with timm's attention, {1e3 * after:.1f} with ours"
    )

    # κ of the heads of two images, measured inside one more training step.
    monitor = KappaMonitor(model, every=1, samples=2)
    monitor.begin(0)
    train_step(*task)
    print(table(rows := monitor.end() + monitor.flush()))
    report.undo()
    print(f"undone: {type(model.get_submodule(rows[0]['layer']))} with the trained weights")


if __name__ == "__main__":
    main()
