"""Files and folders that systems leave beside data, and that no reader may read."""

from pathlib import Path

# Of files beside the data, and of folders with copies of them.
FILES = ("._{}", ".{}.swp", ".hidden{}", "Thumbs.db", "desktop.ini", ".DS_Store")
FOLDERS = (".ipynb_checkpoints", ".@__thumb", "@eaDir", "__MACOSX", "$RECYCLE.BIN", "lost+found")


def write_hidden(folder: Path, name: str, content: bytes) -> None:
    """Write what systems do beside the file ``folder / name``, in its folder and below."""
    for form in FILES:
        (folder / form.format(name)).write_bytes(content)
    for inner in FOLDERS:
        (folder / inner / "deeper").mkdir(parents=True)
        for copy in (folder / inner / name, folder / inner / "deeper" / name):
            copy.write_bytes(content)
