"""PyTorch's own cases of scaled_dot_product_attention: ours agrees, or is refused with a reason.

Shapes, masks, scales, strides and errors after test/test_transformers.py and the samples of its
operator tests, where small sizes show the same; plus what falls between them. A case that PyTorch
takes and ``attention`` refuses is among ``REFUSALS``, with the words of the refusal.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from leaner_kernels import attention, attention_with_stats
from leaner_kernels.ops.attention.checks import four_axes
from tests.backends import CPU, GPU
from tests.error_budget import assert_within_budget

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SEEN, ADDED = "seen", "added"


class SdpaCase(NamedTuple):
    """One call.

    Attributes:
        name: what is special about it.
        query: its shape, (..., H, N, D) or less.
        key: shape of key and value; that of the query when None.
        mask: its shape, None for no mask.
        kind: of the mask, see ``make_mask``.
        causal: as ``is_causal``.
        scale: as there.
        gqa: as ``enable_gqa``.
        layout: of query, key and value in memory, see ``place``.
        values: what they are, see ``fill``.
    """

    name: str
    query: tuple[int, ...]
    key: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    kind: str = SEEN
    causal: bool = False
    scale: float | None = None
    gqa: bool = False
    layout: str = "contiguous"
    values: str = "normal"


_Q, _K = (2, 3, 7, 8), (2, 3, 11, 8)
# Every way of PyTorch's table in which a mask of four axes is broadcast.
_BROADCAST = [
    (batch, heads, rows, cols)
    for batch in (2, 1)
    for heads in (3, 1)
    for rows in (7, 1)
    for cols in (11, 1)
]

CASES = (
    SdpaCase("two axes", (7, 8), (11, 8)),
    SdpaCase("three axes", (5, 4, 6), (5, 3, 6)),
    SdpaCase("three axes, mask of two", (5, 4, 6), (5, 3, 6), (4, 3)),
    SdpaCase("three axes, mask of three", (5, 4, 6), (5, 3, 6), (5, 4, 3)),
    SdpaCase("three axes, causal", (5, 4, 6), (5, 3, 6), causal=True),
    SdpaCase("three axes, grouped", (4, 7, 8), (2, 11, 8), gqa=True),
    SdpaCase("four axes", (4, 4, 3, 8), (4, 4, 6, 8)),
    SdpaCase("four axes, causal", (4, 4, 3, 8), (4, 4, 6, 8), causal=True),
    SdpaCase("five axes", (2, 2, 3, 7, 8), (2, 2, 3, 11, 8)),
    SdpaCase("five axes, mask of four", (2, 2, 3, 7, 8), (2, 2, 3, 11, 8), (2, 1, 7, 11)),
    SdpaCase("five axes, mask of five", (2, 2, 3, 7, 8), (2, 2, 3, 11, 8), (2, 1, 3, 7, 11), ADDED),
    SdpaCase("six axes", (2, 1, 2, 3, 4, 5), mask=(4, 4)),
    SdpaCase("one row", (2, 3, 1, 8), _K),
    SdpaCase("one key", _Q, (2, 3, 1, 8)),
    SdpaCase("one of everything", (1, 1, 1, 1)),
    SdpaCase("one of everything, two axes", (1, 1)),
    SdpaCase("head dimension 1", (2, 3, 7, 1), (2, 3, 11, 1)),
    SdpaCase("head dimension 3", (2, 3, 7, 3), (2, 3, 11, 3)),
    SdpaCase("head dimension 57", (1, 2, 7, 57)),
    SdpaCase("head dimension 72", (1, 2, 9, 72)),
    SdpaCase("head dimension 128", (1, 2, 9, 128)),
    SdpaCase("causal, square", (2, 3, 11, 8), causal=True),
    SdpaCase("causal, more keys", _Q, _K, causal=True),
    SdpaCase("causal, more rows", _K, _Q, causal=True),
    SdpaCase("causal, one row", (2, 3, 1, 8), _K, causal=True),
    SdpaCase("grouped by 4", (1, 8, 7, 8), (1, 2, 11, 8), gqa=True),
    SdpaCase("grouped by 5", (2, 10, 4, 8), (2, 2, 4, 8), gqa=True),
    SdpaCase("grouped by all", (2, 6, 4, 8), (2, 1, 9, 8), gqa=True, causal=True),
    SdpaCase("grouped by 1", _Q, _K, gqa=True),
    SdpaCase("grouped, masked", (2, 6, 7, 8), (2, 2, 11, 8), (2, 6, 7, 11), ADDED, gqa=True),
    *(SdpaCase(f"mask {shape}", _Q, _K, shape) for shape in _BROADCAST),
    *(SdpaCase(f"additive mask {shape}", _Q, _K, shape, ADDED) for shape in _BROADCAST),
    SdpaCase("mask of two axes", _Q, _K, (7, 11)),
    SdpaCase("mask of two axes over rows", _Q, _K, (7, 1)),
    SdpaCase("mask of two axes over keys", _Q, _K, (1, 11)),
    SdpaCase("mask of two axes for all", _Q, _K, (1, 1)),
    SdpaCase("mask of three axes", _Q, _K, (3, 7, 11), ADDED),
    SdpaCase("mask of -inf", _Q, _K, (7, 11), "minus infinity"),
    SdpaCase("mask of the least number", _Q, _K, (7, 11), "least"),
    SdpaCase("a band", (1, 4, 40, 8), None, (40, 40), "band"),
    SdpaCase("rows that see nothing", _Q, _K, (2, 1, 7, 11), "nothing"),
    SdpaCase("rows that see nothing, additive", _Q, _K, (2, 1, 7, 11), "nothing, additive"),
    SdpaCase("everything hidden", _Q, _K, (1, 1), "hidden"),
    SdpaCase("mask expanded from a row", _Q, _K, (2, 3, 7, 11), "expanded"),
    SdpaCase("mask with gaps", _Q, _K, (2, 1, 7, 11), "strided"),
    SdpaCase("mask transposed", _Q, _K, (7, 11), "transposed"),
    SdpaCase("scale of 0", _Q, _K, scale=0.0),
    SdpaCase("scale of 1", _Q, _K, scale=1.0),
    SdpaCase("scale of 1 / D", _Q, _K, scale=1 / 8),
    SdpaCase("negative scale", _Q, _K, scale=-0.7),
    SdpaCase("large negative scale", (1, 3, 16, 16), scale=-1e4),
    SdpaCase("negative scale, causal", _Q, _K, causal=True, scale=-0.7),
    SdpaCase("scale of 0, causal", _Q, _K, causal=True, scale=0.0),
    SdpaCase("negative scale, masked", _Q, _K, (7, 11), ADDED, scale=-0.7),
    SdpaCase("packed", (2, 3, 7, 8), layout="packed"),
    SdpaCase("packed, causal", (4, 2, 4, 16), causal=True, layout="packed"),
    SdpaCase("heads last in memory", _Q, _K, layout="transposed"),
    SdpaCase("expanded over the batch", _Q, _K, layout="expanded batch"),
    SdpaCase("expanded over the heads", _Q, _K, layout="expanded heads"),
    SdpaCase("expanded over the tokens", _Q, _K, layout="expanded tokens"),
    SdpaCase("expanded, masked", (3, 4, 1, 16), (3, 4, 14, 16), (3, 1, 1, 14), ADDED,
         layout="expanded heads"),
    SdpaCase("sliced", _Q, _K, layout="sliced"),
    SdpaCase("off by one element", _Q, _K, layout="shifted"),
    SdpaCase("permuted", _Q, _K, layout="permuted"),
    SdpaCase("size 1 with any stride", (1, 1, 2, 1), (1, 1, 1, 1), layout="strided one"),
    SdpaCase("five axes, permuted", (2, 2, 3, 7, 8), None, layout="permuted"),
    SdpaCase("large scores", _Q, _K, values="large"),
    SdpaCase("equal keys", _Q, _K, values="equal"),
    SdpaCase("zeros", _Q, _K, values="zeros"),
    SdpaCase("a nan in a query", _Q, _K, values="nan query"),
    SdpaCase("a nan in a value", _Q, _K, values="nan value"),
    SdpaCase("an infinite value", _Q, _K, values="infinite value"),
)  # fmt: skip


class Inputs(NamedTuple):
    """Tensors of a case, and a gradient of its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    grad: Tensor

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Inputs":
        """Return copies with the same strides; floating point in ``dtype``."""
        return Inputs(*(None if t is None else _moved(t, dtype, device) for t in self))


