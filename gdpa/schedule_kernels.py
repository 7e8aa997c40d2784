"""The schedule's kernels: bounds and tile lists, each in one launch. schedule.py holds the same in torch operations and says what they are.

A tile list is sorted by counting. Each sequence belongs to a class, its number of blocks to walk, longest first. Several programs write
the list without waiting for one another: each counts the tiles of every class over the whole batch (`totals`) and over the sequences
before its own (`places`), which gives all of them the same boundaries between the classes and each its own stretch within them. From
there a program takes places for its own sequences one by one, and writes their tiles.

Tiles are counted in 64 bits: garbage offsets may claim more of them than 32 bits count. What lies past the list's end is not written.
"""

# Kernel bodies are Triton's language, not Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdpa import launching

# Where a side's (start, length) come from: the same number of rows for each sequence, the caller's offsets, or `bounds`.
DENSE: tl.constexpr = tl.constexpr(0)
OFFSETS: tl.constexpr = tl.constexpr(1)
BOUNDS: tl.constexpr = tl.constexpr(2)

CLASSES: tl.constexpr = tl.constexpr(128)  # the first one takes every sequence of 127 blocks or more
LANES: tl.constexpr = tl.constexpr(2048)  # sequences counted at a time: most batches in one step, whose loads wait only once
OWNED: tl.constexpr = tl.constexpr(32)  # sequences whose tiles are written at a time,
TOGETHER: tl.constexpr = tl.constexpr(4)  # and tiles of each: four records are a cache line
RECORD: tl.constexpr = tl.constexpr(8)  # words of a record
PAIR: tl.constexpr = tl.constexpr(2)  # words of a (sequence, block)

# Each program reads the whole batch, so more of them stop paying.
MOST_PROGRAMS = 128
WARPS = 16  # also on devices whose warps have 64 threads, where a block has 1024 at the most


@triton.jit
def find_side(side_ptr, sequence, batch, rows, FORM: tl.constexpr):
    """The (start, length) of sequences, int32; of sequence `batch` the uncovered tail, where the side is packed. Past it, no rows."""
    if FORM == DENSE:
        start = sequence * rows
        length = tl.where(sequence < batch, rows, 0)
    elif FORM == OFFSETS:
        # Compared in 64 bits, before anything is cut off.
        start = tl.load(side_ptr + sequence, mask=sequence <= batch, other=0).to(tl.int64)
        end = tl.load(side_ptr + sequence + 1, mask=sequence < batch, other=0).to(tl.int64)
        start = tl.minimum(tl.maximum(start, 0), rows)
        end = tl.where(sequence < batch, tl.minimum(tl.maximum(end, 0), rows), rows)
        length = tl.where(sequence <= batch, tl.maximum(end - start, 0), 0).to(tl.int32)
        start = start.to(tl.int32)
    else:
        start = tl.load(side_ptr + 2 * sequence, mask=sequence <= batch, other=0)
        length = tl.load(side_ptr + 2 * sequence + 1, mask=sequence <= batch, other=0)
    return start, length


@triton.jit
def blocks_of(length, BLOCK: tl.constexpr):
    """ceil(length / BLOCK); length + BLOCK - 1 could pass 32 bits."""
    return length // BLOCK + (length % BLOCK > 0).to(tl.int32)


@triton.jit
def find_sequences(
    owner_ptr, other_ptr, sequence, batch, owner_rows, other_rows,
    OWNER: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr, WALKED_BLOCK: tl.constexpr,
):  # fmt: skip
    """(start, length) on both sides, the number of tiles and the class, 0 for the longest to walk."""
    start, length = find_side(owner_ptr, sequence, batch, owner_rows, OWNER)
    other_start, walked = find_side(other_ptr, sequence, batch, other_rows, OTHER)
    other_start = tl.where(sequence < batch, other_start, 0)
    walked = tl.where(sequence < batch, walked, 0)  # the tail attends to nothing
    tiles = blocks_of(length, BLOCK)
    place_class = CLASSES - 1 - tl.minimum(blocks_of(walked, WALKED_BLOCK), CLASSES - 1)
    return start, length, other_start, walked, tiles, place_class


