"""What a user's own pictures choose, how some are held out, and what is refused in one line."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torchvision.datasets.folder import make_dataset

from leaner_kernels.monitor.pictures import decode
from tests.train.hidden_files import write_hidden
from tests.train.image_files import photographs, write_parquet
from tests.train.launch import rows, whole_tensors
from train import vit
from train.config import flags
from train.data.images.files import open_folder
from train.data.images.sources import find_images
from train.data.images.survey import Survey, patch_of, split, survey
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


def test_few_pictures_choose_a_lean_small_model_and_the_plan_says_so(folder):
    task, settings = task_of("--data", folder)
    assert (settings.recipe, settings.model) == ("small", "xcit_tiny_lean")
    assert (settings.img_size, settings.patch_size, settings.in_chans) == (56, 8, 3)
    assert (settings.batch_size, settings.epochs) == (16, 100)
    assert (settings.mixup, settings.cutmix, settings.rand_augment) == (0, 0, "none")
    assert 5e5 < task.facts["params"] < 4e6
    assert max(task.facts["heads"]) > settings.depth
    said = task.facts["chosen_by_the_data"]
    assert said == (
        "of 59 pixels (median), in colour: --recipe small --model xcit_tiny_lean --batch-size 16 "
        "--epochs 100.0 --img-size 56 --patch-size 8 --in-chans 3"
    )
    assert task.facts["training images of a class"] == "7 (ant) to 17 (cow)"
    assert (len(task.train), len(task.held_out), task.facts["classes"]) == (34, 6, 3)


def test_what_the_user_gives_comes_first(folder):
    given = ["--img-size", 32, "--in-chans", 1, "--batch-size", 4, "--steps", 7, "--width", 64]
    task, settings = task_of("--data", folder, *given, "--lr", 0.5, "--mixup", 0.2)
    assert (settings.img_size, settings.patch_size, settings.in_chans) == (32, 4, 1)
    assert (settings.batch_size, settings.steps, settings.epochs) == (4, 7, None)
    assert (settings.lr, settings.mixup, task.facts["width"]) == (0.5, 0.2, 64)
    assert "--steps" not in task.facts["chosen_by_the_data"]
    model = task.build()
    assert (model.image_size, model.patch_size, model.in_chans) == (32, 4, 1)


def test_a_model_that_is_named_keeps_its_own_sizes(folder):
    task, settings = task_of("--data", folder, "--model", "vit_digits")
    assert (settings.img_size, settings.patch_size, settings.in_chans) == (8, 2, 1)
    assert task.facts["tokens"] == 16


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "davit_digits", "--patch-size", 4], "--patch-size is no size of davit_digits"),
        (["--model", "volo_digits", "--width", 64], "--width is no size of volo_digits"),
        (["--img-size", 57], r"multiple of patch_size 8, got 57"),
        (["--in-chans", 2], r"--in-chans must be 1 or 3 for image files, got 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(folder, args, message):
    args = ["--patch-size", 8, *args] if args[0] == "--img-size" else args
    with pytest.raises(ValueError, match=message):
        task_of("--data", folder, *args)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (Survey(120, 2000), ("small", "xcit_tiny_lean", 128, 16, 3, 16, 100)),
        (Survey(3, 8, grey=True), ("small", "xcit_tiny_lean", 56, 8, 1, 3, 100)),
        (Survey(500, 100), ("small", "xcit_tiny_lean", 96, 8, 3, 16, 24)),
        (Survey(1_000, 500, grey=True), ("small", "xcit_tiny_lean", 128, 16, 1, 32, 20)),
        (Survey(9_999, 28, grey=True), ("small", "xcit_tiny_lean", 56, 8, 1, 64, 20)),
        (Survey(10_000, 32), ("paper", "vit_base_lean", 32, 4, 3, 1024, 300)),
        (Survey(1_281_167, 375), ("paper", "vit_base_lean", 224, 16, 3, 1024, 300)),
        (Survey(1_281_167), ("paper", "vit_base_lean", 224, 16, 3, 1024, 300)),
    ],
)
def test_number_size_and_colours_choose(seen, expected):
    ours = vit.filled(settings_of("--data", "mine"), seen)
    names = "recipe", "model", "img_size", "patch_size", "in_chans", "batch_size", "epochs"
    assert tuple(getattr(ours, name) for name in names) == expected
    assert ours.img_size % ours.patch_size == 0
    assert patch_of(ours.img_size) == ours.patch_size


def test_small_can_be_requested_and_the_paper_too():
    many = Survey(50_000, 32)
    assert vit.filled(settings_of("--data", "mine", "--recipe", "small"), many).epochs == 20
    few = vit.filled(settings_of("--data", "mine", "--recipe", "deit"), Survey(120, 64))
    assert (few.model, few.batch_size, few.img_size) == ("deit_base_lean", 1024, 64)


def test_pictures_of_every_kind_are_surveyed_and_turned_upright(tmp_path):
    grey = Image.fromarray(np.arange(40 * 60, dtype=np.uint16).reshape(40, 60) * 20)
    kinds = {
        "deep.png": grey,
        "grey.jpg": Image.new("L", (50, 40), 9),
        "palette.png": Image.new("L", (40, 40), 9).convert("P"),
        "alpha.png": Image.new("LA", (40, 99)),
        "bits.tiff": Image.new("1", (40, 40)),
    }
    for kind in ("a", "b"):
        (tmp_path / kind).mkdir()
        for name, image in kinds.items():
            image.save(tmp_path / kind / name)
            with (tmp_path / kind / name).open("ab") as file:
                file.write(kind.encode())  # so that it is no copy with another label
    assert survey(find_images(str(tmp_path), 0).train) == Survey(8, 40, grey=True)
    Image.new("CMYK", (40, 40), (200, 20, 20, 20)).save(tmp_path / "a" / "ink.jpg")
    Image.new("RGBA", (40, 40), (200, 20, 20, 20)).save(tmp_path / "b" / "ink.webp")
    assert not survey(find_images(str(tmp_path), 0).train).grey


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
    found = [find_images(str(folder), seed) for seed in (0, 1)]
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


def test_a_class_of_one_picture_is_trained_on():
    class Source:
        labels = (0, 1, 1)

    train, held_out = split(Source())
    assert (sorted(train.labels), held_out.labels) == ([0, 1], [1])
    Source.labels = (0, 1)
    with pytest.raises(ValueError, match="two images of a class, to hold one out"):
        split(Source())


def test_nested_folders_and_other_names_of_the_held_out_ones(folder, tmp_path):
    nested = tmp_path / "nested"
    nested.mkdir()
    folder.rename(nested / "train")
    only = find_images(str(nested), 0)
    assert (len(only.train), len(only.held_out), only.made) == (34, 6, True)
    for seed, name in enumerate(("ant", "bee", "cow")):
        picture(nested / "validation" / name / "deeper" / "1.PNG", (9, 9), seed)
    both = find_images(str(nested), 0)
    assert (len(both.train), len(both.held_out), both.made) == (40, 3, False)


def test_what_is_no_picture_is_left_out_and_said(folder):
    (folder / "ant" / "notes.txt").write_text("no picture")
    (folder / "ant" / ".DS_Store").write_text("no picture")
    (folder / "ant" / "._00.png").write_text("no picture")
    (folder / ".ipynb_checkpoints").mkdir()
    task, _ = task_of("--data", folder)
    assert task.facts["left_out"] == f"1 of other endings: {folder / 'ant' / 'notes.txt'}"
    assert (len(task.train) + len(task.held_out), task.facts["classes"]) == (40, 3)


def test_pictures_come_in_the_order_of_torchvision(folder):
    for name in ("a/1", "B/c/1", "b c/1", "a b/1", "a/d/1", "99"):
        picture(folder / "bee" / f"{name}.png", (9, 9))
    (folder / "bee" / "a" / "around").symlink_to(folder / "bee")
    (folder / "bee" / "linked").symlink_to(folder / "ant")
    numbers = {name: number for number, name in enumerate(("ant", "bee", "cow"))}
    expected = make_dataset(folder, numbers, (".png",))
    expected = [sample for sample in expected if "around" not in sample[0]]
    samples = list(open_folder(folder)[0].samples())
    assert samples == expected
    assert len(samples) == 40 + 6 + 8


def test_hidden_files_and_folders_are_no_pictures_and_no_classes(folder):
    expected = list(find_images(str(folder), 0).train.source.samples())
    content = (folder / "ant" / "00.png").read_bytes()
    (folder / "ant" / "deep").mkdir()
    for inner in (folder, folder / "ant", folder / "ant" / "deep", folder / "cow"):
        write_hidden(inner, "99.png", content)
    sources = find_images(str(folder), 0)
    assert (list(sources.train.source.samples()), sources.left_out) == (expected, "")
    split = folder.rename(folder.parent / "train").parent
    write_hidden(split, "99.png", content)
    assert find_images(str(split), 0).names == ["ant", "bee", "cow"]


def test_hidden_archives_and_tables_are_no_data(folder):
    for name in ("._train-0.tar", ".train-0.parquet"):
        (folder / name).write_bytes(b"no archive")
    assert len(find_images(str(folder), 0).train) == 34


def test_rows_of_hidden_files_are_left_out_of_a_csv(folder):
    write_hidden(folder / "ant", "99.png", (folder / "ant" / "00.png").read_bytes())
    names = [path.relative_to(folder.parent) for path in folder.rglob("*") if path.is_file()]
    table = folder.parent / "labels.csv"
    table.write_text("path,label\n" + "".join(f"./{n},{n.parts[1]}\n" for n in names))
    train, held_out = sides(table)
    assert {Path(name) for name in train + held_out} == {*folder.glob("*/[0-9][0-9].png")}
    task, _ = task_of("--data", table)
    assert task.facts["left_out"].startswith("18 rows of hidden files: ./mine/ant/")
    table.write_text("path,label\nmine/ant/._99.png,a\n")
    with pytest.raises(ValueError, match=r"has rows of hidden files alone, such as mine/ant/\._99"):
        find_images(str(table), 0)


def test_a_csv_may_lie_above_or_in_a_hidden_folder(folder):
    cache = folder.parent / ".cache" / "tables"
    cache.mkdir(parents=True)
    shutil.copytree(folder, cache / "copy")
    paths = ["../../mine/ant/00.png", "copy/bee/00.png", cache / "copy" / "cow" / "00.png"]
    paths += [f"../../mine/ant/{i:02d}.png" for i in range(1, 8)]
    rows = [f"{path},{Path(path).parent.name}\n" for path in paths]
    (cache / "labels.csv").write_text("path,label\n" + "".join(rows))
    assert sum(map(len, sides(cache / "labels.csv"))) == 10
    assert sum(map(len, sides(cache / "copy"))) == 40


def test_a_csv_names_the_pictures(folder):
    names = sorted(path.relative_to(folder.parent) for path in folder.rglob("*.png"))
    lines = ["path,label", *(f"{name},{7 + i % 2}" for i, name in enumerate(names))]
    table = folder.parent / "labels.csv"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    sources = find_images(str(table), 0)
    assert (sources.classes, sources.names, sources.counts()) == (2, ["7", "8"], [17, 17])
    assert Path(sources.train.name(0)).is_file()
    task, settings = task_of("--data", table)
    assert (settings.recipe, len(task.train), len(task.held_out)) == ("small", 34, 6)


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("path,label", "{path}, {label}"),
        ("path,label", "{path},{label} "),
        ("path,label", "{path} ,{label}\t"),
        ("path,label", "{path},\u00a0{label}\u00a0"),
        ("path,label", '"{path}"," {label} "'),
        (" path , label ", "{path},{label}"),
        ('path,"label "', "{path},{label}"),
    ],
)
def test_spaces_are_no_part_of_labels_and_columns(folder, header, row):
    table = folder.parent / "labels.csv"
    lines = [header]
    for i, path in enumerate(sorted(folder.rglob("*.png"))):
        form = row if i % 2 else "{path},{label}"
        lines.append(form.format(path=path, label=path.parent.name))
    table.write_text("\n".join(lines))
    sources = find_images(str(table), 0)
    assert (sources.names, sources.counts()) == (["ant", "bee", "cow"], [7, 10, 17])
    table.write_text(f"path,label\n{folder / 'ant' / '00.png'},  \n")
    with pytest.raises(ValueError, match="has no label in line 2"):
        find_images(str(table), 0)


def test_the_name_of_a_picture_may_end_in_a_space(folder):
    for seed, name in enumerate(("ant", "bee")):
        picture(folder / name / "00.png", (9, 9), seed)
        (folder / name / "00.png").rename(folder / name / "00.png ")
    table = folder.parent / "labels.csv"
    rows = [f"mine/{n}/{i:02d}.png{' ' * (i == 0)},{n}\n" for n in ("ant", "bee") for i in (0, 1)]
    table.write_text("path,label\n" + "".join(rows))
    train, held_out = sides(table)
    assert sum(name.endswith("png ") for name in train + held_out) == 2


def sides(name: Path) -> tuple[list[str], list[str]]:
    """Return the images that are trained on and those held out, by their names."""
    sources = find_images(str(name), 0)
    train, held_out = (
        [part.name(index) for index in range(len(part))]
        for part in (sources.train, sources.held_out)
    )
    return train, held_out


def test_rows_of_one_file_are_on_one_side_of_the_split(folder):
    once = [(f"mine/{path.parent.name}/{path.name}", path) for path in folder.rglob("*.png")]
    (folder.parent / "again").symlink_to(folder)
    (folder.parent / "hard.png").hardlink_to(folder / "ant" / "00.png")
    names = [(name, path.parent.name) for name, path in once]
    names += [(name.replace("mine", "./mine/../mine"), label) for name, label in names]
    names += [(name.replace("mine", "again"), label) for name, label in names[:40]]
    names += [(str(path), path.parent.name) for _, path in once]
    names += [("hard.png", "ant")] * 3
    table = folder.parent / "labels.csv"
    table.write_text("path,label\n" + "".join(f"{name},{label}\n" for name, label in names))
    train, held_out = sides(table)
    train_files, held_out_files = (
        {Path(name).stat().st_ino for name in part} for part in (train, held_out)
    )
    assert not train_files & held_out_files
    assert (len(train_files), len(held_out_files)) == (34, 6)
    assert len(train) + len(held_out) == len(names)


def test_linked_files_of_a_folder_are_on_one_side_of_the_split(folder):
    for path in [*folder.rglob("*.png")]:
        path.with_stem(f"{path.stem}-again").symlink_to(path)
    train, held_out = ({Path(name).resolve() for name in part} for part in sides(folder))
    assert (len(train), len(held_out), train & held_out) == (34, 6, set())


def test_one_file_with_two_labels_is_refused(folder):
    table = folder.parent / "labels.csv"
    table.write_text(
        "path,label\nmine/ant/00.png,ant\nmine/bee/00.png,bee\nmine/./ant/00.png,cow\n"
    )
    message = r"has the labels ant and cow of one image, .*mine/ant/00\.png"
    with pytest.raises(ValueError, match=message):
        find_images(str(table), 0)
    (folder / "bee" / "linked.png").symlink_to(folder / "ant" / "00.png")
    message = r"labels ant and bee of one image, .*linked\.png, which is .*ant/00\.png too"
    with pytest.raises(ValueError, match=message):
        find_images(str(folder), 0)


def test_rows_of_one_image_in_a_table_are_on_one_side_of_the_split(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    images = photographs("train", 12)
    write_parquet(tmp_path / "set", "train", [*images, *images, *images], shards=1)
    sources = find_images(str(tmp_path / "set"), 0)
    train, held_out = (
        {part.read(index)[0] for index in range(len(part))}
        for part in (sources.train, sources.held_out)
    )
    assert (len(train), len(held_out), train & held_out) == (9, 3, set())


def test_classes_that_are_numbers_are_in_their_order(folder):
    names = [str(path) for path in sorted(folder.rglob("*.png"))]
    table = folder / "labels.csv"
    table.write_text("label,path\n" + "".join(f"{i % 11},{n}\n" for i, n in enumerate(names)))
    assert find_images(str(table), 0).names == [str(i) for i in range(11)]


def test_parquet_files_without_a_split_have_one_made(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    write_parquet(tmp_path / "set", "train", photographs("train", 12), shards=1)
    sources = find_images(str(tmp_path / "set"), 0)
    assert (len(sources.train), len(sources.held_out), sources.made) == (9, 3, True)
    assert sources.names == ["n01440764", "n02102040", "n03445777"]
    assert survey(sources.train).side == 24


def refused(argv: list[object], capsys) -> str:
    with pytest.raises(SystemExit, match="2"):
        vit.main([str(word) for word in argv])
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


LAYOUTS = {
    "nowhere": r"got '.*nowhere', which is not there",
    "notes.txt": r"got '.*notes\.txt', which is a file",
    "empty": r"empty must hold CLASS/IMAGE, found nothing in ",
    "flat": r"flat must hold CLASS/IMAGE, found 1 files and no folder in ",
    "hollow": r"hollow/b holds no image: fill or remove it",
    "single": r"single has one class, a: there is nothing to tell apart",
    "unreadable": r"--data holds .*unreadable/a/\d\.png, which is no readable image: ",
    "columns.csv": r"columns\.csv must have columns path and label, got file, class",
    "blank.csv": r"blank\.csv must have columns path and label, got ",
    "bare.csv": r"bare\.csv has no rows",
    "lost.csv": r"lost\.csv: .*lost\.png of line 2 is no file, nor are 1 more",
    "short.csv": r"short\.csv has no label in line 2",
    "binary.csv": r"binary\.csv is no CSV in UTF-8: ",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_data_that_cannot_be_used_is_one_line(tmp_path, capsys, name):
    for made in ("empty", "hollow/b"):
        (tmp_path / made).mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("")
    for made in ("flat/1.png", "hollow/a/1.png", "single/a/1.png", "single/a/2.png"):
        picture(tmp_path / made, (9, 9))
    for made in ("a/1", "a/2", "b/3", "b/4"):
        (tmp_path / "unreadable" / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "unreadable" / f"{made}.png").write_bytes(b"no picture")
    tables = {
        "columns": b"file,class\n1.png,a\n",
        "blank": b"",
        "bare": b"path,label\n",
        "lost": b"path,label\nlost.png,a\ngone.png,b\n",
        "short": b"path,label\nflat/1.png\n",
        "binary": b"path,label\n\xff\xfe,a\n",
    }
    for table, content in tables.items():
        (tmp_path / f"{table}.csv").write_bytes(content)
    said = refused(["--data", tmp_path / name, "--dry-run"], capsys)
    assert re.search(LAYOUTS[name], said), said


def test_a_dry_run_shows_what_the_data_chose_and_flags_that_repeat_it(folder, tmp_path, capsys):
    vit.main(["--data", str(folder), "--dry-run", "--out", str(tmp_path / "run")])
    said = capsys.readouterr().out
    for text in (
        "chosen by the data",
        "xcit_tiny_lean",
        "7 (ant) to 17 (cow)",
        "15% of each class",
    ):
        assert text in said
    (line,) = (line for line in said.splitlines() if "as flags: " in line)
    given = shlex.split(line.partition("as flags: ")[2])
    _, settings = task_of("--data", folder, "--out", tmp_path / "run")
    assert vit.make_task(settings_of(*given))[1] == settings
    assert not (tmp_path / "run").exists()


def test_rare_classes_weigh_more_when_balanced(folder):
    batch = torch.zeros(2, 3, 56, 56, dtype=torch.uint8), torch.tensor([0, 2])
    bias = torch.tensor([0.0, 0.0, 3.0])
    losses = {}
    for flag in ([], ["--balanced"]):
        task, _ = task_of("--data", folder, *flag, "--smoothing", 0)
        model = torch.nn.Module()
        model.forward = lambda pixels: bias.expand(len(pixels), 3)
        losses[bool(flag)] = task.loss(model, batch, 0).item()
    of_each = bias.logsumexp(0) - bias[[0, 2]]
    # Seven ants and seventeen cows to train on.
    weights = torch.tensor([1 / 7, 1 / 17])
    assert losses[False] == pytest.approx(of_each.mean().item())
    assert losses[True] == pytest.approx(((weights * of_each).sum() / weights.sum()).item())
    with pytest.raises(ValueError, match="--balanced needs --data whose classes can be counted"):
        task_of("--balanced")


def test_every_picture_weighs_alike_in_any_micro_batch_when_balanced(folder, tmp_path):
    args = [*TINY, "--data", folder, "--balanced", "--steps", 3, "--batch-size", 16]
    # A model without batch norms, whose statistics are of a micro-batch.
    args += ["--smoothing", 0, "--recipe", "small", "--model", "vit_base", "--dropout", 0]
    curves = []
    for accum in (1, 8):
        out = tmp_path / str(accum)
        vit.main([str(arg) for arg in [*args, "--accum", accum, "--out", out]])
        curves.append([row["loss"] for row in rows(out / "metrics.jsonl")])
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


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


def test_wrong_weights_are_one_line_before_anything_begins(folder, tmp_path, capsys):
    torch.save({"fc.weight": torch.ones(2)}, tmp_path / "w.pth")
    args = ["--data", folder, "--pretrained", tmp_path / "w.pth", "--out", tmp_path / "run"]
    said = refused(args, capsys)
    assert "w.pth has no cls_token, which the model has" in said
    assert not (tmp_path / "run").exists()
