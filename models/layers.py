"""Building blocks of the models: layers, sizes per layer, initial values and base classes.

Sizes: B images, S pixels a side, N tokens, D width of a token, M hidden units of the MLP.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from leaner_kernels.nn import Capturing
from leaner_kernels.ops._checks import MAX_HEAD_DIM_CUDA

HeadDim = int | Literal["split"]
Initializer = Callable[..., None]  # ``draw`` with its generator

# The widest heads that GPU kernels support, for kinds of attention with a lower limit.
_WIDEST = dict.fromkeys(("channels", "landmarks"), MAX_HEAD_DIM_CUDA)


def drop_path(x: Tensor, rate: float, training: bool) -> Tensor:
    """Zero whole samples of a residual branch, and scale the others up to keep the mean.

    Args:
        x: (B, ...), the branch's output.
        rate: probability of dropping a sample, in [0, 1).
        training: False returns ``x`` itself.

    Returns:
        The shape and dtype of ``x``.

    Source: Huang et al. 2016, "Deep Networks with Stochastic Depth" (arXiv:1603.09382).
    """
    if rate == 0.0 or not training:
        return x
    keep = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - rate)
    return x * keep.div_(1 - rate)


class Mlp(nn.Module):
    """Two linear layers around an exact GELU: (..., D) -> (..., D)."""

    def __init__(self, dim: int, hidden: int, **factory):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, **factory)
        self.fc2 = nn.Linear(hidden, dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward of each token."""
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """One pre-norm layer, an attention and then a feed-forward: shape kept.

    Args:
        dim: width D of a token.
        attn: (..., D) -> (..., D); also passed ``skip``, the stream that it is added to.
        mlp: (..., D) -> (..., D).
        eps: epsilon of the norms.
        drop_path: stochastic depth rate of both branches.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp: nn.Module,
        *,
        eps: float = 1e-5,
        drop_path: float = 0.0,
        **factory,
    ):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps, **factory)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=eps, **factory)
        self.mlp = mlp
        self.drop_path = drop_path

    def forward(self, x: Tensor, key_lengths: Tensor | None = None) -> Tensor:
        """Return ``x`` plus attention, with keys of these lengths, and then the feed-forward."""
        given = {} if key_lengths is None else {"key_lengths": key_lengths}
        # The attention only measures kappa with this stream, as if no sample were dropped.
        attended = self.attn(self.norm1(x), skip=x, **given)
        x = x + drop_path(attended, self.drop_path, self.training)
        return x + drop_path(self.mlp(self.norm2(x)), self.drop_path, self.training)


class BatchNorm2d(nn.BatchNorm2d):
    """Batch norm that accepts weights in bfloat16 next to its statistics in float32.

    FSDP rounds parameters but not buffers, while PyTorch requires equal dtypes.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (B, C, Y, X) normalised, in its dtype."""
        if self.training:
            self.num_batches_tracked.add_(1)
        weight, bias = (p.to(self.running_mean.dtype) for p in (self.weight, self.bias))
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            weight,
            bias,
            self.training,
            self.momentum,
            self.eps,
        )


class Model(nn.Module):
    """A network of the paper, with its attention modules, initial values and costs.

    A subclass makes its parameters on the meta device and then calls ``materialize``, so that a
    seed gives the same model, whether or not it is sharded first.

    Attributes:
        blocks: the repeated layers, in order.
        head_convention: ``"widen"``, ``"split"``, or ``"mixed"`` when layers follow neither.
    """

    head_convention: str

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Give every parameter and buffer its initial value.

        Norms are the identity with fresh statistics, convolutions as PyTorch's ``Conv2d``, linear
        weights N(0, 0.02) and biases 0; ``_init_own`` and ``_init_layer`` implement exceptions.

        Args:
            generator: source of randomness; PyTorch's global CPU generator when omitted. Values
                are drawn whole in float32 on the generator's device, then copied: one seed gives
                one model, whatever device, dtype or FSDP sharding it ends in.
        """
        initialize = partial(draw, generator=generator)
        self._init_own(initialize)
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm | BatchNorm2d):
                module.reset_parameters()
            elif isinstance(module, nn.Conv2d | nn.Linear):
                self._init_layer(name, module, initialize)

    def _init_own(self, initialize: Initializer) -> None:
        """Fill parameters outside of norms, convolutions and linear layers, such as positions."""

    def _init_layer(self, name: str, layer: nn.Conv2d | nn.Linear, initialize: Initializer) -> None:
        """Fill a layer; ``name`` is its place in the model."""
        if isinstance(layer, nn.Conv2d):
            draw_conv_default(layer, initialize)
            return
        # timm truncates at ±2, a hundred deviations: a plain normal has the same distribution.
        initialize(layer.weight, nn.init.normal_, std=0.02)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)

    def materialize(self, device: torch.device | str | None) -> None:
        """Move a model just built on meta to ``device``, the default one for None, with values."""
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type == "meta":
            return
        # Not to_empty, which cannot replace the fake tensors that a memory estimate builds.
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in self.modules():
            for name, param in module.named_parameters(recurse=False):
                if param not in made:  # parameters that two modules share stay shared
                    made[param] = nn.Parameter(torch.empty_like(param, device=device))
                setattr(module, name, made[param])
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))
        self.init_weights()

    def check_kernels(self) -> None:
        """Raise ValueError if a GPU has no kernel for an attention module."""
        for name, module in self.attention_modules().items():
            widest = _WIDEST.get(module.attends, module.head_dim)
            if module.head_dim > widest:
                raise ValueError(
                    f"head_dim of attention between {module.attends} must be at most {widest} on a "
                    f"GPU, got {module.head_dim} in {name}"
                )

    def attention_modules(self) -> dict[str, Capturing]:
        """Return the modules that ``KappaMonitor`` monitors, by name, in order."""
        return {name: m for name, m in self.named_modules() if isinstance(m, Capturing)}

    def num_params(self) -> int:
        """Return the number of parameters."""
        return sum(p.numel() for p in self.parameters())

    def _count_flops(self, *inputs: Tensor) -> int:
        """Count the products and convolutions of one forward of a copy on the meta device."""
        model = copy.deepcopy(self).to("meta").eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(*inputs)
        return counter.get_total_flops()


