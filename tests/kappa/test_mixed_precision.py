"""Why kappa is captured inside the kernel: a hook on half-precision outputs reads rounding noise.

A ViT in bfloat16 sees a photograph. The truth is attention in float64 on the model's own queries,
keys and values; what differs is only how the heads' outputs are read off.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leaner_kernels import attention_with_stats, condition_number
from leaner_kernels.ops.attention import operators, reference
from models.vit import VisionTransformer


@pytest.fixture(scope="module")
def photograph() -> Tensor:
    """(1, 3, 224, 224) in [-1, 1]: one of the two photographs that come with scikit-learn."""
    load_sample_image = pytest.importorskip("sklearn.datasets").load_sample_image
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the array is read-only; nothing writes to it
        image = torch.from_numpy(load_sample_image("china.jpg")).permute(2, 0, 1)[None] / 127.5 - 1
    return F.interpolate(image, (224, 224), mode="bilinear", antialias=True)


def kappa(a: Tensor) -> float:
    """Return the condition number of (1, H, N, D) heads side by side."""
    found = condition_number(a.transpose(1, 2).flatten(2))
    assert found.resolved.all()
    return found.kappa.item()


@pytest.mark.parametrize("heads", [2, 4, 12, 16])
def test_captured_kappa_is_true_where_a_hook_is_not(heads: int, photograph: Tensor) -> None:
    torch.manual_seed(0)
    model = VisionTransformer(depth=4, heads=heads).bfloat16().eval()
    projected: list[Tensor] = []
    for block in model.blocks:
        block.attn.qkv.register_forward_hook(lambda _, inputs, out: projected.append(out))
    with torch.no_grad():
        model(photograph.bfloat16())
    sample = torch.zeros(1, dtype=torch.int32)
    for qkv in projected:
        q, k, v = operators.split_packed(qkv.view(1, 197, 3, heads, 64))
        p, _, _ = reference.probabilities(q.double(), k.double(), None, None, False, 0.125)
        truth = kappa(reference.attend(p, v.double(), None, 0.0))
        assert 1e4 < truth < 1e6

        stats = attention_with_stats(q, k, v, sample=sample)
        captured = condition_number(stats.heads).kappa.item()
        assert captured == pytest.approx(truth, rel=0.01)

        # The arithmetic of the kernels: P as a sum of two bfloat16 numbers, float32 sums.
        high = p.bfloat16().float()
        low = (p.float() - high).bfloat16().float()
        assert kappa(high @ v.float() + low @ v.float()) == pytest.approx(truth, rel=0.01)

        # With one bfloat16 number for P, even float32 outputs are off ...
        assert kappa(high @ v.float()) != pytest.approx(truth, rel=0.01)
        # ... and the output that a hook sees says little but how bfloat16 rounds.
        assert kappa(stats.out.float()) < truth / 2
