"""How operators other than softmax attention are run on a backend and compared with a reference.

Cases stand in the file of their operator (``tests/ops/test_windows.py`` and others). A case makes
its ``Inputs``; from there on all operators are run and judged alike.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import leaner_kernels as lk
from leaner_kernels.ops.attention.op import VarlenGradients
from leaner_kernels.ops.nystrom import reference as nystrom_reference
from leaner_kernels.ops.outlook import reference as outlook_reference
from leaner_kernels.ops.route import OPERATORS, launchers
from leaner_kernels.ops.statistics import AttentionStats, per_head
from tests import error_budget
from tests.backends import GPU, INTERPRETER, Target

CROSS, CHANNEL = "cross_covariance_attention", "channel_attention"
WINDOW, OUTLOOK, NYSTROM = "window_attention", "outlook_attention", "nystrom_attention"
STATISTICS = AttentionStats._fields[2:-1]


class Inputs(NamedTuple):
    """What an operator takes: tensors in the dtype under test, numbers, and a gradient of its out.

    The sample, which ``NAME_with_stats`` takes between tensors and numbers, has a negative index.
    """

    operator: str
    tensors: tuple[Any, ...]
    numbers: tuple[Any, ...]
    grad: Tensor
    sample: Tensor

    def scaled(self, scale: float) -> "Inputs":
        """Return the same with another scale of the scores."""
        place = 1 if self.operator == NYSTROM else len(self.numbers) - 1
        numbers = *self.numbers[:place], scale, *self.numbers[place + 1 :]
        return self._replace(numbers=numbers)


class Case(Protocol):
    """Sizes of a call, in the file of the operator."""

    @property
    def name(self) -> str:
        """What is special about it."""
        ...

    def make(self, dtype: torch.dtype, device: str) -> Inputs:
        """Return its tensors and numbers."""
        ...


class _Nystrom:
    """The reference of Nyström attention, as ``Operator`` declares those of registered operators.

    Nyström attention is composed of others: its public function is all there is.
    """

    Gradients = VarlenGradients  # those of query, key and value

    Arguments = staticmethod(lambda *arguments: arguments)

    @staticmethod
    def reference_forward(arguments: tuple[Any, ...]) -> Any:
        a, k1, _, scores = nystrom_reference.attend(*arguments)

        def statistics() -> Tensor:
            stats = per_head(k1, scores[0], a)
            stats[0] = torch.stack([s.amax((2, 3)) for s in scores]).amax(dim=0)
            return stats

        return a.transpose(1, 2), scores[0].logsumexp(dim=-1), statistics


SPECIFICATIONS: dict[str, Any] = {
    **{name: OPERATORS[name] for name in (CROSS, CHANNEL, WINDOW, OUTLOOK)},
    NYSTROM: _Nystrom,
}


def amid_nan(numbers: Tensor, margins: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return numbers inside a block of NaN, larger by ``margins``, so that a stray read shows."""
    larger = [size + margin for size, margin in zip(numbers.shape, margins, strict=True)]
    block = torch.full(larger, float("nan"), dtype=dtype, device=device)
    return block[tuple(map(slice, numbers.shape))].copy_(numbers)


def sample_of(batch: int, device: str) -> Tensor:
    return torch.tensor([batch - 1, -1, 0], dtype=torch.int32, device=device)


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Return the same numbers at every call."""
    torch.manual_seed(0)
    return case.make(dtype, device)


Results = dict[str, Tensor]
# Numbers of an operator, as its public functions take them.
KEYWORDS: dict[str, Callable[..., dict[str, Any]]] = {
    CROSS: lambda eps: {"eps": eps},
    CHANNEL: lambda scale: {"scale": scale},
    WINDOW: lambda y, x, scale: {"window_size": (y, x), "scale": scale},
    OUTLOOK: lambda *numbers: dict(zip(("kernel_size", "stride", "padding", "scale"), numbers)),
    NYSTROM: lambda num_landmarks, scale, iterations, whole_batch: {
        "num_landmarks": num_landmarks,
        "scale": scale,
        "iterations": iterations,
        "init": "batch" if whole_batch else "matrix",
    },
}


def call(inputs: Inputs, *leaves: Tensor, suffix: str = "", **options: Any) -> Any:
    """Call the public function, on ``leaves`` in place of the tensors that have a gradient."""
    options |= KEYWORDS[inputs.operator](*inputs.numbers)
    if inputs.operator == NYSTROM:
        options["key_lengths"] = inputs.tensors[-1]
    return getattr(lk, inputs.operator + suffix)(*leaves, **options)


def leaves_of(inputs: Inputs, tensors: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors that have a gradient."""
    return list(tensors[: len(SPECIFICATIONS[inputs.operator].Gradients._fields)])


