"""Training: one torchrun script per model, and the engine that they share.

Start at ``vit.py``; ``gpt.py``, ``bert.py`` and ``lra.py`` read text. ``flags.py`` names the
settings, ``data.py`` the data sets, ``parallel.py`` spreads a model over processes, ``engine.py``
is the loop, ``checkpoint.py`` saves and resumes it, ``report.py`` says how it went, and
``plots.py`` draws it.

A script imports this package before torch.
"""

import os

# Read by OpenMP when torch is loaded. Its threads otherwise spin while they wait, and fight over
# cores that are busy: on two shared ones the digits train at 35 images/s instead of 190.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
