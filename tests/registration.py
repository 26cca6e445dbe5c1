"""What holds for every operator: PyTorch's own checks, and a fake with the real shapes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Samples = dict[str, tuple[Callable[..., object], tuple[object, ...]]]


def tests_of(samples: Samples) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """Return ``test_opcheck`` and ``test_fake_equals_real`` for operators and their arguments."""

    @pytest.mark.parametrize("name", samples)
    def opcheck(name: str) -> None:
        torch.library.opcheck(*samples[name])

    @pytest.mark.parametrize("name", samples)
    def fake_equals_real(name: str) -> None:
        operator, arguments = samples[name]
        with torch.no_grad():
            real = operator(*arguments)
            mode = torch._subclasses.FakeTensorMode()
            fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
            with mode:
                fake = operator(*fakes)
        real, fake = ((t,) if isinstance(t, Tensor) else t for t in (real, fake))
        assert len(real) == len(fake)
        for a, b in zip(real, fake):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())

    return opcheck, fake_equals_real
