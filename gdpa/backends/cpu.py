"""Tiled forward and backward on the CPU with torch's own operators. No whole score matrix exists at any time.

A block is a run of sequences of equal lengths (usually one sequence), a chunk some of its key heads: each batched
product has N = sequences * key heads matrices. A query tile is R rows of F query heads of each key head, a key tile is
C keys:

    forward, for each query tile:   Q [N, F*R, D]
        for each key tile:          S = scale * Q K^T       [N, F*R, C]
                                    P = mask(f(S))          in place of S
                                    O += P V                [N, F*R, Dv]
        O *= out_scale, stored once

    backward, for each query tile:  Q, dO * out_scale
        for each key tile:          S = scale * Q K^T
                                    P = mask(f(S))          second buffer
                                    dV += P^T dO            [N, C, Dv]
                                    dP = dO V^T             in place of P
                                    dS = mask(f'(S) * dP)   in place of dP
                                    dQ += scale * dS K      [N, F*R, D]
                                    dK += scale * dS^T Q    [N, C, D]

Folding the query heads of a key head into the rows makes grouped queries ordinary products.

Precision: bf16 and fp16 inputs are widened to fp32 when they are copied heads-first, and everything until the one
rounding of each result is fp32 (float64 for float64, and for tiny fp32 sequences). Widening is also the fastest choice:
on an Emerald Rapids Xeon oneDNN's AVX-512 bf16 products ran at 140 GFLOP/s against 280 for MKL's fp32 ones; they cannot
return fp32 scores; and the AMX ones die of SIGILL on virtual machines that announce AMX without its tiles.

Threads: chunks are independent, so they go to workers whose operators are single-threaded. There is no barrier inside
an operator then: beside other busy processes, operators of 2 threads took 2 to 10 times as long as 2 workers.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from gdpa.backends.cpu_kernels import Kernel, kernel_of
from gdpa.problem import Problem, row_ranges

# One tile of scores is at most TILE_ROWS x TILE_KEYS for each matrix of the product, and TILE_SCORES in all.
TILE_ROWS = 512
TILE_KEYS = 512
MASKED_TILE_KEYS = 256  # a finer grid lets windows skip more of it
TILE_SCORES = 1 << 18
# Work goes to workers if its tasks have this many scores on average (Python's lock makes two workers slower than one
# thread on smaller ones) and the largest is at most UNEVEN times a fair share of the whole.
LEAST_SCORES_FOR_WORKERS = 1 << 15
UNEVEN = 1.25
# fp32 blocks with at most this many (query, key) pairs are computed in float64. Their sums are so short and few that
# the order of one decides whether it errs more than twice the ideal, as it did in 1 % of random problems.
EXACT_PAIRS = 1 << 10


def supports(problem: Problem) -> str | None:
    if problem.device.type != "cpu":
        return f"it runs on CPU tensors, these are on {problem.device}"
    return None


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Tensor:
    out = torch.empty(problem.output_shape, dtype=q.dtype)
    views = _Views(problem, out_scale)
    plan = _Plan.of(problem, cu_seqlens_q, cu_seqlens_k)
    for block in plan.blocks:
        if block.k_len == 0:
            views.outputs(out, block).zero_()
    if problem.query_side == "packed":
        out[plan.covered_queries :].zero_()
    plan.run(lambda chunk, workspace: _forward_chunk(problem, views, chunk, workspace, q, k, v, out))
    return out


def _forward_chunk(
    problem: Problem, views: _Views, chunk: _Chunk, workspace: _Workspace, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> None:
    block = chunk.block
    q_all, o_all, out_scale = views.queries(q, block), views.outputs(out, block), views.out_scale(block)
    k_wide = workspace.load("k", views.keys(k, block)[:, :, chunk.kv_heads])  # [N, Sk, D]
    v_wide = workspace.load("v", views.keys(v, block)[:, :, chunk.kv_heads])  # [N, Sk, Dv]
    for queries in chunk.query_tiles():
        here = (slice(None), queries.rows, chunk.kv_heads, queries.members)
        key_tiles = chunk.key_tiles(queries)
        if not key_tiles:
            o_all[here].zero_()
            continue
        q_wide = workspace.load("q", q_all[here])  # [N, F*R, D]
        o_wide = workspace.take("o", (*q_wide.shape[:2], problem.value_dim))
        for step, keys in enumerate(key_tiles):
            s = workspace.take("s", (*q_wide.shape[:2], keys.size))
            _product(s, q_wide, k_wide[:, keys.slice].mT, problem.scale)
            for kernel, s_part in zip(queries.kernels, queries.split(s), strict=True):
                kernel.value(s_part)
            chunk.mask(s, queries, keys)
            _product(o_wide, s, v_wide[:, keys.slice], accumulate=step > 0)
        _multiply(o_wide, out_scale)
        _store(o_all[here], o_wide)


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
    """Scores are recomputed tile by tile; what only serves a gradient that nobody needs is not computed."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) if need else None for x, need in zip((q, k, v), needs, strict=True))
    if not any(needs):
        return dq, dk, dv
    views = _Views(problem, out_scale)
    plan = _Plan.of(problem, cu_seqlens_q, cu_seqlens_k)
    shared = problem.query_side == "shared"
    for block in plan.blocks:
        if block.empty:
            if dq is not None and not shared:
                views.queries(dq, block).zero_()
            for grad in (dk, dv):
                if grad is not None:
                    views.keys(grad, block).zero_()
    if dq is not None and problem.query_side == "packed":
        dq[plan.covered_queries :].zero_()
    for grad in (dk, dv):
        if grad is not None and problem.key_side == "packed":
            grad[plan.covered_keys :].zero_()

    # Shared queries sum their gradient over the batch: in fp32, rounded once at the end. Key heads have sums of their
    # own, and the chunks of one key head run one after the other, in order: the result does not depend on the threads.
    dq_sum = None
    if shared and dq is not None:
        dq_sum = torch.zeros(1, *dq.shape, dtype=_wide(problem.dtype)).unflatten(2, (problem.kv_heads, problem.group))
    d_inputs = (dq, dk, dv, dq_sum)
    plan.run(
        lambda chunk, workspace: _backward_chunk(problem, views, chunk, workspace, d_out, q, k, v, *d_inputs),
        key_heads_in_order=dq_sum is not None,
    )
    if dq is not None and dq_sum is not None:
        dq.copy_(dq_sum.view(dq.shape))
    return dq, dk, dv


