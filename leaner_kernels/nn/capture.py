"""The base class of attention modules: their sizes, and the capture of their heads for kappa."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, TypeGuard

import torch
from torch import Tensor, nn

from ..ops._checks import ArgumentError, check_tensor, int32_of, is_mapped, shown, to_device
from ..ops.attention import attention_qkvpacked_with_stats, attention_with_stats
from ..ops.attention.sampled import sampled_attention, sampled_attention_qkvpacked
from ..ops.statistics import AttentionStats, evenly_spaced, newest_statistics, statistic_of

MAX_SIZE = 2**31 - 1

Attends = Literal["tokens", "windows", "landmarks", "channels", "neighbours"]


class Captured(NamedTuple):
    """The tensors that one forward captured of S sampled batch entries; no gradients.

    Attributes:
        heads: (S, N, H * D), float32: the heads side by side before the output projection, for the
            N tokens of a sample; those of a map in row-major order.
        output: (S, N, dim), float32: the result of the module, times any ``layer_scale``.
        residual: (S, N, dim), float32: the residual stream before the addition; None if not given.
        lengths: (S,) int32: the number of tokens that are not padding; None without
            ``key_lengths``.
        statistics: those of ``AttentionStats`` by name, of the whole batch: (B, H) float32, or the
            maximum (H,) over the batch and over the forwards since ``captured`` was last None.
            Each is an attribute too: ``captured.entropy``.
        dtype: dtype of the output before it became float32.
    """

    heads: Tensor
    output: Tensor
    residual: Tensor | None
    lengths: Tensor | None
    statistics: dict[str, Tensor]
    dtype: torch.dtype

    __getattr__ = statistic_of


class Capturing(nn.Module):
    """An attention module whose heads ``KappaMonitor`` can capture.

    Args:
        dim: width of the input and output.
        num_heads: number of heads, at least 1.
        head_dim: width of each head, 1 to 128; "split" divides ``dim`` among the heads,
            ``dim // num_heads`` (rounded down, so the attention width may fall short of ``dim``).

    Attributes:
        attends: the kind of attention: between "tokens", inside "windows" of tokens, through
            "landmarks", between "channels", or to "neighbours" of a token.
        capture_samples: batch entries whose heads the next forward captures; 0 captures nothing.
            ``KappaMonitor`` sets it.
        captured: ``Captured`` of the newest forward that captured, or None. It is overwritten, so
            that activation checkpointing counts nothing twice.
        track_logits: whether every forward, capturing or not, updates ``peak_logit``; it then
            computes statistics. False by default.
        peak_logit: (H,) float32, the maximum of ``AttentionStats.max_logit`` over the batch and
            over all tracked forwards since it was last set to None. Activation checkpointing
            therefore does not change it, and accumulated micro-batches all count.

    Raises:
        ValueError: if a count or width is not supported.
    """

    attends: ClassVar[Attends] = "tokens"

    def __init__(self, dim: int, num_heads: int, head_dim: int | Literal["split"]) -> None:
        super().__init__()
        self._set_sizes(dim, num_heads, head_dim)

    def _set_sizes(self, dim: int, num_heads: int, head_dim: int | Literal["split"]) -> None:
        """Set all attributes above, for a module that was constructed by its own class."""
        for name, count in (("dim", dim), ("num_heads", num_heads)):
            whole = isinstance(count, int) and not isinstance(count, bool)
            if not whole or not 1 <= count <= MAX_SIZE:
                raise ValueError(f"{name} must be a whole number of at least 1, got {shown(count)}")
        if isinstance(head_dim, str):
            if head_dim != "split":
                raise ValueError(f'head_dim must be a width or "split", got {shown(head_dim)}')
            head_dim = dim // num_heads
        if isinstance(head_dim, bool) or not isinstance(head_dim, int) or not 1 <= head_dim <= 128:
            raise ValueError(
                f"head_dim must be in [1, 128], got {shown(head_dim)} "
                f"(dim {dim}, num_heads {num_heads})"
            )
        self.dim: int = dim
        self.num_heads: int = num_heads
        self.head_dim: int = head_dim
        self.capture_samples = 0
        self.captured: Captured | None = None
        self.track_logits = False
        self.peak_logit: Tensor | None = None

    def _set_projections(
        self,
        qkv_bias: bool,
        proj_bias: bool,
        proj_drop: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Create the projections of queries, keys and values and of the output, and its dropout."""
        dim, width = self.dim, self.num_heads * self.head_dim
        self.qkv: nn.Linear = nn.Linear(dim, 3 * width, bias=qkv_bias, device=device, dtype=dtype)
        self.proj: nn.Linear = nn.Linear(width, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop: nn.Dropout = nn.Dropout(proj_drop)

    def __getstate__(self) -> dict[str, Any]:
        # Reset the capture, since no monitor would stop that of a copied or saved module.
        return vars(self) | {"capture_samples": 0, "captured": None}

    def _replicate_for_data_parallel(self) -> Any:
        if self.track_logits or self.capture_samples > 0:
            raise RuntimeError(
                "nn.DataParallel discards its replicas with all that they capture: "
                "QKClip and KappaMonitor need DistributedDataParallel"
            )
        return super()._replicate_for_data_parallel()

    def columns(self, tokens: int) -> int:
        """Return the number of entries of a softmax row, for a sample of ``tokens`` tokens."""
        return tokens

    def _check_input(self, x: Tensor, skip: Tensor | None, axes: str) -> None:
        """Raise ValueError unless ``x`` is (axes, dim) and not empty, and ``skip`` matches it."""
        check_tensor("x", x)
        if x.dim() != axes.count(",") + 2 or x.shape[-1] != self.dim or 0 in x.shape[1:]:
            words = " and not empty" if 0 in x.shape[1:] else ""
            raise ArgumentError(f"x must be ({axes}, {self.dim}){words}, got {tuple(x.shape)}")
        if skip is None:
            return
        check_tensor("skip", skip)
        if skip.shape != x.shape:
            raise ArgumentError(
                f"skip must be shaped as x, {tuple(x.shape)}, got {tuple(skip.shape)}"
            )

    def _select_sample(self, batch: int, device: torch.device) -> tuple[Tensor | None, bool]:
        """Return the entries to capture, (S,) int32 or None, and whether to compute statistics."""
        refuse_tracing(self)
        if not self._measures() or batch == 0:
            return None, False
        capturing = self.capture_samples > 0
        return evenly_spaced(batch, self.capture_samples, device) if capturing else None, True

    def _measures(self) -> bool:
        """Return whether a forward computes statistics."""
        return self.capture_samples > 0 or self.track_logits

    def __prepare_scriptable__(self) -> NoReturn:
        # ``torch.jit.script`` calls this before it compiles a module.
        raise _no_torchscript(self)

    def _separate_stats(self, sample: Tensor | None) -> TypeGuard[Tensor]:
        """Return whether statistics need a separate pass to keep the output's bits."""
        # On a GPU, one pass computes both. With tracked logits, every step computes statistics.
        return sample is not None and sample.device.type == "cpu" and not self.track_logits

    def _attention_with_stats(
        self, *args: Any, sample: Tensor | None, **params: Any
    ) -> AttentionStats:
        """Call ``attention_with_stats``, or ``sampled_attention`` to keep the output's bits."""
        if self._separate_stats(sample):
            return sampled_attention(*args, sample=sample, **params)
        return attention_with_stats(*args, sample=sample, **params)

    def _qkvpacked_with_stats(
        self, qkv: Tensor, *, sample: Tensor | None, **params: Any
    ) -> AttentionStats:
        """Call ``attention_qkvpacked_with_stats``, or its counterpart likewise."""
        if self._separate_stats(sample):
            return sampled_attention_qkvpacked(qkv, sample=sample, **params)
        return attention_qkvpacked_with_stats(qkv, sample=sample, **params)

    def _project(self: Any, heads: Tensor) -> Tensor:
        """Project heads (..., H, D) to (..., dim)."""
        return self.proj_drop(self.proj(heads.flatten(-2)))

    def _run_operator(
        self,
        finish: Callable[[Tensor], Tensor],
        attend: Callable[..., Tensor],
        attend_with_stats: Callable[..., AttentionStats],
        *args: Any,
        store: Mapping[str, Any] | None = None,
        **params: Any,
    ) -> Tensor:
        """Call ``_run`` for an operator, with statistics in a separate pass if needed."""

        def measure(*args: Any, sample: Tensor | None, **params: Any) -> AttentionStats:
            if not self._separate_stats(sample):
                return attend_with_stats(*args, sample=sample, **params)
            with torch.no_grad():
                stats = attend_with_stats(*args, sample=sample, **params)
            return stats._replace(out=attend(*args, **params))

        return self._run(finish, attend, measure, *args, store=store, **params)

    def _run(
        self,
        finish: Callable[[Tensor], Tensor],
        attend: Callable[..., Tensor],
        measure: Callable[..., AttentionStats],
        *args: Any,
        store: Mapping[str, Any] | None = None,
        **params: Any,
    ) -> Tensor:
        """Return ``finish(attend(*args, **params))``; store the capture of ``measure``."""
        # The common case; ``_select_sample`` would give the same result in three more Python calls.
        watched = self.capture_samples or self.track_logits
        if not watched and torch._C._get_tracing_state() is None:
            return finish(attend(*args, **params))
        sample, measured = self._select_sample(args[0].shape[0], args[0].device)
        if not measured:
            return finish(attend(*args, **params))
        stats = measure(*args, sample=sample, **params)
        output = finish(stats.out)
        self._store_capture(stats, sample, output, **(store or {}))
        return output

    @torch.no_grad()
    def _store_capture(
        self,
        stats: AttentionStats,
        sample: Tensor | None,
        output: Tensor,
        skip: Tensor | None = None,
        key_lengths: Tensor | Sequence[int] | None = None,
        layer_scale: Tensor | None = None,
    ) -> None:
        """Store the entries in ``sample`` (S,) int32; output and skip are (B, ..., dim)."""
        if self.track_logits:
            if not torch.compiler.is_compiling() and is_mapped(stats.max_logit):
                raise RuntimeError(
                    f"{type(self).__name__} runs inside vmap of torch.func, where QKClip cannot "
                    "track its logits: call QKClip.close() first"
                )
            peak = stats.max_logit.amax(dim=0)
            self.peak_logit = peak if self.peak_logit is None else peak.maximum(self.peak_logit)
        if sample is None:
            return
        assert stats.heads is not None
        if key_lengths is not None:
            key_lengths = to_device(int32_of("key_lengths", key_lengths), sample.device)
        # Kappa around the skip connection is that of the term added to the residual stream.
        added = output.index_select(0, sample).flatten(1, -2).float()
        self.captured = Captured(
            heads=stats.heads,
            output=added if layer_scale is None else added * layer_scale.float(),
            residual=None if skip is None else skip.index_select(0, sample).flatten(1, -2).float(),
            lengths=None if key_lengths is None else key_lengths.index_select(0, sample),
            statistics=newest_statistics(
                stats, None if self.captured is None else self.captured.statistics
            ),
            dtype=output.dtype,
        )

    def extra_repr(self) -> str:
        """Show the sizes in the printed module."""
        return f"dim={self.dim}, num_heads={self.num_heads}, head_dim={self.head_dim}"


def refuse_tracing(module: nn.Module) -> None:
    """Raise ValueError if ``torch.jit.trace`` is running a module that calls our attention."""
    # A kernel launched without the dispatcher would appear in the trace as a constant. This is
    # ``torch.jit.is_tracing`` in two fewer Python calls.
    if torch._C._get_tracing_state() is not None:
        raise _no_torchscript(module)


def _no_torchscript(module: nn.Module) -> ValueError:
    return ValueError(
        f"{type(module).__name__} does not support TorchScript, which cannot compile our "
        "operators: use torch.compile or torch.export, or undo(model) where it was swapped"
    )
