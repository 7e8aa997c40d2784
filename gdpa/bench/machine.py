"""Where figures come from: the machine, its clocks, the versions, the commit."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import gdpa

NVIDIA_SMI_SECONDS = 20
SAMPLE_MS = 500
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


def commit(root: Path | None = None) -> str | None:
    """The commit of a checkout, this one unless said otherwise, marked where files differ from it; None where there is none. For copies
    of this checkout GDPA_COMMIT says it."""
    if root is None:
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
    if device.type != "cuda":
        return None
    try:
        done = subprocess.run(
            _nvidia_smi(device, ["driver_version"]), capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


class Clocks:
    """Clocks, power and temperature of a GPU while the block runs, read by nvidia-smi twice a second; a run's end says nothing of them,
    since a GPU throttles under minutes of load and not under a second's. Nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Clocks:
        self._output = tempfile.TemporaryFile()
        if self._device.type == "cuda":
            command = [*_nvidia_smi(self._device, list(_CLOCKS.values())), f"--loop-ms={SAMPLE_MS}"]
            with suppress(OSError):
                self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def summary(self) -> dict[str, float | None] | None:
        """Medians over the samples under load: at least half the power limit. None where there is no sample."""
        self._output.seek(0)
        return summarise(self._output.read().decode())


def summarise(text: str) -> dict[str, float | None] | None:
    """nvidia-smi's lines as one dictionary."""
    rows = [[_number(part.strip()) for part in line.split(",")] for line in text.splitlines()]
    samples = [dict(zip(_CLOCKS, row, strict=True)) for row in rows if len(row) == len(_CLOCKS)]
    busy = [sample for sample in samples if (sample["power_w"] or 0.0) >= 0.5 * (sample["power_limit_w"] or 0.0)] or samples
    if not busy:
        return None
    found: dict[str, float | None] = {}
    for name in _CLOCKS:
        values = [value for sample in busy if (value := sample[name]) is not None]
        found[name] = statistics.median(values) if values else None
    lowest = [value for sample in busy if (value := sample["sm_mhz"]) is not None]
    return {**found, "sm_lowest_mhz": min(lowest, default=None), "samples": float(len(busy))}


def _nvidia_smi(device: torch.device, fields: list[str]) -> list[str]:
    """The command that asks for these fields of a device, as lines of numbers."""
    # CUDA_VISIBLE_DEVICES renumbers devices for torch, not for nvidia-smi; the UUID is the same for both.
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    return ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


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
