"""TNT's inner attention: 16 sub-patches in each of 196 patches of an image, heads 10 wide.

Its queries and keys share a projection and its values have one of their own, as in timm, or all
three are one (models/tnt.py). On every GPU both forms go to the kernels whose warps own several
whole heads, and are read where the projections left them.
"""

import pytest
import torch
from torch import Tensor

from bench.attention.cases import CASES
from leaner_kernels import attention
from leaner_kernels.ops import _tiles
from leaner_kernels.ops.attention import op
from models.tnt import InnerAttention
from tests.attention_cases import Inputs, peers_of, reference_results
from tests.error_budget import assert_within_budget

HEADS, TOKENS, DIM = 4, 16, 10
SEQUENCES = 128 * 196


def timms_views(qk: Tensor, v: Tensor) -> list[Tensor]:
    """Return q, k and v (B, H, N, D), views of (B, N, 2, H, D) and (B, N, H, D)."""
    return [*qk.permute(2, 0, 3, 1, 4).unbind(0), v.transpose(1, 2)]


def calls(device: str, sequences: int) -> dict[str, list[Tensor]]:
    torch.manual_seed(0)
    options = {"dtype": torch.float16, "device": device}
    qk = torch.randn(sequences, TOKENS, 2, HEADS, DIM, **options)
    v = torch.randn(sequences, TOKENS, HEADS, DIM, **options)
    qkv = torch.randn(sequences, TOKENS, 3, HEADS, DIM, **options)
    return {"timm": timms_views(qk, v), "packed": list(op.split_qkv(qkv))}


def test_the_benchmark_has_its_shape() -> None:
    case = next(case for case in CASES if case.name == "tnt")
    shape = case.batch, case.heads, case.tokens, case.head_dim
    assert shape == (SEQUENCES, HEADS, TOKENS, DIM)


@pytest.mark.parametrize("form", ["timm", "packed"])
@pytest.mark.parametrize("gpu", _tiles.ARCHITECTURES)
def test_a_program_owns_whole_sequences_on_every_gpu(
    gpu: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="launches are recorded in Triton")
    from bench.gpu_model.compile_ahead import recorded

    monkeypatch.setattr(_tiles, "capability", lambda _: gpu)
    inputs = calls("meta", SEQUENCES)[form]
    nothing, numbers = (None, None, None), (0.0, False, DIM**-0.5, 0.0, -1, -1)
    with recorded() as launches:
        out, max_log_sum = op.attend_cuda(op.Dense, False, *inputs, *nothing, *numbers)
        saved = *inputs, *nothing, out, max_log_sum
        op.differentiate_cuda(op.Dense, out, *saved, *numbers, False)
    assert [launch.name for launch in launches] == [
        "_warp_multihead_fwd_kernel",
        "_warp_multihead_bwd_kernel",
    ]
    for launch in launches:
        assert launch.kwargs["HEADS"] == HEADS  # a warp owns a whole sequence
        for name, tensor in zip(("q_view", "k_view", "v_view"), inputs, strict=True):
            assert launch.kwargs[name].ptr is tensor


@pytest.mark.parametrize("form", ["timm", "packed"])
def test_views_of_the_projections_give_what_copies_give(form: str) -> None:
    views = calls("cpu", 5)[form]
    copies = [t.contiguous() for t in views]
    inputs = Inputs(*copies, copies[0], None, None, None, torch.tensor([0]), 0.0, False, DIM**-0.5)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs, torch.float16)
    assert_within_budget(attention(*views), peers["out"], exact["out"])


def test_the_model_joins_its_projections_to_timms_numbers() -> None:
    torch.manual_seed(0)
    module = InnerAttention(HEADS * DIM, HEADS).double()
    x = torch.randn(3, TOKENS, HEADS * DIM, dtype=torch.float64)
    qk, v = module.qk(x).unflatten(-1, (2, HEADS, DIM)), module.v(x).unflatten(-1, (HEADS, DIM))
    expected = module.proj(attention(*timms_views(qk, v)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x), expected)
