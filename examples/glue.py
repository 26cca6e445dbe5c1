"""Fine-tune a BERT of train/bert.py on GLUE with Hugging Face's Trainer, and measure κ.

    python examples/glue.py                                     # offline: a small BERT, drawn tasks
    python examples/glue.py runs/crammed_bert_lean-text-1       # downloads GLUE
    python examples/glue.py runs/crammed_bert_lean-text-1 --tasks cola rte --glue FOLDER

With a run the script prints its scores on the eight tasks beside those of Table 1 of "Leaner
Transformers". The settings are GLUE_sane of github.com/JonasGeiping/cramming. FOLDER has
TASK/*.parquet as in nyu-mll/glue. Without a run the script first pre-trains a small BERT for 300
steps, then fine-tunes it on two drawn tasks in the format of GLUE; only a real GLUE gives scores to
compare. κ of every layer goes to OUT/TASK/kappa.jsonl.
"""

import argparse
import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    import accelerate  # noqa: F401 - Trainer needs it
    import datasets
    import numpy as np
    import tokenizers
    import transformers as hf
    from sklearn import metrics
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error.name} is missing: "
        "pip install '.[hf]' accelerate datasets scikit-learn --group train"
    ) from None

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from leaner_kernels.adapters.transformers_trainer import KappaCallback
from models import papers
from train.checkpoint.weights import Info
from train.export import load

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 128  # most tokens of a sentence, or of both sentences of a pair


class Task(NamedTuple):
    """A task of GLUE: its metric, its columns of text, and its number of classes.

    STS-B asks for a number instead of a class: ``classes`` is 1.
    """

    metric: str
    columns: tuple[str, ...]
    classes: int = 2


PAIR = ("sentence1", "sentence2")
# The order of the paper's table. Like most papers it leaves out WNLI, whose training and validation
# sentences contradict each other.
TASKS = {
    "mnli": Task("accuracy", ("premise", "hypothesis"), 3),
    "sst2": Task("accuracy", ("sentence",)),
    "stsb": Task("pearson", PAIR, 1),
    "rte": Task("accuracy", PAIR),
    "qnli": Task("accuracy", ("question", "sentence")),
    "qqp": Task("f1", ("question1", "question2")),
    "mrpc": Task("f1", PAIR),
    "cola": Task("matthews", ("sentence",)),
}


def score(metric: str, predicted: np.ndarray, labels: np.ndarray) -> float:
    """Return a score in percent; if all predictions are equal, their correlation counts as 0."""
    if metric == "pearson":
        return 100 * float(np.corrcoef(predicted, labels)[0, 1]) if np.ptp(predicted) else 0.0
    kinds = {"f1": metrics.f1_score, "matthews": metrics.matthews_corrcoef}
    return 100 * float(kinds.get(metric, metrics.accuracy_score)(labels, predicted))