def name_results(
    inputs: Inputs, results: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> Results:
    """Name what an operator returned; look at the slot that nobody asked for, and leave it out."""
    out, lse, *stats = results
    found = {"out": out, "lse": lse}
    if stats:
        per_head, heads = stats
        assert heads[inputs.sample < 0].isnan().all(), "a slot with a negative index was written"
        found |= zip(STATISTICS, per_head, strict=True)
        found["heads"] = heads[inputs.sample >= 0]
    names = SPECIFICATIONS[inputs.operator].Gradients._fields
    found |= zip(names, gradients, strict=True)
    if inputs.operator in (CROSS, CHANNEL):
        # Of other sizes: each is judged by its own.
        found |= zip(("dq", "dk", "dv"), found.pop("dqkv").unbind(2), strict=True)
    return found


def run(case: Case, target: Target) -> Results:
    """Run a case with statistics, and its backward, on the backend of the target."""
    with target.active():
        inputs = make_inputs(case, target.dtype, target.device)
        results = run_kernels(inputs) if target.backend == INTERPRETER else run_operator(inputs)
    assert target.backend != GPU or all(result.is_cuda for result in results.values())
    return results


def run_function(inputs: Inputs) -> Results:
    """Run the public function without statistics, and its backward; return no log-sum-exp."""
    leaves = [t.requires_grad_() for t in leaves_of(inputs, inputs.tensors)]
    out = call(inputs, *leaves)
    out = out.transpose(1, 2) if inputs.operator == NYSTROM else out
    assert out.dtype == leaves[0].dtype
    assert out.is_contiguous()
    gradients = torch.autograd.grad(out, leaves, inputs.grad)
    results = name_results(inputs, (out, torch.empty(0)), gradients)
    results.pop("lse")
    return results


def run_operator(inputs: Inputs) -> Results:
    """Run the operator with statistics, and its backward, on the device of the inputs."""
    tensors = tuple(t.detach() if t is not None else None for t in inputs.tensors)
    leaves = [t.requires_grad_() for t in leaves_of(inputs, tensors)]
    if inputs.operator == NYSTROM:
        stats = call(inputs, *leaves, suffix="_with_stats", sample=inputs.sample)
        per_head_stats = torch.stack([getattr(stats, name) for name in STATISTICS])
        results = stats.out.transpose(1, 2), stats.lse, per_head_stats, stats.heads
    else:
        operator = getattr(torch.ops.leaner_kernels, f"{inputs.operator}_with_stats")
        results = operator(*tensors, inputs.sample, *inputs.numbers)
    return name_results(inputs, results, torch.autograd.grad(results[0], leaves, inputs.grad))


def run_kernels(inputs: Inputs, with_stats: bool = True) -> Results:
    """Launch forward, capture and backward as the CUDA operators do, on tensors of any device."""
    launches = launchers(OPERATORS[inputs.operator])
    attend, attend_with_stats, differentiate = launches
    tensors, numbers = inputs.tensors, inputs.numbers
    if with_stats:
        results = attend_with_stats(*tensors, inputs.sample, *numbers)
    else:
        results = attend(*tensors, *numbers)
    gradients = differentiate(inputs.grad, *tensors, results[1], *numbers)
    return name_results(
        inputs, results, gradients if isinstance(gradients, tuple) else (gradients,)
    )


def reference_results(
    inputs: Inputs, dtype: torch.dtype, differentiate: Callable[..., Any] | None = None
) -> Results:
    """Run the reference on the CPU with every floating-point input cast to ``dtype``.

    Gradients are autograd's, or what ``differentiate(grad, *tensors, *numbers)`` returns.
    """
    *tensors, grad = (
        t.detach().cpu().to(dtype) if t is not None and t.is_floating_point() else t
        for t in (*inputs.tensors, inputs.grad)
    )
    tensors = tuple(t.cpu() if t is not None else None for t in tensors)
    inputs = inputs._replace(sample=inputs.sample.cpu())
    leaves = leaves_of(inputs, tensors)
    with torch.set_grad_enabled(differentiate is None):
        for leaf in leaves:
            leaf.requires_grad_(differentiate is None)
        operator = SPECIFICATIONS[inputs.operator]
        call = operator.Arguments(*tensors, *inputs.numbers)
        out, lse, statistics = operator.reference_forward(call)
        results = out, lse, statistics()
        if differentiate is None:
            gradients = torch.autograd.grad(out, leaves, grad)
        else:
            gradients = differentiate(grad, *tensors, *inputs.numbers)
    heads = out.new_full((len(inputs.sample), *out.shape[1:]), float("nan"))
    wanted = inputs.sample >= 0
    heads[wanted] = out.detach()[inputs.sample[wanted]]
    return name_results(inputs, (*results, heads.flatten(1, -3).flatten(2)), gradients)


def outlook_from_lse(
    grad: Tensor, value: Tensor, logits: Tensor, *numbers: Any
) -> tuple[Tensor, ...]:
    """Differentiate as fused kernels do, which take P from the log-sum-exp."""
    *window, scale = numbers
    _, lse, s = outlook_reference.probabilities(logits, scale)
    p = (s - lse.permute(0, 2, 3, 1, 4)[..., None]).exp()
    return outlook_reference.backward(grad, value, p, scale, (*window,))


def written_out(name: str) -> Callable[..., Any]:
    """Return the backward of an operator's reference, of the gradient and its arguments."""
    operator = OPERATORS[name]
    return lambda grad, *arguments: operator.reference_backward(
        grad, operator.Arguments(*arguments)
    )


# The formulations of derivatives that are allowed; autograd's where there is none.
FORMULATIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    WINDOW: (written_out(WINDOW),),
    OUTLOOK: (written_out(OUTLOOK), outlook_from_lse),
}


