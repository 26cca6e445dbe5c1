"""Making operators of implementations: schemas, devices, fakes and autograd.

``define`` and ``impl`` with a thin autograd Function cost less than half of what ``custom_op`` with
``register_autograd`` costs a call; short-sequence kernels are launch-bound, so that is what users
would feel.

``register`` serves the operators whose forward takes a few tensors and numbers and gives an output,
the log-sum-exp of each softmax row and, when asked, ``AttentionStats``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

library = torch.library.Library("leaner_kernels", "FRAGMENT")


class Shapes(NamedTuple):
    """Shapes of what an operator returns.

    Attributes:
        out: of the output, which is contiguous and has the dtype of the first input.
        lse: of the log-sum-exp of each softmax row, float32.
        per_head: (B, H), of each statistic.
        heads: (tokens, H * D), of one captured sample.
    """

    out: tuple[int, ...]
    lse: tuple[int, ...]
    per_head: tuple[int, int]
    heads: tuple[int, int]


class Implementation(Protocol):
    """How one device computes an operator: every result goes into a tensor that it is given."""

    def forward(
        self,
        inputs: tuple[Tensor, ...],
        knobs: tuple[Any, ...],
        out: Tensor,
        lse: Tensor,
        stats: list[Tensor] | None,
        sample: Tensor | None,
    ) -> None:
        """Fill ``out``, ``lse`` and, unless None, ``stats``.

        ``stats`` are max_logit, entropy, prob_norm and head_norm, (B, H), then heads (S, tokens,
        H * D), where S is 0 without ``sample`` (S,) int32. All are float32 and uninitialised.
        """
        ...

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, ...],
        knobs: tuple[Any, ...],
        lse: Tensor,
        grads: tuple[Tensor, ...],
    ) -> None:
        """Fill ``grads``, contiguous, one of each input, from ``grad`` of the output.

        ``grad`` is contiguous along its last axis.
        """
        ...


def register(
    name: str,
    *,
    inputs: Sequence[str],
    knobs: str,
    shapes: Callable[..., Shapes],
    cpu: Implementation,
    cuda: Callable[[], Implementation],
    instead: str,
) -> None:
    """Define ``leaner_kernels::NAME``, ``NAME_with_stats`` and ``NAME_backward``.

    In Python ``torch.ops.leaner_kernels.NAME(*inputs, *knobs)`` returns (out, lse), and
    ``NAME_with_stats(*inputs, sample, *knobs)`` returns (out, lse, max_logit, entropy, prob_norm,
    head_norm, heads), with ``sample`` None or (S,) int32. Each has the first derivative of every
    input; what is kept for it is the inputs and lse.

    Args:
        name: of the operator.
        inputs: names of its tensors, all differentiable.
        knobs: its numbers, as in a schema: ``"int window, float scale"``.
        shapes: gives ``Shapes`` of ``(*inputs, *knobs)``.
        cpu: computes it on the CPU.
        cuda: imports, at the first call, what computes it on a GPU.
        instead: what second derivatives could be taken of, for the message that refuses them.
    """
    count = len(inputs)
    tensors = ", ".join(f"Tensor {each}" for each in inputs)
    result = "(Tensor out, Tensor lse"
    stats = "Tensor max_logit, Tensor entropy, Tensor prob_norm, Tensor head_norm, Tensor heads"
    grads = ", ".join(f"Tensor d{each}" for each in inputs)
    grads = f"({grads})" if count > 1 else "Tensor"
    library.define(f"{name}({tensors}, {knobs}) -> {result})")
    library.define(f"{name}_with_stats({tensors}, Tensor? sample, {knobs}) -> {result}, {stats})")
    library.define(f"{name}_backward(Tensor grad, {tensors}, Tensor lse, {knobs}) -> {grads}")
    plain, with_stats, backward = (
        getattr(torch.ops.leaner_kernels, name + suffix).default
        for suffix in ("", "_with_stats", "_backward")
    )

    def new_results(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        shape, first = shapes(*args), args[0]
        return first.new_empty(shape.out), _float32(first, shape.lse)

    def new_stats(args: tuple[Any, ...], sample: Tensor | None) -> list[Tensor]:
        shape, slots = shapes(*args), 0 if sample is None else sample.shape[0]
        per_head = [_float32(args[0], shape.per_head) for _ in range(4)]
        return [*per_head, _float32(args[0], (slots, *shape.heads))]

    def new_gradients(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty_like(each, memory_format=torch.contiguous_format) for each in args[:count]
        )

    def one_or_all(gradients: tuple[Tensor, ...]) -> Any:
        return gradients if count > 1 else gradients[0]

    def implement(key: str, find: Callable[[], Implementation], wrap: Callable) -> None:
        def run(*args):
            out, lse = new_results(args)
            find().forward(args[:count], args[count:], out, lse, None, None)
            return out, lse

        def run_with_stats(*args):
            sample, args = args[count], args[:count] + args[count + 1 :]
            out, lse = new_results(args)
            stats = new_stats(args, sample)
            find().forward(args[:count], args[count:], out, lse, stats, sample)
            return out, lse, *stats

        def run_backward(grad, *args):
            lse, args = args[count], args[:count] + args[count + 1 :]
            gradients = new_gradients(args)
            find().backward(grad, args[:count], args[count:], lse, gradients)
            return one_or_all(gradients)

        library.impl(name, wrap(run), key)
        library.impl(f"{name}_with_stats", wrap(run_with_stats), key)
        library.impl(f"{name}_backward", wrap(run_backward), key)

    implement("CPU", lambda: cpu, on_cpu)
    implement("CUDA", cuda, on_device)

    @torch.library.register_fake(f"leaner_kernels::{name}", lib=library)
    def _(*args):
        return new_results(args)

    @torch.library.register_fake(f"leaner_kernels::{name}_with_stats", lib=library)
    def _(*args):
        sample, args = args[count], args[:count] + args[count + 1 :]
        return *new_results(args), *new_stats(args, sample)

    @torch.library.register_fake(f"leaner_kernels::{name}_backward", lib=library)
    def _(_grad, *args):
        return one_or_all(new_gradients(args))

    class Function(torch.autograd.Function):
        """Runs the operator with or without statistics: everything after ``out`` is one."""

        @staticmethod
        def forward(ctx, op, keyset, *args):
            with torch._C._AutoDispatchBelowAutograd():
                out, lse, *stats = op.redispatch(keyset, *args)
            ctx.save_for_backward(*args[:count], lse)
            ctx.num_args = len(args)
            ctx.knobs = args[count + (op is with_stats) :]
            ctx.mark_non_differentiable(lse, *stats)
            # Zeros for the statistics would be a launch each.
            ctx.set_materialize_grads(False)
            return out, lse, *stats

        @staticmethod
        def backward(ctx, grad, *_):
            gradients = (None,) * count
            if grad is not None:
                # A gradient that was expanded (a sum's, say) has stride 0 along its last axis.
                grad = grad if grad.stride(-1) == 1 else grad.contiguous()
                gradients = backward(grad, *ctx.saved_tensors, *ctx.knobs)
                gradients = gradients if count > 1 else (gradients,)
            return None, None, *gradients, *(None,) * (ctx.num_args - count)

    for op in (plain, with_stats):
        library.impl(op, differentiable(Function, op), "Autograd", with_keyset=True)
    refuse = differentiable_once(backward, instead)
    library.impl(backward, refuse, "Autograd", with_keyset=True)


def _float32(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def upcast(t: Tensor) -> Tensor:
    """Return half precision as float32, anything else as it is."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def on_cpu(run: Callable[..., Any]) -> Callable[..., Any]:
    """Compute as written: a region of autocast reaches into implementations, and would round."""

    def call(*args: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return run(*args)

    return call


def on_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Launch on the card of the first tensor: Triton launches on the current one."""

    def call(tensor: Tensor, *args: Any) -> Any:
        with torch.cuda.device(tensor.device):
            return launch(tensor, *args)

    return call


def differentiable(function: type[torch.autograd.Function], op: Any) -> Any:
    """Return the Autograd implementation of ``op``: ``function`` where a gradient is wanted."""

    def call(keyset, *args):
        below = keyset & torch._C._after_autograd_keyset
        # Forward-mode tangents ride on tensors that require no gradient: the Function refuses them.
        if _wants_gradient(args) or forward_ad._current_level >= 0:
            return function.apply(op, below, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(below, *args)

    return call


def differentiable_once(op: Any, instead: str) -> Any:
    """Return the Autograd implementation of a backward: it refuses and says what to do instead."""

    def call(keyset, *args):
        # Without this a second derivative would come out as zero.
        if _wants_gradient(args):
            raise NotImplementedError(
                f"{op.name()} has no derivative: leave out create_graph=True, or {instead} "
                "for second derivatives"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return call


def _wants_gradient(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
