"""The operators of softmax attention, one for each memory layout of query, key and value.

``attention`` gets three tensors (B, H, N, D), ``attention_qkvpacked`` one projection and
``attention_varlen`` sequences side by side. Each turns its arguments into a ``Call``, which does
not tell the kernels and the reference which operator it was.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import MAX_ROW_STRIDE
from .._launch_cache import Signature
from ..dispatcher import in_forward_mode
from ..route import (
    LibraryCall,
    Operator,
    Products,
    Results,
    Shapes,
    compute,
    register,
    remember,
)
from . import cpu, dispatch, sdpa
from .call import (
    BIASED_TENSORS,
    NUMBERS,
    PACKED_NUMBERS,
    PACKED_TENSORS,
    TENSORS,
    VARLEN_NUMBERS,
    VARLEN_TENSORS,
    BiasedArguments,
    Call,
    PackedArguments,
    Sequences,
    VarlenArguments,
)


class DenseGradients(NamedTuple):
    """The gradients of query, key and value, and that of an additive mask if it is wanted."""

    dquery: Tensor
    dkey: Tensor
    dvalue: Tensor
    dattn_mask: Tensor | None = None

    def separate(self) -> Iterator[Tensor]:
        """Yield dq, dk and dv with the axes of the call's tensors."""
        return iter((self.dquery, self.dkey, self.dvalue))


class VarlenGradients(NamedTuple):
    """The gradients of query, key and value (T, H, D)."""

    dquery: Tensor
    dkey: Tensor
    dvalue: Tensor

    def separate(self) -> Iterator[Tensor]:
        """Yield dq, dk and dv."""
        return iter((self.dquery, self.dkey, self.dvalue))


class PackedGradients(NamedTuple):
    """The gradient of a projection (B, N, 3, H, D)."""

    dqkv: Tensor

    def separate(self) -> Iterator[Tensor]:
        """Yield dq, dk and dv (B, H, N, D), views."""
        # Autograd forbids writing to views that one call returned together.
        return (self.dqkv.select(2, part).transpose(1, 2) for part in range(3))


class BiasedGradients(NamedTuple):
    """The gradients of a projection (B, N, 3, H, D) and of its bias (3 * H * D,)."""

    dqkv: Tensor
    dbias: Tensor

    def separate(self) -> Iterator[Tensor]:
        """Yield dq, dk and dv (B, H, N, D), views."""
        return PackedGradients(self.dqkv).separate()


