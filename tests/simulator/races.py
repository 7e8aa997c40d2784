"""Who may touch what when: clocks, and the accesses they are compared with.

Each partition and each mbarrier is an actor, with a count of its own that rises at each of its releases. A clock holds, for every actor,
the last of its counts that is known to be over. Arrivals hand clocks on, waits take them over. An access, at its actor's count, came
before another one if the clock of that says so. What a copy or product does has no count until somebody waited for it: whatever conflicts
with it before is a race.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Fault(AssertionError):
    """The kernel did what the device punishes, or may."""


class Epoch:
    """When an access was over: an actor's count; none while it is under way."""

    __slots__ = ("actor", "count")

    def __init__(self, actor: int | None = None, count: int = 0) -> None:
        self.actor, self.count = actor, count

    def end(self, actor: int, count: int) -> None:
        self.actor, self.count = actor, count

    def is_before(self, clock: np.ndarray) -> bool:
        return self.actor is not None and bool(clock[self.actor] >= self.count)


class Access:
    """`fence` is when the copy engine and products may see what threads wrote; None of other accesses."""

    __slots__ = ("epoch", "fence", "kind", "place", "what")

    def __init__(self, kind: str, place: Any, epoch: Epoch, what: str, fence: Epoch | None) -> None:
        self.kind, self.place, self.epoch, self.what, self.fence = kind, place, epoch, what, fence


READ, WRITE, ADD = "read", "write", "add"


def conflict(one: str, other: str) -> bool:
    """Additions by the copy engine go in any order."""
    return one != other if ADD in (one, other) else WRITE in (one, other)


class History:
    """The accesses to one piece of memory that others still have to come after."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.accesses: list[Access] = []

    def note(
        self,
        kind: str,
        place: Any,
        clock: np.ndarray,
        epoch: Epoch,
        what: str,
        fence: Epoch | None = None,
        by_threads: bool = False,
    ) -> None:
        """An access to `place` by someone who knows what `clock` says. A place says whether it `overlaps` and `covers` another."""
        kept = []
        for before in self.accesses:
            if not place.overlaps(before.place):
                kept.append(before)
                continue
            if conflict(kind, before.kind):
                if not before.epoch.is_before(clock):
                    state = "is still under way" if before.epoch.actor is None else "is not known to be over"
                    raise Fault(f"race on {self.name}: {what} ({kind}), while {before.what} ({before.kind}) {state}")
                if before.fence is not None and not by_threads and not before.fence.is_before(clock):
                    raise Fault(f"{self.name}: {what} ({kind}) sees what {before.what} wrote, without a fence before")
                if kind != READ and place.covers(before.place):
                    continue  # who comes after this one comes after that
            elif (
                before.kind == kind
                and before.epoch.actor is not None
                and before.epoch.actor == epoch.actor
                and place.covers(before.place)
            ):
                continue
            kept.append(before)
        kept.append(Access(kind, place, epoch, what, fence))
        self.accesses = kept


class Chunks:
    """Part of shared memory, 16 bytes at a time."""

    __slots__ = ("covered", "mask", "overlapping")

    def __init__(self, mask: np.ndarray) -> None:
        self.mask = mask
        self.overlapping: dict[Chunks, bool] = {}
        self.covered: dict[Chunks, bool] = {}

    def overlaps(self, other: Chunks) -> bool:
        if other not in self.overlapping:
            self.overlapping[other] = bool((self.mask & other.mask).any())
        return self.overlapping[other]

    def covers(self, other: Chunks) -> bool:
        if other not in self.covered:
            self.covered[other] = not bool((other.mask & ~self.mask).any())
        return self.covered[other]


class Box:
    """Rows and columns of a tensor."""

    __slots__ = ("columns", "rows")

    def __init__(self, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        self.rows, self.columns = rows, columns

    def overlaps(self, other: Box) -> bool:
        return (
            self.rows[0] < other.rows[1]
            and other.rows[0] < self.rows[1]
            and self.columns[0] < other.columns[1]
            and other.columns[0] < self.columns[1]
        )

    def covers(self, other: Box) -> bool:
        return (
            self.rows[0] <= other.rows[0]
            and other.rows[1] <= self.rows[1]
            and self.columns[0] <= other.columns[0]
            and other.columns[1] <= self.columns[1]
        )
