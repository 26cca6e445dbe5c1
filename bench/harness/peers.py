"""Define a peer, which computes a case, and import the library behind it.

A builder raises ``AbsentError`` with the reason when its library is missing or does not take the
case. Each peer gets its inputs in the layout it requests, so that none pays for another's.
"""

import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

# Errors that libraries raise for cases that they do not support.
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError)


class AbsentError(Exception):
    """A peer that cannot be measured here, and why."""


@dataclass(frozen=True)
class Peer:
    """One way to compute a case.

    Attributes:
        build: (case, device) -> function of the leaves of ``layout`` that returns the output.
        layout: ``heads`` q, k, v (B, H, N, D); ``tokens`` q, k, v (B, N, H, D); ``packed`` one
            qkv (B, N, 3, H, D); ``varlen`` q, k, v (T, H, D), sequences end to end. The output is
            laid out as q is, for ``packed`` (B, N, H, D).
        ours: whether it is a kernel of this project.
        ragged: whether it takes sequences of different lengths, or for those of one length.
        context: context around every call, which is not timed.
        about: one sentence for a legend that says what the peer is.
    """

    build: Callable[[Any, torch.device], Callable[..., Tensor]]
    layout: str = "heads"
    ours: bool = False
    ragged: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    about: str = ""


def compiled(
    function: Callable[..., Any], device: torch.device, mode: str | None = None
) -> Callable[..., Any]:
    """Return a function or module compiled for the shapes it will be called with.

    Args:
        function: to compile.
        device: where it will run.
        mode: of ``torch.compile``; ``reduce-overhead`` replays CUDA graphs.

    Raises:
        AbsentError: outside CUDA, where compiling takes longer than all that is measured.
    """
    if device.type != "cuda":
        raise AbsentError("is compiled on CUDA only: on a CPU that takes longer than the benchmark")
    # A timed backward runs many times over one forward, which donated buffers forbid.
    functorch_config.donated_buffer = False
    torch._dynamo.config.recompile_limit = 64  # one program for each shape, on purpose
    return torch.compile(function, dynamic=False, mode=mode)


def found(module: str, name: str) -> Any:
    """Return the attribute of a library's module with a name.

    Raises:
        AbsentError: the module cannot be imported, or holds no such name.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(importlib.import_module(module), name)
    except (ImportError, OSError) as error:
        raise AbsentError(f"{module} cannot be imported: {error}") from None
    except AttributeError:
        raise AbsentError(f"{module} has no {name}") from None
