"""Hostile inputs, drawn anew: python -m tests.security.campaign --count 500 --seed 1

Each input goes to a command as its users call it, in a process that is killed when it hangs. Counts
what was handled (one line and a status), skipped (the command went on), ended in a traceback, or
hung; the last two are printed with all that is needed to draw them again.
"""

import argparse
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import socket
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")
TIMEOUT = 60  # seconds
MEMORY = 24 << 30  # addresses of a process
ODD = [
    *(0, -1, 1, 3, 1.5, -0.0, 1e308, -1e308, float("nan"), float("inf"), 2**31, 2**62, 2**64),
    *(True, False, None, "", "x", "0", "\x1b[31mred", "a\nb", "\ud800", "\u202e", "κ" * 5000),
    *([], [0], ["x"], [[]], [None], [1e308, 1], {}, {"a": {}}, [{}], [2] * 1000),
]
FLAGS = ["0", "-1", "1", "1.5", "nan", "inf", "1e400", "9" * 400, "", " ", "x", "\x1b[31m", "1,2"]
FLAGS += [
    "../..",
    "/dev/null",
    "/dev/zero",
    "auto",
    "none",
    "split",
    "٣",
    "-",
    "--",
    "1e9",
    "65536",
]


class Case:
    """One hostile input.

    Args:
        rng: draws it.
        folder: of its own.
        good: what runs left before.
    """

    def __init__(self, rng: random.Random, folder: Path, good: Path):
        self.rng, self.folder, self.good = rng, folder, good

    def value(self) -> Any:
        """Return an odd value of JSON."""
        return self.rng.choice(ODD)

    def text(self, value: Any) -> str:
        """Return the JSON of a value, now and then of one that has none."""
        pick = self.rng.random()
        if pick < 0.06:
            return "[" * 100_000
        if pick < 0.1:
            return json.dumps(value)[:-1]
        if pick < 0.14:
            return "1" + "0" * 5000
        return json.dumps(value)

    def changed(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return an object of which some values are odd, missing or more."""
        value = dict(value)
        for _ in range(self.rng.randint(1, 3)):
            name = self.rng.choice([*value, "x"]) if value else "x"
            inner = value.get(name)
            if isinstance(inner, dict) and inner and self.rng.random() < 0.7:
                value[name] = self.changed(inner)
            elif self.rng.random() < 0.2:
                value.pop(name, None)
            else:
                value[name] = self.value()
        return value

    def blob(self) -> bytes:
        """Return bytes that are no file of any kind, or of another."""
        rng = self.rng
        kinds: list[Callable[[], bytes]] = [
            lambda: b"",
            lambda: rng.randbytes(rng.randint(1, 4000)),
            lambda: b"\0" * rng.randint(1, 100_000),
            lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n",
            lambda: "κ\ud800".encode("utf-16", "surrogatepass") * 50,
            lambda: b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.",
            lambda: b"PK\x03\x04" + rng.randbytes(200),
            lambda: b"\x1f\x8b" + rng.randbytes(200),
            lambda: b"\xff\xfe\x1b[31m" + b"[" * 1000,
            lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            lambda: self.picture()[: rng.randint(1, 60)],
        ]
        return rng.choice(kinds)()

    def picture(self) -> bytes:
        """Return a picture, hostile or not."""
        from PIL import Image

        rng, out = self.rng, io.BytesIO()
        kind = rng.choice(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "ICO", "PPM"])
        size = rng.choice([(8, 8), (32, 32), (1, 1), (1, 900), (64, 48)])
        mode = (
            rng.choice(["RGB", "L", "1", "P"]) if kind in ("PNG", "GIF", "BMP", "TIFF") else "RGB"
        )
        Image.new(mode, (32, 32) if kind == "ICO" else size, rng.randint(0, 1)).save(out, kind)
        data = bytearray(out.getvalue())
        pick = rng.random()
        if pick < 0.3:  # a bit of it flipped
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif pick < 0.5:
            del data[rng.randrange(len(data)) :]
        elif pick < 0.7 and kind == "PNG":  # another size in its header
            data[16:24] = struct.pack(">II", rng.choice([0, 1 << 16, 2**31 - 1]), 60_000)
        return bytes(data)

    def special(self, path: Path) -> None:
        """Put what is no regular file, or far too large, in the place of a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        pick = self.rng.randrange(8)
        if pick == 0:
            os.mkfifo(path)
        elif pick == 1:
            path.symlink_to(self.rng.choice(["/dev/zero", "/dev/urandom", "/dev/full"]))
        elif pick == 2:
            path.symlink_to(path.name)
        elif pick == 3:
            path.mkdir()
        elif pick == 4:
            os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 41)
        elif pick == 5:
            os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 34)
        elif pick == 6:
            with socket.socket(socket.AF_UNIX) as listener:
                here = os.getcwd()
                os.chdir(path.parent)
                with suppress(OSError):
                    listener.bind(path.name)
                os.chdir(here)
        else:
            path.symlink_to("/nowhere/at/all")

    def damage(self, path: Path) -> None:
        """Spoil a file, whatever it holds."""
        data = path.read_bytes() if path.is_file() else b""
        pick = self.rng.random()
        if pick < 0.3:
            self.special(path)
        elif pick < 0.5 or not data:
            path.write_bytes(self.blob())
        elif pick < 0.75:
            path.write_bytes(data[: self.rng.randrange(len(data))])
        else:
            spoilt = bytearray(data)
            for _ in range(self.rng.randint(1, 20)):
                spoilt[self.rng.randrange(len(spoilt))] = self.rng.randrange(256)
            path.write_bytes(spoilt)

    def copy(self, name: str) -> Path:
        """Return a copy of what a good run left."""
        target = self.folder / name
        if (self.good / name).is_dir():
            shutil.copytree(self.good / name, target)
        else:
            shutil.copy(self.good / name, target)
        return target

    def name(self) -> str:
        """Return the name of a file or class, odd or not."""
        return self.rng.choice(
            [
                "a",
                "b",
                "train",
                "val",
                "\x1b[31mred",
                "a\nb",
                "..x",
                "κ",
                "\udcff",
                "-x",
                "%s",
                "{}",
            ]
        )


