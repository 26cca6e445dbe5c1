"""Train models: one torchrun script per model, and the engine that they share.

Start at ``vit.py``; ``gpt.py``, ``bert.py`` and ``lra.py`` read text, ``export.py`` loads weights.
``config/`` holds flags and architectures, ``data/`` the data sets and the order of their
items. ``loop/engine.py`` starts a run, ``loop/setup.py`` makes its parts, ``loop/train.py`` is the
loop, ``loop/parallel.py`` spreads the model over processes. ``checkpoint/`` saves a run and resumes
it, ``logs/`` reports how it went.

A script imports this package before torch.
"""

import importlib.util
import os
import stat
import sys
import tempfile

# The packages of the dependency group that every script needs.
_NEEDED = {
    **{name: name for name in ("numpy", "rich", "safetensors", "tokenizers", "torch")},
    "PIL": "pillow",
}
if _missing := [
    name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None
]:
    raise SystemExit(
        f"train needs the package {', '.join(_missing)}: in the checkout, python -m pip install -U "
        "pip and pip install -e . --group train"
    )

# OpenMP reads this when torch is loaded. Otherwise its threads spin while they wait, and compete
# for busy cores: on two shared cores the digits train at 35 images/s instead of 190.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _keep_caches() -> None:
    """Put the caches of all libraries in a temporary folder if the user has no home folder."""
    home = os.path.expanduser("~")
    where = cache = os.path.join(home, ".cache")
    while os.path.isabs(where) and not os.path.lexists(where):
        where = os.path.dirname(where)
    writable = os.path.isdir(where) and os.access(where, os.W_OK)
    if (os.path.isabs(home) and writable) or "XDG_CACHE_HOME" in os.environ:
        return
    folder = os.path.join(tempfile.gettempdir(), f"leaner_kernels-{os.geteuid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        about = os.lstat(folder)
    except OSError:
        return  # the library that needs the cache will report that it cannot be written
    # Anyone could create a folder of this name there.
    if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode):
        return
    os.environ["XDG_CACHE_HOME" if os.path.isabs(home) else "HOME"] = folder
    if (os.environ.get("RANK") or "0") == "0" and sys.stderr is not None:
        sys.stderr.write(f"caches are kept in {folder}: {cache} cannot be written\n")


_keep_caches()

import leaner_kernels.removed  # noqa: E402, F401 - names what a removed command was replaced by
