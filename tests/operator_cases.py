"""Awkward shapes of the operators beside softmax attention, and what the reference makes of them.

One table serves the operators on the CPU, the kernels in Triton's interpreter and on a GPU. A case
makes its ``Inputs``; from there on all operators are run and judged alike.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import leaner_kernels as lk
from leaner_kernels.ops.attention.op import VarlenGradients
from leaner_kernels.ops.nystrom import reference as nystrom_reference
from leaner_kernels.ops.outlook import reference as outlook_reference
from leaner_kernels.ops.route import OPERATORS, launchers
from leaner_kernels.ops.statistics import AttentionStats, per_head
from tests import error_budget

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


class CovarianceTestCase(NamedTuple):
    """Sizes as in the kernels; ``eps`` and ``scale`` are those of the operator."""

    name: str
    operator: str
    batch: int
    tokens: int
    heads: int
    dim: int
    eps: float = 1e-12
    scale: float = 0.2
    zero_channels: bool = False

    def make(self, dtype: torch.dtype, device: str) -> Inputs:
        """Return its tensors; the temperature is float32, as models keep it."""
        numbers = torch.randn(self.batch, self.tokens, 3, self.heads, self.dim)
        numbers *= torch.linspace(0.5, 2, self.dim)
        if self.zero_channels:
            numbers[..., ::3] = 0
        qkv = amid_nan(numbers, (0, 2, 0, 1, 5), dtype, device)
        grad = torch.randn(self.batch, self.tokens, self.heads, self.dim).to(device, dtype)
        tensors, param = (qkv,), self.scale
        if self.operator == CROSS:
            temperature = (torch.arange(self.heads, device=device) * 0.75 + 2).float()
            tensors, param = (qkv, temperature), self.eps
        return Inputs(self.operator, tensors, (param,), grad, sample_of(self.batch, device))


class WindowTestCase(NamedTuple):
    """A map of ``windows`` windows of ``window`` tokens, (rows, columns) each."""

    name: str
    batch: int
    windows: tuple[int, int]
    window: tuple[int, int]
    heads: int
    dim: int

    def make(self, dtype: torch.dtype, device: str) -> Inputs:
        """Return its tensors."""
        size = self.batch, *(n * tokens for n, tokens in zip(self.windows, self.window))
        qkv = torch.randn(*size, 3, self.heads, self.dim)
        qkv = amid_nan(qkv, (0, 1, 2, 0, 0, 5), dtype, device)
        grad = torch.randn(*size, self.heads, self.dim)
        grad = amid_nan(grad, (0, 1, 2, 0, 5), dtype, device)
        numbers = *self.window, self.dim**-0.5
        return Inputs(WINDOW, (qkv,), numbers, grad, sample_of(self.batch, device))


class OutlookTestCase(NamedTuple):
    """A map of ``size`` pixels, and the kernel size, stride and padding of its windows."""

    name: str
    batch: int
    size: tuple[int, int]
    heads: int
    dim: int
    window: tuple[int, int, int]

    def make(self, dtype: torch.dtype, device: str) -> Inputs:
        """Return its tensors; strides are multiples of 16, as of most models, which sets tiles."""
        shape = self.batch, *self.size, self.heads, self.dim
        count = [outlook_reference.num_windows(size, self.window) for size in self.size]
        places = self.window[0] ** 2
        value, logits, grad = (
            amid_nan(t, (0, 1, 2, *[0] * (t.dim() - 4), 16 + -t.shape[-1] % 16), dtype, device)
            for t in (
                torch.randn(shape),
                torch.randn(self.batch, *count, self.heads, places, places),
                torch.randn(shape),
            )
        )
        # Larger than the default, so that a softmax is not almost uniform.
        numbers = *self.window, 1.5
        return Inputs(OUTLOOK, (value, logits), numbers, grad, sample_of(self.batch, device))


class NystromTestCase(NamedTuple):
    """Sizes as in the kernels; the rest is what the operator takes."""

    name: str
    batch: int
    tokens: int
    heads: int
    dim: int
    landmarks: int
    lengths: tuple[int, ...] | None = None
    scale: float = 0.3
    iterations: int = 6
    whole_batch: bool = False

    def make(self, dtype: torch.dtype, device: str) -> Inputs:
        """Return its tensors, views of one packed projection whose padding is NaN too."""
        numbers = torch.randn(self.batch, self.tokens, 3, self.heads, self.dim)
        numbers *= torch.linspace(0.5, 2, self.dim)
        # Neighbours are alike, as tokens are: the means of noise are nearly zero.
        for axis in (0, 1):
            numbers[:, :, axis] += numbers[:, :, axis].cumsum(dim=1) / self.tokens**0.5
        lengths = None
        if self.lengths is not None:
            lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
            for entry, length in zip(numbers, self.lengths):
                entry[length:] = float("nan")
        qkv = amid_nan(numbers, (0, 2, 0, 1, 5), dtype, device).permute(2, 0, 3, 1, 4)
        grad = torch.randn(self.batch, self.tokens, self.heads, self.dim).to(device, dtype)
        params = self.landmarks, self.scale, self.iterations, self.whole_batch
        return Inputs(NYSTROM, (*qkv, lengths), params, grad, sample_of(self.batch, device))


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


SPECIFICATIONS: dict[str, Any] = {**OPERATORS, NYSTROM: _Nystrom}
OperatorTestCase = CovarianceTestCase | WindowTestCase | OutlookTestCase | NystromTestCase


def amid_nan(numbers: Tensor, margins: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return numbers inside a block of NaN, larger by ``margins``, so that a stray read shows."""
    larger = [size + margin for size, margin in zip(numbers.shape, margins, strict=True)]
    block = torch.full(larger, float("nan"), dtype=dtype, device=device)
    return block[tuple(map(slice, numbers.shape))].copy_(numbers)


