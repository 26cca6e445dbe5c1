"""The modules of ``leaner_kernels.nn``: any sizes work or are refused in one line."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from leaner_kernels import nn
from tests.fuzz.profiles import fuzzed
from tests.fuzz.refusals import NO_COUNTS, NO_TENSORS, outcome
from tests.fuzz.strategies import FLOATS, Block

counts = st.sampled_from([*NO_COUNTS, 0, 200, "split", True])
few = st.integers(1, 5)
OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "ManyHeadAttention": {},
    "WindowAttention": {"window_size": few | st.tuples(few, few)},
    "NystromAttention": {"num_landmarks": few, "conv_kernel_size": st.sampled_from([None, 1, 3])},
    "CrossCovarianceAttention": {},
    "ChannelAttention": {},
    "OutlookAttention": {"stride": st.integers(1, 3)},
}
MAPS = "WindowAttention", "OutlookAttention"
every_module = pytest.mark.parametrize("name", OPTIONS)


@st.composite
def sizes(draw: Any, name: str) -> dict[str, Any]:
    """Draw arguments of a constructor that must work."""
    common = {
        "dim": st.integers(1, 9),
        "num_heads": st.integers(1, 3),
        "head_dim": st.integers(1, 9),
        "qkv_bias": st.booleans(),
        "proj_bias": st.booleans(),
    }
    return {key: draw(each) for key, each in (common | OPTIONS[name]).items()}


@every_module
@fuzzed(2)
@given(st.data())
def test_a_module_gives_what_it_was_given_the_shape_of(name, data):
    torch.manual_seed(0)
    params = data.draw(sizes(name))
    module = getattr(nn, name)(**params, dtype=data.draw(st.sampled_from(FLOATS)))
    module.capture_samples = data.draw(st.integers(0, 2))
    module.track_logits = data.draw(st.booleans())
    tokens = data.draw(st.integers(1, 4)) * params.get("num_landmarks", 1)
    middle = tuple(data.draw(st.tuples(few, few))) if name in MAPS else (tokens,)
    shape = data.draw(few), *middle, params["dim"]
    layout = data.draw(st.sampled_from(["plain", "inside", "permuted", "expanded", "gaps"]))
    x = Block(shape, module.proj.weight.dtype, layout).make().requires_grad_()
    out = module(x, skip=x.detach() if data.draw(st.booleans()) else None)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    grads = torch.autograd.grad(out.sum(), [x, *module.parameters()])
    assert all(g.isfinite().all() for g in (out, *grads))
    assert (module.captured is not None) == (module.capture_samples > 0)
    assert (module.peak_logit is not None) == module.track_logits
    if module.captured is not None:
        assert module.captured.heads.isfinite().all()
        assert len(module.captured.heads) == min(module.capture_samples, shape[0])
    calm = Block(shape, x.dtype, layout).make(guard=0.0)
    module.capture_samples, module.track_logits = 0, False
    assert torch.equal(module(x), module(calm))


@every_module
@fuzzed(3)
@given(st.data())
def test_a_broken_size_is_refused_in_one_line_or_works(name, data):
    params = data.draw(sizes(name))
    wrong = data.draw(st.sampled_from([k for k in params if not k.endswith("_bias")]))
    params[wrong] = data.draw(counts)
    outcome(lambda: getattr(nn, name)(**params))


@every_module
@fuzzed(2)
@given(st.data())
def test_what_is_no_input_of_a_module_is_refused_in_one_line(name, data):
    params = data.draw(sizes(name))
    module = getattr(nn, name)(**params)
    shape = [2, *((4, 4) if name in MAPS else (10,)), params["dim"]]
    axis = data.draw(st.integers(0, len(shape) - 1))
    kind = data.draw(st.sampled_from(["no tensor", "empty", "rank", "width", "skip"]))
    x: Any = torch.zeros(shape)
    skip = None
    if kind == "no tensor":
        x = data.draw(st.sampled_from(NO_TENSORS))
    elif kind == "empty":
        x = x.narrow(max(1, axis), 0, 0)  # no batch is none, no token a mistake
    elif kind == "rank":
        x = x[0] if data.draw(st.booleans()) else x[None]
    elif kind == "width":
        x = torch.zeros(*shape[:-1], shape[-1] + 1)
    else:
        skip = data.draw(st.sampled_from([3.0, "skip", x[:1], x[..., :0]]))
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        module(x, skip=skip)
