"""Define the rows of a benchmark, and build and check each peer once per case."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bench.harness import clock
from bench.harness.gate import Inputs, Problem, WrongError
from bench.harness.peers import REFUSALS, AbsentError, Peer


class Current:
    """The tensors of the current case, and each peer after its gate.

    Those of the previous case are freed.
    """

    def __init__(
        self,
        peers_of: Callable[[Any], dict[str, Peer]],
        problem_of: Callable[[Any, torch.device, int], Problem],
    ) -> None:
        """Start without a case.

        Args:
            peers_of: all peers of a case of attention, by name.
            problem_of: returns sets of tensors of such a case, with the check of a peer on them.
        """
        self.peers_of, self.problem_of = peers_of, problem_of
        self.case: Any = None
        self.built: Any = None
        self.checked: dict[tuple[Any, str], Any] = {}

    def use(self, case: Any, build: Callable[[Any], Any]) -> Any:
        """Return the result of ``build`` for a case."""
        if self.case != case:
            self.case, self.built = None, None
            self.built = build(case)
            self.case = case
        return self.built

    def peer(self, case: Any, name: str) -> tuple[Callable[..., Tensor], float, list[Inputs]]:
        """Return a function, the share of its error budget used, and inputs; or raise an error."""
        device, peer = torch.device(case.device), self.peers_of(case)[name]
        copies = clock.copies_beyond_cache(case.bytes("forward"), device)
        problem = self.use(case, lambda case: self.problem_of(case, device, copies))
        if (case, name) not in self.checked:
            try:
                self.checked[case, name] = _check(peer, problem)
            except (AbsentError, WrongError) as error:
                self.checked[case, name] = type(error)(*error.args)
        result = self.checked[case, name]
        # Raise a new error: a stored traceback would keep the memory of its case.
        if isinstance(result, Exception):
            raise type(result)(*result.args)
        return *result, problem.inputs(peer.layout)


def _check(peer: Peer, problem: Problem) -> tuple[Callable[..., Tensor], float]:
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


@dataclass(frozen=True)
class Row:
    """One row of a result: a peer on a case.

    Attributes:
        case: of the row; without a GPU, one for a GPU is deselected.
        name: name of the peer.
        what: is measured of it, a direction or a stage, if more than one thing is.
        mode: how it is timed, one of ``clock.MODES``, if more than one way is.
        ours: what our own code raises is no refusal.
        on_host: whether the host's clock is read on a GPU too.
        every: the interval of a monitor.
    """

    case: Any
    name: str
    what: str = ""
    mode: str = ""
    ours: bool = True
    on_host: bool = False
    every: int = 0

    @cached_property
    def clock(self) -> clock.Clock:
        """A clock of its own."""
        return clock.Clock("cpu" if self.on_host else self.case.device)

    def param(self, *marks: Any) -> Any:
        """Return the row as a parameter of its test, with further marks."""
        import pytest  # here, so that a command times peers without it

        words = [word for word in (self.case.name, self.what, self.mode) if word]
        group = " ".join(words)
        timed = pytest.mark.benchmark(timer=self.clock, group=group, disable_gc=True)
        name = "-".join([*words, self.name]).replace("=", "-")
        return pytest.param(self, marks=[timed, *marks], id=name)

    def facts(self) -> dict[str, Any]:
        """Return the fields that every row of a result has."""
        facts = {"case": self.case.name, "peer": self.name, "ours": self.ours}
        return facts | {"shape": self.case.facts()}


def each_row(rows: Iterable[Any]) -> Callable[[Any], Any]:
    """Return the decorator of a test that measures one of these rows."""
    import pytest

    # The fixture of pytest-benchmark stays unused after a failed gate.
    unused = pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")
    params = [row.param() if isinstance(row, Row) else row for row in rows]
    return lambda test: unused(pytest.mark.parametrize("row", params)(test))


def first_line(error: Exception | Warning | str) -> str:
    """Return an error's message, without the place inside PyTorch that raised it."""
    text = str(error).split("(Triggered internally")[0].strip()
    return (text or type(error).__name__).splitlines()[0][:200]


def one_call(direction: str, function: Callable[..., Tensor]) -> Callable[[Any], Any]:
    """Return a call of one direction; ``backward`` takes (output, inputs), the others inputs.

    Forward runs with gradients enabled and keeps what its backward needs, as in training.
    """
    grad = torch.autograd.grad
    return {
        "forward": lambda inputs: function(*inputs.leaves),
        "backward": lambda done: grad(done[0], done[1].leaves, done[1].grad, retain_graph=True),
        "both": lambda inputs: grad(function(*inputs.leaves), inputs.leaves, inputs.grad),
    }[direction]


def unmeasured_lines(entries: list[dict[str, str]]) -> Iterator[str]:
    """Yield a line for each reason why peers have no number, with the peers, wrong ones first."""
    peers: dict[tuple[bool, str, str], list[str]] = {}
    for entry in entries:
        key = entry["status"] != "wrong", entry["status"], entry["reason"]
        where = (
            entry["peer"] if entry["status"] == "absent" else f"{entry['peer']} in {entry['case']}"
        )
        peers.setdefault(key, []).append(where)
    for (_, status, reason), names in sorted(peers.items()):
        yield f"{status}: {', '.join(dict.fromkeys(names))}: {reason}"
