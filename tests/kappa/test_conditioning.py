"""Clipped logits and penalised conditioning: the arithmetic, compiled, sharded and refused."""

import copy
import math
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from leaner_kernels.conditioning import (
    ConditioningPenalty,
    QKClip,
    conditioning_penalty,
)
from leaner_kernels.nn import ManyHeadAttention, NystromAttention


def attention_with(heads: int = 3, scale: float = 3.0) -> ManyHeadAttention:
    """Small attention whose heads have logits of very different size."""
    torch.manual_seed(0)
    module = ManyHeadAttention(6, num_heads=heads, head_dim=4)
    with torch.no_grad():
        rows = module.qkv.weight.unflatten(0, (3, heads, 4))
        rows[:2] *= scale * torch.arange(1, heads + 1)[:, None, None] / heads
        module.qkv.bias.normal_()
    return module


def batch(seed: int = 1) -> Tensor:
    return torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(seed))


def peaks_of(module: ManyHeadAttention, x: Tensor) -> Tensor:
    q, k, _ = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return (q @ k.mT).amax(dim=(0, 2, 3)).detach() * module.head_dim**-0.5


# QK-Clip.


def test_clipped_heads_meet_the_threshold_and_others_stay_as_they_are() -> None:
    module, x = attention_with(), batch()
    before, weights = peaks_of(module, x), module.qkv.weight.detach().clone()
    threshold = before.median().item() * 0.9  # two of the three heads are past it
    clip = QKClip(module, threshold)
    module(x)
    torch.testing.assert_close(clip.step()[""], before)
    torch.testing.assert_close(peaks_of(module, x), before.clamp(max=threshold))
    old, new = (w.unflatten(0, (3, 3, 4)) for w in (weights, module.qkv.weight))
    changed = (old != new).flatten(2).any(dim=-1)
    clipped = before > threshold
    assert clipped.sum() == 2
    assert torch.equal(changed, torch.stack([clipped, clipped, torch.zeros_like(clipped)]))
    # Queries and keys share the burden.
    torch.testing.assert_close((new / old)[0], (new / old)[1])


def test_logits_through_landmarks_are_clipped_too() -> None:
    torch.manual_seed(0)
    module, x = NystromAttention(6, num_heads=3, head_dim=4, num_landmarks=2), torch.randn(5, 8, 6)
    clip = QKClip(module, 1e9)
    module(x)
    before = clip.step()[""]
    threshold = before.median().item() * 0.9
    clip = QKClip(module, threshold)
    for expected in (before, before.clamp(max=threshold)):
        module(x)
        torch.testing.assert_close(clip.step()[""], expected)


def test_every_forward_since_the_last_step_counts_and_none_before() -> None:
    module = attention_with()
    clip = QKClip(module, threshold=1e9)
    for seed in (1, 2):
        module(batch(seed))
    largest = peaks_of(module, batch(1)).maximum(peaks_of(module, batch(2)))
    torch.testing.assert_close(clip.step()[""], largest)
    assert clip.step()[""].tolist() == [-math.inf] * 3


def test_clipping_never_asks_the_device_for_a_value() -> None:
    # A fake tensor has no value to give: .item() and `if` raise.
    with FakeTensorMode():
        module = ManyHeadAttention(6, num_heads=3, head_dim=4, qkv_bias=False)
        clip = QKClip(module, threshold=1.0)
        module.peak_logit = torch.empty(3)
        assert clip.step()[""].shape == (3,)


def test_a_compiled_model_is_clipped() -> None:
    module, x = attention_with(), batch()
    before = peaks_of(module, x)
    assert before.max() > 1
    clip = QKClip(module, threshold=1.0)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compiled(x).sum().backward()
        clip.step()
    torch.testing.assert_close(peaks_of(module, x), before.clamp(max=1))


# Conditioning penalty.


def matrix(sigma: Tensor, rows: int, cols: int) -> Tensor:
    g = torch.Generator().manual_seed(3)
    u, v = (torch.randn(n, len(sigma), generator=g, dtype=torch.float64) for n in (rows, cols))
    return torch.linalg.qr(u)[0] * sigma @ torch.linalg.qr(v)[0].mT


@pytest.mark.parametrize(("rows", "cols"), [(5, 9), (9, 5)])
def test_the_penalties_of_a_known_spectrum(rows: int, cols: int) -> None:
    sigma = torch.tensor([30.0, 10, 5, 2, 1], dtype=torch.float64)
    a = 1e-4 * matrix(sigma, rows, cols)
    log_am_gm = conditioning_penalty(a)
    lam = sigma.square()
    expected = (lam.mean().log() - lam.log().mean()) / 2
    assert log_am_gm.item() == pytest.approx(expected.item(), rel=1e-5)
    assert math.log(30) <= math.log(2) + 5 * log_am_gm
    assert conditioning_penalty(matrix(torch.ones(5, dtype=torch.float64), rows, cols)) < 1e-12


