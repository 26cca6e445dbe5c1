"""timm's models on our attention: equal results, an exact way back, kappa, and what is refused."""

import copy
import pickle

import pytest
import torch
from timm.layers import attention as layers
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from leaner_kernels import KappaMonitor
from leaner_kernels.adapters import timm
from leaner_kernels.conditioning import QKClip
from leaner_kernels.nn.capture import Capturing
from models.davit import DaViT
from tests.adapters.timm_families import CASES, FAMILIES, VIT
from tests.error_budget import assert_computes
from tests.models.parity import (
    assert_equal_for_one_seed,
    assert_equal_in_function,
    logits_and_gradients,
    randomize,
)

ONE_OF_EACH = [next(case for case in CASES if case.family == family) for family in FAMILIES]


def made(case, training=False, **changed):
    torch.manual_seed(0)
    return randomize(case.model(**changed)).train(training)


def of(family, training=False, **changed):
    return made(next(case for case in CASES if case.family == family), training, **changed)


def vit(**changed):
    return of("vit", **changed)


def described(model):
    return {name: (type(m), set(vars(m))) for name, m in model.named_modules()}


def images(batch=2):
    return torch.randn(batch, 3, 32, 32)


def swapped(model):
    model = copy.deepcopy(model)
    timm.use(model)
    return model


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_gradients_and_running_statistics_equal_timms(case, training):
    oracle = made(case, training)
    model = copy.deepcopy(oracle)
    report = timm.use(model)
    assert len(report.swapped) == case.swapped
    assert len(report.left) == case.left
    assert all(isinstance(model.get_submodule(name), Capturing) for name in report.swapped)
    assert_equal_in_function(model, oracle, images())


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_undo_gives_timms_model_back_bit_for_bit(case):
    model = made(case)
    before = described(model)
    state, x = copy.deepcopy(model.state_dict()), images()
    expected = model(x)
    report = timm.use(model)
    assert timm.use(model).swapped == report.swapped
    assert list(model.state_dict()) == list(state)
    for undo in (report.undo, lambda: timm.undo(model)):
        undo()
        assert described(model) == before
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        assert torch.equal(model(x), expected)
        timm.use(model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_swapped_model_is_swapped_and_can_be_undone(duplicate):
    model, x = vit(), images()
    expected = model(x)
    timm.use(model)
    twin = duplicate(model)
    assert torch.equal(twin(x), model(x))
    timm.undo(twin)
    assert type(twin.blocks[0].attn) is layers.Attention
    assert torch.equal(twin(x), expected)
    assert isinstance(model.blocks[0].attn, Capturing)


def test_parts_that_are_replaced_or_hooked_after_the_swap_are_called():
    """The swapped forward looks its parts up at each call, so that nothing of the swap is stale."""
    oracle = vit()
    model = swapped(oracle)
    names = "qkv", "q_norm", "k_norm", "norm", "proj", "proj_drop"
    called = {"oracle": [], "model": []}
    for key, network in (("oracle", oracle), ("model", model)):
        attn = network.blocks[0].attn
        torch.manual_seed(1)
        attn.q_norm = nn.RMSNorm(attn.head_dim)
        attn.norm = nn.Tanh()
        attn.proj = nn.Linear(attn.proj.in_features, attn.proj.out_features)
        for name in names:
            getattr(attn, name).register_forward_hook(
                lambda _module, _args, _out, key=key, name=name: called[key].append(name)
            )
    x = images()
    torch.testing.assert_close(model(x), oracle(x))
    assert called["model"] == called["oracle"] == [*names]
    for network in (oracle, model):
        attn = network.blocks[0].attn
        for name in ("qkv", "norm", "proj", "proj_drop"):
            part = getattr(attn, name)
            delattr(attn, name)
            setattr(attn, name, lambda t, part=part: 2 * part(t))  # no module
    torch.testing.assert_close(model(x), oracle(x))


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_kappa_monitor_reports_each_swapped_layer(case):
    model = made(case, training=True)
    report = timm.use(model)
    with KappaMonitor(model, every=1, samples=2).step(0) as rows:
        model(images(4))
    assert {row["layer"] for row in rows} == set(report.swapped)
    assert all(row["entropy"] > 0 and row["columns"] > 1 for row in rows)


def test_kappa_is_that_of_the_heads_that_timm_projects():
    model, x = vit(), images(4)
    seen = []
    hook = model.blocks[1].attn.proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.double()(x.double())
    hook.remove()
    timm.use(model.float())
    monitor = KappaMonitor(model, every=1, samples=4)
    monitor.begin(0)
    model(x)
    row = monitor.end()[1]
    assert row["layer"] == "blocks.1.attn"
    assert row["tokens"] == row["columns"] == seen[0].shape[1]
    exact = torch.linalg.cond(seen[0]).log().mean().exp().item()
    assert row["kappa"] == pytest.approx(exact, rel=1e-3)


def test_kappa_of_windows_is_that_of_all_tokens_of_a_map_without_the_filling():
    oracle, x = of("davit"), images(4)
    ours = DaViT(image_size=32, embed_dims=(16, 32), depths=(1, 1), heads=(2, 4), window=3)
    ours.head.fc = nn.Linear(32, 5)
    ours.load_state_dict(oracle.state_dict(), strict=True)
    timm.use(oracle)
    rows = []
    for model in (oracle, ours.eval()):
        monitor = KappaMonitor(model, every=1, samples=2)
        monitor.begin(0)
        model(x)
        rows.append(monitor.end())
    # Maps of 8 and 4 pixels a side, windows of 3: filled up to 9 and 6.
    assert [row["tokens"] for row in rows[0]] == [64, 64, 16, 16]
    for actual, expected in zip(rows[0][::2], rows[1][::2], strict=True):
        assert actual["tokens"] == expected["tokens"]
        assert actual["columns"] == expected["columns"] == 9
        for field in ("kappa", "sigma_max", "entropy", "max_logit", "effective_rank"):
            assert actual[field] == pytest.approx(expected[field], rel=1e-3), field


class RenamedAttention(layers.Attention):
    """What a user may have: another class, whose computation is unknown."""


LEFT = [
    ("vit", "a subclass", {"attn_layer": RenamedAttention}, "RenamedAttention is not supported"),
    ("vit", "DiffAttention", {"attn_layer": "diff"}, "DiffAttention is not supported"),
    (
        "vit",
        "ParallelScalingBlock",
        {"block_fn": ParallelScalingBlock},
        "ParallelScalingBlock is not supported",
    ),
    ("vit", "heads of 192", {"embed_dim": 192, "num_heads": 1}, "must be in [1, 128], got 192"),
    ("swin", "heads of 144", {"head_dim": 144}, "must be in [1, 128], got 144"),
    ("xcit", "dropout of probabilities", {"attn_drop_rate": 0.1}, "got attn_drop 0.1"),
]


@pytest.mark.parametrize(("family", "case", "changed", "reason"), LEFT, ids=lambda x: str(x)[:20])
def test_a_model_of_which_nothing_can_be_swapped_is_refused(family, case, changed, reason):
    model = of(family, **changed)
    before = described(model)
    with pytest.raises(ValueError, match=r"has no attention module to swap \(") as refusal:
        timm.use(model)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert described(model) == before


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.MultiheadAttention(24, 3), "MultiheadAttention is not supported"),
        (nn.Linear(2, 2), "^Linear has no attention module: there is nothing to swap"),
    ],
)
def test_a_module_that_is_not_for_this_adapter_is_refused(module, reason):
    with pytest.raises(ValueError, match=reason):
        timm.use(module)


