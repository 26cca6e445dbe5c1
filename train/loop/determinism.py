"""What makes a run the same each time: seeds, and kernels that add in one order."""

import os
import random

import numpy as np
import torch

from train.config.flags import Settings
from train.data.order import seed_of
from train.loop.parallel import World


def begin(settings: Settings, world: World) -> None:
    """Seed the global generators, and ask for deterministic kernels if the settings do."""
    if settings.deterministic:
        # cuBLAS reads this when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # For what a model or data set draws besides, such as dropout: every rank differs.
    own_seed = seed_of(settings.seed, world.rank)
    torch.manual_seed(own_seed)
    random.seed(own_seed)
    np.random.seed(own_seed % 2**32)