@triton.jit(
    do_not_specialize=["batch", "owner_rows", "other_rows", "bound", "share"],
    do_not_specialize_on_alignment=["list_ptr", "owner_ptr", "other_ptr"],
)
def list_kernel(
    list_ptr, counts_ptr, owner_ptr, other_ptr, batch, owner_rows, other_rows, bound, share,
    OWNER: tl.constexpr, OTHER: tl.constexpr, RECORDS: tl.constexpr, BLOCK: tl.constexpr, WALKED_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i writes the tiles of the sequences i * share .. (i + 1) * share."""
    program = tl.program_id(0)
    sequences = batch + (1 if OWNER != DENSE else 0)
    mine = program * share
    mine_end = tl.minimum(mine + share, sequences)
    totals_ptr = counts_ptr + program * (2 * CLASSES)
    places_ptr = totals_ptr + CLASSES
    classes = tl.arange(0, CLASSES)
    tl.store(totals_ptr + classes, tl.zeros([CLASSES], tl.int64))
    tl.store(places_ptr + classes, tl.zeros([CLASSES], tl.int64))
    tl.debug_barrier()  # every count is zero

    for first in range(0, sequences, LANES):
        sequence = first + tl.arange(0, LANES)
        _, _, _, _, tiles, place_class = find_sequences(
            owner_ptr, other_ptr, sequence, batch, owner_rows, other_rows, OWNER, OTHER, BLOCK, WALKED_BLOCK
        )
        tl.atomic_add(totals_ptr + place_class, tiles.to(tl.int64), mask=tiles > 0, sem="relaxed")
        tl.atomic_add(places_ptr + place_class, tiles.to(tl.int64), mask=(tiles > 0) & (sequence < mine), sem="relaxed")
    tl.debug_barrier()  # everything is counted

    # Atomics work in L2; .cg does not look into L1, where the zeros may still lie.
    total = tl.load(totals_ptr + classes, cache_modifier=".cg")
    tl.atomic_add(places_ptr + classes, tl.cumsum(total, 0) - total, sem="relaxed")
    count = tl.minimum(tl.sum(total, 0), bound).to(tl.int32)
    tl.debug_barrier()  # places are places in the list

    WIDTH: tl.constexpr = RECORD if RECORDS else PAIR
    column = tl.arange(0, TOGETHER * WIDTH)
    word = (column % WIDTH)[None, :]
    if RECORDS:
        if program == 0:
            words = tl.arange(0, WIDTH)
            tl.store(list_ptr + words, tl.where(words == 0, count, 0))
        list_ptr += WIDTH
    else:
        for row in range(count + program * LANES, bound, tl.num_programs(0) * LANES):
            past = row + tl.arange(0, LANES)
            tl.store(list_ptr + past.to(tl.int64) * WIDTH, tl.full([LANES], -1, tl.int32), mask=past < bound)
            tl.store(list_ptr + past.to(tl.int64) * WIDTH + 1, tl.zeros([LANES], tl.int32), mask=past < bound)
    for first in range(mine, mine_end, OWNED):
        sequence = first + tl.arange(0, OWNED)
        start, length, other_start, walked, tiles, place_class = find_sequences(
            owner_ptr, other_ptr, sequence, batch, owner_rows, other_rows, OWNER, OTHER, BLOCK, WALKED_BLOCK
        )
        tiles = tl.where(sequence < mine_end, tiles, 0)
        place = tl.atomic_add(places_ptr + place_class, tiles.to(tl.int64), mask=tiles > 0, sem="relaxed")
        place = tl.where(tiles > 0, place, bound)  # masked lanes are not defined
        fitting = tl.minimum(tl.maximum(bound - place, 0), tiles).to(tl.int32)[:, None]  # tiles that the list has room for
        row_ptr = list_ptr + place[:, None] * WIDTH + column[None, :]
        for done in range(0, tl.max(fitting), TOGETHER):
            tile = done + (column // WIDTH)[None, :]  # [1, TOGETHER * WIDTH]
            if RECORDS:
                value = tl.where(word == 0, start[:, None], 0)
                value = tl.where(word == 1, length[:, None], value)
                value = tl.where(word == 2, tile * BLOCK, value)
                value = tl.where(word == 3, other_start[:, None], value)
                value = tl.where(word == 4, walked[:, None], value)
                value = tl.where(word == 5, sequence[:, None], value)
                value = tl.where(word == 6, fitting, value)
            else:
                value = tl.where(word == 0, sequence[:, None], tile)
            tl.store(row_ptr + done * WIDTH, value, mask=tile < fitting)


@triton.jit(do_not_specialize=["batch", "rows"], do_not_specialize_on_alignment=["offsets_ptr"])
def bounds_kernel(bounds_ptr, offsets_ptr, batch, rows, BLOCK: tl.constexpr):
    sequence = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start, length = find_side(offsets_ptr, sequence, batch, rows, OFFSETS)
    tl.store(bounds_ptr + 2 * sequence, start, mask=sequence <= batch)
    tl.store(bounds_ptr + 2 * sequence + 1, length, mask=sequence <= batch)


def build_bounds(offsets: Tensor, rows: int) -> Tensor:
    """schedule.bounds in one launch."""
    bounds = torch.empty((offsets.shape[0], 2), dtype=torch.int32, device=offsets.device)
    launch_bounds(bounds, offsets, rows)
    return bounds


def build_tiles(owner: Tensor | None, other: Tensor | None, batch: int, rows: int, block: int, bound: int) -> Tensor:
    """schedule.tiles in one launch."""
    device = _device_of(owner, other)
    tiles = torch.empty((bound, 2), dtype=torch.int32, device=device)
    launch_tiles(tiles, new_counts(owner is not None, batch, device), owner, other, batch, rows, block)
    return tiles


def build_records(
    q_offsets: Tensor | None, k_offsets: Tensor | None, batch: int, q_rows: int, k_rows: int, block: int, bound: int
) -> Tensor:
    """schedule.records in one launch."""
    device = _device_of(q_offsets, k_offsets)
    records = torch.empty((bound + 1, 8), dtype=torch.int32, device=device)
    launch_records(records, new_counts(q_offsets is not None, batch, device), q_offsets, k_offsets, batch, q_rows, k_rows, block)
    return records


def new_counts(packed: bool, batch: int, device: torch.device) -> Tensor:
    """Memory for the programs' counts, a pair of tables each."""
    programs, _ = _shares(batch + packed)
    return torch.empty((programs, 2, CLASSES.value), dtype=torch.int64, device=device)


def launch_bounds(bounds: Tensor, offsets: Tensor, rows: int, compile_only: bool = False) -> Any:
    batch = offsets.shape[0] - 1
    grid = (batch // 512 + 1,)
    return _launch(bounds_kernel, grid, (bounds, _plain(offsets), batch, rows), {"BLOCK": 512, "num_warps": 4}, compile_only)


def launch_tiles(
    tiles: Tensor, counts: Tensor, owner: Tensor | None, other: Tensor | None, batch: int, rows: int, block: int,
    compile_only: bool = False,
) -> Any:  # fmt: skip
    sides = {"OWNER": DENSE if owner is None else BOUNDS, "OTHER": DENSE if other is None else BOUNDS}
    constants = {**sides, "RECORDS": False, "BLOCK": block, "WALKED_BLOCK": block, "num_warps": WARPS}
    programs, share = _shares(batch + (owner is not None))
    # Dense sequences are equally long: any length but none, which is the tail's.
    arguments = (tiles, counts, _plain(owner), _plain(other), batch, rows, 1, tiles.shape[0], share)
    return _launch(list_kernel, (programs,), arguments, constants, compile_only)


def launch_records(
    records: Tensor, counts: Tensor, q_offsets: Tensor | None, k_offsets: Tensor | None, batch: int, q_rows: int, k_rows: int,
    block: int, compile_only: bool = False,
) -> Any:  # fmt: skip
    sides = {"OWNER": DENSE if q_offsets is None else OFFSETS, "OTHER": DENSE if k_offsets is None else OFFSETS}
    constants = {**sides, "RECORDS": True, "BLOCK": block, "WALKED_BLOCK": 128, "num_warps": WARPS}
    programs, share = _shares(batch + (q_offsets is not None))
    arguments = (records, counts, _plain(q_offsets), _plain(k_offsets), batch, q_rows, k_rows, records.shape[0] - 1, share)
    return _launch(list_kernel, (programs,), arguments, constants, compile_only)


def compiled(block: int) -> Iterator[tuple[str, Any]]:
    """Every kernel in every form, built but not run, for the architecture that Triton targets: (name, Triton's compiled kernel)."""
    batch, rows = 4, 1024
    meta = torch.device("meta")
    bounds = torch.empty((batch + 1, 2), dtype=torch.int32, device=meta)
    tiles = torch.empty((64, 2), dtype=torch.int32, device=meta)
    records = torch.empty((64, 8), dtype=torch.int32, device=meta)
    counts = new_counts(True, batch, meta)
    for owner, other in ((bounds, bounds), (bounds, None), (None, bounds)):
        form = f"{'dense' if owner is None else 'packed'}-{'dense' if other is None else 'packed'}"
        yield f"tiles-{form}", launch_tiles(tiles, counts, owner, other, batch, rows, block, compile_only=True)
    for dtype in (torch.int32, torch.int64):
        offsets = torch.empty(batch + 1, dtype=dtype, device=meta)
        kind = str(dtype).removeprefix("torch.")
        yield f"bounds-{kind}", launch_bounds(bounds, offsets, rows, compile_only=True)
        for queries, keys in ((offsets, offsets), (offsets, None), (None, offsets)):
            form = f"{'dense' if queries is None else 'packed'}-{'dense' if keys is None else 'packed'}"
            built = launch_records(records, counts, queries, keys, batch, rows, rows, block, compile_only=True)
            yield f"records-{form}-{kind}", built


def _shares(sequences: int) -> tuple[int, int]:
    """(programs, sequences for each); one program at least, which says that there are no tiles."""
    owned = OWNED.value
    share = owned * max(-(-sequences // (owned * MOST_PROGRAMS)), 1)
    return max(-(-sequences // share), 1), share


def _device_of(one: Tensor | None, another: Tensor | None) -> torch.device:
    given = one if one is not None else another
    assert given is not None, "one side at least is packed"
    return given.device


def _plain(side: Tensor | None) -> Tensor | None:
    return None if side is None else side.contiguous()


def _launch(kernel: Any, grid: tuple[int], arguments: tuple[Any, ...], constants: dict[str, Any], compile_only: bool) -> Any:
    # There is nothing to fuse; unsaid, Triton 3.9 warns of its default.
    options = {"num_warps": constants.pop("num_warps"), "enable_fp_fusion": True}
    if compile_only:
        return kernel.warmup(*arguments, grid=grid, **constants, **options)
    device = arguments[0].device
    # Triton launches on the current device, which need not be the tensors'.
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        return launching.run(kernel, (*grid, 1, 1), device, arguments, constants, options)