def peers_of(inputs: Inputs, dtype: torch.dtype) -> dict[str, tuple[Tensor, ...]]:
    """Return, for every result, what correct arithmetic may make of it: see error_budget."""
    runs = [
        lambda differentiate=formulation: reference_results(inputs, torch.float64, differentiate)
        for formulation in FORMULATIONS.get(inputs.operator, (None,))
    ]
    # Rounded once from float32 sums, or not at all: judged against float32 arithmetic.
    once = {"lse", *STATISTICS, "heads"} - ({"head_norm"} if inputs.operator != OUTLOOK else set())
    return error_budget.peers_of(runs, dtype, once)


def check(inputs: Inputs, results: Results, *others: Results) -> None:
    """Assert that all results are there, and that they and others are within the error budget."""
    exact = reference_results(inputs, torch.float64)
    peers = peers_of(inputs, inputs.tensors[0].dtype)
    assert results.keys() == exact.keys()
    for one in (results, *others):
        error_budget.assert_all_within_budget(one, peers, exact)


def assert_written_derivatives_are_autograds(case: Case) -> None:
    """Assert that errors of these do not widen the budgets, which are drawn by them."""
    inputs = make_inputs(case, torch.float64)
    exact = reference_results(inputs, torch.float64)
    written = written_out(inputs.operator), *FORMULATIONS.get(inputs.operator, ())
    for differentiate in written:
        found = reference_results(inputs, torch.float64, differentiate)
        torch.testing.assert_close(found, exact)


def diagonal(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two diagonal matrices; rows of their product have one score, far above the others."""
    rows = torch.diag(torch.linspace(7, 9, size)).to(dtype)
    return rows, torch.diag(torch.linspace(60, 70, size)).to(dtype)
