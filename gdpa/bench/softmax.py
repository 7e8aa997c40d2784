"""Softmax attention as a yardstick of speed: what torch itself carries, and the float64 oracle those are judged against.

    P = softmax(scale * Q K^T) over the keys that a query sees        O = P V

It is not what gdpa computes: it does more work per score (a maximum, a sum, a division) and the same products.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gdpa.bench.cases import Workload
from gdpa.bench.providers import Call, Provider, as_leaves
from gdpa.numerics import Inputs, Results, Verdict, verdict_on
from gdpa.problem import row_ranges, window_mask


def judge_softmax(workload: Workload, inputs: Inputs, d_out: Tensor | None, results: Results) -> list[Verdict]:
    """Hold results to twice the error of the ideal fused computation, as gdpa.numerics does for gdpa's own function."""
    scale, causal, dtype = workload.problem.scale, workload.case.causal, inputs.q.dtype
    exact = attend(inputs, scale, d_out, torch.float64, dtype, rounded=False, causal=causal)
    ideal = attend(inputs, scale, d_out, torch.float32, dtype, rounded=True, causal=causal)
    named = zip(Results._fields, results, exact, ideal, strict=True)
    return [
        verdict_on(name, x, right, [best])
        for name, x, right, best in named
        if x is not None and right is not None and best is not None
    ]


def attend(
    inputs: Inputs, scale: float, d_out: Tensor | None, wide: torch.dtype, dtype: torch.dtype, rounded: bool, causal: bool = False
) -> Results:
    """The output and, where `d_out` is given, the gradients, one sequence at a time, in `wide`.

    `rounded` gives the ideal fused computation in `dtype`: P and dS rounded to it, sums in `wide`, each result rounded once.
    """
    q, k, v, cu_q, cu_k, _ = inputs
    shared = cu_q is None and q.dim() == 3
    batch = (cu_k if cu_k is not None else cu_q).shape[0] - 1 if cu_q is not None or cu_k is not None else q.shape[0]  # type: ignore[union-attr]
    q_rows, k_rows = row_ranges(cu_q, batch, q.shape[-3]), row_ranges(cu_k, batch, k.shape[-3])
    out_shape = (batch, *q.shape) if shared else q.shape
    out = torch.zeros(out_shape, dtype=wide, device=q.device)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))

    def once(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide) if rounded else x

    def rows(x: Tensor, b: int, ranges: list[tuple[int, int]]) -> Tensor:
        start, length = ranges[b]
        return x[b] if x.dim() == 4 else x[start : start + length]

    for b in range(batch):
        if q_rows[b][1] == 0 or k_rows[b][1] == 0:
            continue
        q_b, k_b, v_b = (rows(x, b, r).to(wide).transpose(0, 1) for x, r in ((q, q_rows), (k, k_rows), (v, k_rows)))  # [H, S, D]
        s = scale * (q_b @ k_b.mT)
        if causal:
            s = s.masked_fill(window_mask(s.shape[-2], s.shape[-1], (-1, 0), s.device).logical_not(), -torch.inf)
        p = torch.softmax(s, dim=-1)
        o = once(p) @ v_b
        rows(out, b, q_rows).copy_(o.transpose(0, 1))
        if d_out is None:
            continue
        do = rows(d_out, b, q_rows).to(wide).transpose(0, 1)
        ds = once(p * (do @ v_b.mT - (do * once(o)).sum(-1, keepdim=True)))
        rows(dv, b, k_rows).add_((once(p).mT @ do).transpose(0, 1))
        rows(dq, b, q_rows).add_((scale * (ds @ k_b)).transpose(0, 1))
        rows(dk, b, k_rows).add_((scale * (ds.mT @ q_b)).transpose(0, 1))
    if d_out is None:
        return Results(out.to(dtype) if rounded else out)
    return Results(*(x.to(dtype) if rounded else x for x in (out, dq, dk, dv)))


