"""What to register with a part of PyTorch that not every user imports, once somebody does.

Importing such a part for the registration's sake would make ``import leaner_kernels`` slow, and
``torch.utils.flop_counter`` imports Triton.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call ``call`` now if module ``name`` is imported, else at the end of its import."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder:
    """Finds one module by what finds it otherwise, until it has been imported."""

    def __init__(self, name: str, call: Callable[[], None]):
        self.name, self.call = name, call

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module with ``call`` after its execution; None for others."""
        finders = iter(list(sys.meta_path))
        if name != self.name or self not in finders:
            return None
        # Those after this one: looking for it has consumed the others.
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the one below: the class has its own
            execute(module)
            # Not before: a module may be looked for and not imported, and an import may fail.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.call()

        loader.exec_module = execute_and_call
        return spec
