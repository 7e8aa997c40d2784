"""What `gdpa bench --suite train` leaves: its rows, the file that holds them, and the tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gdpa.bench.tables import duration, figures, print_whole, size
from gdpa.errors import GdpaError
from gdpa.files import replacing

LEGEND = (
    "step: forward, loss, backward, clipping and both optimisers, by the wall clock; spread: interquartile range / median",
    "attention: GDPA's calls inside a step, forward and backward; other: the rest of the step",
    "MFU: the model's operations on the real lengths, over the rate of this machine's own matmul in the same rounds",
    "memory: the most that was allocated in a step, weights and optimisers included",
)


@dataclass
class Row:
    """One (model, provider). A field is None where there is no figure; `error` then says why."""

    model: str
    preset: str
    provider: str
    samples_per_s: float | None = None
    tokens_per_s: float | None = None  # events of the histories
    step_ms: float | None = None
    spread: float | None = None
    attention_ms: float | None = None
    attention_forward_ms: float | None = None
    attention_backward_ms: float | None = None
    other_ms: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    gradient_difference: float | None = None  # relative, of the dense part, from the first of the same function, not compiled
    rounds: int | None = None
    error: str | None = None
    note: str | None = None
    failed: bool = field(default=False, repr=False)  # a wrong result or an unexpected error, as opposed to an empty row

    def add_note(self, text: str | None) -> None:
        if text:
            self.note = f"{self.note}; {text}" if self.note else text

    def fail(self, reason: str) -> None:
        """No figures, for this reason."""
        for name in MEASURED:
            setattr(self, name, None)
        self.error, self.failed = reason, reason.startswith(("failed", "wrong"))

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        del row["failed"]
        return row


KEYS = tuple(f.name for f in fields(Row) if f.name != "failed")
MEASURED = KEYS[KEYS.index("samples_per_s") : KEYS.index("peak_bytes") + 1]


@dataclass
class Report:
    header: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)  # of the matmul, FLOP/s, beside each model

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def as_json(self) -> dict[str, Any]:
        rates = {name: {"value": rate / 1e12, "unit": "TFLOP/s"} for name, rate in self.rates.items()}
        return {"header": {**self.header, "R": rates or None}, "rows": [row.as_json() for row in self.rows]}

    def write(self, path: Path) -> None:
        """Replace the file in one step, so that an interrupted run leaves whole JSON."""
        with replacing(path) as partial:
            partial.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    @property
    def failed(self) -> bool:
        return any(row.failed for row in self.rows)


def is_training(path: Path) -> bool:
    """Whether a file holds rows of this suite."""
    try:
        data = json.loads(path.read_text())
        return isinstance(data, dict) and data["header"]["suite"] == "train"
    except (OSError, ValueError, KeyError, TypeError):
        return False  # whoever reads it next says what is wrong with it


def load(path: Path, argument: str) -> dict[str, Any]:
    """A file for which `is_training` holds."""
    data: dict[str, Any] = json.loads(path.read_text())
    rows = data.get("rows")
    known = isinstance(data["header"].get("models"), dict)
    if not known or not isinstance(rows, list) or any(not isinstance(row, dict) or not set(KEYS) <= set(row) for row in rows):
        raise GdpaError(f"{argument}: expected a header with models and rows with {', '.join(KEYS)}, got {path}")
    return data


def show(data: dict[str, Any], console: Console) -> None:
    """One table per model, from the JSON's dictionary."""
    facts = data["header"]["models"]
    lengths = data["header"].get("lengths", "lognormal")  # files of before there was a choice
    for model, group in groupby(data["rows"], key=lambda row: row["model"]):
        rows = list(group)
        console.print(f"\n[bold]{model}, {rows[0]['preset']}[/bold]")
        if model in facts:
            known = facts[model]
            console.print(
                f"[dim]batch {known['batch']}, {known['events']:,} events, {lengths} histories, the longest {known['longest']}, "
                f"{known['parameters']:,} parameters, {figures(known['step_flops'] / 1e12)} TFLOP a step, {data['header']['dtype']}[/dim]"
            )
        print_whole(_table(rows), console)
        for line in _ratios(rows):
            console.print(line)
        for row in rows:
            text = "; ".join(part for part in (row["error"], row["note"], _without_rest(row)) if part)
            if text:
                console.print(f"{row['provider']}: {text}", style="dim", markup=False)
    legend = [line for line in LEGEND if not line.startswith("memory:") or any(row["peak_bytes"] for row in data["rows"])]
    console.print("\n[dim]" + "\n".join(legend) + "[/dim]")


def _without_rest(row: dict[str, Any]) -> str | None:
    """Why a row with figures has none of the rest of its step, or None."""
    if row["step_ms"] is None or row["attention_ms"] is None or row["attention_ms"] <= row["step_ms"]:
        return None
    apart = f"{duration(row['attention_ms'])} in the steps they were timed in, the other steps {duration(row['step_ms'])}"
    return f"no rest of the step: attention's calls took {apart}, as they may on a busy machine"


def _ratios(rows: list[dict[str, Any]]) -> list[str]:
    """gdpa against each of the others, in samples/s and in memory."""
    ours = next((row for row in rows if row["provider"] == "gdpa" and row["samples_per_s"]), None)
    lines = []
    for row in rows:
        if ours is not None and row is not ours and row["samples_per_s"]:
            memory = (
                f", {ours['peak_bytes'] / row['peak_bytes']:.2f}x the memory" if row["peak_bytes"] and ours["peak_bytes"] else ""
            )
            speed = ours["samples_per_s"] / row["samples_per_s"]
            lines.append(f"gdpa has {speed:.2f}x the samples/s of {_label(row['provider'])}{memory}")
    return lines


def _label(provider: str) -> str:
    return "varlen (softmax)" if provider == "varlen" else provider


def _table(rows: list[dict[str, Any]]) -> Table:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "samples/s": lambda row: _count(row["samples_per_s"]),
        "tokens/s": lambda row: _count(row["tokens_per_s"]),
        "step": lambda row: duration(row["step_ms"]),
        "spread": lambda row: "" if row["spread"] is None else f"{row['spread']:.0%}",
        "attention": lambda row: duration(row["attention_ms"]),
        "forward": lambda row: duration(row["attention_forward_ms"]),
        "backward": lambda row: duration(row["attention_backward_ms"]),
        # Files of before had a negative one.
        "other": lambda row: duration(None if _without_rest(row) else row["other_ms"]),
        "MFU": lambda row: "" if row["mfu"] is None else f"{row['mfu']:.1%}",
        "memory": lambda row: size(row["peak_bytes"]),
    }
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("provider", no_wrap=True)
    shown = {name: text for name, text in columns.items() if any(text(row) for row in rows)}
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(_label(row["provider"]), *(text(row) for text in shown.values()), style="dim" if row["error"] else None)
    return table


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
