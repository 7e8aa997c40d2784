"""Where training batches come from: a position in the data is a number of batches, so that a resumed run goes on where it stopped.

    synthetic   gdpa.data.synthetic, without end. Held out: the batches from index HELD_OUT on, which no run trains on.
    a path      a Parquet file or a folder of them, read again and again in an order that differs from epoch to epoch. Held out: the
                last HELD_OUT_SHARE of the rows.

Both give whole batches: what is left over at the end of an epoch, less than a batch, is not trained on in that epoch.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from gdpa.data.parquet import ParquetReader, footer_digest, of_size, permutation, row_count
from gdpa.data.schema import Batch, History, Schema
from gdpa.data.synthetic import SyntheticClicks
from gdpa.errors import GdpaError

HELD_OUT = 2**20
HELD_OUT_SHARE = 0.1
# Batches that are made ahead of the training step.
AHEAD = 3


class Source(Protocol):
    """Global batches: every rank sees the same ones and takes its share."""

    @property
    def schema(self) -> Schema: ...

    @property
    def facts(self) -> dict[str, Any]:
        """What makes these the same batches, as JSON: a run is resumed on these alone."""

    def batches(self, start: int) -> Iterator[Batch]:
        """Training batches from number `start` on, without end."""

    def held_out(self, most: int) -> Iterator[Batch]:
        """At most that many batches that are never trained on."""


def too_many_steps() -> str:
    return f"--steps: expected at most {HELD_OUT} on synthetic data, since the batches after them are held out"


class Synthetic:
    """The generator's batches; several are made at a time, since each is a function of its index."""

    def __init__(
        self,
        batch_size: int,
        *,
        seed: int,
        median_length: int,
        max_length: int,
        lengths: str = "lognormal",
        workers: int = 1,
    ) -> None:
        drawn = {"lengths": lengths, "median_length": median_length, "max_length": max_length}
        self._clicks = SyntheticClicks(batch_size, seed=seed, **drawn)  # type: ignore[arg-type]
        self._workers = workers
        self.schema = self._clicks.schema
        self.facts = {"kind": "synthetic", "seed": seed, **drawn}

    def batches(self, start: int) -> Iterator[Batch]:
        waiting: list[Future[Batch]] = []
        with ThreadPoolExecutor(self._workers) as pool:
            try:
                for index in range(start, HELD_OUT):
                    waiting.append(pool.submit(self._clicks.batch, index))
                    if len(waiting) >= self._workers:
                        yield waiting.pop(0).result()
                for future in waiting:
                    yield future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        raise GdpaError(too_many_steps())

    def held_out(self, most: int) -> Iterator[Batch]:
        return islice(self._clicks.batches(HELD_OUT), min(most, sys.maxsize))


