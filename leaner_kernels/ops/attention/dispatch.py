"""Choice of the library, or of the kernel and its tile, for a call of softmax attention.

``warp_multihead``: a warp owns one or several heads of up to 16 tokens. ``short``, and ``hopper``
or ``ampere`` by the GPU: a program owns a head of up to a few hundred tokens. ``online``: programs
own tiles and walk over any length. ``kernels`` states the limits of each, and a table in its file
the rules; all but the last are for half precision only. ``library.toml`` lists the lengths at which
PyTorch's attention is faster, as measured or predicted for each GPU.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module, resources
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _tiles
from .._checks import MAX_HEAD_DIM, MAX_ROW_STRIDE, ArgumentError
from .._launch_cache import ALIGNMENT, LARGEST_OFFSET, TENSORS, Launch, Scratch
from .._tiles import Tile, Tiles, block_dim, gpu_of
from ..gpus import LEAST_CAPABILITY, TUNED
from ..route import Results
from .call import BIAS_SLOTS, LEAST_SCALE, QUERY_SLOTS, Call, Gradients, Profile
from .kernels import BACKWARD, FORWARD, STATISTICS, Limits
from .sdpa import transformed


class Choice(NamedTuple):
    """The kernel of a call, by the name of its table, and its tile."""

    kernel: str
    tile: Tile


def choose_forward(call: Call, with_stats: bool = False) -> Choice:
    """Return the kernel and tile of a call on a GPU; the first kernel that supports it wins."""
    # With statistics the kernel for any length has the tiles of a plain call.
    return _choose(STATISTICS if with_stats else FORWARD, "online_forward", call)


def choose_capture(call: Call) -> Choice:
    """Return the kernel and tile that capture the heads of sampled entries."""
    return Choice("online_forward", online_tile("online_forward", call, "capture"))


def choose_backward(call: Call, grad: Tensor, out: Tensor, gradients: Sequence[Tensor]) -> Choice:
    """Return the kernel and tile of the gradients dq, dk and dv."""
    return _choose(BACKWARD, "online_backward", call, grad, (grad, out, *gradients))


def _choose(
    kernels: Mapping[str, Limits],
    online: str,
    call: Call,
    grad: Tensor | None = None,
    others: Sequence[Tensor] = (),
) -> Choice:
    """Return the first kernel that supports a call; ``others`` are its other tensors."""
    profile, gpu = call.profile(grad), _tiles.capability(call.query.device)
    for kernel, limits in kernels.items():
        if tile := tile_of(kernel, limits, gpu, call, profile, others):
            return Choice(kernel, tile)
    return Choice(online, online_tile(online, call, profile=profile))


def tile_of(
    kernel: str,
    limits: Limits,
    gpu: int,
    call: Call,
    profile: Profile,
    others: Sequence[Tensor] = (),
) -> Tile | None:
    """Return the tile of a kernel whose programs own a head, None if it does not support a call."""
    if not _supports(limits, gpu, call, profile, others):
        return None
    tokens, features = max(profile.rows, profile.cols), profile.with_grad - limits.free
    rule = find_rule(tiles_of(kernel), call.query, tokens, features)
    if rule is None:
        return None
    return rule.tile.replace(tokens=rule.tokens) if kernel.startswith("short") else rule.tile


def _supports(
    limits: Limits, gpu: int, call: Call, profile: Profile, others: Sequence[Tensor]
) -> bool:
    """Return whether a call keeps the limits of a kernel on a GPU of compute capability ``gpu``."""
    rows, cols, batch, heads, features, _ = profile
    row = gpu_of(gpu)
    if row.tiles is None or (limits.family is not None and limits.family != row.kernels):
        return False
    if not limits.least_tokens <= rows <= limits.most_tokens or batch > limits.most_entries:
        return False
    if rows != cols and max(rows, cols) >= limits.square_from:
        return False
    # With one program per head, a few heads would leave most of a GPU idle.
    if rows >= limits.many_heads_from and batch * heads < _tiles.ENOUGH_PROGRAMS:
        return False
    if limits.pairs and not _pairs_elements(call, profile, others):
        return False
    if limits.fenced_dropout and "dropout" in features:
        from .. import _gluon

        if not _gluon.KEEPS_FENCES:
            return False
    return not limits.gluon or _fits_gluon(call, rows, others)


def _pairs_elements(call: Call, profile: Profile, others: Sequence[Tensor]) -> bool:
    """Return whether a warp can own heads: their rows consist of 32-bit words."""
    if "varlen" in profile.features:
        return False
    tensors = call.query, call.key, call.value, *others
    strides = (stride for t in tensors for stride in t.stride()[:-1])
    words = call.query.shape[-1] % 2 == 0 and all(stride % 2 == 0 for stride in strides)
    return words and profile.batch * profile.heads <= LARGEST_OFFSET // 2


def _fits_gluon(call: Call, rows: int, others: Sequence[Tensor]) -> bool:
    """Return whether Gluon kernels support the tensors: same dtype, aligned, 32-bit offsets."""
    from .. import _gluon  # which imports Triton

    heads, dim = call.query.shape[1], call.query.shape[-1]
    width = heads * dim  # the row stride of the output
    if not _gluon.AVAILABLE or width > MAX_ROW_STRIDE:
        return False
    tensors = call.query, call.key, call.value, *others
    alike = all(t.dtype == call.query.dtype for t in tensors)
    strides = [width, *(t.stride(2 if t.dim() == 4 else 0) for t in tensors)]
    if call.attn_mask is not None:
        strides.append(sum(call.attn_mask.stride()[-2:]))
    reached = max(strides) * rows <= LARGEST_OFFSET
    return alike and reached and not any(t.data_ptr() % ALIGNMENT for t in tensors)


# --- Tiles: a table in each kernel's file (``ops._tiles``) ----------------------------------------


def online_tile(kernel: str, call: Call, *others: str, profile: Profile | None = None) -> Tile:
    """Return the tile of a kernel for any length; ``others`` are additional features."""
    profile = call.profile() if profile is None else profile
    wanted = (profile.features - module_of(kernel).FREE).union(others)
    rule = find_rule(tiles_of(kernel), call.query, 0, wanted)
    assert rule is not None, (kernel, call.query.shape, wanted)
    return rule.tile


def find_rule(
    table: Tiles, query: Tensor, tokens: int, features: frozenset[str]
) -> _tiles.Rule | None:
    """Return the first rule of a kernel's table that supports a call, or None."""
    return table.find(
        query.device,
        size=query.element_size(),
        dim=block_dim(query.shape[-1]),
        tokens=tokens,
        features=features,
    )


