"""The same text as other programs and systems write it."""

from pathlib import Path

TEXT = "one line\nanother\n\nlast"
WRITTEN = {
    "LF": TEXT.encode(),
    "CRLF": TEXT.replace("\n", "\r\n").encode(),
    "CR": TEXT.replace("\n", "\r").encode(),
    "BOM": TEXT.encode("utf-8-sig"),
    "BOM and CRLF": TEXT.replace("\n", "\r\n").encode("utf-8-sig"),
}


def write_all(folder: Path) -> dict[str, Path]:
    """Write the text each way; return its paths."""
    paths = {name: folder / f"{name}.txt" for name in WRITTEN}
    for name, path in paths.items():
        path.write_bytes(WRITTEN[name])
    return paths
