"""Write the package in the layout of the Hugging Face kernels hub.

    python torch-ext/make.py build/hub

The folder is a project for ``kernel-builder`` (``build.toml``, ``flake.nix``, ``torch-ext/``), and
under ``build/`` holds what kernel-builder would make of it, ready for
``kernels.get_local_kernel(Path("build/hub"))`` or an upload: there is nothing to compile.

The hub loads a kernel under a name of its own choice, several versions of it in one process; the
operators of each are in the namespace that its ``_ops.py`` names.
"""

import argparse
import base64
import hashlib
import json
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "leaner_kernels"
# Adapters import more than torch; the native library would be needed for every platform.
LEFT_BEHIND = shutil.ignore_patterns(
    "timm.py",
    "*transformers*.py",
    "lightning.py",
    "csrc",
    "*.so",
    "_ops.py",
    "py.typed",
    "__pycache__",
)


def make(folder: Path) -> None:
    """Write the project and its builds.

    Args:
        folder: is made; must be empty if it exists.

    Raises:
        ValueError: the folder holds something.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"OUT must be a new or empty folder, got {folder}")
    sources = folder / "torch-ext" / PACKAGE.name
    shutil.copytree(PACKAGE, sources, ignore=LEFT_BEHIND)
    shutil.copy(ROOT / "torch-ext/layers.py", sources)
    with (sources / "__init__.py").open("a", encoding="utf-8") as file:
        file.write('\nfrom . import layers\n\n__all__ += ["layers"]\n')
    for name in ("build.toml", "torch-ext/flake.nix", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    general = tomllib.loads((ROOT / "build.toml").read_text("utf-8"))["general"]
    unique = hashlib.sha256(json.dumps(digests(sources)).encode()).hexdigest()[:10]
    for backend in general["backends"]:
        build = folder / f"build/torch-{backend}"
        shutil.copytree(sources, build)
        identifier = f"_{PACKAGE.name}_{backend}_{unique}"
        namespace = (PACKAGE / "_ops.py").read_text("utf-8").replace(PACKAGE.name, identifier)
        (build / "_ops.py").write_text(namespace, "utf-8")
        metadata = {
            "name": general["name"],
            "id": identifier,
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": digests(build)},
        }
        (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", "utf-8")


def digests(folder: Path) -> dict[str, str]:
    """Base64 of SHA-256 of each file under a folder, by its path there."""
    return {
        path.relative_to(folder).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the layout of the kernels hub.")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    make(parser.parse_args().out)