def _backward_chunk(
    problem: Problem,
    views: _Views,
    chunk: _Chunk,
    workspace: _Workspace,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dq_sum: Tensor | None,
) -> None:
    block = chunk.block
    q_all, do_all, out_scale = views.queries(q, block), views.outputs(d_out, block), views.out_scale(block)
    dq_all = None if dq is None or dq_sum is not None else views.queries(dq, block)
    k_wide = workspace.load("k", views.keys(k, block)[:, :, chunk.kv_heads])  # [N, Sk, D]
    v_wide = None  # [N, Sk, Dv], where dS is needed
    if dq is not None or dk is not None:
        v_wide = workspace.load("v", views.keys(v, block)[:, :, chunk.kv_heads])
    dk_tiles = None if dk is None else workspace.take_tiles("dk", chunk, problem.head_dim)
    dv_tiles = None if dv is None else workspace.take_tiles("dv", chunk, problem.value_dim)
    started: set[int] = set()  # the key tiles whose accumulators hold something
    for queries in chunk.query_tiles():
        here = (slice(None), queries.rows, chunk.kv_heads, queries.members)
        key_tiles = chunk.key_tiles(queries)
        if not key_tiles:
            if dq_all is not None:
                dq_all[here].zero_()
            continue
        q_wide = workspace.load("q", q_all[here])  # [N, F*R, D]
        do_wide = workspace.load("do", do_all[here])  # [N, F*R, Dv]
        _multiply(do_wide, out_scale)
        dq_wide = None if dq is None else workspace.take("dq", q_wide.shape)
        for step, keys in enumerate(key_tiles):
            more = keys.index in started
            started.add(keys.index)
            s = workspace.take("s", (*q_wide.shape[:2], keys.size))
            p = workspace.take("p", s.shape)
            _product(s, q_wide, k_wide[:, keys.slice].mT, problem.scale)
            parts = list(zip(queries.kernels, queries.split(s), queries.split(p), strict=True))
            for kernel, s_part, p_part in parts:
                kernel.prepare(s_part, None if dv is None else p_part, slope=v_wide is not None)
            if dv_tiles is not None:
                chunk.mask(p, queries, keys)
                _product_over_rows(dv_tiles[keys.index], p, do_wide, 1.0, queries, accumulate=more)
            if v_wide is None:
                continue
            _product(p, do_wide, v_wide[:, keys.slice].mT)
            for kernel, s_part, p_part in parts:
                kernel.multiply_by_slope(p_part, s_part)
            chunk.mask(p, queries, keys)
            if dq_wide is not None:
                _product(dq_wide, p, k_wide[:, keys.slice], problem.scale, accumulate=step > 0)
            if dk_tiles is not None:
                _product_over_rows(dk_tiles[keys.index], p, q_wide, problem.scale, queries, accumulate=more)
        if dq_wide is not None and dq_all is not None:
            _store(dq_all[here], dq_wide)
        elif dq_wide is not None and dq_sum is not None:
            rows = dq_sum[here]  # [1, R, h, F, D]
            rows += _heads_last(dq_wide, block.count, rows.shape).sum(0)
    for grad, tiles in ((dk, dk_tiles), (dv, dv_tiles)):
        if grad is not None and tiles is not None:
            grad_all = views.keys(grad, block)
            for keys, tile in zip(chunk.grid, tiles, strict=True):
                grad_rows = grad_all[:, keys.slice, chunk.kv_heads]
                if keys.index in started:
                    _store(grad_rows, tile)
                else:
                    grad_rows.zero_()


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive sequences of equal lengths. They share a product as different matrices of it: values never meet."""

    first: int
    count: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int

    @property
    def empty(self) -> bool:
        return self.q_len == 0 or self.k_len == 0


@dataclass(frozen=True)
class _Plan:
    """A call divided into blocks, and these into chunks, that are independent of each other."""

    problem: Problem
    blocks: list[_Block]

    @classmethod
    def of(cls, problem: Problem, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> _Plan:
        """The batch in order; neighbours of equal lengths are merged while all their scores fit one tile."""
        queries = row_ranges(cu_seqlens_q, problem.batch, problem.query_rows)
        keys = row_ranges(cu_seqlens_k, problem.batch, problem.key_rows)
        blocks: list[_Block] = []
        first = 0
        while first < problem.batch:
            (q_start, q_len), (k_start, k_len) = queries[first], keys[first]
            limit = min(problem.batch, first + TILE_SCORES // max(1, problem.heads * q_len * k_len))
            end = first + 1
            while end < limit and queries[end][1] == q_len and keys[end][1] == k_len:
                end += 1
            blocks.append(_Block(first, end - first, q_start, q_len, k_start, k_len))
            first = end
        return cls(problem, blocks)

    @property
    def covered_queries(self) -> int:
        """How many rows of packed queries the sequences cover."""
        return self.blocks[-1].q_start + self.blocks[-1].count * self.blocks[-1].q_len if self.blocks else 0

    @property
    def covered_keys(self) -> int:
        return self.blocks[-1].k_start + self.blocks[-1].count * self.blocks[-1].k_len if self.blocks else 0

    def run(self, work: Callable[[_Chunk, _Workspace], None], key_heads_in_order: bool = False) -> None:
        """Do the work of every chunk: on workers where that divides it well, else here with threaded operators."""
        blocks = [block for block in self.blocks if not block.empty]
        widths = [_key_heads_at_once(self.problem, block) for block in blocks]
        if key_heads_in_order:
            widths = [min(widths, default=1)] * len(blocks)
        chunks = [chunk for block, width in zip(blocks, widths, strict=True) for chunk in _chunks(self.problem, block, width)]
        tasks: list[list[_Chunk]]
        if key_heads_in_order:
            by_head: dict[int, list[_Chunk]] = {}
            for chunk in chunks:
                by_head.setdefault(chunk.kv_heads.start, []).append(chunk)
            tasks = list(by_head.values())
        else:
            tasks = [[chunk] for chunk in chunks]
        costs = [sum(chunk.scores for chunk in task) for task in tasks]
        threads = min(torch.get_num_threads(), len(tasks))
        total = sum(costs)
        if threads < 2 or total < LEAST_SCORES_FOR_WORKERS * len(tasks) or max(costs) * torch.get_num_threads() > UNEVEN * total:
            workspace = _Workspace()
            for chunk in chunks:
                work(chunk, workspace.of(chunk))
            return
        order = sorted(range(len(tasks)), key=costs.__getitem__)  # the largest is taken first
        lock, inference = threading.Lock(), torch.is_inference_mode_enabled()

        def worker() -> None:
            workspace = _Workspace()
            with torch.inference_mode(inference), torch.no_grad():
                while True:
                    with lock:
                        if not order:
                            return
                        task = tasks[order.pop()]
                    for chunk in task:
                        work(chunk, workspace.of(chunk))

        try:
            for future in [_workers(threads).submit(worker) for _ in range(threads)]:
                future.result()
        finally:
            order.clear()  # after an error the other workers stop at their next task


_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_pool_lock = threading.Lock()


def _workers(count: int) -> ThreadPoolExecutor:
    """At least `count` threads, kept for the process, whose torch operators run single-threaded."""
    global _pool, _pool_size
    with _pool_lock:
        if _pool is None or _pool_size < count:
            pool, all_ready = ThreadPoolExecutor(count, thread_name_prefix="gdpa-cpu"), threading.Barrier(count)

            def become_single_threaded() -> None:
                torch.get_num_threads()  # a thread's first use of torch would set its number again
                torch.set_num_threads(1)
                all_ready.wait()

            threads = torch.get_num_threads()
            for future in [pool.submit(become_single_threaded) for _ in range(count)]:
                future.result()
            # It holds for the thread that sets it, but also becomes the default of threads to come: put that back.
            torch.set_num_threads(threads)
            if _pool is not None:
                _pool.shutdown(wait=False)
            _pool, _pool_size = pool, count
        return _pool


def _forget_workers() -> None:
    """A forked child has none of its parent's threads, and may have its lock held."""
    global _pool, _pool_size, _pool_lock
    _pool, _pool_size, _pool_lock = None, 0, threading.Lock()