class VisionModel(Model):
    """Classifies images: (B, in_chans, image_size, image_size) -> (B, num_classes) logits.

    Attributes:
        image_size: pixels a side.
        in_chans: channels of an image.
    """

    image_size: int
    in_chans: int

    def check_images(self, images: Tensor) -> None:
        """Raise ValueError unless there are images (B, in_chans, image_size, image_size)."""
        expected = (self.in_chans, self.image_size, self.image_size)
        if images.ndim != 4 or images.shape[1:] != expected or len(images) == 0:
            raise ValueError(
                f"images must be (B, {', '.join(map(str, expected))}), got {tuple(images.shape)}"
            )

    def flops_per_image(self) -> int:
        """Return the FLOPs of one image's forward in products and convolutions, 2 per multiply-add.

        They are counted as the model runs on the meta device. Softmax, norms and GELU are not among
        them; a training step costs three times this.
        """
        dtype = next(self.parameters()).dtype
        shape = (1, self.in_chans, self.image_size, self.image_size)
        return self._count_flops(torch.empty(shape, dtype=dtype, device="meta"))


class LanguageModel(Model):
    """Reads sequences of token numbers: (B, N) int64, N up to sequence_length.

    Attributes:
        vocab_size: how many tokens there are.
        sequence_length: the longest sequence that has positions.
        embed_dim: width of a token.
    """

    vocab_size: int
    sequence_length: int
    embed_dim: int

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise ValueError unless there are tokens (B, N) int64, N from 1 to sequence_length."""
        fits = tokens.ndim == 2 and 1 <= tokens.shape[1] <= self.sequence_length
        if not fits or len(tokens) == 0 or tokens.dtype != torch.int64:
            raise ValueError(
                f"tokens must be (B, N) int64 with N in [1, {self.sequence_length}], "
                f"got {tuple(tokens.shape)} {tokens.dtype}"
            )

    def flops_per_sequence(self, tokens: int | None = None) -> int:
        """Return the FLOPs of one sequence's forward in products, 2 per multiply-add.

        They are counted as the model runs on the meta device, logits of every token that it gives
        included. Softmax, norms and GELU are not among them; a training step costs three times
        this.

        Args:
            tokens: in the sequence; ``sequence_length`` when omitted.
        """
        shape = (1, self.sequence_length if tokens is None else tokens)
        return self._count_flops(torch.empty(shape, dtype=torch.int64, device="meta"))


def per_layer(name: str, value: object, depths: int | Sequence[int]) -> list:
    """Return one value for each layer.

    Args:
        name: name of the argument, for messages.
        value: one for all layers, or one for each; for a model in stages also one for each stage.
        depths: layers of the model, or of each stage.

    Raises:
        ValueError: a number of values that fits neither.
    """
    stages = [depths] if isinstance(depths, int) else list(depths)
    if isinstance(value, int | str):
        return [value] * sum(stages)
    values = list(value)
    if not isinstance(depths, int) and len(values) == len(stages):
        return [v for v, depth in zip(values, stages) for _ in range(depth)]
    if len(values) != sum(stages):
        allowed = "" if isinstance(depths, int) else f", {len(stages)} (one per stage)"
        raise ValueError(
            f"{name} must be one value{allowed} or {sum(stages)} (one per layer), got {len(values)}"
        )
    return values


def require(holds: bool, name: str, allowed: str, value: object) -> None:
    """Raise ValueError, saying what ``name`` is allowed to be, unless it ``holds``."""
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def require_sizes(**sizes: int) -> None:
    """Raise ValueError unless every size, by its argument's name, is at least 1."""
    for name, size in sizes.items():
        require(size >= 1, name, "at least 1", size)


