"""Click traffic with a planted signal: what a model with histories can find, and one without them cannot.

The world of a seed: every item has a hidden category; every user has a lasting taste (one category) and, for the last day, a passing
one. Impressions show anything, clicks and conversions mostly follow the taste of their time. The candidate ad is of the passing
taste's category, of the lasting one's, or of any, so that its category alone says nothing. The log odds of a click on it are

    bias + HISTORY * match + sum_i w_i dense_i + country effect + placement effect

    match = sum_e w(type_e) 2^(-age_e / HALF_LIFE) [category(item_e) = category(ad)] / (1 + sum_e w(type_e) 2^(-age_e / HALF_LIFE))

A batch is a function of the seed, the batch size, the options and its index alone, so a resumed run sees the batches that it would
have seen. Features and timestamps are made of random bits by operations that every machine rounds alike.

    python -m gdpa.data.synthetic clicks.parquet --batches 3 --batch-size 64

writes batches to a Parquet file (see gdpa.data.parquet).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import count, islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gdpa.data import traffic
from gdpa.data.schema import Batch, History, Schema, packed_offsets
from gdpa.errors import GdpaError

EVENT_TYPES = ("impression", "click", "conversion")
TYPE_SHARES = (0.5, 0.4, 0.1)
TYPE_WEIGHTS = (0.0, 1.0, 2.0)  # of a matching event in the planted signal
COUNTRIES, PLACEMENTS = 32, 8
HALF_LIFE = 86_400.0  # seconds
HISTORY, BIAS = 6.0, -2.3
DENSE_WEIGHTS = (0.35, -0.25, 0.15)  # of the first features; the others are noise
EFFECT = 0.35  # country and placement effects are uniform on (-EFFECT, EFFECT)
START = 1_700_000_000  # the first batch's requests, in seconds; each batch covers the next minute
MEDIAN_GAP, LONGEST_GAP = 3_600, 30 * 86_400  # seconds between events; heavy-tailed

_WORLD, _BATCH = 0, 1  # streams of random bits


class SyntheticClicks:
    """Seeded click traffic: `batch(index)`, or `batches(start)` without end.

    lengths         "lognormal", "power-law" or "uniform": the generator of gdpa.data.traffic that draws the histories' lengths
    median_length   of a lognormal history; the shortest one of a power law; not read where they are uniform, from 1 to the cap
    max_length      the cap; a share of `empty` of the histories is empty, of uniform ones none

    Example:
        >>> clicks = SyntheticClicks(batch_size=4, seed=1)
        >>> clicks.batch(7).labels.equal(next(clicks.batches(start=7)).labels)
        True
    """

    def __init__(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        items: int = 512,
        categories: int = 8,
        dense: int = 8,
        lengths: str = "lognormal",
        median_length: int = 32,
        max_length: int = 256,
        empty: float = 0.05,
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
            ("categories", categories, 2),
            ("dense", dense, len(DENSE_WEIGHTS)),
            ("median_length", median_length, 1),
            ("max_length", max_length, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise GdpaError(f"{name}: expected an integer of at least {least}, got {value!r}")
        if not isinstance(items, int) or items < categories or items % categories:
            raise GdpaError(f"items: expected a multiple of the number of categories ({categories}), got {items!r}")
        if lengths not in ("lognormal", "power-law", "uniform"):
            raise GdpaError(f"lengths: expected 'lognormal', 'power-law' or 'uniform', got {lengths!r}")
        if not 0 <= empty <= 1:
            raise GdpaError(f"empty: expected a fraction from 0 to 1, got {empty!r}")
        self.batch_size, self.seed, self.categories = batch_size, seed, categories
        self._lengths, self._median, self._cap, self._empty = lengths, median_length, max_length, empty
        self.schema = Schema(
            dense=dense,
            sparse=(("ad", items), ("country", COUNTRIES), ("placement", PLACEMENTS)),
            items=items,
            event_types=EVENT_TYPES,
            values=True,
            candidate="ad",
        )
        world = _Bits(seed, _WORLD, 0)
        self._shelves = torch.from_numpy(np.argsort(world.uniform(items), kind="stable")).view(categories, -1)
        self.category = torch.empty(items, dtype=torch.int64)  # hidden from models
        self.category[self._shelves] = torch.arange(categories)[:, None].expand_as(self._shelves)
        self._country, self._placement = (world.draw(size).sub(0.5).mul(2 * EFFECT) for size in (COUNTRIES, PLACEMENTS))

    def batch(self, index: int) -> Batch:
        """The batch of that index, on the CPU."""
        if not isinstance(index, int) or index < 0:
            raise GdpaError(f"index: expected an integer of at least 0, got {index!r}")
        size, bits = self.batch_size, _Bits(self.seed, _BATCH, index)
        lengths = self._draw_lengths(bits.seed())
        total = int(lengths.sum())
        requests = START + 60 * index + bits.integers(60, size)
        dense = (bits.draw(size * self.schema.dense * 3).view(size, -1, 3).sub(0.5) * 2).sum(-1).float()  # variance 1
        lasting, passing, other = (bits.integers(self.categories, size) for _ in range(3))
        kind = bits.draw(size)
        wanted = torch.where(kind < 0.4, passing, torch.where(kind < 0.6, lasting, other))
        sparse = torch.stack(
            [self._items_of(wanted, bits), bits.integers(COUNTRIES, size), bits.integers(PLACEMENTS, size)],
            dim=1,
        )
        offsets = packed_offsets(lengths)
        example = torch.arange(size).repeat_interleave(lengths)
        ages = self._draw_ages(bits, offsets, example)
        draws = bits.draw(total)
        types = (draws >= TYPE_SHARES[0]).long() + (draws >= TYPE_SHARES[0] + TYPE_SHARES[1])
        taste = torch.where(ages < HALF_LIFE, passing[example], lasting[example])
        follows = (bits.draw(total) < 0.75) & (types > 0)
        items = self._items_of(torch.where(follows, taste, bits.integers(self.categories, total)), bits)
        u = bits.draw(total)
        history = History(
            offsets=offsets,
            items=items,
            types=types,
            timestamps=requests[example] - ages,
            values=(10 * u / (1 - u)).clamp(max=3600.0).float(),  # seconds spent on the item
        )
        unlabelled = Batch(torch.zeros(size), requests, dense, sparse, history)
        labels = (bits.draw(size) < torch.sigmoid(self.log_odds(unlabelled))).float()
        return Batch(labels, requests, dense, sparse, history)

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Batches from index `start` on, without end."""
        return map(self.batch, count(start))

    def history_match(self, batch: Batch) -> Tensor:
        """(B,) float64: the planted `match` of each example, from 0 to 1; 0 for an empty history."""
        history = batch.history
        example = torch.arange(len(batch)).repeat_interleave(history.lengths.long())
        ages = (batch.request_timestamps[example] - history.timestamps).double()
        weights = torch.tensor(TYPE_WEIGHTS, dtype=torch.float64)[history.types] * torch.exp2(-ages / HALF_LIFE)
        same = self.category[history.items] == self.category[batch.sparse[:, 0]][example]
        zeros = torch.zeros(len(batch), dtype=torch.float64)
        return zeros.index_add(0, example, weights * same) / (1 + zeros.index_add(0, example, weights))

    def log_odds(self, batch: Batch) -> Tensor:
        """(B,) float64: the true log odds of label 1. The NE of these is the lowest that any model can reach."""
        linear = batch.dense[:, : len(DENSE_WEIGHTS)].double() @ torch.tensor(DENSE_WEIGHTS, dtype=torch.float64)
        effects = self._country[batch.sparse[:, 1]] + self._placement[batch.sparse[:, 2]]
        return BIAS + HISTORY * self.history_match(batch) + linear + effects

    def _draw_lengths(self, seed: int) -> Tensor:
        if self._lengths == "lognormal":
            return traffic.lognormal(self.batch_size, self._cap, median=self._median, empty=self._empty, seed=seed)
        if self._lengths == "uniform":
            return traffic.uniform(self.batch_size, self._cap, seed=seed)
        return traffic.power_law(self.batch_size, self._cap, shortest=self._median, empty=self._empty, seed=seed)

    def _draw_ages(self, bits: _Bits, offsets: Tensor, example: Tensor) -> Tensor:
        """Seconds before the request of every event: sums of gaps, the newest event last. Gaps are log-logistic: a division
        gives them, where a logarithm would differ between machines in its last digit."""
        u = bits.draw(len(example))
        gaps = (MEDIAN_GAP * u / (1 - u)).clamp(max=LONGEST_GAP).long()
        sums = gaps.cumsum(0)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), sums])[offsets[1:].long()]
        return ends[example] - sums + gaps

    def _items_of(self, categories: Tensor, bits: _Bits) -> Tensor:
        """An item of each category, the first ones of its shelf more often."""
        u, shelf = bits.draw(len(categories)), self._shelves.shape[1]
        return self._shelves[categories, (u * u * shelf).long().clamp(max=shelf - 1)]


