"""What a user's own pictures choose, how some are held out, and what is refused in one line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors import safe_open
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torchvision.datasets.folder import make_dataset

from tests.train.image_files import decode, photographs, write_parquet
from tests.train.launch import rows, whole_tensors
from train import vit
from train.config import flags
from train.data.images.files import open_folder
from train.data.images.sources import find_images
from train.vit import ImageSettings

TINY = ["--heads", "2", "--depth", "1", "--kappa-every", "0", "--workers", "0", "--eval-every", "0"]


def picture(path: Path, shape: tuple[int, ...], seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path):
    """Three classes of 8, 12 and 20 coloured pictures of about 60 x 70 pixels."""
    for name, count in {"ant": 8, "bee": 12, "cow": 20}.items():
        for i in range(count):
            picture(tmp_path / "mine" / name / f"{i:02d}.png", (58 + i % 3, 70, 3), 100 * count + i)
    return tmp_path / "mine"


def settings_of(*args: object) -> ImageSettings:
    return flags.parse("vit.py", "", [str(arg) for arg in args], ImageSettings)


def task_of(*args: object) -> tuple:
    return vit.make_task(settings_of(*args))


def test_few_pictures_train_a_lean_small_model(folder):
    task, settings = task_of("--data", folder)
    assert (settings.recipe, settings.model) == ("small", "xcit_tiny_lean")
    assert (settings.img_size, settings.patch_size, settings.in_chans) == (128, 16, 3)
    assert (settings.batch_size, settings.epochs) == (16, 100)
    assert (settings.mixup, settings.cutmix, settings.rand_augment) == (0, 0, "none")
    assert 5e5 < task.facts["params"] < 4e6
    assert max(task.facts["heads"]) > settings.depth
    assert (len(task.train), len(task.held_out), task.facts["classes"]) == (34, 6, 3)


def test_what_the_user_gives_comes_first(folder):
    given = ["--img-size", 32, "--in-chans", 1, "--batch-size", 4, "--steps", 7, "--width", 64]
    task, settings = task_of("--data", folder, *given, "--lr", 0.5, "--mixup", 0.2)
    assert (settings.img_size, settings.patch_size, settings.in_chans) == (32, 16, 1)
    assert (settings.batch_size, settings.steps, settings.epochs) == (4, 7, None)
    assert (settings.lr, settings.mixup, task.facts["width"]) == (0.5, 0.2, 64)
    model = task.build()
    assert (model.image_size, model.patch_size, model.in_chans) == (32, 16, 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--model", "davit_digits", "--patch-size", 4],
            "--patch-size is not a size of davit_digits",
        ),
        (["--model", "volo_digits", "--width", 64], "--width is not a size of volo_digits"),
        (["--img-size", 57], r"multiple of patch_size 16, got 57"),
        (["--in-chans", 2], r"--in-chans must be 1 or 3 for image files, got 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(folder, args, message):
    with pytest.raises(ValueError, match=message):
        task_of("--data", folder, *args)


@pytest.mark.parametrize(
    ("count", "args", "expected"),
    [
        (120, [], ("small", "xcit_tiny_lean", 16, 100)),
        (400, [], ("small", "xcit_tiny_lean", 16, 30)),
        (9_999, [], ("small", "xcit_tiny_lean", 16, 20)),
        (9_999, ["--pretrained", "w.pth", "--model", "vit_base"], ("small", "vit_base", 16, 4)),
        (10_000, [], ("paper", "vit_base_lean", 1024, 300)),
        (10_000, ["--pretrained", "w.pth"], ("small", "xcit_tiny_lean", 16, 4)),
    ],
)
def test_the_number_of_pictures_chooses_the_recipe_and_its_length(count, args, expected):
    ours = vit.filled(settings_of("--data", "mine", *args), count)
    assert (ours.recipe, ours.model, ours.batch_size, ours.epochs) == expected


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_exif_data_say(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(tmp_path / "plain.png", (20, 30, 3))
    with Image.open(tmp_path / "plain.png") as plain:
        plain.save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as turned:
        expected = np.asarray(ImageOps.exif_transpose(turned))
    ours = decode((tmp_path / "turned.png").read_bytes(), str)
    assert np.array_equal(np.asarray(ours), expected)


def test_the_split_is_disjoint_stratified_and_the_same_whatever_the_seed(folder):
    found = [find_images(str(folder)) for _ in range(2)]
    parts = [
        [[part.name(i) for i in range(len(part))] for part in (s.train, s.held_out)] for s in found
    ]
    assert parts[0] == parts[1]
    train, held_out = map(set, parts[0])
    assert not train & held_out
    assert train | held_out == {str(path) for path in folder.rglob("*.png")}
    counts = [sum(Path(name).parent.name == c for name in held_out) for c in ("ant", "bee", "cow")]
    assert counts == [1, 2, 3]
    # By chance, not the last of each class.
    assert {Path(name).stem for name in held_out} != {"07", "10", "11", "17", "18", "19"}


def test_pictures_come_in_the_order_of_torchvision(folder):
    for name in ("a/1", "B/c/1", "b c/1", "a b/1", "a/d/1", "99"):
        picture(folder / "bee" / f"{name}.png", (9, 9))
    (folder / "bee" / "a" / "around").symlink_to(folder / "bee")
    (folder / "bee" / "linked").symlink_to(folder / "ant")
    numbers = {name: number for number, name in enumerate(("ant", "bee", "cow"))}
    expected = make_dataset(folder, numbers, (".png",))
    expected = [sample for sample in expected if "around" not in sample[0]]
    images = open_folder(folder)[0]
    samples = [(images.name(i), label) for i, label in enumerate(images.labels)]
    assert samples == expected
    assert len(samples) == 40 + 6 + 8


@pytest.mark.parametrize("part", ["val", "validation", "test"])
def test_a_folder_may_have_a_part_that_is_held_out(folder, part):
    train = folder.rename(folder.parent / "train")
    assert find_images(str(folder.parent)).made
    for name in ("ant", "bee", "cow"):
        picture(folder.parent / part / name / "1.png", (9, 9, 3))
    sources = find_images(str(folder.parent))
    assert (len(sources.train), len(sources.held_out), sources.made) == (40, 3, False)
    assert sources.train.name(0) == str(train / "ant" / "00.png")


def test_parquet_files_without_a_split_have_one_made(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    write_parquet(tmp_path / "set", "train", photographs("train", 12), shards=1)
    sources = find_images(str(tmp_path / "set"))
    assert (len(sources.train), len(sources.held_out), sources.made) == (9, 3, True)
    assert sources.names == ["n01440764", "n02102040", "n03445777"]


def refused(argv: list[object], capsys) -> str:
    with pytest.raises(SystemExit, match="2"):
        vit.main([str(word) for word in argv])
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


LAYOUTS = {
    "nowhere": r"got '.*nowhere', which does not exist",
    "empty": r"empty must contain CLASS/IMAGE, got no class folder",
    "hollow": r"hollow/b contains no images: add some or remove it",
    "others": r"same classes in train/ and val/, got b",
    "unclassed": r"val must contain CLASS/IMAGE",
    "single": r"single must have at least two classes, got one",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_data_that_cannot_be_used_is_one_line(tmp_path, capsys, name):
    for made in ("empty", "hollow/b", "unclassed/val"):
        (tmp_path / made).mkdir(parents=True)
    for made in ("hollow/a/1.png", "single/a/1.png", "single/a/2.png"):
        picture(tmp_path / made, (9, 9))
    for made in ("train/a/1.png", "train/b/1.png", "val/a/1.png", "val/c/1.png"):
        picture(tmp_path / "others" / made, (9, 9))
    for made in ("train/a/1.png", "train/b/1.png"):
        picture(tmp_path / "unclassed" / made, (9, 9))
    said = refused(["--data", tmp_path / name, "--dry-run"], capsys)
    assert re.search(LAYOUTS[name], said), said


def test_a_run_keeps_the_names_of_classes_and_resumes_on_the_same_pictures(folder, tmp_path):
    run = ["--data", folder, *TINY, "--width", 32, "--out", tmp_path / "run", "--resume", "auto"]
    for steps in (2, 3):
        vit.main([str(word) for word in [*run, "--steps", steps]])
    assert (tmp_path / "run" / "classes.txt").read_text() == "ant\nbee\ncow\n"
    held_out = (tmp_path / "run" / "held_out.txt").read_text().splitlines()
    assert len(held_out) == 6
    assert all(Path(name).is_file() for name in held_out)
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
    with pytest.raises(SystemExit, match="2"):
        vit.main([str(word) for word in [*run, "--steps", 4, "--img-size", 32, "--patch-size", 8]])


def test_a_run_begins_with_pretrained_weights_and_a_head_of_its_own(folder, tmp_path):
    torch.manual_seed(0)
    theirs = TimmViT(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=9)
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    sizes = ["--model", "vit_base", "--img-size", 16, "--patch-size", 8, "--width", 16]
    sizes += ["--head-dim", 8, "--mlp-ratio", 4]
    run = ["--data", folder, *TINY, *sizes, "--pretrained", tmp_path / "w.pth", "--lr", 0]
    vit.main([str(word) for word in [*run, "--steps", 1, "--out", tmp_path / "run"]])
    saved = whole_tensors(tmp_path / "run" / "checkpoints" / "step-00000001")["model"]
    for name, tensor in theirs.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(saved[name], tensor), name
    assert saved["head.weight"].shape == (3, 16)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["settings"]["recipe"] == "small"


def test_exported_weights_bring_the_sizes_of_their_model(folder, tmp_path):
    small = ["--data", folder, *TINY, "--width", 32, "--img-size", 16, "--steps", 1]
    vit.main([str(word) for word in [*small, "--out", tmp_path / "run"]])
    weights = tmp_path / "run" / "model_best.safetensors"
    task, settings = task_of("--data", folder, "--pretrained", weights)
    assert (settings.model, settings.width, settings.img_size) == ("xcit_tiny_lean", 32, 16)
    assert (settings.depth, settings.heads, settings.lr) == (1, [2], 5e-5)
    assert task.facts["pretrained"] == f"{weights}, but for nothing"


def renamed(weights: Path, classes: object, path: Path) -> Path:
    """Write weights as of a run whose classes had other names, or none."""
    with safe_open(weights, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    about = json.loads(metadata["about"]) | {"classes": classes}
    save_file(tensors, path, metadata=metadata | {"about": json.dumps(about)})
    return path


def test_a_classifier_follows_the_names_of_its_classes(folder, tmp_path):
    (folder / "cow").rename(folder / "vache é")
    small = ["--data", folder, *TINY, "--width", 32, "--img-size", 16, "--steps", 1]
    vit.main([str(word) for word in [*small, "--out", tmp_path / "run"]])
    weights = tmp_path / "run" / "model.safetensors"
    heads = {"head.weight", "head.bias"}

    def started(classes: object) -> tuple[str, dict]:
        path = renamed(weights, classes, tmp_path / "w.safetensors")
        task, _ = task_of("--data", folder, "--pretrained", path)
        return task.facts["pretrained"].removeprefix(f"{path}, but for "), task.start.keywords

    said, kept = started(["ant", "bee", "vache e\N{COMBINING ACUTE ACCENT}"])
    assert said == "nothing"
    said, moved = started(["bee", "vache é", "ant"])
    assert said == "nothing; classes reordered by their names"
    for name in heads:
        assert torch.equal(moved["tensors"][name], kept["tensors"][name][[2, 0, 1]])
    said, fresh = started(["ant", "bee", "wasp"])
    assert said == "head.weight, head.bias; its classes are ant, bee, wasp"
    assert not heads & fresh["tensors"].keys()
    said, unnamed = started([])
    assert said == "nothing; classes by their numbers, because these weights name none"
    assert heads <= unnamed["tensors"].keys()
    with pytest.raises(ValueError, match=r"its classes must be a list of names, got \[1, 2, 3\]"):
        started([1, 2, 3])


def test_weights_with_other_rows_than_names_are_refused(folder, tmp_path):
    small = ["--data", folder, *TINY, "--width", 32, "--img-size", 16, "--steps", 1]
    vit.main([str(word) for word in [*small, "--out", tmp_path / "run"]])
    (folder / "dog").mkdir()
    picture(folder / "dog" / "1.png", (9, 9, 3))
    path = renamed(
        tmp_path / "run" / "model.safetensors",
        ["ant", "bee", "cow", "dog"],
        tmp_path / "w.safetensors",
    )
    message = r"must have a row for each of its 4 classes, got shape \(3,"
    with pytest.raises(ValueError, match=message):
        task_of("--data", folder, "--pretrained", path)