@pytest.mark.parametrize("shape", [(2, 4, 7), (7, 4), (1, 3)])
def test_gradients_are_those_of_finite_differences(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    a = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(conditioning_penalty, a)


def test_degenerate_matrices_have_finite_gradients() -> None:
    torch.manual_seed(0)
    deficient = torch.randn(6, 2) @ torch.randn(2, 9)
    repeated = torch.eye(6, 9)
    zero = torch.zeros(6, 9)
    broken = torch.randn(6, 9).index_fill(0, torch.tensor(2), math.nan)
    a = torch.stack([deficient, repeated, zero, broken]).requires_grad_()
    penalty = conditioning_penalty(a)
    assert penalty.dtype == torch.float64
    assert penalty[0] > 3
    assert penalty[1:3].tolist() == pytest.approx([0, 0], abs=1e-12)
    assert penalty[3].isnan()
    penalty.nansum().backward()
    assert a.grad.dtype == torch.float32
    assert a.grad.isfinite().all()
    assert a.grad[0].norm() < 1e4
    assert a.grad[2].count_nonzero() == 0


@pytest.mark.parametrize("causal", [False, True])
def test_the_loss_is_the_penalty_of_the_captured_heads(causal: bool) -> None:
    module, x = attention_with(), batch()
    penalty = ConditioningPenalty(module, weight=0.5, samples=2)
    module(x, is_causal=causal)
    loss = penalty.loss()
    module.capture_samples = 5
    module(x, is_causal=causal)
    expected = 0.5 * conditioning_penalty(module.captured.heads[:2]).mean().float()
    torch.testing.assert_close(loss, expected)
    with pytest.raises(RuntimeError, match="ran no forward with gradients"):
        penalty.loss() + penalty.loss()


def test_half_precision_models_are_penalised_in_float32() -> None:
    module, x = attention_with(), batch()
    penalty = ConditioningPenalty(module, weight=1.0)
    seen: list[Tensor] = []
    module.qkv.register_forward_hook(lambda _m, _x, out: seen.append(out))
    with torch.autocast("cpu", torch.bfloat16):
        module(x)
        loss = penalty.loss()
    q, k, v = seen[0][:1].double().unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
    assert seen[0].dtype == torch.bfloat16
    assert loss.item() == pytest.approx(conditioning_penalty(heads).item(), rel=1e-4)


def gradients(module: nn.Module, run: Callable[[Tensor], Tensor], penalty: ConditioningPenalty):
    module.zero_grad()
    (run(batch()).square().sum() + penalty.loss()).backward()
    return [p.grad.clone() for p in module.parameters()]


def test_recomputation_and_compilation_change_no_gradient() -> None:
    module = attention_with()
    penalty = ConditioningPenalty(module, weight=10.0)
    expected = gradients(module, module, penalty)
    runs = {
        "recomputed": partial(checkpoint, module, use_reentrant=False),
        "compiled": torch.compile(module, fullgraph=True, backend="aot_eager"),
    }
    for name, run in runs.items():
        for actual, other in zip(gradients(module, run, penalty), expected, strict=True):
            torch.testing.assert_close(actual, other, msg=lambda m, name=name: f"{name}: {m}")
        with pytest.raises(RuntimeError, match="ran no forward"):  # nothing outlives the backward
            penalty.loss()
    penalty.close()
    plain = gradients(module, module, type("Nothing", (), {"loss": lambda _self: 0})())
    assert (plain[0] - expected[0]).abs().max() > 0.1


def test_evaluation_and_closing_leave_no_trace() -> None:
    module = attention_with()
    penalty = ConditioningPenalty(module)
    with torch.no_grad():
        module(batch())
    with pytest.raises(RuntimeError, match="no forward"):
        penalty.loss()
    penalty.close()
    module(batch(), attn_mask=torch.zeros(7, 7))
    with pytest.raises(RuntimeError, match="no forward"):
        penalty.loss()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: QKClip(attention_with(), threshold=0), "above 0 and finite, got 0"),
        (lambda: QKClip(nn.Linear(3, 3)), "Linear has no attention module"),
        (lambda: conditioning_penalty(torch.ones(3)), r"got \(3,\)"),
        (lambda: conditioning_penalty(torch.ones(2, 2).half()), r"got torch\.float16"),
        (lambda: ConditioningPenalty(nn.Linear(3, 3)), "Linear has no attention module"),
        (lambda: ConditioningPenalty(attention_with(), weight=-1), "weight .* got -1"),
        (lambda: ConditioningPenalty(attention_with(), samples=0), "samples .* got 0"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["attn_mask", "key_lengths"])
def test_the_penalty_refuses_what_it_would_get_wrong(name: str) -> None:
    module = attention_with()
    ConditioningPenalty(module)
    value = {"attn_mask": torch.zeros(7, 7), "key_lengths": torch.full((5,), 3, dtype=torch.int32)}
    with pytest.raises(ValueError, match=f"does not support {name}"):
        module(batch(), **{name: value[name]})


# Copies, and projections that are shared or computed.


