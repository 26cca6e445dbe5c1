"""PyTorch's own attention modules on these kernels: the same numbers under every option."""

import copy
import io
from collections.abc import Mapping
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leaner_kernels import KappaMonitor, attention, condition_number
from leaner_kernels.adapters import pytorch
from tests.error_budget import assert_computes, assert_within_budget

DIM, HEADS = 12, 3
BATCH, TOKENS = 2, 7


class MultiheadCase(NamedTuple):
    """Options of nn.MultiheadAttention and of one call; ``mask`` and ``padding`` name masks."""

    name: str
    options: Mapping[str, Any] = MappingProxyType({})
    keys: int = 0
    mask: str = ""
    padding: str = ""
    causal: bool = False
    weights: bool = False
    average: bool = True
    batched: bool = True


FIRST = {"batch_first": True}
CASES = (
    MultiheadCase("batch second"),
    MultiheadCase("batch first", FIRST),
    MultiheadCase("no batch", batched=False),
    MultiheadCase("no bias", {"bias": False}),
    MultiheadCase("other keys, batch first", FIRST, keys=5),
    MultiheadCase("keys and values of other widths", {"kdim": 10, "vdim": 6}, keys=5),
    MultiheadCase("boolean mask", FIRST, mask="boolean"),
    MultiheadCase("additive mask", mask="additive"),
    MultiheadCase("additive mask of every head", FIRST, keys=5, mask="additive heads"),
    MultiheadCase("padded", FIRST, padding="boolean"),
    MultiheadCase("padded and masked", FIRST, mask="boolean", padding="boolean"),
    MultiheadCase("padded by numbers, masked", mask="boolean", padding="additive"),
    MultiheadCase("causal", FIRST, mask="causal", causal=True),
    MultiheadCase("causal and padded", FIRST, mask="causal", padding="boolean", causal=True),
    MultiheadCase("weights", FIRST, weights=True),
    MultiheadCase("weights of every head, masked", mask="additive", weights=True, average=False),
    MultiheadCase("weights, causal", FIRST, mask="causal", causal=True, weights=True),
)


def make_mask(case: MultiheadCase) -> Tensor | None:
    rows, cols = TOKENS, case.keys or TOKENS
    batch = BATCH if case.batched else 1
    if case.mask == "":
        return None
    if case.mask == "causal":
        return torch.ones(rows, cols, dtype=torch.bool).triu(1)
    shape = (batch * HEADS, rows, cols) if "heads" in case.mask else (rows, cols)
    if "additive" in case.mask:
        return torch.randn(shape)
    mask = torch.rand(shape) > 0.6
    mask[..., 0] = False
    return mask


def make_padding(case: MultiheadCase) -> Tensor | None:
    cols = case.keys or TOKENS
    if case.padding == "":
        return None
    if case.padding == "additive":
        padding = torch.randn(BATCH, cols)
    else:
        padding = torch.arange(cols) >= torch.tensor([[cols], [cols - 2]])
    return padding if case.batched else padding[1]


def run(module: nn.MultiheadAttention, case: MultiheadCase) -> dict[str, Tensor]:
    """Return the output, the weights, and the gradients of inputs and parameters."""
    torch.manual_seed(1)
    dtype = module.out_proj.weight.dtype
    batch = (BATCH,) if case.batched else ()

    def draw(tokens: int, width: int) -> Tensor:
        shape = (*batch, tokens, width) if module.batch_first else (tokens, *batch, width)
        return torch.randn(shape).to(torch.bfloat16).to(dtype).requires_grad_()

    query = key = value = draw(TOKENS, DIM)
    if case.keys and module._qkv_same_embed_dim:
        key = value = draw(case.keys, DIM)
    elif case.keys:
        key, value = draw(case.keys, module.kdim), draw(case.keys, module.vdim)
    masks = [make_padding(case), make_mask(case)]
    padding, mask = (m.to(dtype) if m is not None and m.is_floating_point() else m for m in masks)
    output, weights = module(
        query, key, value, padding, case.weights, mask, case.average, case.causal
    )
    leaves = {"query": query, "key": key, "value": value} | dict(module.named_parameters())
    grads = torch.autograd.grad(output, list(leaves.values()), torch.randn(output.shape).to(dtype))
    results = {"output": output} | {f"d {name}": g for name, g in zip(leaves, grads)}
    return results if weights is None else results | {"weights": weights}


