"""Operators to measure, one module each: a new module in this folder needs no registration.

A module, called as the operator's folder in ``leaner_kernels.ops``, has ``CASES``, the most telling
first, ``PEERS`` and ``PROBLEM``, its correctness gate. A case has what ``nystrom.NystromCase`` has:
among others ``op``, the name of its module; ``meta_inputs`` and ``operator_params``, for which
``bench.resources`` compiles; and ``compiled_for``, by which that tells cases whose kernels differ.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeAlias

OperatorCase: TypeAlias = Any
MODULES = {
    module.name: import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)
}
OPERATOR_CASES: tuple[Any, ...] = tuple(
    case for module in MODULES.values() for case in module.CASES
)
