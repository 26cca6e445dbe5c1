"""On the CPU a model that was swapped trains to the same bits, whether a monitor samples or not."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leaner_kernels.adapters import pytorch, timm
from leaner_kernels.adapters import transformers as leaner
from tests.adapters.test_timm import ONE_OF_EACH
from tests.adapters.test_transformers import BY_NAME
from tests.adapters.transformers_families import PADDING
from tests.kappa.test_monitor_bits import assert_sampling_changes_no_bit


class AttentionCall(nn.Module):
    """A module of attention on a batch (B, N, 12), between its tokens or from those of a text."""

    def __init__(self, attn: nn.Module, **given: Any) -> None:
        super().__init__()
        self.attn, self.given = attn, given

    def forward(self, x: Tensor) -> Tensor:
        keys = x.flip(1)[:, 2:] if self.given.get("across") else x
        given = {name: value for name, value in self.given.items() if name != "across"}
        return self.attn(x, keys, keys, **given)[0]


def multihead(dropout: float, **given: Any) -> nn.Module:
    attn = nn.MultiheadAttention(12, 3, dropout, batch_first=True)
    return AttentionCall(attn, **{"need_weights": False} | given)


class Sequences(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.whole = nn.Transformer(12, 2, 1, 1, 16, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x, x[:, 1:])


MASK = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
PYTORCHS: dict[str, Callable[[float], nn.Module]] = {
    "self": multihead,
    "across": partial(multihead, across=True),
    "masked": partial(multihead, attn_mask=MASK),
    "causal": partial(multihead, attn_mask=MASK.isnan().triu(1), is_causal=True),
    "weights": partial(multihead, need_weights=True),
    "encoder and decoder": Sequences,
}
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "dropout_rate")


def of_transformers(name: str, dropout: float) -> nn.Module:
    family = BY_NAME[name]
    known = vars(family.fresh().config)
    changed = {key: dropout for key in DROPOUTS if key in known}
    assert changed
    return family._replace(sizes=family.sizes | changed).build().train()


def models() -> Iterator[Any]:
    """Yield parameters: what makes a model, swaps it and makes its input."""
    for name, build in PYTORCHS.items():
        yield pytest.param(
            partial(build, 0.3), pytorch.use, lambda: torch.randn(6, 9, 12), id=f"torch-{name}"
        )
    for case in ONE_OF_EACH:
        # The attention of these that is swapped drops nothing.
        drops = {} if case.family in ("davit", "xcit") else {"attn_drop_rate": 0.3}
        yield pytest.param(
            partial(case.model, **drops),
            timm.use,
            lambda: torch.randn(4, 3, 32, 32),
            id=f"timm-{case}",
        )
    for name in ("bert", "llama", "gpt_oss"):
        yield pytest.param(
            partial(of_transformers, name, 0.3),
            leaner.use,
            partial(BY_NAME[name].inputs, torch.tensor(PADDING["right"])),
            id=f"transformers-{name}",
        )


@pytest.mark.parametrize("precision", ["float32", "autocast"])
@pytest.mark.parametrize(("build", "use", "inputs"), list(models()))
def test_a_monitor_that_samples_every_step_changes_no_bit_of_training(
    build: Any, use: Any, inputs: Any, precision: str
) -> None:
    torch.manual_seed(0)
    model, given = build().train(), inputs()
    use(model)
    assert assert_sampling_changes_no_bit(model, given, precision == "autocast")
