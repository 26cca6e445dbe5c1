"""Training: one torchrun script per model, and the engine that they share.

Start at ``vit.py``; ``gpt.py``, ``bert.py`` and ``lra.py`` read text, ``export.py`` loads weights.
``config/`` holds flags and architectures, ``data/`` the data sets and the order of their
items. ``loop/engine.py`` starts a run, ``loop/setup.py`` makes its parts, ``loop/train.py`` is the
loop, ``loop/parallel.py`` spreads the model over processes. ``checkpoint/`` saves a run and resumes
it, ``logs/`` reports how it went.

A script imports this package before torch.
"""

import importlib.util
import os

# Of the dependency group, what every script needs.
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

# Read by OpenMP when torch is loaded. Its threads otherwise spin while they wait, and fight over
# cores that are busy: on two shared ones the digits train at 35 images/s instead of 190.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import leaner_kernels.removed  # noqa: E402, F401 - names what a removed command was replaced by