def tiles_of(kernel: str) -> Tiles:
    """Return the table of tiles of a kernel."""
    direction = kernel.rsplit("_", 1)[1]  # "forward", "statistics" or "backward"
    return getattr(module_of(kernel), f"{direction.upper()}_TILES")


def module_of(kernel: str) -> Any:
    """Import and return the module of a kernel, which imports Triton."""
    file = re.sub("_(forward|forward_statistics|backward)$", "", kernel)
    return import_module(f"{__package__}.kernels.{file}")


# --- Launches of the chosen kernels ---------------------------------------------------------------


def prepare_forward(call: Call, results: Results) -> Launch:
    """Return the launch that fills the output and any statistics."""
    kernel, tile = choose_forward(call, with_stats=results.stats is not None)
    launch: Launch = module_of(kernel).prepare_forward(tile, call, results)
    if launch.arguments.get("parts_ptr") is None:
        return launch
    from .._epilogue import join

    return launch._replace(scratch=(Scratch("parts_ptr", "stats", join),))


def prepare_capture(call: Call, results: Results) -> Launch:
    """Return the launch that fills the heads of sampled entries."""
    kernel, tile = choose_capture(call)
    prepare = module_of(kernel).prepare_capture
    return prepare(tile, call, results.sample, results.heads)


