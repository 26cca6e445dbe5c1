"""Check models of the paper before they are timed.

Vision models get timm's weights, and must classify as timm's model in float64. Our language models
must agree with a copy on the CPU. Those of transformers, which have their own weights, must give
finite numbers.
"""

import copy
import math
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import counters
from bench.harness.gate import WrongError, away_from_the_start, budget, share_of_budget
from bench.harness.peers import AbsentError, compiled, found
from bench.harness.steps import Training, classifying, mixed
from bench.networks.cases import Batch, LanguageCase, ModelCase, PaperCase, losses, mean_loss
from bench.networks.modes import model_and_suffix, modes_of, replays_graphs, whose
from bench.networks.peers import timm_model, transformers_model

# ``timm_leaner`` is timm's model after ``leaner_kernels.adapters.timm.use``.
OURS = "leaner", "timm_leaner"
CHECKED = 2  # samples of text, which are independent of each other


def peers_of(case: PaperCase, stage: str = "training") -> list[str]:
    """Return the rows of a case in a stage: each model eager, and compiled in every mode."""
    models = ["leaner", "timm", "timm_leaner"]
    if isinstance(case, LanguageCase):
        models = ["leaner", "transformers"]
        if case.architecture == "bert":  # a causal model needs the logits of every token
            models.append("transformers_masked")
    return [*models, *(model + suffix for suffix in modes_of(stage) for model in models)]


class Models:
    """The inputs of a case: models by name, each with the weights that it began with.

    A subclass has ``build`` (a library's model, or ours, by whose it is), ``training`` (what takes
    steps of a model by its name) and ``check``, which runs a model once in a stage and returns its
    largest error as a fraction of the error allowed, or raises ``WrongError``.

    Attributes:
        case: that is measured.
        device: where the models are.
        models: by whose they are.
        compiled: by name, and whether for training; each shares the weights of its module.
        weights: the first of each module.
        counted: FLOPs, by whose the model is and by stage.
    """

    build: Any
    training: Any
    infer: Any
    check: Any

    def __init__(self, case: Any):
        """Start without models."""
        self.case, self.device = case, torch.device(case.device)
        self.models: dict[str, nn.Module] = {}
        self.compiled: dict[tuple[str, bool], Any] = {}
        self.weights: dict[str, dict[str, Tensor]] = {}
        self.counted: dict[tuple[str, str], int] = {}

    def model(self, name: str, stage: str = "training") -> nn.Module:
        """Return a model in the mode of a stage, with the first weights and no gradients.

        Raises:
            AbsentError: its library is not installed, or it is to be compiled where that is not
                measured.
        """
        (owner, suffix), training = model_and_suffix(name), stage == "training"
        if owner not in self.models:
            self.models[owner] = self.build(owner)
        model = self.models[owner]
        if owner not in self.weights:
            state = model.state_dict()
            self.weights[owner] = {k: v.to("cpu", copy=True) for k, v in state.items()}
        model.load_state_dict(self.weights[owner])
        model.zero_grad(set_to_none=True)
        model.train(training)
        if not suffix:
            return model
        if (name, training) not in self.compiled:
            mode = modes_of(stage)[suffix].option
            self.compiled[name, training] = compiled(model, self.device, mode)
        if replays_graphs(name, stage):
            # A forward whose backward never came, as that of a check, ends here.
            torch.compiler.cudagraph_mark_step_begin()
        return self.compiled[name, training]

    def flops(self, name: str, stage: str) -> int:
        """Return the FLOPs of a call: in training of a forward and a backward.

        They are counted once for each model and stage, on the model as it runs without
        torch.compile. A backward of attention computes its scores again, which counts.
        """
        owner = whose(name)
        if (owner, stage) not in self.counted:
            if stage == "training":
                training = self.training(owner)
                counted = counters.flops(lambda: training.loss().backward())
                training.optimizer.zero_grad()
            else:
                model = self.model(owner, stage)
                counted = counters.flops(lambda: self.infer(model, stage))
            self.counted[owner, stage] = counted
        return self.counted[owner, stage]


