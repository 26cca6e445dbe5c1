"""The operators of softmax attention: schemas, devices, fakes and one autograd Function.

There are three, for the three ways in which query, key and value lie in memory: ``attention``,
``attention_qkvpacked`` and ``attention_varlen``. Each makes one ``Call`` of its arguments and
allocates what it returns; ``reference`` on the CPU and ``launch`` on a GPU fill it, and do not see
which operator it was.

``NAME`` returns (out, max_log_sum), ``NAME_with_stats`` (out, lse, stats, heads, max_log_sum), and
``NAME_backward`` the gradient of each input that may have one. PyTorch's own operators pass (out,
lse) to the backward: ``attend_with_lse`` and ``differentiate_from_lse`` do so too.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._ops import ops
from .. import dispatcher
from .._checks import MAX_ROW_STRIDE
from .._launch_cache import (
    ALIGNMENT,
    MAX_CACHED,
    CachedLaunch,
    Signature,
    key_of,
    on_current_device,
    residues,
    rows_contiguous,
    seen_by_autograd_alone,
)
from ..statistics import STATISTICS
from ..transforms import Products
from . import cpu, dispatch, sdpa
from .call import (
    CALL_POINTERS,
    Call,
    Gradients,
    Plan,
    Results,
    Sequences,
    draw_seed,
)


class Dense:
    """Query, key and value (B, H, N, D)."""

    name = "attention"
    inputs = (
        "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_lengths, "
        "Tensor? seed"
    )
    numbers = "float dropout_p, bool is_causal, float? scale, float softcap"
    gradients = "Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dattn_mask"
    count, differentiable = 6, 4  # tensors, and those that may have a gradient
    integers, dropout = slice(4, 5), 0  # places of lengths or starts, and of dropout_p

    @staticmethod
    def call(
        query, key, value, attn_mask, key_lengths, seed,
        dropout_p, is_causal, scale, softcap, window_left, window_right,
    ) -> Call:  # fmt: skip
        """Return the call of these arguments."""
        tensors = query, key, value, attn_mask, key_lengths, seed
        return Call(*tensors, dropout_p, is_causal, scale, softcap, (window_left, window_right))

    @staticmethod
    def new_out(query: Tensor) -> Tensor:
        """Allocate the output, in the dtype of the first tensor."""
        return new_out(query)

    @staticmethod
    def as_query(out: Tensor) -> Tensor:
        """Return an output, or its gradient, with the axes of the call's query."""
        return out

    @staticmethod
    def from_query(out: Tensor) -> Tensor:
        """Return a library's output with the axes of the operator's."""
        return out

    @staticmethod
    def new_gradients(tensors: Sequence[Tensor], mask_grad: bool) -> tuple[Tensor, ...]:
        """Allocate the gradients, that of the mask where it is wanted."""
        query, key, value, mask = tensors[:4]
        three = new_out(query), new_out(key), new_out(value)
        return (*three, mask.new_empty(mask.shape)) if mask_grad else three

    @staticmethod
    def separate(gradients: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Return dq, dk and dv with the axes of the call's tensors."""
        return gradients[:3]

    @staticmethod
    def addresses(tensors: list[int], query: Tensor) -> list[int]:
        """Return where the operands of kernels begin (``CALL_POINTERS``), from the tensors'."""
        return [*tensors, 0, 0]

    @staticmethod
    def gradient_addresses(gradients: tuple[Tensor, ...]) -> list[int]:
        """Return where dq, dk and dv begin."""
        dq, dk, dv = gradients[:3]
        return [dq.data_ptr(), dk.data_ptr(), dv.data_ptr()]


class Packed:
    """One projection (B, N, 3, H, D), whose gradient is written as one."""

    name = "attention_qkvpacked"
    inputs = "Tensor qkv, Tensor? key_lengths, Tensor? seed"
    numbers = "float dropout_p, bool is_causal, float? scale"
    gradients = "Tensor dqkv"
    count, differentiable = 3, 1
    integers, dropout = slice(1, 2), 0

    @staticmethod
    def call(
        qkv, key_lengths, seed, dropout_p, is_causal, scale, window_left, window_right
    ) -> Call:
        tensors = *split_qkv(qkv), None, key_lengths, seed
        return Call(*tensors, dropout_p, is_causal, scale, 0.0, (window_left, window_right))

    @staticmethod
    def new_out(qkv: Tensor) -> Tensor:
        batch, rows, _, heads, dim = qkv.shape
        return qkv.new_empty((batch, rows, heads, dim))

    @staticmethod
    def as_query(out: Tensor) -> Tensor:
        return out.transpose(1, 2)

    @staticmethod
    def from_query(out: Tensor) -> Tensor:
        return out.transpose(1, 2).contiguous()

    @staticmethod
    def new_gradients(tensors: Sequence[Tensor], mask_grad: bool) -> tuple[Tensor, ...]:
        return (tensors[0].new_empty(tensors[0].shape),)

    @staticmethod
    def separate(gradients: tuple[Tensor, ...]) -> Any:
        # One at a time: autograd lets nothing be written to what unbind gives.
        return (gradients[0].select(2, i).transpose(1, 2) for i in range(3))

    @staticmethod
    def addresses(tensors: list[int], qkv: Tensor) -> list[int]:
        query, lengths, seed = tensors
        step = qkv.stride(2) * qkv.element_size()
        return [query, query + step, query + 2 * step, 0, lengths, seed, 0, 0]

    @staticmethod
    def gradient_addresses(gradients: tuple[Tensor, ...]) -> list[int]:
        (dqkv,) = gradients
        dq, step = dqkv.data_ptr(), dqkv.stride(2) * dqkv.element_size()
        return [dq, dq + step, dq + 2 * step]


class Varlen(Dense):
    """Sequences side by side: query, key and value (T, H, D)."""

    name = "attention_varlen"
    inputs = (
        "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor cu_seqlens_k, "
        "Tensor? seed"
    )
    numbers = (
        "SymInt max_seqlen, SymInt max_seqlen_k, float dropout_p, bool is_causal, float? scale"
    )
    gradients = "Tensor dquery, Tensor dkey, Tensor dvalue"
    count, differentiable = 6, 3
    integers, dropout = slice(3, 5), 2

    @staticmethod
    def call(
        query, key, value, cu_seqlens, cu_seqlens_k, seed,
        max_seqlen, max_seqlen_k, dropout_p, is_causal, scale, window_left, window_right,
    ) -> Call:  # fmt: skip
        # Free unless strided: the kernels count along them.
        starts = cu_seqlens.contiguous(), cu_seqlens_k.contiguous()
        sequences = Sequences(*starts, max_seqlen, max_seqlen_k)
        tensors, window = (query, key, value, None, None, seed), (window_left, window_right)
        return Call(*tensors, dropout_p, is_causal, scale, 0.0, window, sequences)

    @staticmethod
    def new_out(query: Tensor) -> Tensor:
        return query.new_empty(query.shape)

    @staticmethod
    def new_gradients(tensors: Sequence[Tensor], mask_grad: bool) -> tuple[Tensor, ...]:
        q, k, v = tensors[:3]
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    @staticmethod
    def addresses(tensors: list[int], query_tensor: Tensor) -> list[int]:
        query, key, value, starts, key_starts, seed = tensors
        return [query, key, value, 0, 0, seed, starts, key_starts]


Form = Any  # Dense, Packed or Varlen


def split_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views (B, H, N, D) of the query, key and value in (B, N, 3, H, D).

    By the split whose backward is one copy, a stack.
    """
    query, key, value = qkv.unbind(2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def new_out(like: Tensor) -> Tensor:
    """Allocate (B, H, N, D) in the memory order (B, N, H, D), which the next projection reads.

    Of so many heads that its rows would lie further apart than kernels reach, it is contiguous.
    """
    batch, heads, rows, dim = like.shape
    width = heads * dim
    strides = rows * width, dim, width, 1
    if width > MAX_ROW_STRIDE:
        strides = rows * width, rows * dim, dim, 1
    return like.new_empty_strided((batch, heads, rows, dim), strides)


def new_results(
    call: Call,
    out: Tensor,
    stats: bool = False,
    sample: Tensor | None = None,
    lse_alone: bool = False,
) -> Results:
    """Allocate what is filled beside ``out``, which has the axes of the call's query.

    With ``lse_alone``, the log-sum-exp is all that a backward gets beside the output.
    """
    query, sequences = call.query, call.sequences
    heads, dim = query.shape[1], query.shape[-1]
    rows = (heads, query.shape[0]) if sequences is not None else tuple(query.shape[:3])
    tokens = query.shape[2] if sequences is None else sequences.rows

    def float32(*shape: int) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    if lse_alone:
        return Results(out, None, float32(*rows))
    if not stats:
        return Results(out, float32(*rows, 2))
    slots = 0 if sample is None else sample.shape[0]
    per_head = float32(len(STATISTICS), call.batch, heads)
    captured = float32(slots, tokens, heads * dim)
    return Results(out, float32(*rows, 2), float32(*rows), per_head, captured, sample)


# --- Implementations: ``fill`` computes into what they allocate -----------------------------------


def attend(form: Form, stats: bool, fill: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """Compute ``NAME``, or ``NAME_with_stats``."""
    inputs, sample = _without_sample(form, args) if stats else (args, None)
    out, call = form.new_out(inputs[0]), form.call(*inputs)
    results = new_results(call, form.as_query(out), stats, sample)
    fill(call, results)
    statistics = (results.lse, results.stats, results.heads) if stats else ()
    return out, *statistics, results.max_log_sum


def _without_sample(form: Form, args: Sequence[Any]) -> tuple[Sequence[Any], Tensor | None]:
    """Return the inputs of ``NAME_with_stats`` less the sample, after the other tensors; and it."""
    return (*args[: form.count], *args[form.count + 1 :]), args[form.count]


def differentiate(form: Form, compute: Any, grad: Tensor, *args: Any) -> Any:
    """Compute ``NAME_backward``."""
    saved, numbers, mask_grad = _parts(form, args)
    tensors = saved[: form.count]
    gradients = form.new_gradients(tensors, mask_grad)
    computed = compute(form.as_query(grad), form.call(*tensors, *numbers))
    if computed is not None:
        *three, ds = computed
        for slot, gradient in zip(form.separate(gradients), three, strict=True):
            slot.copy_(gradient)
        if mask_grad:
            gradients[3].copy_(ds.sum_to_size(gradients[3].shape))
    return _returned(form, gradients)


def _returned(form: Form, gradients: tuple[Tensor, ...]) -> Any:
    """Return gradients as the schema has them: one alone, an empty one where none is wanted."""
    if form is Packed:
        return gradients[0]
    missing = form is Dense and len(gradients) == 3
    return (*gradients, gradients[0].new_empty(0)) if missing else gradients


def _parts(form: Form, args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], bool]:
    """Return what was saved, numbers, and whether a mask's gradient is wanted."""
    *args, mask_grad = args if form is Dense else (*args, False)
    return args[: form.count + 2], args[form.count + 2 :], mask_grad


# --- On a GPU: what was launched for a signature is launched again --------------------------------

_plans: dict[Hashable, Plan] = {}
_backwards: dict[Hashable, dict[Hashable, CachedLaunch]] = {}
# Calls that PyTorch's function computes: their numbers, checked, and whether key heads are shared.
_dispatched: dict[Hashable, tuple[Sequence[Any], bool]] = {}


def attend_cuda(form: Form, stats: bool, *args: Any) -> tuple[Tensor, ...]:
    """Launch ``NAME``, or ``NAME_with_stats``."""
    inputs, sample = _without_sample(form, args) if stats else (args, None)
    tensors, numbers = inputs[: form.count], inputs[form.count :]
    key, addresses, _ = key_of((*tensors, sample), (form.name, stats, *numbers))
    plan = _plans.get(key)
    if plan is not None:
        return _run(form, plan, addresses[: form.count], args[0], sample)
    return _launch_first(form, key, inputs, stats, sample)[1]


def differentiate_cuda(form: Form, grad: Tensor, *args: Any) -> Any:
    """Launch ``NAME_backward``."""
    saved, numbers, mask_grad = _parts(form, args)
    launches = _launches_like(form, saved, numbers)
    gradients = _launch_backward(form, launches, grad, saved, numbers, mask_grad)
    return _returned(form, gradients)


def _launches_like(
    form: Form, saved: Sequence[Any], numbers: Sequence[Any]
) -> dict[Hashable, CachedLaunch]:
    """Return the launches of backwards with such saved tensors and numbers."""
    key, *_ = key_of(saved, (form.name, "backward", *numbers))
    if len(_backwards) >= MAX_CACHED:
        _backwards.clear()
    return _backwards.setdefault(key, {})


def _run(
    form: Form, plan: Plan, addresses: list[int], first: Tensor, sample: Tensor | None = None
) -> tuple[Any, ...]:
    """Return what the operator does, by the launches that a call of this signature left."""
    out = first.new_empty_strided(*plan.out)
    rows = first.new_empty_strided(*plan.rows, dtype=torch.float32)
    pointers = form.addresses(addresses, first)
    pointers += out.data_ptr(), rows.data_ptr()
    if plan.statistics is None:
        # A plain kernel stores max_log_sum or lse: the launch has a place for one of the two.
        plan.forward.run([*pointers, rows.data_ptr()])
        return out, rows
    lse, stats, heads = (
        first.new_empty_strided(*layout, dtype=torch.float32) for layout in plan.statistics
    )
    parts = plan.forward.run([*pointers, lse.data_ptr(), stats.data_ptr()])
    if parts is not None:
        from .launch import join_parts

        join_parts(parts, stats)
    if plan.capture is not None and sample is not None:
        operands = pointers[: len(CALL_POINTERS)]
        plan.capture.run([*operands, heads.data_ptr(), 0, 0, 0, sample.data_ptr()])
    return out, lse, stats, heads, rows


def _launch_first(
    form: Form,
    key: Hashable,
    inputs: Sequence[Any],
    stats: bool = False,
    sample: Tensor | None = None,
    lse_alone: bool = False,
) -> tuple[Plan | None, tuple[Any, ...]]:
    """Return what the operator does, and the plan that it leaves for others of this key."""
    out, call, plan = form.new_out(inputs[0]), form.call(*inputs), None
    results = new_results(call, form.as_query(out), stats, sample, lse_alone)
    statistics = results.lse, results.stats, results.heads
    if is_empty(call):  # an empty batch launches no kernel
        if results.max_log_sum is not None:
            cpu.forward(call, results)
        elif results.lse is not None:
            out.zero_()
            results.lse.fill_(math.inf)  # no row has a key
    else:
        from . import launch

        forward, capture = launch.forward(call, results)
        if forward is not None and _side_by_side(*inputs[form.integers], sample):
            present = max(i for i in range(form.count) if inputs[i] is not None) + 1
            rows, *others = (
                (t.shape, t.stride()) for t in (results.max_log_sum, *statistics) if t is not None
            )
            new_out, numbers = (out.shape, out.stride()), inputs[form.count :]
            plan = Plan(forward, capture, new_out, rows, others or None, numbers, present, {})
            if len(_plans) >= MAX_CACHED:
                _plans.clear()
            _plans[key] = plan
    filled = out, *statistics, results.max_log_sum
    return plan, tuple(t for t in filled if t is not None)


def _side_by_side(*integers: Tensor | None) -> bool:
    """Return whether kernels count along a caller's integers, and not along copies of them."""
    return all(t is None or t.is_contiguous() for t in integers)


def is_empty(call: Call) -> bool:
    """Whether there is no token, head, entry or sequence."""
    sizes = *call.query.shape, *call.key.shape
    return 0 in sizes or (call.sequences is not None and 0 in call.sequences[2:])


def _launch_backward(
    form: Form,
    launches: dict[Hashable, CachedLaunch],
    grad: Tensor,
    saved: Sequence[Any],
    numbers: Sequence[Any],
    mask_grad: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients; ``launches`` are those of like calls, by layouts."""
    # Of what was saved too: hooks may have made other tensors of it.
    layouts, addresses = [mask_grad, grad.dtype, saved[0].dtype, grad.stride()], []
    low_bits = grad.data_ptr()
    for t in saved:
        if t is None:
            addresses.append(0)
            continue
        address = t.data_ptr()
        addresses.append(address)
        low_bits |= address
        layouts.append(t.stride())
    if low_bits % ALIGNMENT:
        layouts.append(residues((grad.data_ptr(), *addresses)))
    key, (*tensors, out, rows) = tuple(layouts), addresses
    gradients = form.new_gradients(saved, mask_grad)
    ds = None
    if mask_grad:
        # Tiles that no row may see are not visited by every kernel.
        ds = grad.new_zeros((*saved[0].shape[:3], saved[1].shape[2]), dtype=torch.float32)
    entry = launches.get(key)
    if entry is not None:
        pointers = form.addresses(tensors, saved[0])
        # As in ``_run``, the launch has a place for max_log_sum or for lse.
        pointers += grad.data_ptr(), out, rows, rows, *form.gradient_addresses(gradients)
        entry.run([*pointers, 0 if ds is None else ds.data_ptr()])
    else:
        *inputs, out, rows = saved
        mask = (mask_grad,) if form is Dense else ()
        # Pairs have as many axes as the output, and a log-sum-exp has one less.
        row_results = (rows,) if rows.dim() == out.dim() else (None, rows)
        call, results = form.call(*inputs, *numbers), Results(form.as_query(out), *row_results)
        if is_empty(call):
            empty = differentiate(form, cpu.backward, grad, *saved, *numbers, *mask)
            return empty[: len(gradients)] if isinstance(empty, tuple) else (empty,)
        from . import launch

        dq, dk, dv = form.separate(gradients)
        entry = launch.backward(form.as_query(grad), call, results, Gradients(dq, dk, dv, ds))
        if entry is not None and _side_by_side(*saved[form.integers]):
            launches[key] = entry
    if ds is not None:
        gradients[3].copy_(ds.sum_to_size(gradients[3].shape))
    return gradients


def on_gpu(form: Form) -> tuple[Callable[..., Any], ...]:
    """Return what launches ``NAME``, ``NAME_with_stats`` and ``NAME_backward``."""
    plain, with_stats = (partial(attend_cuda, form, stats) for stats in (False, True))
    return plain, with_stats, partial(differentiate_cuda, form)


# --- For PyTorch's operators, whose backwards get the output and the log-sum-exp ------------------

# Whether kernels store and load the log-sum-exp themselves. Set this to True once measurements on a
# GPU show that they are as fast as kernels of pairs (maximum, log of the sum). Until then each
# direction launches a conversion between the two.
KERNELS_SHARE_LSE = False


def lse_of(max_log_sum: Tensor, factor: float) -> Tensor:
    """Return the log-sum-exp of scaled scores.

    Args:
        max_log_sum: (..., 2) float32, the pairs that a forward writes.
        factor: multiplies the maximum: the scale, or 1 if the maximum is of scaled scores.
    """
    return torch.add(max_log_sum[..., 1], max_log_sum[..., 0], alpha=factor)


def rows_of(lse: Tensor, hidden: bool, scaled: bool) -> Tensor:
    """Return what a backward reads of each row.

    This is the log-sum-exp itself, or pairs (..., 2) of 0 and the log-sum-exp, or of these two in
    the other order: a probability is exp(score - first - second).

    Args:
        lse: float32, contiguous.
        hidden: whether a row may see no key. Its log-sum-exp is infinite, of either sign by the
            kernel that wrote it, and its probabilities must be zero.
        scaled: whether the first of a pair is in units of scaled scores (``takes_scaled_maxima``).
    """
    # Not inf in pairs: its product with 1j has a real part that is not a number.
    sharing = KERNELS_SHARE_LSE and not scaled
    largest = math.inf if sharing else torch.finfo(torch.float32).max
    if hidden:
        lse = lse.nan_to_num(nan=math.nan, posinf=largest, neginf=largest)
    if sharing:
        return lse
    # One launch. No zero is kept for it: memory must not outlive the pool of a CUDA graph.
    # Kernels take the second to base 2, where that of a row of a mask's lowest numbers overflows.
    return torch.view_as_real(lse.to(torch.complex64) if scaled else lse * 1j)


# --- Autograd -------------------------------------------------------------------------------------


class Attention(dispatcher.SingleLevelFunction):
    """Put results on the graph that were computed already, and differentiate them.

    Tensors after the last that there is are left out.
    """

    @staticmethod
    def forward(ctx, form, plan, numbers, results, *tensors):
        ctx.form, ctx.plan, ctx.numbers = form, plan, numbers
        ctx.save_for_backward(*tensors, results[0], results[-1])
        # Zeros for the others would be a launch each.
        ctx.set_materialize_grads(False)
        if plan is not None and len(results) == 2:
            return results[0]  # a plain call wants no more
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx, grad, *_):
        form, saved, numbers = ctx.form, ctx.saved_tensors, ctx.numbers
        plan: Plan | None = ctx.plan
        count = len(saved) - 2
        if grad is None:
            return (None,) * (4 + count)
        mask_grad = form is Dense and count > 3 and ctx.needs_input_grad[7]
        if count < form.count:
            saved = *saved[:count], *(None,) * (form.count - count), *saved[count:]
        grad = rows_contiguous(grad)
        if (
            plan is not None
            and not torch.is_grad_enabled()
            and not grad.is_neg()
            and seen_by_autograd_alone((grad, *saved))
            and on_current_device(grad)
        ):
            gradients = _launch_backward(form, plan.backward, grad, saved, numbers, mask_grad)
        else:
            args = (*saved, *numbers, mask_grad) if form is Dense else (*saved, *numbers)
            gradients = getattr(ops, f"{form.name}_backward").default(grad, *args)
            gradients = (gradients,) if form is Packed else gradients
        if form is Dense and not mask_grad:
            gradients = gradients[:3]
        return None, None, None, None, *gradients, *(None,) * (count - len(gradients))


def _arguments(form: Form, plan: Plan | None, results: Any, inputs: Sequence[Any]) -> Any:
    """Return what ``Attention`` is applied to."""
    count = form.count
    while inputs[count - 1] is None:
        count -= 1
    return form, plan, tuple(inputs[form.count :]), results, *inputs[:count]


# --- Plain calls, which need no dispatcher --------------------------------------------------------


def repeat(
    form: Form, signature: Signature, tensors: Sequence[Any], sample: Tensor | None = None
) -> tuple[Any, ...] | None:
    """Return what the operator does where a call of this signature was made before, else None.

    ``tensors`` are the operator's, less the seed, which comes last.
    """
    key, addresses, recorded = signature
    plan = _plans.get(key)
    if plan is None:
        if (known := _dispatched.get(key)) is None:
            return None
        float32 = tensors[0].dtype == torch.float32
        if float32 and not torch.backends.cuda.mem_efficient_sdp_enabled():
            return None  # what is left of PyTorch's kernels may round to TF32
        numbers, enable_gqa = known
        call = form.call(*tensors, None, *numbers)
        return (form.from_query(sdpa.library_attention(call, enable_gqa)),)
    first, dropout_p = tensors[0], plan.numbers[form.dropout]
    seed = draw_seed(dropout_p, first.device) if dropout_p else None
    addresses = [*addresses[: form.count - 1], 0 if seed is None else seed.data_ptr()]
    results = _run(form, plan, addresses, first, sample)
    if recorded:
        tensors = (*tensors, seed)[: plan.present]
        results = Attention.apply(form, plan, plan.numbers, results, *tensors)
    return results if isinstance(results, tuple) else (results,)


def attend_first(
    form: Form,
    signature: Signature | None,
    tensors: Sequence[Any],
    numbers: Sequence[Any],
    enable_gqa: bool = False,
) -> Tensor:
    """Return the output of a checked call; one with a signature is kept for ``repeat``."""
    call = form.call(*tensors, None, *numbers)
    if signature is None:
        backward = torch.is_grad_enabled() and any(t.requires_grad for t in call[:3])
    else:
        *_, backward = signature
    if (library := dispatch.library_of(call, backward, form is Packed)) is not None:
        if library.name == "varlen_attn":
            return sdpa.varlen_attention(call)
        if signature is not None:
            if len(_dispatched) >= MAX_CACHED:
                _dispatched.clear()
            _dispatched[signature[0]] = numbers, enable_gqa
        return form.from_query(sdpa.library_attention(call, enable_gqa))
    return compute(form, signature, tensors, numbers)[0]


def compute(
    form: Form,
    signature: Signature | None,
    tensors: Sequence[Any],
    numbers: Sequence[Any],
    stats: bool = False,
    sample: Tensor | None = None,
) -> tuple[Any, ...]:
    """Return what the operator does of a checked call, with statistics or without."""
    if signature is not None and (known := repeat(form, signature, tensors, sample)):
        return known  # of a user's other call, whose integers were converted too
    dropout_p = numbers[form.dropout]
    inputs = *tensors, draw_seed(dropout_p, tensors[0].device) if dropout_p else None, *numbers
    if signature is None:
        if not stats:
            return getattr(ops, form.name).default(*inputs)
        arguments = *inputs[: form.count], sample, *numbers
        return getattr(ops, f"{form.name}_with_stats").default(*arguments)
    key, _, recorded = signature
    plan, results = _launch_first(form, key, inputs, stats, sample)
    if recorded:
        results = Attention.apply(*_arguments(form, plan, results, inputs))
    return results if isinstance(results, tuple) else (results,)


# --- Registration, and FLOPs as counters read them ------------------------------------------------


def _flops(query: Tensor, key: Tensor, *rest: Any) -> Products:
    batch, heads, rows, dim = query.shape
    product = 2 * batch * heads * rows * key.shape[2] * dim
    return Products(product, product)


def _packed_flops(qkv: Tensor, *rest: Any) -> Products:
    return _flops(*split_qkv(qkv))


def _varlen_flops(query, key, value, cu_seqlens, cu_seqlens_k, *others: Any) -> Products:
    max_seqlen, max_seqlen_k = others[-7:-5]
    _, heads, dim = query.shape
    lengths = zip(_lengths(cu_seqlens, max_seqlen), _lengths(cu_seqlens_k, max_seqlen_k))
    product = 2 * heads * dim * sum(rows * cols for rows, cols in lengths)
    return Products(product, product)


def _lengths(starts: Tensor, longest: int) -> list[int]:
    """Return the tokens of each sequence, all of the longest where values cannot be read."""
    if starts.device.type == "meta" or isinstance(starts, torch._subclasses.FakeTensor):
        return [longest] * (starts.shape[0] - 1)
    return starts.diff().clamp(max=longest).tolist()


def _register(form: Form, products: Callable[..., Products]) -> None:
    tensors, numbers = form.inputs, f"{form.numbers}, int window_left, int window_right"
    stats, log_sum = "Tensor lse, Tensor stats, Tensor heads", "Tensor max_log_sum"
    mask_grad = ", bool mask_grad" if form is Dense else ""
    saved = f"{tensors}, Tensor out, {log_sum}"
    schemas = (
        f"({tensors}, {numbers}) -> (Tensor out, {log_sum})",
        f"({tensors}, Tensor? sample, {numbers}) -> (Tensor out, {stats}, {log_sum})",
        f"(Tensor grad, {saved}, {numbers}{mask_grad}) -> ({form.gradients})",
    )

    def computed_by(forward: Callable[..., Any], backward: Callable[..., Any]) -> Sequence[Any]:
        attends = (partial(attend, form, stats, forward) for stats in (False, True))
        return *attends, partial(differentiate, form, backward)

    # Nothing fills fake tensors, which have no memory.
    nothing = computed_by(lambda *_: None, lambda *_: None)
    by_device = computed_by(cpu.forward, cpu.backward), on_gpu(form), nothing

    def record(results: tuple[Tensor, ...], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        # The sample is no input of the backward.
        inputs = _without_sample(form, args)[0] if len(results) > 2 else args
        return dispatcher.apply(Attention, *_arguments(form, None, results, inputs))

    count = form.differentiable
    dispatcher.register(form.name, schemas, by_device, record, count, count, products)


for _form, _products in ((Dense, _flops), (Packed, _packed_flops), (Varlen, _varlen_flops)):
    _register(_form, _products)
