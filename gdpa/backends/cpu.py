"""Tiled forward and backward on the CPU with torch's own operators. No whole score matrix of a long sequence exists at any time.

A block is a run of sequences of equal lengths (usually one sequence), a chunk some of its key heads: each batched
product has N = sequences * key heads matrices. A query tile is R rows of F query heads of each key head, a key tile is
C keys:

    forward, for each query tile:   Q [N, F*R, D]
        for each key tile:          S = scale * Q K^T               [N, F*R, C]
                                    P = mask(f(S))                  in place of S
                                    O += out_scale * P V            [N, F*R, Dv]

    backward, for each query tile:  Q, dO
        for each key tile:          S = scale * Q K^T
                                    P = mask(f(S))                  second buffer
                                    dV += out_scale * P^T dO        [N, C, Dv]
                                    dP = out_scale * dO V^T         in place of P
                                    dS = mask(f'(S) * dP)           in place of dP
                                    dQ += scale * dS K              [N, F*R, D]
                                    dK += scale * dS^T Q            [N, C, D]

Folding the query heads of a key head into the rows makes grouped queries ordinary products. The operands are the caller's
own memory where its precision and strides allow, else copies; results go from scratch memory to their rows.

Sequences whose score matrices fit whole, without windows or groups, go to gdpa/backends/cpu_whole.py, at fewer calls to torch; batches
of many short sequences to gdpa/backends/cpu_short.py, where they share products.

Precision: bf16 and fp16 inputs are widened to fp32 when they are copied heads-first, and everything until the one
rounding of each result is fp32 (float64 for float64, and for tiny fp32 sequences). On most processors that is also the
fastest choice: on an Emerald Rapids Xeon oneDNN's AVX-512 bf16 products ran at 140 GFLOP/s against 280 for MKL's fp32
ones, and the AMX ones die of SIGILL on virtual machines that announce AMX without its tiles. Where bf16 products are the
faster, on AMD's processors with AVX512_BF16 and Intel's with AMX, O, dV, dQ and dK are products of bf16 operands if one
product makes all of them. S and dP, which torch's bf16 products cannot return in fp32, are sums of two of them, as good as fp32
for every activation with a name (cpu_tensors.wide_product); S of any other is an fp32 product. oneDNN keeps code for each shape
of a product: see few_sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdpa.backends import cpu_short, cpu_whole
from gdpa.backends.cpu_plan import Block, Chunk, KeyTile, Plan, QueryTile, wide
from gdpa.backends.cpu_tensors import ALONE, Place, Rows, Workspace, product, wide_product
from gdpa.problem import Problem

# Shared queries' gradient is summed in so many parts of the batch, which workers take, and in so many numbers at the most.
MOST_PARTS = 16
PARTS_NUMBERS = 1 << 20


def supports(problem: Problem) -> str | None:
    if problem.device.type != "cpu":
        return f"it runs on CPU tensors, these are on {problem.device}"
    return None


class _Call:
    """What every chunk of a call shares."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out_scale: Tensor | None) -> None:
        self.problem = problem
        self.q = self.of_queries(q, shared=problem.query_side == "shared")
        self.k, self.v = Rows(k), Rows(v)
        self._factors = None if out_scale is None else out_scale.to(wide(problem.dtype))

    def of_queries(self, x: Tensor, *, shared: bool = False) -> Rows:
        return Rows(x, self.problem.group, shared=shared)

    def out_scale(self, block: Block) -> tuple[float, Tensor | None]:
        """A number for all of the block, and one more for each sequence where they differ."""
        if self._factors is None:
            return self.problem.out_scale, None
        if block.count == 1:
            return self._factors[block.first].item(), None
        return 1.0, self._factors[block.first : block.first + block.count]


def _queries_at(rows: Rows, chunk: Chunk, queries: QueryTile) -> Place:
    block = chunk.block
    return rows.place(block.first, block.count, block.q_start, block.q_len, queries.rows, chunk.kv_heads, queries.members)


