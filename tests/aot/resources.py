"""Compiles a kernel for a card this machine does not have, and reads what it costs there."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Compute capability -> shared memory that one program may use, in bytes.
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}


class Resources(NamedTuple):
    """What ptxas gave a kernel: registers a thread, and bytes of each memory."""

    registers: int
    shared: int
    stack: int
    local: int


class Recorder:
    """Stands in for a kernel: ``recorder[grid](**arguments)`` keeps the arguments of the launch."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **arguments: self.launches.append(arguments)


def compile_launch(kernel: JITFunction, arguments: dict[str, Any], capability: int) -> Resources:
    """Compile the specialisation that ``kernel[grid](**arguments)`` would run on that card."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(**arguments)
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, arguments, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constexprs, attrs)
    compiled = triton.compile(source, target=target, options=options.__dict__)
    usage = _resource_usage(compiled.asm["cubin"])
    return Resources(
        usage["REG"], max(usage["SHARED"], compiled.metadata.shared), usage["STACK"], usage["LOCAL"]
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", report)}