def lines(case: Case, path: Path) -> None:
    """Spoil lines of a file of JSON lines."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for _ in range(case.rng.randint(1, 3)):
        place = case.rng.randrange(len(rows))
        row = rows[place] if isinstance(rows[place], dict) else {}
        rows[place] = case.changed(row) if case.rng.random() < 0.8 else case.value()
    path.write_text("".join(case.text(row) + "\n" for row in rows))


def run_files(case: Case, run: Path) -> None:
    """Spoil what a run left in its folder."""
    names = ["metrics.jsonl", "kappa.jsonl", "summary.json", "kappa_probe.jsonl", "alarms.jsonl"]
    for name in case.rng.sample(names, case.rng.randint(1, 3)):
        path = run / name
        if case.rng.random() < 0.2 or not path.is_file():
            case.damage(path)
        elif name == "summary.json":
            path.write_text(case.text(case.changed(json.loads(path.read_text()))))
        elif path.stat().st_size:
            lines(case, path)


def pages(case: Case) -> list[str]:
    run = case.copy("vit")
    run_files(case, run)
    out = str(case.folder / "out.html")
    return case.rng.choice(
        [
            ["leaner_kernels.monitor.page", str(run), "--out", out],
            ["leaner_kernels.monitor.page", str(run), str(case.good / "vit"), "--out", out],
            ["train.compare", str(run)],
            ["train.compare", str(run), str(case.good / "vit"), "--markdown", "--page", out],
            [
                *("leaner_kernels.monitor.plots", str(run / "kappa.jsonl"), "--over"),
                *(case.rng.choice(["steps", "layers", "heads"]), "--out", f"{out}.png"),
            ],
        ]
    )


def resumes(case: Case) -> list[str]:
    from tests.train.launch import manifest_of

    run = case.copy("vit")
    (run / "summary.json").unlink()
    checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
    if case.rng.random() < 0.5:
        for name in case.rng.sample(["metrics.jsonl", "kappa.jsonl"], case.rng.randint(1, 2)):
            lines(case, run / name)
    elif case.rng.random() < 0.6:  # a consistent forgery
        state = json.loads((checkpoint / "state.json").read_text())
        (checkpoint / "state.json").write_text(case.text(case.changed(state)))
        (checkpoint / "manifest.json").unlink()
        (checkpoint / "manifest.json").write_text(json.dumps(manifest_of(checkpoint)))
    else:
        case.damage(case.rng.choice(sorted(checkpoint.iterdir())))
    command = case.rng.choice(["resume", "resume", "export", "predict", "init"])
    if command == "export":
        return ["train.export", str(run), str(case.folder / "w.safetensors")]
    if command == "predict":
        return ["train.predict", str(run), str(case.good / "pictures" / "0.png"), "--last"]
    if command == "init":
        return ["train.vit", *TINY, "--init-from", str(run), "--dry-run", *new(case)]
    return ["train.vit", *TINY, "--out", str(run), "--resume", "auto"]


TINY = [
    *("--heads", "2", "--depth", "2", "--head-dim", "8", "--batch-size", "32", "--workers", "0"),
    *("--eval-every", "0", "--kappa-every", "2", "--steps", "4", "--ckpt-every", "2"),
]


def new(case: Case) -> list[str]:
    return ["--out", str(case.folder / "run")]


def weights(case: Case) -> list[str]:
    family = case.rng.choice(["vit", "gpt", "bert"])
    (case.folder / "w").mkdir()
    path = case.folder / "w" / "model.safetensors"
    shutil.copy(case.good / family / "model.safetensors", path)
    if case.rng.random() < 0.3:
        case.damage(path)
    else:
        raw = path.read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        head = json.loads(raw[8 : 8 + size])
        about = head.get("__metadata__", {})
        name = case.rng.choice(["settings", "about", "scores", "step", "tokenizer", "tensors"])
        if name == "tensors":
            head = case.changed(head)
        elif name == "step" or name not in about:
            about[name] = case.text(case.value())
        else:
            about[name] = case.text(case.changed(json.loads(about[name])))
        text = json.dumps(head).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    picture = str(case.good / "pictures" / "0.png")
    give = ["--prompt", "ab [MASK] cd", "--tokens", "3"] if family != "vit" else [picture]
    commands = [
        ["train.predict", str(path), *give],
        ["train.measure", str(path), "--samples", "2"],
        ["train.export", str(path), str(case.folder / "o.safetensors")],
        ["train.export", str(path), str(case.folder / "o"), "--format", "timm"],
    ]
    if family == "vit":
        commands += [
            ["train.vit", "--data", "digits", "--dry-run", "--pretrained", str(path), *new(case)],
            ["train.vit", *TINY, "--dry-run", "--init-from", str(path), *new(case)],
        ]
    return case.rng.choice(commands)


def pictures(case: Case) -> list[str]:
    rng, root = case.rng, case.folder / "data"
    for name in sorted({case.name(), "a", "b"}) if rng.random() < 0.8 else [case.name()]:
        folder = root / name
        folder.mkdir(parents=True)
        for place in range(rng.randint(1, 6)):
            path = (
                folder / f"{place}{rng.choice(['.png', '.jpg', '.gif', '.tif', '.webp', '.PNG'])}"
            )
            pick = rng.random()
            if pick < 0.2:
                case.special(path)
            else:
                path.write_bytes(case.blob() if pick < 0.4 else case.picture())
    if rng.random() < 0.3:
        rows = ["path,label", *(f"{p},{p.parent.name}" for p in sorted(root.rglob("*.*g")))]
        rows = [row if rng.random() < 0.9 else case.blob().decode("latin1") for row in rows]
        root = root / "labels.csv"
        root.write_text("\n".join(rows), "utf-8", "surrogateescape")
        if rng.random() < 0.2:
            case.special(root)
    command = rng.choice(["vit", "vit", "dry", "predict", "monitor", "measure"])
    if command == "predict":
        return ["train.predict", str(case.good / "vit"), str(root)]
    if command == "measure":
        return ["train.measure", str(case.good / "vit"), "--data", str(root)]
    if command == "monitor":
        random_weights = ["test_vit", "--random-weights", "--samples", "4"]
        return ["leaner_kernels.monitor", *random_weights, "--data", str(root)]
    how = ["--dry-run"] if command == "dry" else ["--kappa-every", "0"]
    sizes = "--model vit_digits --heads 2 --depth 1 --head-dim 8 --img-size 16 --patch-size 4"
    more = ["--steps", "1", "--batch-size", "2", "--workers", "0", "--eval-every", "0"]
    return ["train.vit", *sizes.split(), "--data", str(root), *more, *how, *new(case)]


def tables(case: Case) -> list[str]:
    import pyarrow as pa
    from pyarrow import parquet

    rng, root = case.rng, case.folder / "data"
    root.mkdir()
    good = [0, 1] * 4
    labels = rng.choice(
        [
            *(
                good,
                [0.5] * 8,
                [True] * 8,
                [2**62, *[0] * 7],
                [-1] * 8,
                [None] * 8,
                [*[0] * 7, None],
            ),
            *(["a", "b"] * 4, [[0]] * 8, [{"a": 1}] * 8, [b"\0"] * 8, [float("nan")] * 8),
            [2**20] * 8,
        ]
    )
    from datetime import datetime

    labels = [datetime(2020, 1, 1)] * 8 if rng.random() < 0.05 else labels
    column = rng.choice(["label", "label", "cls", "\x1b[31m", " label "])
    content = [case.picture() if rng.random() < 0.8 else case.blob() for _ in range(8)]
    paths = [rng.choice([None, "/dev/zero", "/etc/passwd", "x"]) for _ in range(8)]
    kind = rng.random()
    if kind < 0.6:
        rows = [{"bytes": rng.choice([c, c, c, None]), "path": p} for c, p in zip(content, paths)]
        struct_of = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        images = pa.array(rows, type=struct_of) if rng.random() < 0.9 else pa.array(labels)
        for split in ("train", "test"):
            table = pa.table({"image": images, column: pa.array(labels)})
            parquet.write_table(table, root / f"{split}-00000-of-00001.parquet")
    else:
        for split in ("train", "val"):
            with tarfile.open(root / f"{split}-0.tar", "w") as tar:
                for place, label in enumerate(labels):
                    for ending, data in (("png", content[place]), ("cls", str(label).encode())):
                        member = tarfile.TarInfo(f"{case.name() if place == 0 else place}.{ending}")
                        member.size = len(data)
                        with suppress(UnicodeEncodeError):
                            tar.addfile(member, io.BytesIO(data))
    pick = rng.random()
    if pick < 0.2:
        case.damage(rng.choice(sorted(root.iterdir())))
    elif pick < 0.3:
        (root / f"{root.name}.py").write_text("raise SystemExit('ran')")
    elif pick < 0.5:
        data = case.blob() if rng.random() < 0.5 else b"---\nconfigs:\n- [x\n---\n"
        (root / "README.md").write_bytes(data)
    elif pick < 0.6:
        info = case.rng.choice(["dataset_infos.json", "dataset_dict.json", "state.json"])
        (root / info).write_text(case.text(case.value()))
    where = rng.choice(["", "", "hf:", "hf-stream:"]) + str(root)
    more = ["--steps", "1", "--batch-size", "2", "--workers", "0", "--eval-every", "0", "--dry-run"]
    sizes = "--model vit_digits --heads 2 --depth 1 --head-dim 8 --img-size 16 --patch-size 4"
    return ["train.vit", "--data", where, *sizes.split(), *more, *new(case)]


def texts(case: Case) -> list[str]:
    rng, root = case.rng, case.folder / "text"
    root.mkdir()
    ending = rng.choice([".txt", ".txt", ".md", ".jsonl", ".json", ".csv", ".parquet", ".x"])
    for place in range(rng.randint(1, 3)):
        path = root / f"{place}{ending}"
        pick = rng.random()
        if pick < 0.25:
            case.special(path)
        elif pick < 0.5:
            path.write_bytes(case.blob())
        elif ending in (".jsonl", ".json"):
            rows = [case.changed({"text": "abcd" * 40}) for _ in range(20)]
            path.write_text("".join(case.text(row) + "\n" for row in rows))
        elif ending == ".csv":
            path.write_text("text,x\n" + "\n".join(str(case.value()) for _ in range(9)), "utf-8",
                            "replace")  # fmt: skip
        elif ending == ".parquet":
            import pyarrow as pa
            from pyarrow import parquet

            column = rng.choice([["ab"] * 9, [1] * 9, [None] * 9, [["a"]] * 9, [b"\xff"] * 9])
            parquet.write_table(pa.table({"text": column}), path)
        else:
            path.write_text("".join(rng.choice("abc \n\x1b\0") for _ in range(5000)))
    data = rng.choice([str(root), str(root / f"0{ending}"), f"hf:{root}"])
    script = rng.choice(["train.gpt", "train.bert"])
    sizes = "--depth 1 --context 16 --steps 1 --batch-size 2 --eval-every 0 --workers 0"
    how = ["--tokenizer", "bytes"]
    if rng.random() < 0.3:
        data, how = str(case.good / "letters.txt"), ["--tokenizer", str(tokenizer(case))]
    return [script, *sizes.split(), "--data", data, *how, "--dry-run", *new(case)]


def tokenizer(case: Case) -> Path:
    """Return a spoilt tokeniser."""
    folder = case.folder / "tokenizer"
    folder.mkdir()
    path = folder / "tokenizer.json"
    kind = case.rng.random()
    if kind < 0.6:
        kept = json.loads((case.good / "gpt" / "tokenizer.json").read_text())
        path.write_text(case.text(case.changed(kept)))
    elif kind < 0.8:
        for name in ("vocab.json", "merges.txt"):
            (folder / name).write_bytes(case.blob())
        case.damage(folder / case.rng.choice(["vocab.json", "merges.txt"]))
    else:
        case.damage(folder / case.rng.choice(["vocab.txt", "tokenizer.json"]))
    return case.rng.choice([path, folder])


def longrange(case: Case) -> list[str]:
    rng, root = case.rng, case.folder / "lra"
    task = rng.choice(["listops", "text", "retrieval", "pathfinder", "image"])
    if task == "listops":
        for split in ("train", "val", "test"):
            path = root / f"basic_{split}.tsv"
            path.parent.mkdir(exist_ok=True)
            path.write_text("Source\tTarget\n" + "[MAX 2 9 [MIN 4 7 ] 0 ]\t9\n" * 20)
    elif task == "text":
        for part in ("train/pos", "train/neg", "test/pos", "test/neg"):
            (root / part).mkdir(parents=True)
            for place in range(3):
                (root / part / f"{place}.txt").write_text("words of a review " * 20)
    elif task == "retrieval":
        for split in ("train", "eval", "test"):
            path = root / f"new_aan_pairs.{split}.tsv"
            path.parent.mkdir(exist_ok=True)
            path.write_text("1.0\t1\t2\tsome text\tother text\n" * 20)
    elif task == "pathfinder":
        (root / "metadata").mkdir(parents=True)
        (root / "imgs").mkdir()
        for place in range(10):
            (root / "imgs" / f"{place}.png").write_bytes(case.picture())
        (root / "metadata" / "0.npy").write_text(
            "".join(f"imgs {place}.png 0 {place % 2} x\n" for place in range(10))
        )
    else:
        (root / "cifar-10-batches-py").mkdir(parents=True)
        for name in ("data_batch_1", "test_batch", "batches.meta"):
            (root / "cifar-10-batches-py" / name).write_bytes(case.blob())
    files = sorted(path for path in root.rglob("*") if path.is_file())
    for path in rng.sample(files, rng.randint(0, 2)):
        case.damage(path)
    sizes = "--recipe paper --depth 1 --heads 2 --head-dim 8 --landmarks 4 --batch-size 2 --steps 1"
    return ["train.lra", "--task", task, "--data", str(root), *sizes.split(), "--dry-run",
            *new(case)]  # fmt: skip


def saved_models(case: Case) -> list[str]:
    name = case.rng.choice(["bert-hf", "vit-timm"])
    folder = case.copy(name)
    path = case.rng.choice(sorted(folder.iterdir()))
    if path.suffix == ".json" and case.rng.random() < 0.8:
        path.write_text(case.text(case.changed(json.loads(path.read_text()))))
    else:
        case.damage(path)
    data = case.good / ("letters.txt" if name == "bert-hf" else "pictures")
    return ["leaner_kernels.monitor", str(folder), "--data", str(data), "--samples", "2"]


def arguments(case: Case) -> list[str]:
    import dataclasses

    from train import bert, gpt, lra, vit

    rng = case.rng
    pick = rng.random()
    if pick < 0.15:
        names = ["--params", "--memory", "--flops", "--depths", "--heads", "--mlp-ratio", "--batch"]
        more = [word for name in rng.sample(names, 2) for word in (name, rng.choice(FLAGS))]
        base = "--model vit_base --params 20M --memory 4GB --batch 2 --no-kappa --show 1 --depths 2"
        return ["models.plan", *base.split(), *more, *new(case)]
    if pick < 0.3:
        command = rng.choice(
            ["train.predict", "train.measure", "train.export", "train.compare",
             "leaner_kernels.monitor", "leaner_kernels.monitor.page",
             "leaner_kernels.monitor.plots"]
        )  # fmt: skip
        words = [str(case.good / "vit"), *rng.choices(FLAGS, k=2), "--json", "--out", "--top"]
        return [command, *rng.sample(words, rng.randint(1, 4))]
    script, kind = rng.choice(
        [(vit, vit.ImageSettings), (gpt, gpt.GptSettings), (bert, bert.BertSettings),
         (lra, lra.LraSettings)]
    )  # fmt: skip
    fields = [f for f in dataclasses.fields(kind) if f.name not in ("seeds", "wandb", "resume")]
    words = ["--dry-run"]
    for field in rng.sample(fields, 2):
        words.append("--" + field.name.replace("_", "-"))
        if field.metadata["read"] is not None:
            words.append(rng.choice([*FLAGS, *(field.metadata.get("choices") or ())]))
    own = [] if "--out" in words else new(case)
    data = ["--data", str(case.good / "letters.txt")] if script in (gpt, bert) else []
    return [f"train.{script.__name__.rpartition('.')[2]}", *data, *own, *words]


def sentences(case: Case) -> list[str]:
    import pyarrow as pa
    from pyarrow import parquet

    rng, root = case.rng, case.folder / "glue" / "rte"
    root.mkdir(parents=True)
    for split in ("train", "validation"):
        table = {
            "sentence1": rng.choice([["ab"] * 8, ["ab"] * 8, [1] * 8, [None] * 8]),
            "sentence2": ["cd"] * 8,
            "label": rng.choice([[0, 1] * 4, [0.5] * 8, ["a"] * 8, [None] * 8, [[0]] * 8, [7] * 8]),
        }
        if rng.random() < 0.1:
            del table[rng.choice(list(table))]
        parquet.write_table(pa.table(table), root / f"{split}-0.parquet")
    if rng.random() < 0.4:
        case.damage(rng.choice(sorted(root.iterdir())))
    where = rng.choice(["", "", "hf:"]) + str(root.parent)
    return [
        *("train.bert", "--finetune", "glue", "--glue", where, "--tasks", "rte", "--epochs", "1"),
        *("--checkpoint", str(case.good / "bert"), "--batch-size", "4", "--dry-run", *new(case)),
    ]


KINDS = [
    *(pages, pages, resumes, resumes, weights, weights, pictures, pictures, tables, tables),
    *(texts, texts, longrange, saved_models, arguments, arguments, sentences),
]


def prepare(good: Path) -> None:
    """Train what is spoilt later, in a process of its own: autograd survives no fork."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    from tests.train.trained import bert, gpt, letters, train_text, train_vit, write_pictures

    train_vit(good / "vit", "--ckpt-every", "2", "--kappa-probe", "1")
    for script, name in ((gpt, "gpt"), (bert, "bert")):
        train_text(script, good / f"{name}-run", "--ckpt-every", "2")
        (good / f"{name}-run" / "run").rename(good / name)
    letters(good)
    write_pictures(good / "pictures")
    import timm
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel, BertTokenizer

    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=32, vocab_size=30)  # fmt: skip
    BertModel(config).save_pretrained(good / "bert-hf")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcd", *(f"##{c}" for c in "abcd")]
    (good / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(good / "vocab.txt")).save_pretrained(good / "bert-hf")
    (good / "vit-timm").mkdir()
    (good / "vit-timm" / "config.json").write_text(
        json.dumps({"architecture": "test_vit", "num_classes": 10, "pretrained_cfg": {}})
    )
    state = timm.create_model("test_vit", num_classes=10).state_dict()
    save_file(state, good / "vit-timm" / "model.safetensors")


