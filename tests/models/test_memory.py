"""The predicted memory of a training step: against real tensors, and in how it grows."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from bench import memory as command
from leaner_kernels.nn import attention as attention_module
from leaner_kernels.ops.attention import op
from models import memory, papers
from models.memory import BLOCK, Ledger, Memory, Step, paper_batch_size, predict
from models.vit import VisionTransformer

SMALL = {"image_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_classes": 10}
vit = partial(VisionTransformer, **SMALL, heads=3, head_dim=16)
TINY = {
    "vit": SMALL,
    "xcit": SMALL | {"heads": 3, "head_dim": 16},
    "tnt": SMALL | {"patch_size": 16, "heads": 3, "inner_dim": 12, "inner_heads": 2},
    "volo": {"image_size": 32, "embed_dims": (32, 64), "depths": (1, 1), "heads": (2, 4)},
    "davit": {"image_size": 32, "embed_dims": (32, 64), "depths": (1, 1), "heads": (2, 4)},
    "gpt": {"vocab_size": 96, "sequence_length": 32, "embed_dim": 48, "depth": 2, "heads": 3},
    "bert": {"vocab_size": 96, "sequence_length": 32, "embed_dim": 48, "depth": 2, "heads": 3},
    "nystromformer": {"vocab_size": 96, "sequence_length": 32, "num_landmarks": 8, "depth": 1},
}


def rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def state_bytes(model: nn.Module) -> int:
    return sum(rounded(4 * p.numel()) for p in model.parameters())


def as_operators(qkv, *, key_lengths=None, dropout_p=0.0, is_causal=False, scale=None):
    """``attention_qkvpacked`` as on a GPU, but run by the operator's implementation for the CPU."""
    scale = qkv.shape[-1] ** -0.5
    op = torch.ops.leaner_kernels.attention_qkvpacked
    return op(qkv, key_lengths, None, dropout_p, is_causal, scale, -1, -1)[0]


def test_the_activations_are_what_autograd_really_saves(monkeypatch):
    monkeypatch.setattr(attention_module, "attention_qkvpacked", as_operators)
    model = vit()
    images, labels = torch.rand(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64)
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = nn.functional.cross_entropy(model(images), labels)
    for held in (*model.parameters(), images, labels):
        saved.pop(held.untyped_storage().data_ptr(), None)
    assert loss.isfinite()

    alive = predicted_after_forward(vit, 4, precision="fp32")
    # The loss is alive too, but not saved.
    assert alive.activations == sum(map(rounded, saved.values())) + rounded(4)
    assert alive.temporaries == alive.gradients == 0


def test_the_peak_is_that_of_pytorchs_own_tracker(monkeypatch):
    # It rounds on a GPU alone.
    monkeypatch.setattr(memory, "BLOCK", 1)
    predicted = predict(vit, 64, precision="fp32")
    monkeypatch.setattr(attention_module, "attention_qkvpacked", as_operators)
    with FakeTensorMode():
        model = vit()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        images, labels = torch.zeros(64, 3, 32, 32), torch.zeros(64, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, images, labels)
        with tracker:
            # The first step makes the moments.
            for _ in range(2):
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    # It also counts the optimizer's step counters, a float for each parameter.
    counters = 4 * len(list(model.parameters()))
    assert peak["Total"] == predicted.total + counters


