"""The tile lists against a plain Python model: every tile once, long ones first, nothing outside the buffer.

The kernels run interpreted on CPU tensors, or on the GPU where there is one, and the torch operations beside them on the CPU: both
are held to the same.
"""

from __future__ import annotations

import gc
import importlib.util
import random
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from helpers import needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpa import schedule

if importlib.util.find_spec("triton"):
    from gdpa import schedule_kernels

BUILDERS = [pytest.param(False, id="torch"), pytest.param(True, id="kernel", marks=needs_triton)]
LONGEST_CLASS = 127
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where kernels run


class Batch(NamedTuple):
    """Arguments of `schedule.records`; offsets as numbers, None for a side that has none."""

    q_offsets: list[int] | None
    k_offsets: list[int] | None
    batch: int
    q_rows: int
    k_rows: int
    block: int
    dtype: torch.dtype = torch.int32

    @property
    def bound(self) -> int:
        return schedule.tile_bound(self.q_offsets is not None, self.batch, self.q_rows, self.block)

    def tensors(self, kernel: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        device = DEVICE if kernel else "cpu"
        q, k = (None if x is None else torch.tensor(x, dtype=self.dtype, device=device) for x in (self.q_offsets, self.k_offsets))
        return q, k

    def build(self, kernel: bool) -> torch.Tensor:
        q, k = self.tensors(kernel)
        if not kernel:
            return schedule.records(q, k, self.batch, self.q_rows, self.k_rows, self.block)
        guarded, records = guard(self.bound + 1, 8)
        guarded_counts, counts = guard_like(schedule_kernels.new_counts(q is not None, self.batch, DEVICE))
        schedule_kernels.launch_records(records, counts, q, k, self.batch, self.q_rows, self.k_rows, self.block)
        check_guard(guarded)
        check_guard(guarded_counts)
        return records

    def tiles(self, kernel: bool) -> torch.Tensor:
        """The (sequence, block) list instead, through bounds."""
        q, k = self.tensors(kernel)
        if not kernel:
            q_bounds = None if q is None else schedule.bounds(q, self.q_rows)
            k_bounds = None if k is None else schedule.bounds(k, self.k_rows)
            return schedule.tiles(q_bounds, k_bounds, self.batch, self.q_rows, self.block)
        q_bounds, k_bounds = (guarded_bounds(x, rows) for x, rows in ((q, self.q_rows), (k, self.k_rows)))
        guarded, tiles = guard(self.bound, 2)
        guarded_counts, counts = guard_like(schedule_kernels.new_counts(q is not None, self.batch, DEVICE))
        schedule_kernels.launch_tiles(tiles, counts, q_bounds, k_bounds, self.batch, self.q_rows, self.block)
        check_guard(guarded)
        check_guard(guarded_counts)
        return tiles

    def model(self) -> list[tuple[int, ...]]:
        """The records, in the order of the sequences."""
        queries = model_side(self.q_offsets, self.batch, self.q_rows)
        keys = model_side(self.k_offsets, self.batch, self.k_rows)
        if self.q_offsets is not None:
            keys = [*keys[: self.batch], (0, 0)]
        return [
            (q_start, q_length, row, k_start, k_length, sequence, -(-q_length // self.block), 0)
            for sequence, ((q_start, q_length), (k_start, k_length)) in enumerate(zip(queries, keys, strict=False))
            for row in range(0, q_length, self.block)
        ]


GUARD = 64
MARK = -77


def guard(rows: int, width: int, dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor in the middle of a marked one."""
    whole = torch.full((GUARD + rows * width + GUARD,), MARK, dtype=dtype, device=DEVICE)
    return whole, whole[GUARD : GUARD + rows * width].view(rows, width)


def guard_like(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole, inner = guard(x.numel(), 1, x.dtype)
    return whole, inner.view(x.shape)


def check_guard(whole: torch.Tensor) -> None:
    assert (whole[:GUARD] == MARK).all()
    assert (whole[-GUARD:] == MARK).all()


def guarded_bounds(offsets: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    if offsets is None:
        return None
    guarded, bounds = guard(offsets.shape[0], 2)
    schedule_kernels.launch_bounds(bounds, offsets, rows)
    check_guard(guarded)
    assert torch.equal(bounds.cpu(), schedule.bounds(offsets.cpu(), rows))
    return bounds


def model_side(offsets: list[int] | None, batch: int, rows: int) -> list[tuple[int, int]]:
    """(start, length) of each sequence and, of a packed side, of the tail."""
    if offsets is None:
        return [(b * rows, rows) for b in range(batch)]
    inside = [min(max(x, 0), rows) for x in offsets]
    return [(start, max(end - start, 0)) for start, end in zip(inside, [*inside[1:], rows], strict=True)]


def cumulated(lengths: list[int]) -> list[int]:
    return offsets(*lengths).tolist()


def key_class(k_length: int) -> int:
    return min(-(-k_length // 128), LONGEST_CLASS)


def check_listed(found: list[tuple[int, ...]], expected: list[tuple[int, ...]]) -> None:
    """Some of the expected records, where the list has no room for all: each says how many of its sequence are listed."""
    listed_of = Counter(record[5] for record in found)
    assert all(record[6] == listed_of[record[5]] for record in found)
    assert {record[:6] for record in found} <= {record[:6] for record in expected}


def check_order(records: list[tuple[int, ...]], block: int) -> None:
    """Longest class first; a sequence's tiles follow one another, from its first row."""
    classes = [key_class(record[4]) for record in records]
    assert classes == sorted(classes, reverse=True)
    for before, record in zip([None, *records], records, strict=False):
        if record[2] > 0:
            assert before is not None and before[5] == record[5] and before[2] == record[2] - block


@st.composite
def batches(draw: Callable[..., int]) -> Batch:
    batch = draw(st.sampled_from([0, 1, 2, 5, 31, 32, 33, 70]))
    block = draw(st.sampled_from([16, 64, 128, 192]))
    form = draw(st.sampled_from(["packed", "dense keys", "dense or shared queries"]))
    length = st.one_of(st.sampled_from([0, 0, 1, 127, 128, 129, 191, 192, 193, 255, 256, 257]), st.integers(0, 700))
    q_lengths, k_lengths = (draw(st.lists(length, min_size=batch, max_size=batch)) for _ in range(2))
    tail = draw(st.sampled_from([0, 1, 300]))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    q_offsets = None if form == "dense or shared queries" else cumulated(q_lengths)
    k_offsets = None if form == "dense keys" else cumulated(k_lengths)
    q_rows = draw(length) if q_offsets is None else q_offsets[-1] + tail
    k_rows = draw(length) if k_offsets is None else k_offsets[-1] + tail
    return Batch(q_offsets, k_offsets, batch, q_rows, k_rows, block, dtype)


@pytest.mark.parametrize("kernel", BUILDERS)
@settings(max_examples=60, deadline=None)
@given(batches())
def test_every_tile_has_one_record(kernel, batch):
    records = batch.build(kernel)
    assert records.shape == (batch.bound + 1, 8) and records.dtype == torch.int32
    count, *rest = records[0].tolist()
    assert rest == [0] * 7
    found = [tuple(record) for record in records[1 : count + 1].tolist()]
    assert sorted(found, key=lambda record: (record[5], record[2])) == batch.model()
    check_order(found, batch.block)


@pytest.mark.parametrize("kernel", BUILDERS)
@settings(max_examples=40, deadline=None)
@given(batches())
def test_every_tile_is_in_the_list_of_pairs(kernel, batch):
    tiles = batch.tiles(kernel)
    assert tiles.shape == (batch.bound, 2) and tiles.dtype == torch.int32
    found = listed(tiles)
    expected = batch.model()
    assert sorted(found) == [(record[5], record[2] // batch.block) for record in expected]
    walked = {record[5]: -(-record[4] // batch.block) for record in expected}
    if batch.k_offsets is None:  # all the same, but for the tail
        walked = {b: int(b < batch.batch) for b in walked}
    blocks = [min(walked[b], LONGEST_CLASS) for b, _ in found]
    assert blocks == sorted(blocks, reverse=True)
    for before, (b, i) in zip([None, *found], found, strict=False):
        assert i == 0 or before == (b, i - 1)


@needs_triton
def test_sequences_past_the_last_class_are_listed_too():
    lengths = [100, 127 * 128, 126 * 128, 500 * 128, 127 * 128 + 1]
    batch = Batch(cumulated([300] * 5), cumulated(lengths), 5, 1500, sum(lengths), 128)
    records = batch.build(kernel=True)
    found = [tuple(record) for record in records[1 : records[0, 0] + 1].tolist()]
    assert sorted(found, key=lambda record: (record[5], record[2])) == batch.model()
    check_order(found, 128)
    assert {record[5] for record in found[:9]} == {1, 3, 4}


@needs_triton
@pytest.mark.parametrize("batch", [2047, 5000])
def test_batches_larger_than_a_program_counts_at_once(batch):
    draw = random.Random(batch)
    q_lengths, k_lengths = ([draw.choice([0, 1, 70, 130]) for _ in range(batch)] for _ in range(2))
    case = Batch(cumulated(q_lengths), cumulated(k_lengths), batch, sum(q_lengths) + 7, sum(k_lengths), 64)
    records = case.build(kernel=True)
    found = [tuple(record) for record in records[1 : records[0, 0] + 1].tolist()]
    assert sorted(found, key=lambda record: (record[5], record[2])) == case.model()
    check_order(found, 64)


garbage = st.one_of(st.integers(-5, 700), st.sampled_from([-(2**31), 2**31 - 1, 0, 600]))
wild_garbage = st.one_of(garbage, st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**32, 2**32 + 5, -(2**32), 2**63 - 1]))


@pytest.mark.parametrize("kernel", BUILDERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_garbage_offsets_claim_nothing_outside(kernel, data):
    count = data.draw(st.sampled_from([1, 2, 4, 40]))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    values = st.lists(garbage if dtype == torch.int32 else wild_garbage, min_size=count, max_size=count)
    batch = Batch(data.draw(values), data.draw(values), count - 1, 600, 450, 16, dtype)
    records = batch.build(kernel)
    tiles = records[0, 0].item()
    expected = batch.model()
    assert tiles == min(len(expected), batch.bound)
    found = [tuple(record) for record in records[1 : tiles + 1].tolist()]
    assert len(set(found)) == tiles
    check_listed(found, expected)
    check_order(found, 16)
    pairs = listed(batch.tiles(kernel))
    assert len(set(pairs)) == len(pairs) == tiles
    assert set(pairs) <= {(record[5], record[2] // 16) for record in expected}


@needs_triton
def test_offsets_at_the_ends_of_64_bits_do_not_wrap_around():
    values = [356, -(2**63), 2**63 - 1, -(2**63) + 355, 2**32 + 5, 7]
    batch = Batch(values, values, 5, 600, 450, 16, torch.int64)
    assert model_side(values, 5, 600) == [(356, 0), (0, 600), (600, 0), (0, 600), (600, 0), (7, 593)]
    batch.tiles(kernel=True)  # compares the bounds
    records = batch.build(kernel=True)
    assert records[0, 0] == batch.bound
    check_listed([tuple(record) for record in records[1:].tolist()], batch.model())


@needs_triton
def test_more_tiles_than_32_bits_count_are_counted():
    """Offsets that alternate between 0 and the end claim the whole buffer every second time: 2^31 tiles of 16 rows and more."""
    rows, batch = 2**31 - 16, 64
    values = [0, rows] * (batch // 2) + [0]
    counts = schedule_kernels.new_counts(True, batch, DEVICE)
    guarded, records = guard(100 + 1, 8)  # a list shorter than its bound, as if more were claimed yet
    schedule_kernels.launch_records(
        records, counts, torch.tensor(values, dtype=torch.int32, device=DEVICE), None, batch, rows, 10, 16
    )
    check_guard(guarded)
    assert counts[0, 0].sum() == 33 * (rows // 16) > 2**31
    assert records[0, 0] == 100
    assert records[1:, 2].tolist() == [16 * i for i in range(100)]


@needs_triton
@pytest.mark.parametrize("programs", [1, 7, 132])
@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 4000)), min_size=1, max_size=80))
def test_dealt_out_in_turn_the_tiles_keep_programs_equally_busy(programs, lengths):
    q_lengths, k_lengths = ([pair[i] for pair in lengths] for i in (0, 1))
    batch = Batch(cumulated(q_lengths), cumulated(k_lengths), len(lengths), sum(q_lengths), sum(k_lengths), 128)
    records = batch.build(kernel=True)
    work = [max(key_class(k_length), 1) for k_length in records[1 : records[0, 0] + 1, 4].tolist()]
    loads = [sum(work[program::programs]) for program in range(programs)]
    assert max(loads) - sum(loads) / programs <= max(work, default=0)


def test_records_are_shared_until_the_offsets_change():
    q, k = offsets(5, 6), offsets(7, 8)
    first = schedule.records(q, k, 2, 11, 15, 128)
    assert schedule.records(q, k, 2, 11, 15, 128) is first
    assert schedule.records(q, None, 2, 11, 15, 128) is not first
    k[1] = 4
    assert schedule.records(q, k, 2, 11, 15, 128)[1:3, 3:5].tolist() == [[4, 11], [0, 4]]


class TestKnownRecords:
    """What a launch looks up before it asks for a list to be built."""

    @pytest.fixture
    def capturing(self, monkeypatch) -> list[bool]:
        state = [False]
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: state[0])
        return state

    @pytest.mark.parametrize("sides", ["both", "one for both", "queries", "keys"])
    def test_are_those_that_were_built(self, capturing, sides):
        q, k = offsets(5, 6), offsets(7, 8)
        q, k = {"both": (q, k), "one for both": (q, q), "queries": (q, None), "keys": (None, k)}[sides]
        kind = schedule.records_kind(q is not None, k is not None, 2, 11, 15, 128)
        assert schedule.known(kind, q, k, 0) is None
        built = schedule.records(q, k, 2, 11, 15, 128)
        assert schedule.known(kind, q, k, 0) is built
        assert schedule.known(kind, q, k, 1) is None, "of another stream"
        assert schedule.known((*kind[:-1], 64), q, k, 0) is None
        capturing[0] = True
        assert schedule.known(kind, q, k, 0) is None, "a captured graph builds its own"

    @pytest.mark.parametrize("changed", ["queries", "keys"])
    def test_are_gone_when_offsets_change(self, capturing, changed):
        q, k = offsets(5, 6), offsets(7, 8)
        kind = schedule.records_kind(True, True, 2, 11, 15, 128)
        schedule.records(q, k, 2, 11, 15, 128)
        (q if changed == "queries" else k)[1] = 4
        assert schedule.known(kind, q, k, 0) is None

    def test_are_not_given_to_another_tensor_at_the_address(self, capturing):
        for length in range(1, 50):
            cu = offsets(length)
            kind = schedule.records_kind(True, False, 1, 60, 3, 128)
            assert schedule.known(kind, cu, None, 0) is None
            schedule.records(cu, None, 1, 60, 3, 128)
            del cu


@needs_triton
def test_strided_offsets_are_read_by_their_strides():
    apart = torch.tensor([0, 99, 5, 99, 11, 99], device=DEVICE)[::2]
    assert schedule_kernels.build_bounds(apart, 11).tolist() == [[0, 5], [5, 6], [11, 0]]
    records = schedule_kernels.build_records(apart, None, 2, 11, 3, 16, schedule.tile_bound(True, 2, 11, 16))
    assert sorted(records[1:3, :2].tolist()) == [[0, 5], [5, 6]]


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def listed(tiles: torch.Tensor) -> list[tuple[int, int]]:
    """The tiles up to the end mark, which must be followed by end marks only."""
    pairs = [tuple(pair) for pair in tiles.tolist()]
    real = [pair for pair in pairs if pair[0] >= 0]
    assert pairs[: len(real)] == real
    return real


def model(lengths: list[int], block: int) -> set[tuple[int, int]]:
    return {(b, i) for b, length in enumerate(lengths) for i in range(-(-length // block))}


@pytest.mark.parametrize("seed", range(20))
def test_every_tile_is_listed_once_and_the_bound_holds(seed):
    draw = random.Random(seed)
    batch, block = draw.choice([0, 1, 2, 7, 40]), draw.choice([16, 64, 128, 192])
    q_lengths = [draw.choice([0, 0, 1, block - 1, block, block + 1, draw.randrange(500)]) for _ in range(batch)]
    k_lengths = [draw.choice([0, 3, draw.randrange(500)]) for _ in range(batch)]
    tail = draw.choice([0, 1, 3 * block])
    rows = sum(q_lengths) + tail
    queries = schedule.bounds(offsets(*q_lengths), rows)
    keys = schedule.bounds(offsets(*k_lengths), sum(k_lengths))
    tiles = schedule.tiles(queries, keys, batch, rows, block)
    assert tiles.shape == (schedule.tile_bound(True, batch, rows, block), 2)
    found = listed(tiles)
    assert len(found) == len(set(found))
    assert set(found) == model([*q_lengths, tail], block)
    walked = [k_lengths[b] if b < batch else 0 for b, _ in found]
    assert walked == sorted(walked, reverse=True)


def test_a_dense_owner_is_cut_into_equal_tiles_sorted_by_the_other_side():
    keys = schedule.bounds(offsets(3, 90, 0, 40), 133)
    found = listed(schedule.tiles(None, keys, 4, 100, 64))
    assert [b for b, _ in found] == [1, 1, 3, 3, 0, 0, 2, 2]
    assert set(found) == model([100] * 4, 64)


def test_bounds_give_each_sequence_and_the_uncovered_tail():
    assert schedule.bounds(offsets(3, 0, 4), 10).tolist() == [[0, 3], [3, 0], [3, 4], [7, 3]]


@pytest.mark.parametrize(
    "values",
    [[0, 50, 20, 90], [-5, 3, 1000, 7], [2**31 - 1, 0, -(2**31), 5], [9, 9, 9, 9]],
    ids=["falls", "outside", "extreme", "late"],
)
def test_garbage_offsets_stay_inside_the_buffer(values):
    rows = 60
    bounds = schedule.bounds(torch.tensor(values, dtype=torch.int64), rows)
    starts, lengths = bounds.unbind(1)
    assert (starts >= 0).all()
    assert (lengths >= 0).all()
    assert (starts + lengths <= rows).all()
    tiles = schedule.tiles(bounds, bounds, 3, rows, 16)
    assert tiles.shape[0] == schedule.tile_bound(True, 3, rows, 16)
    for b, i in listed(tiles):
        assert i * 16 < lengths[b]


def test_layers_share_a_schedule_until_the_offsets_change():
    cu = offsets(5, 6)
    first = schedule.bounds(cu, 11)
    assert schedule.bounds(cu, 11) is first
    assert schedule.bounds(cu, 12) is not first
    cu[1] = 4
    assert schedule.bounds(cu, 11).tolist() == [[0, 4], [4, 7], [11, 0]]


@pytest.mark.parametrize("owner", ["queries", "keys", "neither"])
@pytest.mark.parametrize("sides", ["both", "queries", "keys"])
def test_lists_are_the_bounds_and_the_tiles_found_at_one_look(monkeypatch, owner, sides):
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
    q = offsets(5, 6) if sides != "keys" else None
    k = offsets(70, 8) if sides != "queries" else None
    lists = schedule.lists(q, k, 2, 11, 78, 64, owner)
    q_bounds, k_bounds = (None if cu is None else schedule.bounds(cu, rows) for cu, rows in ((q, 11), (k, 78)))
    assert lists[1] is q_bounds
    assert lists[2] is k_bounds
    if owner == "neither":
        assert lists[0] is None
    else:
        own, other, rows = (q_bounds, k_bounds, 11) if owner == "queries" else (k_bounds, q_bounds, 78)
        assert lists[0] is schedule.tiles(own, other, 2, rows, 64)
    kind = schedule.lists_kind(q is not None, k is not None, 2, 11, 78, 64, owner)
    assert schedule.known(kind, q, k, 0) is lists
    assert schedule.known((*kind[:-1], "nobody"), q, k, 0) is None


def test_inference_tensors_have_no_version_to_know_a_list_by(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
    with torch.inference_mode():
        cu = offsets(5, 6)
    schedule.lists(cu, cu, 2, 11, 11, 64, "queries")
    assert schedule.known(schedule.lists_kind(True, True, 2, 11, 11, 64, "queries"), cu, cu, 0) is None


def test_a_schedule_that_another_thread_lets_go_of_meanwhile_is_built_again(monkeypatch):
    monkeypatch.setattr(schedule, "_cache", OrderedDict())
    cu = offsets(5, 6)
    bounds = schedule.bounds(cu, 11)
    ((key, (built, first, second)),) = schedule._cache.items()

    def second_and_last():
        schedule._cache.pop(key, None)
        return second()

    schedule._cache[key] = built, first, second_and_last
    assert torch.equal(schedule.bounds(cu, 11), bounds)
    assert schedule.bounds(cu, 11) is not built


def test_a_freed_tensors_schedule_is_not_given_to_another_at_its_address():
    for length in range(1, 50):
        assert schedule.bounds(offsets(length), 60)[0].tolist() == [0, length]


@pytest.fixture
def cache(monkeypatch) -> OrderedDict:
    monkeypatch.setattr(schedule, "_cache", OrderedDict())
    return schedule._cache


@pytest.mark.parametrize("gone", ["queries", "keys"])
def test_lists_go_with_either_of_the_offsets_they_are_built_from(cache, gone):
    sides = {"queries": offsets(5, 6), "keys": offsets(70, 8)}
    built = schedule.lists(sides["queries"], sides["keys"], 2, 11, 78, 64, "queries")
    records = schedule.records(sides["queries"], sides["keys"], 2, 11, 78, 64)
    seen = [weakref.ref(x) for x in (*built, records)]
    del built, records
    assert all(x() is not None for x in seen)
    stays = "keys" if gone == "queries" else "queries"
    del sides[gone]
    # The tiles, the gone side's bounds and the records; the bounds of the other side are still known by their own offsets.
    assert [x() is not None for x in seen] == [False, stays == "queries", stays == "keys", False]
    assert len(cache) == 1
    sides.clear()
    assert not cache


def test_lists_of_offsets_that_autograd_alone_holds_stay(cache):
    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, cu):
            ctx.save_for_backward(cu)
            return x.clone()

        @staticmethod
        def backward(ctx, d_out):
            (cu,) = ctx.saved_tensors
            return d_out * (schedule.bounds(cu, 11) is seen()), None

    x = torch.ones(1, requires_grad=True)
    cu = offsets(5, 6)
    out = Saving.apply(x, cu)
    seen = weakref.ref(schedule.bounds(cu, 11))
    del cu
    out.backward()
    assert x.grad == 1
    del out
    assert not cache


def test_threads_may_drop_offsets_while_others_build(cache):
    """The callbacks' own errors would be warnings, which are errors here."""
    errors = []

    def work(seed):
        draw = random.Random(seed)
        kept = []
        try:
            for _ in range(400):
                cu = offsets(draw.randrange(9), draw.randrange(9))
                expected = int(cu[1])
                kept.append(cu)
                kept[: max(0, len(kept) - draw.randrange(8))] = []
                for _ in range(2):
                    assert schedule.tiles(schedule.bounds(cu, 20), None, 2, 20, 16).shape[0] == 4
                    assert int(schedule.bounds(cu, 20)[0, 1]) == expected
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
    gc.collect()
    assert not cache


def test_stopping_to_share_lets_go_of_all_lists_and_of_those_built_from_them(cache, monkeypatch):
    monkeypatch.setattr(schedule, "_is_shared", True)
    cu = [offsets(5, length) for length in range(20)]
    for x in cu:
        schedule.lists(x, x, 2, 40, 40, 16, "queries")
    seen = [weakref.ref(entry[0]) for entry in cache.values() if isinstance(entry[0], torch.Tensor)]
    assert len(seen) == 40
    schedule.stop_sharing()
    assert not cache and not any(x() is not None for x in seen)
    assert schedule.bounds(cu[0], 40) is not schedule.bounds(cu[0], 40)


def test_heads_first_tensors_are_copied_so_that_their_length_is_not_compiled_in():
    pytest.importorskip("triton")
    from gdpa.backends import gpu
    from gdpa.backends.triton import launch

    heads_first = torch.randn(4, 65, 16).transpose(0, 1)
    assert launch._strides(gpu.aligned(heads_first)) == (0, 64, 16)
    fused = torch.randn(65, 3, 4, 16)[:, 1]
    assert gpu.aligned(fused) is fused
