"""Report which implementation a call of softmax attention runs, and why."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _tiles
from .._checks import (
    ANY_HEAD_DIM,
    DTYPES,
    MAX_HEAD_DIM,
    ArgumentError,
    autocast,
    check_tensor,
    shown,
)
from . import dispatch, op, sdpa
from .call import Call
from .checks import NO_WINDOW, checked_dense, checked_packed, checked_varlen, four_axes
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


def explain(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_lengths: Tensor | Sequence[int] | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] = NO_WINDOW,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    max_seqlen: int = 0,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    max_seqlen_k: int | None = None,
    stats: bool = False,
    backward: bool | None = None,
    capability: int | None = None,
) -> Explanation:
    """Return which implementation a call runs, forward and backward, and why; run nothing.

    The arguments of the call are those of ``attention``, with (B, H, N, D) and other ranks, not
    nested; of ``attention_qkvpacked``, a projection (B, N, 3, H, D) alone; or, with ``cu_seqlens``,
    of ``attention_varlen``, (T, H, D). Tensors may be on the meta device: only shapes and strides
    are read. The other arguments are:

    - stats: whether the call is to a function ``_with_stats``.
    - backward: whether a backward follows; by default, whether autograd would record the call.
    - capability: explain the call for a GPU of this compute capability (90 for 9.0), whatever the
      device of the tensors.

    Returns:
        Explanation, which prints as one line.

    Raises:
        ValueError: if the call itself would raise one, or does not have one of the arguments.
    """
    check_tensor("query", query)
    if capability is not None and (type(capability) is not int or capability < 50):
        raise ArgumentError(
            f"capability must be an int such as 90 for 9.0, got {shown(capability)}"
        )
    if (key is None) != (value is None):
        raise ArgumentError("key and value go together: give both, or a projection alone")
    form: Any = op.Dense if cu_seqlens is None else op.Varlen
    form = op.Packed if key is None else form
    others = {"attn_mask": attn_mask, "softcap": softcap}
    if form is op.Packed:
        others |= {"enable_gqa": enable_gqa, "cu_seqlens": cu_seqlens}
    elif form is op.Varlen:
        others |= {"key_lengths": key_lengths}
    for name, other in others.items() if form is not op.Dense else ():
        if isinstance(other, Tensor) or other not in (None, 0, False):
            raise ArgumentError(f"{form.name} does not accept {name}")
    max_head_dim = MAX_HEAD_DIM if stats else ANY_HEAD_DIM
    with _tiles.assume(capability):
        inputs: Any = autocast(*(t for t in (query, key, value) if t is not None))
        check: Any = checked_dense
        if form is op.Varlen:
            check = checked_varlen
            ends = cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k
            params: Any = (*ends, dropout_p, is_causal, scale, enable_gqa, window_size, None)
        elif form is op.Packed:
            check = checked_packed
            params = key_lengths, dropout_p, is_causal, scale, window_size, None, max_head_dim
        else:
            if query.dim() != 4:
                four: list[Any] = [*inputs, attn_mask, key_lengths]
                *inputs, attn_mask = four_axes(*four)
            params = attn_mask, dropout_p, is_causal, scale, enable_gqa, key_lengths, softcap
            params = *params, window_size, None, max_head_dim
        given: list[Any] = [*inputs, *params]
        tensors, numbers = check(*given)
        # A placeholder: drawing a seed would advance the generator.
        seed = query.new_empty(1, dtype=torch.int64) if dropout_p else None
        operands: list[Any] = [*tensors, seed, *numbers]
        call = form.call(*operands)
        if dispatch.on_gpu(call.query) and call.query.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ArgumentError(f"query on cuda must be one of {names}, got {call.query.dtype}")
        if backward is None:
            recorded = any(t is not None and t.requires_grad for t in call[:4])
            backward = torch.is_grad_enabled() and recorded
        return _explain(call, stats, backward, form is op.Packed)


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
    if not op.is_empty(call):
        _tiles.check_capability(query.device)
    reason = "no rule in library.toml dispatches such calls to PyTorch"
    if stats:
        reason = "PyTorch's attention has no statistics"
    elif gpu < dispatch.TUNED:
        reason = dispatch.beyond_pytorch(call) or "the call is empty"
    reason = f"compute capability {gpu // 10}.{gpu % 10}; {reason}"
    forward = dispatch.choose_forward(call, stats)
    route = Route(forward.kernel, forward.tile.arguments, reason)
    if not backward:
        return Explanation(route, None)
    out = query if call.sequences is not None else op.new_out(query)
    gradients = (torch.empty_like(t) for t in call[:3])
    done = dispatch.choose_backward(call, out, out, *gradients)
    return Explanation(route, Route(done.kernel, done.tile.arguments, reason))
