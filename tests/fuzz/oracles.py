"""What a call must give: the references of the tests' tables, in float64 and as PyTorch computes.

``judge`` compares names of results ("out", "lse", "dq" ...) under the one criterion of
``tests/error_budget.py``. Run on any device, judged on the CPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import leaner_kernels
from leaner_kernels.ops.attention.checks import four_axes
from leaner_kernels.ops.statistics import AttentionStats
from tests import attention_cases, operators, varlen_cases
from tests.error_budget import assert_within_budget
from tests.fuzz.strategies import FuzzCase

STATISTICS = AttentionStats._fields[1:]
# Inputs with a gradient, in the order of the references' names for them.
LEAVES = "query", "key", "value", "qkv", "logits", "temperature", "attn_mask"
# Arguments of any integers, in a tensor or a list.
COUNTS = "key_lengths", "cu_seqlens"
# Of a sum of many terms; where they cancel, this is what is left.
ROUNDINGS = 4

Results = dict[str, Tensor]


class Truth(NamedTuple):
    """The reference in float64 and, for each result, what PyTorch itself makes of the inputs."""

    exact: Results
    peers: dict[str, tuple[Tensor, ...]]


class Reference(NamedTuple):
    """The two sides of a ``Truth``, each of one dtype, to be computed when wanted."""

    results: Callable[[torch.dtype], Results]
    peers: Callable[[], dict[str, tuple[Tensor, ...]]]


def run(case: FuzzCase, made: dict[str, Any], grad: Tensor | None = None) -> Results:
    """Call the function and return its results by name; with ``grad`` the gradients too.

    Gradients are "d" and the name of the argument.
    """
    leaves = leaves_of(made) if grad is not None else {}
    given = made | {name: t.detach().requires_grad_() for name, t in leaves.items()}
    found = getattr(leaner_kernels, case.function)(**given)
    if isinstance(found, Tensor):
        results = {"out": found}
    else:
        results = {k: t for k, t in found._asdict().items() if t is not None}
    if grad is not None:
        wanted = {f"d{name}": given[name] for name in leaves}
        grads = torch.autograd.grad(results["out"], list(wanted.values()), grad)
        results |= dict(zip(wanted, grads, strict=True))
    return {name: t.detach() for name, t in results.items()}


def leaves_of(made: dict[str, Any]) -> dict[str, Tensor]:
    """Return the arguments that have a gradient."""
    return {
        name: made[name]
        for name in LEAVES
        if isinstance(made.get(name), Tensor) and made[name].is_floating_point()
    }


def grad_of(case: FuzzCase, made: dict[str, Any], seed: int = 0) -> Tensor:
    """Return a gradient of the output; for an odd seed that of a sum, of stride 0 everywhere."""
    first = next(iter(made.values()))
    shape = list(first.shape)
    if "qkv" in made:
        shape.remove(3) if shape[-3] != 3 else shape.pop(-3)
    if seed % 2:
        return first.new_ones(()).expand(shape)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(first.device, first.dtype)


def judge(found: Results, truth: Truth) -> None:
    """Assert that every result is within the budget, and no number without a reason."""
    for name, result in found.items():
        exact, peers = truth.exact[name], truth.peers[name]
        assert result.shape == exact.shape, f"{name} is {result.shape}, not {exact.shape}"
        if result.dtype == torch.float64 and found["out"].dtype != torch.float64:
            # A temperature of float64 has a gradient of it, summed in float32.
            result = result.float()
        limits = torch.finfo(result.dtype)
        error = (result.cpu().double() - exact).abs()
        # What its dtype cannot hold, and what is off by less than its smallest number, of bfloat16
        # the smallest normal one: a CPU's matrix units (AMX, AVX512-BF16) flush subnormals.
        flushed = result.dtype == torch.bfloat16
        passed = exact.abs() > limits.max / 2
        passed |= error <= limits.smallest_normal * (1.0 if flushed else limits.eps)
        judged = ~(passed & exact.isfinite())
        # PyTorch's half precision overflows where sums in float32 do not.
        fit = [p for p in peers if not (p.isnan() & ~exact.isnan()).any()]
        nan = (result.cpu().isnan() & ~exact.isnan())[judged]
        assert not nan.any(), f"nan in {name}"
        try:
            assert_within_budget(result.cpu()[judged], tuple(p[judged] for p in fit), exact[judged])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def truth_of(case: FuzzCase, made: dict[str, Any], grad: Tensor) -> Truth:
    """Return what the references make of the arguments, results named and shaped as ``run``'s.

    Where terms cancel, PyTorch's own error on one example may be zero by luck. So two more peers:
    float32, and float64 of inputs that are off by a few roundings, as sums are.
    """
    made = {k: t.detach().cpu() if isinstance(t, Tensor) else t for k, t in made.items()}
    made |= {
        k: torch.as_tensor(t).int()
        for k, t in made.items()
        if k.startswith(COUNTS) and t is not None
    }
    refer = _REFERENCES[case.function.removesuffix("_with_stats")]
    reference = refer(made, grad.detach().cpu())
    exact, peers = reference.results(torch.float64), reference.peers()
    generator = torch.Generator().manual_seed(1)

    def off(t: Tensor, together: bool) -> Tensor:
        # Of what is one number in memory, all copies are off by one amount, or each by its own.
        shape = [n if step or not together else 1 for n, step in zip(t.shape, t.stride())]
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return t.double() * (1 + ROUNDINGS * torch.finfo(grad.dtype).eps * signs)

    others = [reference.results(torch.float32)]
    for together in (True, False):
        rounded = made | {name: off(t, together) for name, t in leaves_of(made).items()}
        others.append(refer(rounded, off(grad.cpu(), together)).results(torch.float64))
    return Truth(exact, {k: (*peers[k], *(each[k] for each in others)) for k in exact})


def written(case: FuzzCase, made: dict[str, Any], found: Results) -> Results:
    """Return the results less the slots of ``heads`` that a negative index leaves unwritten."""
    if "heads" not in found:
        return found
    return found | {"heads": found["heads"][made["sample"].to(found["heads"].device) >= 0]}


def _scale(made: dict[str, Any], dim: int) -> float:
    return dim**-0.5 if made.get("scale") is None else float(made["scale"])


def _samples(made: dict[str, Any]) -> Tensor:
    sample = made.get("sample")
    return torch.zeros(0, dtype=torch.int32) if sample is None else sample.contiguous()


def _reference(
    module: Any, inputs: Any, dtype: torch.dtype, names: Callable[[Results], Results]
) -> Reference:
    """``names`` gives the results of a table's reference the names and shapes of ``run``."""

    def results(dtype: torch.dtype) -> Results:
        found = module.reference_results(inputs, dtype)
        return {name: t.detach() for name, t in names(found).items()}

    def peers() -> dict[str, tuple[Tensor, ...]]:
        found = module.peers_of(inputs, dtype)
        columns = range(max(len(each) for each in found.values()))
        sets = [names({k: t[min(i, len(t) - 1)] for k, t in found.items()}) for i in columns]
        return {name: tuple(each[name].detach() for each in sets) for name in sets[0]}

    return Reference(results, peers)


