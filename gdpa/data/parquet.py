"""Examples of a schema as a Parquet file: written whole or not at all, read as a stream, refused where they are wrong.

Columns (the names of `Schema.columns`):

    label                integer, 0 or 1
    request_timestamp    integer, seconds
    dense                list of floats, as many in every row as the schema has dense features; left out where it has none
    sparse_<name>        integer, one column per sparse feature
    history_item, history_type, history_timestamp, history_value (where the schema has values)
                         lists of integers (value: floats), of one length in each row, oldest event first

Files that `write` makes carry the schema in their metadata; other files are read with a schema given by the caller. A value that
the schema does not allow is a GdpaError with the file, the row (counted from 0) and the column.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gdpa.data.schema import Batch, History, Schema, concatenate, first_fault, packed_offsets
from gdpa.errors import GdpaError
from gdpa.files import replacing

_METADATA = b"gdpa.schema"


def write(path: str | os.PathLike[str], batches: Iterable[Batch], schema: Schema, *, row_group: int = 4096) -> int:
    """Write batches of a schema to a Parquet file with `row_group` examples in each row group. Returns the number of examples.

    The file appears under its name when it is complete: an error on the way leaves a file of that name as it was.
    """
    pa, pq = _pyarrow()
    if row_group < 1:
        raise GdpaError(f"row_group: expected at least 1, got {row_group}")
    path = Path(path)
    arrow = _arrow_schema(pa, schema)
    rows = 0
    try:
        with replacing(path) as partial:
            with pq.ParquetWriter(partial, arrow, compression="zstd", write_page_checksum=True) as writer:
                for group in of_size((batch.check(schema) for batch in batches), row_group):
                    writer.write_table(_table(pa, arrow, group, schema), row_group_size=row_group)
                    rows += len(group)
            if not rows:
                raise GdpaError(f"{path}: expected at least one example to write, got none")
    except pa.ArrowException as error:
        raise GdpaError(f"{path}: could not be written: {error}") from error
    return rows


def row_count(path: Path) -> int:
    """The examples in a Parquet file, by its footer."""
    with _opened(path) as file:
        rows: int = file.metadata.num_rows
    return rows


def footer_digest(path: Path) -> str:
    """SHA-256 of the footer, in hexadecimal. The footer has the sizes, places and extremes of all columns: files of other values will have
    another, and the values need not be read."""
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)  # the footer's length, and the four letters at a file's end
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        return hashlib.sha256(file.read(length)).hexdigest()


def _opened(path: Path) -> Any:
    pa, pq = _pyarrow()
    if not path.is_file():
        raise GdpaError(f"{path}: expected a Parquet file, there is {'a folder' if path.is_dir() else 'none'}")
    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise GdpaError(f"{path}: expected a Parquet file, which this is not: {error}") from error


class ParquetReader:
    """Batches of `batch_size` examples from a Parquet file, across its row groups. One row group at a time is in memory at most.

    schema       None takes the one in the file. Where both are there, names and features must agree; vocabulary sizes are the
                 given ones, and an id beyond them is an error.
    drop_last    leaves out a last batch that is smaller than the others
    rows         None reads all of the file; a range, these rows alone, as if the file had no others (rows in errors are still counted
                 from the file's beginning)

    Opening the file checks its columns; reading checks every value. `len(reader)` is the number of batches, `reader.rows` that of
    examples.

    Example:
        reader = ParquetReader("clicks.parquet", batch_size=1024)
        for batch in reader: ...
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int,
        *,
        schema: Schema | None = None,
        drop_last: bool = False,
        rows: range | None = None,
    ) -> None:
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise GdpaError(f"batch_size: expected an integer of at least 1, got {batch_size!r}")
        self.path, self.batch_size, self.drop_last = Path(path), batch_size, drop_last
        with _opened(self.path) as file:
            self.schema = self._agreed(schema, file)
            self._check_columns(file.schema_arrow)
            self.group_rows = tuple(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
        every = range(sum(self.group_rows))
        chosen = every if rows is None else rows
        if chosen.step != 1 or chosen.start < 0 or chosen.stop > len(every):
            raise GdpaError(f"rows: expected some of the {len(every)} rows of {self.path} in order, got {rows}")
        # (row group, its first row that is read, the row after the last), counted from the row group's beginning
        self._parts: list[tuple[int, int, int]] = []
        for group, (start, count) in enumerate(zip(accumulate(self.group_rows, initial=0), self.group_rows, strict=False)):
            first, last = max(chosen.start - start, 0), min(chosen.stop - start, count)
            if first < last:
                self._parts.append((group, first, last))
        self.rows: int = sum(last - first for _, first, last in self._parts)
        if not self.rows:
            raise GdpaError(f"{self.path}: expected at least one row, got none")

    def __len__(self) -> int:
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, start: int = 0, *, shuffle: int | None = None) -> Iterator[Batch]:
        """Batches from number `start` on, to the end of the file; row groups before it are not read.

        shuffle: a seed (another for each epoch) by which the row groups are read in another order and the rows within each are
        mixed. Rows of different row groups are not: a file whose rows are sorted wants row groups that hold many users.
        """
        for name, number in (("start", start), ("shuffle", shuffle)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
                raise GdpaError(f"{name}: expected an integer of at least 0, got {number!r}")
        return self._batches(start, shuffle)

    def _batches(self, start: int, shuffle: int | None) -> Iterator[Batch]:
        for batch in of_size(self.pieces(start * self.batch_size, shuffle), self.batch_size):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def pieces(self, skip: int = 0, shuffle: int | None = None) -> Iterator[Batch]:
        """The rows in reading order from number `skip` on, in batches of any size: `batches` before they are cut to one size."""
        first_rows = [0, *accumulate(self.group_rows)]
        parts = self._parts
        if shuffle is not None:
            parts = [parts[place] for place in permutation(len(parts), shuffle).tolist()]
        with _opened(self.path) as file:
            for group, first, last in parts:
                if skip >= last - first:
                    skip -= last - first
                    continue
                pieces = _between(self._read_group(file, group, first_rows[group]), first, last)
                if shuffle is not None:
                    pieces = iter([concatenate(list(pieces)).select(permutation(last - first, shuffle, group + 1))])
                for piece in pieces:
                    passed = min(skip, len(piece))
                    skip -= passed
                    if passed < len(piece):
                        yield piece.rows(passed, len(piece))

    def _read_group(self, file: Any, group: int, first_row: int) -> Iterator[Batch]:
        pa, _ = _pyarrow()
        stream = file.iter_batches(batch_size=self.batch_size, row_groups=[group], columns=list(self.schema.columns))
        while True:
            try:
                records = next(stream, None)
            except (pa.ArrowException, OSError) as error:
                raise GdpaError(f"{self.path}: row group {group}, from row {first_row} on, could not be read: {error}") from error
            if records is None:
                return
            batch = self._to_batch(records, first_row)
            fault = first_fault(batch, self.schema)
            if fault is not None:
                raise self._error(first_row + fault.row, fault.column, fault.problem)
            yield batch
            first_row += len(batch)

    def _to_batch(self, records: Any, first_row: int) -> Batch:
        """The tensors of some records. Nulls and lengths are checked here, values by `first_fault`."""
        pa, _ = _pyarrow()
        schema, rows = self.schema, records.num_rows

        def scalars(column: str, values: Any, kind: Any) -> Tensor:
            return torch.from_numpy(values.cast(kind).to_numpy(zero_copy_only=False).copy())

        def plain(column: str, kind: Any) -> Tensor:
            values = records.column(column)
            if values.null_count:
                raise self._error(first_row + _first(values.is_null()), column, "expected a value, got null")
            return scalars(column, values, kind)

        def jagged(column: str, kind: Any) -> tuple[Tensor, Tensor]:
            lists = records.column(column)
            if lists.null_count:
                raise self._error(first_row + _first(lists.is_null()), column, "expected a list, got null")
            lengths = scalars(column, lists.value_lengths(), pa.int64())
            values = lists.flatten()
            if values.null_count:
                row = int(torch.searchsorted(lengths.cumsum(0), _first(values.is_null()), right=True))
                raise self._error(first_row + row, column, "expected a list of values, got one with null in it")
            return scalars(column, values, kind), lengths

        def of_lengths(column: str, kind: Any, expected: Tensor, like: str) -> Tensor:
            values, lengths = jagged(column, kind)
            wrong = (lengths != expected).nonzero()
            if len(wrong):
                row = int(wrong[0])
                came, wanted = int(lengths[row]), int(expected[row])
                raise self._error(first_row + row, column, f"expected a list of length {wanted}, {like}, got {came}")
            return values

        labels, requests = plain("label", pa.int64()).float(), plain("request_timestamp", pa.int64())
        dense = torch.empty(rows, 0)
        if schema.dense:
            every = torch.full((rows,), schema.dense)
            dense = of_lengths("dense", pa.float32(), every, "the number of dense features").view(rows, schema.dense)
        ids = [plain(f"sparse_{name}", pa.int64()) for name, _ in schema.sparse]
        sparse = torch.stack(ids, dim=1) if ids else torch.empty(rows, 0, dtype=torch.int64)
        items, lengths = jagged("history_item", pa.int64())
        like = "that of history_item"
        history = History(
            offsets=packed_offsets(lengths),
            items=items,
            types=of_lengths("history_type", pa.int64(), lengths, like),
            timestamps=of_lengths("history_timestamp", pa.int64(), lengths, like),
            values=of_lengths("history_value", pa.float32(), lengths, like) if schema.values else None,
        )
        return Batch(labels, requests, dense, sparse, history)

    def _agreed(self, given: Schema | None, file: Any) -> Schema:
        text = (file.metadata.metadata or {}).get(_METADATA)
        if text is None:
            if given is None:
                raise GdpaError(f"{self.path}: expected a schema in the file's metadata or as an argument, got neither")
            return given
        try:
            own = Schema.from_json(text.decode())
        except (GdpaError, UnicodeDecodeError) as error:
            raise GdpaError(f"{self.path}: {error}") from error
        if given is None:
            return own
        sizes = dict(given.sparse)
        sparse = tuple((name, sizes.get(name, size)) for name, size in own.sparse)
        try:
            fits = replace(own, items=given.items, sparse=sparse) == given
        except GdpaError:  # the file's candidate is none of the given schema's items
            fits = False
        if not fits:
            raise GdpaError(f"{self.path}: expected the schema {given}, got a file of {own}")
        return given

    def _check_columns(self, found: Any) -> None:
        pa, _ = _pyarrow()
        integers = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32())
        floats = (pa.float16(), pa.float32(), pa.float64())
        for column in self.schema.columns:
            places = found.get_all_field_indices(column)
            if len(places) != 1:
                came = f"{len(places)} of that name" if places else f"none among {found.names}"
                raise GdpaError(f"{self.path}: column {column!r}: expected one such column, got {came}")
            kind = found.field(places[0]).type
            is_list = column == "dense" or column.startswith("history_")
            kinds, expected = (floats, "floats") if column in ("dense", "history_value") else (integers, "integers")
            if is_list:
                listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
                fits, expected = listed and kind.value_type in kinds, f"lists of {expected}"
            else:
                fits = kind in kinds
            if not fits:
                raise GdpaError(f"{self.path}: column {column!r}: expected {expected}, got the type {kind} from row 0 on")

    def _error(self, row: int, column: str, problem: str) -> GdpaError:
        return GdpaError(f"{self.path}: row {row}, column {column!r}: {problem}")


