"""The log of a run as a picture: NE, AUC and samples/s over the steps, and the held-out scores."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gdpa.files import replacing
from gdpa.train.log import lines

# From so many readings on, a running mean says more than they do.
MANY = 20
INK, TRAINING, HELD_OUT, PALE = "#333333", "#0b5fa5", "#b3261e", "#a9c6df"


def write(log: Path, path: Path) -> None:
    """Draw the log to a PNG, in one step: a process killed meanwhile leaves the picture before it."""
    with replacing(path) as partial:
        figure(lines(log)).savefig(partial, dpi=130, format="png")


def figure(found: list[dict[str, Any]]) -> Figure:
    readings = [line for line in found if line["event"] == "steps"]
    end = next((line for line in found if line["event"] == "end"), None)
    result = Figure(figsize=(8.0, 7.2), layout="constrained")
    axes = result.subplots(3, 1, sharex=True)
    result.suptitle(_title(found), x=0.01, ha="left", fontsize=11, color=INK)
    steps = [line["step"] for line in readings]
    for axis, key, label, better in (
        (axes[0], "ne", "NE", "lower is better; 1 is the base rate"),
        (axes[1], "auc", "AUC", "higher is better; 0.5 is chance"),
        (axes[2], "samples_per_s", "samples/s", "higher is faster"),
    ):
        _curve(axis, steps, [_number(line.get(key)) for line in readings])
        axis.set_title(f"{label}   ({better})", loc="left", fontsize=10, color=INK)
        if end is not None and key != "samples_per_s" and end.get(key) is not None:
            axis.axhline(
                end[key], color=HELD_OUT, linewidth=1.2, linestyle=(0, (4, 2)), label=f"held out, at the end: {end[key]:.4f}"
            )
            # The range may be that of the readings, which a model that learned them by heart leaves far from what is held out.
            low, high = axis.get_ylim()
            margin = 0.05 * (high - low)
            axis.set_ylim(min(low, end[key] - margin), max(high, end[key] + margin))
        axis.legend(loc="upper right" if key == "ne" else "lower right", fontsize=8, frameon=False)
        _style(axis)
    axes[2].set_ylim(bottom=0)
    axes[2].set_xlim(left=0)
    axes[2].set_xlabel("step", fontsize=9, color=INK)
    return result


def _curve(axis: Axes, steps: list[int], values: list[float]) -> None:
    """The readings; where they are many, pale, and their running mean over a tenth of the run strong."""
    if len(steps) < MANY:
        axis.plot(steps, values, color=TRAINING, linewidth=1.8, marker="o", markersize=3, label="training batches")
        return
    axis.plot(steps, values, color=PALE, linewidth=1.0, label="training batches")
    smooth, reach = [], len(values) // 20
    for place in range(len(values)):
        near = [value for value in values[max(0, place - reach) : place + reach + 1] if value == value]
        smooth.append(sum(near) / len(near) if near else math.nan)
    axis.plot(steps, smooth, color=TRAINING, linewidth=1.8, label="their running mean")
    known = sorted(value for value in values if value == value)
    if known:
        # The first readings of NE may be far above the others, which would press these onto one line.
        low, high = known[0], known[int(0.95 * (len(known) - 1))]
        margin = 0.15 * (high - low) or 0.01
        axis.set_ylim(low - margin, high + margin)


def _style(axis: Axes) -> None:
    axis.tick_params(labelsize=8)
    axis.grid(color="#e5e5e5")
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _title(found: list[dict[str, Any]]) -> str:
    head = next((line for line in found if line["event"] in ("start", "resume")), {})
    config = head.get("config", {})
    model = config.get("model", {}).get("model", "")
    data = head.get("data", {}).get("kind", "")
    history = ", without histories" if config.get("no_history") else ""
    return f"gdpa train: {model}, {data} data{history}, batches of {config.get('batch_size')}; {head.get('device')}"
