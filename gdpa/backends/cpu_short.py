"""Batches of many short sequences on the CPU: padded to each other's length, a run of similar ones at a time.

Sequence by sequence, the tiles of gdpa/backends/cpu.py cost some 100 microseconds of Python and dispatch each, whatever their size. Here a
run of sequences is one batched product:

    S = scale * Q K^T          [n, Hkv, G * Lq, Lk], Lq and Lk the longest of the run
    P = where(both rows exist, f(S), 0)
    O = out_scale * P V

A run has at most RUN_SCORES scores, so no score matrix of a batch exists either. Sequences are different matrices of a product, and what
stands in padded places is overwritten with zeros after every activation: values never meet. fp32 is computed in float64, as other short
sequences are (cpu_plan.EXACT_PAIRS), bf16 and fp16 in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gdpa.backends.cpu_kernels import kernel_of
from gdpa.problem import Problem, row_ranges

LEAST_SEQUENCES = 8
# Multiplications in Q K^T of the longest sequence, over all heads. Longer ones are faster one by one: 64 of 32 to 64 rows (fp32, 4 heads,
# D = 128) took 30 ms forward and backward against 104 ms here, but 256 of 1 to 16 rows (2 heads, D = 16) 31 ms against 10 ms.
MOST_WORK = 1 << 17
RUN_SCORES = 1 << 19
LEAST_IN_RUN = 16  # fewer cost more in calls than their padding does


def takes(problem: Problem, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> bool:
    """Whether the batch is one of many short sequences, with the options that are served here."""
    if problem.batch < LEAST_SEQUENCES or problem.masked or len(problem.activations) > 1 or problem.dtype == torch.float64:
        return False
    shortest, longest = 1, 1
    for offsets, rows in ((cu_seqlens_q, problem.query_rows), (cu_seqlens_k, problem.key_rows)):
        least, most = (rows, rows) if offsets is None else (int(x) for x in offsets.diff().aminmax())
        shortest, longest = shortest * least, longest * most
    # Sequences of equal lengths share products without padding, in tiles.
    return shortest < longest and longest * problem.heads * problem.head_dim <= MOST_WORK


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Tensor:
    kernel = kernel_of(problem.activations[0])
    out = torch.zeros(problem.output_shape, dtype=q.dtype)
    for run in _runs(problem, cu_seqlens_q, cu_seqlens_k):
        s = problem.scale * (run.queries(q) @ run.keys(k).mT)
        kernel.value(s)
        s.masked_fill_(run.absent, 0)
        run.store_queries(out, run.scaled(s @ run.keys(v), out_scale))
    return out


def backward(
    problem: Problem,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    kernel = kernel_of(problem.activations[0])
    shared = problem.query_side == "shared"
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) if need else None for x, need in zip((q, k, v), needs, strict=True))
    dq_sum: Tensor | None = None
    for run in _runs(problem, cu_seqlens_q, cu_seqlens_k):
        q_run, k_run = run.queries(q), run.keys(k)
        do = run.scaled(run.gradients(d_out), out_scale)
        s = problem.scale * (q_run @ k_run.mT)
        p = torch.empty_like(s)
        slope = dq is not None or dk is not None
        kernel.prepare(s, p if dv is not None else None, slope)
        if dv is not None:
            p.masked_fill_(run.absent, 0)
            run.store_keys(dv, p.mT @ do)
        if not slope:
            continue
        ds = do @ run.keys(v).mT
        kernel.multiply_by_slope(ds, s)
        ds.masked_fill_(run.absent, 0).mul_(problem.scale)
        if dq is not None:
            dq_run = ds @ k_run
            if shared:
                total = dq_run.sum(0)
                dq_sum = total if dq_sum is None else dq_sum + total
            else:
                run.store_queries(dq, dq_run)
        if dk is not None:
            run.store_keys(dk, ds.mT @ q_run)
    if dq is not None and dq_sum is not None:
        dq.copy_(dq_sum.view(problem.heads, problem.query_rows, problem.head_dim).transpose(0, 1))
    return dq, dk, dv


class _Run:
    """The sequences `members`. Tiles are [n, Hkv, G * Lq, features] of queries and [n, Hkv, Lk, features] of keys."""

    def __init__(self, problem: Problem, members: list[int], q_ranges: _Ranges, k_ranges: _Ranges) -> None:
        self.problem, self.members = problem, torch.tensor(members)
        self.q_rows, self.q_there = _rows([q_ranges[member] for member in members])
        self.k_rows, self.k_there = _rows([k_ranges[member] for member in members])
        self.wide = torch.float32 if problem.dtype.itemsize == 2 else torch.float64
        both = self.q_there[:, :, None] & self.k_there[:, None, :]  # [n, Lq, Lk]
        self.absent = ~both[:, None, None].expand(-1, 1, problem.group, -1, -1).flatten(2, 3)  # [n, 1, G * Lq, Lk]

    def queries(self, q: Tensor) -> Tensor:
        if self.problem.query_side == "shared":
            return self._by_key_head(q[None].to(self.wide))
        return self.gradients(q)

    def gradients(self, x: Tensor) -> Tensor:
        """Queries, or anything of the output's shape."""
        return self._by_key_head(self._load(x, self.q_rows, self.q_there))

    def keys(self, x: Tensor) -> Tensor:
        return self._load(x, self.k_rows, self.k_there).transpose(1, 2)

    def scaled(self, tile: Tensor, out_scale: Tensor | None) -> Tensor:
        if out_scale is not None:
            return tile * out_scale[self.members].to(self.wide)[:, None, None, None]
        return tile if self.problem.out_scale == 1 else tile * self.problem.out_scale

    def store_queries(self, x: Tensor, tile: Tensor) -> None:
        by_head = tile.unflatten(2, (self.problem.group, self.q_rows.shape[1]))  # [n, Hkv, G, Lq, features]
        rows = by_head.permute(0, 3, 1, 2, 4).flatten(2, 3)
        self._store(x, rows, self.q_rows, self.q_there)

    def store_keys(self, x: Tensor, tile: Tensor) -> None:
        self._store(x, tile.transpose(1, 2), self.k_rows, self.k_there)

    def _by_key_head(self, rows: Tensor) -> Tensor:
        """[n, L, H, features] -> [n, Hkv, G * L, features]."""
        grouped = rows.unflatten(2, (self.problem.kv_heads, self.problem.group))
        by_key_head: Tensor = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)
        return by_key_head

    def _load(self, x: Tensor, rows: Tensor, there: Tensor) -> Tensor:
        if x.dim() == 4:
            return x[self.members].to(self.wide)
        if x.shape[0] == 0:
            return x.new_zeros(*rows.shape, *x.shape[1:], dtype=self.wide)
        found = x.index_select(0, rows.flatten().clamp(max=x.shape[0] - 1)).to(self.wide).view(*rows.shape, *x.shape[1:])
        return found.masked_fill_(~there[:, :, None, None], 0)

    def _store(self, x: Tensor, tile: Tensor, rows: Tensor, there: Tensor) -> None:
        if x.dim() == 4:
            x[self.members] = tile.to(x.dtype)
        else:
            x[rows[there]] = tile[there].to(x.dtype)


