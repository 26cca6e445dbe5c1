"""Calls of attention that modules of others make, seen while a sampled step runs."""

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from inspect import signature
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn import functional

# Bound here, so that another function may be put in the place of PyTorch's.
from torch.nn.functional import multi_head_attention_forward as _multi_head
from torch.nn.functional import scaled_dot_product_attention as _sdpa
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from leaner_kernels.monitor.recompute import attention_statistics
from leaner_kernels.ops import _hooks
from leaner_kernels.ops._stats import AttentionStats, evenly_spaced
from leaner_kernels.ops.attention.beside import attention_beside_stats
from leaner_kernels.ops.attention.causal_bias import plain_mask

SAME_PASS, RECOMPUTED = "same pass", "recomputed"
# What a module that attends calls.
_CALLED = {
    *("attention", "attention_qkvpacked", "ALL_ATTENTION_FUNCTIONS"),
    *("scaled_dot_product_attention", "multi_head_attention_forward"),
}


class Call(NamedTuple):
    """What one call of attention left; no gradients. Most as in ``leaner_kernels.nn.Captured``.

    Attributes:
        heads: (S, N, H * E), of the sampled entries, float32 or float64.
        lengths: (S,) int32, tokens that are not padding; None where all count.
        max_logit: (H,), maximum over the forwards since the step began.
        entropy: (B, H), or (S, H) where it was recomputed.
        prob_norm: as ``entropy``.
        head_norm: as ``entropy``.
        dtype: of the query.
        head_dim: E, that of the values.
        columns: M, the number of keys.
        source: ``SAME_PASS`` or ``RECOMPUTED``.
        stream: None, since nobody says what the output is added to.
    """

    heads: Tensor
    lengths: Tensor | None
    max_logit: Tensor
    entropy: Tensor
    prob_norm: Tensor
    head_norm: Tensor
    dtype: torch.dtype
    head_dim: int
    columns: int
    source: str
    stream: None = None


