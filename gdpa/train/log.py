"""log.jsonl: a line when a run starts or is resumed, a line for every few steps, a line at its end.

    {"event": "start", "step": 0, "command": ..., "config": ..., ...}
    {"event": "steps", "step": 20, "losses": [...the 10 steps before step 20...], "ne": ..., "auc": ..., "samples_per_s": ...}
    {"event": "resume", "step": 40, ...}
    {"event": "end", "step": 300, "ne": ..., "auc": ..., "examples": ..., "samples_per_s": ...}

The last line of a run that did not come to its end is one of "interrupted" or "stopped".

A resumed run drops the lines after its checkpoint: the losses in the file are those of one run, however often it was stopped.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TextIO

from gdpa.errors import GdpaError
from gdpa.files import replacing

ENDS = ("end", "interrupted", "stopped")


class Log:
    """The file, open at its end."""

    def __init__(self, path: Path, step: int = 0) -> None:
        """Open the file of a run that goes on from `step`."""
        old = lines(path) if step and path.exists() else []
        kept = [line for line in old if line["event"] not in ENDS and line["step"] <= step]
        with replacing(path) as partial:
            partial.write_text("".join(_text(line) for line in kept))
        try:
            self._file: TextIO = path.open("a")
        except OSError as error:
            raise GdpaError(f"{path}: could not be written: {error}") from error

    def write(self, event: str, step: int, **facts: Any) -> None:
        try:
            self._file.write(_text({"event": event, "step": step, **facts}))
            self._file.flush()
        except OSError as error:
            raise GdpaError(f"{self._file.name}: the line of step {step} could not be written: {error}") from error

    def close(self) -> None:
        self._file.close()


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log. A last one that a killed process left unfinished is not among them."""
    found: list[dict[str, Any]] = []
    try:
        parts = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise GdpaError(f"{path}: expected a log that can be read: {error}") from error
    for number, part in enumerate(parts[:-1], 1):  # the last part has no line end: empty, or unfinished
        try:
            line = json.loads(part)
            found.append({**line, "event": line["event"], "step": int(line["step"])})
        except (ValueError, TypeError, KeyError) as error:
            raise GdpaError(f"{path}: line {number}: expected a JSON object with event and step, got {part[:80]!r}") from error
    return found


def losses(path: Path) -> list[float]:
    """The loss of every step in a log."""
    return [loss for line in lines(path) if line["event"] == "steps" for loss in line["losses"]]


def _text(line: dict[str, Any]) -> str:
    """One line of JSON, which has no NaN: null stands for it."""
    return json.dumps(_plain(line), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