def _keys_at(rows: Rows, chunk: Chunk, start: int = 0, stop: int | None = None) -> Place:
    block = chunk.block
    keys = slice(start, block.k_len if stop is None else stop)
    return rows.place(block.first, block.count, block.k_start, block.k_len, keys, chunk.kv_heads)


def _zero_queries(rows: Rows, block: Block, problem: Problem) -> None:
    heads, members = slice(0, problem.kv_heads), slice(0, problem.group)
    every_row = slice(0, block.q_len)
    rows.at(rows.place(block.first, block.count, block.q_start, block.q_len, every_row, heads, members)).zero_()


def _zero_keys(rows: Rows, block: Block, problem: Problem) -> None:
    heads = slice(0, problem.kv_heads)
    every_row = slice(0, block.k_len)
    rows.at(rows.place(block.first, block.count, block.k_start, block.k_len, every_row, heads, ALONE)).zero_()


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Tensor:
    if cpu_short.takes(problem, cu_seqlens_q, cu_seqlens_k):
        return cpu_short.forward(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale)
    if cpu_whole.takes(problem, cu_seqlens_q, cu_seqlens_k):
        return cpu_whole.forward(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale)
    result = torch.empty(problem.output_shape, dtype=q.dtype)
    call = _Call(problem, q, k, v, out_scale)
    out = call.of_queries(result)
    plan = Plan.of(problem, cu_seqlens_q, cu_seqlens_k)
    for block in plan.blocks:
        if block.k_len == 0:
            _zero_queries(out, block, problem)
    if problem.query_side == "packed":
        result[plan.covered_queries :].zero_()
    plan.run(lambda chunk, workspace: _forward_chunk(call, chunk, workspace, out))
    return result


def _forward_chunk(call: _Call, chunk: Chunk, workspace: Workspace, out: Rows) -> None:
    scale, (factor, factors) = call.problem.scale, call.out_scale(chunk.block)
    # A sum of several products is added up wide; factors multiply results that are not rounded yet.
    precision = chunk.operands if len(chunk.grid) == 1 and factors is None else chunk.precision
    by_score = chunk.score_operands
    k_rows = workspace.load("k", call.k, _keys_at(call.k, chunk), by_score)  # [N, Sk, D]
    v_rows = workspace.load("v", call.v, _keys_at(call.v, chunk), precision)  # [N, Sk, Dv]
    for queries in chunk.query_tiles:
        place = _queries_at(out, chunk, queries)
        key_tiles = chunk.key_tiles(queries)
        if not key_tiles:
            out.at(place).zero_()
            continue
        q_rows = workspace.load("q", call.q, _queries_at(call.q, chunk, queries), by_score)  # [N, F*R, D]
        o = workspace.result("o", out, place, precision)
        for step, keys in enumerate(key_tiles):
            s = workspace.take("s", (*q_rows.shape[:2], keys.size))
            wide_product(s, q_rows, keys.of(k_rows).mT, scale, workspace)
            for kernel, s_part in zip(queries.kernels, queries.split(s), strict=True):
                kernel.value(s_part)
            chunk.mask(s, queries, keys)
            product(o, workspace.rounded(s, precision), keys.of(v_rows), factor, accumulate=step > 0)
        if factors is not None:
            _multiply(o, factors)
        workspace.store("o", out, place, o)


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
    if cpu_short.takes(problem, cu_seqlens_q, cu_seqlens_k):
        return cpu_short.backward(problem, d_out, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale, needs)
    if cpu_whole.takes(problem, cu_seqlens_q, cu_seqlens_k):
        return cpu_whole.backward(problem, d_out, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale, needs)
    results = [torch.empty(x.shape, dtype=x.dtype) if need else None for x, need in zip((q, k, v), needs, strict=True)]
    dq, dk, dv = results
    if not any(needs):
        return dq, dk, dv
    call = _Call(problem, q, k, v, out_scale)
    plan = Plan.of(problem, cu_seqlens_q, cu_seqlens_k)
    grads = _Gradients(call, d_out, dq, dk, dv)
    for block in plan.blocks:
        if block.empty:
            if grads.dq is not None and grads.dq_sum is None:
                _zero_queries(grads.dq, block, problem)
            for rows in (grads.dk, grads.dv):
                if rows is not None:
                    _zero_keys(rows, block, problem)
    if dq is not None and problem.query_side == "packed":
        dq[plan.covered_queries :].zero_()
    for grad in (dk, dv):
        if grad is not None and problem.key_side == "packed":
            grad[plan.covered_keys :].zero_()
    parts = None if grads.dq_sum is None else grads.dq_sum.tensor.shape[0]
    plan.run(lambda chunk, workspace: _backward_chunk(call, chunk, workspace, grads), parts)
    if dq is not None and grads.dq_sum is not None:
        dq.copy_(grads.dq_sum.tensor.sum(0))
    return dq, dk, dv


