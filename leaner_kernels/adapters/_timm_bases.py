"""What the modules in ``timm.py`` share, apart from timm: calls of our operators, and captures.

torch.fx traces through them as through timm's own: an operator is one node, for ``wrap`` keeps the
tracer out, and nothing else here decides by what a tensor holds.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leaner_kernels.nn.capture import Capturing
from leaner_kernels.ops._stats import AttentionStats, evenly_spaced
from leaner_kernels.ops.attention import attention, attention_qkvpacked
from leaner_kernels.ops.attention.causal_bias import is_causal_bias
from leaner_kernels.ops.covariance import MAX_HEAD_DIM_CUDA

torch.fx.wrap("attention_qkvpacked")


@torch.fx.wrap
def attention_with_any_mask(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **params: Any
) -> Tensor:
    """Return ``attention`` with a mask in whatever dtype."""
    return attention(q, k, v, _mask_like(attn_mask, q), **params)


def _mask_like(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None or mask.dtype == torch.bool or is_causal_bias(mask):
        return mask
    return mask.to(q.dtype)


class OnOurs(Capturing):
    """What the classes below share: the call of an operator, with statistics where wanted."""

    # QKClip and ConditioningPenalty take the modules that have it on the instance: ours have it
    # where ``qkv`` alone makes the queries and keys, and nothing is done to them afterwards.
    track_logits = False

    def _size(self: Any, dim: int, head_dim: int, plain: bool = False) -> None:
        self._set_sizes(dim, self.num_heads, head_dim)
        if not plain:
            del self.track_logits

    def _dropout_p(self: Any) -> float:
        return self.attn_drop.p if self.training else 0.0

    def _finish(self: Any, heads: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return (..., dim) of (..., H, D)."""
        a = heads.flatten(-2)
        if hasattr(self, "norm"):
            a = self.norm(a)
        a = self.proj(a if gate is None else a * gate)
        return self.proj_drop(a) if hasattr(self, "proj_drop") else a

    def _run(
        self, finish: Any, attend: Any, attend_with_stats: Any, *args: Any, **params: Any
    ) -> Tensor:
        def measure(*args: Any, sample: Tensor | None, **params: Any) -> AttentionStats:
            return self._beside(
                partial(attend, *args, **params),
                partial(attend_with_stats, *args, sample=sample, **params),
                sample,
            )

        return self._finished(finish, attend, measure, *args, **params)

    def _finished(
        self, finish: Any, attend: Any, measure: Any, *args: Any, **params: Any
    ) -> Tensor:
        sample, measured = self._wants(args[0].shape[0], args[0].device)
        if not measured:
            return finish(attend(*args, **params))
        stats = measure(*args, sample=sample, **params)
        output = finish(stats.out)
        self._keep(stats, sample, output, None)
        return output

    def _attend_packed(self, finish: Any, qkv: Tensor, **params: Any) -> Tensor:
        """Attend within each batch entry of (B, N, 3, H, D); ``finish`` gets (B, N, H, D)."""
        return self._finished(finish, attention_qkvpacked, self._packed_with_stats, qkv, **params)

    def _attend(
        self,
        finish: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        **params: Any,
    ) -> Tensor:
        """Attend as ``attention`` does, from (B, H, N, D); ``finish`` gets (B, N, H, D)."""

        def of_rows(out: Tensor) -> Tensor:
            return finish(out.transpose(1, 2))

        def measure(q: Tensor, k: Tensor, v: Tensor, mask: Any, **params: Any) -> AttentionStats:
            return self._attention_with_stats(q, k, v, _mask_like(mask, q), **params)

        tensors = q, k, v, attn_mask
        return self._finished(of_rows, attention_with_any_mask, measure, *tensors, **params)


def refuse_dropout(module: Any) -> None:
    """Raise ValueError where probabilities are dropped for which our operator does not do that."""
    if module.attn_drop.p > 0:
        raise ValueError(f"no dropout of these probabilities: attn_drop is {module.attn_drop.p}")


def split_heads(projected: Tensor, heads: int, parts: int = 1) -> tuple[Tensor, ...]:
    """Return ``parts`` times (B, H, N, D), views of (B, N, parts * H * D)."""
    return projected.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def packed_heads(projected: Tensor, heads: int) -> Tensor:
    """Return (B, N, 3, H, D), a view of (B, N, 3 * H * D)."""
    return projected.unflatten(-1, (3, heads, -1))