def prepare_backward(grad: Tensor, call: Call, saved: Results, gradients: Any) -> Launch:
    """Return the launch that fills the gradients."""
    dq, dk, dv = gradients.separate()
    kernel, tile = choose_backward(call, grad, saved.out, (dq, dk, dv))
    ds, scratch = None, ()
    if getattr(gradients, "dattn_mask", None) is not None:
        # Some kernels do not visit tiles that no row sees.
        shape = call.batch, call.query.shape[1], call.rows, call.cols
        ds = grad.new_zeros(shape, dtype=torch.float32)
        scratch = (Scratch("ds_ptr", "dattn_mask", _sum_over_broadcast, zero=True),)
    bias_sums = None
    if getattr(gradients, "dbias", None) is not None:
        # Filled by the kernels that sum over tokens; for others the gradients are summed
        # afterwards.
        shape = call.batch, BIAS_SLOTS, call.query.shape[1], call.query.shape[-1]
        bias_sums = grad.new_empty(shape, dtype=torch.float32)
    prepare = module_of(kernel).prepare_backward
    launch: Launch = prepare(tile, grad, call, saved, Gradients(dq, dk, dv, ds, bias_sums))
    if bias_sums is not None:
        scratch = (Scratch("dqkv", "dbias", sum_tokens, of_result=True),)
        if launch.arguments.get("bias_ptr") is not None:
            scratch = (Scratch("bias_ptr", "dbias", _sum_entries),)
    return launch._replace(scratch=(*launch.scratch, *scratch))


def sum_tokens(dqkv: Tensor, dbias: Tensor) -> None:
    """Sum the gradient of a projection (B, N, 3, H, D) over tokens, in at least float32."""
    dtype = torch.promote_types(dqkv.dtype, torch.float32)
    dbias.copy_(dqkv.sum((0, 1), dtype=dtype).flatten())


def _sum_entries(bias_sums: Tensor, dbias: Tensor) -> None:
    """Sum (B, BIAS_SLOTS, H, D) over the batch and slots, in an order that sizes alone decide."""
    slots, (of_query, of_key, of_value) = bias_sums.flatten(2), dbias.view(3, -1)
    of_key.zero_()
    parts = (of_query, slots[:, :QUERY_SLOTS]), (of_value, slots[:, QUERY_SLOTS:])
    for target, part in parts:
        if target.dtype == part.dtype:
            torch.sum(part, (0, 1), out=target)
        else:
            target.copy_(part.sum((0, 1)))


def _sum_over_broadcast(ds: Tensor, dattn_mask: Tensor) -> None:
    """Sum the gradient of scores over the axes along which a mask was broadcast."""
    dattn_mask.copy_(ds.sum_to_size(dattn_mask.shape))


# --- PyTorch's attention, where it is faster ------------------------------------------------------


class Rule(NamedTuple):
    """The first and last length (None: no end) at which PyTorch is faster, and the source."""

    first: int
    last: int | None
    source: str

    @property
    def reason(self) -> str:
        """Return why a call is dispatched to PyTorch."""
        last = "tokens on" if self.last is None else f"to {self.last} tokens"
        start = f"from {self.first} {last}" if self.last is None else f"at {self.first} {last}"
        start = "at every length" if (self.first, self.last) == (1, None) else start
        return f"faster {start} ({self.source})"


class Section(NamedTuple):
    """A section of ``library.toml``.

    Attributes:
        float32: whether it is for float32, or for half precision.
        programs: first and last batch x heads of its calls; None for any.
        rules: (varlen, causal, with a backward) -> head dimensions, ascending, each with its rules.
    """

    float32: bool
    programs: tuple[int, int] | None
    rules: dict[tuple[bool, bool, bool], list[tuple[int, list[Rule]]]]


