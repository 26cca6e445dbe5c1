"""What is refused in a call, for the page of compatibility; all refusals are tested elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leaner_kernels import attention
from leaner_kernels.adapters import transformers
from tests.ops.sdpa_cases import REFUSALS, Refusal

Record = Callable[..., None]
# PyTorch itself has the prototype of nested tensors warn.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
OURS_ALONE = [refusal for refusal in REFUSALS if refusal.pytorch == "takes"]


@pytest.mark.parametrize("refusal", OURS_ALONE, ids=lambda refusal: refusal.name)
def test_what_pytorchs_function_takes_and_ours_refuses(refusal: Refusal, record: Record) -> None:
    torch.manual_seed(0)
    arguments = refusal.arguments("cpu")
    F.scaled_dot_product_attention(**arguments)
    with pytest.raises(ValueError, match=refusal.message) as caught:
        attention(**arguments)
    record(
        library="sdpa",
        family="attention",
        architecture="scaled_dot_product_attention",
        case=refusal.name,
        dtype=str(arguments["query"].dtype).removeprefix("torch."),
        status="refused",
        note=str(caught.value),
    )


class AnyAttention(nn.Module):
    """Of whatever model passes the keyword."""


PACKED: dict[str, Any] = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 9]))
PACKED |= dict.fromkeys(("max_length_q", "max_length_k"), 9)
KEYWORDS = {
    "attention weights": {"output_attentions": True},
    "continuous batching": {"cache": "a paged cache"},
    "a keyword that is not known": {"temperature": 2.0},
    "sinks of varlen sequences": PACKED | {"s_aux": torch.zeros(4)},
    "position bias of varlen sequences": PACKED | {"position_bias": torch.zeros(1, 4, 9, 9)},
    "a window of varlen sequences": PACKED | {"sliding_window": 4},
}


@pytest.mark.parametrize("case", KEYWORDS)
def test_keywords_that_the_adapter_of_transformers_refuses(case: str, record: Record) -> None:
    query = torch.randn(1, 4, 9, 8)
    with pytest.raises(ValueError, match=r'which "leaner" does not support: .') as caught:
        transformers.attention_forward(AnyAttention(), query, query, query, None, **KEYWORDS[case])
    record(
        library="transformers",
        family="any",
        architecture="AnyAttention",
        case=case,
        status="refused",
        note=str(caught.value),
    )
