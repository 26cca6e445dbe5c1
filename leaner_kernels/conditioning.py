"""Interventions based on the statistics of attention: clip logits, penalise conditioning.

Each object is active from its construction to its ``close``.
"""

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from .ops._checks import LARGEST, ArgumentError, check_tensor, shown
from .ops._launch_cache import TENSORS
from .ops.attention import attention_qkvpacked
from .removed import refuse_removed_arguments

# Relative to the mean eigenvalue of a Gram matrix. With R the root mean square singular value, the
# ridge bounds the gradient of the penalty by about 1 / (2 R sqrt(RIDGE)) and hides singular values
# below R 1e-4.
RIDGE = 1e-8
# The numbers that a subclass holds may differ from those it represents, as in quantised weights.
_PLAIN = TENSORS | {torch._subclasses.FakeTensor}


class QKClip:
    """Keep the logits of every attention head below a threshold by scaling its q and k weights.

    Call ``step()`` after the optimizer's:

        clip = QKClip(model, threshold=100.0)
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            clip.step()

    A head whose largest logit S since the last ``step()`` exceeded the threshold gets the rows of
    its queries and keys in ``qkv.weight`` and ``qkv.bias`` multiplied by sqrt(threshold / S), so
    that the weights that gave S would give the threshold. Other heads, values and the state of the
    optimizer are bitwise unchanged. S is ``scale * q . k`` plus any additive mask: a mask with
    large positive entries clips too early. An S that is not finite clips nothing.

    ``step()`` does not synchronise with the device. Under torch.distributed, every rank must call
    it: one collective combines the logits of all layers over ranks, so that replicas stay equal.
    Weights may be sharded by FSDP2 (a DTensor is scaled in place, without communication) or
    replicated by DDP. Every forward counts, including evaluation, and computes statistics; a layer
    without a forward is not scaled.

    Args:
        model: any module with ``ManyHeadAttention``, ``WindowAttention`` or ``NystromAttention``
            (whose landmarks are means of queries and keys) inside. Other modules are ignored: they
            have no projection ``qkv`` of queries and keys that determine the logits.
        threshold: upper bound of the logits, above 0; 100 is typical.

    Raises:
        ValueError: if the threshold is out of range; if the model has no attention modules, or is
            in nn.DataParallel, whose replicas lose their logits; if the weight or bias of a
            projection is computed (pruning, ``weight_norm``, any parametrization, an adapter around
            it), a tensor subclass, or integers, as in quantised models; if modules share one.

    Source: QK-Clip of Kimi K2 (arXiv:2507.20534), per head, as for plain multi-head attention;
    there the threshold is 100 and the optimizer Muon, but neither matters here.
    """

    @refuse_removed_arguments
    def __init__(self, model: nn.Module, threshold: float = 100.0) -> None:
        if not isinstance(threshold, Real) or not 0 < threshold <= LARGEST:
            raise ValueError(f"threshold must be above 0 and finite, got {shown(threshold)}")
        self.threshold = float(threshold)
        self.modules = _attention_modules(model, "tokens", "windows", "landmarks")
        self._check_projections()
        if len({id(module.qkv.weight) for module in self.modules.values()}) < len(self.modules):
            raise ValueError("QKClip does not support a qkv projection that two modules share")
        for module in self.modules.values():
            module.track_logits, module.peak_logit = True, None

    @torch.no_grad()
    def step(self) -> dict[str, Tensor]:
        """Clip, and reset the largest logits.

        Returns:
            By layer, (H,) float32 on the device: the largest logit of each head before clipping,
            over all ranks; -inf if no forward ran or the logit was not finite.

        Raises:
            ValueError: if the constructor would now refuse a projection, or if a module no longer
                tracks logits.
        """
        if lost := [n for n, m in self.modules.items() if not vars(m).get("track_logits")]:
            raise ValueError(
                f"{lost[0]} no longer tracks logits, after undo or close: construct QKClip again"
            )
        self._check_projections()
        modules = self.modules.values()
        peaks = torch.cat([_finite_peak(module) for module in modules])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        largest = peaks.split([module.num_heads for module in modules])
        for module, logits in zip(modules, largest):
            shrink = torch.where(logits > self.threshold, self.threshold / logits, 1.0).sqrt()
            rows = torch.stack([shrink, shrink, torch.ones_like(shrink)])  # q, k, v
            rows = rows.flatten().repeat_interleave(module.head_dim)
            _scale(module.qkv.weight, rows[:, None])
            if module.qkv.bias is not None:
                _scale(module.qkv.bias, rows)
            module.peak_logit = None
        return dict(zip(self.modules, largest))

    def _check_projections(self) -> None:
        for name, module in self.modules.items():
            for part in ("weight", "bias"):
                _check_scalable(module.qkv, part, name or "the model")

    def close(self) -> None:
        """Stop tracking logits, which then cost nothing."""
        for module in self.modules.values():
            if "track_logits" in vars(module):  # true until an adapter's undo
                module.track_logits, module.peak_logit = False, None


