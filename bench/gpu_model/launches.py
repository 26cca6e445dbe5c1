"""Record the launches that the CUDA attention operators request on a case, without a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
from torch import Tensor

from bench.attention.cases import AttentionCase
from bench.gpu_model.compile_ahead import Launch, distinct, recorded
from leaner_kernels.ops import _tiles, route
from leaner_kernels.ops._tiles import Rule, Tiles
from leaner_kernels.ops.attention import op

SAMPLES = 4
AnyCase: TypeAlias = Any  # of ``bench.attention.catalogue``


class OperatorCall(NamedTuple):
    """A call of attention: the CUDA implementations of its operators and their inputs.

    Of softmax attention ``inputs`` end with the seed, ``params`` are the numbers of its operators,
    and the backward takes the output too; ``rest`` is what it takes after the numbers.
    """

    attend: Callable[..., Any]
    with_stats: Callable[..., Any]
    backward: Callable[..., Any]
    inputs: tuple[Any, ...]
    params: tuple[Any, ...]
    rest: tuple[bool, ...] = ()
    takes_out: bool = True

    def gradients(self, grad: Tensor, inputs: Sequence[Any], *results: Tensor) -> list[Tensor]:
        """Return the gradients of ``inputs``; ``results`` are those of ``attend``."""
        saved = results if self.takes_out else results[1:]
        gradients = self.backward(grad, *inputs, *saved, *self.params, *self.rest)
        return [gradients] if isinstance(gradients, Tensor) else list(gradients)

    def launches(self, capability: int) -> dict[str, list[Launch]]:
        """Return the launches on a GPU, each specialisation once.

        ``capture`` are the launches of a sampled step besides ``statistics``.
        """
        sample = torch.empty(SAMPLES, dtype=torch.int32, device="meta")
        with mock.patch.object(_tiles, "capability", return_value=capability):
            with recorded() as plain:
                out, lse = self.attend(*self.inputs, *self.params)
            with recorded() as statistics:
                self.with_stats(*self.inputs, None, *self.params)
            with recorded() as sampled:
                self.with_stats(*self.inputs, sample, *self.params)
            with recorded() as gradients:
                self.gradients(out, self.inputs, out, lse)
        return {
            "forward": distinct(plain, capability),
            "statistics": distinct(statistics, capability),
            "capture": distinct(sampled, capability, besides=statistics),
            "backward": distinct(gradients, capability),
        }


def dense_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *inputs: Any,
    params: Any,
    window: tuple[int, int] = (-1, -1),
) -> OperatorCall:
    """Return a call on (B, H, N, D); ``inputs`` are mask, lengths and seed. A mask learns."""
    call = op.Dense.Arguments(query, key, value, *inputs, *params, *window)
    return OperatorCall(
        *route.launchers(op.Dense),
        (query, key, value, *inputs),
        tuple(getattr(call, name) for name in op.Dense.numbers),
        rest=(inputs[0] is not None and inputs[0].dtype != torch.bool,),
    )


def varlen_call(
    packed: Tensor,
    sequences: int,
    longest: int,
    seed: Tensor | None,
    params: Any,
    window: tuple[int, int] = (-1, -1),
) -> OperatorCall:
    """Return a call on sequences that lie end to end in (T, 3, H, D)."""
    starts = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    return OperatorCall(
        *route.launchers(op.Varlen),
        (*packed.unbind(1), starts, starts, seed),
        (longest, longest, *params, *window),
    )


def separate(call: OperatorCall) -> OperatorCall:
    """Return a call of softmax attention on q, k and v that are each contiguous."""
    dense = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in call.inputs[:3])
    return call._replace(inputs=(*dense, *call.inputs[3:]))


@contextmanager
def changed_rules(
    change: Callable[[str, Rule | None], Rule | None],
) -> Iterator[None]:
    """Replace each rule that a table gives by what ``change`` returns of its name and the rule."""
    find = Tiles.find

    def changed(tiles: Tiles, device: torch.device, **call: Any) -> Rule | None:
        return change(tiles.name, find(tiles, device, **call))

    with mock.patch.object(Tiles, "find", changed):
        yield


def filled(
    arguments: Sequence[Any],
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> list[Any]:
    """Return random tensors in the place of those without memory; what shared some still does."""
    memories: dict[int, Tensor] = {}
    made: list[Any] = []
    for t in arguments:
        if not isinstance(t, Tensor):
            made.append(t)
            continue
        storage = t.untyped_storage()
        if storage._cdata not in memories:
            memory = torch.zeros(storage.nbytes() // t.element_size(), device=device)
            memory = memory.normal_(generator=generator) if t.is_floating_point() else memory
            memories[storage._cdata] = memory.to(t.dtype)
        memory = memories[storage._cdata]
        made.append(memory.as_strided(t.shape, t.stride(), t.storage_offset()))
    return made


def call_of(case: AnyCase) -> OperatorCall:
    """Return the call of a case, on tensors without memory, as one projection lays them out."""
    if not isinstance(case, AttentionCase):
        passes = route.launchers(route.OPERATORS[f"{case.op}_attention"])
        return OperatorCall(*passes, case.meta_inputs, case.operator_params, takes_out=False)
    params: tuple[Any, ...] = 0.0, case.causal, case.scale
    options: dict[str, Any] = {"dtype": case.dtype, "device": "meta"}
    if case.ragged:
        packed = torch.empty(case.query_rows, 3, case.heads, case.head_dim, **options)
        return varlen_call(packed, case.batch, case.tokens, None, params)
    packed = torch.empty(case.batch, case.tokens, 3, case.heads, case.head_dim, **options)
    query, key, value = op.split_qkv(packed)
    if case.crossed:
        rows = torch.empty(case.batch, case.rows, case.heads, case.head_dim, **options)
        query = rows.transpose(1, 2)
    tensors = query, key, value, None, None, None
    return dense_call(*tensors, params=(*params, 0.0), window=case.window_size)