class _Bits:
    """One stream of random numbers, named by its key. numpy keeps seed sequences and raw bits the same in all its versions, which
    it does not promise of its distributions, nor torch of any."""

    def __init__(self, *key: int) -> None:
        self._source = np.random.PCG64(np.random.SeedSequence(key))

    def uniform(self, size: int) -> npt.NDArray[np.float64]:
        return (self._source.random_raw(size) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def draw(self, size: int) -> Tensor:
        """(size,) float64, uniform on [0, 1)."""
        return torch.from_numpy(self.uniform(size))

    def integers(self, below: int, size: int) -> Tensor:
        """(size,) int64, 0 to below - 1."""
        return (self.draw(size) * below).long().clamp(max=below - 1)

    def seed(self) -> int:
        return int(self.integers(2**31, 1))


def main(arguments: list[str] | None = None) -> int:
    """Write batches to a Parquet file."""
    from gdpa.data.parquet import write

    parser = argparse.ArgumentParser(prog="python -m gdpa.data.synthetic", description="Write synthetic click traffic as Parquet.")
    parser.add_argument("out", help="the file to write")
    parser.add_argument("--batches", type=int, default=16, help="how many (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1024, help="examples in each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--median-length", type=int, default=32, help="of the histories (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=256, help="of the histories (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        if options.batches < 1:
            raise GdpaError(f"batches: expected at least 1, got {options.batches}")
        clicks = SyntheticClicks(
            options.batch_size, seed=options.seed, median_length=options.median_length, max_length=options.max_length
        )
        rows = write(options.out, islice(clicks.batches(), options.batches), clicks.schema)
    except GdpaError as error:
        print(f"gdpa.data.synthetic: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {rows} examples")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
