"""What a run leaves: its rows, the header that says where they come from, and the JSON file that holds both."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gdpa.bench.cases import MODES
from gdpa.bench.providers import in_order
from gdpa.bench.timing import Rates
from gdpa.errors import GdpaError
from gdpa.files import replacing

# Lists beside the rows, in the file where they were asked for.
EXTRAS = ("cold", "graph", "schedule")


@dataclass
class Row:
    """One (case, mode, activation, provider). A field is None where there is no figure; `note` then says why."""

    case: str
    mode: str  # forward, backward, or both: forward and backward as one
    activation: str
    provider: str
    ms: float | None = None
    spread: float | None = None  # interquartile range / median
    tflops: float | None = None
    floor_ms: float | None = None
    fraction_of_floor: float | None = None
    R: float | None = None  # TFLOP/s of the matmul that the floor rests on, in the row's own rounds
    R_rested: float | None = None  # the same matmul's by itself, where R is of those between the kernels
    host_us: float | None = None
    peak_bytes: int | None = None
    error: float | None = None  # relative, in the Frobenius norm, against the float64 oracle: the worst tensor's
    note: str | None = None
    failed: bool = field(default=False, repr=False)  # a wrong result or an unexpected error, as opposed to an empty cell

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.case, self.mode, self.activation, self.provider

    def add_note(self, text: str | None) -> None:
        if text:
            self.note = f"{self.note}; {text}" if self.note else text

    def fail(self, reason: str) -> None:
        """No figure, for this reason."""
        self.note, self.failed = reason, not reason.startswith("out of memory")

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Row:
        """From a row of a file that `load` has accepted."""
        return cls(**{key: facts[key] for key in KEYS if key in facts})

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        del row["failed"]
        return row


KEYS = tuple(f.name for f in fields(Row) if f.name != "failed")
# Files that were written before rows had these are read too.
LATER_KEYS = ("R", "R_rested")


@dataclass
class Report:
    header: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    cold: list[dict[str, Any]] = field(default_factory=list)
    graph: list[dict[str, Any]] = field(default_factory=list)
    schedule: list[dict[str, Any]] = field(default_factory=list)
    rates: list[Rates] = field(default_factory=list)  # of every group of rounds

    def add(self, row: Row) -> None:
        """One row per (case, mode, activation, provider): a new one takes the place of an older one."""
        self.rows = [other for other in self.rows if other.key != row.key]
        self.rows.append(row)

    def put(self, name: str, row: dict[str, Any]) -> None:
        """Add to one of the lists beside the rows, in the place of an older one of the same case, mode, activation and provider."""

        def key(facts: dict[str, Any]) -> tuple[Any, ...]:
            return tuple(facts.get(part) for part in ("case", "mode", "activation", "provider"))

        setattr(self, name, [*(other for other in getattr(self, name) if key(other) != key(row)), row])

    def ordered(self) -> list[Row]:
        """The rows by case, activation, mode and provider: those of a resumed run come in any order."""
        cases, activations = (list(dict.fromkeys(getattr(row, name) for row in self.rows)) for name in ("case", "activation"))
        names = in_order(row.provider for row in self.rows)

        def place(row: Row) -> tuple[int, ...]:
            modes: tuple[str, ...] = MODES
            return cases.index(row.case), activations.index(row.activation), modes.index(row.mode), names.index(row.provider)

        return sorted(self.rows, key=place)

    def as_json(self) -> dict[str, Any]:
        header = dict(self.header)
        if self.rates:
            rested = [rates.rested / 1e12 for rates in self.rates if rates.rested is not None]
            header["R"] = _range([rates.matmul / 1e12 for rates in self.rates], "TFLOP/s")
            header["R_rested"] = _range(rested, "TFLOP/s") if rested else None
            header["W"] = _range([rates.bandwidth / 1e12 for rates in self.rates], "TB/s")
        data: dict[str, Any] = {"header": header, "rows": [row.as_json() for row in self.rows]}
        return data | {name: getattr(self, name) for name in EXTRAS if getattr(self, name)}

    def write(self, path: Path) -> None:
        """Replace the file in one step, so that an interrupted run leaves whole JSON."""
        with replacing(path) as partial:
            partial.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    @property
    def failed(self) -> bool:
        return any(row.failed for row in self.rows)


def _range(values: list[float], unit: str) -> dict[str, Any]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values), "unit": unit}


def load(path: Path, argument: str) -> dict[str, Any]:
    """A file that `Report.write` has made; `argument` is the option that named it."""
    data: dict[str, Any]
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise GdpaError(f"{argument}: expected a file that can be read, got {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise GdpaError(f"{argument}: expected JSON, got {path}: {error}") from None
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not isinstance(data.get("header"), dict):
        raise GdpaError(f"{argument}: expected a file of gdpa bench, {{header, rows}}, got {path}")
    for row in rows:
        if not isinstance(row, dict) or not set(KEYS) - set(LATER_KEYS) <= set(row):
            raise GdpaError(f"{argument}: expected rows with {', '.join(KEYS)}, got {path}")
        for key in KEYS:
            if not _fits(key, row.get(key)):
                raise GdpaError(f"{argument}: expected {_WHAT[key]} for {key} in every row, got {row[key]!r} in {path}")
    for name in ("cold", "graph", "schedule"):
        if not isinstance(data.get(name, []), list):
            raise GdpaError(f"{argument}: expected a list for {name}, got {data[name]!r} in {path}")
    head = data["header"]
    if not isinstance(head.get("cases", {}), dict) or not all(_is_a_case(case) for case in head.get("cases", {}).values()):
        raise GdpaError(f"{argument}: expected a case's sizes by its name for cases, got {head['cases']!r} in {path}")
    for name in ("R", "R_rested", "W"):
        if head.get(name) is not None and not _is_a_rate(head[name]):
            raise GdpaError(f"{argument}: expected median, lowest, highest and unit for {name}, got {head[name]!r} in {path}")
    clocks = head.get("clocks") or {}
    if not isinstance(clocks, dict) or not all(_is_a_number(value) for value in clocks.values()):
        raise GdpaError(f"{argument}: expected numbers by their names for clocks, got {clocks!r} in {path}")
    return data


_NAMES = ("case", "activation", "provider")
_WHAT = dict.fromkeys(KEYS, "a number") | dict.fromkeys((*_NAMES, "note"), "a text") | {"mode": "forward, backward or both"}


def _fits(key: str, value: Any) -> bool:
    if key == "mode":
        return value in ("forward", "backward", "both")
    if key in _NAMES or (key == "note" and value is not None):
        return isinstance(value, str)
    return _is_a_number(value)


def _is_a_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_a_rate(value: Any) -> bool:
    numbers = ("median", "lowest", "highest")
    return (
        isinstance(value, dict)
        and isinstance(value.get("unit"), str)
        and all(value.get(name) is not None and _is_a_number(value[name]) for name in numbers)
    )


def _is_a_case(value: Any) -> bool:
    """What `run.summary` makes, as far as tables read it."""
    if not isinstance(value, dict) or not {"batch", "heads", "dim", "rows"} <= set(value):
        return False
    flops, moved = value.get("flops"), value.get("bytes")
    if not isinstance(flops, dict) or not isinstance(moved, dict) or not set(flops) <= set(moved):
        return False
    return all(isinstance(count, int | float) for count in (*flops.values(), *moved.values()))


# What must be the same for rows of two runs to stand in one table.
SAME = ("device", "dtype", "batch", "heads", "dim", "seed", "versions", "commit")


def resume(path: Path, header: dict[str, Any]) -> Report:
    """The rows that an earlier run left in the file, under this run's header; cells without a figure are tried again."""
    if not path.exists():
        return Report(header)
    data = load(path, "--resume")
    for name in SAME:
        old, new = data["header"].get(name), header[name]
        if old != new:
            raise GdpaError(f"--resume: expected {path} to hold {name} {new!r} as this run, got {old!r}; give another --json file")
    rows = [Row.of(row) for row in data["rows"] if row["ms"] is not None]
    kept = {name: data.get(name, []) for name in EXTRAS}
    commands = f"{data['header'].get('command')}; then {header['command']}"
    result = Report({**header, "command": commands, "cases": data["header"].get("cases", {})}, rows, **kept)
    matmul, bandwidth, rested = (data["header"].get(name) for name in ("R", "W", "R_rested"))
    if matmul and bandwidth:
        # The file has the range of the earlier rounds, not each of them.
        result.rates = [
            Rates(matmul[name] * 1e12, bandwidth[name] * 1e12, rested[name] * 1e12 if rested else None)
            for name in ("lowest", "median", "highest")
        ]
    return result
