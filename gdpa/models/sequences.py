"""A batch's histories as the packed sequences that a model reads: one, or one for each group of event types.

Nothing here waits for a GPU: sizes come from `History.counts`, which `Batch.to` brings along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gdpa.data.schema import Batch


class Events(NamedTuple):
    """One packed sequence per example, oldest event first."""

    offsets: Tensor  # (B + 1,) int32
    items: Tensor  # (T, embedding), looked up
    types: Tensor  # (T,) int64, the index of the event's type in its group
    ages: Tensor  # (T,) float32, seconds before the request
    values: Tensor | None  # (T,) float32
    longest: int  # an upper bound of the lengths


class Arrangement(NamedTuple):
    """All events of a batch, the sequences of the first group first."""

    offsets: tuple[Tensor, ...]  # of each group, (B + 1,) int32
    sizes: tuple[int, ...]  # events in each group
    longest: int
    items: Tensor  # (T,) ids
    types: Tensor
    ages: Tensor
    values: Tensor | None

    def sequences(self, looked_up: Tensor) -> tuple[Events, ...]:
        """The groups' sequences, given the rows of `items` in the table; views."""
        items, types, ages = (column.split(self.sizes) for column in (looked_up, self.types, self.ages))
        values: Sequence[Tensor | None] = [None] * len(self.sizes) if self.values is None else self.values.split(self.sizes)
        return tuple(
            Events(self.offsets[group], items[group], types[group], ages[group], values[group], self.longest)
            for group in range(len(self.sizes))
        )


def arrange(batch: Batch, group_of: Sequence[int], lookup: Tensor) -> Arrangement:
    """The events of `batch` by group. Type t belongs to group group_of[t] = lookup[0, t], where it has the index lookup[1, t]."""
    history, groups = batch.history, max(group_of) + 1
    events, examples, device = history.items.shape[0], len(batch), history.offsets.device
    example = rows_to_sequences(history.offsets, events)
    ages = (batch.request_timestamps[example] - history.timestamps).to(torch.float32)
    counts = history.counts()
    if groups == 1:
        return Arrangement((history.offsets,), (events,), counts.longest, history.items, history.types, ages, history.values)
    key = lookup[0][history.types] * examples + example  # ascending within each group, so a stable sort keeps the order of time
    ordered, order = key.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(groups * examples + 1, device=device)).to(torch.int32)
    offsets = tuple(bounds[group * examples : (group + 1) * examples + 1] - bounds[group * examples] for group in range(groups))
    sizes = [0] * groups
    for kind, count in enumerate(counts.per_type):
        sizes[group_of[kind]] += count
    values = None if history.values is None else history.values[order]
    types = lookup[1][history.types[order]]
    return Arrangement(offsets, tuple(sizes), counts.longest, history.items[order], types, ages[order], values)


def rows_to_sequences(offsets: Tensor, rows: int) -> Tensor:
    """(rows,) int64: the sequence that each packed row belongs to."""
    row = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, row, right=True) - 1


def prepend(values: Tensor, offsets: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """tokens (B, n, width) before the rows of each packed sequence (T, width): the joined rows (T + B n, width), and their offsets."""
    batch, count = tokens.shape[:2]
    joined = offsets + count * torch.arange(batch + 1, device=offsets.device, dtype=offsets.dtype)
    of_tokens = (joined[:-1, None] + torch.arange(count, device=offsets.device)).flatten()
    of_values = torch.arange(values.shape[0], device=offsets.device)
    of_values = of_values + count * (rows_to_sequences(offsets, values.shape[0]) + 1)
    places = torch.cat((of_tokens, of_values))
    sources = torch.cat((tokens.flatten(0, 1).to(values.dtype), values))
    # Its gradient is a gather, where that of a gather would add rows up. No autograd.Function that writes into a new tensor: torch 2.11
    # loses the gradient of one when it compiles it.
    return sources.new_empty(sources.shape).index_copy(0, places, sources), joined


def end_rows(offsets: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Where the first `first` rows of each sequence are, which all have them, and the last `last` of the others, the newest at the end:
    (B, first + last) rows, and whether there is one; where there is none, the row is the sequence's first."""
    starts, stops = offsets[:-1, None].long(), offsets[1:, None].long()
    newest = stops + torch.arange(-last, 0, device=offsets.device)
    there = newest >= starts + first
    rows = torch.cat((starts + torch.arange(first, device=offsets.device), torch.where(there, newest, starts)), dim=1)
    return rows, torch.cat((torch.ones_like(rows[:, :first], dtype=torch.bool), there), dim=1)