class Softmax(Provider):
    note = "softmax, not the activation"

    def judge(self, workload: Workload, inputs: Inputs, d_out: Tensor | None, results: Results) -> list[Verdict]:
        return judge_softmax(workload, inputs, d_out, results)

    def reason_against(self, workload: Workload, gradients: bool) -> str | None:
        if workload.problem.device.type != "cuda":
            return "runs on a CUDA device only"
        if workload.problem.dtype not in (torch.bfloat16, torch.float16):
            return "takes bf16 and fp16 only"
        return None


class Sdpa(Softmax):
    """torch.nn.functional.scaled_dot_product_attention held to one of its kernels, on (B, H, S, D) views of dense tensors."""

    backend: SDPBackend

    def reason_against(self, workload: Workload, gradients: bool) -> str | None:
        if not workload.case.dense:
            return "takes dense batches only"
        return super().reason_against(workload, gradients)

    def prepare(self, workload: Workload) -> Call:
        leaves = as_leaves(*workload.inputs[:3])

        def forward() -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in leaves)
            with sdpa_kernel(self.backend):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=workload.case.causal)
                return out.transpose(1, 2)

        return Call(leaves, forward)


class Cudnn(Sdpa):
    name = "cudnn"
    backend = SDPBackend.CUDNN_ATTENTION


class Flash(Sdpa):
    name = "flash"
    backend = SDPBackend.FLASH_ATTENTION


@dataclass(frozen=True)
class Packed:
    """A workload as packed tensors with offsets on both sides, as variable-length kernels take it.

    Dense tensors are flattened; shared seeds are repeated for every sequence, before the clock starts.
    """

    workload: Workload

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.workload.inputs[:3]
        if self._shared:
            q = q.expand(self.workload.problem.batch, *q.shape)
        q, k, v = (x.flatten(0, 1) if x.dim() == 4 else x for x in (q, k, v))
        return as_leaves(q, k, v)

    @property
    def _shared(self) -> bool:
        return self.workload.problem.query_side == "shared"

    def offsets(self) -> tuple[Tensor, Tensor]:
        problem, inputs = self.workload.problem, self.workload.inputs

        def regular(rows: int) -> Tensor:
            return torch.arange(problem.batch + 1, dtype=torch.int32, device=problem.device) * rows

        cu_q, cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        return (
            regular(problem.query_rows) if cu_q is None else cu_q.int(),
            regular(problem.key_rows) if cu_k is None else cu_k.int(),
        )

    def collect(self, results: Results) -> Results:
        q, k, v = self.workload.inputs[:3]
        out, dq, dk, dv = results
        if dq is not None:
            # A seed's gradient is the sum over the sequences it was repeated for.
            dq = dq.reshape(-1, *q.shape).sum(0, dtype=torch.float32).to(dq.dtype) if self._shared else dq.reshape(q.shape)
        return Results(
            out.reshape(self.workload.d_out.shape),
            dq,
            None if dk is None else dk.reshape(k.shape),
            None if dv is None else dv.reshape(v.shape),
        )

    def call(self, leaves: tuple[Tensor, Tensor, Tensor], forward: Callable[[], Tensor]) -> Call:
        return Call(leaves, forward, lambda d_out: d_out.flatten(0, 1) if d_out.dim() == 4 else d_out, self.collect)


class Varlen(Softmax):
    """torch.nn.attention.varlen, FlashAttention 2 on packed tensors."""

    name = "varlen"

    def prepare(self, workload: Workload) -> Call:
        from torch.nn.attention.varlen import varlen_attn

        packed = Packed(workload)
        leaves = packed.leaves()
        cu_q, cu_k = packed.offsets()
        max_q, max_k = workload.longest
        options: dict[str, Any] = {}
        if workload.case.causal:  # said in another way by earlier releases
            known = inspect.signature(varlen_attn).parameters
            options = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}

        def forward() -> Tensor:
            out = varlen_attn(*leaves, cu_q, cu_k, max_q, max_k, **options)
            assert isinstance(out, Tensor)
            return out

        return packed.call(leaves, forward)
