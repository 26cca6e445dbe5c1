"""How the library datasets is asked for files: by their names, and never as patterns."""

import glob
import os
from pathlib import Path
from typing import Any

from leaner_kernels.monitor.files import is_hidden


def builder_of(name: str, config: str | None = None) -> Any:
    """Return the library's builder of a data set of the Hub, or of a folder.

    In the path of a folder it would take brackets, stars and question marks for patterns, and of
    its files it would read those of system folders.
    """
    import datasets
    from datasets.data_files import get_data_patterns

    root = Path(name).resolve()
    if not root.is_dir():
        return datasets.load_dataset_builder(name, config)
    files, escaped = None, glob.escape(str(root))
    if escaped != str(root):
        splits = get_data_patterns(escaped)
        files = {str(s): [f"{escaped}/{form}" for form in forms] for s, forms in splits.items()}
    builder = datasets.load_dataset_builder(name, config, data_files=files)
    for paths in (builder.config.data_files or {}).values():
        paths[:] = [path for path in paths if not is_hidden(os.path.relpath(path, root))]
    return builder
