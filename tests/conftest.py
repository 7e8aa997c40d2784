"""Set-up shared by every test. It must run before anything imports triton, which reads TRITON_INTERPRET at import.

Where there is no GPU, the portable kernels run interpreted in this process; cross-compilation cannot share a process
with the interpreter, so those tests start subprocesses with `helpers.clean_env()`.
"""

import atexit
import os
import shutil
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "triton was imported before conftest.py"
    os.environ["TRITON_INTERPRET"] = "1"
if "GDPA_CACHE_DIR" not in os.environ:
    # Generated sources of a test run are its own; xdist's workers inherit the variable and share the folder.
    os.environ["GDPA_CACHE_DIR"] = tempfile.mkdtemp(prefix="gdpa-tests-")
    atexit.register(shutil.rmtree, os.environ["GDPA_CACHE_DIR"], ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter computes with numpy, which warns where the tests put NaN and Inf on purpose.
    for kind in ("DeprecationWarning", "RuntimeWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}:triton.runtime.interpreter")


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Compiled code of one test must not serve, or count against the recompile limit of, the next."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the cpu backend: tiles so small that ordinary test sizes need many of them, and chunks of one or two key heads."""
    from gdpa.backends import cpu_plan, cpu_whole  # not before TRITON_INTERPRET is set

    monkeypatch.setattr(cpu_whole, "MOST_SCORES", 0)
    monkeypatch.setattr(cpu_plan, "TILE_ROWS", 32)
    monkeypatch.setattr(cpu_plan, "TILE_KEYS", 24)
    monkeypatch.setattr(cpu_plan, "MASKED_TILE_KEYS", 16)
    monkeypatch.setattr(cpu_plan, "MASKED_TILE_ROWS", 32)
    monkeypatch.setattr(cpu_plan, "BATCH_SCORES", 2 * 32 * 24)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each forward went, "ordinary" or "short" (gdpa/shortcut.py), of a backend that computes by the reference."""
    from gdpa import dispatch, operators, shortcut  # not before TRITON_INTERPRET is set
    from gdpa.backends import reference

    taken: list[str] = []

    def forward(*arguments: Any) -> torch.Tensor:
        taken.append("ordinary")
        return reference.forward(*arguments)

    def prepare(problem: Any, *layout: Any) -> Any:
        def run(*arguments: Any) -> torch.Tensor:
            taken.append("short")
            with torch.no_grad(), torch.autocast("cpu", enabled=False):  # a kernel knows nothing of either
                return reference.forward(problem, *arguments)

        return SimpleNamespace(run=run)

    module = SimpleNamespace(forward=forward, backward=reference.backward, prepare=prepare)
    monkeypatch.setattr(dispatch, "choose", lambda problem, name=None: module)
    monkeypatch.setattr(operators, "_plans", {})
    monkeypatch.setattr(shortcut, "_calls", {})
    monkeypatch.setattr(shortcut, "_is_for", lambda q: True)
    return taken
