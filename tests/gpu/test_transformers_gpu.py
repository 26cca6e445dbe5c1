"""Models of transformers on a GPU in bfloat16: ours stays within the budget of theirs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

# Transformers may be missing, or too old for the adapter.
pytest.importorskip("leaner_kernels.adapters.transformers", exc_type=ImportError)
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from leaner_kernels.adapters import transformers as leaner
from tests.error_budget import assert_within_budget, by_layer

BATCH, TOKENS, VOCAB = 4, 200, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 32}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES)),
}
LENGTHS = {"unpadded": (200, 200, 200, 200), "padded": (200, 131, 64, 3)}


def made(family: str, case: str, device: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Weights that bfloat16 holds and large enough that scores differ, and right-padded texts."""
    torch.manual_seed(0)
    leaner.register()
    model = MODELS[family]().eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.1 * torch.randn_like(weights))
    mask = torch.arange(TOKENS) < torch.tensor(LENGTHS[case])[:, None]
    ids = torch.randint(VOCAB, (BATCH, TOKENS))
    inputs = {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
    return model.to(device, torch.bfloat16), inputs


def outcome(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The logits of tokens that are not padding, and the gradient of every weight."""
    model.zero_grad()
    inputs = {name: t.to(next(model.parameters()).device) for name, t in inputs.items()}
    logits = model(**inputs).logits[inputs["attention_mask"].bool()]
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * direction.to(logits)).sum().backward()
    grads = {n: w.grad for n, w in model.named_parameters() if w.grad is not None}
    return by_layer({"logits": logits} | grads)


def assert_as_exact(family: str, case: str, device: str) -> PreTrainedModel:
    model, inputs = made(family, case, device)
    found = {}
    for name in ("leaner", "sdpa", "eager"):
        run = copy.deepcopy(model)
        run.set_attn_implementation(name)
        found[name] = outcome(run, inputs)
    model.set_attn_implementation("sdpa")
    exact = outcome(copy.deepcopy(model).cpu().double(), inputs)
    for name, expected in exact.items():
        peers = found["sdpa"][name], found["eager"][name]
        assert_within_budget(found["leaner"][name], peers, expected)
    return model


def assert_a_cache_continues_as_exact(device: str) -> None:
    model, inputs = made("llama", "padded", device)
    # Texts that end, not start, together.
    ids, mask = (t.flip(1) for t in inputs.values())
    logits = {}
    with torch.no_grad():
        for name in ("leaner", "sdpa", "eager"):
            model.set_attn_implementation(name)
            cache = model(ids[:, :-1], mask[:, :-1], use_cache=True).past_key_values
            logits[name] = model(ids[:, -1:], mask, past_key_values=cache).logits[:, 0]
        model.set_attn_implementation("sdpa")
        exact = copy.deepcopy(model).cpu().double()(ids.cpu(), mask.cpu()).logits[:, -1]
    assert_within_budget(logits["leaner"], (logits["sdpa"], logits["eager"]), exact)


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("family", MODELS)
def test_a_model_stays_within_the_budget_of_its_own_attention(family, case):
    assert_as_exact(family, case, "cuda")


def test_a_cache_of_padded_texts_continues_within_the_budget():
    assert_a_cache_continues_as_exact("cuda")
