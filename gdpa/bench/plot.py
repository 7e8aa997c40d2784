"""The rows as a picture: one panel per mode and activation, bars per case grouped by provider, the hardware's floor as a line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gdpa.bench.cases import MODES
from gdpa.bench.providers import NAMES, SOFTMAX, label
from gdpa.bench.report import Report, Row

# gdpa in strong colours, other implementations of such attention in pale ones, softmax yardsticks in greys.
COLOURS = {
    "gdpa-hopper": "#0b5fa5",
    "gdpa-triton": "#e07b00",
    "gdpa-cpu": "#1a7f4b",
    "gdpa-reference": "#8a2b6d",
    "eager": "#d8c9a3",
    "compile": "#c6b283",
    "flex": "#b39a63",
    "hstu": "#c3a5d6",
    "meta-triton": "#e3a1ae",
    "cudnn": "#4d4d4d",
    "flash": "#737373",
    "varlen": "#999999",
    "fa3": "#b8b8b8",
    "fa4": "#d4d4d4",
}
INK = "#333333"


def write(report: Report, path: Path) -> None:
    figure(report).savefig(path, dpi=150)


def png(report: Report) -> bytes:
    buffer = io.BytesIO()
    figure(report).savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def figure(report: Report) -> Figure:
    """Readable at 14 cases of 6 providers: a bar is about a fifth of an inch wide."""
    timed = [row for row in report.rows if row.ms is not None]
    panels = list(dict.fromkeys((row.mode, row.activation) for row in sorted(timed, key=lambda row: MODES.index(row.mode))))
    names = [name for name in NAMES if any(row.provider == name for row in timed)]
    cases = list(dict.fromkeys(row.case for row in report.rows))
    width = max(8.0, 1.6 + len(cases) * (0.21 * len(names) + 0.3))
    # matplotlib's objects rather than pyplot: nothing global is touched, and nothing needs closing.
    result = Figure(figsize=(width, 1.5 + 3.6 * max(len(panels), 1)), layout="constrained")
    axes = result.subplots(max(len(panels), 1), 1, squeeze=False)[:, 0]
    result.suptitle(_title(report), x=0.01, ha="left", fontsize=11, color=INK)
    if not panels:
        axes[0].text(0.5, 0.5, "no row has a figure", ha="center", va="center", color=INK)
        axes[0].set_axis_off()
        return result
    for axis, (mode, activation) in zip(axes, panels, strict=True):
        shown = {(row.case, row.provider): row for row in timed if (row.mode, row.activation) == (mode, activation)}
        _panel(axis, f"{mode}, {activation}", cases, names, shown)
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, text in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(text, handle)
    ordered = sorted(handles, key=lambda text: [*map(label, names), *handles].index(text))
    result.legend(
        [handles[text] for text in ordered],
        ordered,
        loc="outside lower left",
        ncols=min(len(ordered), 8),
        frameon=False,
        fontsize=9,
    )
    return result


def _panel(axis: Axes, title: str, cases: list[str], names: list[str], rows: dict[tuple[str, str], Row]) -> None:
    by_floor = any(row.fraction_of_floor is not None for row in rows.values())
    step = 0.84 / len(names)
    tallest = 0.0
    for index, name in enumerate(names):
        for place, case in enumerate(cases):
            x = place + (index - (len(names) - 1) / 2) * step
            row = rows.get((case, name))
            value = None if row is None else (row.fraction_of_floor if by_floor else row.tflops)
            if row is None or value is None:
                axis.text(x, 0, "-", ha="center", va="bottom", fontsize=7, color="#888888")
                continue
            tallest = max(tallest, value)
            axis.bar(
                x,
                value,
                0.92 * step,
                color=COLOURS[name],
                label=label(name),
                hatch="///" if name in SOFTMAX else None,
                edgecolor="white",
                linewidth=0,
            )
            if row.tflops is not None:
                axis.text(x, value, f" {row.tflops:.3g}", ha="center", va="bottom", rotation=90, fontsize=6.5, color=INK)
    if by_floor:
        axis.axhline(1.0, color="#b3261e", linewidth=1.2, label="floor: max(FLOPs / R, bytes / W)")
    axis.set_ylim(0, max(1.25 if by_floor else 0.0, 1.22 * tallest))
    axis.set_ylabel("fraction of the floor" if by_floor else "TFLOP/s", color=INK)
    axis.set_title(f"{title}   (higher is faster; on the bars: TFLOP/s; -: no figure)", loc="left", fontsize=10, color=INK)
    axis.set_xticks(
        range(len(cases)), cases, rotation=0 if len(cases) <= 6 else 20, ha="center" if len(cases) <= 6 else "right", fontsize=9
    )
    axis.set_xlim(-0.6, len(cases) - 0.4)
    axis.grid(axis="y", color="#e5e5e5")
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _title(report: Report) -> str:
    head = report.header
    sizes = f"batch {head.get('batch')}, {head.get('heads')} heads, dimension {head.get('dim')}, {head.get('dtype')}"
    return f"gdpa bench: {head.get('device')}; {sizes}"
