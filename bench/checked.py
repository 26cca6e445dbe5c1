"""Peers after their gate: built and checked once for each case, whatever is measured of them."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import clock, counters
from bench.cases import Case
from bench.gate import Inputs, Problem, WrongError
from bench.peers import PEERS, REFUSALS, AbsentError


class Checked:
    """The problem of the case at hand, each peer after its gate, and its last measured row."""

    def __init__(self) -> None:
        self.problem: Problem | None = None
        self.peers: dict[tuple[Case, str], Any] = {}
        self.measured: dict[tuple[Case, str], dict[str, Any]] = {}

    def use(self, case: Case, copies: int) -> Problem:
        """Return the problem of a case; the memory of the case before is freed first."""
        if self.problem is None or self.problem.case != case:
            self.problem = None
            self.problem = Problem(case, torch.device(case.device), copies)
        return self.problem

    def peer(self, case: Case, name: str) -> tuple[Callable[..., Tensor], float, list[Inputs]]:
        """Return a function, how much of its error budget it used, and inputs; or raise why not."""
        copies = clock.copies_beyond_cache(case.bytes("forward"), torch.device(case.device))
        problem, key = self.use(case, copies), (case, name)
        if key not in self.peers:
            try:
                self.peers[key] = self._check(name, problem)
            except (AbsentError, WrongError) as error:
                self.peers[key] = type(error)(*error.args)
        found = self.peers[key]
        # Raised anew: a traceback that is kept would keep the memory of its case.
        if isinstance(found, Exception):
            raise type(found)(*found.args)
        return *found, problem.inputs(PEERS[name].layout)

    def _check(self, name: str, problem: Problem) -> tuple[Callable[..., Tensor], float]:
        peer = PEERS[name]
        with warnings.catch_warnings(record=True) as warned, peer.context():
            warnings.simplefilter("always")
            try:
                function = peer.build(problem.case, problem.device)
                return function, max(problem.check(peer, function).values())
            except REFUSALS as error:
                if peer.ours:
                    raise
                # PyTorch warns of the reason and then raises that there is no kernel.
                reasons = [first_line(error), *(first_line(w.message) for w in warned)]
                raise AbsentError(f"refuses the case: {' '.join(reasons)[:300]}") from None

    def name_kernels(self) -> None:
        """Add the kernels of a forward and backward to the ``extra_info`` of each peer's last row.

        After everything is timed, because a profiler stays attached and slows what follows.
        """
        for (case, name), info in self.measured.items():
            function, _ = self.peers[case, name]
            inputs = self.use(case, copies=1).inputs(PEERS[name].layout)[0]
            with PEERS[name].context():
                call = partial(one_call("both", function), inputs)
                info["kernels"] = counters.kernel_names(call, case.device)


def first_line(error: Exception | Warning | str) -> str:
    """Return what an error says, without the place inside PyTorch that it says it from."""
    text = str(error).split("(Triggered internally")[0].strip()
    return (text or type(error).__name__).splitlines()[0][:200]


def one_call(direction: str, function: Callable[..., Tensor]) -> Callable[[Any], Any]:
    """Return a call of one direction; ``backward`` takes (output, inputs), the others inputs.

    Forward runs with gradients enabled and keeps what its backward needs, as in training.
    """
    grad = torch.autograd.grad
    return {
        "forward": lambda given: function(*given.leaves),
        "backward": lambda done: grad(done[0], done[1].leaves, done[1].grad, retain_graph=True),
        "both": lambda given: grad(function(*given.leaves), given.leaves, given.grad),
    }[direction]
