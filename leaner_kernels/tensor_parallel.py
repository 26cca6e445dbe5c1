"""Tensor parallelism: the heads of an attention module divided among the ranks of a mesh.

It needs ``torch.distributed``; ``import leaner_kernels`` does not import it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from .nn import ManyHeadAttention
from .ops._checks import int32_of, moved
from .ops.attention import AttentionStats

# The packed projection is queries, keys, values: each rank has its heads of each of the three.
_OF_EACH_THIRD = _StridedShard(0, split_factor=3)


class SplitHeads(ParallelStyle):
    """Divide the heads of a ``ManyHeadAttention`` among ranks, for ``parallelize_module``.

    As in ``parallelize_module(model, mesh["tp"], {"blocks.*.attn": SplitHeads()})``.

    Every rank gives the module the same input and gets the same output, as plain tensors; each
    attends with its heads, and the outputs of their projections are added up. Parameters keep
    their names and, as DTensors, their shapes, so state dicts of the whole model load and save, by
    ``get_model_state_dict`` and ``set_model_state_dict`` with ``full_state_dict=True``; a sharded
    checkpoint of ``torch.distributed.checkpoint`` has no place for the strided shards of ``qkv``.
    ``fully_shard`` and ``torch.compile`` may follow.
    ``KappaMonitor`` gathers the heads of its samples and reports, on every rank, the condition
    number of all heads together. ``peak_logit`` is of all heads too.

    Raises:
        ValueError: another module, heads that the ranks do not divide, or dropout of attention.
        RuntimeError: a PyTorch whose DTensor cannot view a packed projection as its heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not ManyHeadAttention:
            raise ValueError(
                f"module must be a ManyHeadAttention, got {type(module).__name__}: for separate "
                "projections of q, k and v use PyTorch's ColwiseParallel and RowwiseParallel"
            )
        ranks = device_mesh.size()
        if module.num_heads % ranks:
            raise ValueError(f"num_heads must divide among {ranks} ranks, got {module.num_heads}")
        if module.attn_drop:
            raise ValueError(f"attn_drop must be 0 where heads are split, got {module.attn_drop}")
        _check_pytorch(device_mesh)
        for name, param in list(module.qkv.named_parameters()):
            _distribute(module.qkv, name, param, device_mesh, _OF_EACH_THIRD)
        _distribute(module.proj, "weight", module.proj.weight, device_mesh, Shard(1))
        if module.proj.bias is not None:
            _distribute(module.proj, "bias", module.proj.bias, device_mesh, Replicate())
        module.qkv.__class__ = _LocalLinear
        module.__class__ = _SplitHeads
        return module


class _LocalLinear(nn.Linear):
    """The packed projection onto this rank's heads.

    DTensor's own product would gather strided shards of the gradients in its backward.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, N, 3 * H * D), divided as the weight is, of ``input`` (B, N, dim)."""
        assert isinstance(input, DTensor)
        assert isinstance(self.weight, DTensor)
        bias = self.bias.to_local() if isinstance(self.bias, DTensor) else None
        x = input.to_local(grad_placements=[Partial()])
        part = F.linear(x, self.weight.to_local(), bias)
        batch, tokens, width = *x.shape[:2], self.out_features
        return DTensor.from_local(
            part,
            input.device_mesh,
            [_StridedShard(2, split_factor=3)],
            run_check=False,
            shape=torch.Size((batch, tokens, width)),
            stride=(tokens * width, width, 1),
        )


class _SplitHeads(ManyHeadAttention):
    """``ManyHeadAttention`` whose parameters are DTensors; inputs and outputs are not."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        key_lengths: Tensor | Sequence[int] | None = None,
        skip: Tensor | None = None,
    ) -> Tensor:
        """Attend with this rank's heads and project; as ``ManyHeadAttention`` otherwise."""
        mesh = _mesh(self)
        lengths = int32_of("key_lengths", key_lengths)
        if isinstance(key_lengths, list | tuple):
            lengths = moved(lengths, x.device)
        attn_mask, lengths, skip = (
            None if t is None else _whole(t, mesh) for t in (attn_mask, lengths, skip)
        )
        output = super().forward(_whole(x, mesh), attn_mask, is_causal, lengths, skip)
        return _gathered(output)

    def _select_sample(self, batch: int, device: torch.device) -> tuple[Tensor | None, bool]:
        sample, measured = super()._select_sample(batch, device)
        # Without statistics the CPU goes to PyTorch's function, which has no rule for DTensors.
        measured = measured or device.type == "cpu"
        return None if sample is None else _whole(sample, _mesh(self)), measured

    @torch.no_grad()
    def _store_capture(
        self,
        stats: AttentionStats,
        sample: Tensor | None,
        output: Tensor,
        skip: Tensor | None,
        key_lengths: Tensor | Sequence[int] | None = None,
        layer_scale: Tensor | None = None,
    ) -> None:
        if sample is None and not self.track_logits:
            return
        *per_head, heads = stats[2:]
        per_head = [*map(_gathered, per_head)]
        # The output and its lse are not used, and are as large as activations.
        unused = per_head[0]
        heads = None if heads is None else _gathered(heads)
        stats = AttentionStats._make((unused, unused, *per_head, heads))
        if sample is not None:
            sample, output = _gathered(sample), _gathered(output)
            skip = None if skip is None else _gathered(skip)
            key_lengths = (
                None if key_lengths is None else _gathered(int32_of("key_lengths", key_lengths))
            )
        super()._store_capture(stats, sample, output, skip, key_lengths, layer_scale)


def _mesh(module: ManyHeadAttention) -> DeviceMesh:
    weight = module.proj.weight
    assert isinstance(weight, DTensor)
    return weight.device_mesh


def _whole(t: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(t, mesh, [Replicate()], run_check=False)


def _gathered(t: Tensor) -> Tensor:
    assert isinstance(t, DTensor)
    return t.redistribute(placements=[Replicate()]).to_local()


def _distribute(
    linear: nn.Linear, name: str, param: Tensor, mesh: DeviceMesh, placement: Placement
) -> None:
    part = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
    linear.register_parameter(name, nn.Parameter(part, requires_grad=param.requires_grad))


def _check_pytorch(mesh: DeviceMesh) -> None:
    """Raise RuntimeError where a strided shard cannot be viewed as what it is a shard of."""
    heads = 2 * mesh.size()
    numbers = torch.zeros(3 * heads, device=mesh.device_type)
    try:
        packed = distribute_tensor(numbers, mesh, [_OF_EACH_THIRD], src_data_rank=None)
        by_head = packed.view(3, heads)
        viewed = isinstance(by_head, DTensor) and by_head.placements == (Shard(1),)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError):
        viewed = False
    if not viewed:
        raise RuntimeError(
            f"PyTorch {torch.__version__} cannot split a packed projection by heads: use a newer "
            "one, or separate projections with ColwiseParallel"
        )
