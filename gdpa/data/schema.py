"""One training example, and a batch of them.

An example is a request to show something to someone: a label (0 or 1), a fixed number of dense features, named sparse features
(one id each, below the size of its vocabulary), the time of the request, and the user's history: events in the order of time, each
with an item id, an event type, a timestamp and, where the schema says so, a value. Timestamps are int64 seconds.

Histories are jagged, so a batch holds them packed: one row per event and offsets (B + 1,), as `gdpa.attention_varlen` takes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdpa.errors import GdpaError
from gdpa.jagged import offsets_from_lengths

LATEST = 2**61  # of timestamps, in seconds
FORMAT = 1  # of the JSON text; a file of another number is refused


@dataclass(frozen=True)
class Schema:
    """What an example holds.

    dense        number of dense features
    sparse       (name, vocabulary size) of each sparse feature; ids are 0 to size - 1
    items        vocabulary size of the items in histories
    event_types  their names; an event's type is an index into them
    values       whether each event carries a value (float32)
    candidate    the sparse feature that is an item of the same vocabulary as the history's (a model may share the table), if any

    Example:
        >>> Schema(dense=2, sparse=(("ad", 100), ("country", 30)), items=100, event_types=("view", "click"), candidate="ad").columns
        ('label', 'request_timestamp', 'dense', 'sparse_ad', 'sparse_country', 'history_item', 'history_type', 'history_timestamp')
    """

    dense: int
    sparse: tuple[tuple[str, int], ...]
    items: int
    event_types: tuple[str, ...]
    values: bool = False
    candidate: str | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.dense, 0):
            raise GdpaError(f"dense: expected a number of features, 0 or more, got {self.dense!r}")
        if not _is_count(self.items, 1):
            raise GdpaError(f"items: expected a vocabulary size of at least 1, got {self.items!r}")
        # Lists become tuples, so that a schema equals the one that its JSON text is read as.
        for pair in self.sparse:
            named = isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str) and pair[0]
            if not named or not _is_count(pair[1], 1):
                raise GdpaError(f"sparse: expected pairs of a name and a vocabulary size of at least 1, got {pair!r}")
        object.__setattr__(self, "sparse", tuple(tuple(pair) for pair in self.sparse))
        names = [name for name, _ in self.sparse]
        if len(set(names)) != len(names):
            raise GdpaError(f"sparse: expected distinct names, got {names}")
        types: Any = self.event_types
        if isinstance(types, list):
            types = tuple(types)
            object.__setattr__(self, "event_types", types)
        if (
            isinstance(types, str)
            or not types
            or len(set(types)) != len(types)
            or not all(isinstance(name, str) and name for name in types)
        ):
            raise GdpaError(f"event_types: expected distinct names, at least one, got {types!r}")
        if not isinstance(self.values, bool):
            raise GdpaError(f"values: expected True or False, got {self.values!r}")
        if self.candidate is not None and dict(self.sparse).get(self.candidate) != self.items:
            raise GdpaError(
                f"candidate: expected a sparse feature whose vocabulary is the history's ({self.items} items), got "
                f"{self.candidate!r} of {dict(self.sparse)}"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, as files have them and as errors call them."""
        return (
            "label",
            "request_timestamp",
            *(("dense",) if self.dense else ()),
            *(f"sparse_{name}" for name, _ in self.sparse),
            *("history_item", "history_type", "history_timestamp"),
            *(("history_value",) if self.values else ()),
        )

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": FORMAT,
                "dense": self.dense,
                "sparse": [list(pair) for pair in self.sparse],
                "items": self.items,
                "event_types": list(self.event_types),
                "values": self.values,
                "candidate": self.candidate,
            }
        )

    @staticmethod
    def from_json(text: str) -> Schema:
        """The schema that `to_json` wrote; anything else is a GdpaError."""
        try:
            fields: dict[str, Any] = json.loads(text)
            found = fields.pop("format")
            if found != FORMAT:
                raise GdpaError(f"schema: expected format {FORMAT}, got {found!r}")
            fields["sparse"] = tuple((name, size) for name, size in fields["sparse"])
            fields["event_types"] = tuple(fields["event_types"])
            return Schema(**fields)
        except GdpaError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GdpaError(f"schema: expected the JSON text of a schema, got {text[:200]!r} ({error!r})") from error