def sample_of(batch: int, device: str) -> Tensor:
    return torch.tensor([batch - 1, -1, 0], dtype=torch.int32, device=device)


CASES: dict[str, tuple[OperatorTestCase, ...]] = {
    "covariance": (
        CovarianceTestCase("cross, one of everything", CROSS, 1, 1, 1, 1),
        CovarianceTestCase("cross, XCiT", CROSS, 1, 196, 2, 48),
        CovarianceTestCase("cross, XCiT large, lean", CROSS, 2, 197, 2, 64),
        CovarianceTestCase("cross, head_dim 32", CROSS, 3, 60, 2, 32),
        CovarianceTestCase("cross, head_dim 10", CROSS, 2, 33, 3, 10),
        CovarianceTestCase("cross, fewer tokens than channels", CROSS, 2, 5, 2, 20),
        CovarianceTestCase("cross, channels shorter than eps", CROSS, 2, 70, 2, 16, eps=8.0),
        CovarianceTestCase(
            "cross, channels of zeros", CROSS, 2, 70, 2, 24, eps=1e-3, zero_channels=True
        ),
        CovarianceTestCase("channel, one of everything", CHANNEL, 1, 1, 1, 1),
        CovarianceTestCase("channel, last stage of DaViT", CHANNEL, 2, 49, 3, 32),
        CovarianceTestCase("channel, third stage, lean", CHANNEL, 1, 196, 4, 16, scale=0.25),
        CovarianceTestCase("channel, long", CHANNEL, 1, 784, 1, 32, scale=0.1),
        CovarianceTestCase(
            "channel, first stage of DaViT, lean", CHANNEL, 1, 3136, 1, 16, scale=0.03
        ),
        CovarianceTestCase("channel, head_dim 42", CHANNEL, 2, 65, 2, 42, scale=-0.15),
        CovarianceTestCase("channel, channels of zeros", CHANNEL, 2, 17, 2, 24, zero_channels=True),
    ),
    "window": (
        WindowTestCase("one of everything", 1, (1, 1), (1, 1), 1, 1),
        WindowTestCase("DaViT", 2, (1, 2), (7, 7), 3, 32),
        WindowTestCase("the third stage of the lean DaViT", 1, (2, 1), (7, 7), 5, 16),
        WindowTestCase("flat windows", 2, (3, 2), (2, 5), 2, 10),
        WindowTestCase("windows of one column", 1, (1, 3), (17, 1), 1, 48),
        WindowTestCase("a full tile", 1, (1, 2), (8, 8), 2, 24),
        WindowTestCase("more than a tile", 1, (1, 2), (5, 14), 2, 16),
        WindowTestCase("head_dim 128", 1, (2, 1), (3, 6), 2, 128),
    ),
    "outlook": (
        OutlookTestCase("one of everything", 1, (1, 1), 1, 1, (1, 1, 0)),
        OutlookTestCase("VOLO", 2, (4, 6), 2, 32, (3, 2, 1)),
        OutlookTestCase("more than a tile, lean", 1, (16, 18), 1, 16, (3, 2, 1)),
        OutlookTestCase("an odd map", 1, (7, 5), 1, 10, (3, 2, 1)),
        OutlookTestCase("windows at every pixel", 1, (5, 4), 1, 12, (3, 1, 1)),
        OutlookTestCase("pixels that no window holds", 1, (6, 8), 1, 4, (3, 2, 0)),
        OutlookTestCase("stride 3 of 4, padding 2", 1, (5, 8), 1, 6, (4, 3, 2)),
        OutlookTestCase("kernel size 5", 1, (5, 6), 1, 8, (5, 2, 2)),
        OutlookTestCase("kernel size 2, windows at every pixel", 1, (4, 5), 1, 8, (2, 1, 0)),
        OutlookTestCase("head_dim 128", 1, (4, 3), 1, 128, (3, 2, 1)),
    ),
    "nystrom": (
        NystromTestCase("two tokens, one landmark", 1, 2, 1, 1, 1, iterations=1),
        NystromTestCase("segments of two", 1, 32, 1, 32, 16),
        NystromTestCase("head_dim 20, padded tiles", 1, 96, 1, 20, 24, (50,), iterations=3),
        NystromTestCase("one token of a sequence", 2, 30, 1, 8, 10, (1, 30), iterations=2),
        NystromTestCase("padding inside a segment", 1, 160, 1, 16, 4, (139,), iterations=2),
        NystromTestCase("whole batch", 2, 48, 2, 16, 8, scale=-0.4, whole_batch=True),
        NystromTestCase(
            "whole batch, padded", 2, 36, 1, 12, 12, (15, 35), iterations=1, whole_batch=True
        ),
    ),
}
# What only the CPU takes, and what would take the interpreter long.
CPU_CASES = (
    CovarianceTestCase("cross, head_dim 128", CROSS, 1, 150, 1, 128),
    CovarianceTestCase("channel, head_dim 127", CHANNEL, 1, 40, 1, 127),
    NystromTestCase("head_dim 128", 1, 96, 1, 128, 24, (77,), scale=0.1),
    NystromTestCase("256 landmarks", 1, 512, 1, 8, 256),
)


def every_case() -> list[OperatorTestCase]:
    return [case for cases in CASES.values() for case in cases]


def identify(value: Any) -> str:
    """Return the id of a test's parameter."""
    if not isinstance(value, OperatorTestCase):
        return str(value)
    family = next((name for name, cases in CASES.items() if type(value) is type(cases[0])), "")
    return value.name if family == "covariance" else f"{family}, {value.name}"


def named(family: str, name: str) -> OperatorTestCase:
    (case,) = (case for case in CASES[family] if case.name == name)
    return case


def make_inputs(case: OperatorTestCase, dtype: torch.dtype, device: str = "cpu") -> Inputs:
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


def check(inputs: Inputs, found: Results) -> None:
    """Assert that all results are there and within the error budget."""
    exact = reference_results(inputs, torch.float64)
    peers = peers_of(inputs, inputs.tensors[0].dtype)
    assert found.keys() == exact.keys()
    error_budget.assert_all_within_budget(found, peers, exact)
