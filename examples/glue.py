"""Fine-tune a BERT that train/bert.py pre-trained on GLUE, with Hugging Face's Trainer.

    python examples/glue.py runs/crammed_bert_lean-text-1
    python examples/glue.py runs/bert_small-pydoc-1 --tasks cola rte --glue FOLDER

Prints the scores of the eight tasks beside those of Table 1 of "Leaner Transformers". The settings
are GLUE_sane of github.com/JonasGeiping/cramming. FOLDER/TASK/*.parquet as in nyu-mll/glue takes
the place of a download. κ of every layer goes to OUT/TASK/kappa.jsonl.
"""

import argparse
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

LENGTH = 128  # tokens of a sentence, or of both sentences of a pair, at most


class Task(NamedTuple):
    """A task of GLUE: its metric, its columns of text, and its classes (1: a number)."""

    metric: str
    columns: tuple[str, ...]
    classes: int = 2


PAIR = ("sentence1", "sentence2")
# In the order of the paper's table. WNLI is left out there, as elsewhere: its training and
# validation sentences contradict each other.
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
    """Return a score in percent; a correlation of equal predictions counts as 0."""
    if metric == "pearson":
        return 100 * float(np.corrcoef(predicted, labels)[0, 1]) if np.ptp(predicted) else 0.0
    kinds = {"f1": metrics.f1_score, "matthews": metrics.matthews_corrcoef}
    return 100 * float(kinds.get(metric, metrics.accuracy_score)(labels, predicted))


class Classifier(nn.Module):
    """A pre-trained encoder with a new head, as Trainer calls a model."""

    def __init__(self, encoder: nn.Module, arguments: dict, classes: int):
        super().__init__()
        own = arguments | {"num_classes": classes, "dropout": 0.1}
        self.bert = papers.constructor("bert")(**own)
        # The pooler and the head keep the values that they are made with.
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
    """Return the tokenizer of a run, which frames sentences with [CLS] and [SEP]."""
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
        return datasets.load_dataset(source, name)
    files: dict[str, list[str]] = {}
    for path in sorted(Path(source, name).glob("*.parquet")):
        files.setdefault(path.stem.partition("-")[0], []).append(str(path))
    if "train" not in files:
        raise SystemExit(f"glue.py: --glue must be a folder with {name}/train-*.parquet: {source}")
    return datasets.load_dataset("parquet", data_files=files)


def finetune(name: str, encoder: nn.Module, info: Info, options: argparse.Namespace) -> float:
    """Return the score of a task: of MNLI the mean over both of its validation sets."""
    task, tokenizer = TASKS[name], tokenizer_of(info.tokenizer or "")
    splits = splits_of(options.glue, name)
    length = min(LENGTH, info.arguments["sequence_length"])
    width = 16 if length % 16 == 0 else None  # batches of few widths, none past the model's

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
        learning_rate=4e-5,
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
    """Fine-tune on each task from the same weights, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="run folder, checkpoint or weights of train/bert.py")
    parser.add_argument("--glue", default="nyu-mll/glue", help="name on the Hub, or a folder")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS, metavar="TASK")
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/glue", help="folder of Trainer and of κ")
    options = parser.parse_args()
    datasets.disable_progress_bars()
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
    for variant in ("original", "lean"):
        rows[f"paper, {variant}"] = papers.ROWS["crammed_bert", variant].printed
    print(" ".join(f"{name:>7}" for name in (*TASKS, "glue")))
    for title, of in rows.items():
        cells = (f"{of[name]:7.1f}" if name in of else f"{'-':>7}" for name in (*TASKS, "glue"))
        print(*cells, f" {title}")


if __name__ == "__main__":
    main()
