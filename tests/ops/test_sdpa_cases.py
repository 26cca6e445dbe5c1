"""PyTorch's own cases of scaled_dot_product_attention: ours agrees, or is refused with a reason."""

import pytest
import torch
import torch.nn.functional as F

from leaner_kernels import attention
from tests.ops.sdpa_cases import (
    CASES,
    DTYPES,
    REFUSALS,
    Refusal,
    SdpaCase,
    assert_as_expected,
    expectations,
    make_inputs,
    run,
    with_statistics,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_agrees_with_pytorchs(case: SdpaCase) -> None:
    functions = attention, with_statistics
    if case.values == "nan query":
        # PyTorch's fused function on the CPU, which ours calls there, makes numbers of that nan.
        functions = (with_statistics,)
    for dtype in DTYPES:
        peers, exact = expectations(case, dtype)
        for function in functions:
            assert_as_expected(run(function, case, make_inputs(case, dtype)), peers, exact)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_a_refusal_is_one_line_and_pytorchs_is_known(refusal: Refusal) -> None:
    torch.manual_seed(0)
    arguments = refusal.arguments("cpu")
    with pytest.raises(ValueError, match=refusal.message) as caught:
        attention(**arguments)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, RuntimeError)  # as PyTorch's errors are
    if refusal.pytorch == "takes":
        F.scaled_dot_product_attention(**arguments)
    elif refusal.pytorch == "refuses":
        with pytest.raises((RuntimeError, TypeError)):
            F.scaled_dot_product_attention(**arguments)


def test_dropout_keeps_its_share_and_the_mean() -> None:
    """Of equal scores and values of one, an output is the share kept, scaled up."""
    torch.manual_seed(0)
    drop, keys = 0.22, 64
    query = torch.zeros(8, 4, 32, 8)
    key, value = torch.randn(8, 4, keys, 8), torch.ones(8, 4, keys, 8)
    out = with_statistics(query, key, value, None, drop, False, None, False)[..., 0]
    variance = drop / (1 - drop) / keys
    assert abs(out.mean() - 1) < 5 * (variance / out.numel()) ** 0.5
    assert out.var().item() == pytest.approx(variance, rel=0.2)
    kept = out * keys * (1 - drop)
    torch.testing.assert_close(kept, kept.round())
