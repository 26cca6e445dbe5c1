"""Cache trained tokenisers, tokenised text and generated sequences.

The processes of a machine, and machines that share the folder, wait for each other: the first
writes a file under another name and then renames it, and the others find it complete.
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def build_once(name: str, make: Callable[[Path], None], folder: Path | None = None) -> Path:
    """Return the file or folder of this name, which is created at most once.

    Args:
        name: unique to what it holds.
        make: writes the file, or makes the folder, at the path that it is given.
        folder: where it is kept; ``leaner_kernels`` in the user's cache when omitted.

    Raises:
        OSError: the cache cannot be written.
    """
    if folder is None:
        kept = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = Path(kept) / "leaner_kernels"
    path = folder / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends, for any reason
        if not path.exists():
            partial = path.with_name(f".{name}.partial")
            _remove(partial)
            try:
                make(partial)
                partial.rename(path)
            finally:
                _remove(partial)
    return path


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
