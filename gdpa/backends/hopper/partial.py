"""What the backward kernel leaves of dQ: the rows that attend to nothing, which no tile of keys reaches, the sums of shared queries, and
those of causal sequences, which tiles add to zeros."""

# Kernel bodies are Triton's language, not Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdpa import launching, schedule

PARTS = 8  # programs that share the rows of a sequence
WARPS = 8


@triton.jit(do_not_specialize=["batch", "q_rows", "k_rows"])
def zero_kernel(
    dq_ptr, q_bounds_ptr, k_bounds_ptr, batch, q_rows, k_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, Q_PACKED: tl.constexpr, K_PACKED: tl.constexpr,
):  # fmt: skip
    """Zeros for sequence `program_id(0)` if it has no keys; sequence `batch` is the uncovered tail of packed queries."""
    sequence = tl.program_id(0)
    keys = k_rows
    if K_PACKED:
        keys = tl.load(k_bounds_ptr + 2 * sequence + 1)
    if (keys == 0) | (sequence == batch):
        start = sequence.to(tl.int64) * q_rows
        length = q_rows.to(tl.int64)
        if Q_PACKED:
            start = tl.load(q_bounds_ptr + 2 * sequence).to(tl.int64)
            length = tl.load(q_bounds_ptr + 2 * sequence + 1).to(tl.int64)
        for first in range(start * WIDTH + tl.program_id(1) * BLOCK, (start + length) * WIDTH, tl.num_programs(1) * BLOCK):
            index = first + tl.arange(0, BLOCK)
            tl.store(dq_ptr + index, tl.zeros([BLOCK], dq_ptr.dtype.element_ty), mask=index < (start + length) * WIDTH)


class Zeros:
    """Zeros for the rows of dQ of sequences without keys, and for those that belong to no sequence: for calls of one shape, whose queries
    or keys are packed or both, and whose rows have `width` elements."""

    __slots__ = ("constants", "grid", "numbers", "recipe")

    def __init__(self, q_packed: bool, k_packed: bool, batch: int, q_rows: int, k_rows: int, width: int) -> None:
        self.grid = (batch + q_packed, PARTS, 1)
        self.numbers = (batch, q_rows, k_rows)
        self.constants = {"WIDTH": width, "BLOCK": 2048, "Q_PACKED": q_packed, "K_PACKED": k_packed}
        self.recipe: launching.Recipe | None = None

    def write(self, dq: Tensor, q_bounds: Tensor | None, k_bounds: Tensor | None) -> None:
        """Into a contiguous `dq` on the current device; the bounds are schedule.bounds' or, of a side that is not packed, None."""
        pointers = (dq, dq if q_bounds is None else q_bounds, dq if k_bounds is None else k_bounds)
        if self.recipe is None:
            options = {"num_warps": WARPS}
            self.recipe = launching.run(zero_kernel, self.grid, dq.device, (*pointers, *self.numbers), self.constants, options)
        else:
            stream = torch._C._cuda_getCurrentRawStream(dq.device.index)
            launching.start(self.recipe, self.grid, stream, (), (*pointers, *self.numbers))


def zero_unattended(
    dq: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, batch: int, q_rows: int, k_rows: int
) -> None:
    """Write those zeros. One side at least has offsets."""
    _, q_bounds, k_bounds = schedule.lists(cu_seqlens_q, cu_seqlens_k, batch, q_rows, k_rows, 0, "neither")
    packed = q_bounds is not None, k_bounds is not None
    Zeros(*packed, batch, q_rows, k_rows, dq.shape[-2] * dq.shape[-1]).write(dq, q_bounds, k_bounds)


@triton.jit
def placed(index):
    """Where an element of dQ lies in the fp32 copy, whose columns are in another order (relay.place)."""
    return index // 8 * 8 + index % 2 * 4 + index % 8 // 2


@triton.jit
def round_kernel(copy_ptr, dq_ptr, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(dq_ptr + index, tl.load(copy_ptr + placed(index), mask=inside).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def long_kernel(copy_ptr, dq_ptr, bounds_ptr, least, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr):
    """Of the rows of sequences longer than `least`: dQ of the fp32 copy, or zeros in that."""
    start = tl.load(bounds_ptr + 2 * tl.program_id(0)).to(tl.int64)
    length = tl.load(bounds_ptr + 2 * tl.program_id(0) + 1)
    if length > least:
        end = (start + length) * WIDTH
        for first in range(start * WIDTH + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
            index = first + tl.arange(0, BLOCK)
            if ROUND:
                value = tl.load(copy_ptr + placed(index), mask=index < end)
                tl.store(dq_ptr + index, value.to(dq_ptr.dtype.element_ty), mask=index < end)
            else:
                tl.store(copy_ptr + index, tl.zeros([BLOCK], tl.float32), mask=index < end)


ROUND_BLOCK = 4096
LONG_PARTS = 16  # programs that share the rows of a sequence


def rounded(copy: Tensor, dtype: torch.dtype) -> Tensor:
    """dQ of an fp32 copy to which tiles have added."""
    dq = torch.empty_like(copy, dtype=dtype)
    if dq.numel():
        round_kernel[(-(-dq.numel() // ROUND_BLOCK),)](copy, dq, dq.numel(), BLOCK=ROUND_BLOCK, num_warps=WARPS)
    return dq


def clear_long(copy: Tensor, bounds: Tensor, least: int) -> None:
    """Zeros in the fp32 copy for sequences of more than `least` rows; `bounds` are schedule.bounds' of the queries."""
    _long(copy, copy, bounds, least, False)


def round_long(copy: Tensor, dq: Tensor, bounds: Tensor, least: int) -> None:
    """dQ of those sequences."""
    _long(copy, dq, bounds, least, True)


def _long(copy: Tensor, dq: Tensor, bounds: Tensor, least: int, to_round: bool) -> None:
    width = dq.shape[-2] * dq.shape[-1]
    grid = (bounds.numel() // 2, LONG_PARTS)
    long_kernel[grid](copy, dq, bounds, least, WIDTH=width, BLOCK=ROUND_BLOCK, ROUND=to_round, num_warps=WARPS)


def sum_programs(copy: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of several programs (programs, rows, heads, D) -> (rows, heads, D), columns in dQ's order (relay.place)."""
    _, rows, heads, columns = copy.shape
    placed = copy.sum(0).view(rows, heads, columns // 8, 2, 4).transpose(-1, -2)
    return placed.to(dtype, memory_format=torch.contiguous_format).view(rows, heads, columns)
