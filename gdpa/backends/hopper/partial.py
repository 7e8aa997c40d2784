"""The fp32 copy of dQ that tiles of a long sequence add to: zeroed before the backward kernel, rounded into dQ after it.

Sequences whose keys one program takes need neither; a sequence without keys, and rows that no sequence covers, get their zeros here.
"""

# Kernel bodies are Triton's language, not Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdpa import schedule

ROWS = 32  # of a program; a tile of the list
WARPS = 8


@triton.jit
def find_rows(
    tiles_ptr, q_bounds_ptr, k_bounds_ptr, tile, q_rows, k_rows, ROWS: tl.constexpr, Q_PACKED: tl.constexpr, K_PACKED: tl.constexpr
):
    """(first row of a tile, its rows, its sequence, the keys of that); no rows past the list's end."""
    sequence = tl.load(tiles_ptr + 2 * tile)
    block = tl.load(tiles_ptr + 2 * tile + 1)
    there = sequence >= 0
    sequence = tl.maximum(sequence, 0)
    start = sequence * q_rows
    length = q_rows
    if Q_PACKED:
        start = tl.load(q_bounds_ptr + 2 * sequence)
        length = tl.load(q_bounds_ptr + 2 * sequence + 1)
    keys = k_rows
    if K_PACKED:
        keys = tl.load(k_bounds_ptr + 2 * sequence + 1)
    return start.to(tl.int64) + block * ROWS, tl.where(there, tl.minimum(length - block * ROWS, ROWS), 0), sequence, keys


