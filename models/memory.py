"""Predict the memory of a training step, without a GPU or any computation.

The step runs on the meta device, where tensors have sizes but no values: forward, cross-entropy,
backward, with AdamW's two moments in place as from the second step on. Every allocation and release
is recorded, so the peak and its parts are exact for the operators that run. The prediction counts
the tensors that PyTorch's caching allocator would hold on a GPU, with its rounding, as
``torch.cuda.max_memory_allocated`` does. It leaves out scratch space inside operators (cuBLAS and
cuDNN, tens of megabytes), the CUDA context and fragmentation.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, get_args
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from leaner_kernels.ops import _tiles
from leaner_kernels.ops.attention import dispatch, op, reference
from models import papers
from models.bert import BERT, IGNORED
from models.gpt import GPT
from models.layers import VisionModel

Precision = Literal["bf16", "fp32"]
PRECISIONS = get_args(Precision)

# CUDACachingAllocator's kMinBlockSize.
BLOCK = 512
_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak of a training step.

    Attributes:
        parameters: the weights, float32, and the buffers.
        gradients: those already there at that moment.
        optimizer: AdamW's two moments.
        inputs: images or tokens, and labels or targets.
        activations: kept from the forward for the backward.
        temporaries: everything else, such as the gradients of activations.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    inputs: int = 0
    activations: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        """Their sum, the peak."""
        return sum(getattr(self, field.name) for field in fields(self))


def predict(
    build: Callable[[], nn.Module],
    batch_size: int,
    *,
    precision: Precision = "bf16",
    recompute: bool = False,
    eager: int = 0,
) -> Memory:
    """Predict the peak memory of a training step on one GPU.

    Args:
        build: makes the model, a ``VisionModel`` or ``LanguageModel`` with ``blocks``; called under
            the meta device.
        batch_size: images, or sequences of full length, in the step.
        precision: as in ``Step``.
        recompute: as in ``Step``.
        eager: as in ``Step``.

    Returns:
        The ``Memory``.

    Raises:
        ValueError: a batch size below 1, a model that is not on meta, or what ``Step`` refuses.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    with torch.device("meta"):
        model = build()
        # A block's second forward runs inside the backward, where the mode below is off.
        for block in model.blocks if recompute else ():
            block.forward = _as_on_gpu(block.forward)
        step = Step(model, precision=precision, recompute=recompute, eager=eager)
        inputs = step.batch(batch_size)
        weights = list(step.model.parameters())
        held = [*weights, *step.model.buffers()]
        if any(not t.is_meta for t in held):
            raise ValueError(
                "build must leave the model on the meta device, got tensors on another"
            )
        moments = [torch.empty_like(p) for p in weights for _ in range(2)]
    ledger = Ledger()
    ledger.enter(held, "parameters")
    ledger.enter(moments, "optimizer")
    ledger.enter(inputs, "inputs")
    # Long sequences count as our kernels too: libraries keep the same tensors.
    kernels = mock.patch.object(dispatch, "_suits", _never)
    with _AsOnGpu(), _tiles.assume(90), kernels, ledger:
        loss = step.loss(*inputs)
        ledger.name_all("activations")
        loss.backward()
    ledger.name([p.grad for p in weights if p.grad is not None], "gradients")
    return ledger.peak()


