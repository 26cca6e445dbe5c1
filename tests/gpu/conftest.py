"""Tests of this folder need a card."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: none is visible"))
