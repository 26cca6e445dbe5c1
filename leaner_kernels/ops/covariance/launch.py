"""How the kernels of attention between channels are launched: grids and arguments."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import MAX_ROW_STRIDE
from .._launch_cache import Launch, LaunchCache, View, check_tile
from .._tiles import Tiles, block_dim
from .backward import TILES as BACKWARD_TILES
from .backward import _covariance_bwd_kernel
from .forward import TILES as FORWARD_TILES
from .forward import _covariance_fwd_kernel


class QkvView(NamedTuple):
    """A packed projection as kernels take it: strides of entry, token, part and head."""

    ptr: Tensor
    stride_b: int
    stride_n: int
    stride_part: int
    stride_h: int


class Covariance:
    """One of the two operators, on a GPU.

    Args:
        rows: which part of a packed projection (0 q, 1 k, 2 v) gives the scores' rows.
        cols: which gives their columns.
        values: which is averaged.
        normalise: divide each channel by its length, and multiply by a temperature; the parameter
            is then ``eps``, and otherwise ``scale``.
    """

    def __init__(self, rows: int, cols: int, values: int, normalise: bool) -> None:
        self._constants = {"ROWS": rows, "COLS": cols, "VALUES": values, "NORMALISE": normalise}
        self._forward_cache = LaunchCache(
            ("qkv_view", "temperature_ptr", "out_ptr", "lse_ptr", "stats_ptr")
        )
        self._capture_cache = LaunchCache(("qkv_view", "temperature_ptr", "out_ptr", "sample_ptr"))
        self._backward_cache = LaunchCache(
            ("qkv_view", "temperature_ptr", "do_view", "dqkv_ptr", "dtemperature_ptr")
        )

    def forward(
        self,
        inputs: tuple[Tensor, ...],
        params: tuple[Any, ...],
        out: Tensor,
        lse: Tensor,
        stats: Tensor | None,
        heads: Tensor | None,
        sample: Tensor | None,
    ) -> None:
        """Fill ``out``, ``lse`` and any ``stats`` (STATISTICS, B, H)."""
        operands = _operands(inputs)
        tensors = *operands, out, lse, stats
        kind = _kind(operands, params, stats is None)
        if not self._forward_cache.run(kind, tensors):
            found = self._prepare_forward(operands, params, out, lse, stats, None)
            self._forward_cache.start(kind, found, tensors)
        if heads is not None and sample is not None and len(sample):
            sample = sample.contiguous()
            self._capture_cache.launch(
                _kind(operands, params, len(sample)),
                (*operands, heads, sample),
                lambda: self._prepare_forward(operands, params, heads, None, None, sample),
            )

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, ...],
        params: tuple[Any, ...],
        lse: Tensor,
        grads: Sequence[Tensor],
    ) -> None:
        """Fill ``grads``, of qkv and of any temperature, from ``grad`` of the output."""
        if grad.stride(1) > MAX_ROW_STRIDE:
            grad = grad.contiguous()
        operands = _operands(inputs)
        dqkv, *dtemperature = grads
        partial = None
        if dtemperature:
            # One for each batch entry, summed below in a fixed order.
            partial = torch.empty(lse.shape[:2], dtype=torch.float32, device=lse.device)
        tensors = *operands, grad, dqkv, partial
        kind = _kind(operands, params, grad.stride(), grad.dtype)
        if not self._backward_cache.run(kind, tensors):
            arguments = dict(
                **self._shared(BACKWARD_TILES, operands, params),
                do_view=View(grad, grad.stride(0), grad.stride(2), grad.stride(1)),
                dqkv_ptr=dqkv,
                dtemperature_ptr=partial,
            )
            launch = Launch(_covariance_bwd_kernel, (lse.shape[0] * lse.shape[1],), arguments)
            self._backward_cache.start(kind, launch, tensors)
        if partial is not None:
            dtemperature[0].copy_(partial.sum(dim=0))

    def _prepare_forward(
        self,
        operands: tuple[Tensor, Tensor | None],
        params: tuple[Any, ...],
        out: Tensor,
        lse: Tensor | None,
        stats: Tensor | None,
        sample: Tensor | None,
    ) -> Launch:
        batch, heads = operands[0].shape[0], operands[0].shape[3]
        arguments = dict(
            **self._shared(FORWARD_TILES, operands, params),
            sample_ptr=sample,
            out_ptr=out,
            lse_ptr=lse,
            stats_ptr=stats,
            B=batch,
            CAPTURE=sample is not None,
        )
        grid = (heads * (batch if sample is None else len(sample)),)
        return Launch(_covariance_fwd_kernel, grid, arguments)

    def _shared(
        self,
        tiles: Tiles,
        operands: tuple[Tensor, Tensor | None],
        params: tuple[Any, ...],
    ) -> dict[str, Any]:
        qkv, temperature = operands
        _, tokens, _, heads, dim = qkv.shape
        tile = tiles.tile(qkv.device, size=qkv.element_size(), dim=block_dim(dim))
        (param,) = params
        # As dqkv has them, which is contiguous whatever qkv is.
        check_tile("rows of qkv's gradient", tokens, 3 * heads * dim)
        return dict(
            **self._constants,
            **tile.arguments,
            qkv_view=QkvView(qkv, *qkv.stride()[:4]),
            temperature_ptr=temperature,
            H=heads,
            N=tokens,
            eps=param,
            scale=param,
            D=dim,
            BLOCK_D=block_dim(dim),
        )


cross_covariance = Covariance(0, 1, 2, normalise=True)
channel = Covariance(1, 2, 0, normalise=False)


def _operands(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    qkv, *rest = inputs
    return qkv, rest[0].contiguous() if rest else None


def _kind(operands: tuple[Tensor, Tensor | None], *others: Any) -> Any:
    """Return what sets calls apart beside the addresses of their tensors."""
    qkv, temperature = operands
    dtype = None if temperature is None else temperature.dtype
    return qkv.device.index, qkv.dtype, qkv.shape, qkv.stride(), dtype, *others
