"""How the kernels of attention between channels are launched: grids and arguments."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import MAX_ROW_STRIDE
from .._launch import launch
from .._launch_cache import View, check_tile
from .._tiles import Tiles, block_dim
from ..operator import Results
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


class Covariance(NamedTuple):
    """One of the two operators, on a GPU.

    Attributes:
        rows: which part of a packed projection (0 q, 1 k, 2 v) gives the scores' rows.
        cols: which gives their columns.
        values: which is averaged.
        normalise: divide each channel by its length, and multiply by a temperature; the parameter
            is then ``eps``, and otherwise ``scale``.
    """

    rows: int
    cols: int
    values: int
    normalise: bool

    def forward(self, inputs: tuple[Any, ...], params: tuple[Any, ...], results: Results) -> None:
        """Fill the results."""
        self._attend(inputs, params, *results[:3])
        if results.sample is not None:
            self._attend(inputs, params, results.heads, sample=results.sample)

    def _attend(
        self,
        inputs: tuple,
        params: tuple,
        out: Tensor,
        lse: Tensor | None = None,
        stats: Tensor | None = None,
        sample: Tensor | None = None,
    ) -> None:
        tensors = _operands(inputs)
        qkv = tensors["qkv_view"]
        tensors |= {"out_ptr": out, "lse_ptr": lse, "stats_ptr": stats, "sample_ptr": sample}

        def prepare() -> Any:
            arguments = self._shared(FORWARD_TILES, qkv, params)
            arguments |= {"B": len(qkv), "CAPTURE": sample is not None}
            return (len(out) * qkv.shape[3],), arguments

        launch(_covariance_fwd_kernel, tensors, (self, params), prepare)

    def backward(
        self, grad: Tensor, inputs: tuple, params: tuple, lse: Tensor, grads: list
    ) -> None:
        """Fill ``grads``, of qkv and of any temperature, from ``grad`` of the output."""
        if grad.stride(1) > MAX_ROW_STRIDE:
            grad = grad.contiguous()
        dqkv, *dtemperature = grads
        partial = None
        if dtemperature:
            # One for each batch entry, summed below in a fixed order.
            partial = torch.empty(lse.shape[:2], dtype=torch.float32, device=lse.device)
        tensors = _operands(inputs)
        qkv = tensors["qkv_view"]
        tensors |= {"do_view": grad, "dqkv_ptr": dqkv, "dtemperature_ptr": partial}

        def prepare() -> Any:
            arguments = self._shared(BACKWARD_TILES, qkv, params)
            arguments["do_view"] = View(grad, grad.stride(0), grad.stride(2), grad.stride(1))
            return (len(qkv) * qkv.shape[3],), arguments

        launch(_covariance_bwd_kernel, tensors, (self, params), prepare)
        if partial is not None:
            dtemperature[0].copy_(partial.sum(dim=0))

    def _shared(self, tiles: Tiles, qkv: Tensor, params: tuple[Any, ...]) -> dict[str, Any]:
        _, tokens, _, heads, dim = qkv.shape
        tile = tiles.tile(qkv.device, size=qkv.element_size(), dim=block_dim(dim))
        (param,) = params
        # As dqkv has them, which is contiguous whatever qkv is.
        check_tile("rows of qkv's gradient", tokens, 3 * heads * dim)
        return dict(
            **tile.arguments,
            qkv_view=QkvView(qkv, *qkv.stride()[:4]),
            H=heads,
            N=tokens,
            eps=param,
            scale=param,
            D=dim,
            BLOCK_D=block_dim(dim),
            ROWS=self.rows,
            COLS=self.cols,
            VALUES=self.values,
            NORMALISE=self.normalise,
        )


cross_covariance = Covariance(0, 1, 2, normalise=True)
channel = Covariance(1, 2, 0, normalise=False)


def _operands(inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    qkv, *rest = inputs
    return {"qkv_view": qkv, "temperature_ptr": rest[0].contiguous() if rest else None}
