"""The run: for every case, gate each provider against the oracle, then measure those that passed, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gdpa.bench import fresh, timing
from gdpa.bench.cases import MODES, Case, Mode, Workload, build, problem_of
from gdpa.bench.providers import Call, Provider
from gdpa.bench.report import Report, Row, size
from gdpa.jagged import offsets_from_lengths
from gdpa.numerics import Inputs, Results, Verdict, judge

# The gate looks at this many sequences of the full-size run: the shortest, the longest, and evenly between.
GATED_SEQUENCES = 8
# What the gate and the memory run of a provider take, in steps of the progress bar.
GATE_STEPS = 4


@dataclass(frozen=True)
class Plan:
    cases: tuple[Case, ...]
    activations: tuple[str, ...]
    providers: tuple[Provider, ...]
    dtype: torch.dtype
    device: torch.device
    effort: timing.Effort
    fresh: bool = True  # measure what needs processes of their own: cold first calls and, on a CPU, memory

    @property
    def steps(self) -> float:
        """The length of the progress bar, in units of about a second on a CPU."""
        workloads = len(self.cases) * len(self.activations)
        cold_starts = len(cold_providers(self.providers)) if self.fresh else 0
        return workloads * (GATE_STEPS * len(self.providers) + len(MODES) * self.effort.seconds + 4 * cold_starts)


class Progress:
    """Where the run stands. The default shows nothing; the CLI draws a bar."""

    def step(self, text: str, done: float) -> None:
        """`done` of the plan's steps are behind us, and `text` is what comes now."""

    def finished(self, case: str) -> None: ...


def run(plan: Plan, report: Report, progress: Progress | None = None, save: Callable[[], None] = lambda: None) -> None:
    """Add the plan's rows to the report. `save` is called after each group of rows, so little is lost on a stop."""
    progress = progress or Progress()
    done = 0.0
    for case in plan.cases:
        for activation in plan.activations:
            label = f"{case.name} {activation}"
            progress.step(f"{label}: drawing the data", done)
            try:
                workload = build(case, activation, plan.dtype, plan.device)
            except torch.OutOfMemoryError:
                report.rows += [_empty(case.name, m, activation, p, "out of memory") for m in MODES for p in plan.providers]
                done += GATE_STEPS * len(plan.providers) + len(MODES) * plan.effort.seconds
                continue
            report.header.setdefault("cases", {})[case.name] = {**case.facts(), "summary": summary(workload)}

            entries: dict[str, Entry] = {}
            for provider in plan.providers:
                progress.step(f"{label}: {provider.name}, checking against the oracle", done)
                entries[provider.name] = enter(provider, workload)
                done += GATE_STEPS
            for mode in MODES:
                base = done

                def on_step(name: str, share: float, mode: Mode = mode, label: str = label, base: float = base) -> None:
                    progress.step(f"{label}: {name}, {mode}", base + share * plan.effort.seconds)

                report.rows += measure(workload, mode, entries, plan, on_step)
                done += plan.effort.seconds
                save()
            runnable = [p for p in cold_providers(plan.providers) if entries[p.name].call is not None]
            # The cold call's process needs the device's memory too.
            del workload
            entries.clear()
            timing.release()
            if plan.fresh:
                for provider in cold_providers(plan.providers):
                    if provider in runnable:
                        progress.step(f"{label}: {provider.name}, cold first call", done)
                        report.rows.append(cold_row(case, activation, plan, provider))
                    done += 4
                save()
            progress.finished(label)


@dataclass
class Entry:
    """A provider on one workload: ready with its verdicts, or the reason why it is not."""

    provider: Provider
    call: Call | None = None
    verdicts: tuple[Verdict, ...] = ()
    note: str | None = None
    failed: bool = False
    cpu_peaks: dict[Mode, int] | None = None  # of both modes, measured with the first


def enter(provider: Provider, workload: Workload) -> Entry:
    """Make a provider ready and hold its results to the error budget."""
    try:
        reason = provider.reason_against(workload)
        if reason is not None:
            return Entry(provider, note=reason)
        call = provider.prepare(workload)
        verdicts = tuple(gate(workload, call))
    except Exception as error:
        timing.release()
        note = timing.describe_failure(error)
        return Entry(provider, note=note, failed=note != "out of memory")
    wrong = [verdict for verdict in verdicts if not verdict.passed]
    if not wrong:
        return Entry(provider, call, verdicts)
    finite = all(verdict.relative < float("inf") for verdict in verdicts)
    if provider.baseline and finite:
        # Plain PyTorch rounds every intermediate to the dtype, S included, which the budget does not allow a kernel.
        return Entry(provider, call, verdicts, note=f"over the budget: {', '.join(v.name for v in wrong)}")
    return Entry(provider, None, verdicts, note=f"wrong, not timed: {'; '.join(map(str, wrong))}", failed=True)


