"""Name the extra of this package that brings a missing library."""

from collections.abc import Iterator
from contextlib import contextmanager

# The extra of pyproject.toml that brings a library.
EXTRAS = {"lightning": "lightning", "matplotlib": "plot", "timm": "timm", "transformers": "hf"}


@contextmanager
def needed_by(user: str) -> Iterator[None]:
    """Have imports of optional libraries raise an error that says how to install them.

    Args:
        user: what needs the libraries, the first words of the message.

    Raises:
        ModuleNotFoundError: a library of ``EXTRAS`` is missing; one line with ``pip install``.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library, _, _ = (error.name or "").partition(".")
        if library not in EXTRAS:
            raise
        line = f"{user} needs the package {library}: {how_to_install(library)}"
        raise ModuleNotFoundError(line, name=error.name) from None


def how_to_install(library: str) -> str:
    """Return the command that installs a library of ``EXTRAS``."""
    return f"pip install 'leaner-kernels[{EXTRAS[library]}]'"
