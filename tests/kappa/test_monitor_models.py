"""KappaMonitor has rows of every architecture, of what the output projection is given."""

import pytest
import torch

from leaner_kernels import KappaMonitor
from models.davit import DaViT
from models.tnt import TNT
from models.volo import VOLO
from models.xcit import XCiT

MODELS = {
    "xcit": lambda: XCiT(image_size=32, embed_dim=16, depth=2, heads=[2, 3], head_dim=8),
    "tnt": lambda: TNT(image_size=32, embed_dim=16, inner_dim=8, inner_heads=2, depth=2, heads=4),
    "davit": lambda: DaViT(image_size=40, embed_dims=[8, 16], depths=[1, 1], heads=[2, 4]),
    "volo": lambda: VOLO(image_size=32, embed_dims=[8, 16], depths=[1, 1], heads=[2, 4]),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_attention_block_gets_the_kappa_of_what_its_projection_reads(name) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    projected = {}
    for layer, module in model.attention_modules().items():
        module.proj.register_forward_pre_hook(
            lambda _module, args, layer=layer: projected.update({layer: args[0].detach()})
        )
    monitor = KappaMonitor(model, every=1, samples=2)
    assert monitor.layers == list(model.attention_modules())
    monitor.begin(0)
    model(torch.randn(2, 3, model.image_size, model.image_size))
    rows = monitor.end()
    assert [row["layer"] for row in rows] == list(projected)
    for row in rows:
        module = model.get_submodule(row["layer"])
        heads = projected[row["layer"]].flatten(1, -2).double()
        assert (row["tokens"], row["heads"] * row["head_dim"]) == heads.shape[1:]
        kappa = torch.linalg.cond(heads).log().mean().exp().item()
        if row["resolved"]:
            assert row["kappa"] == pytest.approx(kappa, rel=1e-2)
        else:
            # At first all tokens of a window attend alike, and the heads are nearly of rank one.
            assert row["kappa"] is None
            assert kappa > 1e6
        assert row["columns"] == module.columns(row["tokens"])
        assert row["sigma_max"] == pytest.approx(torch.linalg.matrix_norm(heads, 2).mean().item())
        assert row["kappa_after_skip"] is not None
    assert sum(row["resolved"] for row in rows) >= len(rows) / 2
