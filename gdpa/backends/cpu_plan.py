"""How the cpu backend divides a call: blocks of sequences, chunks of their key heads, tiles of scores; and who does which.

A block is a run of sequences of equal lengths (usually one sequence), a chunk some of its key heads. Chunks are independent
of each other, so they go to workers whose operators are single-threaded. There is no barrier inside an operator then: beside
other busy processes, operators of 2 threads took 2 to 10 times as long as 2 workers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gdpa.backends.cpu_kernels import Kernel, kernel_of
from gdpa.backends.cpu_tensors import Workspace, few_sizes, multiplies_fast, workspace
from gdpa.problem import Problem, row_ranges

# One matrix of scores has at most TILE_ROWS x TILE_KEYS, or more on one side where the other is short. Whole sequences of up
# to 1024 rows make fewer and faster products: a jagged batch of 1 to 1024 took 1.2 times as long with tiles of 512 x 512.
TILE_ROWS = 1024
TILE_KEYS = 1024
MASKED_TILE_ROWS = 512
MASKED_TILE_KEYS = 256  # a finer grid lets windows skip more of it
# Several matrices share a product while they have at most so many scores, and each operand so many numbers.
BATCH_SCORES = 1 << 18
BATCH_NUMBERS = 1 << 18
# Work goes to workers if its tasks have this many scores on average (Python's lock makes two workers slower than one
# thread on smaller ones), all of them so many, and the largest at most UNEVEN times a fair share of that. Waking workers takes
# milliseconds where OpenMP's threads still spin after an operator before: 128 sequences of 32 rows took 27 ms, here 18 ms.
LEAST_SCORES_FOR_WORKERS = 1 << 15
LEAST_SCORES_IN_ALL = 1 << 21
UNEVEN = 1.25
# fp32 blocks with at most this many (query, key) pairs are computed in float64. Their sums are so short and few that
# the order of one decides whether it errs more than twice the ideal, as it did in 1 % of random problems.
EXACT_PAIRS = 1 << 10
# From so many (query, key) pairs of a matrix on, products are bf16 where the processor is fast at them (`is_narrow`).
LEAST_NARROW_PAIRS = 1 << 12


def is_narrow(problem: Problem, pairs: int) -> bool:
    """Whether operands of products are bf16, P and dS rounded among them, in matrices of so many pairs. S and dP are always wide.

    So operands are where bf16 products are fast, as in every GPU kernel and in the error budget's yardstick. S or dP rounded too
    would be faster still, but over the budget where all scores, or all of dP, are about one number.
    """
    return pairs >= LEAST_NARROW_PAIRS and multiplies_fast(problem.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of everything between the inputs and the one rounding of each result."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive sequences of equal lengths. They share a product as different matrices of it: values never meet."""

    first: int
    count: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int
    by_head: bool  # its products are of one key head each

    @property
    def empty(self) -> bool:
        return self.q_len == 0 or self.k_len == 0


@dataclass(frozen=True, slots=True)
class KeyTile:
    """One column of a chunk's grid."""

    index: int
    start: int
    stop: int
    whole: bool  # it is all of the keys

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of(self, x: Tensor) -> Tensor:
        """Its rows of [N, Sk, features]."""
        return x if self.whole else x.narrow(1, self.start, self.stop - self.start)


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Rows of some query heads (`members` of each group), and the activations of those heads."""

    members: slice
    rows: slice
    sequences: int
    head_by_head: bool
    kernels: tuple[Kernel, ...]
    runs: tuple[slice, ...]  # the tile's heads that each kernel serves

    @property
    def size(self) -> int:
        return int(self.rows.stop - self.rows.start)

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Views of scores [N, F*R, C], one for each kernel."""
        if len(self.kernels) == 1:
            return (x,)
        per_head = x.view(self.sequences, -1, self.size, x.shape[-1])
        return [per_head[:, run] for run in self.runs]