def sharded(memory: Memory, model: nn.Module, shards: int, *, bf16: bool) -> int:
    """Return the bytes of a step on each of several GPUs that FSDP2 spreads a model over.

    Weights, gradients and moments are divided among the GPUs. Besides its share, each GPU holds
    full weights: those outside of blocks, and twice those of the largest block, since one computes
    while the next is gathered; and the float32 gradients of that block before they are reduced.

    Args:
        memory: of ``predict``, with the batch of one GPU; of one GPU its total is returned.
        model: with ``blocks``.
        shards: GPUs that share the weights.
        bf16: as the step computes; gathered weights are then in bfloat16.
    """
    if shards == 1:
        return memory.total
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    others = sum(p.numel() for p in model.parameters()) - sum(blocks)
    gathered = (others + 2 * max(blocks)) * (2 if bf16 else 4) + 4 * max(blocks)
    state = memory.parameters + memory.gradients + memory.optimizer
    rest = memory.inputs + memory.activations + memory.temporaries
    return -(-state // shards) + gathered + rest


def _never(*call: object) -> bool:
    # Not a Mock, which would keep the tensors it is called with.
    return False


def paper_batch_size(row: str) -> int:
    """Return the samples on each of the paper's GPUs."""
    return next(entry.batch for (name, _), entry in papers.ROWS.items() if name == row)


class Step:
    """The forward and backward of a training step, on any device.

    Args:
        model: with ``blocks``; changed in place.
        precision: ``"fp32"``, or ``"bf16"``: computed in bfloat16, layer norms included, while
            weights, gradients and moments stay float32. The bfloat16 copy of a weight is made where
            it is needed, and again for the backward, as by FSDP's MixedPrecisionPolicy.
        recompute: keep only the inputs of each block for the backward.
        eager: 0 for our kernels; or softmax attention of PyTorch's matrix products and softmax, of
            which each call keeps that many (B, H, N, N) tensors for its backward: 1, the
            probabilities, and 2 where a step between them and the values, such as dropout, keeps
            its own. A GPT then holds all its logits. Other operators stay ours.

    Raises:
        ValueError: another precision, another ``eager``, or one with ``recompute``.
    """

    def __init__(
        self, model: nn.Module, *, precision: Precision, recompute: bool = False, eager: int = 0
    ):
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be {' or '.join(PRECISIONS)}, got {precision!r}")
        if eager not in (0, 1, 2):
            raise ValueError(f"eager must be 0, 1 or 2, got {eager!r}")
        if eager and recompute:
            raise ValueError(f"eager must be 0 with recompute, got {eager}")
        self.model, self.eager = model, eager
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._copies = WeakTensorKeyDictionary()
        if recompute:
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if precision == "bf16":
            # A batch norm takes weights in the dtype of its statistics, which stay float32.
            for module in [m for m in model.modules() if not isinstance(m, BatchNorm)]:
                for name, _ in list(module.named_parameters(recurse=False)):
                    cast = _Cast(self._copies)
                    parametrize.register_parametrization(module, name, cast, unsafe=True)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Return ``size`` inputs and targets of the loss, on the default device.

        For images, the inputs are (size, C, S, S) float32 and the labels (size,). For text, the
        inputs are full-length tokens (size, N), or (size, 2, N) for pairs. Models that predict
        tokens have targets of the same shape, and classifiers have labels (size,).
        """
        model, labels = self.model, torch.zeros(size, dtype=torch.int64)
        if isinstance(model, VisionModel):
            side = model.image_size
            return torch.zeros(size, model.in_chans, side, side), labels
        in_pairs = getattr(model, "pairs", False)
        shape = (size, 2, model.sequence_length) if in_pairs else (size, model.sequence_length)
        tokens = torch.zeros(shape, dtype=torch.int64)
        if not isinstance(model, GPT | BERT):
            return tokens, labels
        # BERT computes logits for the largest number of masked tokens, whatever the targets are.
        return tokens, torch.full_like(tokens, 0 if isinstance(model, GPT) else IGNORED)

    def loss(self, inputs: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean cross-entropy; the caller calls ``backward`` on it."""
        with saved_tensors_hooks(self._pack, self._unpack), written_out(self.eager):
            if isinstance(self.model, GPT) and self.eager:
                logits = self.model(inputs).float()
                return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            if isinstance(self.model, GPT | BERT):
                return self.model(inputs, targets=wanted).mean()
            inputs = inputs.to(self.dtype) if inputs.is_floating_point() else inputs
            return F.cross_entropy(self.model(inputs).float(), wanted)

    def _pack(self, saved: Tensor) -> Any:
        """For a bfloat16 weight, save only its identity and the view of it."""
        whole = saved if saved._base is None else saved._base
        weight = self._copies.get(whole)
        if weight is None:
            return saved
        return weight, (saved.shape, saved.stride(), saved.storage_offset())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        weight, view = packed
        return weight.to(self.dtype).as_strided(*view)


@contextmanager
def written_out(kept: int) -> Iterator[None]:
    """Compute softmax attention by PyTorch's operators, as ``eager`` of ``Step``; 0: by ours.

    No masks and no dropout: the paper's models have none.
    """

    def compute_plain(operator, _signature, arguments, *_enable_gqa_and_deterministic):
        call = operator.call(arguments)
        scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
        s = (call.query @ call.key.mT) * scale
        seen = reference.visible(*s.shape[-2:], call.key_lengths, s.device, **call.visibility)
        p = (s if seen is None else s.masked_fill(~seen, float("-inf"))).softmax(-1)
        for _ in range(kept - 1):
            p = p.clone()
        return operator.from_query(p @ call.value)

    if not kept:
        yield
        return
    with mock.patch.object(op, "compute_plain", compute_plain):
        yield


class _Cast(nn.Module):
    """A weight in bfloat16, recorded as a copy."""

    def __init__(self, copies: WeakTensorKeyDictionary):
        super().__init__()
        self.copies = copies

    def forward(self, weight: Tensor) -> Tensor:
        copy = weight.to(torch.bfloat16)
        self.copies[copy] = weight.detach()
        return copy


class Ledger(TorchDispatchMode):
    """Record when each tensor's storage on the meta device is allocated and released."""

    def __init__(self):
        super().__init__()
        self._changes: list[tuple[int, int]] = []
        self._kinds: list[str] = []
        self._alive: dict[int, tuple[int, weakref.ref]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.enter([t for t in tree_leaves(out) if isinstance(t, Tensor)], "temporaries")
        return out

    def enter(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count the storages of ``tensors`` that are not counted yet."""
        for storage in (t.untyped_storage() for t in tensors if t.is_meta):
            if id(storage) not in self._alive:
                size = -(-storage.nbytes() // BLOCK) * BLOCK
                entry = len(self._kinds)
                self._kinds.append(kind)
                self._changes.append((entry, size))
                gone = partial(self._leave, id(storage), size)
                self._alive[id(storage)] = entry, weakref.ref(storage, gone)

    def _leave(self, key: int, size: int, _: weakref.ref) -> None:
        entry, _ = self._alive.pop(key)
        self._changes.append((entry, -size))

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Label the storages of ``tensors``."""
        for tensor in tensors:
            entry, _ = self._alive[id(tensor.untyped_storage())]
            self._kinds[entry] = kind

    def name_all(self, kind: str) -> None:
        """Label all storages now alive that were temporaries so far."""
        for entry, _ in self._alive.values():
            if self._kinds[entry] == "temporaries":
                self._kinds[entry] = kind

    def peak(self) -> Memory:
        """Return the bytes of each kind at the peak."""
        return Memory(**max(self._history(), key=lambda held: sum(held.values())))

    def _history(self) -> Iterator[dict[str, int]]:
        """Yield the bytes of each kind after every change."""
        held = dict.fromkeys(self._kinds, 0)
        for entry, size in self._changes:
            held[self._kinds[entry]] += size
            yield dict(held)


class _AsOnGpu(TorchFunctionMode):
    """Make meta tensors report a GPU as their device, and redirect transfers to a GPU to meta.

    So functions that check the device take the branch of the GPU, whose operators, not PyTorch's
    equivalents for other devices, decide what is kept.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == _DEVICE_OF:
            device = func(*args)
            return torch.device("cuda", 0) if device.type == "meta" else device
        args = [_to_meta(a) for a in args]
        return func(*args, **{name: _to_meta(value) for name, value in (kwargs or {}).items()})


def _as_on_gpu(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _AsOnGpu():
            return forward(*args, **kwargs)

    return run


def _to_meta(value: Any) -> Any:
    on_gpu = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("meta") if on_gpu else value