class Classifier(nn.Module):
    """A pre-trained encoder with a new classifier, for Trainer to call."""

    def __init__(self, encoder: nn.Module, arguments: dict, classes: int):
        super().__init__()
        own = arguments | {"num_classes": classes, "dropout": 0.1}
        self.bert = papers.constructor("bert")(**own)
        # strict=False: the run has no pooler and no classifier, which keep their initial values.
        self.bert.load_state_dict(encoder.state_dict(), strict=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Return the mean loss and the logits (B, classes) of sentences (B, N)."""
        logits = self.bert(input_ids, attention_mask.sum(1).int()).float()
        if logits.shape[1] == 1:
            return {"loss": F.mse_loss(logits[:, 0], labels.float()), "logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def tokenizer_of(text: str) -> hf.PreTrainedTokenizerFast:
    """Return the tokenizer of a run, with [CLS] and [SEP] added around sentences."""
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "attention_mask"],
    )


def splits_of(source: str, name: str) -> dict[str, datasets.Dataset]:
    """Return the splits of a task by name: train, validation, ..."""
    if not Path(source).is_dir():
        try:
            return datasets.load_dataset(source, name)
        except (OSError, ValueError) as error:  # no network, no such data set
            line = " ".join(str(error).split())
            raise SystemExit(f"glue.py: {name} of {source} cannot be loaded: {line}") from None
    files: dict[str, list[str]] = {}
    for path in sorted(Path(source, name).glob("*.parquet")):
        files.setdefault(path.stem.partition("-")[0], []).append(str(path))
    if "train" not in files:
        raise SystemExit(f"glue.py: --glue must be a folder with {name}/train-*.parquet: {source}")
    return datasets.load_dataset("parquet", data_files=files)


def pretrain(folder: Path) -> str:
    """Pre-train a BERT of two layers on the bytes of Python's documentation, and return its run."""
    print("pre-training a small BERT for 300 steps", flush=True)
    command = [sys.executable, str(ROOT / "train" / "bert.py"), "--steps", "300"]
    command += ["--context", "64", "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(folder)


def draw_tasks(folder: Path) -> str:
    """Write CoLA and RTE of drawn sentences to a folder, as nyu-mll/glue has them."""
    generator = random.Random(0)
    animals, verbs = ["dog", "cat", "cow", "pig", "hen", "fox"], ["sees", "bites", "likes"]
    for split, count in (("train", 960), ("validation", 200)):
        cola, rte = [], []
        for row in range(count):
            first, second = generator.sample(animals, 2)
            sentence = f"the {first} {generator.choice(verbs)} a {second}"
            # CoLA asks whether a sentence is correct English: 1 if it is.
            wrong = " ".join(reversed(sentence.split()))
            cola.append({"sentence": wrong if row % 2 else sentence, "label": 1 - row % 2})
            # RTE asks whether the second sentence follows from the first: 0 if it does.
            other = generator.choice([name for name in animals if name not in (first, second)])
            follows = f"a {other if row % 2 else first} is here"
            rte.append({"sentence1": sentence, "sentence2": follows, "label": row % 2})
        for name, rows in (("cola", cola), ("rte", rte)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            path = folder / name / f"{split}-00000-of-00001.parquet"
            datasets.Dataset.from_list(rows).to_parquet(path)
    return str(folder)


def finetune(name: str, encoder: nn.Module, info: Info, options: argparse.Namespace) -> float:
    """Fine-tune on a task and return its score, for MNLI the mean over both validation sets."""
    task, tokenizer = TASKS[name], tokenizer_of(info.tokenizer or "")
    splits = splits_of(options.glue, name)
    length = min(LENGTH, info.arguments["sequence_length"])
    # Pad to multiples of 16, so that kernels meet few shapes, if the model's length is one.
    width = 16 if length % 16 == 0 else None

    def encode(rows: dict) -> dict:
        texts = (rows[column] for column in task.columns)
        return tokenizer(*texts, truncation=True, max_length=length) | {"labels": rows["label"]}

    held_out = sorted(split for split in splits if split.startswith("validation"))
    data = {
        split: splits[split].map(encode, batched=True, remove_columns=splits[split].column_names)
        for split in ("train", *held_out)
    }
    args = hf.TrainingArguments(
        str(Path(options.out, name)),
        num_train_epochs=options.epochs,
        learning_rate=options.lr,
        per_device_train_batch_size=16,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        adam_beta2=0.98,
        adam_epsilon=1e-6,
        weight_decay=0.0,
        max_grad_norm=0.0,
        seed=options.seed,
        bf16=torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        logging_strategy="epoch",
        disable_tqdm=True,
    )
    hf.set_seed(options.seed)
    trainer = hf.Trainer(
        Classifier(encoder, info.arguments, task.classes),
        args,
        train_dataset=data["train"],
        data_collator=hf.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=width),
        callbacks=[KappaCallback(every=100, page=False)],
    )
    trainer.train()
    scores = []
    for split in held_out:
        logits, labels, _ = trainer.predict(data[split])
        predicted = logits[:, 0] if task.classes == 1 else logits.argmax(1)
        scores.append(score(task.metric, predicted, labels))
    return sum(scores) / len(scores)


def main() -> None:
    """Fine-tune the same weights on each task, and print the table of scores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    text = "run folder, checkpoint or weights of train/bert.py; a small BERT is trained if omitted"
    parser.add_argument("run", nargs="?", help=text)
    text = "data set of the Hub, or a folder with TASK/*.parquet (nyu-mll/glue, or drawn)"
    parser.add_argument("--glue", help=text)
    text = f"tasks to fine-tune on (all: {', '.join(TASKS)})"
    parser.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK", help=text)
    parser.add_argument("--epochs", type=float, default=5, help="length of the fine-tuning (5)")
    text = "peak learning rate (4e-5; on drawn tasks 1e-3)"
    parser.add_argument("--lr", type=float, help=text)
    parser.add_argument("--seed", type=int, default=0, help="of the head and the batches (0)")
    text = "folder for κ and the Trainer's files (runs/glue)"
    parser.add_argument("--out", default="runs/glue", help=text)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    drawn = options.run is None and options.glue is None
    if drawn:
        options.glue = draw_tasks(Path(options.out, "drawn"))
        options.tasks, options.lr = options.tasks or ["rte", "cola"], options.lr or 1e-3
    if options.run is None:
        options.run = pretrain(Path(options.out, "bert"))
    options.glue, options.lr = options.glue or "nyu-mll/glue", options.lr or 4e-5
    options.tasks = options.tasks or [*TASKS]
    try:
        encoder, info = load(options.run)
    except ValueError as error:
        raise SystemExit(f"glue.py: {error}") from None
    if info.task != "masked token":
        raise SystemExit(f"glue.py: {options.run} is not a run of train/bert.py")
    own = {name: finetune(name, encoder, info, options) for name in options.tasks}
    if len(own) == len(TASKS):
        own["glue"] = sum(own.values()) / len(own)
    rows = {options.run: own}
    if drawn:
        rows = {f"{options.run}, drawn tasks (not GLUE)": own}
    else:
        for variant in ("original", "lean"):
            rows[f"paper, {variant}"] = papers.ROWS["crammed_bert", variant].printed
    print(" ".join(f"{name:>7}" for name in (*TASKS, "glue")))
    for title, of in rows.items():
        cells = (f"{of[name]:7.1f}" if name in of else f"{'-':>7}" for name in (*TASKS, "glue"))
        print(*cells, f" {title}")


if __name__ == "__main__":
    main()
