"""Report which implementation a call of softmax attention runs, and why."""

from typing import Any, NamedTuple

import torch

from .. import _tiles
from .._checks import DTYPES, MAX_HEAD_DIM, ArgumentError, shown
from ..gpus import TUNED
from . import dispatch, op, sdpa
from .call import Call
from .dispatch import Library


class Route(NamedTuple):
    """The implementation of one direction of a call.

    Attributes:
        implementation: a kernel by the name of its table, such as ``hopper_forward``;
            ``sdpa``, PyTorch's ``scaled_dot_product_attention``; ``varlen_attn``, of
            ``torch.nn.attention.varlen``; or ``reference``, with all scores in memory.
        tile: block sizes and launch options of the kernel; empty for a library.
        reason: why, in one line.
    """

    implementation: str
    tile: dict[str, Any]
    reason: str

    def __str__(self) -> str:
        """Return the implementation with its tile."""
        tile = ", ".join(f"{name}={value}" for name, value in self.tile.items())
        return f"{self.implementation}({tile})" if tile else self.implementation


class Explanation(NamedTuple):
    """The implementations of a call.

    Attributes:
        forward: of the output.
        backward: of the gradients; None if no gradient is required.
    """

    forward: Route
    backward: Route | None

    def __str__(self) -> str:
        """Return one line, with the reason that both directions share."""
        backward = "" if self.backward is None else f", backward {self.backward}"
        return f"forward {self.forward}{backward}: {self.forward.reason}"


def check_assumed_capability(capability: int | None) -> None:
    """Raise ValueError unless ``capability`` is None or an int such as 90 for 9.0."""
    if capability is not None and (type(capability) is not int or capability < 50):
        raise ArgumentError(
            f"capability must be an int such as 90 for 9.0, got {shown(capability)}"
        )


def explain_call(
    operator: type[op.SoftmaxAttention], arguments: Any, stats: bool, backward: bool | None
) -> Explanation:
    """Return the implementations of checked arguments; ``backward`` None asks autograd."""
    first, *_ = arguments
    if arguments.dropout_p:
        # A placeholder, because drawing a seed would advance the generator.
        arguments = arguments._replace(seed=first.new_empty(1, dtype=torch.int64))
    call = operator.call(arguments)
    if dispatch.on_gpu(call.query) and call.query.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ArgumentError(f"query on cuda must be one of {names}, got {call.query.dtype}")
    if backward is None:
        tensors = *call.operands, call.attn_mask
        recorded = any(t is not None and t.requires_grad for t in tensors)
        backward = torch.is_grad_enabled() and recorded
    return _explain(call, stats, backward, operator is op.Packed)


def _explain(call: Call, stats: bool, backward: bool, packed: bool) -> Explanation:
    """Return the implementations of a checked call."""
    query, on_gpu, library = call.query, dispatch.on_gpu(call.query), None
    if not stats or not on_gpu:
        if query.shape[-1] > MAX_HEAD_DIM:
            sdpa.check_wide(query, call.softcap)
        library = dispatch.library_of(call, backward, packed)
        if library is None and not on_gpu:
            library = Library("reference", f"the kernels run on CUDA, not on {query.device}")
    if library is not None:
        route = Route("reference" if stats else library.name, {}, library.reason)
        return Explanation(route, route if backward else None)
    gpu = _tiles.capability(query.device)
    if not op.Dense.is_empty(call):
        _tiles.check_capability(query.device)
    reason = "no rule in library.toml dispatches such calls to PyTorch"
    if stats:
        reason = "PyTorch's attention has no statistics"
    elif gpu < TUNED:
        deterministic = torch.are_deterministic_algorithms_enabled()
        reason = dispatch.beyond_pytorch(call, deterministic) or "the call is empty"
    reason = f"compute capability {gpu // 10}.{gpu % 10}; {reason}"
    forward = dispatch.choose_forward(call, stats)
    route = Route(forward.kernel, forward.tile.arguments, reason)
    if not backward:
        return Explanation(route, None)
    out = query if call.sequences is not None else op.new_out(query)
    gradients = [torch.empty_like(t) for t in call.operands]
    chosen = dispatch.choose_backward(call, out, out, gradients)
    return Explanation(route, Route(chosen.kernel, chosen.tile.arguments, reason))
