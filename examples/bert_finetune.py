"""Fine-tune a BERT with Hugging Face's Trainer and our attention, and log κ of every layer.

    python examples/bert_finetune.py
    python examples/bert_finetune.py bert-base-uncased --epochs 2 --lr 5e-5

The task is to tell which package of Python's standard library a docstring comes from. With the name
of a checkpoint its weights are downloaded; otherwise the model is a tiny BERT with random weights.
"""

import argparse
import ast
import json
import random
import sysconfig
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn

try:
    import accelerate  # noqa: F401 - Trainer needs it
    import transformers as hf
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install '.[hf]' accelerate") from None

from leaner_kernels.adapters import transformers as leaner
from leaner_kernels.adapters.transformers_trainer import KappaCallback
from leaner_kernels.monitor.table import table

PACKAGES = ["asyncio", "email", "importlib", "logging"]  # the classes


def docstrings() -> list[tuple[str, int]]:
    """Return (docstring, class) of every class and function in the packages, shuffled."""
    texts = {}
    for label, package in enumerate(PACKAGES):
        for path in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                    texts[ast.get_docstring(node)] = label
    return random.Random(0).sample(sorted(texts.items()), len(texts))


def pretrained(name: str) -> tuple[nn.Module, hf.PreTrainedTokenizerBase] | tuple[None, None]:
    """Return a pretrained encoder with a new classifier and its tokenizer, or None without them."""
    try:
        tokenizer = hf.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = hf.AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=len(PACKAGES), trust_remote_code=False
        )
    except OSError as error:
        print(f"no pretrained weights ({type(error).__name__}): the weights are random")
        return None, None
    return model, tokenizer


def main() -> None:
    """Compare our attention with PyTorch's, fine-tune, and print κ before and after."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", nargs="?", help="name or folder of a pretrained encoder")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the data (6)")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (0.002)")
    options = parser.parse_args()
    hf.set_seed(0)
    texts = docstrings()
    model, tokenizer = pretrained(options.checkpoint) if options.checkpoint else (None, None)
    if model is None:
        tokenizer = hf.BertTokenizer().train_new_from_iterator([text for text, _ in texts], 2000)
        config = hf.BertConfig(
            vocab_size=len(tokenizer),
            num_labels=len(PACKAGES),
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=8,
            intermediate_size=256,
        )
        model = hf.AutoModelForSequenceClassification.from_config(config)
    encode = partial(tokenizer, truncation=True, max_length=32)
    data = [{**encode(text), "label": label} for text, label in texts]

    batch = encode([text for text, _ in texts[:8]], padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = model.eval()(**batch).logits
        leaner.use(model)  # the one line that swaps the attention
        ours = model(**batch).logits
    print(f"largest difference of the logits: {(ours - theirs).abs().max():.1e}")

    with tempfile.TemporaryDirectory() as folder:
        args = hf.TrainingArguments(
            folder,
            num_train_epochs=options.epochs,
            learning_rate=options.lr,
            warmup_steps=0.1,
            per_device_train_batch_size=32,
            logging_strategy="epoch",
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = hf.Trainer(
            model,
            args,
            train_dataset=data[200:],
            eval_dataset=data[:200],
            processing_class=tokenizer,
            callbacks=[KappaCallback(every=25, page=False)],  # page=True also writes page.html
            compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(1) == p.label_ids).mean()},
        )
        trainer.train()
        rows = [json.loads(line) for line in Path(folder, "kappa.jsonl").read_text().splitlines()]
    for step in (rows[0]["step"], rows[-1]["step"]):
        print(f"step {step}:\n{table(row for row in rows if row['step'] == step)}")


if __name__ == "__main__":
    main()
