"""Check language models before timing: ours against a copy on the CPU, the others for nan."""

import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.harness.gate import WrongError, away_from_the_start, budget, share_of_budget
from bench.harness.steps import Training, mixed
from bench.networks.language_cases import IGNORED, Batch, LanguageCase, losses, mean_loss
from bench.networks.language_peers import TRANSFORMERS, transformers_model
from bench.networks.models import Models, eager_and_compiled

OURS = "leaner"
CHECKED = 2  # samples, which are independent of each other


def peers_of(case: LanguageCase) -> dict[str, tuple[str, bool]]:
    """Return the rows of a case: name, whose model it is, and whether it is compiled."""
    return eager_and_compiled((OURS, *TRANSFORMERS[case.architecture]))


class Result(NamedTuple):
    """A model's losses of a batch, and the gradient of their mean, as one vector."""

    losses: Tensor
    gradient: Tensor


class LanguageModels(Models):
    """What a ``LanguageCase`` is measured on: a batch, the models, and the truth."""

    def __init__(self, case: LanguageCase):
        """Draw everything from a fixed seed."""
        super().__init__(case.device)
        self.case, self.batch = case, case.draw(self.device)

    def build(self, whose: str) -> nn.Module:
        """Return our model or transformers'."""
        case = self.case
        if whose == OURS:
            return case.build(self.device)
        return transformers_model(case.architecture, whose, case.config, self.device)

    def model(self, name: str) -> nn.Module:
        """Return a model in training, as ``fresh``."""
        return self.fresh(name, peers_of(self.case), training=True)

    def training(self, name: str) -> Training:
        """Return a model that takes steps."""
        model = self.model(name)
        if name.startswith(OURS):
            return training_on(model, self.batch)
        return Training(model, lambda: model(self.batch), self.batch)

    @cached_property
    def reference(self) -> nn.Module:
        """Our model on the CPU with the weights that are checked: no error hides behind a zero."""
        model = self.case.build(torch.device("cpu")).train()
        away_from_the_start(model, torch.Generator().manual_seed(1))
        return model

    @cached_property
    def truth(self) -> tuple[Result, Result]:
        """The exact result for the first samples, and that of plain PyTorch in our precision.

        Both run on the CPU, where every operator of this project calls PyTorch. Exact is float64
        for a case in float32, and for one in bfloat16 float32.
        """
        model = self.reference
        batch = Batch(*(t[:CHECKED].cpu() for t in self.batch))
        if self.device.type == "cpu":
            return result(copy.deepcopy(model).double(), batch), result(model, batch)
        exact = result(model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            return exact, result(model, batch)

    @cached_property
    def first_samples(self) -> Batch:
        """The whole batch, for whose shape a model is compiled; only the first samples count."""
        targets = self.batch.targets.clone()
        targets[CHECKED:] = IGNORED
        return self.batch._replace(targets=targets)

    def check(self, name: str) -> float:
        """Run a model once, forward and backward, and compare ours on the first samples.

        Returns:
            The largest error as a fraction of the error allowed; of a model of another library,
            which has weights of its own, 0.

        Raises:
            WrongError: an error is too large, or a number is not finite.
            AbsentError: as ``model``.
        """
        if not name.startswith(OURS):
            training = self.training(name)
            loss = training.loss()
            loss.backward()
            finite = [p.grad.isfinite().all() for p in gradients_of(training.model)]
            if not torch.stack([loss.detach().isfinite(), *finite]).all():
                raise WrongError(f"the loss, {loss.item():.3g}, or a gradient is not finite")
            return 0.0
        model = self.model(name)
        self.models[OURS].load_state_dict(self.reference.state_dict())
        with mixed(self.device):
            ours = result(model, self.first_samples)
        exact, plain = self.truth
        errors = {
            "losses": (
                (ours.losses[:CHECKED].double() - exact.losses).abs().max().item(),
                budget(exact.losses, plain.losses),
            ),
            "gradient": (
                (ours.gradient - exact.gradient).norm().item(),
                gradient_budget(exact.gradient, plain.gradient),
            ),
        }
        return max(share_of_budget(what, *error) for what, error in errors.items())


def training_on(model: nn.Module, batch: Batch) -> Training:
    """Return our model in training on a batch, by its mean loss."""
    return Training(model, lambda: mean_loss(losses(model, batch), batch), batch)


def result(model: nn.Module, batch: Batch) -> Result:
    """Run our model forward and backward; return its result in float64 on the CPU."""
    model.zero_grad(set_to_none=True)
    of_tokens = losses(model, batch)
    mean_loss(of_tokens, batch).backward()
    gradient = torch.cat([p.grad.flatten().double().cpu() for p in gradients_of(model)])
    model.zero_grad(set_to_none=True)
    return Result(of_tokens.detach().cpu(), gradient)


def gradients_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have a gradient: all that a step uses."""
    return [p for p in model.parameters() if p.grad is not None]


def gradient_budget(exact: Tensor, plain: Tensor) -> float:
    """Return the largest error of a gradient that is allowed, as ``gate.budget`` but by length.

    A model has tensors whose gradient is small and noisy: their largest single errors in two right
    computations differ by more than twice.
    """
    rounding = torch.finfo(torch.float32).eps * exact.norm()
    return (2 * ((plain - exact).norm() + rounding)).item()