def _attention(made: dict[str, Any], grad: Tensor) -> Reference:
    query, key, value, mask = (made[n] for n in ("query", "key", "value", "attn_mask"))
    shapes = query.shape, key.shape, None if mask is None else mask.shape
    if query.dim() != 4:
        query, key, value, mask = four_axes(query, key, value, mask, None)
        grad = grad.reshape(query.shape)
    wide = None if mask is None else torch.atleast_2d(mask)
    inputs = attention_cases.Inputs(
        *(query, key, value, grad, wide, made["key_lengths"], None, _samples(made), 0.0),
        *(made["is_causal"], _scale(made, query.shape[-1]), made["softcap"]),
    )

    def names(results: Results) -> Results:
        renamed = {k: t for k, t in results.items() if k[0] != "d"}
        renamed["out"] = results["out"].reshape(shapes[0])
        renamed["dquery"] = results["dq"].reshape(shapes[0])
        renamed["dkey"], renamed["dvalue"] = (results[n].reshape(shapes[1]) for n in ("dk", "dv"))
        if "dmask" in results:
            # What is before the heads was one axis for the reference.
            whole = results["dmask"]
            if len(shapes[2]) > 3 and len(shapes[0]) > 4:
                whole = whole.reshape(*shapes[0][:-3], *whole.shape[1:])
            renamed["dattn_mask"] = whole.sum_to_size(shapes[2])
        return renamed

    return _reference(attention_cases, inputs, query.dtype, names)


