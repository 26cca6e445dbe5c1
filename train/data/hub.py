"""Load Hugging Face data sets from the Hub, from a folder, or as saved to disk."""

from pathlib import Path
from typing import Any

from leaner_kernels.monitor.command_line import first_line


def load(name: str, config: str | None = None, *, shown: str | None = None, **options: Any) -> Any:
    """Return the splits of a data set by name, each a ``datasets.Dataset``.

    Args:
        name: on the Hub, or of a folder of its files or of what ``save_to_disk`` wrote.
        config: one of several that it has.
        shown: what messages call it.
        **options: of ``datasets.load_dataset``, such as ``data_files``.

    Raises:
        ValueError: no package ``datasets``, or no such data set.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"--data {name} needs the package datasets: pip install datasets"
        ) from None
    try:
        if (Path(name) / "dataset_dict.json").is_file():
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, config, **options)
    except Exception as error:  # it lets the errors of its readers through
        reason = first_line(error.__cause__ or error)
        raise ValueError(f"--data {shown or name} cannot be read: {reason}") from error


def held_out_split(splits: Any) -> str | None:
    """Return the name of the split to measure on: validation, or else test."""
    return next((name for name in ("validation", "valid", "val", "test") if name in splits), None)
