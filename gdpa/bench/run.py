"""The run: for every case and activation, gate each provider against the oracle, then measure those that passed, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gdpa.bench import extras, fresh, timing
from gdpa.bench.cases import Case, Mode, Workload, build
from gdpa.bench.gate import Entry, enter
from gdpa.bench.plain import broken_cpu_products
from gdpa.bench.providers import Call, Provider
from gdpa.bench.report import Report, Row

# What drawing a case's data, a provider's gate and one fresh process take, in steps of the progress bar: seconds, about.
DRAW_STEPS, GATE_STEPS, FRESH_STEPS = 0.5, 0.5, 3.0


@dataclass(frozen=True)
class Plan:
    cases: tuple[Case, ...]
    activations: tuple[str, ...]
    modes: tuple[Mode, ...]
    providers: tuple[Provider, ...]
    dtype: torch.dtype
    device: torch.device
    effort: timing.Effort
    memory: bool = False
    cold: bool = False
    graph: bool = False
    schedule: bool = False
    done: frozenset[tuple[str, str, str, str]] = field(default_factory=frozenset)  # rows a resumed run has already

    @property
    def gradients(self) -> bool:
        return self.modes != ("forward",)

    @property
    def fresh_memory(self) -> bool:
        """Whether memory takes processes of its own."""
        return self.memory and self.device.type == "cpu"

    @property
    def steps(self) -> float:
        """The length of the progress bar, in seconds, about."""
        per_provider = GATE_STEPS + FRESH_STEPS * (self.cold + self.fresh_memory)
        per_activation = len(self.modes) * self.effort.seconds + len(self.providers) * per_provider
        return len(self.cases) * (DRAW_STEPS + len(self.activations) * per_activation)

    def missing(self, case: str, activation: str, mode: str) -> tuple[Provider, ...]:
        return tuple(p for p in self.providers if (case, mode, activation, p.name) not in self.done)


class Progress:
    """Where the run stands. The default shows nothing; the CLI draws a bar."""

    def step(self, text: str, done: float) -> None:
        """`done` of the plan's steps are behind us, and `text` is what comes now."""

    def finished(self, text: str) -> None: ...


