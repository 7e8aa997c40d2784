"""What needs a process of its own: the cold first call, and peak memory on a CPU.

The cold first call is one forward and backward of a process with empty caches, compilation included. Importing torch
and gdpa, drawing the data and starting the device are not counted.

A CPU's allocator keeps no peak, and torch's profiler does not see the threads a backend starts. The kernel does: the
high-water mark of the resident set, set back before the call. The process makes malloc return every block of 64 KB or
more to the system when it is freed, so that memory kept from an earlier call cannot hide what this one takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gdpa
from gdpa.bench.cases import MODES, Case, Mode, build
from gdpa.bench.providers import by_name
from gdpa.bench.timing import training_step

# Every place where compiled or generated code is kept between processes.
CACHE_VARIABLES = ("GDPA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class FreshProcessFailed(RuntimeError):
    """The process gave no figure; the message says what it printed last."""


def first_call_ms(
    case: Case, activation: str, dtype: torch.dtype, device: torch.device, provider: str, gradients: bool = True
) -> float:
    """Milliseconds of the first forward (and backward, where `gradients`) of a process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name.lower()}" for name in CACHE_VARIABLES}
        what = "first_step" if gradients else "first_forward"
        return float(_ask(what, case, activation, dtype, device, provider, caches))


def peak_bytes(case: Case, activation: str, dtype: torch.dtype, provider: str, gradients: bool = True) -> dict[Mode, int] | None:
    """Peak memory of a call on the CPU, beyond the inputs; None where the system does not tell."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    what = "training_memory" if gradients else "forward_memory"
    peaks = _ask(what, case, activation, dtype, torch.device("cpu"), provider, RETURN_FREED_MEMORY)
    return {mode: int(peaks[mode]) for mode in MODES if mode in peaks}


def _ask(
    what: str,
    case: Case,
    activation: str,
    dtype: torch.dtype,
    device: torch.device,
    provider: str,
    environment: dict[str, str],
    timeout: float = 300,
) -> Any:
    request = {
        "what": what,
        "case": case.facts(),
        "activation": activation,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "provider": provider,
    }
    root = str(Path(gdpa.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gdpa.bench.fresh", json.dumps(request)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **environment, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        raise FreshProcessFailed(f"failed: a fresh process gave no answer in {timeout:.0f} s") from None
    if done.returncode != 0:
        said = done.stderr.strip().split("\n")[-1] or f"exit status {done.returncode}"
        raise FreshProcessFailed(f"failed: {said}")
    return json.loads(done.stdout.strip().split("\n")[-1])


def main() -> None:
    request = json.loads(sys.argv[1])
    case = Case(**request["case"])
    device, dtype = torch.device(request["device"]), getattr(torch, request["dtype"])
    measure: dict[str, Callable[..., Any]] = {
        "first_forward": partial(_first_call, mode="forward"),
        "first_step": partial(_first_call, mode="backward"),
        "forward_memory": partial(_peak_memory, gradients=False),
        "training_memory": partial(_peak_memory, gradients=True),
    }
    print(json.dumps(measure[request["what"]](case, request["activation"], dtype, device, request["provider"])))


def _first_call(case: Case, activation: str, dtype: torch.dtype, device: torch.device, provider: str, mode: Mode) -> float:
    workload = build(case, activation, dtype, device)
    call = by_name(provider).prepare(workload)
    d_out = call.lay_out(workload.d_out)
    _wait(device)
    start = time.perf_counter()
    training_step(call, mode, d_out)
    _wait(device)
    return (time.perf_counter() - start) * 1e3


def _peak_memory(
    case: Case, activation: str, dtype: torch.dtype, device: torch.device, provider: str, gradients: bool
) -> dict[Mode, int]:
    # A small call first, so that what the libraries load and keep is not counted.
    small = build(replace(case, batch=2, length=64, fixed=min(case.fixed, 64)), activation, dtype, device)
    call = by_name(provider).prepare(small)
    modes: tuple[Mode, ...] = ("forward", "backward") if gradients else ("forward",)
    training_step(call, modes[-1], call.lay_out(small.d_out))
    workload = build(case, activation, dtype, device)
    call = by_name(provider).prepare(workload)
    d_out = call.lay_out(workload.d_out)
    peaks: dict[Mode, int] = {}
    for mode in modes:
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is resident now
        before = _status("VmRSS")
        training_step(call, mode, d_out)
        peaks[mode] = max(_status("VmHWM") - before, 0)
    # A backward's peak covers its forward already.
    return peaks if "backward" not in peaks else {**peaks, "both": peaks["backward"]}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
