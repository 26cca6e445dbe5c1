"""Register something with a part of PyTorch when a user imports that part.

Importing the part for the sake of the registration would make ``import leaner_kernels`` slow:
``torch.utils.flop_counter`` imports Triton. The registration cannot wait for a call of an operator
either, because PyTorch's ``FlopCounterMode`` copies the registered formulas when it is constructed.
"""

import sys
from collections.abc import Callable
from typing import Any


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call ``call`` now if module ``name`` is imported, else at the end of its import."""

    class Finder:
        """Find the module with the finders after this one."""

        @classmethod
        def find_spec(cls, wanted: str, path: Any = None, target: Any = None) -> Any:
            if wanted != name or cls not in sys.meta_path:
                return None
            behind = sys.meta_path[sys.meta_path.index(cls) + 1 :]
            specs = (finder.find_spec(name, path, target) for finder in behind)
            spec = next((spec for spec in specs if spec is not None), None)
            if spec is not None and spec.loader is not None:
                loader, execute = spec.loader, spec.loader.exec_module

                def execute_and_call(module: Any) -> None:
                    vars(loader).pop("exec_module", None)  # the class has a method of its own
                    execute(module)
                    # Only now: a module may be looked up without being imported, and an import may
                    # fail.
                    if cls in sys.meta_path:
                        sys.meta_path.remove(cls)
                        call()

                loader.exec_module = execute_and_call
            return spec

    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, Finder)