def test_modules_that_stay_are_named_with_their_reasons():
    report = timm.use(of("xcit"))
    assert list(report.swapped) == ["blocks.0.attn", "blocks.1.attn"]
    reason = "timm.models.cait.ClassAttn is not supported"
    assert report.left == {"cls_attn_blocks.0.attn": reason}
    assert f"  cls_attn_blocks.*.attn: {reason}" in str(report).splitlines()


def test_a_swapped_model_can_be_sharded_by_block(one_process):
    model, x = of("swin"), images()
    expected = model(x)
    report = timm.use(model)
    for layer in model.layers:
        for block in layer.blocks:
            fully_shard(block)
    fully_shard(model)
    torch.testing.assert_close(model(x), expected)
    report.undo()
    assert not any(isinstance(module, Capturing) for module in model.modules())
    torch.testing.assert_close(model(x), expected)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_class_is_timms_attn_layer():
    torch.manual_seed(0)
    oracle = vit(qkv_bias=True)
    model = VisionTransformer(**VIT, attn_layer=timm.Attention).eval()
    model.load_state_dict(oracle.state_dict(), strict=True)
    assert_equal_in_function(model, oracle, images())
    assert KappaMonitor(model).modules.keys() == {"blocks.0.attn", "blocks.1.attn"}
    timm.undo(model)
    assert type(model.blocks[0].attn) is timm.Attention