def draw(seed: int, index: int, folder: Path, good: Path) -> list[str]:
    """Return a command, and make its input."""
    rng = random.Random(f"{seed} {index}")
    return rng.choice(KINDS)(Case(rng, folder, good))


def outcome(command: list[str]) -> tuple[str, str]:
    """Run a command in this process; return what became of it, and what it said last."""
    import importlib

    module, *words = command
    if module == "leaner_kernels.monitor":
        module = "leaner_kernels.monitor.__main__"
    out, said = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("default")
        try:
            status = importlib.import_module(module).main(words)
        except SystemExit as exit:
            status = exit.code
            if isinstance(status, str):
                said.write(status + "\n")
        except BaseException:
            return "traceback", traceback.format_exc()
    text = said.getvalue()
    if "Traceback" in text or "\x1b" in text:
        return "traceback", text
    last = (text.strip().splitlines() or [""])[-1]
    if status in (None, 0):
        return "skipped", last
    return ("handled", last) if last else ("traceback", f"status {status} and no line")


def serve(pipe: Any) -> None:
    """Run commands of a pipe, one after another, with as much memory as there is."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while (command := pipe.recv()) is not None:
        pipe.send(outcome(command))


class Server:
    """A process that runs commands, and another when one hangs."""

    def __init__(self):
        self.process: Any = None

    def run(self, command: list[str]) -> tuple[str, str]:
        """Return the outcome of a command, and what it said last."""
        if self.process is None:
            self.pipe, theirs = multiprocessing.Pipe()
            self.process = _SPAWN.Process(target=serve, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
        self.pipe.send(command)
        try:
            if self.pipe.poll(TIMEOUT):
                return self.pipe.recv()
            result = "hung", f"after {TIMEOUT} s"
        except (EOFError, ConnectionError):
            result = "traceback", "the process died"
        self.process.kill()
        self.process = None
        return result

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.pipe.send(None)
            self.process.join()


def campaign(count: int, seed: int, only: int | None = None) -> Counter[str]:
    """Draw inputs, run them and print what should not be; return the counts."""
    work = Path(tempfile.mkdtemp())
    os.environ |= {"XDG_CACHE_HOME": str(work / "cache"), "HF_HOME": str(work / "hf")}
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, os.getcwd())
    good = work / "good"
    good.mkdir()
    os.chdir(work)
    preparing = _SPAWN.Process(target=prepare, args=(good,))
    preparing.start()
    preparing.join()
    assert preparing.exitcode == 0
    counts: Counter[str] = Counter()
    server = Server()
    for index in range(count) if only is None else [only]:
        folder = work / str(index)
        folder.mkdir()
        command = draw(seed, index, folder, good)
        began = time.monotonic()
        found, said = server.run(command)
        counts[found] += 1
        if found in ("traceback", "hung") or only is not None:
            sys.stdout.write(f"{found}, {index}: {command}\n{said}\n")
        elif os.environ.get("VERBOSE"):
            seconds = time.monotonic() - began
            sys.stdout.write(f"{found:8} {index:4} {seconds:5.1f} s {command[0]}: {said[:150]!r}\n")
        sys.stdout.flush()
        shutil.rmtree(folder, ignore_errors=True)
    server.stop()
    shutil.rmtree(work, ignore_errors=True)
    return counts


def main() -> None:
    """Print the counts of a campaign."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=500, help="inputs (500)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (1)")
    parser.add_argument("--only", type=int, help="draw this one alone, and print what it said")
    args = parser.parse_args()
    counts = campaign(args.count, args.seed, args.only)
    kinds = ("handled", "skipped", "traceback", "hung")
    sys.stdout.write(", ".join(f"{counts[kind]} {kind}" for kind in kinds) + "\n")
    sys.exit(counts["traceback"] + counts["hung"] > 0)


if __name__ == "__main__":
    main()
