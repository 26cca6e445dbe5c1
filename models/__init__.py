"""The paper's architectures, one file each, and its rows as data in ``models.papers``."""