MASKS = {
    "causal": {"is_causal": True},
    # No row without a key: timm makes NaN of it.
    "boolean": {"attn_mask": (torch.rand(2, 1, 9, 9) > 0.3) | torch.eye(9, dtype=torch.bool)},
    "additive": {"attn_mask": torch.randn(9, 9)},
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("call", MASKS.values(), ids=MASKS)
def test_masks_mean_what_they_mean_to_timm(call, fused):
    torch.manual_seed(0)
    oracle = layers.Attention(24, 3, attn_head_dim=5, dim_out=7, gated=True)
    oracle.fused_attn = fused
    model, x = swapped(oracle), torch.randn(2, 9, 24)

    def reference(dtype):
        given = {
            name: value.to(dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in call.items()
        }
        return {"out": copy.deepcopy(oracle).to(dtype)(x.to(dtype), **given)}

    assert_computes({"out": model(x, **call)}, reference)


def test_dropout_while_training_equals_timms_for_one_seed():
    oracle = vit(training=True, attn_drop_rate=0.5, proj_drop_rate=0.5)
    model, x = swapped(oracle), images()
    assert_equal_for_one_seed(model, oracle, x)


@pytest.mark.parametrize("compiled_first", [False, True], ids=["then compiled", "compiled before"])
def test_a_compiled_model_is_swapped(compiled_first):
    oracle = vit()
    model, x = copy.deepcopy(oracle), images()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if compiled_first:
        compiled(x)
    assert len(timm.use(model).swapped) == 2
    found = logits_and_gradients(compiled, x)
    assert_computes(
        {name.removeprefix("_orig_mod."): result for name, result in found.items()},
        lambda dtype: logits_and_gradients(copy.deepcopy(oracle).to(dtype), x.to(dtype)),
    )


def test_qk_clip_takes_the_modules_whose_projection_makes_the_logits():
    def clipped(family):
        model = of(family)
        timm.use(model)
        return model, QKClip(model, threshold=1e-3)

    assert list(clipped("vit")[1].modules) == ["blocks.0.attn", "blocks.1.attn"]
    for family in ("beit", "eva", "xcit", "tnt"):
        with pytest.raises(ValueError, match="no attention module between"):
            clipped(family)
    model, clip = clipped("davit")
    x = images()
    for peaks in (before := (model(x), clip.step())[1], (model(x), clip.step())[1]):
        assert peaks.keys() == before.keys() == set(clip.modules)
    assert all((after < before[name]).all() for name, after in peaks.items())


def test_a_scripted_module_stays():
    model = vit()
    model.blocks[0].attn = torch.jit.script(model.blocks[0].attn)
    assert timm.use(model).left == {
        "blocks.0.attn": "torch.jit._script.RecursiveScriptModule is not supported"
    }