class Run:
    """A plan being carried out. `save` is called after each group of rows, so that little is lost on a stop."""

    def __init__(
        self, plan: Plan, report: Report, progress: Progress | None = None, save: Callable[[], None] = lambda: None
    ) -> None:
        self.plan, self.report, self.save = plan, report, save
        self.progress = progress or Progress()
        self.steps_done = 0.0
        dtype = str(plan.dtype).removeprefix("torch.")
        broken = plan.device.type == "cpu" and plan.dtype.itemsize < 4 and broken_cpu_products(dtype) is not None
        self.hardware = timing.Hardware.of(plan.device, plan.dtype, products=not broken)

    def __call__(self) -> None:
        plan = self.plan
        for case in plan.cases:
            groups = [(a, m) for a in plan.activations for m in plan.modes if plan.missing(case.name, a, m)]
            if not groups and not (plan.cold or plan.graph or plan.schedule):
                self._advance(plan.steps / len(plan.cases))
                continue
            self.progress.step(f"{case.name}: drawing the data", self.steps_done)
            try:
                workload = build(case, plan.activations[0], plan.dtype, plan.device)
            except Exception as error:
                if not timing.out_of_memory(error):
                    raise
                timing.release()
                self._no_room(case)
                self._advance(plan.steps / len(plan.cases))
                continue
            self._advance(DRAW_STEPS)
            for activation in plan.activations:
                self._activation(workload.with_activation(activation))
            # The next case's tensors, and a cold call's process, need the device's memory.
            del workload
            timing.release()
            if plan.cold:
                self._cold(case)

    def _advance(self, steps: float) -> None:
        self.steps_done += steps

    def _no_room(self, case: Case) -> None:
        for activation in self.plan.activations:
            for mode in self.plan.modes:
                for provider in self.plan.missing(case.name, activation, mode):
                    self.report.add(Row(case.name, mode, activation, provider.name, note="out of memory: the case's own tensors"))

    def _activation(self, workload: Workload) -> None:
        plan, label = self.plan, f"{workload.case.name} {workload.activation}"
        wanted = {p.name for m in plan.modes for p in plan.missing(workload.case.name, workload.activation, m)}
        entries: dict[str, Entry] = {}
        for provider in plan.providers:
            if provider.name in wanted or plan.graph:
                self.progress.step(f"{label}: {provider.name}, checking", self.steps_done)
                entries[provider.name] = enter(provider, workload, plan.gradients)
            self._advance(GATE_STEPS)
        for mode in plan.modes:
            names = [p.name for p in plan.missing(workload.case.name, workload.activation, mode)]
            if names:
                for row in self._measure(workload, mode, {name: entries[name] for name in names}):
                    self.report.add(row)
                self.save()
            # The first mode's memory run has measured all of them.
            memory_steps = FRESH_STEPS * len(plan.providers) if plan.fresh_memory and mode == plan.modes[0] else 0.0
            self._advance(plan.effort.seconds + memory_steps)
        if plan.graph:
            for entry in entries.values():
                for replay in extras.graph_rows(workload, entry, plan.modes):
                    self.report.put("graph", replay)
            self.save()
        if plan.schedule and workload.activation == plan.activations[0]:
            self.report.put("schedule", extras.schedule_row(workload, self.report))
            self.save()
        self.progress.finished(label)

    def _measure(self, workload: Workload, mode: Mode, entries: dict[str, Entry]) -> list[Row]:
        """The rows of one (workload, mode): memory in a run of its own, then time in interleaved rounds."""
        plan, base = self.plan, self.steps_done
        rows = {name: self._row(workload, mode, entry) for name, entry in entries.items()}
        calls = {name: e.call for name, e in entries.items() if e.call is not None and not rows[name].failed}
        d_outs = {name: call.lay_out(workload.d_out) for name, call in calls.items()}

        def on_step(name: str, share: float) -> None:
            if name in entries:
                text = f"{workload.case.name} {workload.activation}: {name}, {mode}"
                self.progress.step(text, base + share * plan.effort.seconds)

        if plan.memory:
            for name in list(calls):
                on_step(name, 0.0)
                try:
                    rows[name].peak_bytes = self._peak(workload, mode, entries[name], calls[name], d_outs[name])
                except Exception as error:
                    timing.release()
                    rows[name].fail(str(error) if isinstance(error, fresh.FreshProcessFailed) else timing.describe_failure(error))
                    del calls[name]
        if not calls:
            return list(rows.values())
        tasks = {name: timing.task_of(call, mode, d_outs[name]) for name, call in calls.items()}
        yardsticks = self.hardware.tasks
        samples = timing.interleaved(
            {**tasks, **yardsticks}, plan.device, plan.effort, self.hardware.filler, on_step, always=yardsticks
        )
        rates = self.hardware.rates(samples)
        if rates is not None:
            self.report.rates.append(rates)
        for name, task in tasks.items():
            self._fill(rows[name], workload.case, mode, samples[name], rates)
            if rows[name].ms is not None:
                try:
                    rows[name].host_us = timing.host_us(task, plan.device, rows[name].ms or 0.0)
                except Exception as error:
                    timing.release()
                    rows[name].add_note(f"host time: {timing.describe_failure(error)}")
        return list(rows.values())

    def _row(self, workload: Workload, mode: Mode, entry: Entry) -> Row:
        """What the gate says: the error, and no time where it is red."""
        row = Row(workload.case.name, mode, workload.activation, entry.provider.name)
        judged, wrong, over = entry.judged(mode), entry.wrong(mode), entry.over(mode)
        if judged:
            row.error = max(verdict.relative for verdict in judged)
        if entry.call is None:
            row.note, row.failed = entry.note, entry.failed
        elif wrong:
            row.fail(f"wrong, not timed: {'; '.join(map(str, wrong))}")
        else:
            row.add_note(entry.provider.note)
            if over:
                row.add_note(f"over gdpa's error budget: {', '.join(verdict.name for verdict in over)}")
        return row

    def _fill(self, row: Row, case: Case, mode: Mode, samples: timing.Samples, rates: timing.Rates | None) -> None:
        if samples.failure is not None:
            row.fail(samples.failure)
            return
        if not samples.ms:
            row.fail("failed: no round was timed")
            return
        row.ms, row.spread = samples.median, samples.spread
        row.tflops = case.flops(mode) / row.ms / 1e9
        if rates is not None:
            row.floor_ms = case.floor_ms(mode, self.plan.dtype.itemsize, rates.matmul, rates.bandwidth)
            row.fraction_of_floor = row.floor_ms / row.ms
            row.R = rates.matmul / 1e12
            row.R_rested = None if rates.rested is None else rates.rested / 1e12
        if samples.noise is not None and samples.noise > timing.NOISE:
            row.add_note(f"noisy: its even and odd rounds differ by {samples.noise:.0%}")

    def _peak(self, workload: Workload, mode: Mode, entry: Entry, call: Call, d_out: Tensor) -> int | None:
        problem = workload.problem
        if problem.device.type != "cpu":
            return timing.gpu_peak_bytes(call, mode, d_out)
        if entry.cpu_peaks is None:
            gradients = self.plan.gradients
            entry.cpu_peaks = fresh.peak_bytes(workload.case, workload.activation, problem.dtype, entry.provider.name, gradients)
        return None if entry.cpu_peaks is None else entry.cpu_peaks[mode]

    def _cold(self, case: Case) -> None:
        timed = {(r.case, r.activation, r.provider) for r in self.report.rows if r.ms is not None}
        for activation in self.plan.activations:
            for provider in self.plan.providers:
                if (case.name, activation, provider.name) in timed and provider.name not in extras.NOTHING_TO_COMPILE:
                    self.progress.step(f"{case.name} {activation}: {provider.name}, cold first call", self.steps_done)
                    dtype, device, gradients = self.plan.dtype, self.plan.device, self.plan.gradients
                    self.report.put("cold", extras.cold_row(case, activation, dtype, device, provider, gradients))
                self._advance(FRESH_STEPS)
        self.save()


def run(plan: Plan, report: Report, progress: Progress | None = None, save: Callable[[], None] = lambda: None) -> None:
    """Add the plan's rows to the report."""
    Run(plan, report, progress, save)()


def summary(case: Case, itemsize: int) -> dict[str, Any]:
    """A case for the header: what it is drawn from and how much work it is."""
    modes: tuple[Mode, ...] = ("forward", "backward")
    return {
        **case.facts(),
        "rows": int(case.drawn.sum()),
        "pairs": case.pairs,
        "flops": {mode: case.flops(mode) for mode in modes},
        "bytes": {mode: case.bytes(mode, itemsize) for mode in modes},
    }