_Ranges = list[tuple[int, int]]


def _runs(problem: Problem, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Iterator[_Run]:
    queries = row_ranges(cu_seqlens_q, problem.batch, problem.query_rows)
    keys = row_ranges(cu_seqlens_k, problem.batch, problem.key_rows)
    scores = [problem.heads * q_len * k_len for (_, q_len), (_, k_len) in zip(queries, keys, strict=True)]
    # Results start as zeros, which is what sequences without pairs leave: scaled here, theirs would be NaN where out_scale is 1 / length.
    order = sorted((b for b in range(problem.batch) if scores[b]), key=scores.__getitem__, reverse=True)
    start = 0
    while start < len(order):
        longest = scores[order[start]]
        most = start + max(1, RUN_SCORES // max(1, longest))
        stop = min(start + LEAST_IN_RUN, most, len(order))
        while stop < min(most, len(order)) and 2 * scores[order[stop]] >= longest:
            stop += 1
        yield _Run(problem, order[start:stop], queries, keys)
        start = stop


def _rows(ranges: _Ranges) -> tuple[Tensor, Tensor]:
    """(n, L) the packed row of every place, and whether there is one."""
    starts, lengths = torch.tensor(ranges).unbind(1)
    place = torch.arange(int(lengths.max()))
    return starts[:, None] + place, place < lengths[:, None]
