"""However a step is divided, it is the same step."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from leaner_kernels.monitor import reshard
from models.vit import VisionTransformer
from tests.train.forked import on_two_ranks
from tests.train.launch import TINY, rows, run, torchrun
from train import vit
from train.loop import parallel
from train.loop.optimizer import local, make_optimizer

SIX_STEPS = [*TINY, "--steps", 6, "--ckpt-every", 0]


def train_here(*args: object) -> None:
    """Run the script in this process."""
    vit.main([str(arg) for arg in args])


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The metrics of six steps in one process."""
    out = tmp_path_factory.mktemp("one")
    train_here(*SIX_STEPS, "--out", out)
    return rows(out / "metrics.jsonl")


def assert_same_curve(actual: list[dict], expected: list[dict]) -> None:
    """Equal but for the order in which float32 numbers were added up."""
    assert [row["step"] for row in actual] == [row["step"] for row in expected]
    for name in ("loss", "grad_norm", "lr"):
        one, other = (torch.tensor([row[name] for row in r]) for r in (actual, expected))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert actual[-1]["held_out_loss"] == pytest.approx(expected[-1]["held_out_loss"], rel=1e-4)
    assert actual[-1]["held_out_accuracy"] == expected[-1]["held_out_accuracy"]


def work(_rank: int, folder: Path) -> None:
    """What each of two ranks does."""
    train_here(*SIX_STEPS, "--accum", 2, "--shard", folder.name, "--out", folder)


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one(one_process, tmp_path):
    for shard in ("fsdp", "none"):
        out = tmp_path / shard
        out.mkdir()
        on_two_ranks("tests.train.loop.test_parallel", out)
        assert_same_curve(rows(out / "metrics.jsonl"), one_process)
        kappa = rows(out / "kappa.jsonl")
        assert [row["step"] for row in kappa] == [0, 0, 2, 2, 4, 4, 5, 5]
        # And what they saved goes on in one process.
        train_here(*SIX_STEPS, "--steps", 7, "--accum", 4, "--out", out, "--resume", "auto")
        assert [row["step"] for row in rows(out / "metrics.jsonl")] == list(range(7))
    fsdp, ddp = (tensors(tmp_path / shard) for shard in ("fsdp", "none"))
    for name, tensor in fsdp.items():
        torch.testing.assert_close(ddp[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_preset_trains_on_two_processes_at_a_hundredth_of_its_width(tmp_path):
    sizes = ["--width", 16, "--head-dim", 4, "--img-size", 28, "--batch-size", 4]
    more = ["--data", "synthetic", "--steps", 2, "--kappa-every", 1, "--out", tmp_path]
    done = run("--model", "vit_1b_lean", *sizes, *more, torchrun=torchrun(2))
    assert "FSDP2, 2 shards" in done.stdout
    layers = {row["layer"] for row in rows(tmp_path / "kappa.jsonl")}
    assert len(layers) == 27
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1]


@pytest.mark.slow
def test_a_dry_run_says_on_how_many_gpus_a_model_fits(capsys, tmp_path):
    sizes = ["--model", "vit_1b", "--data", "synthetic", "--batch-size", 64]
    train_here(*sizes, "--ac", "full", "--dry-run", "--out", tmp_path / "run")
    said = capsys.readouterr().out
    memory = [line.split("│")[1:3] for line in said.splitlines() if "│ memory of" in line]
    assert [name.strip() for name, _ in memory] == [
        *("memory of one GPU", "memory of 8 GPUs", "memory of 64 GPUs (8 x 8)")
    ]
    taken = [float(value.split()[0]) for _, value in memory]
    assert taken[0] > taken[1] == taken[2] > 1
    assert all(("does not fit" in value) == (gb > 80) for (_, value), gb in zip(memory, taken))
    train_here(*sizes, "--ac", "full", "--shard", "none", "--dry-run", "--out", tmp_path / "run")
    whole = [line for line in capsys.readouterr().out.splitlines() if "│ memory of" in line]
    assert len({line.split("│")[2] for line in whole}) == 1  # each GPU holds all
    train_here(*sizes, "--ac", "selective", "--dry-run", "--out", tmp_path / "run")
    assert "not predicted with --ac selective" in capsys.readouterr().out


def tensors(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def test_passes_change_no_result(one_process, tmp_path):
    train_here(*SIX_STEPS, "--accum", 4, "--out", tmp_path)
    assert_same_curve(rows(tmp_path / "metrics.jsonl"), one_process)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--ac", "full"], ["--compile"], ["--ac", "full", "--compile"]])
def test_recomputation_and_compilation_change_no_result_and_no_kappa(tmp_path, more):
    one_layer = [*TINY, "--depth", 1, "--steps", 2, "--kappa-every", 1]
    for name, flags in {"plain": [], "other": more}.items():
        train_here(*one_layer, *flags, "--out", tmp_path / name)
    plain, other = (tmp_path / name for name in ("plain", "other"))
    assert_same_curve(rows(other / "metrics.jsonl"), rows(plain / "metrics.jsonl"))
    kappas = [[row["kappa"] for row in rows(out / "kappa.jsonl")] for out in (other, plain)]
    assert kappas[0] == pytest.approx(kappas[1], rel=1e-3)
    assert len(kappas[1]) == 2


def build() -> VisionTransformer:
    return VisionTransformer(
        image_size=8, patch_size=4, in_chans=1, embed_dim=16, depth=2, heads=2, head_dim=4
    )


def gradients(
    mode: str, world: parallel.DistributedContext, *, freeze: str = ""
) -> dict[str, torch.Tensor]:
    """Return the gradients of two passes in bfloat16, with what the middle of a block computes."""
    model = parallel.make_model(build, world, seed=0, bf16=True, mode=mode)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not freeze or not name.startswith(freeze))
    seen = []
    model.blocks[0].mlp.register_forward_hook(lambda _m, _i, out: seen.append(out.detach()))
    passes = parallel.Passes(model, mode, world)
    generator = torch.Generator().manual_seed(0)
    for last in (False, True):
        with passes.one(last=last):
            images = torch.randn(2, 1, 8, 8, generator=generator)
            passes.called(images).float().square().sum().backward()
    with torch.no_grad():
        model(images)
    reshard(model)
    kept = {p.dtype for p in model.parameters()}
    grads = {n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    assert {t.dtype for t in seen} == {torch.bfloat16}
    assert kept | {grad.dtype for grad in grads.values()} == {torch.float32}
    return grads | {f"pass {i}": out for i, out in enumerate(seen)}


@pytest.mark.parametrize("freeze", ["", "blocks.0", "pos_embed"])
def test_bf16_without_sharding_has_the_bits_of_fsdp(freeze):
    with parallel.init_distributed() as world:
        plain, ddp, fsdp = (
            gradients(mode, world, freeze=freeze) for mode in ("one", "ddp", "fsdp")
        )
    assert plain.keys() == ddp.keys() == fsdp.keys()
    for name, expected in fsdp.items():
        assert torch.equal(plain[name], expected), name
        assert torch.equal(ddp[name], expected), name


def test_a_forward_that_no_backward_follows_leaves_float32_weights():
    with parallel.init_distributed() as world:
        model = parallel.make_model(build, world, seed=0, bf16=True)
        passes = parallel.Passes(model, "one", world)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with passes.one(last=True):
            model(torch.randn(2, 1, 8, 8))
            assert model.pos_embed.dtype == torch.bfloat16
        with torch.no_grad(), pytest.raises(ValueError, match="image"):
            model(torch.randn(2, 1, 4, 4))
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())


def test_each_rank_decays_matrices_and_spares_norms_biases_and_positions():
    with parallel.init_distributed() as world:
        for mode in ("one", "fsdp"):
            model = parallel.make_model(build, world, seed=0, bf16=False, mode=mode)
            optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.3)
            names = {id(share): name for name, share in optimizer.shares.items()}
            decay = {
                names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]
            }
            sharded = [isinstance(p, DTensor) for p in model.parameters()]
            assert all(sharded) if mode == "fsdp" else not any(sharded)
            assert set(decay) == {name for name, _ in model.named_parameters()}
            for name, value in decay.items():
                spared = name.endswith("bias") or "norm" in name
                spared |= name in ("pos_embed", "cls_token")
                assert value == (0.0 if spared else 0.3), name
