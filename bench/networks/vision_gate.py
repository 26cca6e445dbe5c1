"""Load the same weights into our model and timm's, and check that both classify alike."""

import copy
from functools import cache

import torch
from torch import Tensor, nn

from bench.harness.gate import away_from_the_start, budget, share_of_budget
from bench.harness.peers import found
from bench.harness.steps import Training, classifying, mixed
from bench.networks.models import Models, eager_and_compiled
from bench.networks.timm_models import timm_model
from bench.networks.vision_cases import ModelCase

STAGES = "training", "inference", "one_image"
# ``timm_leaner`` is timm's model after ``leaner_kernels.adapters.timm.use``.
MODEL_PEERS = eager_and_compiled(("leaner", "timm", "timm_leaner"))
OURS = "leaner", "timm_leaner"


class Networks(Models):
    """What a ``ModelCase`` is measured on: images, labels, both models and the truth."""

    def __init__(self, case: ModelCase):
        """Draw everything from a fixed seed.

        Raises:
            AbsentError: timm is not installed.
        """
        super().__init__(case.device)
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
        """Return timm's model with our attention."""
        model = copy.deepcopy(self.models["timm"])
        found("leaner_kernels.adapters.timm", "use")(model)
        return model

    def model(self, stage: str, name: str) -> nn.Module:
        """Return a model in the mode of a stage, as ``fresh``."""
        return self.fresh(name, MODEL_PEERS, stage == "training")

    def training(self, name: str) -> Training:
        """Return a model that takes steps."""
        return classifying(self.model("training", name), self.images, self.labels)

    def images_of(self, stage: str) -> Tensor:
        """Return the images of a stage: all, but in ``one_image`` the first."""
        return self.images[:1] if stage == "one_image" else self.images

    def infer(self, model: nn.Module, stage: str) -> Tensor:
        """Return the logits of the images of a stage."""
        with torch.no_grad(), mixed(self.device):
            return model(self.images_of(stage))

    def _compute_truth(self, stage: str) -> tuple[Tensor, float]:
        """Return the logits of timm's model in float64, and the error allowed."""
        theirs = self.model(stage, "timm")
        exact = copy.deepcopy(theirs).double()
        with torch.no_grad():
            logits = exact(self.images_of(stage).double())
        return logits, budget(logits, self.infer(theirs, stage))

    def check(self, stage: str, name: str) -> float:
        """Run a model once, in training with what a backward needs, and compare its logits.

        Returns:
            The largest error as a fraction of the error allowed.

        Raises:
            WrongError: it is above 1, or not a number.
            AbsentError: as ``model``.
        """
        exact, allowed = self._truth(stage)
        model = self.model(stage, name)
        with torch.set_grad_enabled(stage == "training"), mixed(self.device):
            logits = model(self.images_of(stage)).detach()
        error = (logits.double() - exact).abs().max().item()
        return share_of_budget(f"{stage}: logits are", error, allowed)
