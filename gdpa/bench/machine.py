"""Where figures come from: the machine, its clocks, the versions, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import gdpa

NVIDIA_SMI_SECONDS = 20
_CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "sm_max_mhz": "clocks.max.sm",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


def machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} logical cores"


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name() if device.type == "cpu" else str(device)


def versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "cuda": torch.version.cuda,
        "gdpa": gdpa.__version__,
    }


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """What GDPA_COMMIT says, for copies of a checkout; else the checkout's commit, marked where files differ from it; else None."""
    if os.environ.get("GDPA_COMMIT"):
        return os.environ["GDPA_COMMIT"]
    root = Path(gdpa.__file__).parent.parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        if (root / ".git").exists():
            return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        pass
    return None


def driver(device: torch.device) -> str | None:
    answer = _nvidia_smi(device, ["driver_version"], lambda: None)
    return None if answer is None else answer[0]


def clocks(device: torch.device, busy: Callable[[], object]) -> dict[str, float | None] | None:
    """Clocks, power and temperature while `busy` runs over and over, since an idle GPU's say nothing; None on a CPU."""
    answer = _nvidia_smi(device, list(_CLOCKS.values()), busy)
    if answer is None:
        return None
    return {name: _number(text) for name, text in zip(_CLOCKS, answer, strict=True)}


def _nvidia_smi(device: torch.device, fields: list[str], meanwhile: Callable[[], object]) -> list[str] | None:
    """nvidia-smi's answers, or None where there is no such device or no nvidia-smi."""
    if device.type != "cuda":
        return None
    # CUDA_VISIBLE_DEVICES renumbers devices for torch, not for nvidia-smi; the UUID is the same for both.
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    deadline = time.monotonic() + NVIDIA_SMI_SECONDS
    while process.poll() is None:
        meanwhile()
        torch.cuda.synchronize(device)
        if time.monotonic() > deadline:
            process.kill()
    text = process.communicate()[0]
    answers = [part.strip() for part in text.strip().split(",")]
    return answers if process.returncode == 0 and len(answers) == len(fields) else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # nvidia-smi says [N/A]


def header(device: torch.device, command: str) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "machine": machine(),
        "cpu": cpu_name(),
        "gpu": device_name(device) if on_gpu else None,
        "clocks": None,
        "driver": driver(device),
        "versions": versions(),
        "commit": commit(),
        "command": command,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }
