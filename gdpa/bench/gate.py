"""The correctness gate: no time is reported for a provider whose results are wrong.

A full-size call is judged on a sample of its sequences. Sequences are independent, so the oracle needs only the sampled ones; the
others get a zero gradient, so that the gradient of shared queries, a sum over the batch, is that of the sampled sequences alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdpa.bench import timing
from gdpa.bench.cases import Mode, Workload
from gdpa.bench.providers import Call, Provider
from gdpa.jagged import offsets_from_lengths
from gdpa.numerics import Inputs, Results, Verdict

# The gate looks at this many sequences: the shortest, the longest, and evenly between.
GATED_SEQUENCES = 4


@dataclass
class Entry:
    """A provider on one workload: ready with its verdicts, or the reason why it is not."""

    provider: Provider
    call: Call | None = None
    verdicts: tuple[Verdict, ...] = ()
    note: str | None = None
    failed: bool = False  # an unexpected error, as opposed to an empty cell
    cpu_peaks: dict[Mode, int] | None = None  # of all modes, measured with the first

    def judged(self, mode: Mode) -> list[Verdict]:
        """The verdicts a mode rests on: the output's forward, the gradients' backward."""
        wanted = {"forward": ("out",), "backward": ("dq", "dk", "dv"), "both": ("out", "dq", "dk", "dv")}[mode]
        return [verdict for verdict in self.verdicts if verdict.name in wanted]

    def wrong(self, mode: Mode) -> list[Verdict]:
        share = self.provider.budget_share
        return [v for v in self.judged(mode) if not (v.passed or v.budget_used <= share)]

    def over(self, mode: Mode) -> list[Verdict]:
        return [v for v in self.judged(mode) if not v.passed]


def enter(provider: Provider, workload: Workload, gradients: bool) -> Entry:
    """Make a provider ready and judge what it computes."""
    try:
        reason = provider.reason_against(workload, gradients)
        if reason is not None:
            return Entry(provider, note=reason)
        call = provider.prepare(workload)
        verdicts = tuple(gate(workload, provider, call, gradients))
    except Exception as error:
        timing.release()
        note = timing.describe_failure(error)
        return Entry(provider, note=note, failed=not timing.out_of_memory(error))
    return Entry(provider, call, verdicts)


def gate(workload: Workload, provider: Provider, call: Call, gradients: bool) -> list[Verdict]:
    chosen = sampled(workload)
    if gradients:
        d_out = torch.zeros_like(workload.d_out)
        for b in chosen:
            rows = _output_rows(workload, b)
            d_out[rows] = workload.d_out[rows]
        out = call.forward()
        grads = torch.autograd.grad(out, call.leaves, call.lay_out(d_out))
        results = call.collect(Results(out.detach(), *grads))
    else:
        with torch.no_grad():
            results = call.collect(Results(call.forward()))
    for name, result in zip(Results._fields, results, strict=True):
        if result is not None and not bool(torch.isfinite(result).all()):
            raise ValueError(f"{name} holds NaN or Inf")
    inputs, small_d_out, part = restrict(workload, chosen, results)
    return provider.judge(workload, inputs, small_d_out if gradients else None, part)


def sampled(workload: Workload, count: int = GATED_SEQUENCES) -> list[int]:
    """Sequences to look at: by size, the extremes and evenly between."""
    sizes = [q_len * k_len for (_, q_len), (_, k_len) in zip(workload.q_rows, workload.k_rows, strict=True)]
    order = sorted(range(len(sizes)), key=lambda b: sizes[b])
    count = min(count, len(order))
    places = {round(i * (len(order) - 1) / max(count - 1, 1)) for i in range(count)}
    return sorted(order[place] for place in places)


def restrict(workload: Workload, chosen: list[int], results: Results) -> tuple[Inputs, Tensor, Results]:
    """The problem of the chosen sequences alone, with the part of the results that belongs to them."""
    inputs = workload.inputs

    def part(x: Tensor, rows: list[tuple[int, int]], offsets: Tensor | None) -> Tensor:
        if offsets is not None:
            return torch.cat([x[rows[b][0] : rows[b][0] + rows[b][1]] for b in chosen])
        return x[chosen] if x.dim() == 4 else x  # shared queries and their gradient have no batch

    def offsets_of(rows: list[tuple[int, int]], offsets: Tensor | None) -> Tensor | None:
        if offsets is None:
            return None
        return offsets_from_lengths(torch.tensor([rows[b][1] for b in chosen])).to(offsets.device)

    q_rows, k_rows = workload.q_rows, workload.k_rows

    def queries(x: Tensor) -> Tensor:
        return part(x, q_rows, inputs.cu_seqlens_q)

    def keys(x: Tensor) -> Tensor:
        return part(x, k_rows, inputs.cu_seqlens_k)

    small = Inputs(
        queries(inputs.q),
        keys(inputs.k),
        keys(inputs.v),
        offsets_of(q_rows, inputs.cu_seqlens_q),
        offsets_of(k_rows, inputs.cu_seqlens_k),
    )
    out, dq, dk, dv = results
    gradients = (None if x is None else side(x) for x, side in ((dq, queries), (dk, keys), (dv, keys)))
    return small, queries(workload.d_out), Results(queries(out), *gradients)


def _output_rows(workload: Workload, b: int) -> slice:
    if workload.inputs.cu_seqlens_q is None:
        return slice(b, b + 1)
    start, length = workload.q_rows[b]
    return slice(start, start + length)
