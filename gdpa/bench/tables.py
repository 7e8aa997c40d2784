"""A report as text: one table for each case and activation, with the notes under it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gdpa.bench.cases import Case, Mode
from gdpa.bench.providers import ELSEWHERE, label
from gdpa.bench.report import Report, Row

LEGEND = {
    "spread": "spread: interquartile range / median",
    "/floor": "/floor: the share of what this machine's own matmul and copy, timed in the same rounds, allow",
    "vs eager": "vs eager: times as fast as plain PyTorch on padded tensors",
    "vs here": "vs here: times as fast as the same backend of this version",
    "host": "host: from call to return, of calls in a row",
    "memory": "memory: peak beyond the inputs, backward with its forward",
    "error": "error: relative, against the float64 oracle",
}
# Where the header has two R.
FLOOR_BETWEEN = (
    f"{LEGEND['/floor']}; R is the matmul's right behind each provider's kernels, at the clocks that these leave it, "
    "and R_rested that of the matmul by itself, which the floor does not use"
)


def legend(report: Report) -> dict[str, str]:
    """What the columns are, by their names."""
    return LEGEND | ({"/floor": FLOOR_BETWEEN} if report.as_json()["header"].get("R_rested") else {})


def show(report: Report, console: Console) -> None:
    """One table per case and activation."""
    cases = report.header.get("cases", {})
    shown: set[str] = set()
    for (case, activation), group in groupby(report.ordered(), key=lambda row: (row.case, row.activation)):
        rows = list(group)
        console.print(f"[bold]{case}, {activation}[/bold]")
        if case in cases:
            console.print(f"[dim]{describe(cases[case])}[/dim]")
        table = _fitting(rows, console)
        shown |= {str(column.header) for column in table.columns}
        print_whole(table, console)
        for text, about in _notes(rows).items():
            failed = any(row.failed for row in rows if row.note == text)
            console.print(f"{', '.join(about)}: {text}", style="red" if failed else "dim", markup=False)
        console.print()
    _show_extras(report, console)
    if report.rows:
        console.print("[dim]" + "\n".join(text for name, text in legend(report).items() if name in shown) + "[/dim]")


def _notes(rows: list[Row]) -> dict[str, list[str]]:
    """Each note once, with the providers it is about, and their mode where it is not about all of them."""
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            everywhere = all(other.note == row.note for other in rows if other.provider == row.provider)
            about = row.provider if everywhere else f"{row.provider} {row.mode}"
            if about not in notes.setdefault(row.note, []):
                notes[row.note].append(about)
    return notes


# What a narrow terminal does without, first to last; the JSON has it all.
DROPPED = ("spread", "host", "memory")
NOTE_WIDTH = 60  # of a column of notes, beyond which they wrap


def _fitting(rows: list[Row], console: Console) -> Table:
    for count in range(len(DROPPED) + 1):
        table = _table(rows, DROPPED[:count])
        if _width(table, console) <= console.width:
            break
    return table


def _width(table: Table, console: Console) -> int:
    boundless = console.options.update(width=500)  # a measurement never exceeds the width it is given
    return console.measure(table, options=boundless).maximum


def print_whole(table: Table, console: Console) -> None:
    """Print it with all its figures: where they do not fit a terminal wraps the lines, which is better than cutting numbers off."""
    width = console.width
    console.width = max(width, _width(table, console))
    try:
        console.print(table)
    finally:
        console.width = width


def _table(rows: list[Row], without: tuple[str, ...]) -> Table:
    """A column that nobody fills is left out."""
    small = max((row.tflops or 0 for row in rows), default=0) < 1
    unit, per_tflops = ("GFLOP/s", 1e3) if small else ("TFLOP/s", 1)
    times = {(row.mode, row.provider): row.ms for row in rows}

    def against(row: Row, provider: str, digits: int) -> str:
        baseline = times.get((row.mode, provider))
        return f"{baseline / row.ms:.{digits}f}x" if baseline and row.ms and row.provider != provider else ""

    columns: dict[str, Callable[[Row], str]] = {
        "time": lambda row: duration(row.ms),
        "spread": lambda row: "" if row.spread is None else f"{row.spread:.0%}",
        "vs eager": lambda row: against(row, "eager", 2),
        "vs here": lambda row: against(row, row.provider.split(ELSEWHERE)[0], 3),
        unit: lambda row: "" if row.tflops is None else figures(row.tflops * per_tflops),
        "/floor": lambda row: "" if row.fraction_of_floor is None else f"{row.fraction_of_floor:.2f}",
        "host": lambda row: "" if row.host_us is None else f"{row.host_us:.0f} us",
        "memory": lambda row: size(row.peak_bytes),
        "error": lambda row: "" if row.error is None else f"{row.error:.1e}",
    }
    filled = [name for name, text in columns.items() if name == "time" or any(text(row) for row in rows)]
    columns = {name: columns[name] for name in filled if name not in without}
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("", "provider"):
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for mode, group in groupby(rows, key=lambda row: row.mode):
        for index, row in enumerate(group):
            style = "red" if row.failed else ("dim" if row.ms is None else None)
            cells = [text(row) for text in columns.values()]
            table.add_row(mode if index == 0 else "", label(row.provider), *cells, style=style)
        table.add_section()
    return table


def _show_extras(report: Report, console: Console) -> None:
    titles = {
        "cold": "cold: the first call of a process, caches empty; with its backward unless forward alone is measured",
        "graph": "replay of a CUDA graph",
        "schedule": "building gdpa's tile list, nothing cached",
    }
    for name, title in titles.items():
        rows = getattr(report, name)
        if not rows:
            continue
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title=title, title_justify="left")
        keys = [key for key in rows[0] if any(row[key] is not None for row in rows)]
        for key in keys:
            name = "time" if key == "ms" else key.replace("_", " ")
            table.add_column(name, justify="right" if key == "ms" else "left", max_width=NOTE_WIDTH)
        for row in rows:
            table.add_row(*(_cell(key, row[key]) for key in keys))
        print_whole(table, console)


def _cell(key: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return duration(value) if key == "ms" else f"{value:.3f}"
    return str(value)


def list_cases(cases: Iterable[Case], itemsize: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("case", "queries", "keys"):
        table.add_column(name, no_wrap=True)
    modes: tuple[Mode, ...] = ("forward", "backward")
    for mode in modes:
        table.add_column(f"{mode} GFLOP", justify="right", no_wrap=True)
        table.add_column("bytes", justify="right", no_wrap=True)
    for case in cases:
        varying = {"dense": f"{case.length}"}.get(case.lengths, f"{case.lengths} to {case.length}")
        queries, keys = {
            "self": (varying, "the same"),
            "causal": (varying, "up to the query"),
            "pffn": (varying, f"{case.fixed} each"),
            "pma": (f"{case.fixed} shared", varying),
        }[case.kind]
        work = [text for mode in modes for text in (f"{case.flops(mode) / 1e9:,.1f}", size(case.bytes(mode, itemsize)))]
        table.add_row(case.name, queries, keys, *work)
    return table


def describe(facts: dict[str, object]) -> str:
    """One line about a case, from the header."""
    flops, moved = facts["flops"], facts["bytes"]
    assert isinstance(flops, dict)
    assert isinstance(moved, dict)
    modes = "; ".join(f"{mode} {_work(flops[mode])}, {size(moved[mode])}" for mode in flops)
    return f"batch {facts['batch']}, {facts['heads']} heads, dimension {facts['dim']}, {facts['rows']} rows; {modes}"


def _work(flops: float) -> str:
    return f"{figures(flops / 1e9)} GFLOP" if flops < 1e12 else f"{figures(flops / 1e12)} TFLOP"


def figures(value: float) -> str:
    """Three figures, or all of a larger number: 1234, where the format `.3g` has 1.23e+03."""
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def duration(ms: float | None) -> str:
    """Of what is measured; a difference may be negative."""
    if ms is None:
        return "-"
    large = abs(ms)
    return f"{ms / 1e3:.2f} s" if large >= 999.5 else f"{ms:.3g} ms" if large >= 0.9995 else f"{ms * 1e3:.3g} us"


def size(count: int | None) -> str:
    if count is None:
        return ""
    value = float(count)
    for unit in ("B", "KB", "MB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{figures(value)} GB"


def rate(facts: dict[str, Any]) -> str:
    """R, R_rested or W of a header, with its range."""
    small = facts["median"] < 1
    values = [facts[name] * (1e3 if small else 1) for name in ("median", "lowest", "highest")]
    unit = facts["unit"].replace("T", "G", 1) if small else facts["unit"]
    median, lowest, highest = (figures(value) for value in values)
    return f"{median} {unit} ({lowest} to {highest} over the run)"


def lines(facts: Iterable[tuple[str, str]]) -> str:
    """`name   value` lines with the values aligned."""
    pairs = list(facts)
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs)