@refuse_removed_arguments
def conditioning_penalty(heads: Tensor) -> Tensor:
    """Compute a differentiable penalty per matrix: 0 if all its singular values are equal.

    With the k = min(N, M) eigenvalues of the Gram matrix on the smaller side, each raised by 1e-8
    times their mean, it is 1/2 log(arithmetic mean / geometric mean): smooth, of every eigenvalue,
    at most log kappa, and kappa <= 2 exp(k * penalty). The scale of the matrix does not matter.

    Args:
        heads: (..., N, M), float32 or float64: heads side by side, N tokens by H * d.

    Returns:
        (...), float64, finite; nan, without a gradient, if a matrix is not finite.

    Raises:
        ValueError: if a shape or dtype is not supported.

    Numerics: float64, of each matrix divided by a power of two near its largest entry, so that no
    finite matrix overflows or underflows. For a zero matrix, the penalty and its gradient are 0.
    For a rank-deficient matrix both are finite, but the gradient does not move singular values of
    exactly zero: along a singular vector it is proportional to the singular value.
    Source: the bound: Guggenheimer, Edelman and Johnson 1995, "A simple estimate of the condition
    number of a linear system".
    """
    check_tensor("heads", heads)
    if heads.dim() < 2 or 0 in heads.shape:
        raise ArgumentError(f"heads must be (..., N, M) and not empty, got {tuple(heads.shape)}")
    if heads.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(f"heads must be float32 or float64, got {heads.dtype}")
    finite = heads.isfinite().all(dim=-1).all(dim=-1)
    a = heads.double().masked_fill(~finite[..., None, None], 0)
    # Squares must neither overflow nor vanish. The penalty is scale-free: the scale is a constant.
    exponent = a.detach().abs().amax(dim=(-2, -1), keepdim=True).frexp().exponent
    a = a * torch.ldexp(torch.ones_like(exponent, dtype=a.dtype), -exponent.clamp(-1000, 1000))
    gram = a @ a.mT if a.shape[-2] <= a.shape[-1] else a.mT @ a
    # The floor leaves a zero matrix zero; squares of others are far above it.
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp(min=1e-100)
    gram = gram / mean[..., None, None]
    gram = gram + RIDGE * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    # Unlike ``cholesky``, it does not synchronise to check for success, which the ridge guarantees.
    root, _ = torch.linalg.cholesky_ex(gram)
    log_gm = 2 * root.diagonal(dim1=-2, dim2=-1).log().mean(dim=-1)
    penalty = (gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1).log() - log_gm) / 2
    return penalty.masked_fill(~finite, math.nan)


class ConditioningPenalty:
    """Add the conditioning of every attention block to the loss of a model.

        penalty = ConditioningPenalty(model, weight=0.01)
        for batch in batches:
            (loss(model, batch) + penalty.loss()).backward()

    For the first ``samples`` batch entries of the newest forward, the heads are computed once more
    from the projected queries, keys and values: differentiably, in float32 (float64 in a float64
    model) and without dropout. This holds in half precision too, whose own heads are too coarse for
    a condition number. Forwards without gradients are skipped.

    It works with gradient accumulation (call ``loss()`` in every pass), DDP, FSDP2 (in the sum that
    ``backward`` is called on, as above) and activation checkpointing that is not reentrant; with
    ``torch.compile`` if it is constructed before the first compiled forward, but not with a block
    compiled with both fullgraph=True and activation checkpointing inside.

    Args:
        model: any module with ``ManyHeadAttention`` inside, called without ``attn_mask`` and
            ``key_lengths``.
        weight: multiplies the penalty, at least 0.
        samples: batch entries, on each rank, at least 1.

    Raises:
        ValueError: an argument outside the list above, or a model without attention modules; in a
            forward, a mask or lengths.

    Source: arXiv:2505.20802 for why kappa of the heads matters; as a penalty it is our own.
    """

    @refuse_removed_arguments
    def __init__(self, model: nn.Module, weight: float = 0.01, samples: int = 1) -> None:
        if not isinstance(weight, Real) or not 0 <= weight <= 1e30:
            raise ValueError(f"weight must be in [0, 1e30], got {shown(weight)}")
        if not isinstance(samples, Integral) or samples < 1:
            raise ValueError(f"samples must be a whole number from 1, got {shown(samples)}")
        self.weight, self.samples = float(weight), samples
        self.modules = _attention_modules(model, "tokens")
        self._causal: dict[str, bool] = {}
        self._projected: dict[str, Tensor] = {}
        self._handles = []
        for name, module in self.modules.items():
            hooks = _Hooks(self, name)
            self._handles += [
                module.register_forward_pre_hook(hooks.before_call, with_kwargs=True),
                module.qkv.register_forward_hook(hooks.after_projection),
            ]

    def loss(self) -> Tensor:
        """Return ``weight`` times the mean penalty over layers and samples, and forget the forward.

        Returns:
            (), float32, differentiable.

        Raises:
            RuntimeError: a layer ran no forward with gradients since the last call.
        """
        missing = [name for name in self.modules if name not in self._projected]
        if missing:
            raise RuntimeError(
                f"{missing[0]} ran no forward with gradients since the last loss(), or was "
                "compiled before ConditioningPenalty was constructed"
            )
        penalties = [self._penalty(name) for name in self.modules]
        return self.weight * torch.stack(penalties).mean().float()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._projected.clear()

    def _penalty(self, name: str) -> Tensor:
        module, projected = self.modules[name], self._projected.pop(name)
        qkv = projected.unflatten(-1, (3, module.num_heads, module.head_dim))
        qkv = qkv if qkv.dtype == torch.float64 else qkv.float()
        with torch.autocast(qkv.device.type, enabled=False):
            heads = attention_qkvpacked(qkv, is_causal=self._causal[name]).flatten(-2)
            return conditioning_penalty(heads).mean()


