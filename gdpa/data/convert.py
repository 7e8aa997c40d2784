"""MovieLens ratings to training examples: would the user rate this film 4 or better?

    python -m gdpa.data.convert ratings.csv ratings.parquet

The file has a header, userId,movieId,rating,timestamp, and its users in ascending order, as MovieLens publishes it (the order of a
user's ratings does not matter). It is read twice, one user at a time: once to check every line and to find the largest ids, which
are the vocabularies, once to write. Each user's ratings are put in the order of time; from the first `min_history` on, each becomes
an example:

    label               1 where the rating is 4 or more
    request_timestamp   the rating's
    dense               log(1 + number of earlier ratings), their mean (all of them, also those that the history leaves out)
    sparse              user, movie (the candidate)
    history             the last `max_history` earlier ratings: movie, type by band (low < 2.5 <= middle < 4 <= high), time, rating
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gdpa.data.parquet import write
from gdpa.data.schema import LATEST, Batch, History, Schema
from gdpa.errors import GdpaError
from gdpa.jagged import offsets_from_lengths

T = TypeVar("T")

HEADER = ["userId", "movieId", "rating", "timestamp"]
BANDS = (2.5, 4.0)
EVENT_TYPES = ("low", "middle", "high")
_EVENTS_AT_ONCE = 1 << 20  # of a user with many ratings, whose examples would otherwise fill the memory


class _User(NamedTuple):
    user: int
    movies: npt.NDArray[np.int64]
    ratings: npt.NDArray[np.float32]
    times: npt.NDArray[np.int64]


def movielens(
    ratings: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    min_history: int = 5,
    max_history: int = 200,
    row_group: int = 16_384,
) -> int:
    """Convert a ratings.csv to a Parquet file of the schema above; returns the number of examples.

    A malformed line is a GdpaError with its number, and nothing is written.
    """
    for name, value, least in (("min_history", min_history, 0), ("max_history", max_history, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise GdpaError(f"{name}: expected an integer of at least {least}, got {value!r}")
    path = Path(ratings)
    if path.exists() and Path(out).exists() and path.samefile(out):
        raise GdpaError(f"out: expected another file than the ratings, which it would replace, got {out}")
    last_user = last_movie = examples = 0
    for user in _users(path):
        last_user, last_movie = user.user, max(last_movie, int(user.movies.max()))
        examples += max(len(user.movies) - min_history, 0)
    if not examples:
        raise GdpaError(f"{path}: expected a user with more than {min_history} ratings (min_history), got none")
    schema = Schema(
        dense=2,
        sparse=(("user", last_user + 1), ("movie", last_movie + 1)),
        items=last_movie + 1,
        event_types=EVENT_TYPES,
        values=True,
        candidate="movie",
    )
    batches = (batch for user in _users(path) for batch in _examples(user, min_history, max_history))
    return write(out, batches, schema, row_group=row_group)


def _users(path: Path) -> Iterator[_User]:
    """The ratings of one user after the other, each user's in the order of time (of the file, where times are equal)."""
    if not path.is_file():
        raise GdpaError(f"{path}: expected a ratings.csv, there is {'a folder' if path.is_dir() else 'none'}")
    try:
        # utf-8-sig: spreadsheets put a byte order mark before the header.
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            if header != HEADER:
                raise GdpaError(f"{path}: line 1: expected the header {','.join(HEADER)}, got {','.join(header)!r}")
            current = -1
            rows: list[list[float]] = []
            for fields in lines:
                user, *rating = _parsed(path, lines.line_num, fields)
                if user < current:
                    raise GdpaError(
                        f"{path}: line {lines.line_num}: expected users in ascending order, got userId {user} after {current}"
                    )
                if user != current and rows:
                    yield _ordered(current, rows)
                    rows = []
                current = user
                rows.append(rating)
            if rows:
                yield _ordered(current, rows)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise GdpaError(f"{path}: could not be read as CSV: {error}") from error


def _parsed(path: Path, line: int, fields: list[str]) -> tuple[int, int, float, int]:
    try:
        user, movie, rating, time = fields
        values = _number(int, user), _number(int, movie), _number(float, rating), _number(int, time)
    except ValueError:
        raise GdpaError(
            f"{path}: line {line}: expected integers userId, movieId and timestamp and a number rating, got {','.join(fields)!r}"
        ) from None
    for name, value, most in (("userId", values[0], 2**31), ("movieId", values[1], 2**31), ("timestamp", values[3], LATEST)):
        if not 0 <= value < most:
            raise GdpaError(f"{path}: line {line}: expected a {name} from 0 to {most - 1}, got {value}")
    if not 0 <= values[2] <= 5:
        raise GdpaError(f"{path}: line {line}: expected a rating from 0 to 5, got {values[2]}")
    return values


def _number(kind: Callable[[str], T], text: str) -> T:
    if "_" in text:  # Python reads 1_0 as 10 and 0_4 as 4
        raise ValueError(text)
    return kind(text)


def _ordered(user: int, rows: list[list[float]]) -> _User:
    movies, ratings, times = zip(*rows, strict=True)
    order = np.argsort(np.array(times, dtype=np.int64), kind="stable")
    return _User(
        user,
        np.array(movies, dtype=np.int64)[order],
        np.array(ratings, dtype=np.float32)[order],
        np.array(times, dtype=np.int64)[order],
    )


def _examples(user: _User, min_history: int, max_history: int) -> Iterator[Batch]:
    count = len(user.movies)
    movies, ratings, times = (torch.from_numpy(column) for column in user[1:])
    types = torch.bucketize(ratings, torch.tensor(BANDS), right=True)
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), ratings.double().cumsum(0)])
    step = max(_EVENTS_AT_ONCE // max_history, 1)
    for start in range(min_history, count, step):
        targets = torch.arange(start, min(start + step, count))
        lengths = targets.clamp(max=max_history)
        offsets = offsets_from_lengths(lengths)
        firsts = targets - lengths - offsets[:-1]
        events = torch.arange(int(offsets[-1])) + firsts.repeat_interleave(lengths)
        means = sums[targets] / targets.clamp(min=1)
        yield Batch(
            labels=(ratings[targets] >= BANDS[-1]).float(),
            request_timestamps=times[targets],
            dense=torch.stack([torch.log1p(targets.double()), means], dim=1).float(),
            sparse=torch.stack([torch.full_like(targets, user.user), movies[targets]], dim=1),
            history=History(offsets, movies[events], types[events], times[events], ratings[events]),
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gdpa.data.convert", description="Convert a MovieLens ratings.csv to training examples in Parquet."
    )
    parser.add_argument("ratings", help="ratings.csv")
    parser.add_argument("out", help="the Parquet file to write")
    parser.add_argument("--min-history", type=int, default=5, help="earlier ratings an example needs (default: %(default)s)")
    parser.add_argument("--max-history", type=int, default=200, help="earlier ratings it keeps (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        rows = movielens(options.ratings, options.out, min_history=options.min_history, max_history=options.max_history)
    except GdpaError as error:
        print(f"gdpa.data.convert: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {rows} examples")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
