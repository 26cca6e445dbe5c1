"""Kappa in a run: samples of training steps, a probe on held-out items, a penalty, QK-Clip."""

import math
from typing import Any

from torch import Tensor, nn

from leaner_kernels import ConditioningPenalty, KappaMonitor, QKClip
from train.config.flags import Settings
from train.data.sampler import held_out_share
from train.logs.alarms import Alarms
from train.logs.report import Report
from train.loop import Task
from train.loop.parallel import DistributedContext

# Entries of a batch in a sample, on each rank; held-out items of a probe, over all ranks.
SAMPLES, PROBED = 4, 16


class Kappa:
    """Kappa of one run's attention blocks.

    Args:
        model: sharded or not.
        task: the task that is trained.
        settings: how.
        world: the processes.
        report: is passed the rows.
        alarms: is passed those of training steps.
        last: step of the run, which is sampled as the first is.

    Raises:
        ValueError, OSError: a probe without held-out items, or with one that cannot be read, or a
            penalty or a QK-Clip that the model cannot have.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        settings: Settings,
        world: DistributedContext,
        report: Report,
        alarms: Alarms,
        last: int,
    ):
        self.model, self.task, self.world, self.last = model, task, world, last
        self.report, self.alarms = report, alarms
        self.monitor = self.prober = self.conditioning = self.qk_clip = None
        self.probed_items = settings.kappa_samples or PROBED
        if settings.qk_clip:
            self.qk_clip = QKClip(model, settings.qk_clip)
        if settings.kappa_penalty:
            self.conditioning = ConditioningPenalty(model, settings.kappa_penalty)
        if settings.kappa_every:
            writers = [w for w in (report.tensorboard, report.wandb) if w is not None]
            self.every = settings.kappa_every
            samples = settings.kappa_samples or SAMPLES
            self.monitor = KappaMonitor(
                model, every=self.every, samples=samples, path=report.kappa, writer=writers
            )
        self.probe_every = settings.kappa_probe
        if self.probe_every:
            self.probed = self._items()
            self.prober = KappaMonitor(model, samples=len(self.probed[0]))

    def _items(self) -> tuple[Tensor, ...]:
        """Return this rank's share of the first held-out items."""
        data = self.task.held_out
        if data is None:
            raise ValueError(
                f"--kappa-probe needs held-out items, which {self.task.name} lacks: give "
                "--kappa-probe 0"
            )
        ranks = self.world.size
        share = held_out_share(
            len(data), -(-self.probed_items // ranks), rank=self.world.rank, ranks=ranks
        )
        return tuple(t.to(self.world.device) for t in data.__getitems__(share[0][0]))

    def begin(self, step: int) -> None:
        """Call it before a step."""
        if self.probe_every and step % self.probe_every == 0:
            self.probe(step)
        if self.monitor:
            self.monitor.every = 1 if step == self.last else self.every
            self.monitor.begin(step)
        if self.qk_clip is not None:
            # An evaluation between two steps does not count for clipping.
            for module in self.qk_clip.modules.values():
                module.peak_logit = None

    def clip(self, skipped: Tensor) -> None:
        """Scale down queries and keys whose logits passed ``--qk-clip``; after an update.

        Args:
            skipped: () bool: where it is True, nothing is scaled.
        """
        if self.qk_clip is not None:
            for module in self.qk_clip.modules.values():
                if module.peak_logit is not None:
                    # QKClip ignores logits that are not finite.
                    module.peak_logit = module.peak_logit.masked_fill(skipped, math.inf)
            self.qk_clip.step()

    def end(self) -> None:
        """Call it after the backward of a step."""
        if self.monitor:
            self._record(self.monitor.end())

    def flush(self) -> None:
        """Write the rows of steps already done that are still on their way from the device."""
        if self.monitor:
            self._record(self.monitor.flush())

    def cancel(self) -> None:
        """Leave a step that an error ended; harmless after others."""
        if self.monitor:
            self.monitor.cancel()

    def penalty(self) -> Tensor | None:
        """Return what the newest forward adds to the loss, or None."""
        return None if self.conditioning is None else self.conditioning.loss()

    def probe(self, step: int) -> None:
        """Write kappa of the held-out items, after a number of updates, if there is a probe."""
        if self.prober is None:
            return
        rows = self.prober.measure(self.probed, forward=self.task.score, step=step)
        self.report.probe_rows(rows)

    def _record(self, rows: list[dict[str, Any]]) -> None:
        self.report.sampled(rows)
        if self.report.is_main_process:
            self.report.alarm(self.alarms.kappa(rows))