class VisionModels(Models):
    """The inputs of a ``ModelCase``: images, labels, both models and the truth."""

    def __init__(self, case: ModelCase):
        """Draw everything from a fixed seed.

        Raises:
            AbsentError: timm is not installed.
        """
        super().__init__(case)
        generator = torch.Generator(self.device).manual_seed(0)
        torch.manual_seed(0)
        with self.device:
            theirs = timm_model(case.entry.architecture, case.config)
        away_from_the_start(theirs, generator)
        self.models = {"timm": theirs, "leaner": case.build(self.device)}
        first = {name: value.clone() for name, value in theirs.state_dict().items()}
        self.weights = dict.fromkeys(("timm", *OURS), first)
        self.images, self.labels = case.draw(generator)
        self._truth = cache(self._compute_truth)

    def build(self, whose: str) -> nn.Module:
        """Return timm's model with our attention.

        Raises:
            AbsentError: it has none that the adapter swaps.
        """
        model = copy.deepcopy(self.models["timm"])
        try:
            found("leaner_kernels.adapters.timm", "use")(model)
        except ValueError as error:
            raise AbsentError(str(error)) from None
        return model

    def training(self, name: str) -> Training:
        """Return a model that takes steps."""
        graphs = replays_graphs(name, "training")
        return classifying(self.model(name), self.images, self.labels, graphs)

    def images_of(self, stage: str) -> Tensor:
        """Return the images of a stage: all, but in ``one_image`` the first."""
        return self.images[: self.case.items(stage)]

    def infer(self, model: nn.Module, stage: str) -> Tensor:
        """Return the logits of the images of a stage."""
        with torch.no_grad(), mixed(self.device):
            return model(self.images_of(stage))

    def _compute_truth(self, stage: str) -> tuple[Tensor, float]:
        """Return the logits of timm's model in float64, and the error allowed."""
        theirs = self.model("timm", stage)
        exact = copy.deepcopy(theirs).double()
        with torch.no_grad():
            logits = exact(self.images_of(stage).double())
        return logits, budget(logits, self.infer(theirs, stage))

    def check(self, name: str, stage: str = "training") -> float:
        """Compare logits, in training those of a forward that keeps tensors for a backward."""
        exact, allowed = self._truth(stage)
        model = self.model(name, stage)
        with torch.set_grad_enabled(stage == "training"), mixed(self.device):
            logits = model(self.images_of(stage)).detach()
        error = (logits.double() - exact).abs().max().item()
        return share_of_budget(f"{stage}: logits are", error, allowed)


class LanguageModels(Models):
    """The inputs of a ``LanguageCase``: a batch, the models, and the truth."""

    def __init__(self, case: LanguageCase):
        """Draw everything from a fixed seed."""
        super().__init__(case)
        self.batch = case.draw(self.device)

    def build(self, whose: str) -> nn.Module:
        """Return our model or transformers'."""
        case = self.case
        if whose in OURS:
            return case.build(self.device)
        masked = whose == "transformers_masked"
        return transformers_model(case.architecture, case.config, self.device, masked)

    def training(self, name: str) -> Training:
        """Return a model that takes steps, ours by its mean loss."""
        model, batch, graphs = self.model(name), self.batch, replays_graphs(name, "training")
        if whose(name) in OURS:
            return Training(model, lambda: mean_loss(losses(model, batch), batch), batch, graphs)
        return Training(model, lambda: model(batch), batch, graphs)

    @cached_property
    def reference(self) -> nn.Module:
        """Our model on the CPU with weights without zeros, which could hide errors."""
        model = self.case.build(torch.device("cpu")).train()
        away_from_the_start(model, torch.Generator().manual_seed(1))
        return model

    @cached_property
    def truth(self) -> tuple[Tensor, float]:
        """The exact losses of the first samples, and the error allowed.

        Exact is our model on the CPU, where every operator of this project calls PyTorch, in
        float64 for a case in float32, and for one in bfloat16 in float32. Allowed is twice what the
        case's own precision errs there.
        """
        model, on_cpu = self.reference, self.device.type == "cpu"
        batch = Batch(*(t[:CHECKED].cpu() for t in self.batch))
        with torch.no_grad():
            exact = losses(copy.deepcopy(model).double() if on_cpu else model, batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=not on_cpu):
                plain = losses(model, batch)
        return exact, budget(exact, plain)

    def check(self, name: str, stage: str = "training") -> float:
        """Run a model, and compare the losses of ours on the first samples.

        A model of another library has weights of its own: its loss must be finite, and it uses 0 of
        its budget.
        """
        if whose(name) not in OURS:
            loss = self.training(name).loss().item()
            if not math.isfinite(loss):
                raise WrongError(f"the loss is not finite, got {loss}")
            return 0.0
        model = self.model(name)
        self.models["leaner"].load_state_dict(self.reference.state_dict())
        with mixed(self.device):
            of_tokens = losses(model, self.batch)[:CHECKED].detach().double().cpu()
        exact, allowed = self.truth
        return share_of_budget("losses", (of_tokens - exact).abs().max().item(), allowed)


def models_of(case: PaperCase) -> Models:
    """Return the inputs of a case, and free the compiled code of the case before."""
    if case.device == "cuda":
        torch.compiler.reset()  # CUDA graphs of training keep their activations
    return (LanguageModels if isinstance(case, LanguageCase) else VisionModels)(case)
