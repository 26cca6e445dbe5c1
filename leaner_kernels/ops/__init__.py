"""One folder an op: the public function, its specification, its kernels."""

from importlib import import_module
from pkgutil import iter_modules

from ._imports import after_import as _after_import
from .route import register_flops as _register_flops

# Every folder defines operators, which are registered below.
for _found in iter_modules(__path__):
    if _found.ispkg:
        import_module(f"{__name__}.{_found.name}")

_after_import("torch.utils.flop_counter", _register_flops)