def make_attention(case: MultiheadCase) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(DIM, HEADS, **case.options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    # In every dtype the same numbers.
    return module.to(torch.bfloat16).float()


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_equals_pytorchs(case: MultiheadCase, dtype: torch.dtype) -> None:
    module = make_attention(case)
    oracle = copy.deepcopy(module.to(dtype))
    pytorch.use(module)
    function = F.multi_head_attention_forward
    with mock.patch.object(F, "multi_head_attention_forward", wraps=function) as its_path:
        actual = run(module, case)
        assert its_path.called == case.weights
    assert_computes(actual, lambda dtype: run(copy.deepcopy(oracle).to(dtype), case))


def make_encoder(options: Mapping[str, Any], heads: int = 4) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, heads, 24, dropout=0.0, **options)
    layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layers


def tokens_of(encoder: nn.TransformerEncoder) -> Tensor:
    first = encoder.layers[0].self_attn
    shape = (BATCH, TOKENS, 16) if first.batch_first else (TOKENS, BATCH, 16)
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator).to(first.in_proj_weight.dtype)


PADDED = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [4]])


@pytest.mark.parametrize("options", [FIRST, {"norm_first": True, "activation": F.silu}], ids=list)
def test_encoder_equals_pytorchs(options: Mapping[str, Any]) -> None:
    """Causal and padded; each alone, and other options, are in tests/peers."""

    def run(encoder: nn.TransformerEncoder) -> dict[str, Tensor]:
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        x = tokens_of(encoder).requires_grad_()
        out = encoder(x, mask, PADDED)
        leaves = {"x": x} | dict(encoder.named_parameters())
        grads = torch.autograd.grad(out.square().sum(), list(leaves.values()))
        return {"output": out} | dict(zip(leaves, grads))

    encoder = make_encoder(options)
    oracle = copy.deepcopy(encoder)
    swapped = pytorch.use(encoder)
    names = [f"layers.{i}{part}" for i in range(2) for part in ("", ".self_attn")]
    assert list(swapped.swapped) == names
    assert_computes(run(encoder), lambda dtype: run(copy.deepcopy(oracle).to(dtype)))


def no_fast_path() -> Any:
    """PyTorch's fused functions for inference, which call no attention of ours, raise."""
    names = "_transformer_encoder_layer_fwd", "_native_multi_head_attention"
    raising = {name: mock.Mock(side_effect=AssertionError(name)) for name in names}
    return mock.patch.multiple(torch, **raising)


@pytest.mark.parametrize("padded", [False, True])
def test_inference_takes_no_path_around_our_attention(padded: bool) -> None:
    encoder = make_encoder(FIRST).eval()
    encoder.use_nested_tensor, encoder.norm = True, None
    x, padding = tokens_of(encoder), PADDED if padded else None
    with torch.no_grad():
        exact = copy.deepcopy(encoder).double()(x.double(), src_key_padding_mask=padding)
        same_dtype = encoder(x, src_key_padding_mask=padding)
        with no_fast_path(), pytest.raises(AssertionError, match="_encoder_layer_fwd"):
            encoder(x, src_key_padding_mask=padding)
        pytorch.use(encoder)
        with no_fast_path():
            actual = encoder(x, src_key_padding_mask=padding)
    assert_within_budget(actual, same_dtype, exact)


PADDINGS = {
    "right": PADDED,
    "shorter than the batch": torch.arange(TOKENS) >= torch.tensor([[TOKENS - 1], [2]]),
    "an empty row": torch.arange(TOKENS) >= torch.tensor([[TOKENS], [0]]),
    "with holes": torch.arange(TOKENS) == torch.tensor([[1], [TOKENS - 1]]),
    "left": torch.arange(TOKENS) < torch.tensor([[0], [3]]),
}