def test_a_copied_model_feeds_no_penalty() -> None:
    model, x = attention_with(), batch()
    penalty = ConditioningPenalty(model, weight=1.0)
    copied = copy.deepcopy(model)
    model(x)
    copied(2 * x)
    copied(x, attn_mask=torch.zeros(7, 7))
    penalty.loss().backward()
    assert model.qkv.weight.grad.abs().max() > 0
    assert copied.qkv.weight.grad is None


def test_a_projection_that_two_modules_share_is_refused() -> None:
    model = nn.Sequential(attention_with(), attention_with())
    model[1].qkv = model[0].qkv
    with pytest.raises(ValueError, match="a qkv projection that two modules share"):
        QKClip(model)


class Quantised(Tensor):
    """What a quantised weight is: the numbers in memory are not those that it stands for."""


def quantise(projection: nn.Linear, part: str) -> None:
    data = getattr(projection, part).detach().as_subclass(Quantised)
    projection.register_parameter(part, nn.Parameter(data, requires_grad=False))


def to_integers(projection: nn.Linear, part: str) -> None:
    data = getattr(projection, part).detach().to(torch.int8)
    projection.register_parameter(part, nn.Parameter(data, requires_grad=False))


NOT_SCALED: dict[str, tuple[Callable[[nn.Linear, str], object], str]] = {
    "pruned": (partial(prune.l1_unstructured, amount=0.1), "is computed from other tensors"),
    "quantised": (quantise, r"a Quantised of torch\.float32"),
    "integers": (to_integers, r"a Parameter of torch\.int8"),
}


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("name", NOT_SCALED)
def test_what_scaling_in_place_would_not_reach_is_refused_at_once_and_later(
    name: str, part: str
) -> None:
    change, reason = NOT_SCALED[name]
    message = rf"qkv\.{part} in place.*{reason}"
    module = attention_with()
    clip = QKClip(module, threshold=1.0)
    module.peak_logit = torch.full((3,), 5.0)
    change(module.qkv, part)
    before = {part: t.detach().clone() for part, t in module.qkv._parameters.items()}
    for call in (clip.step, partial(QKClip, module)):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    after = module.qkv._parameters
    assert all(torch.equal(before[part], after[part]) for part in before)


@pytest.mark.parametrize("monitors", [QKClip, ConditioningPenalty])
def test_replicas_of_data_parallel_are_refused(monitors: Callable[[nn.Module], object]) -> None:
    with pytest.raises(ValueError, match=r"^nn\.DataParallel discards its replicas.*$"):
        monitors(nn.DataParallel(attention_with()))


def test_a_replica_of_a_module_that_is_clipped_refuses_to_be_made() -> None:
    # As DataParallel does that wraps the model only later.
    module = attention_with()
    module._replicate_for_data_parallel()
    QKClip(module)
    with pytest.raises(RuntimeError, match="replicas"):
        module._replicate_for_data_parallel()


# On several ranks.


def on_rank(rank: int, store: str) -> None:
    """Compare sharded attention with a replica that sees the same, on one of two ranks."""
    dist.init_process_group(
        "gloo", f"file://{store}", timedelta(seconds=60), rank=rank, world_size=2
    )
    try:
        compare_sharded_with_replica((1 + rank) * batch(rank))
    finally:
        dist.destroy_process_group()


def on_other_rank(store: str) -> None:
    on_rank(1, store)
    # PyTorch 2.11 sometimes aborts when a process that used gloo ends as usual.
    os._exit(0)


def compare_sharded_with_replica(x: Tensor) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shards = {
        "rows": {"mesh": mesh},
        "replicated rows": {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))},
        "columns": {"mesh": mesh, "shard_placement_fn": lambda p: Shard(p.ndim - 1)},
    }
    replica, sharded = attention_with(), {name: attention_with() for name in shards}
    for name, how in shards.items():
        fully_shard(sharded[name], **how)
    largest = peaks_of(replica, batch(0)).maximum(peaks_of(replica, 2 * batch(1)))
    assert (largest > 2).sum() == 2
    for name, module in {"replica": replica, **sharded}.items():
        clip, penalty = QKClip(module, threshold=2.0), ConditioningPenalty(module, weight=10.0)
        (module(x).square().sum() + penalty.loss()).backward()
        torch.testing.assert_close(clip.step()[""], largest)
        for expected, actual in zip(replica.parameters(), module.parameters(), strict=True):
            if module is replica:
                dist.all_reduce(expected.grad)
                expected.grad /= 2
            else:
                torch.testing.assert_close(actual.full_tensor(), expected, msg=name)
                torch.testing.assert_close(actual.grad.full_tensor(), expected.grad, msg=name)
    clipped = peaks_of(replica, batch(0)).maximum(peaks_of(replica, 2 * batch(1)))
    torch.testing.assert_close(clipped, largest.clamp(max=2))


@pytest.mark.slow
def test_sharded_and_replicated_weights_are_clipped_and_penalised_alike(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    other = torch.multiprocessing.get_context("spawn").Process(target=on_other_rank, args=(store,))
    other.start()
    try:
        on_rank(0, store)
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()


def test_closing_stops_tracking() -> None:
    module = attention_with()
    QKClip(module).close()
    module(batch())
    assert module.peak_logit is None