def of_size(pieces: Iterable[Batch], size: int) -> Iterator[Batch]:
    """The examples of `pieces` in batches of `size`; the last may be smaller."""
    waiting: list[Batch] = []
    count = 0  # of the examples in them: adding up their lengths at every piece would take the square of the pieces' number
    for piece in pieces:
        waiting.append(piece)
        count += len(piece)
        if count < size:
            continue
        joined, start = concatenate(waiting), 0
        while start + size <= count:
            yield joined.rows(start, start + size)
            start += size
        waiting = [joined.rows(start, count)] if start < count else []
        count -= start
    if count:
        yield concatenate(waiting)


def _between(pieces: Iterable[Batch], first: int, last: int) -> Iterator[Batch]:
    """The examples from number `first` to `last` - 1 of all the pieces together; what comes after them is not read."""
    start = 0
    for piece in pieces:
        low, high = max(first - start, 0), min(last - start, len(piece))
        if low < high:
            yield piece if (low, high) == (0, len(piece)) else piece.rows(low, high)
        start += len(piece)
        if start >= last:
            return


def permutation(count: int, *key: int) -> Tensor:
    """(count,) int64, the same on every machine for a key: the order of random bits."""
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    return torch.from_numpy(np.argsort(bits, kind="stable"))


def _first(mask: Any) -> int:
    return int(mask.to_numpy(zero_copy_only=False).argmax())


