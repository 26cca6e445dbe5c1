"""The paper's architectures, one file each, and its rows as data in ``models.papers``."""

import leaner_kernels.removed  # noqa: F401 - names what a removed command was replaced by