class Counts(NamedTuple):
    """What the host must know of histories to size buffers and launches."""

    longest: int  # events of the longest history
    per_type: tuple[int, ...]  # events of type 0, 1, ... in the whole batch, up to the last type that occurs


@dataclass(frozen=True)
class History:
    """The packed histories of a batch: events of all examples, one after the other, each example's oldest first."""

    offsets: Tensor  # (B + 1,) int32
    items: Tensor  # (T,) int64
    types: Tensor  # (T,) int64
    timestamps: Tensor  # (T,) int64, seconds
    values: Tensor | None = None  # (T,) float32
    known: Counts | None = None  # kept from the CPU by `to`, so that `counts` need not wait for a GPU

    @property
    def lengths(self) -> Tensor:
        """(B,) events per example, in the dtype of the offsets."""
        return self.offsets.diff()

    @property
    def events(self) -> dict[str, Any]:
        """The columns that have one row per event: tensors, by name."""
        columns = {"items": self.items, "types": self.types, "timestamps": self.timestamps, "values": self.values}
        return {name: column for name, column in columns.items() if column is not None}

    def counts(self) -> Counts:
        """The counts of these histories. Where they are on a GPU and were not brought there by `to`, this synchronises."""
        if self.known is not None:
            return self.known
        longest = int(self.lengths.max()) if self.offsets.shape[0] > 1 else 0
        return Counts(longest, tuple(torch.bincount(self.types).tolist()))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> History:
        known = self.known
        if torch.device(device).type == "cpu":
            known = None  # cheap to count there, and the tensors may be replaced
        elif self.offsets.device.type == "cpu":
            known = self.counts()
        offsets = self.offsets.to(device, non_blocking=non_blocking)
        events = {name: column.to(device, non_blocking=non_blocking) for name, column in self.events.items()}
        return History(offsets=offsets, **events, known=known)


