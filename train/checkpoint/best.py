"""Keep the weights with the best held-out score in one file of the run folder."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from leaner_kernels.monitor.run_files import check_own, new_file, open_own
from train.checkpoint.weights import BEST, export_weights, open_weights
from train.loop.parallel import DistributedContext


class BestWeights:
    """The best weights of a run; the first of equal ones.

    They are written when they are found, so they take no memory, and a resume finds them. Every
    rank calls every method, in the same order.

    Args:
        model: sharded by FSDP2, or not.
        folder: folder of the run.
        world: the processes.
        score: the deciding score: "loss", of which the smallest is best, or another, of which the
            largest is best.
        log: called to show one line to the user.

    Attributes:
        step: step of the row of ``metrics.jsonl`` with their scores; None before the first
            evaluation.
        scores: their scores, such as "held_out_loss".
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        world: DistributedContext,
        score: str,
        log: Callable[[str], None],
    ):
        self.model, self.path, self.world, self.log = model, folder / BEST, world, log
        self.score = f"held_out_{score}"
        self.step: int | None = None
        self.scores: dict[str, float] = {}

    def forget(self) -> None:
        """Remove the best weights of an earlier run in this folder."""
        if self.world.rank == 0:
            self.path.unlink(missing_ok=True)

    def take_up(self, checkpoint: Path, steps: int) -> None:
        """Continue from the best weights in the run folder, or else of the checkpoint's own run.

        Args:
            checkpoint: checkpoint from which the run resumes.
            steps: steps of the checkpoint; newer weights in another folder are left out.
        """
        shared: list[Any] = [None, {}, None]
        if self.world.rank == 0:
            source = checkpoint.resolve().parent.parent / BEST
            try:
                check_own(self.path)
                if not self.path.exists() and source.exists():
                    self._copy(source, steps)
                if self.path.exists():
                    weights = open_weights(self.path, "--resume")
                    scores = {k: v for k, v in weights.scores.items() if k.startswith("held_out_")}
                    shared[:2] = weights.step, scores
            except (ValueError, OSError) as error:
                shared[2] = str(error)
        dist.broadcast_object_list(shared, src=0, group=self.world.host_group)
        step_of_best, scores, error = shared
        if error is not None:
            self.log(f"earlier best weights are ignored: {error}")
        elif self.score in scores:
            self.step, self.scores = step_of_best, scores

    def _copy(self, source: Path, steps: int) -> None:
        if open_weights(source, "--resume").step < steps:
            with open_own(source) as old, new_file(self.path) as new:
                shutil.copyfileobj(old, new)

    def is_beaten_by(self, scores: Mapping[str, float]) -> bool:
        """Return whether new scores of held-out items are better than the best.

        Scores that are not all finite are never better: weights with a NaN may have an accuracy.
        """
        new, best = scores[self.score], self.scores.get(self.score)
        if best is None or not all(map(math.isfinite, scores.values())):
            return all(map(math.isfinite, scores.values()))
        return new < best if self.score == "held_out_loss" else new > best

    def keep(self, step: int, scores: Mapping[str, float], metadata: Mapping[str, str]) -> None:
        """Write the model's weights as the best ones; if that fails, log it and continue.

        Args:
            step: step of the row with the scores.
            scores: scores of the held-out items.
            metadata: metadata of the file, as ``train.checkpoint.weights.metadata`` returns it.
        """
        error = [None]
        try:
            export_weights(self.model, self.path, metadata)
        except OSError as reason:  # on rank 0 alone
            error = [str(reason)]
        # A checkpoint being written uses the other group.
        dist.broadcast_object_list(error, src=0, group=self.world.agreement)
        if error[0] is None:
            self.step, self.scores = step, dict(scores)
        else:
            self.log(f"best weights of step {step} not kept, training goes on: {error[0]}")

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the model's weights by the best ones, if any, within a context.

        Raises:
            ValueError: they cannot be read.
        """
        if self.step is None:
            yield
            return
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        weights = open_weights(self.path, "best weights")
        weights.load(self.model)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in self.model.state_dict().items():
                    tensor.copy_(own[name])