def read_rules(text: str) -> tuple[dict[int, list[Section]], list[Section]]:
    """Parse ``library.toml``: return the sections by capability, and those of all other GPUs."""
    by_capability: dict[int, list[Section]] = {}
    others: list[Section] = []
    for gpus in tomllib.loads(text)["gpus"]:
        programs = tuple(gpus["programs"]) if "programs" in gpus else None
        section = Section(gpus.get("float32", False), programs, {})
        for row in gpus["rules"]:
            lengths = [Rule(first, last or None, gpus["source"]) for first, last in row["tokens"]]
            key = row["varlen"], row["causal"], row["backward"]
            section.rules.setdefault(key, []).append((row["head_dim"], lengths))
        for capability in gpus["capabilities"]:
            by_capability.setdefault(capability, []).append(section)
        if not gpus["capabilities"]:
            others.append(section)
    return by_capability, others


# Read at import: torch.compile may be tracing the first call.
RULES = read_rules((resources.files(str(__package__)) / "library.toml").read_text("utf-8"))


def find_rule_of_library(
    gpu: int,
    *,
    varlen: bool,
    causal: bool,
    backward: bool,
    head_dim: int,
    tokens: float,
    programs: int | None = None,
    float32: bool = False,
) -> Rule | None:
    """Return the rule that dispatches a call to PyTorch, or None if our kernels are faster.

    The first section decides that has a row for the call.

    Args:
        gpu: compute capability, at least 80.
        varlen: whether sequences lie end to end.
        causal: whether row i sees columns 0 to i only.
        backward: whether a backward follows.
        head_dim: D.
        tokens: N; of a varlen batch the mean over its sequences.
        programs: batch x heads; None skips the sections for a range of these, as does, in compiled
            code, a dynamic batch that may leave the range.
        float32: whether the call is in float32.
    """
    by_capability, others = RULES
    sections = by_capability.get(gpu_of(gpu).crossover or 0, ())
    alike = [section for section in sections if section.float32 == float32]
    alike = alike or [section for section in others if section.float32 == float32]
    for section in alike:
        if section.programs is not None:
            first, last = section.programs
            if programs is None or not _is_within(programs, first, last):
                continue
        for dim, lengths in section.rules.get((varlen, causal, backward), ()):
            if head_dim <= dim:
                for rule in lengths:
                    if rule.first <= tokens and (rule.last is None or tokens <= rule.last):
                        return rule
                return None
    return None


def _is_within(programs: int, first: int, last: int) -> bool:
    """Return whether batch x heads lies in a range; in compiled code for any batch."""
    if not torch.compiler.is_compiling():
        return first <= programs <= last
    # A comparison would guard on the batch: torch.export rejects that where the batch is dynamic.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(first <= programs) and statically_known_true(programs <= last)


class Library(NamedTuple):
    """The library that computes a call, as ``explain.Route`` names it, and the reason."""

    name: str
    reason: str


SPILLS = "predicted: compiled for sm_75 our kernels spill registers inside loops"
FFMA = "predicted: in float32 our kernels attain a quarter of the multiply-add units' rate or less"


