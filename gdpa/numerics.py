"""How exact is exact enough: the error budget every backend is held to, in tests, in `gdpa check` and before a benchmark.

Nothing here is a guessed tolerance. The truth is the reference on float64 copies of the (already rounded) inputs. The yardstick is
the ideal fused computation in the inputs' dtype: S in fp32, P and dS rounded to the dtype, products accumulated in fp32, each output
rounded once. A result may err at most twice as much as the yardstick, in relative Frobenius norm and in largest absolute error.
See docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gdpa.activations import Activation
from gdpa.backends import reference
from gdpa.problem import Problem, allowed_pairs, row_ranges, window_mask

# An fp32 problem of at most FEW_SCORES scores is measured against the worst of this many more orders of additions.
ORDERS = 4
FEW_SCORES = 4096


class Results(NamedTuple):
    """The output and the gradients of one call; a gradient nobody asked for is None."""

    out: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    out_scale: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """One tensor's errors and what it was allowed."""

    name: str
    relative: float
    relative_budget: float
    largest: float
    largest_budget: float

    @property
    def passed(self) -> bool:
        # A NaN compares false, so it never passes.
        return self.relative <= self.relative_budget and self.largest <= self.largest_budget

    @property
    def budget_used(self) -> float:
        """The larger of the two errors as a fraction of its budget."""
        shares = [
            0.0 if error == 0 else (error / budget if budget > 0 else float("inf"))
            for error, budget in ((self.relative, self.relative_budget), (self.largest, self.largest_budget))
        ]
        return max(shares)

    def __str__(self) -> str:
        return (
            f"{self.name}: relative error {self.relative:.3g} (budget {self.relative_budget:.3g}), "
            f"largest {self.largest:.3g} (budget {self.largest_budget:.3g})"
        )


def truth(problem: Problem, inputs: Inputs, d_out: Tensor | None) -> Results:
    """The oracle in float64: the output and, where `d_out` is given, the three gradients by autograd."""
    q, k, v = (x.detach().double().requires_grad_(d_out is not None) for x in (inputs.q, inputs.k, inputs.v))
    out_scale = None if inputs.out_scale is None else inputs.out_scale.double()
    with torch.set_grad_enabled(d_out is not None):
        out = reference.attend(problem, q, k, v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, out_scale)
    if d_out is None:
        return Results(out)
    if not out.requires_grad:
        return Results(out, *(torch.zeros_like(x) for x in (q, k, v)))
    grads = torch.autograd.grad(out, (q, k, v), d_out.double(), allow_unused=True)
    dq, dk, dv = (torch.zeros_like(x) if g is None else g for x, g in zip((q, k, v), grads, strict=True))
    return Results(out.detach(), dq, dk, dv)