def predicted_after_forward(
    build: Callable[[], nn.Module], batch_size: int, **options: Any
) -> Memory:
    """``predict``, stopped where the backward would start."""
    found = []

    class Stopped(Ledger):
        def name_all(self, kind):
            super().name_all(kind)
            found.append(Memory(**[*self._history()][-1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.memory.Ledger", Stopped)
        predict(build, batch_size, **options)
    return found[0]


@pytest.mark.parametrize("architecture", TINY)
def test_the_operators_of_a_gpu_run_in_every_architecture(architecture):
    ran = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.add(str(func))
            return func(*args, **(kwargs or {}))

    with Names():
        predict(partial(papers.constructor(architecture), **TINY[architecture]), 2)
    ours = {name for name in ran if name.startswith("leaner_kernels.")}
    assert any(name.endswith("_backward.default") for name in ours)
    # What PyTorch's equivalents on other devices would have run. The loss of a vocabulary has a
    # softmax of its own, and so has the matrix of landmarks, which PyTorch multiplies.
    landmarks = architecture == "nystromformer"
    assert any("bmm" in name for name in ran) == landmarks
    assert ("aten._softmax.default" in ran) == (architecture in ("gpt", "bert") or landmarks)
    assert not {name for name in ran if "scaled_dot_product" in name or "im2col" in name}


def test_weights_gradients_and_moments_take_sixteen_bytes_a_parameter():
    found = predict(partial(vit, embed_dim=384, depth=4), 1)
    state = state_bytes(vit(embed_dim=384, depth=4, device="meta"))
    assert found.parameters == state
    assert found.optimizer == 2 * state
    # The gradients are all there when the backward ends, at the latest.
    assert found.total >= 4 * state


@pytest.mark.parametrize(("precision", "item"), [("fp32", 4), ("bf16", 2)])
def test_a_recomputed_layer_keeps_its_input_alone(precision, item):
    options = {"precision": precision, "recompute": True}
    less, more = (predicted_after_forward(partial(vit, depth=d), 64, **options) for d in (3, 4))
    assert more.activations - less.activations == rounded(64 * 17 * 48 * item)


@pytest.mark.parametrize("architecture", ["xcit", "volo"])
def test_batch_norms_train_in_bfloat16(architecture):
    model = papers.constructor(architecture)(**TINY[architecture])
    step = Step(model, precision="bf16")
    images, labels = step.batch(2)
    step.loss(torch.rand_like(images), labels).backward()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(norm.running_mean.abs().sum() > 0 for norm in norms)
    assert all(p.grad.isfinite().all() for norm in norms for p in norm.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 1, "precision": "fp8"}, "precision must be bf16 or fp32, got 'fp8'"),
        ({"batch_size": 1, "eager": 3}, "eager must be 0, 1 or 2, got 3"),
        ({"batch_size": 1, "eager": 1, "recompute": True}, "eager must be 0 with recompute, got 1"),
        (
            {"batch_size": 1, "build": partial(vit, device="cpu")},
            "must leave the model on the meta",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        predict(**{"build": vit} | arguments)


def test_the_batch_of_the_paper_is_half_as_large_for_large_models_and_follows_the_task():
    rows = command.table_rows()
    large = {row for row in rows if paper_batch_size(row) == 64}
    assert large == {"vit_large", "deit_large", "xcit_large", "volo_d4", "davit_large"}
    tasks = {row.removeprefix("nystromformer_"): paper_batch_size(row) for row in rows[-5:]}
    assert tasks == {"listops": 32, "text": 32, "retrieval": 32, "image": 256, "pathfinder": 256}
    assert {paper_batch_size(row) for row in set(rows[:-5]) - large} == {128}


def test_the_lean_models_of_language_take_no_larger_share_than_the_paper_says():
    found = command.records(["crammed_bert", "gpt2_tinystories"], None, "bf16")
    ratios = [(r["ratio"], r["ratio_paper"]) for r in found if r["variant"] == "lean"]
    assert len(ratios) == 2
    assert all(ours < printed for ours, printed in ratios)


def vit_base(variant: str) -> Memory:
    return predict(partial(papers.build, "vit_base", variant), 128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--row", "vit_huge"], "--row: invalid choice: 'vit_huge' .*vit_base"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none")
@pytest.mark.parametrize("row", ["vit_base", "xcit_medium", "tnt_base", "volo_d3", "davit_base"])
def test_the_prediction_is_within_ten_percent_of_what_a_gpu_measures(row):
    build = partial(papers.build, row, "lean")
    predicted = predict(build, 64).total
    assert abs(predicted / command.measure(build, 64, "bf16") - 1) < 0.1


def test_eager_attention_keeps_its_scores():
    """One more (B, H, N, N) float32 tensor a layer, and nothing else, for one more that is kept."""
    one, two = (predict(vit, 4, precision="fp32", eager=kept) for kept in (1, 2))
    with torch.device("meta"):
        model = vit()
    heads, tokens = model.blocks[0].attn.num_heads, model.pos_embed.shape[1]
    scores = rounded(4 * heads * tokens**2 * 4)
    assert two.activations - one.activations == len(model.blocks) * scores
    assert one.total > predict(vit, 4, precision="fp32").total


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_eager_attention_is_the_same_attention_and_keeps_as_many_scores(is_packed, is_causal, kept):
    torch.manual_seed(0)
    qkv = torch.randn(2, 7, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([7, 3], dtype=torch.int32)
    separate = qkv.permute(2, 0, 3, 1, 4)
    saved = []

    def pack(tensor):
        if tensor.numel() == 2 * 4 * 7 * 7 and tensor.dtype == torch.float64:
            saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    def run():
        if is_packed:
            arguments = op.Packed.Arguments(qkv, lengths, None, 0.0, is_causal, 0.3)
            return op.compute_plain(op.Packed, None, arguments)[0]
        arguments = op.Dense.Arguments(*separate, None, lengths, None, 0.0, is_causal, 0.3)
        return op.compute_plain(op.Dense, None, arguments)[0]

    expected = run()
    with memory.written_out(kept), saved_tensors_hooks(pack, lambda tensor: tensor):
        found = run()
    assert len(set(saved)) == kept
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    grads = [torch.autograd.grad((out * weights).sum(), qkv)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads)


def test_eager_language_models_hold_all_logits():
    gpt = partial(papers.build, "gpt2_tinystories", "lean", depth=1)
    ours, eager = (predict(gpt, 128, precision="fp32", eager=kept).total for kept in (0, 1))
    assert eager - ours > 128 * 64 * 50257 * 4


def test_several_gpus_share_weights_and_moments_and_gather_blocks_whole():
    peak = predict(vit, 4, precision="bf16")
    with torch.device("meta"):
        model = vit()
    block, whole = (sum(p.numel() for p in m.parameters()) for m in (model.blocks[0], model))
    gathered = 2 * (whole - 2 * block) + 2 * 2 * block + 4 * block
    state = peak.parameters + peak.gradients + peak.optimizer
    assert memory.sharded(peak, model, 1, bf16=True) == peak.total
    for shards in (2, 8):
        found = memory.sharded(peak, model, shards, bf16=True)
        assert found == peak.total - state + -(-state // shards) + gathered


def test_a_model_of_a_billion_parameters_is_one_that_eight_gpus_hold():
    build = partial(papers.build, "vit_1b", "lean")
    peak = predict(build, 1, precision="bf16", recompute=True)
    model = build(device="meta")
    one, eight = (memory.sharded(peak, model, shards, bf16=True) for shards in (1, 8))
    assert one > 16e9 > 3e9 > eight
