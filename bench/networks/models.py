"""Shared by vision and language rows: models with their initial weights, and timed steps."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import clock, counters, machine
from bench.harness.checked import Row
from bench.harness.peers import compiled
from bench.harness.steps import Training


def eager_and_compiled(models: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """Return the rows of models: name, whose model it is, and whether it is compiled."""
    models = tuple(models)
    eager = {name: (name, False) for name in models}
    return eager | {f"{name}_compiled": (name, True) for name in models}


class Models:
    """Models by name, each with the weights that it began with.

    Attributes:
        device: where they are.
        models: by whose they are.
        compiled: by name, and whether for training; each shares the weights of its module.
        weights: the first of each module.
    """

    def __init__(self, device: str):
        """Start without models."""
        self.device = torch.device(device)
        self.models: dict[str, nn.Module] = {}
        self.compiled: dict[tuple[str, bool], Any] = {}
        self.weights: dict[str, dict[str, Tensor]] = {}

    def build(self, whose: str) -> nn.Module:
        """Return a library's model, or ours, on the device."""
        raise NotImplementedError

    def fresh(self, name: str, peers: dict[str, tuple[str, bool]], training: bool) -> nn.Module:
        """Return a model in its mode, with the first weights and no gradients.

        What is compiled for inference replays CUDA graphs (``reduce-overhead``).

        Raises:
            AbsentError: its library is not installed, or it is to be compiled where that is not
                measured.
        """
        whose, is_compiled = peers[name]
        if whose not in self.models:
            self.models[whose] = self.build(whose)
        model = self.models[whose]
        if whose not in self.weights:
            state = model.state_dict()
            self.weights[whose] = {k: v.to("cpu", copy=True) for k, v in state.items()}
        model.load_state_dict(self.weights[whose])
        model.zero_grad(set_to_none=True)
        model.train(training)
        if not is_compiled:
            return model
        if (name, training) not in self.compiled:
            mode = None if training else "reduce-overhead"
            self.compiled[name, training] = compiled(model, self.device, mode)
        return self.compiled[name, training]


def trained(row: Row, benchmark: Any, training: Training, item: str, items: int) -> dict[str, Any]:
    """Time the steps of a row; return what it cost beside time, as ``timed``."""
    weights = tuple(training.model.parameters())
    kept = counters.kept_for_backward(training.loss, weights)
    info = {
        "kept_bytes": kept,
        "loss": training.step().item(),
        "params": sum(weight.numel() for weight in weights),
        "peak_memory_bytes": training.peak_bytes(),
    }
    return info | timed(row, benchmark, training.step, item, items)


def timed(
    row: Row, benchmark: Any, call: Callable[[], Any], item: str, items: int
) -> dict[str, Any]:
    """Time a row from Python; return a GPU's clocks, and its joules for each of a call's items."""
    device = row.case.device
    mode, seconds = clock.FROM_PYTHON[device], clock.STEP_SECONDS[device]
    run_round = clock.record(benchmark, row.clock, mode, lambda _: call(), [None], seconds)
    if device != "cuda":
        return {}
    gpu = machine.Gpu(0)
    clocks = gpu.clocks_mhz
    joules = counters.joules_per_call(run_round, row.clock.calls, gpu)
    return {
        "clocks_mhz": clocks,
        f"joules_per_{item}": None if joules is None else joules / items,
    }
