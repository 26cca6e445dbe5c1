"""Train a classifier on a folder of pictures, then use it: on the command line and in Python.

    python examples/train_and_predict.py
    python examples/train_and_predict.py my_pictures --out runs/mine

The folder has train/ and val/, each with a subfolder of pictures for each class. Without a folder
the script draws circles, squares and triangles. It prints both commands before it runs them, so
that you can repeat them with other flags.
"""

import argparse
import random
import shlex
import subprocess
import sys
from pathlib import Path

import torch

try:
    import rich  # noqa: F401 - train/vit.py shows its progress with it
    import safetensors  # noqa: F401 - a run's weights are in this format
    from PIL import Image, ImageDraw
except ModuleNotFoundError as error:
    package = {"PIL": "pillow"}.get(error.name or "", error.name)
    raise SystemExit(f"{package} is missing: pip install . --group train") from None

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train.data.images.saved import model_input
from train.export import load

ROOT = Path(__file__).resolve().parents[1]
SIDE = 32  # pixels


def draw(folder: Path) -> None:
    """Write 100 pictures of each shape to folder/train and 8 to folder/val."""
    generator = random.Random(0)
    for split, count in (("train", 100), ("val", 8)):
        for shape, sides in (("circle", 0), ("square", 4), ("triangle", 3)):
            (folder / split / shape).mkdir(parents=True, exist_ok=True)
            for index in range(count):
                dark, bright = generator.randrange(100), generator.randrange(156, 256)
                picture = Image.new("L", (SIDE, SIDE), dark)
                radius = generator.uniform(8, 12)
                x, y = (generator.uniform(radius, SIDE - radius) for _ in "xy")
                pen = ImageDraw.Draw(picture)
                if sides:
                    turn = generator.uniform(0, 360)
                    pen.regular_polygon((x, y, radius), sides, turn, fill=bright)
                else:
                    pen.circle((x, y), radius, fill=bright)
                picture.save(folder / split / shape / f"{index}.png")


def run(script: str, *arguments: object) -> None:
    """Print a command of this checkout and run it."""
    command = ["python", f"train/{script}", *map(str, arguments)]
    print(f"\n$ {shlex.join(command)}", flush=True)
    subprocess.run([sys.executable, str(ROOT / command[1]), *command[2:]], check=True)


def main() -> None:
    """Train, classify what was held out, and classify one picture from Python."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "data", nargs="?", type=Path, help="folder of pictures (omitted: shapes are drawn)"
    )
    parser.add_argument("--epochs", type=int, default=12, help="passes over the pictures (12)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/shapes"), help="run folder (runs/shapes)"
    )
    options = parser.parse_args()
    data, sizes = options.data, []
    if data is None:
        data, sizes = options.out.with_name("shapes-data"), ["--img-size", SIDE, "--patch-size", 4]
        draw(data)

    run("vit.py", "--data", data, "--epochs", options.epochs, *sizes, "--out", options.out)
    # The weights that were best on val/ are loaded from the run's folder; --last takes the newest.
    run("predict.py", options.out, data / "val")

    # The same in Python. ``info`` has the names of the classes, the size and the normalization.
    model, info = load(options.out)
    path = min(path for path in (data / "val").rglob("*") if path.is_file())
    image = model_input(info, path.read_bytes(), lambda: str(path))
    with torch.inference_mode():
        chances = model(image[None])[0].softmax(0)
    print(f"\nin Python: {path} is a {info.classes[chances.argmax()]} ({chances.max():.1%})")


if __name__ == "__main__":
    main()
