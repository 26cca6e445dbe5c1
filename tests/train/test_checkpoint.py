"""Checkpoints by themselves: what is kept, and that reading one runs no code."""

import os
import pickle
import random
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from train import parallel
from train.checkpoint import Checkpoints, find_damage


class Model(nn.Module):
    """Two sharded layers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw every parameter."""
        for p in self.parameters():
            nn.init.normal_(p.to_local(), generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both."""
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def world():
    with parallel.world() as world:
        yield world


@pytest.fixture
def made(world, tmp_path):
    """A model after one step, its optimizer, and a place for checkpoints."""
    model = parallel.shard(Model, world, seed=0, bf16=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, optimizer)
    said: list[str] = []
    return model, optimizer, Checkpoints(tmp_path / "c", world, keep=2, say=said.append), said


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of every weight and moment."""
    weights = [p.to_local() for p in model.parameters()]
    moments = [optimizer.state[p][k] for p in model.parameters() for k in ("exp_avg", "exp_avg_sq")]
    steps = [optimizer.state[p]["step"] for p in model.parameters()]
    return [t.detach().clone() for t in [*weights, *(m.to_local() for m in moments), *steps]]


def test_a_checkpoint_holds_the_moment_of_its_call_and_training_goes_on(made):
    model, optimizer, checkpoints, said = made
    before = state(model, optimizer)
    with checkpoints:
        checkpoints.save(1, model, optimizer, {}, {})
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().fill_(7.0)
        step(model, optimizer)
    assert (said, checkpoints.saved_step) == ([], 1)
    path = checkpoints.find("auto")
    assert path is not None
    checkpoints.load(path, model, optimizer, {})
    for now, then in zip(state(model, optimizer), before, strict=True):
        assert torch.equal(now, then)


def test_a_fresh_optimizer_gets_its_moments_back(made, world):
    model, optimizer, checkpoints, _ = made
    with checkpoints:
        checkpoints.save(1, model, optimizer, {}, {})
    other = parallel.shard(Model, world, seed=1, bf16=False)
    fresh = torch.optim.AdamW(other.parameters(), fused=True)
    checkpoints.load(checkpoints.find("auto"), other, fresh, {})
    for now, then in zip(state(other, fresh), state(model, optimizer), strict=True):
        assert torch.equal(now, then)


def test_every_global_generator_continues(made):
    model, optimizer, checkpoints, _ = made
    random.gauss(0, 1)  # leaves a second Gaussian behind, and so does numpy's
    np.random.standard_normal()
    with checkpoints:
        checkpoints.save(1, model, optimizer, {}, {})

    def draws() -> list[float]:
        return [
            *(random.gauss(0, 1), random.random(), random.gauss(0, 1)),
            *(np.random.standard_normal(), np.random.random(), np.random.standard_normal()),
            torch.rand(1).item(),
        ]

    first = draws()
    assert draws() != first
    checkpoints.load(checkpoints.find("auto"), model, optimizer, {})
    assert draws() == first


def test_leftovers_of_a_kill_are_cleared_and_nothing_else(made):
    model, optimizer, checkpoints, _ = made
    with checkpoints:
        checkpoints.save(1, model, optimizer, {}, {})
    shutil.copytree(checkpoints.folder / "step-00000001", checkpoints.folder / ".step-00000002")
    assert checkpoints.find("auto") == checkpoints.folder / "step-00000001"
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000001"]


def test_a_checkpoint_that_is_saved_again_is_replaced_whole(made):
    model, optimizer, checkpoints, said = made
    for _ in range(2):
        with checkpoints:
            checkpoints.save(1, model, optimizer, {}, {})
        step(model, optimizer)
    assert said == []
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000001"]
    assert find_damage(checkpoints.folder / "step-00000001") is None


def test_old_checkpoints_go_and_newer_ones_of_another_time_stay(made):
    model, optimizer, checkpoints, _ = made
    with checkpoints:
        for number in (9, 1, 2, 3):
            checkpoints.save(number, model, optimizer, {}, {})
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names == ["step-00000002", "step-00000003", "step-00000009"]


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("exit 0",)


def test_reading_a_checkpoint_calls_nothing_that_it_names(made):
    model, optimizer, checkpoints, _ = made
    with checkpoints:
        checkpoints.save(1, model, optimizer, {}, {})
    path = checkpoints.folder / "step-00000001"
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(
        ValueError, match=r"\.metadata names (posix|nt)\.system, which is no record"
    ):
        checkpoints.load(path, model, optimizer, {})


def test_another_model_is_refused_with_what_differs(made, world):
    model, optimizer, checkpoints, _ = made
    with checkpoints:
        checkpoints.save(1, model, optimizer, {}, {})
    average = {"blocks.0.weight": model.blocks[0].weight.detach().clone()}
    with pytest.raises(ValueError, match=r"cannot load .*average\.blocks\.0\.weight"):
        checkpoints.load(checkpoints.folder / "step-00000001", model, optimizer, average)