os.register_at_fork(after_in_child=_forget_workers)


class _Views:
    """A block's rows, from any side's layout, as [n, S, Hkv, G, D] (G = 1 for keys), and its factor on the output."""

    def __init__(self, problem: Problem, out_scale: Tensor | None) -> None:
        self._problem = problem
        self._factors = None if out_scale is None else out_scale.to(_wide(problem.dtype))

    def queries(self, x: Tensor, block: _Block) -> Tensor:
        if self._problem.query_side == "shared":
            rows, _, features = x.shape
            grouped = x.view(rows, self._problem.kv_heads, self._problem.group, features)
            return grouped.expand(block.count, -1, -1, -1, -1)
        return self.outputs(x, block)

    def outputs(self, x: Tensor, block: _Block) -> Tensor:
        return self._rows(x, block, block.q_start, block.q_len, self._problem.group)

    def keys(self, x: Tensor, block: _Block) -> Tensor:
        return self._rows(x, block, block.k_start, block.k_len, 1)

    def out_scale(self, block: _Block) -> float | Tensor:
        return self._problem.out_scale if self._factors is None else self._factors[block.first : block.first + block.count]

    def _rows(self, x: Tensor, block: _Block, start: int, length: int, group: int) -> Tensor:
        rows = x[block.first : block.first + block.count] if x.dim() == 4 else x[start : start + block.count * length]
        # Only splits dimensions, so it is a view whatever the strides.
        return rows.view(block.count, length, self._problem.kv_heads, group, x.shape[-1])


