"""What the backward kernel leaves of dQ: the rows that attend to nothing, which no tile of keys reaches, and the sums of shared queries."""

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


def zero_unattended(
    dq: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, batch: int, q_rows: int, k_rows: int
) -> None:
    """Zero the rows of sequences without keys, and those that belong to no sequence. One side at least has offsets."""
    q_bounds = None if cu_seqlens_q is None else schedule.bounds(cu_seqlens_q, q_rows)
    k_bounds = None if cu_seqlens_k is None else schedule.bounds(cu_seqlens_k, k_rows)
    grid = (batch + (q_bounds is not None), PARTS, 1)
    arguments = (dq, dq if q_bounds is None else q_bounds, dq if k_bounds is None else k_bounds, batch, q_rows, k_rows)
    constants = {
        "WIDTH": dq.shape[-2] * dq.shape[-1],
        "BLOCK": 2048,
        "Q_PACKED": q_bounds is not None,
        "K_PACKED": k_bounds is not None,
    }
    launching.run(zero_kernel, grid, dq.device, arguments, constants, {"num_warps": WARPS})


def sum_programs(copy: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of several programs (programs, rows, heads, D) -> (rows, heads, D), columns in dQ's order (relay.place)."""
    _, rows, heads, columns = copy.shape
    return copy.sum(0).view(rows, heads, columns // 8, 2, 4).transpose(-1, -2).reshape(rows, heads, columns).to(dtype)
