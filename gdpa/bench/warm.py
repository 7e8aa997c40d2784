"""Compile the Triton kernels that a run needs, in parallel processes, before it starts.

The run would compile them itself, one after another, at each provider's gate: minutes of a GPU's time that this makes seconds. The
processes compile for the architecture and touch no device; what they build is found in Triton's cache. A kernel that does
not compile is left to the gate, which says why.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

import gdpa
from gdpa.activations import resolve
from gdpa.bench.cases import Case
from gdpa.bench.providers import ELSEWHERE
from gdpa.bench.versions import version

# Provider -> the module that compiles its kernels without a device.
LAUNCHERS = {"gdpa-triton": "gdpa.backends.triton.launch", "gdpa-hopper": "gdpa.backends.hopper.launch"}
TIMEOUT = 240


def form_of(case: Case) -> str:
    """The case as the launchers name it."""
    if case.kind == "pma":
        return "shared-queries"
    if case.dense:
        return "dense"
    return "dense-keys" if case.kind == "pffn" else "packed"


def keys_of(case: Case) -> int:
    """The keys of a sequence, as far as they decide which kernel earlier versions build: none where they are jagged."""
    if case.kind == "pffn":
        return case.fixed
    return case.length if case.dense else 0


def rows_of(case: Case) -> tuple[int, int]:
    """The queries and the keys of a sequence to build the hopper kernels for, whose form depends on dense keys and, at D = 64, on how many
    queries there are on average. Of packed keys 256 are assumed: with few, a forward kernel of gelu's may still be built at the gate."""
    keys = keys_of(case) or 256
    queries = case.fixed if case.kind == "pma" else int(case.drawn.sum()) // max(case.batch, 1)
    return (max(queries, 1) if case.dim == 64 else keys, keys)


def compile_kernels(
    providers: Iterable[str], cases: Iterable[Case], activations: Iterable[str], dtype: torch.dtype, gradients: bool = True
) -> str | None:
    """Build everything on this machine's GPU architecture, the backward's kernels if there are `gradients`; returns what went wrong, or
    None. For a CUDA device only."""
    capability = torch.cuda.get_device_capability()
    requests = {
        (
            provider,
            json.dumps(
                {
                    "provider": provider.split(ELSEWHERE)[0].replace("gdpa", _package(provider)[0]),
                    "form": form_of(case),
                    "activation": activation,
                    "dim": case.dim,
                    "heads": case.heads,
                    "dtype": str(dtype).removeprefix("torch."),
                    "arch": 10 * capability[0] + capability[1],
                    "backward": backward,
                    "causal": case.causal,
                    # Earlier versions ask for the keys alone. A forward at D = 128 has one kernel for all lengths.
                    "rows": rows_of(case) if backward or case.dim == 64 else None,
                    "keys": keys_of(case) if backward else 0,
                }
            ),
        )
        for provider in providers
        if provider.split(ELSEWHERE)[0] in LAUNCHERS
        for case in cases
        for activation in activations
        # The portable backend's kernels are built together.
        for backward in ((False, True) if gradients and provider.startswith("gdpa-hopper") else (False,))
    }
    waiting = sorted(requests)
    running: list[subprocess.Popen[str]] = []
    problem: str | None = None
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                running.append(_start(*waiting.pop()))
            process = running.pop(0)
            _, said = process.communicate(timeout=TIMEOUT)
            if process.returncode != 0:
                problem = said.strip().split("\n")[-1]
    except subprocess.TimeoutExpired:
        running.append(process)
        problem = f"no answer in {TIMEOUT} s"
    finally:
        for process in running:
            process.kill()
            process.wait()
    return problem


def _start(provider: str, request: str) -> subprocess.Popen[str]:
    """A process of the provider's version of gdpa, which compiles what the request says."""
    package, root = _package(provider)
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"{package}.bench.warm", request]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _package(provider: str) -> tuple[str, Path]:
    """What the provider's version of gdpa is called, and the folder to import it from."""
    _, elsewhere, where = provider.partition(ELSEWHERE)
    if not elsewhere:
        return "gdpa", Path(gdpa.__file__).parent.parent
    other = version(where)
    return other.package, other.root


def main() -> None:
    request = json.loads(sys.argv[1])
    keys, dtype = tuple(resolve(request["activation"], request["heads"])), getattr(torch, request["dtype"])
    launcher = importlib.import_module(LAUNCHERS[request["provider"]])
    dim, heads, arch, form = request["dim"], request["heads"], request["arch"], request["form"]
    causal = request.get("causal", False)  # earlier versions do not say
    window = (-1, 0) if causal else (-1, -1)
    if request["provider"] == "gdpa-hopper":
        queries, rows = request.get("rows") or (256, 256)  # as earlier versions have it
        if request["backward"]:
            launcher = importlib.import_module("gdpa.backends.hopper.launch_backward")
            launcher.compile_backward(keys, dim, dtype, 1, form, heads, rows, window=window, queries=queries)
        else:
            launcher.compile_forward(keys, dim, dtype, 1, form, heads, rows, window, queries)
        return
    with launcher.target_architecture(arch):
        for launch in launcher.plans(keys, dim, dim, dtype, causal, 1, arch, form, heads):
            launch.compile()


if __name__ == "__main__":
    main()