@dataclass(frozen=True)
class Batch:
    """B examples.

    Example:
        >>> from gdpa.data.synthetic import SyntheticClicks
        >>> batch = SyntheticClicks(batch_size=8).batch(0)
        >>> len(batch), tuple(batch.dense.shape), tuple(batch.history.offsets.shape)
        (8, (8, 8), (9,))
    """

    labels: Tensor  # (B,) float32, 0 or 1
    request_timestamps: Tensor  # (B,) int64, seconds
    dense: Tensor  # (B, number of dense features) float32
    sparse: Tensor  # (B, number of sparse features) int64
    history: History

    def __len__(self) -> int:
        return self.labels.shape[0]

    @property
    def lengths(self) -> Tensor:
        """(B,) events per example."""
        return self.history.lengths

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same batch with every tensor on `device`."""
        columns = {name: column.to(device, non_blocking=non_blocking) for name, column in vars(self).items() if name != "history"}
        return Batch(**columns, history=self.history.to(device, non_blocking=non_blocking))

    def without_history(self) -> Batch:
        """The same examples with empty histories: what a model without them sees."""
        empty = {name: column[:0] for name, column in self.history.events.items()}
        return replace(self, history=History(offsets=torch.zeros_like(self.history.offsets), **empty, known=Counts(0, ())))

    def recent(self, limit: int) -> Batch:
        """The same examples with the newest `limit` events of each history. Reads the number of events that are left on the host."""
        if not _is_count(limit, 0):
            raise GdpaError(f"limit: expected a number of events, 0 or more, got {limit!r}")
        if self.history.known is not None and self.history.known.longest <= limit:
            return self
        lengths = self.lengths.long().clamp(max=limit)
        offsets = packed_offsets(lengths)
        kept = _spans(self.history.offsets[1:].long() - lengths, lengths, offsets)
        events = {name: column[kept] for name, column in self.history.events.items()}
        return replace(self, history=History(offsets=offsets, **events))

    def rows(self, start: int, stop: int) -> Batch:
        """Examples `start` to `stop` - 1, as views where the tensors allow it. Reads two offsets on the host."""
        if not 0 <= start <= stop <= len(self):
            raise GdpaError(f"start, stop: expected 0 <= start <= stop <= {len(self)}, got {start}, {stop}")
        first, last = self.history.offsets[[start, stop]].tolist()
        events = {name: column[first:last] for name, column in self.history.events.items()}
        history = History(offsets=self.history.offsets[start : stop + 1] - first, **events)
        return Batch(**{name: column[start:stop] for name, column in vars(self).items() if name != "history"}, history=history)

    def select(self, indices: Tensor) -> Batch:
        """The examples at `indices` (int64), in that order."""
        lengths = self.lengths.long()[indices]
        offsets = packed_offsets(lengths)
        chosen = _spans(self.history.offsets.long()[indices], lengths, offsets)
        columns = {name: column[chosen] for name, column in self.history.events.items()}
        history = History(offsets=offsets, **columns)
        return Batch(**{name: column[indices] for name, column in vars(self).items() if name != "history"}, history=history)

    def check(self, schema: Schema) -> Batch:
        """Raise GdpaError, naming the tensor or the column and row, unless the batch is one of `schema`. Returns the batch.

        Reads values on the host: for data that comes from outside, not for every step of a training loop.
        """
        check_shapes(self, schema)
        check_offsets(self.history)
        fault = first_fault(self, schema)
        if fault is not None:
            raise GdpaError(f"batch: column {fault.column!r}, row {fault.row}: {fault.problem}")
        return self


class Fault(NamedTuple):
    """The first value of a column that its schema does not allow."""

    row: int
    column: str
    problem: str


def first_fault(batch: Batch, schema: Schema) -> Fault | None:
    """The first fault among the values of a batch whose shapes are right."""
    return next(_faults(batch.to("cpu"), schema), None)


def packed_offsets(lengths: Tensor) -> Tensor:
    """(B,) lengths -> (B + 1,) int32 offsets. More events than these can count are an error, where the sums would wrap around."""
    total = int(lengths.sum())
    if total >= 2**31:
        raise GdpaError(f"history: expected fewer than {2**31} events in one batch, got {total}; ask for smaller batches")
    return offsets_from_lengths(lengths)


def concatenate(batches: Sequence[Batch]) -> Batch:
    """The examples of several batches of one schema, in order, as one batch."""
    if not batches:
        raise GdpaError("batches: expected at least one, got none")
    if len(batches) == 1:
        return batches[0]
    histories = [batch.history for batch in batches]
    with_values = [history.values is not None for history in histories]
    if any(with_values) != all(with_values):
        raise GdpaError("batches: expected event values in every batch or in none, got both")
    lengths = torch.cat([history.lengths for history in histories])
    events: dict[str, Any] = {name: torch.cat([getattr(history, name) for history in histories]) for name in histories[0].events}
    return Batch(
        **{name: torch.cat([getattr(batch, name) for batch in batches]) for name in vars(batches[0]) if name != "history"},
        history=History(
            offsets=packed_offsets(lengths),
            **events,
        ),
    )


def check_shapes(batch: Batch, schema: Schema, *, exact: bool = True) -> None:
    """Refuse a batch whose tensors are not those of `schema`, without a look at their values. Where not `exact`, other dtypes of the same
    kind may stand for float32 and int64: a model may compute in another precision."""
    count, history = batch.labels.shape[0] if batch.labels.dim() else 0, batch.history
    events = history.items.shape[0] if history.items.dim() else 0
    if (history.values is not None) != schema.values:
        came = "none" if history.values is None else "values"
        raise GdpaError(f"history.values: expected {'a value per event' if schema.values else 'none'} as in the schema, got {came}")
    expected: list[tuple[str, Tensor, tuple[int, ...], torch.dtype]] = [
        ("labels", batch.labels, (count,), torch.float32),
        ("request_timestamps", batch.request_timestamps, (count,), torch.int64),
        ("dense", batch.dense, (count, schema.dense), torch.float32),
        ("sparse", batch.sparse, (count, len(schema.sparse)), torch.int64),
        ("history.offsets", history.offsets, (count + 1,), torch.int32),
        ("history.items", history.items, (events,), torch.int64),
        ("history.types", history.types, (events,), torch.int64),
        ("history.timestamps", history.timestamps, (events,), torch.int64),
    ]
    if history.values is not None:
        expected.append(("history.values", history.values, (events,), torch.float32))
    for name, tensor, shape, dtype in expected:
        right = tensor.dtype == dtype or (not exact and tensor.dtype.is_floating_point == dtype.is_floating_point)
        if tuple(tensor.shape) != shape or not right or tensor.device != batch.labels.device:
            raise GdpaError(
                f"{name}: expected shape {shape}, {dtype}, on {batch.labels.device}, got {tuple(tensor.shape)}, {tensor.dtype}, "
                f"on {tensor.device}"
            )


def check_offsets(history: History) -> None:
    """Refuse offsets that are not those of all events. Reads them on the host."""
    events = history.items.shape[0]
    if int(history.offsets[0]) != 0 or int(history.offsets[-1]) != events or bool((history.lengths < 0).any()):
        raise GdpaError(f"history.offsets: expected a non-decreasing sequence from 0 to {events}, the number of events")


def _faults(batch: Batch, schema: Schema) -> Iterator[Fault]:
    history = batch.history

    def found(bad: Tensor, column: str, values: Tensor, expected: str, *, of_events: bool) -> Iterator[Fault]:
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            row = int(torch.searchsorted(history.offsets[1:].long(), first, right=True)) if of_events else first
            yield Fault(row, column, f"expected {expected}, got {values[first].item()}")

    labels = batch.labels
    yield from found((labels != 0) & (labels != 1), "label", labels, "0 or 1", of_events=False)
    wide = (~batch.dense.isfinite()).nonzero()
    if len(wide):
        row, feature = wide[0].tolist()
        yield Fault(row, "dense", f"expected finite numbers, got {batch.dense[row, feature].item()} as feature {feature}")
    for index, (name, size) in enumerate(schema.sparse):
        ids = batch.sparse[:, index]
        yield from found((ids < 0) | (ids >= size), f"sparse_{name}", ids, f"an id from 0 to {size - 1}", of_events=False)
    ids, types, times = history.items, history.types, history.timestamps
    bad = (ids < 0) | (ids >= schema.items)
    yield from found(bad, "history_item", ids, f"an id from 0 to {schema.items - 1}", of_events=True)
    bad = (types < 0) | (types >= len(schema.event_types))
    yield from found(bad, "history_type", types, f"a type from 0 to {len(schema.event_types) - 1}", of_events=True)
    earlier = torch.zeros(len(times), dtype=torch.bool)
    earlier[1:] = times[1:] < times[:-1]
    starts = history.offsets[:-1].long()
    earlier[starts[starts < len(times)]] = False  # an example's first event has no predecessor
    yield from found(earlier, "history_timestamp", times, "timestamps in ascending order", of_events=True)
    # Ages are differences of int64, and must stay such.
    requests = batch.request_timestamps
    yield from found(
        (requests > LATEST) | (requests < -LATEST), "request_timestamp", requests, "seconds within 2^61 of 0", of_events=False
    )
    yield from found((times > LATEST) | (times < -LATEST), "history_timestamp", times, "seconds within 2^61 of 0", of_events=True)
    late = times > batch.request_timestamps.repeat_interleave(history.lengths.long())
    yield from found(late, "history_timestamp", times, "no event after the request", of_events=True)
    if history.values is not None:
        yield from found(~history.values.isfinite(), "history_value", history.values, "finite numbers", of_events=True)


def _spans(starts: Tensor, lengths: Tensor, offsets: Tensor) -> Tensor:
    """The rows starts[b] to starts[b] + lengths[b] - 1 of every b, one after the other; `offsets` are those of `lengths`."""
    total = int(offsets[-1])
    return torch.arange(total, device=offsets.device) + (starts - offsets[:-1]).repeat_interleave(lengths, output_size=total)


def _is_count(number: object, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and least <= number < 2**63
