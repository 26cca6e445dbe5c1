"""Pictures that are none: no other program is started, and each ends in one line."""

import io
import os
import re
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from PIL import Image

from tests.security.refusals import refusal
from tests.train.launch import ROOT
from train import vit

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n"
SIZES = "--model vit_digits --heads 2 --depth 1 --head-dim 8 --img-size 16 --patch-size 4"
QUICK = "--batch-size 2 --steps 1 --workers 0 --eval-every 0 --kappa-every 0"


@pytest.fixture
def ghostscript(tmp_path, monkeypatch):
    """A program of Ghostscript's name, and the file that it leaves when it is started."""
    canary = tmp_path / "was-started"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gs"
    program.write_text(f"#!/bin/sh\ntouch {canary}\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None, raising=False)
    return canary


def png(width, height, *, compressed=b""):
    """Return a PNG whose header claims a size."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))]
    parts += [(b"IDAT", compressed or zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )


def bombs():
    """Return files that claim to be far larger than they are, by their kind."""
    small = {}
    for kind in ("GIF", "BMP", "TIFF", "WEBP"):
        out = io.BytesIO()
        Image.new("RGB", (8, 8)).save(out, kind)
        small[kind] = out.getvalue()
    gif, bmp = bytearray(small["GIF"]), bytearray(small["BMP"])
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    bmp[18:26] = struct.pack("<ii", 60_000, 60_000)
    icon = io.BytesIO()
    Image.new("RGB", (32, 32)).save(icon, "ICO")
    return {
        "png": png(60_000, 60_000),
        "gif": bytes(gif),
        "bmp": bytes(bmp),
        "tif": small["TIFF"][:40],
        "webp": small["WEBP"][:30],
        "ppm": b"P5 60000 60000 255\n" + bytes(100),
        "jpg": icon.getvalue(),  # an icon is in none of the formats
    }


def of_pictures(folder, picture):
    """Return the words that train on a folder with copies of a picture."""
    for name in "ab":
        (folder / "classes" / name).mkdir(parents=True)
        for place in range(2):
            copy = folder / "classes" / name / f"{place}{picture.suffix}"
            copy.write_bytes(picture.read_bytes())
    words = [*SIZES.split(), *QUICK.split(), "--out", folder / "out"]
    return ["--data", folder / "classes", *words]


def test_postscript_starts_no_program(tmp_path, ghostscript, capsys):
    picture = tmp_path / "cat.png"
    picture.write_bytes(POSTSCRIPT)
    with Image.open(picture) as image, pytest.raises((OSError, subprocess.CalledProcessError)):
        image.load()  # what a decoder of all formats would do
    assert ghostscript.exists()
    ghostscript.unlink()
    assert "not a readable image" in refusal(capsys, vit.main, *of_pictures(tmp_path, picture))
    assert not ghostscript.exists()


@pytest.mark.parametrize("ending", ["png", "webp", "ppm", "jpg"])
def test_a_bomb_is_one_line(tmp_path, capsys, ending):
    picture = tmp_path / f"bomb.{ending}"
    picture.write_bytes(bombs()[ending])
    line = refusal(capsys, vit.main, *of_pictures(tmp_path, picture))
    assert "not a readable image" in line
    assert line.isprintable()


def test_no_other_place_opens_pictures():
    opens = re.compile(r"Image\.open\(|imread\(|decode_image\(|read_image\(")
    places = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("leaner_kernels", "train", "models", "bench", "studies", "examples")
        for path in Path(ROOT, folder).rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if opens.search(line)
    ]
    assert len(places) == 1, places
    assert "train/data/pictures.py" in places[0]
    assert "formats=FORMATS" in places[0]
