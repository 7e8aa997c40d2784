"""Tests that need a GPU: `pytest tests/gpu`. Elsewhere they skip, saying so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="this machine has no CUDA device")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)