def _moved(t: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    # With the whole storage, so that expanded axes and gaps stay what they are.
    storage = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    storage = storage.to(device, dtype if t.is_floating_point() else t.dtype, copy=True)
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def make_inputs(case: SdpaCase, dtype: torch.dtype) -> Inputs:
    """Return tensors of ``dtype`` on the CPU; the numbers are the same in every dtype."""
    torch.manual_seed(0)
    shape = case.key or case.query
    if case.layout == "packed":
        batch, heads, rows, dim = case.query
        packed = _normal(batch, rows, 3, heads, dim).to(dtype)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
    else:
        query, key, value = (place(s, case.layout, dtype) for s in (case.query, shape, shape))
    fill(case.values, query, key, value)
    mask = None if case.mask is None else make_mask(case.mask, case.kind, dtype)
    return Inputs(query, key, value, mask, _normal(*case.query).to(dtype))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def place(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    """Return random numbers of this shape, laid out in memory as ``layout`` states."""
    *outer, rows, dim = shape
    if layout.startswith("expanded"):
        axis = {"batch": -4, "heads": -3, "tokens": -2}[layout.removeprefix("expanded ")]
        base = list(shape)
        base[axis] = 1
        return _normal(*base).to(dtype).expand(shape)
    numbers = _normal(*shape).to(dtype)
    if layout == "contiguous":
        return numbers
    if layout == "transposed":
        return numbers.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "permuted":
        return numbers.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced":
        block = torch.full((*outer, rows + 3, dim + 5), float("nan"), dtype=dtype)
        return block[..., 2 : rows + 2, :dim].copy_(numbers)
    if layout == "shifted":
        flat = torch.empty(numbers.numel() + 1, dtype=dtype)
        return flat[1:].view(shape).copy_(numbers)
    assert layout == "strided one", layout
    return numbers.mT.contiguous().mT


def fill(values: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Change the numbers in place."""
    if values == "large":
        query.mul_(64)
    elif values == "equal":
        key.copy_(key[..., :1, :].expand_as(key))
    elif values == "zeros":
        for t in (query, key, value):
            t.zero_()
    elif values == "nan query":
        query[1, 2, 3, 4] = float("nan")
    elif values == "nan value":
        value[1, 2, 3, 4] = float("nan")
    elif values == "infinite value":
        value[1, 2, 3, 4] = float("inf")
    else:
        assert values == "normal", values


def make_mask(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> Tensor:
    """Return a mask of this shape: boolean, True is seen, or of ``dtype``, added."""
    seen, added = torch.rand(shape) > 0.4, _normal(*shape).to(dtype)
    if kind == SEEN:
        return seen
    if kind == ADDED:
        return added
    if kind in ("minus infinity", "least"):
        least = float("-inf") if kind == "minus infinity" else torch.finfo(dtype).min
        seen[..., 0] = True
        return added.masked_fill(~seen, least)
    if kind == "band":
        full = torch.full(shape, float("-inf"), dtype=dtype)
        return full.triu(1) + full.tril(-10)
    if kind.startswith("nothing"):
        seen[..., 2:4, :] = False
        return seen if kind == "nothing" else added.masked_fill(~seen, float("-inf"))
    if kind == "hidden":
        return torch.zeros(shape, dtype=torch.bool)
    if kind == "expanded":
        return _normal(shape[-1]).to(dtype).expand(shape)
    if kind == "strided":
        return torch.stack([seen, ~seen], dim=-1)[..., 0]
    assert kind == "transposed", kind
    return _normal(*reversed(shape)).to(dtype).mT


def run(function: Callable[..., Tensor], case: SdpaCase, inputs: Inputs) -> dict[str, Tensor]:
    """Return the output and, of finite inputs, every gradient."""
    leaves = {"dq": inputs.query, "dk": inputs.key, "dv": inputs.value}
    # What is added to a whole row changes nothing: the gradient is zero and its rounding all.
    if inputs.mask is not None and inputs.mask.is_floating_point() and inputs.mask.shape[-1] > 1:
        leaves["dmask"] = inputs.mask
    finite = case.values not in ("nan query", "nan value", "infinite value")
    for leaf in leaves.values():
        leaf.requires_grad_(finite)
    out = function(*inputs[:4], 0.0, case.causal, scale=case.scale, enable_gqa=case.gqa)
    if not finite:
        return {"out": out}
    grads = torch.autograd.grad(out, list(leaves.values()), inputs.grad)
    return {"out": out} | dict(zip(leaves, grads))


def with_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The output of the operator, which on the CPU is what the kernels are held to."""
    four = (query, key, value, mask)
    if query.dim() != 4:
        four = four_axes(*four, None)
    stats = attention_with_stats(*four, dropout_p, is_causal, scale, enable_gqa)
    return stats.out.view(query.shape)


def expectations(case: SdpaCase, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what PyTorch makes of the case in ``dtype``, by both its ways, and in float64."""
    inputs = make_inputs(case, dtype)

    def math(as_dtype: torch.dtype) -> dict[str, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return run(F.scaled_dot_product_attention, case, inputs.to(as_dtype))

    fused = run(F.scaled_dot_product_attention, case, inputs.to(dtype))
    eager, exact = math(dtype), math(torch.float64)
    return {name: (fused[name], eager[name]) for name in exact}, exact


def assert_as_expected(
    actual: dict[str, Tensor], peers: dict[str, Any], exact: dict[str, Tensor]
) -> None:
    """Hold every result to the budget, and its nans to where they are in ``exact``."""
    assert actual.keys() == exact.keys()
    for name, result in actual.items():
        nan = exact[name].isnan()
        assert torch.equal(result.isnan().cpu(), nan), f"{name}: nan elsewhere"
        found, truth, *peers_ = (
            t.cpu().masked_fill(nan, 0) for t in (result, exact[name], *peers[name])
        )
        if found.dtype == torch.float64:
            torch.testing.assert_close(found, truth)
        else:
            # PyTorch's fused function on the CPU makes nans of a causal call with such a scale.
            right = [peer for peer in peers_ if not peer.isnan().any()]
            assert_within_budget(found, tuple(right), truth)


# --- The tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.backends(CPU)),
        pytest.param("cuda", marks=pytest.mark.backends(GPU)),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_agrees_with_pytorchs(case: SdpaCase, device: str) -> None:
    functions = attention, with_statistics
    if case.values == "nan query" and device == "cpu":
        # PyTorch's fused function on the CPU, which ours calls there, makes numbers of that nan.
        functions = (with_statistics,)
    for dtype in DTYPES[device == "cuda" :]:  # a GPU has no float64
        peers, exact = expectations(case, dtype)
        for function in functions:
            actual = run(function, case, make_inputs(case, dtype).to(dtype, device))
            assert all(result.device.type == device for result in actual.values())
            assert_as_expected(actual, peers, exact)


def test_dropout_keeps_its_share_and_the_mean() -> None:
    """Of equal scores and values of one, an output is the share kept, scaled up."""
    torch.manual_seed(0)
    drop, keys = 0.22, 64
    query = torch.zeros(8, 4, 32, 8)
    key, value = torch.randn(8, 4, keys, 8), torch.ones(8, 4, keys, 8)
    out = with_statistics(query, key, value, None, drop, False, None, False)[..., 0]
    variance = drop / (1 - drop) / keys
    assert abs(out.mean() - 1) < 5 * (variance / out.numel()) ** 0.5
    assert out.var().item() == pytest.approx(variance, rel=0.2)
    kept = out * keys * (1 - drop)
    torch.testing.assert_close(kept, kept.round())


# --- What is refused ------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """A call that ``attention`` refuses, or that nobody takes.

    Attributes:
        name: what is wrong.
        arguments: of the call, on a device.
        message: a regular expression that the error matches.
        pytorch: whether PyTorch's function "takes" it, "refuses" it too, "breaks" (in one of its
            versions it ends the process or reads memory that is not its own) or "depends" on the
            version.
    """

    name: str
    arguments: Callable[[str], dict[str, Any]]
    message: str
    pytorch: str = "refuses"


def _call(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Arguments of random numbers: query, key and value of one shape, or three."""
    shapes = shapes if len(shapes) == 3 else shapes * 3

    def arguments(device: str) -> dict[str, Any]:
        given = {
            name: torch.randn(shape, device=device).to(dtype)
            for name, shape in zip(("query", "key", "value"), shapes)
        }
        moved = {k: t.to(device) if isinstance(t, Tensor) else t for k, t in options.items()}
        return given | moved

    return arguments


def _gaps(device: str) -> dict[str, Any]:
    query = torch.randn(2, 3, 7, 16, device=device)[..., ::2]
    return {"query": query, "key": query, "value": query}


def _nested(device: str) -> dict[str, Any]:
    rows = [torch.randn(3, n, 8, device=device) for n in (5, 7)]
    nested = torch.nested.nested_tensor(rows, layout=torch.strided)
    return {"query": nested, "key": nested, "value": nested}


_ODD = (2, 3, 7, 8)
REFUSALS = (
    Refusal("last axis with gaps", _gaps, "query must be contiguous along its last", "takes"),
    Refusal("last axis of a transposed query",
            lambda device: {k: t.mT for k, t in _call((2, 3, 8, 8))(device).items()},
            "query must be contiguous along its last", "takes"),
    Refusal("narrower values", _call(_ODD, _ODD, (2, 3, 7, 5)),
            r"key and value must have the same shape, got .*7, 8\) and .*7, 5\)", "takes"),
    Refusal("wider values", _call(_ODD, _ODD, (2, 3, 7, 50)),
            "key and value must have the same shape", "takes"),
    Refusal("no head dimension", _call((2, 3, 7, 0)),
            "query must have a head dimension of at least 1, got 0", "takes"),
    Refusal("batch of 1 to be broadcast", _call((1, 3, 7, 8), _ODD, _ODD),
            r"query and key must agree in B and D, got \(1, 3, 7, 8\) and \(2, 3, 7, 8\)", "takes"),
    Refusal("head to be broadcast", _call(_ODD, (2, 1, 7, 8), (2, 1, 7, 8)),
            "key has 1 heads for 3 query heads: .*enable_gqa", "takes"),
    Refusal("batch to be broadcast", _call((3, 7, 8), _ODD, _ODD),
            r"query must be \(B, H, N, D\), got \(3, 7, 8\) with a key \(2, 3, 7, 8\)", "takes"),
    Refusal("keys and values grouped apart",
            _call((2, 4, 7, 8), (2, 2, 7, 8), (2, 1, 7, 8), enable_gqa=True),
            "key and value must have the same shape", "takes"),
    Refusal("dropout of one", _call(_ODD, dropout_p=1.0), r"in \[0, 1\), got 1.0", "takes"),
    Refusal("infinite scale", _call(_ODD, scale=float("inf")), "finite number, got inf", "takes"),
    Refusal("scale of nan", _call(_ODD, scale=float("nan")), "finite number, got nan", "takes"),
    Refusal("scale in a tensor", _call(_ODD, scale=torch.tensor(0.3)), "finite number, got tensor",
            "takes"),
    Refusal("nested", _nested, "query must not be nested: attention_varlen", "takes"),
    Refusal("fewer values than keys", _call(_ODD, _ODD, (2, 3, 6, 8)),
            "key and value must have the same shape", "breaks"),
    Refusal("one axis", _call((4,)), r"query must be .*, got \(4,\)"),
    Refusal("dtypes differ",
            lambda device: _call(_ODD)(device) | {"key": torch.ones(_ODD, device=device).half()},
            "key must be torch.float32 on .* as query is, got torch.float16"),
    Refusal("devices differ",
            lambda device: _call(_ODD)(device) | {"value": torch.ones(_ODD, device="meta")},
            "value must be .* got .* on meta"),
    Refusal("integers", _call(_ODD, dtype=torch.int32), "one of float32, .*, got torch.int32"),
    Refusal("complex", _call(_ODD, dtype=torch.complex64), "got torch.complex64"),
    Refusal("no tensor", lambda device: _call(_ODD)(device) | {"key": None},
            "key must be a tensor, got NoneType"),
    Refusal("widths differ", _call(_ODD, (2, 3, 7, 6), (2, 3, 7, 6)),
            r"query and key must agree in B and D, got .*8\) and .*6\)"),
    Refusal("batches differ", _call(_ODD, (5, 3, 7, 8), (5, 3, 7, 8)), "must agree in B and D"),
    Refusal("outer axes differ", _call((2, 3, 1, 7, 8), (3, 2, 1, 7, 8), (3, 2, 1, 7, 8)),
            r"query must be \(B, H, N, D\), got .* with a key \(3, 2, 1, 7, 8\)"),
    Refusal("heads differ", _call((2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
            "key has 2 heads for 4 query heads"),
    Refusal("groups that do not divide",
            _call((2, 4, 7, 8), (2, 3, 7, 8), (2, 3, 7, 8), enable_gqa=True),
            "key has 3 heads for 4 query heads"),
    Refusal("mask and causal",
            _call(_ODD, attn_mask=torch.ones(7, 7, dtype=torch.bool), is_causal=True),
            "attn_mask and is_causal=True cannot be combined", "depends"),
    Refusal("mask of integers", _call(_ODD, attn_mask=torch.ones(7, 7, dtype=torch.int32)),
            "attn_mask must be bool or torch.float32"),
    Refusal("mask of another width", _call(_ODD, attn_mask=torch.zeros(7, 7, dtype=torch.float64)),
            "attn_mask must be bool or torch.float32"),
    Refusal("mask of a wrong shape", _call(_ODD, attn_mask=torch.ones(5, 7, dtype=torch.bool)),
            r"attn_mask must broadcast to \(B, H, N, M\) = \(2, 3, 7, 7\), got \(5, 7\)"),
    Refusal("mask with more heads", _call((2, 1, 7, 8), attn_mask=torch.zeros(2, 3, 7, 7)),
            "attn_mask must broadcast"),
    Refusal("mask of five axes", _call(_ODD, attn_mask=torch.zeros(1, 2, 3, 7, 7)),
            "attn_mask must broadcast"),
    Refusal("mask with other outer axes",
            _call((2, 3, 1, 7, 8), attn_mask=torch.zeros(3, 2, 1, 7, 7)),
            r"attn_mask must broadcast to \(..., H, N, M\) with outer axes \(2, 3\)"),
    Refusal("negative dropout", _call(_ODD, dropout_p=-0.1), r"in \[0, 1\), got -0.1"),
    Refusal("dropout past one", _call(_ODD, dropout_p=1.5), r"in \[0, 1\), got 1.5"),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_a_refusal_is_one_line_and_pytorchs_is_known(refusal: Refusal) -> None:
    torch.manual_seed(0)
    arguments = refusal.arguments("cpu")
    with pytest.raises(ValueError, match=refusal.message) as caught:
        attention(**arguments)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, RuntimeError)  # as PyTorch's errors are
    if refusal.pytorch == "takes":
        F.scaled_dot_product_attention(**arguments)
    elif refusal.pytorch == "refuses":
        with pytest.raises((RuntimeError, TypeError)):
            F.scaled_dot_product_attention(**arguments)


@pytest.mark.backends(GPU)
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_a_refusal_is_one_line_on_a_gpu(refusal: Refusal) -> None:
    with pytest.raises(ValueError, match=refusal.message) as caught:
        attention(**refusal.arguments("cuda"))
    assert "\n" not in str(caught.value)