class CallTrace:
    """Sees the calls of attention that a model's modules make, between ``start`` and ``stop``.

    Of the thread that called ``start`` alone, and of the backward, wherever that runs. Those of
    ``leaner_kernels.attention`` get their statistics from the same pass. Those of PyTorch's
    ``scaled_dot_product_attention`` return what they would, and are computed once more.
    Meanwhile what ``torch.compile`` has compiled runs eagerly: inside, no call could be seen.

    Args:
        names: of the modules of the model.
        passed_over: modules inside of which no call counts.
        samples: batch entries whose heads are kept, at most.

    Attributes:
        calls: the newest call of each layer: the module's name, with "#1" added for the second call
            in one run of the module, and so on.
        refused: why a call of a layer could not be looked at.
        ran: whether a module of the model ran.
    """

    def __init__(
        self, names: dict[nn.Module, str], passed_over: set[nn.Module], samples: int
    ) -> None:
        self.names, self.passed_over, self.samples = names, passed_over, samples
        self.calls: dict[str, Call] = {}
        self.refused: dict[str, str] = {}
        self.ran = False
        self._thread = 0
        # Of each thread: a backward on a GPU recomputes activations in one of its own.
        self._local = threading.local()
        self._frame: FrameType | None = None
        self._counts: dict[str, int] = {}
        self._handles: list[Any] = []
        self._mode = _Mode(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # A model that is copied or saved between start and stop takes its hooks along. Nobody
        # would stop the watch of a copy, so it knows no module.
        return CallTrace, ({}, set(), self.samples)

    def start(self) -> None:
        """Look at calls from now on; forget those before."""
        self.stop()
        self.forget()
        self._thread = threading.get_ident()
        for module in self.names:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks, and calls nothing that can be seen
            # Of two watches of a module, the one that comes in last goes out first.
            self._handles += [
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, prepend=True, always_call=True),
            ]
        _announce(self, active=True)

    def stop(self) -> None:
        """Leave no hook and no mode behind; harmless when not started."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._give_up()
        self._mode.leave()

    def forget(self) -> None:
        """Let go of what was seen."""
        self.calls, self.refused, self.ran = {}, {}, False

    def place(self, layer: str) -> tuple[int, int]:
        """Return where a layer stands in the model's order."""
        name, _, number = layer.partition("#")
        return list(self.names.values()).index(name), int(number or 0)

    @property
    def problem(self) -> str | None:
        """Why a call could not be looked at, if any, in one line."""
        lines = [f"{layer} cannot be measured: {why}" for layer, why in self.refused.items()]
        return lines[0] if lines else None

    def nothing(self) -> str:
        """Say in one line that nothing was seen, and what was looked for."""
        model = type(next(iter(self.names))).__name__
        if not self.ran:
            return f"{model} ran no forward between begin and end"
        return (
            f"{model} called no attention of several queries that can be looked at: neither "
            "leaner_kernels.attention nor torch.nn.functional.scaled_dot_product_attention "
            "(products and a softmax of its own are not; transformers has attn_implementation="
            "'sdpa' and 'leaner', timm set_fused_attn)"
            + "".join(f"; {why}" for why in self.handed_on(self.names.values()))
        )

    def handed_on(self, names: Collection[str]) -> list[str]:
        """Return why an adapter handed calls of these modules on, each reason once."""
        modules = (module for module, name in self.names.items() if name in names)
        reasons = (vars(module).get(_hooks.HANDED_ON) for module in modules)
        return [why for why in dict.fromkeys(reasons) if why is not None]

    def silent(self, layers: Collection[str]) -> list[str]:
        """Return the names of modules that look like attention, with no layer in or around them.

        Of several inside of each other the innermost.
        """
        inside = {part for module in self.passed_over for part in module.modules()}
        heard = {layer.partition("#")[0] for layer in layers}
        around = {name[:end] for name in heard for end in _ends(name)}
        silent: list[str] = []
        for module, name in self.names.items():
            within = heard.intersection(name[:end] for end in _ends(name))
            if module not in inside and name not in around and not within and may_attend(module):
                silent.append(name)
        holders = {name[:end] for name in silent for end in _ends(name) if end < len(name)}
        return [name for name in silent if name not in holders]

    @property
    def listens(self) -> bool:
        """Whether a call that is made now counts."""
        running = self._running
        return bool(running) and self.passed_over.isdisjoint(running)

    @property
    def _running(self) -> list[nn.Module]:
        """The modules whose forwards run in this thread, the innermost last."""
        if threading.get_ident() == self._thread and self._frame is not None:
            try:
                self._frame.clear()
            except RuntimeError:
                pass  # it is executing
            else:
                # A forward that was interrupted from the keyboard calls no hook.
                self._give_up()
        return vars(self._local).setdefault("running", [])

    def _give_up(self) -> None:
        self._local, self._frame = threading.local(), None
        _announce(self, active=False)

    def attend(
        self,
        owner: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        key_lengths: Tensor | None = None,
        softcap: float = 0.0,
        attends: Callable[[], Tensor] | None = None,
    ) -> Tensor | None:
        """As ``AttentionHook.attend`` of ``ops._hooks``."""
        params = attn_mask, dropout_p, is_causal, scale, enable_gqa
        device, batch = query.device, len(query)
        if _inside() or device.type not in ("cpu", "cuda") or batch == 0 or not _wanted():
            # No statistics there, or nobody's: to the same bits as in any other step.
            return None
        sample = evenly_spaced(batch, self.samples, device)
        # What it calls is attention as in other steps.
        _beside.runs = True
        try:
            named: dict[str, Any] = {"key_lengths": key_lengths, "softcap": softcap}
            stats = attention_beside_stats(
                query, key, value, *params, **named, sample=sample, attends=attends
            )
        finally:
            _beside.runs = False
        # As many queries as keys are self-attention, where what is no key is no token either.
        lengths = key_lengths if query.shape[2] == key.shape[2] else None
        for trace in _ACTIVE:
            layer = trace._layer(owner, query, key, value) if trace.listens else None
            if layer is not None:
                of_sample = None if lengths is None else lengths.index_select(0, sample)
                trace._keep(layer, query, value, stats, of_sample, SAME_PASS)
        return stats.out

    def recompute(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Compute once more what PyTorch's function was called with, if the call counts."""
        layer = self._layer(None, query, key, value) if self.listens else None
        if layer is None:
            return
        try:
            attn_mask, is_causal = plain_mask(attn_mask, is_causal, query, key)
        except ValueError as error:
            self.refused[layer] = str(error)
            return
        params = attn_mask, is_causal, scale, self.samples
        stats = attention_statistics(query, key, value, *params)
        self._keep(layer, query, value, stats, None, RECOMPUTED)

    def _layer(self, owner: nn.Module | None, *tensors: Tensor) -> str | None:
        """Return what to call a call, None if it is not looked at."""
        name = self.names[owner if owner in self.names else self._running[-1]]
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        layer = f"{name}#{number}" if number else name
        kinds = {type(t).__name__ for t in tensors} - {"Tensor", "Parameter"}
        if kinds or any(t.is_nested for t in tensors):
            kind = kinds.pop() if kinds else "nested tensor"
            self.refused[layer] = f"it is given a {kind}, and only plain tensors can be looked at"
            return None
        if _functorch.peek_interpreter_stack() is not None:
            self.refused[layer] = "it runs inside a transform of torch.func"
            return None
        # The heads of one token are one row, whose kappa is 1 whatever the model does.
        return None if tensors[0].shape[-2] == 1 or any(0 in t.shape for t in tensors) else layer

    def _keep(
        self,
        layer: str,
        query: Tensor,
        value: Tensor,
        stats: AttentionStats,
        lengths: Tensor | None,
        source: str,
    ) -> None:
        assert stats.heads is not None
        peak, before = stats.max_logit.amax(dim=0), self.calls.get(layer)
        if before is not None and before.max_logit.shape == peak.shape:
            peak = peak.maximum(before.max_logit)
        self.calls[layer] = Call(
            heads=stats.heads,
            lengths=lengths,
            max_logit=peak,
            entropy=stats.entropy,
            prob_norm=stats.prob_norm,
            head_norm=stats.head_norm,
            dtype=query.dtype,
            head_dim=value.shape[-1],
            columns=value.shape[-2],
            source=source,
        )

    def _enter(self, module: nn.Module, _args: Any) -> None:
        # Not in its names are a copy, see ``__reduce__``, and a replica of nn.DataParallel.
        backward = _in_backward()
        if module not in self.names or not (threading.get_ident() == self._thread or backward):
            return
        running = self._running
        # What a backward recomputes was seen in the forward.
        if not running and not backward:
            # Left on by a forward that was interrupted.
            self._mode.leave()
            # Of the call around the one that runs hooks, which some of them outlive.
            self._frame = sys._getframe(2)
            self._mode.enter()
            _announce(self, active=True)
        running.append(module)
        self._counts[self.names[module]] = 0
        self.ran = True

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        running = self._running
        if module not in running:
            return
        while running.pop() is not module:
            pass
        if running or _in_backward():
            return
        self._frame = None
        self._mode.leave()
        if output is None and sys.exc_info()[1] is not None:
            # The forward failed, and nobody may ever call ``end``; another try begins anew.
            _announce(self, active=False)


class _Mode(TorchFunctionMode):
    """Passes calls of PyTorch's functions, whatever name they are called by, to a ``CallTrace``."""

    def __init__(self, trace: CallTrace) -> None:
        super().__init__()
        self.trace, self.entered = trace, False

    def enter(self) -> None:
        if not self.entered:
            self.__enter__()
            self.entered = True

    def leave(self) -> None:
        # Modes are a stack, and one that another left on top of this one is not ours to remove.
        if self.entered and _get_current_function_mode() is self:
            self.__exit__(None, None, None)
            self.entered = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (_sdpa, _multi_head) or _inside() or not self.trace.listens:
            return func(*args, **kwargs)
        if func is _sdpa:
            return self._attend(*args, **kwargs)
        # What this one calls inside, a mode does not see.
        with self._in_place_of_sdpa():
            returned = func(*args, **kwargs)
            given = signature(func).bind(*args, **kwargs).arguments
            if given.get("need_weights", True):
                # It formed the weights itself and called nothing, so now it is made to.
                with torch.no_grad():
                    func(**given | {"need_weights": False, "training": False})
        return returned

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        out = _sdpa(*args, **kwargs)
        self.trace.recompute(*args, **kwargs)
        return out

    @contextmanager
    def _in_place_of_sdpa(self) -> Iterator[None]:
        before = functional.scaled_dot_product_attention
        if before is _sdpa:
            functional.scaled_dot_product_attention = self._attend
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = before


# Those between start and stop: of several monitors, each sees the calls of its own model.
_ACTIVE: list[CallTrace] = []
_stance: list[Any] = []
# Whether a call that is looked at computes, in this thread.
_beside = threading.local()


def _inside() -> bool:
    return getattr(_beside, "runs", False)


def _announce(trace: CallTrace, active: bool) -> None:
    """Tell ``leaner_kernels.attention`` and the compiler whether anybody watches."""
    if active == (trace in _ACTIVE):
        return
    if active:
        _ACTIVE.append(trace)
    else:
        _ACTIVE.remove(trace)
    _hooks.current = _ACTIVE[-1] if _ACTIVE else None
    # Where the compiler was never imported, which takes seconds, nothing is compiled.
    if _ACTIVE and not _stance and "torch._dynamo" in sys.modules:
        _stance.append(torch.compiler.set_stance("force_eager"))
    elif not _ACTIVE and _stance:
        _stance.pop().__exit__(None, None, None)


def _wanted() -> bool:
    """Whether a call of ``leaner_kernels.attention`` that is made now gets statistics."""
    traces = tuple(_ACTIVE)
    if any(trace.listens for trace in traces):
        return True
    # A checkpoint recomputes what a forward did, perhaps outside of any module.
    return _in_backward() and not any(trace._running for trace in traces)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _ends(name: str) -> list[int]:
    """Return where the names of a module and of those around it end."""
    return [0, *(place for place, letter in enumerate(name) if letter == "."), len(name)]


def may_be_compiled() -> bool:
    """Whether ``torch.compile`` was called in this process, or may have been."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:
        return False
    # A private name: should it go, everything may be compiled. None is there from the start.
    return any(getattr(compiler, "cached_backends", {0: 0}).values())


def may_attend(module: nn.Module) -> bool:
    """Whether a module seems to attend: it is called attention, or its code calls one by name."""
    if "attention" in type(module).__name__.lower():
        return True
    classes = [c for c in type(module).__mro__ if c not in (nn.Module, object)]
    functions = [f for c in classes for f in vars(c).values() if isinstance(f, FunctionType)]
    return any(not _CALLED.isdisjoint(f.__code__.co_names) for f in functions)
