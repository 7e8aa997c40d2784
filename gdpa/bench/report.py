"""What is shown: rows, the header that says where they come from, the JSON file and the tables."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import gdpa


@dataclass
class Row:
    """One (case, mode, activation, provider). A field is None where there is no figure; `note` then says why."""

    case: str
    mode: str  # forward, backward, or cold: the first forward and backward of a process
    activation: str
    provider: str
    ms: float | None = None
    spread: float | None = None  # interquartile range / median
    tflops: float | None = None
    peak_bytes: int | None = None
    error: float | None = None  # relative, in the Frobenius norm, against the float64 oracle: the worst tensor's
    budget_used: float | None = None  # of what gdpa.numerics allows: the worst tensor's
    note: str | None = None
    failed: bool = field(default=False, repr=False)  # a wrong result or an unexpected error, as opposed to an empty cell

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        del row["failed"]
        return row


@dataclass
class Report:
    header: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Replace the file in one step, so that an interrupted run leaves whole JSON."""
        text = json.dumps({"header": self.header, "rows": [row.as_json() for row in self.rows]}, indent=1)
        partial = path.with_name(f"{path.name}.{os.getpid()}.part")
        partial.write_text(text + "\n")
        partial.replace(path)

    @property
    def failed(self) -> bool:
        return any(row.failed for row in self.rows)


def header(device: torch.device, command: list[str] | None = None) -> dict[str, Any]:
    """Where figures come from: the machine, the versions and the command."""
    return {
        "machine": machine(),
        "device": device_name(device),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "command": shlex.join(["gdpa", *(sys.argv[1:] if command is None else command)]),
    }


def machine() -> str:
    return f"{platform.system()} {platform.machine()}, {cpu_name()}, {os.cpu_count()} logical cores"


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
        "gdpa": gdpa.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "cuda": torch.version.cuda,
    }


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside one."""
    root = Path(gdpa.__file__).parent.parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        if not (root / ".git").exists():
            return None
        return git("rev-parse", "HEAD") + ("-modified" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def show(report: Report, console: Console) -> None:
    """One table per case and activation, with the notes under it."""
    cases = report.header.get("cases", {})
    for (case, activation), group in groupby(report.rows, key=lambda row: (row.case, row.activation)):
        rows = list(group)
        console.print(f"[bold]{case}, {activation}[/bold]")
        if case in cases:
            console.print(f"[dim]{cases[case]['summary']}[/dim]")
        console.print(_table(rows))
        notes = dict.fromkeys((row.provider, row.note, row.failed) for row in rows if row.note)
        for provider, note, failed in notes:
            console.print(f"{provider}: {note}", style="red" if failed else "dim", markup=False)
        console.print()


def _table(rows: list[Row]) -> Table:
    """Sized for 80 columns."""
    unit, per_tflops = ("GFLOP/s", 1e3) if max((row.tflops or 0 for row in rows), default=0) < 1 else ("TFLOP/s", 1)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("", "provider"):
        table.add_column(name, no_wrap=True)
    for name in ("time", "spread", "vs eager", unit, "memory", "error", "budget"):
        table.add_column(name, justify="right", no_wrap=True)
    for mode, group in groupby(rows, key=lambda row: row.mode):
        members = list(group)
        eager = next((row.ms for row in members if row.provider == "eager"), None)
        for index, row in enumerate(members):
            table.add_row(
                mode if index == 0 else "",
                row.provider,
                duration(row.ms),
                "" if row.spread is None else f"{row.spread:.0%}",
                f"{eager / row.ms:.2f}x" if eager and row.ms and row.provider != "eager" else "",
                "" if row.tflops is None else f"{row.tflops * per_tflops:.3g}",
                size(row.peak_bytes),
                "" if row.error is None else f"{row.error:.1e}",
                "" if row.budget_used is None else f"{row.budget_used:.0%}",
                style="red" if row.failed else ("dim" if row.ms is None else None),
            )
        table.add_section()
    return table


def duration(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.3g} ms" if ms >= 1 else f"{ms * 1e3:.3g} us"


def size(count: int | None) -> str:
    if count is None:
        return ""
    value = float(count)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def lines(facts: Iterable[tuple[str, str]]) -> str:
    """`name   value` lines with the values aligned."""
    pairs = list(facts)
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs)