class Parquet:
    """The rows of Parquet files of one schema, that of the first file where none is given. Row groups and the rows within each are mixed
    anew in every epoch."""

    def __init__(self, path: Path, batch_size: int, *, seed: int, schema: Schema | None = None) -> None:
        self._batch_size, self._seed = batch_size, seed
        if not path.exists():
            raise GdpaError(
                f"--data: expected 'synthetic', a Parquet file or a folder of them, got {str(path)!r}, which does not exist"
            )
        # Hidden ones are some system's notes.
        files = sorted(x for x in path.glob("*.parquet") if not x.name.startswith(".")) if path.is_dir() else [path]
        if not files:
            raise GdpaError(f"--data: expected a folder with *.parquet files, got {str(path)!r} without any")
        if path.is_dir():  # systems that write folders of files write empty ones among them
            files = [file for file in files if row_count(file)] or files
        whole = [ParquetReader(files[0], batch_size, schema=schema)]
        self.schema = whole[0].schema
        whole += [ParquetReader(file, batch_size, schema=self.schema) for file in files[1:]]
        rows = sum(reader.rows for reader in whole)
        self.rows = rows - math.ceil(rows * HELD_OUT_SHARE)  # that are trained on
        self._training: list[ParquetReader] = []
        self._held_out: list[ParquetReader] = []
        before = 0
        for reader in whole:
            bound = min(max(self.rows - before, 0), reader.rows)
            for readers, part in ((self._training, range(bound)), (self._held_out, range(bound, reader.rows))):
                if part:
                    readers.append(ParquetReader(reader.path, batch_size, schema=self.schema, rows=part))
            before += reader.rows
        if self.rows < batch_size:
            raise GdpaError(
                f"--batch-size: expected at most {self.rows}, the training examples in {path} ({rows - self.rows} are held out), "
                f"got {batch_size}"
            )
        self.facts = {
            "kind": "parquet",
            "seed": seed,
            "row_groups": {reader.path.name: list(reader.group_rows) for reader in whole},
            "footers": {reader.path.name: footer_digest(reader.path) for reader in whole},
        }

    def batches(self, start: int) -> Iterator[Batch]:
        epoch, skip = divmod(start, self.rows // self._batch_size)
        while True:
            whole = self.rows // self._batch_size - skip
            yield from islice(of_size(self._epoch(epoch, skip * self._batch_size), self._batch_size), whole)
            epoch, skip = epoch + 1, 0

    def _epoch(self, epoch: int, skip: int) -> Iterator[Batch]:
        """The rows of an epoch in its order, from number `skip` on, in pieces of any size. Whole files before it are not opened."""
        for place in permutation(len(self._training), self._seed, epoch).tolist():
            reader = self._training[place]
            if skip >= reader.rows:
                skip -= reader.rows
                continue
            (shuffle,) = np.random.SeedSequence((self._seed, epoch, place)).generate_state(1).tolist()
            yield from reader.pieces(skip, shuffle)
            skip = 0

    def held_out(self, most: int) -> Iterator[Batch]:
        pieces = (piece for reader in self._held_out for piece in reader.pieces())
        return islice(of_size(pieces, self._batch_size), min(most, sys.maxsize))


class Prefetch:
    """An iterator whose items are made by a thread, up to AHEAD of them in advance. Close it, or use it in a `with`."""

    def __init__(self, items: Iterator[Any], prepare: Callable[[Any], Any] = lambda item: item) -> None:
        self._made: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._make, args=(items, prepare), daemon=True, name="gdpa-data")
        self._thread.start()

    def _make(self, items: Iterator[Any], prepare: Callable[[Any], Any]) -> None:
        try:
            for item in items:
                self._put(prepare(item), None)
                if self._stopped.is_set():
                    return
            self._put(None, StopIteration())
        except BaseException as error:  # whatever it is, the thread that waits for the batch raises it
            self._put(None, error)
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def _put(self, item: Any, error: BaseException | None) -> None:
        while not self._stopped.is_set():
            with suppress(queue.Full):
                self._made.put((item, error), timeout=0.2)
                return

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Any:
        item, error = self._made.get()
        if error is not None:
            self._stopped.set()
            raise error
        return item

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()


def share(batch: Batch, rank: int, ranks: int) -> Batch:
    """The rows of a global batch that a rank trains on: contiguous, and as even as they can be."""
    return batch if ranks == 1 else batch.rows(len(batch) * rank // ranks, len(batch) * (rank + 1) // ranks)


def pinned(batch: Batch, device: torch.device) -> Batch:
    """The batch in pinned memory, its counts taken, where `device` is a GPU: the copy to it is then not waited for."""
    if device.type != "cuda":
        return batch
    with torch.cuda.device(device):
        columns = {name: column.pin_memory() for name, column in vars(batch).items() if name != "history"}
        history = batch.history
        events = {name: column.pin_memory() for name, column in history.events.items()}
        moved = History(offsets=history.offsets.pin_memory(), **events, known=history.counts())
    return Batch(**columns, history=moved)
