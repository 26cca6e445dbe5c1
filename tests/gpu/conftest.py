"""Tests of this folder need a card."""

import pytest
import torch

# Where time is limited: few and quick, of models of others, before all; slow to compile, after all.
ORDER = {"test_transformers_gpu.py": -1, "test_timm_gpu.py": -1, "test_compile_gpu.py": 1}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        items.sort(key=lambda item: ORDER.get(item.path.name, 0))
        return
    for item in items:
        if "/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: none is visible"))