def yardstick(problem: Problem, inputs: Inputs, d_out: Tensor | None, seed: int | None = None) -> Results:
    """The ideal fused computation in the inputs' dtype, one sequence and head at a time.

    A `seed` shuffles the terms of every sum and adds one after the other, as a kernel that has one register for it: as ideal as the
    order of a library's matmul, which has several, and adds those up at the end, so that it errs less.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    q, k, v = inputs.q, inputs.k, inputs.v
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(problem.output_shape, dtype=wide, device=q.device)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))

    def rounded(x: Tensor) -> Tensor:
        return x.to(q.dtype).to(wide)

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        if generator is None:
            return a @ b
        total, rows, columns = (x.double() for x in (a.new_zeros(a.shape[0], b.shape[1]), a.T, b))
        for i in torch.randperm(a.shape[1], generator=generator).tolist():
            # A product of two fp32 numbers is exact in float64, so this rounds once, as a fused multiply-add.
            total = total.addr_(rows[i], columns[i]).to(wide).double()
        return total.to(wide)

    for b, h, q_rows, k_rows in _pieces(problem, inputs):
        if q_rows.start == q_rows.stop or k_rows.start == k_rows.stop:
            continue
        g = h // problem.group
        q_b, k_b, v_b = (_rows(x, b, rows)[:, head].to(wide) for x, rows, head in ((q, q_rows, h), (k, k_rows, g), (v, k_rows, g)))
        out_scale = problem.out_scale if inputs.out_scale is None else inputs.out_scale[b].to(wide)
        f = Activation.from_key(problem.activation_of(h))
        s = problem.scale * matmul(q_b, k_b.T)
        p, slope = f.value_and_derivative(s)
        if problem.masked:
            banned = ~window_mask(s.shape[0], s.shape[1], problem.window, s.device)
            p, slope = p.masked_fill(banned, 0), slope.masked_fill(banned, 0)
        p = rounded(p)
        out_rows = out[b] if problem.query_side != "packed" else out[q_rows]
        out_rows[:, h] = out_scale * matmul(p, v_b)
        if d_out is None:
            continue
        d_out_b = (d_out[b] if problem.query_side != "packed" else d_out[q_rows])[:, h].to(wide)
        dp = out_scale * matmul(d_out_b, v_b.T)
        ds = rounded(slope * dp)
        if problem.masked:
            ds = ds.masked_fill(banned, 0)
        _rows(dv, b, k_rows)[:, g] += out_scale * matmul(p.T, d_out_b)
        _rows(dq, b, q_rows)[:, h] += problem.scale * matmul(ds, k_b)
        _rows(dk, b, k_rows)[:, g] += problem.scale * matmul(ds.T, q_b)
    if d_out is None:
        return Results(out.to(q.dtype))
    return Results(*(x.to(q.dtype) for x in (out, dq, dk, dv)))


def judge(problem: Problem, inputs: Inputs, d_out: Tensor | None, results: Results) -> list[Verdict]:
    """Hold `results` to the budget. Gradients that are None are not judged."""
    exact = truth(problem, inputs, d_out)
    # In fp32 the order of additions errs as much as anything, and a few scores share one draw of it: take the worst of several.
    scores = problem.heads * allowed_pairs(problem, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    seeds = range(ORDERS) if inputs.q.dtype == torch.float32 and scores <= FEW_SCORES else ()
    ideals = [yardstick(problem, inputs, d_out, seed) for seed in (None, *seeds)]
    verdicts = []
    for i, (name, result) in enumerate(zip(Results._fields, results, strict=True)):
        if result is None:
            continue
        right, best = exact[i], [ideal[i] for ideal in ideals]
        if right is None:
            raise ValueError(f"{name} was computed, but no d_out was given to judge it with")
        verdicts.append(verdict_on(name, result, right, [x for x in best if x is not None]))
    return verdicts


def check(problem: Problem, inputs: Inputs, d_out: Tensor | None, results: Results) -> None:
    """Raise AssertionError, naming the tensor and both errors, unless every result is inside the budget."""
    failed = [str(verdict) for verdict in judge(problem, inputs, d_out, results) if not verdict.passed]
    assert not failed, "; ".join(failed)


def verdict_on(name: str, result: Tensor, right: Tensor, ideals: list[Tensor]) -> Verdict:
    """Hold one result against the truth; it may err twice as much as the worst of the ideal computations."""
    assert result.shape == right.shape, f"{name}: shape {tuple(result.shape)}, expected {tuple(right.shape)}"
    assert result.dtype == ideals[0].dtype, f"{name}: dtype {result.dtype}, expected {ideals[0].dtype}"
    relative, largest = _errors(result, right)
    ideal_errors = [_errors(ideal, right) for ideal in ideals]
    eps = torch.finfo(result.dtype).eps
    peak = right.abs().max().item() if right.numel() else 0.0
    # One rounding of a result errs eps / sqrt(12) in the root mean square: a yardstick that did better was lucky.
    relative_best = max(eps / 12**0.5, *(error for error, _ in ideal_errors))
    largest_best = max(error for _, error in ideal_errors)
    return Verdict(name, relative, 2 * relative_best, largest, 2 * largest_best + eps * peak)


def _errors(result: Tensor, right: Tensor) -> tuple[float, float]:
    """Relative Frobenius norm and largest absolute value of result - right."""
    if right.numel() == 0:
        return 0.0, 0.0
    difference = result.double() - right
    norm = right.norm().item()
    error = difference.norm().item()
    relative = error / norm if norm > 0 else (0.0 if error == 0 else float("inf"))
    return relative, difference.abs().max().item()


def _rows(x: Tensor, b: int, rows: slice) -> Tensor:
    return x[b] if x.dim() == 4 else x[rows]


def _pieces(problem: Problem, inputs: Inputs) -> Iterator[tuple[int, int, slice, slice]]:
    queries = row_ranges(inputs.cu_seqlens_q, problem.batch, problem.query_rows)
    keys = row_ranges(inputs.cu_seqlens_k, problem.batch, problem.key_rows)
    for b, ((q_start, q_len), (k_start, k_len)) in enumerate(zip(queries, keys, strict=True)):
        for h in range(problem.heads):
            yield b, h, slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
