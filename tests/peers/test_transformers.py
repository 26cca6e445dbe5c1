"""``test_eager_matches_sdpa_inference`` of transformers, and what is near it, with ours for sdpa.

Its dtypes, sides of padding, with and without a mask, and attention weights; a batch of seven, of
which the last sequence lacks two tokens. Outputs are compared where there is no padding.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leaner_kernels.adapters import transformers as leaner
from tests.adapters.test_transformers import cast
from tests.adapters.transformers_families import FAMILIES, Family
from tests.adapters.transformers_swapped import FALLBACKS, PARTLY, REFUSED, SWAPPED
from tests.error_budget import assert_within_budget

SOURCE = "transformers"
DTYPES = torch.float16, torch.float32, torch.bfloat16
SHORT = "llama", "gpt_oss", "bert", "t5", "vit", "gemma2", "bloom"
SILENT = "the model does not tell its attention that weights are asked for: none, as with sdpa"
PADDED = {"left": [0] * 2 + [1] * 9, "right": [1] * 9 + [0] * 2}
EVERY = [*FAMILIES, *SWAPPED, *PARTLY, *FALLBACKS, *REFUSED]
pytestmark = pytest.mark.filterwarnings("ignore:.*falls back")


def marks(family: Family) -> list[Any]:
    return [] if family.name in SHORT else [pytest.mark.nightly]


def grid() -> Any:
    for family in EVERY:
        for dtype in DTYPES:
            # Models of pictures and of sound take no mask.
            texts = len(family.padded) > 1
            for side in PADDED if texts else ["left"]:
                # Eager attention of a row that sees nothing is NaN in float64: see its families.
                blind = side == "left" and family.exact == "eager" and side not in family.padded
                for masked in (True, False) if texts and not blind else (False,):
                    name = f"{family.name}-{str(dtype)[6:]}-{side}-{'mask' if masked else 'none'}"
                    yield pytest.param(family, dtype, side, masked, marks=marks(family), id=name)


def inputs_of(family: Family, side: str, masked: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return what goes in, and which tokens of the output count."""
    mask = torch.tensor([[1] * 11] * 6 + [PADDED[side]])
    inputs = family.inputs(mask)
    if "input_features" in inputs:  # made for a batch of two
        inputs["input_features"] = inputs["input_features"].repeat(4, 1, 1)[: len(mask)]
    counted = inputs.get("decoder_attention_mask", inputs.get("attention_mask", mask)).bool()
    if not masked:
        inputs = {name: t for name, t in inputs.items() if "attention_mask" not in name}
    return inputs, counted


def last_hidden_state(model: nn.Module, inputs: dict[str, Tensor], **more: Any) -> Tensor:
    found = model(**cast(inputs, model), output_hidden_states=True, **more)
    for name in ("decoder_hidden_states", "hidden_states", "vision_hidden_states"):
        if found.get(name) is not None:
            return found[name][-1]
    return found[0]


def implementations(family: Family) -> list[str]:
    """Return what transformers has for it beside ours; its exact one in float64 comes first."""
    return ["eager"] if family.exact == "eager" else ["sdpa", "eager"]


@torch.no_grad()
@pytest.mark.parametrize(("family", "dtype", "side", "masked"), grid())
def test_eager_and_sdpa_match_ours(
    family: Family, dtype: torch.dtype, side: str, masked: bool, settle: Any
) -> None:
    inputs, counted = inputs_of(family, side, masked)
    model = family.build().to(dtype)

    def run(name: str, dtype: torch.dtype = dtype) -> Tensor:
        other = copy.deepcopy(model).to(dtype)
        other.set_attn_implementation(name)
        out = last_hidden_state(other, inputs)
        return out[counted] if masked else out

    def ours() -> Tensor:
        swapped = copy.deepcopy(model)
        swapped.set_attn_implementation(family.exact)
        leaner.use(swapped)
        out = last_hidden_state(swapped, inputs)
        return out[counted] if masked else out

    def judge(found: Tensor) -> None:
        peers = tuple(run(name) for name in implementations(family))
        assert_within_budget(found, peers, run(implementations(family)[0], torch.float64))

    settle(SOURCE, "eager and sdpa match, inference", ours, judge)


@torch.no_grad()
@pytest.mark.parametrize("family", [pytest.param(f, marks=marks(f), id=f.name) for f in EVERY])
def test_attention_weights_are_eagers(family: Family, settle: Any) -> None:
    """``output_attentions=True``, in float32."""
    inputs, _ = inputs_of(family, "right", len(family.padded) > 1)
    model = family.build()
    model.set_attn_implementation("eager")
    expected = model(**inputs, output_attentions=True)
    names = [name for name in expected if "attentions" in name]

    def ours() -> Any:
        leaner.use(model)
        return model(**inputs, output_attentions=True)

    def judge(found: Any) -> None:
        assert [name for name in found if "attentions" in name] == names
        for name in names:
            torch.testing.assert_close(found[name], expected[name], msg=name)
        torch.testing.assert_close(found[0], expected[0])

    known = SILENT if family.name in ("gpt2", "opt", "stablelm") else ""
    settle(SOURCE, "attention weights are eager's", ours, judge, known)


PACKING = "llama", "mistral", "qwen3", "phi3", "gpt_neox", "qwen2", "olmo2", "granite", "starcoder2"


@torch.no_grad()
@pytest.mark.parametrize("family", [f for f in EVERY if f.name in PACKING], ids=lambda f: f.name)
def test_padding_matches_padding_free(family: Family, settle: Any) -> None:
    """Texts side by side, with the positions and starts that a collator of theirs gives."""
    inputs, counted = inputs_of(family, "right", masked=True)
    model, counts = family.build(), counted.sum(-1)
    model.set_attn_implementation("sdpa")
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    packed = {
        "input_ids": inputs["input_ids"][counted][None],
        "position_ids": torch.cat([torch.arange(n) for n in counts.tolist()])[None],
        **{f"cu_seq_lens_{each}": starts for each in "qk"},
        **{f"max_length_{each}": int(counts.max()) for each in "qk"},
        "use_cache": False,
    }

    def ours() -> Tensor:
        swapped = copy.deepcopy(model)
        leaner.use(swapped)
        return swapped(**packed).logits[0]

    def judge(found: Tensor) -> None:
        exact = copy.deepcopy(model).double()(**inputs).logits[counted]
        assert_within_budget(found, model(**inputs).logits[counted], exact)

    settle(SOURCE, "padding matches padding-free", ours, judge)