def require_rates(**rates: float) -> None:
    """Raise ValueError unless every rate, by its argument's name, is in [0, 1)."""
    for name, rate in rates.items():
        require(0 <= rate < 1, name, "in [0, 1)", rate)


def rising(rate: float, depth: int) -> list[float]:
    """Return the stochastic depth rates of layers, from 0 at the first to ``rate`` at the last."""
    return [rate * layer / max(depth - 1, 1) for layer in range(depth)]


def head_layout(
    heads: int | Sequence[int],
    head_dim: HeadDim | Sequence[HeadDim],
    dims: int | Sequence[int],
    depths: int | Sequence[int],
) -> tuple[list[int], list[int], str]:
    """Resolve heads and their width for each layer, and name the convention that they follow.

    Args:
        heads: number of heads of all layers, or as in ``per_layer``.
        head_dim: a width or ``"split"``, likewise.
        dims: width of a token, likewise.
        depths: layers of the model, or of each stage.

    Returns:
        Heads of each layer, their widths, and ``"widen"``, ``"split"`` or ``"mixed"``.

    Raises:
        ValueError: as ``per_layer``; a layer with no head, or with heads of no width.
    """
    heads, head_dims = per_layer("heads", heads, depths), per_layer("head_dim", head_dim, depths)
    dims = per_layer("embed_dims", dims, depths)
    for layer, (h, e, dim) in enumerate(zip(heads, head_dims, dims)):
        if h < 1:
            raise ValueError(f"heads must be at least 1, got {h} in layer {layer}")
        if e == "split" and h > dim:
            raise ValueError(
                f"heads must be at most {dim} to split embed_dim, got {h} in layer {layer}"
            )
        if e != "split" and (isinstance(e, str) or e < 1):
            raise ValueError(f"head_dim must be 'split' or at least 1, got {e!r} in layer {layer}")
    split = [dim // h for h, dim in zip(heads, dims)]
    resolved = [s if e == "split" else e for s, e in zip(split, head_dims)]
    if set(head_dims) == {"split"}:
        convention = "split"
    elif len(set(resolved)) == 1:
        convention = "widen"
    else:
        convention = "split" if resolved == split else "mixed"
    return heads, resolved, convention


def lecun_normal_(weight: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill with N(0, 1 / fan_in), truncated at two deviations of the underlying normal."""
    # 0.8796 is the deviation of N(0, 1) truncated at 2: dividing by it restores the variance.
    std = weight[0].numel() ** -0.5 / 0.87962566103423978
    edge = math.erf(2 / math.sqrt(2))
    return weight.uniform_(-edge, edge, generator=generator).erfinv_().mul_(math.sqrt(2) * std)


def draw(
    param: nn.Parameter,
    initialize: Callable[..., Tensor],
    *,
    generator: torch.Generator | None,
    **law: float,
) -> None:
    """Fill a parameter, whatever its device, dtype or sharding, with the same values for one seed.

    They are drawn whole in float32 on the generator's device, then copied.

    Args:
        param: any shape; may be a DTensor.
        initialize: one of ``nn.init``'s, called with the tensor, ``generator`` and ``law``.
        generator: source of randomness; PyTorch's global CPU generator for None.
        **law: further arguments of ``initialize``, such as ``std``.
    """
    device = "cpu" if generator is None else generator.device
    value = torch.empty(param.shape, dtype=torch.float32, device=device)
    value = initialize(value, generator=generator, **law).to(param.device, param.dtype)
    # If its module was never imported, which takes a second, no DTensor exists.
    sharding = sys.modules.get("torch.distributed.tensor")
    if sharding is not None and isinstance(param, sharding.DTensor):
        # Every rank drew the same whole value, so each cuts its own shard and none is sent.
        mesh, placements = param.device_mesh, param.placements
        value = sharding.distribute_tensor(value, mesh, placements, src_data_rank=None)
    param.copy_(value)


def draw_conv_default(layer: nn.Conv2d | nn.Linear, initialize: Initializer) -> None:
    """Fill a layer as PyTorch does: uniform up to 1 / sqrt(fan_in), the bias too."""
    bound = math.prod(layer.weight.shape[1:]) ** -0.5
    for param in (layer.weight, layer.bias):
        if param is not None:
            initialize(param, nn.init.uniform_, a=-bound, b=bound)