class _Hooks:
    """The hooks of a layer; a copied or saved model has none."""

    def __init__(self, penalty: ConditioningPenalty | None = None, name: str = "") -> None:
        self.penalty, self.name = penalty, name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def before_call(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.penalty is None:
            return
        call = dict(zip(("x", "attn_mask", "is_causal", "key_lengths"), args)) | kwargs
        for refused in ("attn_mask", "key_lengths"):
            if call.get(refused) is not None:
                raise ValueError(f"ConditioningPenalty does not support {refused} ({self.name})")
        self.penalty._causal[self.name] = call.get("is_causal", False)

    def after_projection(
        self, _module: nn.Module, _args: tuple[Any, ...], projected: Tensor
    ) -> None:
        # The forward has stored this already; a recomputation in the backward would outlive it.
        if self.penalty is not None and torch.is_grad_enabled() and not _in_backward():
            self.penalty._projected[self.name] = projected[: self.penalty.samples]


def _attention_modules(model: nn.Module, *attends: str) -> dict[str, Any]:
    """Return the modules, by name, of these kinds of attention with a fused projection ``qkv``."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {shown(model)}")
    if any(isinstance(m, nn.DataParallel) for m in model.modules()):
        raise ValueError(
            "nn.DataParallel discards its replicas with all that they track: use "
            "DistributedDataParallel or, on one device, pass model.module"
        )
    modules = {
        name: m
        for name, m in model.named_modules()
        if "track_logits" in vars(m) and m.attends in attends and hasattr(m, "qkv")
    }
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no attention module between {' or '.join(attends)} with "
            "a fused projection qkv: use leaner_kernels.nn.ManyHeadAttention"
        )
    return modules


def _finite_peak(module: Any) -> Tensor:
    if module.peak_logit is None:
        device = module.qkv.weight.device
        return torch.full((module.num_heads,), -math.inf, dtype=torch.float32, device=device)
    # A rank whose logits are not finite must not affect the weights of all ranks.
    return module.peak_logit.masked_fill(~module.peak_logit.isfinite(), -math.inf)


def _check_scalable(projection: nn.Module, part: str, name: str) -> None:
    """Raise ValueError unless scaling the weight or bias in place scales what a forward uses."""
    param: Any = projection._parameters.get(part)
    if param is None:
        if part == "bias" and getattr(projection, part, None) is None:
            return
        raise ValueError(
            f"QKClip scales qkv.{part} in place, but in {name} it is computed from other tensors, "
            "as by pruning, weight_norm, a parametrization or an adapter: remove that first"
        )
    local = param._local_tensor if hasattr(param, "device_mesh") else param
    if type(local) not in _PLAIN or not local.is_floating_point():
        raise ValueError(
            f"QKClip scales qkv.{part} in place, so it must be a floating-point tensor or DTensor, "
            f"got a {type(local).__name__} of {local.dtype} in {name}"
        )


def _scale(param: Tensor, factor: Tensor) -> None:
    """Multiply in place by a factor, which every rank has in full."""
    if hasattr(param, "device_mesh"):
        # Imported here because only sharded parameters need it.
        from torch.distributed.tensor import DTensor, Replicate

        assert isinstance(param, DTensor)
        whole = [Replicate()] * param.device_mesh.ndim
        factor = DTensor.from_local(factor, param.device_mesh, whole, run_check=False)
    param.mul_(factor)


def _in_backward() -> bool:
    # Compiled code has no graph task; the next forward overwrites what it stores.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