def measure(
    workload: Workload,
    mode: Mode,
    entries: dict[str, Entry],
    plan: Plan,
    on_step: Callable[[str, float], None] = lambda name, share: None,
) -> list[Row]:
    """The rows of one (workload, mode): memory in a run of its own, then time in interleaved rounds."""
    calls = {name: entry.call for name, entry in entries.items() if entry.call is not None}
    d_outs = {name: call.lay_out(workload.d_out) for name, call in calls.items()}
    peaks: dict[str, int | None] = {}
    failures: dict[str, str] = {}
    for name, call in list(calls.items()):
        on_step(name, 0.0)
        try:
            peaks[name] = _peak(workload, mode, entries[name], call, d_outs[name], plan.fresh)
        except fresh.FreshProcessFailed as error:
            failures[name] = str(error)
        except Exception as error:
            timing.release()
            failures[name] = timing.describe_failure(error)
        if name in failures:
            del calls[name]
    samples = timing.interleaved(calls, mode, d_outs, plan.effort, on_step)

    rows = []
    for name, entry in entries.items():
        row = Row(workload.case.name, mode, workload.activation, name, note=entry.note, failed=entry.failed)
        judged = [v for v in entry.verdicts if (v.name == "out") == (mode == "forward")]
        if judged:
            row.error = max(v.relative for v in judged)
            row.budget_used = max(v.budget_used for v in judged)
        failure = failures.get(name) or (samples[name].failure if name in samples else None)
        if failure is not None:
            row.note, row.failed = failure, failure != "out of memory"
        elif name in samples:
            row.ms, row.spread = samples[name].median, samples[name].spread
            row.tflops = workload.flops(mode) / row.ms / 1e9
            row.peak_bytes = peaks[name]
        rows.append(row)
    return rows


def _peak(workload: Workload, mode: Mode, entry: Entry, call: Call, d_out: Tensor, may_start: bool) -> int | None:
    problem = workload.problem
    if problem.device.type != "cpu":
        return timing.gpu_peak_bytes(call, mode, d_out)
    if entry.cpu_peaks is None and may_start:
        entry.cpu_peaks = fresh.peak_bytes(workload.case, workload.activation, problem.dtype, entry.provider.name)
    return None if entry.cpu_peaks is None else entry.cpu_peaks[mode]


def gate(workload: Workload, call: Call) -> list[Verdict]:
    """Judge a full-size forward and backward on a sample of its sequences.

    Sequences are independent, so the oracle needs only the sampled ones. The others get a zero gradient: that of
    shared queries, which sums over the batch, then is that of the sampled sequences alone.
    """
    chosen = sampled(workload)
    d_out = torch.zeros_like(workload.d_out)
    for b in chosen:
        rows = _output_rows(workload, b)
        d_out[rows] = workload.d_out[rows]
    out = call.forward()
    grads = torch.autograd.grad(out, call.leaves, call.lay_out(d_out))
    results = call.collect(Results(out.detach(), *grads))
    for name, result in zip(Results._fields, results, strict=True):
        if result is not None and not bool(torch.isfinite(result).all()):
            raise ValueError(f"{name} holds NaN or Inf")
    inputs, d_out, part = restrict(workload, chosen, results)
    return judge(problem_of(inputs, workload.activation), inputs, d_out, part)


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

    def part(x: Tensor, rows: list[tuple[int, int]], offsets: Tensor | None, per_sequence: bool) -> Tensor:
        if offsets is not None:
            return torch.cat([x[rows[b][0] : rows[b][0] + rows[b][1]] for b in chosen])
        return x[chosen] if per_sequence else x

    def offsets_of(rows: list[tuple[int, int]], offsets: Tensor | None) -> Tensor | None:
        if offsets is None:
            return None
        return offsets_from_lengths(torch.tensor([rows[b][1] for b in chosen])).to(offsets.device)

    def queries(x: Tensor) -> Tensor:
        return part(x, workload.q_rows, inputs.cu_seqlens_q, per_sequence=x.dim() == 4)

    def keys(x: Tensor) -> Tensor:
        return part(x, workload.k_rows, inputs.cu_seqlens_k, per_sequence=True)

    small = Inputs(
        queries(inputs.q),
        keys(inputs.k),
        keys(inputs.v),
        offsets_of(workload.q_rows, inputs.cu_seqlens_q),
        offsets_of(workload.k_rows, inputs.cu_seqlens_k),
    )
    out, dq, dk, dv = results
    assert dq is not None
    assert dk is not None
    assert dv is not None
    return small, queries(workload.d_out), Results(queries(out), queries(dq), keys(dk), keys(dv))


def _output_rows(workload: Workload, b: int) -> slice:
    if workload.inputs.cu_seqlens_q is None:
        return slice(b, b + 1)
    start, length = workload.q_rows[b]
    return slice(start, start + length)


def cold_providers(providers: Iterable[Provider]) -> list[Provider]:
    """The backends people wait for; plain PyTorch and the reference have nothing to compile."""
    return [provider for provider in providers if provider.name not in ("eager", "gdpa-reference")]


def cold_row(case: Case, activation: str, plan: Plan, provider: Provider) -> Row:
    row = _empty(case.name, "cold", activation, provider, None)
    try:
        row.ms = fresh.first_call_ms(case, activation, plan.dtype, plan.device, provider.name)
    except fresh.FreshProcessFailed as error:
        row.note, row.failed = str(error), True
    return row


def _empty(case: str, mode: str, activation: str, provider: Provider, note: str | None) -> Row:
    return Row(case, mode, activation, provider.name, note=note)


def summary(workload: Workload) -> str:
    """One line about the size of a workload."""
    problem = workload.problem
    lengths = [n for _, n in (workload.q_rows if workload.inputs.cu_seqlens_q is not None else workload.k_rows)]
    other = {"self": "", "pma": f", {problem.query_rows} shared seeds", "pffn": f", {problem.key_rows} keys each"}
    return (
        f"batch {problem.batch}, {problem.heads} heads, dimension {problem.head_dim}, {str(problem.dtype)[6:]}, "
        f"lengths {min(lengths, default=0)} to {max(lengths, default=0)}{other[workload.case.kind]}\n"
        f"forward {workload.flops('forward') / 1e9:.3g} GFLOP, {size(workload.bytes('forward'))}; "
        f"backward {workload.flops('backward') / 1e9:.3g} GFLOP, {size(workload.bytes('backward'))}"
    )
