"""torch.hub entry points: the paper's rows, without pretrained weights.

``torch.hub.load(repository, "vit_base", variant="lean", num_classes=10)``
"""

from collections.abc import Callable as _Callable

from torch import nn as _nn

from models import papers as _papers

dependencies = ["torch"]


def _entry(row: str) -> _Callable[..., _nn.Module]:
    def build(variant: str = "lean", pretrained: bool = False, **overrides) -> _nn.Module:
        if pretrained:
            raise ValueError(f"pretrained must be False, got {pretrained!r}: {row} has no weights")
        return _papers.build(row, variant, **overrides)

    original, lean = (_papers.ROWS[row, variant] for variant in ("original", "lean"))
    build.__name__ = build.__qualname__ = row
    build.__doc__ = f"""{row} of the paper, ``"lean"`` or ``"original"``.

    Lean: {lean.audited_params:,} parameters, {lean.config}; original:
    {original.audited_params:,}, {original.config}. ``overrides`` replace these arguments
    of ``{_papers.MODELS[original.architecture]}``, e.g. ``depth=4``.
    """
    return build


for _name in dict.fromkeys(row for row, variant in _papers.ROWS if variant == "original"):
    globals()[_name] = _entry(_name)
