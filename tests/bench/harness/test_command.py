"""Benchmarks compare with PyTorch's own attention, or do not run."""

from collections.abc import Callable

import pytest

import leaner_kernels
from bench import crossover, host_time, shape


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (shape.main, ["1,1,16,16"]),
        (crossover.main, ["--sweep", "none.json"]),
        (host_time.main, ["--gpu", "none.json"]),
    ],
)
def test_a_command_refuses_to_time_other_kernels_as_pytorchs(
    main: Callable[..., None], arguments: list[str]
) -> None:
    with leaner_kernels.use_sdpa(), pytest.raises(SystemExit, match=r"^bench.*'leaner' is active"):
        main(arguments)
