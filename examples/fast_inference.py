"""Run a swapped timm model fast for one image: compiled, as a CUDA graph, and as a package.

    python examples/fast_inference.py
    python examples/fast_inference.py --model vit_base_patch16_224

For one image the CPU takes longer to launch the kernels than the GPU takes to run them. A CUDA
graph replays all launches at once; without a GPU it is left out. A package of AOTInductor needs no
tracing, but the process that loads it must import leaner_kernels. The default model is tiny because
two of the ways compile it, which takes minutes for a larger model on one core.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

try:
    import timm
except ModuleNotFoundError:
    raise SystemExit("timm is missing: pip install '.[timm]'") from None

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from leaner_kernels.adapters import timm as adapter


def main() -> None:
    """Print the time of each way to run the model, and the difference of its logits to timm's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="test_vit", help="name of a timm model (test_vit)")
    parser.add_argument("--batch", type=int, default=1, help="number of random images (1)")
    parser.add_argument("--seconds", type=float, default=0.5, help="time to measure each way (0.5)")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = timm.create_model(options.model).eval().to(device, dtype)
    images = torch.randn(options.batch, *model.default_cfg["input_size"]).to(device, dtype)

    with torch.inference_mode():
        expected = model(images)
    ways: dict[str, Callable[[Tensor], Tensor]] = {"timm": model}
    adapter.use(swapped := timm.create_model(options.model).eval().to(device, dtype))
    swapped.load_state_dict(model.state_dict())
    ways["swapped"] = swapped
    ways["compiled"] = torch.compile(swapped, mode="reduce-overhead")  # CUDA graphs, on a GPU
    if device == "cuda":
        ways["graph"] = Graph(swapped, images)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        program = torch.export.export(swapped, (images,))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(Path(folder, "model.pt2"))
        )
        ways["package"] = torch._inductor.aoti_load_package(path)

    print(f"{'way':>10} {'ms':>8} {'largest difference':>20}")
    for name, run in ways.items():
        with torch.no_grad():
            for _ in range(2):  # compile and record before timing
                run(images)
            logits = run(images).clone()
            timer = Timer("run(images)", globals={"run": run, "images": images})
            taken = timer.blocked_autorange(min_run_time=options.seconds).median
        print(f"{name:>10} {1e3 * taken:>8.2f} {(logits - expected).abs().max().item():>20.1e}")


class Graph:
    """Record all launches of a model for one input shape, and replay them."""

    def __init__(self, model: torch.nn.Module, images: Tensor) -> None:
        self.images = images.clone()
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # compile and allocate before the recording
                model(self.images)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = model(self.images)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits; the next call overwrites them."""
        self.images.copy_(images)
        self.graph.replay()
        return self.logits


if __name__ == "__main__":
    main()