def biased_qkv(module: Any, x: Tensor) -> Tensor:
    """Project as BEiT and EVA do, whose keys have no bias that is trained."""
    if getattr(module, "q_bias", None) is None:
        return module.qkv(x)
    bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
    if module.qkv_bias_separate:
        return module.qkv(x) + bias
    return F.linear(x, module.qkv.weight, bias)


class OfClass(OnOurs):
    """The class attention of CaiT, XCiT and VOLO: one row."""

    def _prepare(self: Any) -> None:
        self._size(self.q.in_features, self.q.out_features // self.num_heads)
        self.keys_seen = 1

    def columns(self: Any, tokens: int) -> int:
        """Return how many entries a softmax row has: those of the newest captured forward."""
        return self.keys_seen

    def _attend_from_first(self: Any, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from the first token of (B, N, dim) to (B, H, N, D) of all: (B, 1, dim)."""
        if self.capture_samples > 0:
            self.keys_seen = x.shape[1]
        (q,) = split_heads(self.q(x[:, :1]), self.num_heads)
        return self._attend(self._finish, q, k, v, dropout_p=self._dropout_p())


class BetweenChannels(OnOurs):
    attends = "channels"

    def _prepare(self: Any) -> None:
        # DaViT's second version calls them groups.
        heads = self.groups if hasattr(self, "groups") else self.num_heads
        head_dim = self.qkv.in_features // heads
        if head_dim > MAX_HEAD_DIM_CUDA:
            raise ValueError(
                f"heads of at most {MAX_HEAD_DIM_CUDA} channels on a GPU, got {head_dim}"
            )
        self._set_sizes(self.qkv.in_features, heads, head_dim)
        del self.track_logits

    def columns(self, tokens: int) -> int:
        """Return how many entries a softmax row has: the channels of a head."""
        return self.head_dim


class InWindows(OnOurs):
    """Attention that is called on windows, (B * windows, N, dim), those of a map side by side.

    A captured batch entry is a map, as elsewhere, where the block around is ``OfWindows`` and so
    tells the map's size; else it is a window.
    """

    attends = "windows"

    def _size(self: Any, dim: int, head_dim: int, plain: bool = False) -> None:
        super()._size(dim, head_dim, plain)
        self.map_size = None

    def columns(self: Any, tokens: int) -> int:
        """Return how many entries a softmax row has: the tokens of a window."""
        return self.window_size[0] * self.window_size[1]

    def _wants(self: Any, batch: int, device: torch.device) -> tuple[Tensor | None, bool]:
        if self.capture_samples <= 0:
            return super()._wants(batch, device)
        maps, windows = 0, 0
        if self.map_size is not None:
            maps, windows = self.map_size[0], math.prod(self._tiles())
        if batch == 0 or batch != maps * windows:
            # No block around, or one that never came to its attention.
            self.map_size = None
            return super()._wants(batch, device)
        sample = evenly_spaced(maps, self.capture_samples, device)
        places = torch.arange(windows, dtype=torch.int32, device=device)
        return (sample[:, None] * windows + places).flatten(), True

    @torch.no_grad()
    def _keep(
        self: Any,
        stats: AttentionStats,
        sample: Tensor | None,
        output: Tensor,
        skip: Tensor | None,
        key_lengths: Tensor | Sequence[int] | None = None,
        layer_scale: Tensor | None = None,
    ) -> None:
        if sample is not None and self.map_size is not None:
            output = self._of_maps(output.index_select(0, sample))
            stats = stats._replace(heads=self._of_maps(stats.heads))
            sample = torch.arange(output.shape[0], dtype=torch.int32, device=output.device)
            self.map_size = None
        super()._keep(stats, sample, output, skip, key_lengths, layer_scale)

    def _tiles(self: Any) -> tuple[int, int]:
        sizes = zip(self.map_size[1:], self.window_size)
        down, right = (-(-size // window) for size, window in sizes)
        return down, right

    def _of_maps(self: Any, windows: Tensor) -> Tensor:
        """Return (S, Y * X, width), without the filling, of (S * windows, N, width)."""
        _, rows, cols = self.map_size
        down, right = self._tiles()
        tiles = windows.unflatten(0, (-1, down, right)).unflatten(3, self.window_size)
        whole = tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return whole[:, :rows, :cols].flatten(1, 2)


class OfWindows(nn.Module):
    """A block that cuts windows: it tells its attention of which map they are."""

    def _tell(self: Any, x: Tensor, rows_axis: int) -> None:
        # The block may outlive the swap of its attention, where ``fully_shard`` has wrapped it.
        if getattr(self.attn, "capture_samples", 0) > 0:
            self.attn.map_size = x.shape[0], *x.shape[rows_axis : rows_axis + 2]
