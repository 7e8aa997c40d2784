"""Sequences on the CPU whose score matrices fit scratch memory whole: all heads of a sequence at once, or as many as fit.

    S = scale * Q K^T          [h, Lq, Lk]
    P = f(S)
    O = out_scale * P V        [h, Lq, Dv]

The equations, the precision and the scratch memory are those of gdpa/backends/cpu.py. What differs is the work besides the products:
the views of the caller's tensors are made beforehand, by one `split` for each tensor, so that an fp32 forward of a sequence is three
calls to torch and a backward seven. Each call takes Python's lock, and two workers wait for each other there. On two threads
64 sequences of 32 to 64 rows (fp32, 4 heads, D = 128) took 30 ms forward and backward, in tiles 40 ms; 32 of 1 to 512 rows 87 ms
and 105 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from gdpa.backends.cpu_kernels import kernel_of
from gdpa.backends.cpu_plan import BATCH_SCORES, EXACT_PAIRS, divide, is_narrow, wide
from gdpa.backends.cpu_tensors import LEAST_NUMBERS_IN_PLACE, Workspace, few_sizes, product, wide_product, workspace
from gdpa.problem import Problem, row_ranges

MOST_SCORES = 1 << 20  # of one product
# Narrow products need sequences padded to few sizes. Where that makes more scores than so many times those there are, fp32 is as fast:
# sequences of 65 rows took 34 ns a score and thread (bf16, forward and backward) for 33, those of 81 rows 26 for 30, of 100 20 for 27.
MOST_PADDING = 1.5
# Sequences of equal lengths can share products, in tiles, which pays below so many scores; where they are copied anyway (16 bits)
# it pays wherever it is possible.
LEAST_SCORES_IF_EQUAL = 1 << 16


class _Task(NamedTuple):
    sequence: int
    heads: slice
    whole: bool  # all heads
    narrow: bool  # operands of products are bf16, P and dS rounded among them, and sequences padded to `few_sizes`


class _Call:
    """The sequences' lengths and what else they share."""

    def __init__(
        self, problem: Problem, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, out_scale: Tensor | None
    ) -> None:
        self.problem = problem
        self.kernel = kernel_of(problem.activations[0])
        self.q_lengths = [length for _, length in row_ranges(cu_seqlens_q, problem.batch, problem.query_rows)]
        self.k_lengths = [length for _, length in row_ranges(cu_seqlens_k, problem.batch, problem.key_rows)]
        self.pairs = [q_len * k_len for q_len, k_len in zip(self.q_lengths, self.k_lengths, strict=True)]
        self.factors: list[float] = [problem.out_scale] * problem.batch
        if out_scale is not None:
            self.factors = out_scale.to(wide(problem.dtype)).tolist()

    def queries(self, role: str, x: Tensor) -> _Sequences:
        return _Sequences(role, x, self.q_lengths)

    def keys(self, role: str, x: Tensor) -> _Sequences:
        return _Sequences(role, x, self.k_lengths)

    def precision(self, sequence: int) -> torch.dtype:
        exact = self.problem.dtype == torch.float32 and self.pairs[sequence] <= EXACT_PAIRS
        return torch.float64 if exact else wide(self.problem.dtype)

    def rounded(self, scores: Tensor, task: _Task, memory: Workspace) -> Tensor:
        """P or dS as an operand: where the task is narrow in the inputs' precision, with zeros for pairs of no query or key."""
        if not task.narrow:
            return scores
        rows, keys = self.q_lengths[task.sequence], self.k_lengths[task.sequence]
        rounded = memory.rounded(scores, self.problem.dtype)
        if rows < scores.shape[1]:
            rounded[:, rows:].zero_()
        if keys < scores.shape[2]:
            rounded[:, :, keys:].zero_()
        return rounded

    def scores(self, s: Tensor, queries: _Sequences, q_rows: Tensor, keys: _Sequences, k_rows: Tensor, memory: Workspace) -> None:
        """s = scale * Q K^T, of rows that were loaded."""
        if not self.kernel.steady:
            q_rows, k_rows = queries.widen(q_rows, memory), keys.widen(k_rows, memory)
        wide_product(s, q_rows, k_rows.mT, self.problem.scale, memory)

    def run(self, work: Callable[[_Task, Tensor, Workspace], None]) -> None:
        """Do the work of every sequence that has pairs: `work` gets a task, memory for its scores, and the rest of the memory."""
        heads = self.problem.heads
        tasks = []
        for sequence, pairs in enumerate(self.pairs):
            if pairs:
                parts = -(-heads // min(heads, max(1, MOST_SCORES // pairs)))
                step = -(-heads // parts)
                padded = few_sizes(self.q_lengths[sequence]) * few_sizes(self.k_lengths[sequence])
                narrow = is_narrow(self.problem, pairs) and padded <= MOST_PADDING * pairs
                for first in range(0, heads, step):
                    tasks.append(_Task(sequence, slice(first, min(first + step, heads)), step == heads, narrow))

        def work_through(numbers: Iterable[int]) -> None:
            with workspace() as memory:
                for number in numbers:
                    task = tasks[number]
                    memory.use(self.precision(task.sequence))
                    rows, keys = self.q_lengths[task.sequence], self.k_lengths[task.sequence]
                    if task.narrow:
                        rows, keys = few_sizes(rows), few_sizes(keys)
                    work(task, memory.take("s", (task.heads.stop - task.heads.start, rows, keys)), memory)

        divide([(task.heads.stop - task.heads.start) * self.pairs[task.sequence] for task in tasks], work_through)


class _Sequences:
    """The rows of a tensor by sequence: [H, L, features] each."""

    def __init__(self, role: str, x: Tensor, lengths: list[int]) -> None:
        self._role, self._dtype = role, x.dtype
        packed = x.dim() == 3
        covered = sum(lengths) if packed else len(lengths)
        heads_first = x[:covered].transpose(-3, -2)
        self._views = heads_first.split(lengths, 1) if packed else heads_first.unbind(0)
        self._tail = x[covered:]  # rows that no sequence covers
        self._is_operand = x.stride(-1) == 1 and x.stride(-3) >= x.shape[-1]

    def _at(self, task: _Task) -> Tensor:
        view = self._views[task.sequence]
        return view if task.whole else view[task.heads]

    def load(self, task: _Task, memory: Workspace) -> Tensor:
        """The operand [h, L, features] of a product: the caller's own memory where it has the precision and strides, else a copy.

        In narrow tasks it has the caller's precision, zeros below its rows, and no gaps between them (see Workspace.load).
        """
        view = self._at(task)
        dtype = self._dtype if task.narrow else memory.dtype
        heads, rows, features = view.shape
        size = few_sizes(rows) if task.narrow else rows
        if self._is_operand and self._dtype == dtype and size == rows and not (task.narrow and view.stride(1) != features):
            return view
        copy = memory.take(self._role, (heads, size, features), dtype)
        if size == rows:
            return copy.copy_(view)
        copy[:, :rows].copy_(view)
        copy[:, rows:].zero_()
        return copy

    def widen(self, loaded: Tensor, memory: Workspace) -> Tensor:
        """What was loaded in the workspace's precision."""
        return loaded if loaded.dtype == memory.dtype else memory.take(self._role, loaded.shape).copy_(loaded)

    def compute(self, task: _Task, a: Tensor, b: Tensor, factor: float, memory: Workspace) -> None:
        """The task's rows = factor * a @ b, of which there may be more."""
        view = self._at(task)
        rows = view.shape[1]
        # A product into strided memory is computed matrix by matrix, which costs more than a copy does where they are small.
        if self._dtype == a.dtype and rows == a.shape[1] and rows * view.shape[2] >= LEAST_NUMBERS_IN_PLACE:
            product(view, a, b, factor)
        else:
            result = memory.take(f"{self._role} result", (a.shape[0], a.shape[1], b.shape[2]), a.dtype)
            product(result, a, b, factor)
            view.copy_(result[:, :rows] if rows < a.shape[1] else result)

    def zero_the_rest(self, pairs: list[int]) -> None:
        """Zeros in sequences without pairs, and in rows of no sequence."""
        for view, number in zip(self._views, pairs, strict=True):
            if not number:
                view.zero_()
        self._tail.zero_()


def takes(problem: Problem, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> bool:
    """Whether the scores of every sequence fit, with the options that are served here."""
    if problem.batch == 0 or problem.masked or len(problem.activations) > 1 or problem.group > 1 or problem.query_side == "shared":
        return False
    shortest, longest = 1, 1
    for offsets, rows in ((cu_seqlens_q, problem.query_rows), (cu_seqlens_k, problem.key_rows)):
        least, most = (rows, rows) if offsets is None else (int(x) for x in offsets.diff().aminmax())
        shortest, longest = shortest * least, longest * most
    least = BATCH_SCORES if problem.dtype.itemsize == 2 else LEAST_SCORES_IF_EQUAL
    if shortest == longest and longest * problem.heads < least:
        return False
    return longest <= MOST_SCORES


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out_scale: Tensor | None,
) -> Tensor:
    call = _Call(problem, cu_seqlens_q, cu_seqlens_k, out_scale)
    result = torch.empty(problem.output_shape, dtype=q.dtype)
    queries, out = call.queries("q", q), call.queries("o", result)
    keys, values = call.keys("k", k), call.keys("v", v)
    kernel = call.kernel

    def work(task: _Task, s: Tensor, memory: Workspace) -> None:
        q_rows, k_rows = queries.load(task, memory), keys.load(task, memory)
        call.scores(s, queries, q_rows, keys, k_rows, memory)
        kernel.value(s)
        p = call.rounded(s, task, memory)
        out.compute(task, p, values.load(task, memory), call.factors[task.sequence], memory)

    out.zero_the_rest(call.pairs)
    call.run(work)
    return result


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
    """The steps of gdpa/backends/cpu.py's backward; what only serves a gradient that nobody needs is not computed."""
    results = [torch.empty(x.shape, dtype=x.dtype) if need else None for x, need in zip((q, k, v), needs, strict=True)]
    if not any(needs):
        return None, None, None
    call = _Call(problem, cu_seqlens_q, cu_seqlens_k, out_scale)
    dq = None if results[0] is None else call.queries("dq", results[0])
    dk = None if results[1] is None else call.keys("dk", results[1])
    dv = None if results[2] is None else call.keys("dv", results[2])
    queries, gradients = call.queries("q", q), call.queries("do", d_out)
    keys, values = call.keys("k", k), call.keys("v", v)
    kernel, scale = call.kernel, problem.scale
    slope = dq is not None or dk is not None

    def work(task: _Task, s: Tensor, memory: Workspace) -> None:
        factor = call.factors[task.sequence]
        q_rows, k_rows, do_rows = queries.load(task, memory), keys.load(task, memory), gradients.load(task, memory)
        p = memory.take("p", s.shape)
        call.scores(s, queries, q_rows, keys, k_rows, memory)
        kernel.prepare(s, None if dv is None else p, slope)
        if dv is not None:
            dv.compute(task, call.rounded(p, task, memory).mT, do_rows, factor, memory)
        if not slope:
            return
        v_rows = values.load(task, memory)
        dp, at_once = p, factor * scale  # so that a product like O's serves dQ, and dV's dK
        wide_product(dp, do_rows, v_rows.mT, at_once, memory)
        kernel.multiply_by_slope(dp, s)
        ds = call.rounded(dp, task, memory)
        if dq is not None:
            dq.compute(task, ds, k_rows, 1.0, memory)
        if dk is not None:
            dk.compute(task, ds.mT, q_rows, 1.0, memory)

    for result in (dq, dk, dv):
        if result is not None:
            result.zero_the_rest(call.pairs)
    call.run(work)
    return results[0], results[1], results[2]
