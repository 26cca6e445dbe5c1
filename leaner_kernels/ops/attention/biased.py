"""Let the backward of attention compute the bias gradient of the linear layer before it.

The gradient of a bias is the sum over tokens of the gradient of the layer's output. A backward of
attention has most of it in registers, whereas autograd reads that gradient once more for the sum.
``project`` therefore adds the bias detached, and the operator ``Biased`` returns its gradient.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .. import _hooks, _tiles
from .._checks import MAX_HEAD_DIM
from .._launch_cache import MAX_CACHED, TENSORS, needs_no_dispatcher, signature_of
from ..route import compute
from . import dispatch, op
from .call import BiasedArguments, Call
from .checks import checked_packed
from .kernels import SUMS_BIAS

# Whether the calls that ``takes`` describes use this. Set it to True once a GPU has shown a gain.
ENABLED = False


def takes(linear: nn.Module, x: Tensor, heads: int, is_causal: bool, dropout_p: float) -> bool:
    """Return whether the backward of attention may compute the gradient of a layer's bias.

    Only calls that nothing but autograd sees qualify: no hook of the layer, transform, mode,
    subclass of a tensor or trace. All others are computed by the layer as it is.

    Args:
        linear: the layer, to (B, N, 3 * H * D).
        x: (B, N, dim), its input.
        heads: H.
        is_causal: as for ``attention_qkvpacked``.
        dropout_p: as for ``attention_qkvpacked``.
    """
    if not ENABLED or torch.compiler.is_compiling() or dropout_p or _hooks.current is not None:
        return False
    if type(linear) is not nn.Linear or _is_intercepted(linear):
        return False
    bias = linear.bias
    if bias is None or not bias.requires_grad or not torch.is_grad_enabled():
        return False
    if not TENSORS.issuperset((type(x), type(linear.weight), type(bias))):
        return False
    if not needs_no_dispatcher((x, linear.weight, bias)):
        return False
    autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else x.dtype
    batch, tokens, _ = x.shape
    shape = batch, heads, tokens, linear.out_features // (3 * heads)
    return _sums_bias(_tiles.capability(x.device), dtype, shape, is_causal)


def _is_intercepted(linear: nn.Linear) -> bool:
    """Return whether a call of a layer runs anything other than its forward."""
    hooks = (
        linear._forward_hooks,
        linear._forward_pre_hooks,
        linear._backward_hooks,
        linear._backward_pre_hooks,
    )
    replaced = "forward" in vars(linear)
    return replaced or any(hooks) or bool(torch_module._has_any_global_hook())


@lru_cache(MAX_CACHED)
def _sums_bias(
    capability: int, dtype: torch.dtype, shape: tuple[int, ...], is_causal: bool
) -> bool:
    """Return whether the kernel of a backward (B, H, N, D), packed, sums its gradient."""
    batch, heads, tokens, dim = shape
    qkv = torch.empty(batch, tokens, 3, heads, dim, dtype=dtype, device="meta")
    call = Call(*op.split_qkv(qkv), None, None, None, 0.0, is_causal, None)
    with _tiles.assume(capability):
        if op.Packed.is_empty(call) or dispatch.library_of(call, backward=True, packed=True):
            return False
        # The output and its gradient are aligned where the query is.
        kernel, _ = dispatch.choose_backward(call, call.query, call.query, call.operands)
    return kernel in SUMS_BIAS


def project(linear: nn.Linear, x: Tensor) -> Tensor:
    """Apply a layer that ``takes`` allows; its bias gets a gradient from ``attend`` alone."""
    return F.linear(x, linear.weight, linear.bias.detach())


def attend(bias: Tensor, qkv: Tensor, *, key_lengths: Any = None, **params: Any) -> Tensor:
    """Compute ``attention_qkvpacked`` of what ``project`` returned, and give ``bias`` a gradient.

    ``params`` are ``dropout_p`` and ``is_causal``.
    """
    checked = checked_packed(qkv, key_lengths=key_lengths, max_head_dim=MAX_HEAD_DIM, **params)
    arguments = BiasedArguments(bias=bias, **checked._asdict())
    tensors = qkv, bias, arguments.key_lengths, None  # no sample
    signature = signature_of(tensors, (op.Biased.name, *params.values()))
    out, *_ = compute(op.Biased, signature, arguments)
    return out