@pytest.mark.filterwarnings("ignore:.*ested")
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("options", [FIRST, FIRST | {"norm_first": True}, {}], ids=str)
def test_a_padded_encoder_gives_what_it_gave_before_use_at_padding_too(
    options: Mapping[str, Any], nested: bool, padding: str
) -> None:
    """Where PyTorch makes a padded batch nested its outputs at padding are those of zeros."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, **options)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=nested)
    nn.init.normal_(encoder.norm.bias)
    x, mask = tokens_of(encoder), PADDINGS[padding]
    additive = torch.zeros(mask.shape).masked_fill(mask, float("-inf"))
    swapped = copy.deepcopy(encoder)
    pytorch.use(swapped)
    for training, grad, given in product((True, False), (True, False), (mask, additive)):
        outputs = []
        for model in (encoder, swapped):
            with torch.set_grad_enabled(grad):
                outputs.append(model.train(training)(x, src_key_padding_mask=given))
        if padding == "an empty row":  # NaN to PyTorch where it is not nested
            outputs[1] = outputs[1].where(~outputs[0].isnan(), torch.nan)
        torch.testing.assert_close(*outputs, equal_nan=True)
    if nested and options == FIRST and padding == "right":
        with torch.no_grad():
            hidden = swapped.eval()(x, src_key_padding_mask=mask)[mask]
        torch.testing.assert_close(hidden, encoder.norm.bias.detach().expand_as(hidden))


@pytest.mark.filterwarnings("ignore:.*ested")
def test_a_layer_takes_a_nested_tensor_in_inference_as_pytorchs_does() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True).eval()
    x = torch.nested.nested_tensor([torch.randn(n, 16) for n in (5, 1, 3)])
    with torch.no_grad():
        expected = layer(x)
        pytorch.use(layer)
        actual = layer(x)
        assert actual.is_nested
        torch.testing.assert_close(actual.to_padded_tensor(0), expected.to_padded_tensor(0))
        with pytest.raises(ValueError, match="query must not be nested"):
            layer(x, src_mask=torch.zeros(5, 5))


def test_undo_gives_the_classes_back_and_keeps_what_was_trained() -> None:
    encoder = make_encoder(FIRST)
    before = {name: dict(vars(m)) for name, m in encoder.named_modules()}
    classes = {name: type(m) for name, m in encoder.named_modules()}
    swapped = pytorch.use(encoder)
    assert pytorch.use(encoder).swapped == swapped.swapped
    with torch.no_grad():
        encoder.layers[0].self_attn.in_proj_weight.add_(1)
        trained = encoder(tokens_of(encoder))
    stream = io.BytesIO()
    torch.save(encoder, stream)
    stream.seek(0)
    for model in (copy.deepcopy(encoder), torch.load(stream, weights_only=False), encoder):
        assert type(model.layers[0].self_attn) is pytorch.MultiheadAttention
        pytorch.undo(model)
        assert {name: type(m) for name, m in model.named_modules()} == classes
        for name, module in model.named_modules():
            assert vars(module).keys() == before[name].keys()
        with torch.no_grad():
            torch.testing.assert_close(model(tokens_of(model)), trained)


def test_what_cannot_be_swapped_is_named() -> None:
    class OtherAttention(nn.MultiheadAttention):
        pass

    model = nn.ModuleDict(
        {
            "fine": nn.MultiheadAttention(8, 2),
            "wide": nn.MultiheadAttention(258, 2),
            "all": nn.MultiheadAttention(8, 2, dropout=1.0),
            "key": nn.MultiheadAttention(8, 2, add_bias_kv=True),
            "zeros": nn.MultiheadAttention(8, 2, add_zero_attn=True),
            "other": OtherAttention(8, 2),
            "layer": nn.TransformerEncoderLayer(258, 2, 8),
        }
    )
    swapped = pytorch.use(model)
    assert list(swapped.swapped) == ["fine"]
    assert swapped.left["wide"] == "head_dim 129 is above 128"
    assert swapped.left["all"] == "dropout 1.0 is not in [0, 1)"
    for name in ("key", "zeros"):
        assert swapped.left[name] == "add_bias_kv and add_zero_attn are not supported"
    assert swapped.left["other"].endswith("OtherAttention is not supported")
    assert swapped.left["layer"] == swapped.left["layer.self_attn"] == swapped.left["wide"]
    with pytest.raises(ValueError, match="Linear has no attention module"):
        pytorch.use(nn.Linear(3, 3))


@pytest.mark.parametrize("weights", [False, True])
def test_kappa_is_that_of_the_heads(weights: bool) -> None:
    """With the weights the call is PyTorch's, and a second one, without dropout, captures."""
    torch.manual_seed(0)
    sizes = DIM, HEADS, 0.5 if weights else 0.0
    model = nn.ModuleDict({name: nn.MultiheadAttention(*sizes) for name in ("own", "cross")})
    pytorch.use(model)
    x, y = torch.randn(TOKENS, BATCH, DIM), torch.randn(5, BATCH, DIM)
    monitor = KappaMonitor(model, every=1, samples=BATCH)
    monitor.begin(0)
    model["own"](x, x, x, need_weights=weights)
    model["cross"](x, y, y, need_weights=weights)
    own, cross = monitor.end()
    assert (own["columns"], cross["columns"]) == (TOKENS, 5)
    model.eval()
    for row, keys in ((own, x), (cross, y)):
        attn = model[row["layer"]]
        _, p = attn(x, keys, keys, average_attn_weights=False)
        v = F.linear(keys, attn.in_proj_weight[2 * DIM :], attn.in_proj_bias[2 * DIM :])
        heads = p @ v.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)
        kappa = condition_number(heads.transpose(1, 2).flatten(2).double()).kappa
        assert row["kappa"] == pytest.approx(kappa.log().mean().exp().item(), rel=1e-3)
        assert row["entropy"] == pytest.approx(
            torch.special.entr(p).sum(-1).mean().item(), rel=1e-4
        )


