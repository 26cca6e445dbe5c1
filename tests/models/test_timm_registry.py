"""timm's factory builds the paper's rows once ``models.timm`` is imported."""

import pytest
import timm
import torch
from timm.data import resolve_data_config

import models.timm
from models import papers


def test_timm_knows_every_row_that_takes_images():
    known = set(timm.list_models("leaner_*"))
    assert known == {f"leaner_{n}" for n, row in papers.names().items() if row.takes_images}
    assert "leaner_davit_large_lean" in known
    assert set(models.timm.__all__) == known


def test_timm_builds_a_row_with_its_own_names_of_the_arguments():
    model = timm.create_model(
        "leaner_vit_base_lean",
        img_size=32,
        num_classes=10,
        depth=2,
        drop_rate=0.1,
        drop_path_rate=0.2,
        global_pool="avg",
    )
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert [model.head_drop.p, model.blocks[-1].drop_path, model.pool] == [0.1, 0.2, "avg"]
    assert model.blocks[0].attn.num_heads == 16
    assert resolve_data_config({}, model=model)["input_size"] == (3, 32, 32)


def test_timm_is_refused_pretrained_weights():
    with pytest.raises(ValueError, match="tnt_base has no weights"):
        timm.create_model("leaner_tnt_base", pretrained=True)