def _packed(made: dict[str, Any], grad: Tensor) -> Reference:
    qkv = made["qkv"]
    inputs = attention_cases.Inputs(
        *qkv.permute(2, 0, 3, 1, 4).unbind(0),
        *(grad.transpose(1, 2), None, made["key_lengths"], None, _samples(made), 0.0),
        *(made["is_causal"], _scale(made, qkv.shape[-1])),
    )

    def names(results: Results) -> Results:
        three = torch.stack([results[n] for n in ("dq", "dk", "dv")]).permute(1, 3, 0, 2, 4)
        return results | {"out": results["out"].transpose(1, 2), "dqkv": three}

    return _reference(attention_cases, inputs, qkv.dtype, names)


def _varlen(made: dict[str, Any], grad: Tensor) -> Reference:
    starts, longest = made["cu_seqlens"].contiguous(), made["max_seqlen"]
    key_starts = made.get("cu_seqlens_k", starts).contiguous()
    inputs = varlen_cases.Inputs(
        *(made["query"], made["key"], made["value"], grad, starts, key_starts, longest),
        *(made.get("max_seqlen_k", longest), None, _samples(made), 0.0, made["is_causal"]),
        _scale(made, made["query"].shape[-1]),
    )

    def names(results: Results) -> Results:
        old = {"dquery": "dq", "dkey": "dk", "dvalue": "dv"}
        return results | {new: results[name] for new, name in old.items()}

    return Reference(
        lambda dtype: names(varlen_cases.assemble(inputs, dtype)),
        lambda: names(varlen_cases.peers_of(inputs, made["query"].dtype)),
    )


def _operator(operator: str, made: dict[str, Any], grad: Tensor) -> Reference:
    """Of the operators beside softmax attention."""
    first = next(iter(made.values()))
    scale = _scale(made, first.shape[-1])
    tensors, numbers = (first,), (scale,)
    if operator == operators.CROSS:
        tensors, numbers = (first, made["temperature"].flatten()), (made["eps"],)
    elif operator == operators.WINDOW:
        size = made["window_size"]
        numbers = *(size if isinstance(size, tuple) else (size, size)), scale
    elif operator == operators.OUTLOOK:
        tensors = first, made["logits"]
        numbers = *(made[n] for n in ("kernel_size", "stride", "padding")), scale
    elif operator == operators.NYSTROM:
        tensors = (*(made[n] for n in ("query", "key", "value", "key_lengths")),)
        numbers = made["num_landmarks"], scale, made["iterations"], made["init"] == "batch"
        grad = grad.transpose(1, 2)
    inputs = operators.Inputs(operator, tensors, numbers, grad, _samples(made))

    def names(results: Results) -> Results:
        results = dict(results)
        if "dq" in results:
            results["dqkv"] = torch.stack([results[n] for n in ("dq", "dk", "dv")], 2)
        if "dtemperature" in results:
            results["dtemperature"] = results["dtemperature"].view(made["temperature"].shape)
        if operator == operators.NYSTROM:
            results["out"] = results["out"].transpose(1, 2)
        return results

    return _reference(operators, inputs, grad.dtype, names)


_REFERENCES: dict[str, Callable[[dict[str, Any], Tensor], Reference]] = {
    "attention": _attention,
    "attention_qkvpacked": _packed,
    "attention_varlen": _varlen,
    **{name: partial(_operator, name) for name in operators.SPECIFICATIONS},
}
