"""The rows as a picture: one panel per mode and activation, bars per case grouped by provider, the hardware's floor as a line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gdpa.bench.cases import MODES, SUFFIXES
from gdpa.bench.providers import ELSEWHERE, SOFTMAX, in_order, label
from gdpa.bench.report import Report, Row
from gdpa.bench.tables import figures
from gdpa.files import replacing

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
BARS, GAP = 52, 1.0  # bars in a line, and the space between groups in bars


def write(report: Report, path: Path) -> None:
    with replacing(path) as partial:
        figure(report).savefig(partial, format="png", dpi=150)


def png(report: Report) -> bytes:
    buffer = io.BytesIO()
    figure(report).savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def figure(report: Report) -> Figure:
    """Panels are broken into rows of about BARS bars, so that a page's width is enough for the full suite."""
    timed = [row for row in report.ordered() if row.ms is not None]
    names = in_order(row.provider for row in timed)
    modes: tuple[str, ...] = MODES
    by_floor = any(row.fraction_of_floor is not None for row in timed)
    panels = [
        (f"{mode}, {activation}", groups)
        for mode, activation in sorted(
            dict.fromkeys((row.mode, row.activation) for row in timed), key=lambda pair: modes.index(pair[0])
        )
        for groups in _lines([row for row in timed if (row.mode, row.activation) == (mode, activation)])
    ]
    count = max(len(panels), 1)
    widest = max((_width(groups) for _, groups in panels), default=0.0)
    # matplotlib's objects rather than pyplot: nothing global is touched, and nothing needs closing.
    result = Figure(figsize=(max(8.0, 1.2 + 0.25 * widest), 1.1 + 2.6 * count), layout="constrained")
    axes = result.subplots(count, 1, squeeze=False)[:, 0]
    result.suptitle(_title(report), x=0.01, ha="left", fontsize=11, color=INK)
    if not panels:
        axes[0].text(0.5, 0.5, "no row has a figure", ha="center", va="center", color=INK)
        axes[0].set_axis_off()
        return result
    tallest = max((row.fraction_of_floor if by_floor else row.tflops) or 0.0 for row in timed)
    small = max(row.tflops or 0.0 for row in timed) < 1
    for axis, (title, groups) in zip(axes, panels, strict=True):
        _panel(axis, title, groups, by_floor, small)
        axis.set_xlim(-0.5 - GAP, max(widest, 8.0) - 0.5)
        axis.set_ylim(0, max(1.3 if by_floor else 0.0, 1.3 * tallest))
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, text in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(text, handle)
    ordered = sorted(handles, key=lambda text: [*map(label, names), *handles].index(text))
    columns = min(len(ordered), max(3, int(result.get_figwidth() / 2.2)))
    keywords: dict[str, Any] = {"loc": "outside lower left", "ncols": columns, "frameon": False, "fontsize": 9}
    result.legend([handles[text] for text in ordered], ordered, **keywords)
    return result


def _lines(rows: list[Row]) -> list[list[list[Row]]]:
    """The rows of one panel as groups, one per case, broken into lines. A group has the providers that have a figure."""
    groups: list[list[Row]] = []
    for case in dict.fromkeys(row.case for row in rows):
        groups.append([row for row in rows if row.case == case])
    bars = sum(len(group) for group in groups)
    wanted = -(-bars // BARS)
    size = -(-len(groups) // wanted)
    return [groups[start : start + size] for start in range(0, len(groups), size)]


def _width(groups: list[list[Row]]) -> float:
    return sum(len(group) + GAP for group in groups)


def _panel(axis: Axes, title: str, groups: list[list[Row]], by_floor: bool, small: bool) -> None:
    unit, per_tflops = ("GFLOP/s", 1e3) if small else ("TFLOP/s", 1)
    if by_floor:
        axis.axhline(1.0, color="#b3261e", linewidth=1.2, label="floor: max(FLOPs / R, bytes / W)", zorder=1)
    start, ticks = 0.0, []
    for group in groups:
        for place, row in enumerate(group):
            value = (row.fraction_of_floor if by_floor else row.tflops) or 0.0
            base, elsewhere, _ = row.provider.partition(ELSEWHERE)
            hatch = "////" if base in SOFTMAX else "...." if elsewhere else None
            x, colour = start + place, COLOURS.get(base, INK)
            axis.bar(x, value, 0.9, color=colour, label=label(row.provider), hatch=hatch, edgecolor="white", linewidth=0, zorder=2)
            text = "" if row.tflops is None else figures(row.tflops * per_tflops)
            axis.annotate(
                text, (x, value), (0, 2), textcoords="offset points", rotation=90, ha="center", va="bottom",
                fontsize=7, color=INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3}, zorder=3,
            )  # fmt: skip
        ticks.append(start + (len(group) - 1) / 2)
        start += len(group) + GAP
    axis.set_ylabel("fraction of the floor" if by_floor else unit, color=INK, fontsize=9)
    axis.set_title(f"{title}   (higher is faster; on the bars {unit})", loc="left", fontsize=10, color=INK)
    axis.set_xticks(ticks, [_tick(group[0].case) for group in groups], fontsize=9)
    axis.tick_params(axis="y", labelsize=8)
    axis.tick_params(axis="x", length=0)
    axis.grid(axis="y", color="#e5e5e5")
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _tick(case: str) -> str:
    """A case under its bars; what its lengths are goes below, since jagged cases have few bars and long names."""
    head, dash, lengths = case.rpartition("-")
    return f"{head}\n{lengths}" if dash and f"-{lengths}" in SUFFIXES else case


def _title(report: Report) -> str:
    head = report.header
    sizes = f"batch {head.get('batch')}, {head.get('heads')} heads, dimension {head.get('dim')}, {head.get('dtype')}"
    return f"gdpa bench: {head.get('device')}; {sizes}"