class _Gradients:
    """The output's gradient, and those that are wanted.

    Shared queries sum their gradient over the batch: in fp32, rounded once at the end. Parts of the batch have sums of their own,
    as many as the problem says, and within a part each key head's chunks add in order: the result does not depend on the threads.
    """

    def __init__(self, call: _Call, d_out: Tensor, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> None:
        shared = call.problem.query_side == "shared"
        self.d_out = call.of_queries(d_out)
        self.dq = None if dq is None else call.of_queries(dq, shared=shared)
        self.dk = None if dk is None else Rows(dk)
        self.dv = None if dv is None else Rows(dv)
        self.dq_sum: Rows | None = None
        if dq is not None and shared:
            parts = max(1, min(MOST_PARTS, call.problem.batch, PARTS_NUMBERS // max(1, dq.numel())))
            self.dq_sum = call.of_queries(torch.zeros(parts, *dq.shape, dtype=wide(dq.dtype)))

    def add_to_sum(self, tile: Tensor, chunk: Chunk, queries: QueryTile) -> None:
        """Add a tile [n, h, F, R, D] to the shared queries' gradient."""
        assert self.dq_sum is not None
        length = chunk.block.q_len
        place = self.dq_sum.place(chunk.part, 1, 0, length, queries.rows, chunk.kv_heads, queries.members)
        rows = self.dq_sum.at(place)
        rows += tile if tile.shape[0] == 1 else tile.sum(0, keepdim=True)


def _backward_chunk(call: _Call, chunk: Chunk, workspace: Workspace, grads: _Gradients) -> None:
    scale, (factor, factors) = call.problem.scale, call.out_scale(chunk.block)
    dq, dk, dv = grads.dq, grads.dk, grads.dv
    # As in the forward: dQ is a sum over key tiles (and the batch, where queries are shared), dK and dV over query tiles.
    narrow = chunk.operands if factors is None else chunk.precision
    by_query = narrow if len(chunk.grid) == 1 and grads.dq_sum is None else chunk.precision
    by_key = narrow if len(chunk.query_tiles) == 1 else chunk.precision
    by_score = chunk.score_operands
    k_scores = workspace.load("k", call.k, _keys_at(call.k, chunk), by_score)  # [N, Sk, D]
    k_rows = workspace.load("k", call.k, _keys_at(call.k, chunk), by_query) if by_query != by_score else k_scores
    v_rows = None  # [N, Sk, Dv], where dS is needed
    if dq is not None or dk is not None:
        v_rows = workspace.load("v", call.v, _keys_at(call.v, chunk), narrow)
    dk_tiles = _KeyGradient(workspace, "dk", dk, chunk, by_key)  # [N, C, D] each
    dv_tiles = _KeyGradient(workspace, "dv", dv, chunk, by_key)  # [N, C, Dv] each
    for queries in chunk.query_tiles:
        key_tiles = chunk.key_tiles(queries)
        q_place, do_place = _queries_at(call.q, chunk, queries), _queries_at(grads.d_out, chunk, queries)
        if not key_tiles:
            if dq is not None and grads.dq_sum is None:
                dq.at(_queries_at(dq, chunk, queries)).zero_()
            continue
        q_scores = workspace.load("q", call.q, q_place, by_score)  # [N, F*R, D]
        q_rows = workspace.load("q", call.q, q_place, by_key) if by_key != by_score else q_scores
        do_scores = workspace.load("do", grads.d_out, do_place, narrow, private=factors is not None)
        if factors is not None:
            _multiply(do_scores, factors)
        do_rows = workspace.load("do", grads.d_out, do_place, by_key) if by_key != narrow else do_scores
        dq_place, dq_rows = q_place, None
        if grads.dq_sum is not None:
            dq_rows = workspace.scratch("dq", q_place.size).flat
        elif dq is not None:
            dq_place = _queries_at(dq, chunk, queries)
            dq_rows = workspace.result("dq", dq, dq_place, by_query)
        for step, keys in enumerate(key_tiles):
            s = workspace.take("s", (*q_scores.shape[:2], keys.size))
            p = workspace.take("p", s.shape)
            wide_product(s, q_scores, keys.of(k_scores).mT, scale, workspace)
            parts = list(zip(queries.kernels, queries.split(s), queries.split(p), strict=True))
            for kernel, s_part, p_part in parts:
                kernel.prepare(s_part, None if dv is None else p_part, slope=v_rows is not None)
            if dv is not None:
                chunk.mask(p, queries, keys)
                dv_tiles.add(keys, workspace.rounded(p, by_key), do_rows, factor, queries)
            if v_rows is None:
                continue
            wide_product(p, do_scores, keys.of(v_rows).mT, factor, workspace)
            for kernel, s_part, p_part in parts:
                kernel.multiply_by_slope(p_part, s_part)
            chunk.mask(p, queries, keys)
            if dq_rows is not None:
                product(dq_rows, workspace.rounded(p, by_query), keys.of(k_rows), scale, accumulate=step > 0)
            if dk is not None:
                dk_tiles.add(keys, workspace.rounded(p, by_key), q_rows, scale, queries)
        if dq_rows is not None and grads.dq_sum is not None:
            grads.add_to_sum(dq_rows.view(q_place.size), chunk, queries)
        elif dq_rows is not None and dq is not None:
            workspace.store("dq", dq, dq_place, dq_rows)
    dk_tiles.finish()
    dv_tiles.finish()


class _KeyGradient:
    """One chunk's dK or dV: a result [N, C, features] for each key tile, to which every query tile adds. Or not wanted."""

    def __init__(self, workspace: Workspace, role: str, rows: Rows | None, chunk: Chunk, precision: torch.dtype) -> None:
        self._workspace, self._role, self._rows, self._chunk, self._precision = workspace, role, rows, chunk, precision
        self._results: dict[KeyTile, Tensor] = {}

    def add(self, keys: KeyTile, scores: Tensor, x: Tensor, factor: float, queries: QueryTile) -> None:
        """Add factor * scores^T x, summed over the tile's rows and heads [N, F*R, ...]."""
        result = self._results.get(keys)
        more = result is not None
        if result is None:
            assert self._rows is not None
            place = _keys_at(self._rows, self._chunk, keys.start, keys.stop)
            result = self._results[keys] = self._workspace.result(f"{self._role}{keys.index}", self._rows, place, self._precision)
        if not queries.head_by_head:
            product(result, scores.mT, x, factor, accumulate=more)
            return
        for start in range(0, scores.shape[1], queries.size):
            head = slice(start, start + queries.size)
            product(result, scores[:, head].mT, x[:, head], factor, accumulate=more or start > 0)

    def finish(self) -> None:
        if self._rows is None:
            return
        for keys in self._chunk.grid:
            place = _keys_at(self._rows, self._chunk, keys.start, keys.stop)
            if keys in self._results:
                self._workspace.store(f"{self._role}{keys.index}", self._rows, place, self._results[keys])
            else:
                self._rows.at(place).zero_()


def _multiply(x: Tensor, factors: Tensor) -> None:
    """x [N, F*R, features] times one number for each of the block's sequences."""
    x.unflatten(0, (factors.shape[0], -1)).mul_(factors[:, None, None, None])
