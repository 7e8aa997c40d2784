"""Two runs side by side: what got faster, what slower, and whether any row is slower beyond a threshold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gdpa.bench.providers import label
from gdpa.bench.report import load
from gdpa.bench.tables import duration, print_whole
from gdpa.errors import GdpaError

Key = tuple[str, str, str, str]

THRESHOLD = 0.05


def speedup(old: dict[str, Any], new: dict[str, Any]) -> float | None:
    """How many times as fast the new row is: by the fraction of the floor where both have one of the same kind, since the machine's
    own speed differs between runs, else by time. None where either has no figure."""
    if old["ms"] is None or new["ms"] is None:
        return None
    if old["fraction_of_floor"] and new["fraction_of_floor"] and same_floor(old, new):
        return float(new["fraction_of_floor"] / old["fraction_of_floor"])
    return float(old["ms"] / new["ms"])


def same_floor(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether the R of both is measured alike: a row that has R_rested too has the R of matmuls between the kernels, others have
    that of a matmul by itself."""
    return (old.get("R_rested") is None) == (new.get("R_rested") is None)


# Of a header; where these differ, so does what was measured.
OF_A_CALL = ("device", "threads", "dtype", "batch", "heads", "dim", "seed")


def compare(before: Path, after: Path, threshold: float, console: Console) -> int:
    """Print the comparison; 1 where a row is slower by more than the threshold, or has lost its figure, else 0."""
    if not 0 <= threshold < 1:
        raise GdpaError(f"--threshold: expected a fraction from 0 to 1, such as 0.05, got {threshold}")
    files = [load(path, "--compare") for path in (before, after)]
    old, new = ({_key(row): row for row in data["rows"]} for data in files)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("case", "mode", "activation", "provider"):
        table.add_column(name, no_wrap=True)
    for name in ("before", "after", "of floor", "faster by", ""):
        table.add_column(name, justify="right", no_wrap=True)
    slower, lost = [], []
    rows = [(key, speedup(old[key], new[key])) for key in old if key in new]
    for key, ratio in sorted(rows, key=lambda item: (item[1] is None, item[1] or 0.0)):
        before_row, after_row = old[key], new[key]
        if ratio is None:
            if before_row["ms"] is not None:
                lost.append(key)
            continue
        word, style = _word(ratio, threshold)
        if word == "slower":
            slower.append(key)
        floors = [row["fraction_of_floor"] for row in (before_row, after_row)]
        comparable = None not in floors and same_floor(before_row, after_row)
        shares = f"{floors[0]:.2f} -> {floors[1]:.2f}" if comparable else ""
        times = duration(before_row["ms"]), duration(after_row["ms"])
        table.add_row(*key[:3], label(key[3]), *times, shares, f"{ratio - 1:+.1%}", word, style=style)
    if table.row_count:
        print_whole(table, console)
    for name in OF_A_CALL:
        values = [data["header"].get(name) for data in files]
        if values[0] != values[1]:
            console.print(f"not the same {name}: {values[0]} in {before}, {values[1]} in {after}", style="red", markup=False)
    by_time = sum(ratio is not None and not same_floor(old[key], new[key]) for key, ratio in rows)
    if by_time:
        console.print(
            f"by time: {by_time} of the rows, since R is of matmuls between the kernels in one file, of a lone one in the other"
        )
    for key in lost:
        console.print(f"no figure any more: {_text(key)}: {new[key]['note']}", style="red", markup=False)
    for file, keys in ((before, [k for k in old if k not in new]), (after, [k for k in new if k not in old])):
        for key in keys:
            console.print(f"only in {file}: {_text(key)}", style="dim", markup=False)
    if not rows:
        raise GdpaError(
            f"--compare: expected rows of the same case, mode, activation and provider in {before} and {after}, got none"
        )
    console.print(f"{len(slower)} slower and {len(lost)} lost beyond {threshold:.0%}, of {len(rows)} rows in both")
    return 1 if slower or lost else 0


def _key(row: dict[str, Any]) -> Key:
    return row["case"], row["mode"], row["activation"], row["provider"]


def _text(key: Key) -> str:
    return " ".join(key)


def _word(ratio: float, threshold: float) -> tuple[str, str | None]:
    if ratio < 1 - threshold:
        return "slower", "red"
    return ("faster", "green") if ratio > 1 + threshold else ("same", "dim")
