"""A GPU that is not there: what ``pytest tests/gpu --rehearse`` runs the bodies of the tests on.

A tensor "on cuda" lies on the CPU and reports a GPU. Our operators are given to their CUDA
implementations, whose kernels Triton's interpreter runs and whose native library is the emulated
one; everything else PyTorch computes on the CPU. Numbers drawn "on cuda" are others than the CPU
draws after the same seed, as they are on a GPU, and tensors of the two places do not mix.

What it does not show: ``torch.compile`` returns the function that it is given, a CUDA graph runs
once, when it is captured, and streams and events order nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from leaner_kernels.kappa import native

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CAPABILITY = 9, 0
IMPLEMENTATION = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
# Tensors of the CPU that an operator on a GPU takes: what is copied, and indices.
TAKE_BOTH = {"copy_", "_to_copy", "to", "index", "index_put", "index_put_", "_index_put_impl_"}
WAIT = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2"}
DRAWN_APART = 1_000_003  # added to a seed, for the generator of the GPU

device_of = torch.Tensor.device
generator = torch.Generator().manual_seed(DRAWN_APART)
waiting_is_an_error = False
meta_is_meta = False


class OnGPU(Tensor):
    """``inner``, of the CPU, with the dispatch keys of a GPU and no memory of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGPU":
        if inner.layout is not torch.strided:
            meta = inner.to("meta")
        else:
            size = inner.untyped_storage().nbytes() // inner.element_size()
            meta = torch.empty(size, dtype=inner.dtype, device="meta")
            meta = meta.as_strided(inner.shape, inner.stride(), inner.storage_offset())
        found = torch.Tensor._make_subclass(cls, meta, False, device_for_backend_keys=CUDA)
        found.inner = inner
        return found

    def __repr__(self, **_: Any) -> str:
        return f"on cuda: {self.inner!r}"

    def __format__(self, spec: str) -> str:
        return format(self.inner, spec)

    @classmethod
    def __torch_dispatch__(cls, func, _types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class GPU(TorchDispatchMode):
    """Makes tensors on a device named cuda, which an operator without a tensor may be asked for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # C++ that makes a tensor beside one of OnGPU takes it for one without memory.
        wanted = {"cuda"} if meta_is_meta else {"cuda", "meta"}
        if any(isinstance(leaf, OnGPU) for leaf in tree_leaves((args, kwargs))):
            return run(func, args, kwargs)
        if named(kwargs) in wanted:
            return run(func, args, kwargs)
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


class Meta(TorchFunctionMode):
    """Notes that Python, not C++, wants a tensor without memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        global meta_is_meta
        kwargs = kwargs or {}
        before, meta_is_meta = meta_is_meta, meta_is_meta or named(kwargs) == "meta"
        try:
            return func(*args, **kwargs)
        finally:
            meta_is_meta = before


def named(kwargs: dict[str, Any]) -> str | None:
    device = kwargs.get("device")
    return None if device is None else torch.device(device).type


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that has a tensor on the GPU, or makes one."""
    name = func._schema.name.partition("::")[2]
    to_cpu = named(kwargs) == "cpu"
    if waiting_is_an_error and (name in WAIT or (to_cpu and not kwargs.get("non_blocking"))):
        raise RuntimeError(f"called a synchronizing CUDA operation: {func}")
    if name not in TAKE_BOTH:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, OnGPU) and leaf.dim() > 0:
                raise RuntimeError(f"{func}: a tensor of {tuple(leaf.shape)} is on the CPU")
    given, named_ = tree_map_only(OnGPU, lambda t: t.inner, (args, kwargs))
    if "device" in named_:
        named_["device"] = CPU
    named_.pop("pin_memory", None)
    drawn = torch.Tag.nondeterministic_seeded in func.tags
    with from_the_gpus_generator() if drawn else nullcontext():
        if func.namespace == "leaner_kernels":
            found = func.redispatch(IMPLEMENTATION, *given, **named_)
        else:
            found = func(*given, **named_)
    if to_cpu or (name == "copy_" and not isinstance(args[0], OnGPU)):
        return found
    found = tree_map_only(Tensor, OnGPU, found)
    return found if name == "to" else return_and_correct_aliasing(func, args, kwargs, found)


@contextmanager
def from_the_gpus_generator() -> Iterator[None]:
    cpus = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    yield
    generator.set_state(torch.get_rng_state())
    torch.set_rng_state(cpus)


class Stream:
    """A stream, or an event, of something that is done when its call returns."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_stream(self, _other: "Stream") -> None:
        pass

    wait_event = record = synchronize = replay = __exit__


def set_sync_debug_mode(mode: str) -> None:
    global waiting_is_an_error
    waiting_is_an_error = mode == "error"


def device(t: Tensor) -> torch.device:
    on_gpu = torch._C._dispatch_keys(t).has(torch._C.DispatchKey.CUDA)
    return CUDA if on_gpu else device_of.__get__(t)


def nothing(*_: Any, **__: Any) -> None:
    pass


def answer(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def begin() -> None:
    """Put the GPU there, until the process ends."""
    from tests.native.host import emulate

    major, minor = CAPABILITY
    properties = SimpleNamespace(major=major, minor=minor, name="rehearsal", total_memory=80 << 30)
    for name, value in {
        "_lazy_init": nothing,
        "is_available": answer(True),
        "is_initialized": answer(True),
        "is_bf16_supported": answer(True),
        "device_count": answer(1),
        "current_device": answer(0),
        "get_device_name": answer(properties.name),
        "get_device_capability": answer(CAPABILITY),
        "get_device_properties": answer(properties),
        "mem_get_info": answer((properties.total_memory, properties.total_memory)),
        "manual_seed_all": lambda seed: generator.manual_seed(seed + DRAWN_APART),
        "manual_seed": lambda seed: generator.manual_seed(seed + DRAWN_APART),
        "set_sync_debug_mode": set_sync_debug_mode,
        "synchronize": nothing,
        "empty_cache": nothing,
        "_sleep": nothing,
        "device": Stream,
        "Stream": Stream,
        "Event": Stream,
        "CUDAGraph": Stream,
        "stream": Stream,
        "graph": Stream,
        "current_stream": Stream,
    }.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, value)
    torch._C._cuda_getDevice = answer(0)
    torch.Tensor.device = property(device)
    torch.Tensor.is_cuda = property(lambda t: t.device.type == "cuda")
    torch.Tensor.record_stream = nothing
    torch.compile = lambda model=None, **_: model
    native.library = answer(emulate("sm_90"))
    native.runs_on = answer(True)
    # As a FakeTensorMode does: torch.tensor fills memory of the CPU, then moves it.
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)
    # Else a parameter that moves stays what it is and takes the other's memory.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    Meta().__enter__()
    GPU().__enter__()
