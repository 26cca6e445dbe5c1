"""Pixels of pictures are the same whichever library decodes them, and nearly as Pillow resizes."""

import io
from itertools import product

import numpy as np
import pytest
from PIL import Image, ImageFilter
from torchvision.transforms import InterpolationMode, v2

from tests.train.image_files import decode
from train import vit
from train.data.images import photographs
from train.data.images.augment import Augment, EvaluationView, Region, TrainingView, seeded
from train.data.images.photographs import pixels_of
from train.data.pictures import opened

BICUBIC = InterpolationMode.BICUBIC


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return edges and noise of several sizes, as photographs have them."""
    draw = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3))
    for size in (3, 11, 40, 150):
        noise = draw.normal(0, 25, (-(-height // size) + 1, -(-width // size) + 1, 3))
        pixels += noise.repeat(size, 0).repeat(size, 1)[:height, :width]
    return Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def turned(orientation: int) -> dict[str, Image.Exif]:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return {"exif": exif}


JPEGS = {
    "4:2:0": encoded(photograph(333, 251)),
    "4:4:4": encoded(photograph(333, 251), subsampling=0, quality=95),
    "4:2:2": encoded(photograph(250, 333), subsampling=1, quality=60),
    "progressive": encoded(photograph(333, 251), progressive=True),
    "grey": encoded(photograph(333, 251).convert("L")),
    "as RGB": encoded(photograph(333, 251), keep_rgb=True),
    "CMYK": encoded(photograph(333, 251).convert("CMYK")),
    "a few pixels": encoded(photograph(17, 9)),
    "bytes after the end": encoded(photograph(333, 251)) + b"more",
    "bytes between segments": encoded(photograph(333, 251)).replace(b"\xff\xc0", b"\0\xff\xc0", 1),
    **{f"orientation {n}": encoded(photograph(333, 251), **turned(n)) for n in range(2, 10)},
}


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("reduction", [1, 2, 4, 8])
def test_a_jpeg_has_the_same_pixels_whichever_library_decodes_it(monkeypatch, kind, reduction):
    simplejpeg = pytest.importorskip("simplejpeg")
    content, calls, decode_jpeg = JPEGS[kind], [], simplejpeg.decode_jpeg
    monkeypatch.setattr(
        simplejpeg, "decode_jpeg", lambda *a, **k: calls.append(k) or decode_jpeg(*a, **k)
    )
    width, height = decode(content, str).size
    regions = [
        Region(0, 0, height, width, reduction),
        Region(height // 3, width // 5, -(-height // 2), -(-width // 2), reduction),
    ]

    def cut() -> list[np.ndarray]:
        return [photographs._cut(opened(content, str), content, str, of) for of in regions]

    fast = cut()
    assert bool(calls) == (kind not in ("CMYK", "bytes between segments"))
    monkeypatch.setattr(photographs, "_simplejpeg", lambda: None)
    for one, other, region in zip(fast, cut(), regions):
        assert np.array_equal(one, other)
        for side, of in zip(one.shape, (region.height, region.width)):
            assert abs(side - of / reduction) <= 1


def test_what_is_reduced_is_the_same_part_of_the_picture():
    rows, cols = np.mgrid[0:1200, 0:1600] / 8
    picture = np.stack([rows, cols, 0 * rows], 2).astype(np.uint8)
    content = encoded(Image.fromarray(picture), quality=95, **turned(6))
    for reduction in (2, 4, 8):
        region = Region(477, 321, 800, 640, reduction)  # of 1600 rows, once upright
        part = photographs._cut(opened(content, str), content, str, region).astype(float)
        across, down = (1200 - 321 - np.arange(640)) / 8, (477 + np.arange(800)) / 8
        corners = part[:, [0, -1], 0].mean(0), part[[0, -1], :, 1].mean(1)
        # A pixel of the reduced picture is as wide as reduction / 8 grey levels.
        assert corners[0] == pytest.approx(across[[0, -1]], abs=1.5 + reduction / 8)
        assert corners[1] == pytest.approx(down[[0, -1]], abs=1.5 + reduction / 8)


def test_a_cut_off_jpeg_is_refused_and_named():
    content = JPEGS["4:2:0"][:-2000]
    with pytest.raises(
        ValueError, match=r"holds a.jpg, which is not a readable image: image file is"
    ):
        pixels_of(content, lambda: "a.jpg", EvaluationView(32))


def test_pixels_of_an_evaluation_are_within_a_grey_level_of_pillows():
    view = v2.Compose([v2.Resize(256, BICUBIC), v2.CenterCrop(224), v2.PILToTensor()])
    for size in ((500, 375), (375, 500), (90, 120), (2000, 1500)):
        content = encoded(photograph(*size))
        ours = pixels_of(content, str, EvaluationView(224)).int()
        error = (ours - view(decode(content, str)).int()).abs()
        assert ours.shape == (3, 224, 224)
        assert (error <= 1).float().mean() >= 0.999


def test_pixels_of_a_reduced_jpeg_are_on_average_within_a_grey_level_of_pillows():
    image = photograph(1600, 1200).filter(ImageFilter.GaussianBlur(3))  # as a lens does
    view, content, reductions = TrainingView(224, Augment(flip=False)), encoded(image), set()
    whole = decode(content, str)
    for seed in range(12):
        with seeded(seed):
            ours = pixels_of(content, str, view).int()
        with seeded(seed):
            top, left, high, wide, reduction = view.region(1600, 1200)
        crop = whole.crop((left, top, left + wide, top + high)).resize((224, 224), Image.BICUBIC)
        assert (ours - v2.functional.pil_to_tensor(crop).int()).float().abs().mean() < 1
        reductions.add(reduction)
    assert {2, 4} <= reductions


@pytest.mark.parametrize("recipe", ["small", "paper", "deit"])
@pytest.mark.parametrize(
    ("mode", "kind"), [("L", "PNG"), ("P", "PNG"), ("RGB", "PNG"), ("L", "JPEG"), ("RGB", "JPEG")]
)
def test_pictures_of_one_to_three_pixels_are_read_in_every_recipe(recipe, kind, mode):
    values = vit.PLAIN_IMAGES | vit.RECIPES[recipe]
    policy = None if values["rand_augment"] == "none" else values["rand_augment"]
    augment = Augment(policy, values["erase"], values["crop"], values["flip"])
    for width, height in product((1, 2, 3), repeat=2):
        file = io.BytesIO()
        photograph(width, height).convert(mode).save(file, kind)
        for seed in range(8):
            for view in (EvaluationView(32), TrainingView(32, augment)):
                with seeded(seed):
                    pixels = pixels_of(file.getvalue(), str, view)
                assert pixels.shape == (3, 32, 32)