def library_of(
    call: Call, backward: bool, packed: bool = False, *, deterministic: bool = False
) -> Library | None:
    """Return the library for a checked call without statistics, or None for our kernels.

    From compute capability 8.0 on, PyTorch computes self-attention with a head dimension that is a
    multiple of 8 (float32: 4) and a positive scale, since it takes the maximum of a row before
    scaling. Its gradients are sums in no fixed order, so that deterministic algorithms rule it out.
    Before 8.0 it computes all that it can.

    Args:
        call: the operands and parameters.
        backward: whether a backward follows.
        packed: whether query, key and value are views of one projection. Rules for a range of
            batch x heads then hold in compiled code only: a call of few heads takes as long as its
            launch from Python, and from a projection ours is launched in 0.73 times the time.
        deterministic: whether this call needs deterministic gradients, whatever PyTorch's setting.
    """
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    query, key, sequences = call.query, call.key, call.sequences
    dim = query.shape[-1]
    if dim > MAX_HEAD_DIM:
        return Library("sdpa", f"head dimension {dim} is above {MAX_HEAD_DIM}")
    if not on_gpu(query):
        if sequences is not None or transformed(query):
            return None  # our operator has derivatives that libraries lack
        reason = f"the kernels run on CUDA, not on {query.device}"
        return Library("reference" if call.softcap else "sdpa", reason)
    gpu = _tiles.capability(query.device)
    if gpu < TUNED:
        ours = 0 in (*query.shape, *key.shape) or beyond_pytorch(call, deterministic)
        reason = FFMA if query.dtype == torch.float32 else SPILLS
        if gpu < LEAST_CAPABILITY:
            reason = f"our kernels need compute capability {LEAST_CAPABILITY / 10}"
        return None if ours else Library("sdpa", reason)
    if deterministic or not call.is_plain or 0 in query.shape or not _suits(call):
        return None
    find = partial(
        find_rule_of_library,
        gpu,
        causal=bool(call.is_causal),
        backward=backward,
        head_dim=dim,
    )
    if sequences is None:
        float32 = query.dtype == torch.float32
        # The memory-efficient kernel, which alone is fast in float32, has no shared key heads.
        if query.shape[2] != key.shape[2] or (float32 and query.shape[1] != key.shape[1]):
            return None
        host_bound = packed and not torch.compiler.is_compiling()
        rule = find(
            varlen=False,
            tokens=query.shape[2],
            programs=None if host_bound else query.shape[0] * query.shape[1],
            float32=float32,
        )
        return None if rule is None else Library("sdpa", rule.reason)
    # PyTorch's function supports neither DTensors nor tensors without memory.
    if torch.compiler.is_compiling() or sequences.starts is not sequences.key_starts:
        return None
    tensors, count = (*call.operands, sequences.starts), call.batch
    if count < 1 or query.shape != key.shape or not TENSORS.issuperset(map(type, tensors)):
        return None
    if query.dtype == torch.float32 or not torch.backends.cuda.flash_sdp_enabled():
        return None
    rule = find(varlen=True, tokens=query.shape[0] / count, programs=count * query.shape[1])
    return None if rule is None else Library("varlen_attn", rule.reason)


def check_deterministic(call: Call, library: Library) -> None:
    """Raise ValueError if a library would compute a call whose gradients must be deterministic.

    On a CPU they are deterministic. On a GPU PyTorch follows its own setting, unless that only
    warns.
    """
    follows = torch.are_deterministic_algorithms_enabled()
    follows = follows and not torch.is_deterministic_algorithms_warn_only_enabled()
    if on_gpu(call.query) and not follows:
        raise ArgumentError(
            "deterministic=True needs torch.use_deterministic_algorithms(True) for this call: "
            f"{library.reason}"
        )


def beyond_pytorch(call: Call, deterministic: bool) -> str | None:
    """Return the feature of a call that PyTorch cannot compute on a GPU before 8.0, or None."""
    query, attn_mask = call.query, call.attn_mask
    if call.sequences is not None:
        return "PyTorch's varlen attention needs compute capability 8.0"
    if call.softcap:
        return "PyTorch's attention has no softcap"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        return f"PyTorch's attention rounds a mask to {query.dtype}"
    # If our kernels do not run, PyTorch follows this setting on its own.
    kernels = _tiles.capability(query.device) >= LEAST_CAPABILITY
    if kernels and deterministic:
        return "deterministic algorithms are enabled"
    return None


def on_gpu(query: Tensor) -> bool:
    """Return whether a call runs on a GPU, or is explained for one."""
    return query.device.type == "cuda" or _tiles.assumed() is not None


def _suits(call: Call) -> bool:
    """Return whether PyTorch's fused kernels compute a call without mask and window."""
    query = call.query
    if query.dtype == torch.float32:
        # The memory-efficient kernel. Without it, PyTorch rounds to TF32 where that is allowed.
        compiling = torch.compiler.is_compiling()
        if query.shape[-1] % 4 or not (
            compiling or torch.backends.cuda.mem_efficient_sdp_enabled()
        ):
            return False
    elif query.shape[-1] % 8:
        return False
    if call.scale is not None and call.scale < LEAST_SCALE:
        return False
    return not transformed(query)