def test_the_layer_compiles_without_a_graph_break() -> None:
    encoder = make_encoder({"norm_first": True, **FIRST})
    layer = encoder.layers[0]
    pytorch.use(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = tokens_of(encoder)
    torch.testing.assert_close(compiled(x), layer(x))


X = torch.randn(BATCH, TOKENS, DIM)
BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "causal without a mask": ({"is_causal": True}, "is_causal=True describes attn_mask"),
    "wrong mask": ({"attn_mask": torch.ones(3, 7)}, r"\(7, 7\) or \(6, 7, 7\), got \(3, 7\)"),
    "wrong padding": ({"key_padding_mask": torch.ones(2, 5)}, r"be \(2, 7\), got \(2, 5\)"),
    "mask of integers": (
        {"attn_mask": torch.ones(7, 7, dtype=torch.int32)},
        "masks must be boolean or floating point, got torch.int32",
    ),
    "wrong width": ({"key": X[..., :5]}, r"key must be \(B, N, 12\), got \(2, 7, 5\)"),
    "wrong rank": ({"value": X[0]}, r"value must be \(B, N, 12\), got \(7, 12\)"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_refused_in_one_line(name: str) -> None:
    arguments, message = BAD_CALLS[name]
    module = pytorch.MultiheadAttention(DIM, HEADS, batch_first=True)
    given = {"query": X, "key": X, "value": X, "need_weights": False} | arguments
    with pytest.raises(ValueError, match=message) as caught:
        module(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("hides", ["key_padding_mask", "attn_mask"])
def test_a_row_that_sees_no_key_is_the_bias_of_the_projection(hides: str, bias: bool) -> None:
    """With weights the call is PyTorch's own, which gives NaN."""
    torch.manual_seed(0)
    module = pytorch.MultiheadAttention(DIM, HEADS, bias=bias, batch_first=True)
    if bias:
        nn.init.normal_(module.out_proj.bias)
    x, hidden = torch.randn(BATCH, TOKENS, DIM), torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    hidden[3] = True
    masks = {"attn_mask": hidden}
    if hides == "key_padding_mask":
        masks = {"key_padding_mask": hidden[2:4].clone()}  # of the second entry of the batch
    output, _ = module(x, x, x, need_weights=False, **masks)
    expected = module.out_proj.bias if bias else torch.zeros(DIM)
    assert torch.equal(output[1, 3], expected)
    assert output.isfinite().all()
    assert module(x, x, x, **masks)[0][1, 3].isnan().all()


class OwnAttention(nn.Module):
    """A module that nobody knows, which calls PyTorch's function."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).mean(1)


def test_a_module_that_is_not_known_is_refused_with_the_next_step() -> None:
    with pytest.raises(ValueError, match="has no attention module to swap") as refusal:
        pytorch.use(OwnAttention())
    said = str(refusal.value)
    assert "replace calls of F.scaled_dot_product_attention by leaner_kernels.attention" in said
    assert said.endswith("KappaMonitor measures the model even without that")
    # As the message says.
    monitor = KappaMonitor(OwnAttention())
    (row,) = monitor.measure(torch.randn(2, 6, 8))
    assert row["kappa"] > 1
    x = torch.randn(2, 6, 8)
    before = OwnAttention()(x)
    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        torch.testing.assert_close(OwnAttention()(x), before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    module = pytorch.MultiheadAttention(DIM, HEADS, batch_first=True)
    nested = torch.nested.nested_tensor(list(X))
    with pytest.raises(ValueError, match="query must not be nested"):
        module(nested, nested, nested, need_weights=False)


def test_bad_sizes_are_refused_in_one_line() -> None:
    for sizes, message in (((10, 3), "embed_dim 10 is not a multiple"), ((258, 2), "head_dim 129")):
        with pytest.raises(ValueError, match=message):
            pytorch.MultiheadAttention(*sizes)