@dataclass(frozen=True)
class Chunk:
    """Key heads of a block that are worked on together, and how their scores are tiled."""

    problem: Problem
    block: Block
    kv_heads: slice
    shape: TileShape
    grid: tuple[KeyTile, ...]
    part: int  # of the batch, see Plan.run

    @property
    def scores(self) -> int:
        key_heads = int(self.kv_heads.stop - self.kv_heads.start)
        return self.block.count * key_heads * self.problem.group * self.block.q_len * self.block.k_len

    @property
    def precision(self) -> torch.dtype:
        block = self.block
        exact = self.problem.dtype == torch.float32 and block.count * block.q_len * block.k_len <= EXACT_PAIRS
        return torch.float64 if exact else wide(self.problem.dtype)

    @property
    def operands(self) -> torch.dtype:
        """The precision of P and dS, of what they are multiplied with, and of what dP is made of."""
        q_len, k_len = self.block.q_len, self.block.k_len
        few = few_sizes(q_len) == q_len and few_sizes(k_len) == k_len
        return self.problem.dtype if few and is_narrow(self.problem, q_len * k_len) else self.precision

    @property
    def score_operands(self) -> torch.dtype:
        """The precision of Q and K where S is made of them."""
        steady = all(kernel_of(activation).steady for activation in self.problem.activations)
        return self.operands if steady else self.precision

    @cached_property
    def query_tiles(self) -> list[QueryTile]:
        problem, block = self.problem, self.block
        tiles = []
        for first in range(0, problem.group, self.shape.members):
            members = slice(first, min(first + self.shape.members, problem.group))
            kernels, heads = _activation_runs(problem, self.kv_heads, members)
            # One fp32 sum over several heads is longer, hence less exact, than a sum by head. 16 bits cannot tell.
            head_by_head = problem.dtype.itemsize > 2 and members.stop - members.start > 1
            for start in range(0, block.q_len, self.shape.rows):
                rows = slice(start, min(start + self.shape.rows, block.q_len))
                tiles.append(QueryTile(members, rows, block.count, head_by_head, kernels, heads))
        return tiles

    def key_tiles(self, queries: QueryTile) -> Sequence[KeyTile]:
        """The tiles in which the window allows at least one pair with these rows."""
        if not self.problem.masked:
            return self.grid
        left, right = self.problem.window
        diagonal = self.block.k_len - self.block.q_len
        first = 0 if left < 0 else queries.rows.start + diagonal - left
        last = self.block.k_len - 1 if right < 0 else queries.rows.stop - 1 + diagonal + right
        return [keys for keys in self.grid if keys.stop > first and keys.start <= last]

    def mask(self, x: Tensor, queries: QueryTile, keys: KeyTile) -> None:
        """Write zeros over the pairs [N, F*R, C] that the window excludes: whatever is there, NaN included, goes."""
        left, right = self.problem.window
        # Counted within the tile, key j is allowed for row i when i + diagonal - left <= j <= i + diagonal + right.
        diagonal = queries.rows.start + self.block.k_len - self.block.q_len - keys.start
        if right >= 0 and diagonal + right < keys.size - 1:
            x.view(-1, queries.size, keys.size).tril_(diagonal + right)
        if left >= 0 and queries.size - 1 + diagonal - left > 0:
            x.view(-1, queries.size, keys.size).triu_(diagonal - left)