@dataclass(frozen=True, slots=True)
class _KeyTile:
    """One column of a chunk's grid."""

    index: int
    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class _QueryTile:
    """Rows of some query heads (`members` of each group), and the activations of those heads."""

    members: slice
    start: int
    stop: int
    sequences: int
    head_by_head: bool
    kernels: tuple[Kernel, ...]
    runs: tuple[slice, ...]  # the tile's heads that each kernel serves

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        return self.stop - self.start

    def split(self, x: Tensor) -> list[Tensor]:
        """Views of scores [N, F*R, C], one for each kernel."""
        if len(self.kernels) == 1:
            return [x]
        per_head = x.view(self.sequences, -1, self.size, x.shape[-1])
        return [per_head[:, run] for run in self.runs]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Key heads of a block that are worked on together, and how their scores are tiled."""

    problem: Problem
    block: _Block
    kv_heads: slice
    rows_at_once: int
    members_at_once: int
    grid: tuple[_KeyTile, ...]

    @property
    def matrices(self) -> int:
        """N."""
        return self.block.count * int(self.kv_heads.stop - self.kv_heads.start)

    @property
    def scores(self) -> int:
        return self.matrices * self.problem.group * self.block.q_len * self.block.k_len

    def query_tiles(self) -> Iterator[_QueryTile]:
        problem = self.problem
        for first in range(0, problem.group, self.members_at_once):
            members = slice(first, min(first + self.members_at_once, problem.group))
            runs = _activation_runs(problem, self.kv_heads, members)
            kernels, heads = tuple(kernel_of(key) for key, _ in runs), tuple(run for _, run in runs)
            # One fp32 sum over several heads is longer, hence less exact, than a sum by head. 16 bits cannot tell.
            head_by_head = problem.dtype.itemsize > 2 and members.stop - members.start > 1
            for start in range(0, self.block.q_len, self.rows_at_once):
                stop = min(start + self.rows_at_once, self.block.q_len)
                yield _QueryTile(members, start, stop, self.block.count, head_by_head, kernels, heads)

    def key_tiles(self, queries: _QueryTile) -> Sequence[_KeyTile]:
        """The tiles in which the window allows at least one pair with these rows."""
        left, right = self.problem.window
        diagonal = self.block.k_len - self.block.q_len
        first = 0 if left < 0 else queries.start + diagonal - left
        last = self.block.k_len - 1 if right < 0 else queries.stop - 1 + diagonal + right
        if first <= 0 and last >= self.block.k_len - 1:
            return self.grid
        return [keys for keys in self.grid if keys.stop > first and keys.start <= last]

    def mask(self, x: Tensor, queries: _QueryTile, keys: _KeyTile) -> None:
        """Write zeros over the pairs [N, F*R, C] that the window excludes: whatever is there, NaN included, goes."""
        left, right = self.problem.window
        # Counted within the tile, key j is allowed for row i when i + diagonal - left <= j <= i + diagonal + right.
        diagonal = queries.start + self.block.k_len - self.block.q_len - keys.start
        if right >= 0 and diagonal + right < keys.size - 1:
            x.view(-1, queries.size, keys.size).tril_(diagonal + right)
        if left >= 0 and queries.size - 1 + diagonal - left > 0:
            x.view(-1, queries.size, keys.size).triu_(diagonal - left)


def _tile_shape(problem: Problem, block: _Block) -> tuple[int, int, int]:
    """Rows, query heads of a group, and keys of one tile."""
    rows = min(block.q_len, TILE_ROWS)
    members = min(problem.group, max(1, TILE_ROWS // rows))
    return rows, members, min(block.k_len, MASKED_TILE_KEYS if problem.masked else TILE_KEYS)


def _key_heads_at_once(problem: Problem, block: _Block) -> int:
    return min(problem.kv_heads, max(1, TILE_SCORES // (block.count * math.prod(_tile_shape(problem, block)))))


def _chunks(problem: Problem, block: _Block, key_heads: int) -> Iterator[_Chunk]:
    rows, members, keys = _tile_shape(problem, block)
    grid = tuple(_KeyTile(i, start, min(start + keys, block.k_len)) for i, start in enumerate(range(0, block.k_len, keys)))
    for first in range(0, problem.kv_heads, key_heads):
        last = min(first + key_heads, problem.kv_heads)
        yield _Chunk(problem, block, slice(first, last), rows, members, grid)


def _activation_runs(problem: Problem, kv_heads: slice, members: slice) -> list[tuple[str, slice]]:
    """(key, heads of the tile) for each run of its heads with one activation."""
    if len(problem.activations) == 1:
        return [(problem.activations[0], slice(None))]
    runs: list[tuple[str, slice]] = []
    heads = [g * problem.group + m for g in range(kv_heads.start, kv_heads.stop) for m in range(members.start, members.stop)]
    for position, head in enumerate(heads):
        key = problem.activations[head]
        start = runs.pop()[1].start if runs and runs[-1][0] == key else position
        runs.append((key, slice(start, position + 1)))
    return runs


class _Workspace:
    """Wide buffers by role, allocated once and used by every tile: a fresh one each time would cost its page faults."""

    def __init__(self) -> None:
        self._dtype = torch.float32
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def of(self, chunk: _Chunk) -> _Workspace:
        """This workspace, for a chunk's precision."""
        block = chunk.block
        exact = chunk.problem.dtype == torch.float32 and block.count * block.q_len * block.k_len <= EXACT_PAIRS
        self._dtype = torch.float64 if exact else _wide(chunk.problem.dtype)
        return self

    def take(self, role: str, shape: Sequence[int]) -> Tensor:
        """An uninitialised contiguous tensor, valid until the role is taken again."""
        size = math.prod(shape)
        buffer = self._buffers.get((role, self._dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[role, self._dtype] = torch.empty(size, dtype=self._dtype)
        return buffer[:size].view(shape)

    def load(self, role: str, x: Tensor) -> Tensor:
        """Copy [n, R, h, F, D] heads-first and widened, as [N, F*R, D]."""
        n, r, h, f, d = x.shape
        buffer = self.take(role, (n, h, f, r, d))
        buffer.copy_(x.permute(0, 2, 3, 1, 4))
        return buffer.view(n * h, f * r, d)

    def take_tiles(self, role: str, chunk: _Chunk, features: int) -> list[Tensor]:
        """A contiguous accumulator [N, C, features] for each key tile: strided results make torch loop over heads."""
        if len(chunk.grid) == 1:
            return [self.take(role, (chunk.matrices, chunk.block.k_len, features))]
        buffer = self.take(role, (chunk.matrices * chunk.block.k_len * features,))
        parts = buffer.split([chunk.matrices * keys.size * features for keys in chunk.grid])
        return [part.view(chunk.matrices, -1, features) for part in parts]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product(result: Tensor, a: Tensor, b: Tensor, factor: float = 1.0, *, accumulate: bool = False) -> None:
    """result = factor * a @ b, or += when accumulating; otherwise its old contents, NaN included, are ignored."""
    torch.baddbmm(result, a, b, beta=1 if accumulate else 0, alpha=factor, out=result)


def _product_over_rows(result: Tensor, scores: Tensor, x: Tensor, factor: float, queries: _QueryTile, *, accumulate: bool) -> None:
    """result [N, C, D] (+)= factor * scores^T x, summed over the tile's rows and heads [N, F*R, ...]."""
    if not queries.head_by_head:
        _product(result, scores.mT, x, factor, accumulate=accumulate)
        return
    for start in range(0, scores.shape[1], queries.size):
        head = slice(start, start + queries.size)
        _product(result, scores[:, head].mT, x[:, head], factor, accumulate=accumulate or start > 0)


def _multiply(x: Tensor, factor: float | Tensor) -> None:
    """x [N, F*R, features] times a number, or times one for each of the block's sequences."""
    if isinstance(factor, Tensor):
        x.view(factor.shape[0], -1).mul_(factor[:, None])
    elif factor != 1.0:
        x.mul_(factor)


def _heads_last(x: Tensor, sequences: int, shape: Sequence[int]) -> Tensor:
    """[N, F*R, D] as [n, R, h, F, D], the last four of which are those of `shape`."""
    r, h, f, d = shape[-4:]
    return x.view(sequences, h, f, r, d).permute(0, 3, 1, 2, 4)


def _store(rows: Tensor, x: Tensor) -> None:
    """Write x [N, F*R, D] to its rows [n, R, h, F, D], rounded to their dtype."""
    rows.copy_(_heads_last(x, rows.shape[0], rows.shape))
