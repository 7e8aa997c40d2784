"""What a run shows while it trains: a live bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Lines of a run that is not shown in a terminal come no faster than this.
LINE_SECONDS = 5.0
# Narrower terminals have no room for the bar itself and the time left beside the figures.
WIDE = 110


@dataclass(frozen=True)
class Reading:
    """The figures of the steps since the one before: of all ranks."""

    step: int
    ne: float
    auc: float
    samples_per_s: float
    tokens_per_s: float
    mfu: float | None  # model FLOPs / time / the rate of a large matrix product here; None where that rate is not known

    def text(self) -> str:
        parts = [f"NE {self.ne:.4f}", f"AUC {self.auc:.4f}"]
        parts += [f"{_amount(self.samples_per_s)} samples/s", f"{_amount(self.tokens_per_s)} tokens/s"]
        return " ".join(parts if self.mfu is None else [*parts, f"MFU {_share(self.mfu)}"])


class Display:
    """Shows the steps of a run; use it in a `with`."""

    def __init__(self, console: Console, start: int, steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._steps, self._clock = console, steps, clock
        self._last_line = -math.inf
        self._bar: Progress | None = None
        if console.is_terminal:
            figures = (MofNCompleteColumn(), TextColumn("{task.description}"))
            wide = console.width >= WIDE
            self._bar = Progress(
                *((BarColumn(bar_width=20), *figures, TimeRemainingColumn()) if wide else figures), console=console
            )
            self._task = self._bar.add_task("starting", total=steps, completed=start)

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def read(self, reading: Reading) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=reading.step, description=reading.text())
            return
        now = self._clock()
        if now - self._last_line >= LINE_SECONDS or reading.step == self._steps:
            self._last_line = now
            self.say(f"step {reading.step}/{self._steps}  {reading.text()}")

    def say(self, text: str) -> None:
        """A line that stays, above the bar where there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _amount(number: float) -> str:
    """About three digits, with a letter for the thousands: 12.3k."""
    if not math.isfinite(number):
        return "-"
    size, letter = next((pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if number >= pair[0]), (1.0, ""))
    scaled = number / size
    return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f}{letter}"


def _share(part: float) -> str:
    return f"{100 * part:.1f}%" if part >= 0.001 else f"{100 * part:.1g}%"
