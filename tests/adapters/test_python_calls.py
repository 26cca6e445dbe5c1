"""The Python calls of a forward for which the host's time is the time: one image, one text.

Tensors of the CPU say that they lie on a GPU; kernels are neither compiled nor run.
"""

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from bench import host_time
from leaner_kernels.ops import route
from tests.aot import pretended_gpu

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("runs without TRITON_INTERPRET=1, on backend cpu", allow_module_level=True)

pytest.importorskip("triton")

# A block of ours may make so many calls more than the library's own. On 3.11 it makes 3 more, 11
# more and 9 fewer; timm's were once 24, transformers' 91.
MORE = {"timm's ViT": 5, "transformers' BERT": 13, "`nn.TransformerEncoder`": -7}


def python_calls(run: Callable[[], Any]) -> int:
    """Return how many Python functions a call enters, without those of the pretence."""
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename != pretended_gpu.__file__

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("name", MORE)
def test_a_forward_of_our_attention_makes_few_python_calls_more_than_the_librarys(
    name: str,
) -> None:
    (model,) = (model for model in host_time.models() if model.name == name)
    route.plans.clear()
    with pretended_gpu.gpu():
        counts = []
        for forward in host_time.forwards_of(model):
            for _ in range(3):
                forward()
            counts.append(python_calls(forward))
    ours, own = counts
    assert own / host_time.BLOCKS > 50  # the library's blocks are there
    assert ours - own <= MORE[name] * host_time.BLOCKS


def test_a_repeated_launch_finds_its_device_without_pythons_check_of_cuda() -> None:
    """That check is three calls a launch, and raises where PyTorch is built for CPUs."""
    from triton.runtime.driver import driver

    forward, _ = host_time.forwards_of(host_time.models()[0])
    route.plans.clear()
    with pretended_gpu.gpu():
        forward()
        driver.active.get_current_device = torch.cuda.current_device
        forward()