class SoftmaxAttention(Operator):
    """Shared code of the operators of softmax attention."""

    kernels = "attention.dispatch"
    saved: Sequence[str] = ("out", "max_log_sum")
    cast = 3

    @staticmethod
    def bind_saved(saved: dict[str, Tensor]) -> Results:
        """Return the saved results by name: pairs, or the log-sum-exp, with one axis less."""
        out, rows = saved["out"], saved["max_log_sum"]
        return Results(out, rows) if rows.dim() == out.dim() else Results(out, lse=rows)

    @staticmethod
    def saved_of(results: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return output and pairs of a forward's results."""
        out, *_, max_log_sum = results
        return out, max_log_sum

    @staticmethod
    def is_empty(call: Call) -> bool:
        """Return whether there is no token, head, entry or sequence."""
        sizes = *call.query.shape, *call.key.shape
        sequences = call.sequences
        return 0 in sizes or (sequences is not None and 0 in (sequences.rows, sequences.cols))

    @classmethod
    def run_reference(cls, call: Call, results: Results) -> None:
        """Fill the results by the reference."""
        cpu.forward(call, results)

    @classmethod
    def run_reference_backward(
        cls, grad: Tensor, call: Call, saved: Results, gradients: Any
    ) -> None:
        """Fill the gradients by the reference."""
        *three, ds = cpu.backward(grad, call)
        for slot, gradient in zip(gradients.separate(), three, strict=True):
            slot.copy_(gradient)
        dattn_mask = getattr(gradients, "dattn_mask", None)
        if dattn_mask is not None and ds is not None:
            dattn_mask.copy_(ds.sum_to_size(dattn_mask.shape))

    @staticmethod
    def from_query(out: Tensor) -> Tensor:
        """Return a library's output with the axes of the operator's."""
        return out


# The arguments of every kernel, whose operands come from different tensors.
_POINTERS = {
    "mask_view": "attn_mask",
    "lengths_ptr": "key_lengths",
    "seed_ptr": "seed",
    "sample_ptr": "sample",
    "out_view": "out",
    "max_log_sum_ptr": "max_log_sum",
    "lse_ptr": "lse",
    "stats_ptr": "stats",
    "do_view": "grad",
}
_SEPARATE = {
    "q_view": "query",
    "k_view": "key",
    "v_view": "value",
    "dq_view": "dquery",
    "dk_view": "dkey",
    "dv_view": "dvalue",
}


def _with_descriptors(pointers: dict[str, str]) -> dict[str, str]:
    """Add the names of arguments that are TMA descriptors instead of views."""
    views = {name: tensor for name, tensor in pointers.items() if name.endswith("_view")}
    described = {f"{name.removesuffix('_view')}_desc": tensor for name, tensor in views.items()}
    return pointers | described


class Dense(SoftmaxAttention):
    """Query, key and value (B, H, N, D)."""

    name = "attention"
    tensors: Mapping[str, str] = TENSORS
    numbers: Mapping[str, str] = NUMBERS
    Arguments, Gradients = Call, DenseGradients
    optional_gradient = "attn_mask"
    cast = 4
    pointers: Mapping[str, str] = _with_descriptors({**_POINTERS, **_SEPARATE})

    @staticmethod
    def shapes(arguments: Call) -> Shapes:
        """Return the shapes of the results."""
        batch, heads, rows, dim = arguments.query.shape
        return Shapes(
            out=(batch, heads, rows, dim),
            rows=(batch, heads, rows),
            per_head=(batch, heads),
            heads=(rows, heads * dim),
        )

    @classmethod
    def new_out(cls, arguments: Call) -> Tensor:
        """Allocate the output."""
        return new_out(arguments.query)

    @classmethod
    def new_gradients(cls, arguments: Call, optional: bool) -> DenseGradients:
        """Allocate the gradients, that of the mask if it is wanted."""
        mask = arguments.attn_mask
        dattn_mask = mask.new_empty(mask.shape) if optional and mask is not None else None
        query, key, value = arguments.operands
        return DenseGradients(new_out(query), new_out(key), new_out(value), dattn_mask)

    @staticmethod
    def flops(arguments: Call) -> Products:
        """Return the FLOPs of the products of a forward."""
        batch, heads, rows, dim = arguments.query.shape
        product = 2 * batch * heads * rows * arguments.key.shape[2] * dim
        return Products(product, product)


class Packed(SoftmaxAttention):
    """One projection (B, N, 3, H, D), whose gradient is written as one."""

    name = "attention_qkvpacked"
    tensors: Mapping[str, str] = PACKED_TENSORS
    numbers: Mapping[str, str] = PACKED_NUMBERS
    Arguments, Gradients = PackedArguments, PackedGradients
    pointers: Mapping[str, str] = _with_descriptors(
        {
            **_POINTERS,
            "q_view": "qkv",
            "k_view": "qkv",
            "v_view": "qkv",
            "dq_view": "dqkv",
            "dk_view": "dqkv",
            "dv_view": "dqkv",
        }
    )
    cast = 1

    @staticmethod
    def call(arguments: PackedArguments) -> Call:
        """Return the call of these arguments."""
        named = arguments._asdict()
        query, key, value = split_qkv(named.pop("qkv"))
        return Call(query, key, value, attn_mask=None, **named)

    @staticmethod
    def shapes(arguments: PackedArguments) -> Shapes:
        """Return the shapes of the results."""
        batch, rows, _three, heads, dim = arguments.qkv.shape
        return Shapes(
            out=(batch, rows, heads, dim),
            rows=(batch, heads, rows),
            per_head=(batch, heads),
            heads=(rows, heads * dim),
        )

    @staticmethod
    def as_query(out: Tensor) -> Tensor:
        """Return an output, or its gradient, with the axes of the call's query."""
        return out.transpose(1, 2)

    @staticmethod
    def from_query(out: Tensor) -> Tensor:
        """Return a library's output with the axes of the operator's."""
        return out.transpose(1, 2).contiguous()

    @staticmethod
    def flops(arguments: PackedArguments) -> Products:
        """Return the FLOPs of the products of a forward."""
        batch, rows, _three, heads, dim = arguments.qkv.shape
        product = 2 * batch * heads * rows * rows * dim
        return Products(product, product)


class Biased(Packed):
    """One projection (B, N, 3, H, D) whose bias gets its gradient here, not where it was added.

    The sum of ``dqkv`` over tokens is at hand in a backward, whereas a linear layer reads ``dqkv``
    once more. The layer adds the bias detached.
    """

    name = "attention_qkvpacked_biased"
    tensors: Mapping[str, str] = BIASED_TENSORS
    Arguments, Gradients = BiasedArguments, BiasedGradients

    @staticmethod
    def call(arguments: BiasedArguments) -> Call:
        """Return the call of these arguments."""
        named = arguments._asdict()
        bias = named.pop("bias")
        if in_forward_mode() or torch._C._are_functorch_transforms_active():
            # The reference provides further derivatives: add a 0 that depends on the bias.
            named["qkv"] = named["qkv"] + (bias - bias.detach()).view(named["qkv"].shape[2:])
        return Packed.call(PackedArguments(**named))

    @classmethod
    def run_reference_backward(
        cls, grad: Tensor, call: Call, saved: Results, gradients: BiasedGradients
    ) -> None:
        """Fill the gradients by the reference."""
        super().run_reference_backward(grad, call, saved, gradients)
        dispatch.sum_tokens(gradients.dqkv, gradients.dbias)


class Varlen(SoftmaxAttention):
    """Sequences side by side: query, key and value (T, H, D)."""

    name = "attention_varlen"
    tensors: Mapping[str, str] = VARLEN_TENSORS
    numbers: Mapping[str, str] = VARLEN_NUMBERS
    Arguments, Gradients = VarlenArguments, VarlenGradients
    pointers: Mapping[str, str] = {
        **_POINTERS,
        **_SEPARATE,
        "starts_ptr": "cu_seqlens",
        "key_starts_ptr": "cu_seqlens_k",
    }

    @staticmethod
    def call(arguments: VarlenArguments) -> Call:
        """Return the call of these arguments."""
        named = arguments._asdict()
        # A copy only if strided: the kernels index it with stride 1.
        starts, key_starts = (named.pop(n).contiguous() for n in ("cu_seqlens", "cu_seqlens_k"))
        longest = named.pop("max_seqlen"), named.pop("max_seqlen_k")
        sequences = Sequences(starts, key_starts, *longest)
        return Call(**named, attn_mask=None, key_lengths=None, sequences=sequences)

    @staticmethod
    def shapes(arguments: VarlenArguments) -> Shapes:
        """Return the shapes of the results."""
        tokens, heads, dim = arguments.query.shape
        return Shapes(
            out=(tokens, heads, dim),
            rows=(heads, tokens),
            per_head=(arguments.cu_seqlens.shape[0] - 1, heads),
            heads=(arguments.max_seqlen, heads * dim),
        )

    @staticmethod
    def flops(arguments: VarlenArguments) -> Products:
        """Return the FLOPs of the products of a forward."""
        _, heads, dim = arguments.query.shape
        rows = _lengths(arguments.cu_seqlens, arguments.max_seqlen)
        cols = _lengths(arguments.cu_seqlens_k, arguments.max_seqlen_k)
        product = 2 * heads * dim * sum(n * m for n, m in zip(rows, cols, strict=True))
        return Products(product, product)


def _lengths(starts: Tensor, longest: int) -> list[int]:
    """Return the length of each sequence, or the longest for all if values cannot be read."""
    if starts.device.type == "meta" or isinstance(starts, torch._subclasses.FakeTensor):
        return [longest] * (starts.shape[0] - 1)
    return starts.diff().clamp(max=longest).tolist()


def split_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views (B, H, N, D) of the query, key and value in (B, N, 3, H, D).

    Uses the split whose backward is a single copy, a stack.
    """
    query, key, value = qkv.unbind(2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def new_out(like: Tensor) -> Tensor:
    """Allocate (B, H, N, D) in the memory order (B, N, H, D), which the next projection reads.

    With so many heads that its rows would be out of reach of kernels, it is contiguous.
    """
    batch, heads, rows, dim = like.shape
    width = heads * dim
    strides = rows * width, dim, width, 1
    if width > MAX_ROW_STRIDE:
        strides = rows * width, rows * dim, dim, 1
    return like.new_empty_strided((batch, heads, rows, dim), strides)


# --- Plain calls, which a library may compute -----------------------------------------------------


def compute_plain(
    operator: type[SoftmaxAttention],
    signature: Signature | None,
    arguments: Any,
    enable_gqa: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """Return the output of a checked call; one with a signature is kept for ``route.repeat``.

    Raises:
        ValueError: a deterministic call with a backward that only a library can compute, on a GPU.
    """
    call = operator.call(arguments)
    if signature is None:
        recorded = any(t.requires_grad for t in call.operands)
        backward = torch.is_grad_enabled() and recorded
    else:
        _, _, backward = signature
    packed = operator is Packed
    library = dispatch.library_of(call, backward, packed, deterministic=deterministic)
    if library is not None and deterministic and backward:
        dispatch.check_deterministic(call, library)
    if library is None:
        out, *_ = compute(operator, signature, arguments)
        return out
    if library.name == "varlen_attn":
        return sdpa.varlen_attention(call)
    if signature is not None and not deterministic:  # whose check a repeated call would skip
        key, *_ = signature
        named = arguments._asdict()
        numbers = [named[name] for name in operator.numbers]
        remember(key, LibraryCall(partial(_library_again, operator, numbers, enable_gqa)))
    return operator.from_query(sdpa.library_attention(call, enable_gqa))


def _library_again(
    operator: type[SoftmaxAttention],
    numbers: Sequence[Any],
    enable_gqa: bool,
    tensors: Sequence[Any],
) -> Tensor | None:
    """Return PyTorch's result of a repeated call, or None if ours would be faster."""
    first, *_ = tensors
    if first.dtype == torch.float32 and not torch.backends.cuda.mem_efficient_sdp_enabled():
        return None  # PyTorch's remaining kernels may round to TF32
    call = operator.call(operator.Arguments(*tensors, None, *numbers))
    return operator.from_query(sdpa.library_attention(call, enable_gqa))


for _operator in (Dense, Packed, Biased, Varlen):
    register(_operator)