def _arrow_schema(pa: Any, schema: Schema) -> Any:
    types = {
        "label": pa.int8(),
        "request_timestamp": pa.int64(),
        "dense": pa.list_(pa.float32(), schema.dense),
        "history_item": pa.list_(pa.int64()),
        "history_type": pa.list_(pa.int16()),
        "history_timestamp": pa.list_(pa.int64()),
        "history_value": pa.list_(pa.float32()),
    }
    fields = [pa.field(column, types.get(column, pa.int64()), nullable=False) for column in schema.columns]
    return pa.schema(fields, metadata={_METADATA: schema.to_json().encode()})


def _table(pa: Any, arrow: Any, batch: Batch, schema: Schema) -> Any:
    history = batch.history
    offsets = pa.array(history.offsets.numpy())
    columns: dict[str, Any] = {
        "label": batch.labels.numpy(),
        "request_timestamp": batch.request_timestamps.numpy(),
        **{f"sparse_{name}": batch.sparse[:, index].numpy() for index, (name, _) in enumerate(schema.sparse)},
    }
    arrays = {name: pa.array(column).cast(arrow.field(name).type) for name, column in columns.items()}
    if schema.dense:
        arrays["dense"] = pa.FixedSizeListArray.from_arrays(pa.array(batch.dense.reshape(-1).numpy()), schema.dense)
    lists = {"item": history.items, "type": history.types, "timestamp": history.timestamps, "value": history.values}
    for name, tensor in lists.items():
        if tensor is not None:
            values = pa.array(tensor.numpy()).cast(arrow.field(f"history_{name}").type.value_type)
            arrays[f"history_{name}"] = pa.ListArray.from_arrays(offsets, values)
    return pa.Table.from_arrays([arrays[column].cast(arrow.field(column).type) for column in arrow.names], schema=arrow)


def _pyarrow() -> tuple[Any, Any]:
    """pyarrow and its Parquet module, imported when a file is touched: nothing else of gdpa needs them."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise GdpaError(
            f"pyarrow: expected to be installed, to read and write Parquet files (pip install 'gdpa[data]'): {error}"
        ) from error
    return pa, pq