@dataclass(frozen=True, slots=True)
class TileShape:
    """Rows, query heads of a group, and keys of one matrix of a tile; and how many key heads a product takes."""

    rows: int
    members: int
    keys: int
    key_heads: int

    @classmethod
    def of(cls, problem: Problem, block: Block) -> TileShape:
        if problem.masked:
            rows, keys = _even(block.q_len, MASKED_TILE_ROWS), min(block.k_len, MASKED_TILE_KEYS)
        else:
            scores = TILE_ROWS * TILE_KEYS
            rows = _even(block.q_len, max(TILE_ROWS, scores // max(block.k_len, TILE_KEYS // 4)))
            keys = _even(block.k_len, max(TILE_KEYS, scores // max(rows, TILE_ROWS // 4)))
        members = min(problem.group, max(1, min(TILE_ROWS // rows, BATCH_SCORES // (rows * keys))))
        key_heads = 1 if block.by_head else BATCH_SCORES // (block.count * rows * members * keys)
        return cls(rows, members, keys, min(problem.kv_heads, max(1, key_heads)))


def _sequences_at_once(problem: Problem, q_len: int, k_len: int, key_heads: int) -> int:
    """How many sequences of these lengths a product can take."""
    scores = problem.group * q_len * k_len
    numbers = max(problem.group * q_len, k_len) * max(problem.head_dim, problem.value_dim)
    return min(BATCH_SCORES // max(1, key_heads * scores), BATCH_NUMBERS // max(1, key_heads * numbers))


def _even(length: int, most: int) -> int:
    """The size of the fewest, nearly equal parts of at most `most`: the products of a small last part are slow ones."""
    parts = -(-length // most)
    return min(most, -(-length // (16 * parts)) * 16) if parts > 1 else length


def _chunks(problem: Problem, block: Block, shape: TileShape, key_heads: int, part: int) -> Iterator[Chunk]:
    starts = range(0, block.k_len, shape.keys)
    whole = len(starts) == 1
    grid = tuple(KeyTile(i, start, min(start + shape.keys, block.k_len), whole) for i, start in enumerate(starts))
    for first in range(0, problem.kv_heads, key_heads):
        yield Chunk(problem, block, slice(first, min(first + key_heads, problem.kv_heads)), shape, grid, part)


def _activation_runs(problem: Problem, kv_heads: slice, members: slice) -> tuple[tuple[Kernel, ...], tuple[slice, ...]]:
    """A kernel for each run of the tile's heads with one activation, and those heads."""
    if len(problem.activations) == 1:
        return (kernel_of(problem.activations[0]),), (slice(None),)
    runs: list[tuple[str, slice]] = []
    heads = [g * problem.group + m for g in range(kv_heads.start, kv_heads.stop) for m in range(members.start, members.stop)]
    for position, head in enumerate(heads):
        key = problem.activations[head]
        start = runs.pop()[1].start if runs and runs[-1][0] == key else position
        runs.append((key, slice(start, position + 1)))
    return tuple(kernel_of(key) for key, _ in runs), tuple(run for _, run in runs)


@dataclass(frozen=True)
class Plan:
    """A call divided into blocks."""

    problem: Problem
    blocks: list[Block]

    @classmethod
    def of(cls, problem: Problem, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Plan:
        """The batch in order; neighbours of equal lengths are merged while one product can take all their heads."""
        queries = row_ranges(cu_seqlens_q, problem.batch, problem.query_rows)
        keys = row_ranges(cu_seqlens_k, problem.batch, problem.key_rows)
        blocks: list[Block] = []
        first = 0
        while first < problem.batch:
            (q_start, q_len), (k_start, k_len) = queries[first], keys[first]
            limit = min(problem.batch, first + _sequences_at_once(problem, q_len, k_len, problem.kv_heads))
            by_head = False
            # Matrices of one head lie at equal distances in memory, those of several heads and sequences do not: they need copies.
            if limit > first + 1 and problem.dtype.itemsize > 2 and problem.query_side != "shared":
                by_head = True
                limit = min(problem.batch, first + _sequences_at_once(problem, q_len, k_len, 1))
            end = first + 1
            while end < limit and queries[end][1] == q_len and keys[end][1] == k_len:
                end += 1
            blocks.append(Block(first, end - first, q_start, q_len, k_start, k_len, by_head and end - first >= problem.kv_heads))
            first = end
        return cls(problem, blocks)

    @property
    def covered_queries(self) -> int:
        """How many rows of packed queries the sequences cover."""
        return self.blocks[-1].q_start + self.blocks[-1].count * self.blocks[-1].q_len if self.blocks else 0

    @property
    def covered_keys(self) -> int:
        return self.blocks[-1].k_start + self.blocks[-1].count * self.blocks[-1].k_len if self.blocks else 0

    def run(self, work: Callable[[Chunk, Workspace], None], parts: int | None = None) -> None:
        """Do the work of every chunk: on workers where that divides it well, else here with threaded operators.

        With `parts`, the chunks of one part of the batch and one key head run one after the other, in order.
        """
        problem = self.problem
        shapes = [(block, TileShape.of(problem, block)) for block in self.blocks if not block.empty]
        tasks: list[list[Chunk]]
        if parts is None:
            tasks = [[chunk] for block, shape in shapes for chunk in _chunks(problem, block, shape, shape.key_heads, 0)]
        else:
            narrowest = min((shape.key_heads for _, shape in shapes), default=1)
            in_order: dict[tuple[int, int], list[Chunk]] = {}
            for index, (block, shape) in enumerate(shapes):
                for chunk in _chunks(problem, block, shape, narrowest, index * parts // len(shapes)):
                    in_order.setdefault((chunk.part, chunk.kv_heads.start), []).append(chunk)
            tasks = list(in_order.values())
        costs = [sum(chunk.scores for chunk in task) for task in tasks]
        divide(costs, lambda numbers: _work_through(work, (chunk for number in numbers for chunk in tasks[number])))


def divide(costs: Sequence[int], work: Callable[[Iterable[int]], None]) -> None:
    """Have tasks done, by their numbers, whose costs are counts of scores.

    On workers where that divides the whole well: each calls `work` once, with the tasks that it takes. Else here, with threaded
    operators.
    """
    threads = min(torch.get_num_threads(), len(costs))
    total = sum(costs)
    too_little = total < max(LEAST_SCORES_IN_ALL, LEAST_SCORES_FOR_WORKERS * len(costs))
    if threads < 2 or too_little or max(costs) * torch.get_num_threads() > UNEVEN * total:
        work(range(len(costs)))
        return
    order = sorted(range(len(costs)), key=costs.__getitem__)  # the largest is taken first
    lock, inference = threading.Lock(), torch.is_inference_mode_enabled()

    def taken() -> Iterator[int]:
        while True:
            with lock:
                if not order:
                    return
                number = order.pop()
            yield number

    def worker() -> None:
        with torch.inference_mode(inference), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            work(taken())

    futures: list[Future[None]] = []
    try:
        try:
            with _pool_lock:  # another thread's call may want more workers, and close the pool that this one was given
                pool = _workers(threads)
                futures += [pool.submit(worker) for _ in range(threads)]
        except RuntimeError:
            # No thread is started any more where the interpreter is about to end (a thread that outlives the main one, atexit).
            work(taken())
        for future in futures:
            future.result()
    finally:
        order.clear()  # after an error the other workers stop at their next task


def _work_through(work: Callable[[Chunk, Workspace], None], chunks: Iterable[Chunk]) -> None:
    with workspace() as memory:
        for chunk in chunks:
            memory.use(chunk.precision)
            work(chunk, memory)


_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_pool_lock = threading.RLock()


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
    _pool, _pool_size, _pool_lock = None, 0, threading.RLock()


os.register_at_fork(after_in_child=_forget_workers)
