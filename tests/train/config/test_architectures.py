"""Every architecture trains, sharded, averaged and recomputed, batch norms included."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.launch import rows, whole_tensors
from train import vit
from train.config import architecture
from train.loop import parallel
from train.loop.optimizer import WeightAverage

SMALL = ["--batch-size", 16, "--eval-every", 0, "--kappa-every", 1, "--deterministic"]


def train_here(*args: object) -> None:
    """Run the script in this process."""
    vit.main([str(arg) for arg in args])


def tensors(out: Path, step: int) -> dict:
    """The tensors of a checkpoint, whole."""
    return whole_tensors(out / "checkpoints" / f"step-{step:08d}")


@pytest.mark.parametrize("name", architecture.DIGITS)
def test_every_small_model_trains_and_is_watched_in_every_attention(name, tmp_path):
    train_here("--model", name, *SMALL, "--steps", 2, "--drop-path", 0.1, "--out", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 1e5 < summary["params"] < 3e6
    assert 0 <= summary["held_out_accuracy"] <= summary["held_out_top5"] <= 1
    kappa = rows(tmp_path / "kappa.jsonl")
    assert [row["step"] for row in kappa] == sorted([0, 1] * (len(kappa) // 2))
    model = architecture.DIGITS[name]
    built = model.build(**model.sizes, device="meta")
    assert [row["layer"] for row in summary["kappa"]] == list(built.attention_modules())
    assert len(summary["heads"]) == len(built.attention_modules())
    assert all(row["kappa"] is None or row["kappa"] > 1 for row in kappa)


class Executed(TorchDispatchMode):
    """Counts the attention operators that are computed, not taken from what was kept."""

    def __init__(self):
        super().__init__()
        self.attention = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        ours = name.startswith("leaner_kernels::") or "scaled_dot_product" in name
        self.attention += ours and not name.endswith("backward")
        return func(*args, **(kwargs or {}))


def of_one_step(name: str, recompute: str) -> tuple[dict[str, torch.Tensor], int]:
    """Every gradient, statistic and captured head of one step, and how often attention ran."""
    found, entry = {}, architecture.DIGITS[name]
    # A scale of 1, the small model's, would hide that it was applied twice.
    scale = {"eta": 0.5} if "eta" in entry.sizes else {}
    with parallel.init_distributed() as world:
        model = parallel.make_model(
            lambda: entry.build(**entry.sizes | scale, num_classes=10, drop_path=0.5),
            world,
            seed=0,
            bf16=False,
            activation_checkpointing=recompute,
        )
        attention = model.attention_modules()
        for module in attention.values():
            module.capture_samples = 2
        torch.manual_seed(0)
        size = model.image_size
        with Executed() as executed:
            model(torch.randn(4, 1, size, size)).square().sum().backward()
        found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        found |= parallel.BatchNorms(model).statistics
        found |= {f"heads of {n}": module.captured.heads for n, module in attention.items()}
        found |= {f"output of {n}": module.captured.output for n, module in attention.items()}
    return {key: value.detach().clone() for key, value in found.items()}, executed.attention


@pytest.mark.parametrize("name", architecture.DIGITS)
def test_recomputation_changes_nothing_and_selective_computes_no_attention_twice(name):
    plain, once = of_one_step(name, "none")
    assert once > 0
    for recompute in ("full", "selective"):
        other, times = of_one_step(name, recompute)
        assert other.keys() == plain.keys()
        for key, value in plain.items():
            assert torch.equal(other[key], value), (recompute, key)
        assert (times > once) == (recompute == "full")


def test_batch_norms_compute_in_bf16_with_statistics_in_float32():
    model = architecture.DIGITS["xcit_digits"]
    with parallel.init_distributed() as world:
        build = {bf16: lambda: model.build(**model.sizes, num_classes=10) for bf16 in (False, True)}
        seen = {}
        for bf16 in (False, True):
            sharded = parallel.make_model(build[bf16], world, seed=0, bf16=bf16)
            images = torch.randn(8, 1, 32, 32, generator=torch.Generator().manual_seed(0))
            sharded(images).float().sum().backward()
            seen[bf16] = parallel.BatchNorms(sharded).statistics
    for name, exact in seen[False].items():
        assert seen[True][name].dtype == torch.float32
        torch.testing.assert_close(seen[True][name], exact, rtol=0.05, atol=0.01)
        assert not torch.equal(exact, torch.zeros_like(exact))


def test_the_average_of_the_weights_includes_the_statistics():
    entry = architecture.DIGITS["xcit_digits"]
    with parallel.init_distributed() as world:
        build = partial(entry.build, **entry.sizes, num_classes=10)
        model = parallel.make_model(build, world, seed=0, bf16=False)
        norms = parallel.BatchNorms(model)
        average = WeightAverage(model, norms, 0.75)
        before = {n: t.clone() for n, t in norms.statistics.items()}
        model(torch.randn(4, 1, 32, 32))
        average.update(skipped=torch.tensor(0.0))
        after = {n: t.clone() for n, t in norms.statistics.items()}
        average.update(skipped=torch.tensor(1.0))
        assert before.keys() < average.weights.keys()
        for name, value in before.items():
            assert not torch.equal(value, after[name])
            expected = 0.75 * value + 0.25 * after[name]
            torch.testing.assert_close(average.weights[name], expected)
        with average.in_place():
            for name, value in norms.statistics.items():
                assert torch.equal(value, average.weights[name])
        for name, value in norms.statistics.items():
            assert torch.equal(value, after[name])