@triton.jit
def in_order(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of the copy in dQ's order (backward.place): 8a + 4c + b holds 8a + 2b + c."""
    return tl.reshape(tl.permute(tl.reshape(x, [ROWS, COLUMNS // 8, 2, 4]), (0, 1, 3, 2)), [ROWS, COLUMNS])


@triton.jit(do_not_specialize=["batch", "q_rows", "k_rows", "item"])
def prepare_kernel(
    copy_ptr, tiles_ptr, q_bounds_ptr, k_bounds_ptr, batch, q_rows, k_rows, item,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, Q_PACKED: tl.constexpr, K_PACKED: tl.constexpr,
):  # fmt: skip
    """Zeros where several programs will add."""
    first, rows, sequence, keys = find_rows(
        tiles_ptr, q_bounds_ptr, k_bounds_ptr, tl.program_id(0), q_rows, k_rows, ROWS, Q_PACKED, K_PACKED
    )
    if (rows > 0) & (sequence < batch) & (keys > item):
        row = tl.arange(0, ROWS)[:, None]
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows) & (column < WIDTH)
        tl.store(copy_ptr + (first + row) * WIDTH + column, tl.zeros([ROWS, COLUMNS], tl.float32), mask=inside)


@triton.jit(do_not_specialize=["batch", "q_rows", "k_rows", "item"])
def finish_kernel(
    dq_ptr, copy_ptr, tiles_ptr, q_bounds_ptr, k_bounds_ptr, batch, q_rows, k_rows, item,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, Q_PACKED: tl.constexpr, K_PACKED: tl.constexpr,
):  # fmt: skip
    """The sums, rounded; zeros for queries without keys."""
    first, rows, sequence, keys = find_rows(
        tiles_ptr, q_bounds_ptr, k_bounds_ptr, tl.program_id(0), q_rows, k_rows, ROWS, Q_PACKED, K_PACKED
    )
    keys = tl.where(sequence < batch, keys, 0)
    if (rows > 0) & ((keys == 0) | (keys > item)):
        row = tl.arange(0, ROWS)[:, None]
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows) & (column < WIDTH)
        value = tl.load(copy_ptr + (first + row) * WIDTH + column, mask=inside & (keys > 0), other=0.0)
        value = in_order(value, ROWS, COLUMNS)
        tl.store(dq_ptr + (first + row) * WIDTH + column, value.to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def uncovered_kernel(dq_ptr, tail_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in the rows that no sequence covers, (start, length) at `tail_ptr`: usually none."""
    start = tl.load(tail_ptr).to(tl.int64) * WIDTH
    end = start + tl.load(tail_ptr + 1).to(tl.int64) * WIDTH
    for first in range(start + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        index = first + tl.arange(0, BLOCK)
        tl.store(dq_ptr + index, tl.zeros([BLOCK], dq_ptr.dtype.element_ty), mask=index < end)


@triton.jit(do_not_specialize=["count"])
def round_kernel(dq_ptr, copy_ptr, count, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """All of the copy, rounded. Tiles as in finish_kernel, which moves about 4 TB/s; a single row of 4,096 columns moved 1.5."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    index = row * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    value = in_order(tl.load(copy_ptr + index, mask=index < count, other=0.0), ROWS, COLUMNS)
    tl.store(dq_ptr + index, value.to(dq_ptr.dtype.element_ty), mask=index < count)


def _grid(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, batch: int, q_rows: int, k_rows: int, width: int
) -> tuple[tuple[int, int], tuple[Tensor, Tensor, Tensor], dict[str, int | bool]]:
    """The list of query tiles: its grid, its tensors and the kernels' constants. One side at least has offsets."""
    q_bounds = None if cu_seqlens_q is None else schedule.bounds(cu_seqlens_q, q_rows)
    k_bounds = None if cu_seqlens_k is None else schedule.bounds(cu_seqlens_k, k_rows)
    tiles = schedule.tiles(q_bounds, k_bounds, batch, q_rows, ROWS)
    columns = min(512, triton.next_power_of_2(width))
    grid = (schedule.tile_bound(q_bounds is not None, batch, q_rows, ROWS), triton.cdiv(width, columns))
    constants = {
        "WIDTH": width,
        "COLUMNS": columns,
        "ROWS": ROWS,
        "Q_PACKED": q_bounds is not None,
        "K_PACKED": k_bounds is not None,
    }
    return grid, (tiles, tiles if q_bounds is None else q_bounds, tiles if k_bounds is None else k_bounds), constants


def prepare(
    copy: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, batch: int, q_rows: int, k_rows: int, item: int
) -> None:
    """Zero the rows of sequences with more than `item` keys."""
    grid, tensors, constants = _grid(cu_seqlens_q, cu_seqlens_k, batch, q_rows, k_rows, copy.shape[-2] * copy.shape[-1])
    prepare_kernel[grid](copy, *tensors, batch, q_rows, k_rows, item, **constants, num_warps=WARPS)


def finish(
    dq: Tensor,
    copy: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    batch: int,
    q_rows: int,
    k_rows: int,
    item: int,
) -> None:
    """Round the rows of those sequences, and zero the rows that attend to nothing."""
    grid, tensors, constants = _grid(cu_seqlens_q, cu_seqlens_k, batch, q_rows, k_rows, dq.shape[-2] * dq.shape[-1])
    finish_kernel[grid](dq, copy, *tensors, batch, q_rows, k_rows, item, **constants, num_warps=WARPS)


def zero_uncovered(dq: Tensor, cu_seqlens_q: Tensor) -> None:
    """Zero the packed rows of dq that belong to no sequence."""
    tail = schedule.bounds(cu_seqlens_q, dq.shape[0])[-1]
    uncovered_kernel[(128,)](dq, tail, WIDTH=dq.shape[-2] * dq.shape[-1], BLOCK=2048, num_warps=WARPS)


def round_all(dq: Tensor, copy: Tensor) -> None:
    columns = 512
    grid = (triton.cdiv(dq.numel(), ROWS * columns),)
    round_kernel[grid](dq, copy, dq.numel(), COLUMNS=columns, ROWS=ROWS, num_warps=WARPS)


def sum_programs(copy: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of several programs (programs, rows, heads, D) -> (rows, heads, D), columns in their order."""
    _, rows, heads, columns = copy.shape
    return copy.sum(0).view(rows, heads, columns // 8, 2, 4).transpose(-1, -2).reshape(rows, heads, columns).to(dtype)
