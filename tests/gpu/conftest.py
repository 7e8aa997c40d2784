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


@pytest.fixture(params=["triton", "hopper"])
def backend(request: pytest.FixtureRequest) -> str:
    """The GPU backends, each where it can run."""
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper backend needs a Hopper GPU")
    return str(request.param)
