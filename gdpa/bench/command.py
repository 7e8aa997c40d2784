"""`gdpa bench`: from its options to a plan, and from the rows to what is printed and written."""

from __future__ import annotations

import argparse
import itertools
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from gdpa.activations import resolve
from gdpa.bench import cases, compare, machine, providers, tables, training_report, warm
from gdpa.bench import run as bench_run
from gdpa.bench.cases import MODES, SUITES, Mode
from gdpa.bench.providers import check_choice
from gdpa.bench.report import Report, Row, load, resume
from gdpa.bench.timing import Effort
from gdpa.errors import GdpaError
from gdpa.files import check_target, why_unwritten

GPU_SECONDS, CPU_SECONDS = 0.7, 3.0
TRAIN = "train"  # the suite of gdpa.bench.training
DEFAULT_MODES: tuple[Mode, ...] = ("forward", "backward")


def listed(option: str, values: list[str] | None) -> list[str] | None:
    """An option that may be repeated, or given as a list with commas, or both."""
    if values is None:
        return None
    names = [part for value in values for part in value.split(",") if part]
    if not names:
        raise GdpaError(f"{option}: expected a name, or some with commas, got {','.join(values)!r}")
    return names


def bench(options: argparse.Namespace, device: torch.device, console: Console, progress_console: Console) -> int:
    """Exit status: 0, 1 where a provider is wrong or fails or a comparison is slower, 130 on Ctrl-C."""
    outputs: dict[str, Path] = {}
    for name in ("json", "plot", "report"):
        path = getattr(options, name)
        if path is not None:
            outputs[name] = check_target(f"--{name}", path)
    names = {f"--{name}": path for name, path in outputs.items()} | ({} if options.show is None else {"--show": options.show})
    for (first, path), (second, other) in itertools.combinations(names.items(), 2):
        if Path(path).resolve() == Path(other).resolve():
            raise GdpaError(f"{first}: expected another file than that of {second}, which it would replace, got {path}")
    if "plot" in outputs and outputs["plot"].suffix.lower() != ".png":
        raise GdpaError(f"--plot: expected a name that ends with .png, got {outputs['plot']}")
    if options.compare is not None:
        _without_outputs("--compare", {**outputs, **({} if options.show is None else {"show": options.show})})
        _without_measuring("--compare", options)
        before, after = options.compare
        return compare.compare(before, after, compare.THRESHOLD if options.threshold is None else options.threshold, console)
    if options.threshold is not None:
        raise GdpaError(f"--threshold: expected with --compare alone, which is all that reads it, got {options.threshold} without")
    if options.show is not None:
        _without_outputs("--show", outputs.keys() & {"json"})
        _without_measuring("--show", options)
    if options.show is not None and training_report.is_training(options.show):
        _without_outputs("--show of a training step's file", outputs)
        training_report.show(training_report.load(options.show, "--show"), console)
        return 0
    if options.show is not None:
        results = _loaded(options.show)
        tables.show(results, console)
        _pictures(results, outputs, console)
        return 0
    if options.seed is not None and not 0 <= options.seed < 2**63:  # torch's generators take no more
        raise GdpaError(f"--seed: expected a number from 0 to {2**63 - 1}, got {options.seed}")
    if device.type == "cuda":
        # CUDA's events and graphs belong to the current device.
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    if options.suite == TRAIN:
        from gdpa.bench import training  # the other suites do not wait for the models and torch.distributed

        training_plan = training.plan_of(options, device, listed)
        return training.bench(training_plan, options.command_line, outputs.get("json"), console, progress_console)
    for name in ("model", "preset", "compile", "lengths", "steps"):
        if getattr(options, name) is not None:
            raise GdpaError(f"--{name}: expected with --suite {TRAIN} alone, got it without")
    plan = _plan(options, device)
    if options.list:
        console.print(_size_line(plan))
        tables.print_whole(tables.list_cases(plan.cases, plan.dtype.itemsize), console)
        console.print("[dim]any sizes may stand in a name: self-384, causal-700-jag, pffn-512x64-tail, pma-16x300-jag[/dim]")
        return 0
    header = _header(plan, options)
    if options.resume and "json" not in outputs:
        raise GdpaError("--resume: expected --json FILE with it, the file to go on with, got none")
    results = resume(outputs["json"], header) if options.resume else Report(header)
    results.header["cases"] = {
        **results.header.get("cases", {}),
        **{case.name: bench_run.summary(case, plan.dtype.itemsize) for case in plan.cases},
    }
    plan = _without(plan, results)
    return _carry_out(plan, results, outputs, console, progress_console)


def _carry_out(plan: bench_run.Plan, results: Report, outputs: dict[str, Path], console: Console, progress_console: Console) -> int:
    started = time.monotonic()

    unwritten: GdpaError | None = None

    def save() -> None:
        nonlocal unwritten
        results.header["seconds"] = round(time.monotonic() - started, 1)
        if "json" in outputs:
            unwritten = why_unwritten(lambda: results.write(outputs["json"]))

    head = results.header
    console.print(f"{head['device']}, threads: {head['threads']}, torch {head['versions']['torch']}")
    console.print(_size_line(plan) + "\n")
    bar = Bar(plan, progress_console)
    interrupted = False
    try:
        with bar.bar:
            if plan.device.type == "cuda":
                bar.step("compiling kernels", 0.0)
                problem = warm.compile_kernels(
                    [p.name for p in plan.providers],
                    plan.cases,
                    plan.activations,
                    plan.dtype,
                    any(mode != "forward" for mode in plan.modes),
                )
                if problem is not None:
                    progress_console.print(f"compiling ahead failed, so kernels compile at their gate: {problem}", markup=False)
            runner = bench_run.Run(plan, results, bar, save)
            with machine.Clocks(plan.device) as clocks:
                try:
                    runner()
                finally:
                    results.header["clocks"] = clocks.summary()
    except KeyboardInterrupt:
        interrupted = True
    save()
    tables.show(results, console)
    _show_rates(results, console)
    if unwritten is not None:
        raise unwritten
    if "json" in outputs:
        _wrote(outputs["json"], console)
    if interrupted:
        console.print("interrupted: these are the rows so far")
        return 130
    _pictures(results, outputs, console)
    if results.failed:
        console.print("[red]a provider was wrong or failed: see the notes[/red]")
        return 1
    return 0


def _plan(options: argparse.Namespace, device: torch.device) -> bench_run.Plan:
    gpu = device.type == "cuda"
    if options.seconds is not None and not options.seconds > 0:
        raise GdpaError(f"--seconds: expected a positive number, got {options.seconds}")
    if options.suite is not None:
        check_choice("--suite", options.suite, (*SUITES, TRAIN))
    if options.graph and not gpu:
        raise GdpaError(f"--graph: expected a CUDA device, since CUDA graphs need one, got {device}")
    modes = listed("--mode", options.mode) or list(DEFAULT_MODES)
    for mode in modes:
        check_choice("--mode", mode, MODES)
    activations = tuple(dict.fromkeys(listed("--activation", options.activation) or ("gelu",)))
    for name in activations:
        resolve(name, 1)  # an unknown name is refused here, with the nearest ones
    return bench_run.Plan(
        cases=cases.chosen(
            listed("--case", options.case),
            options.suite,
            gpu,
            batch=options.batch,
            heads=options.heads,
            dim=options.dim,
            seed=options.seed,
        ),
        activations=activations,
        modes=tuple(mode for mode in MODES if mode in modes),
        providers=providers.chosen(listed("--provider", options.provider), gpu),
        dtype=options.dtype or (torch.bfloat16 if gpu else torch.float32),
        device=device,
        # A GPU's long kernels need more than their share of a short time for the least number of rounds.
        effort=Effort(options.seconds or (GPU_SECONDS if gpu else CPU_SECONDS), patience=3.0 if gpu else 1.0),
        memory=options.memory,
        cold=options.cold,
        graph=options.graph,
        schedule=options.schedule,
    )


def _without(plan: bench_run.Plan, results: Report) -> bench_run.Plan:
    """The plan less the rows that a resumed run has."""
    return replace(plan, done=frozenset(row.key for row in results.rows))


def _header(plan: bench_run.Plan, options: argparse.Namespace) -> dict[str, Any]:
    first = plan.cases[0]
    return {
        **machine.header(plan.device, shlex.join(["gdpa", *options.command_line])),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": None,
        "R": None,
        "R_rested": None,
        "W": None,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "batch": first.batch,
        "heads": first.heads,
        "dim": first.dim,
        "seed": first.seed,
    }


def _size_line(plan: bench_run.Plan) -> str:
    first = plan.cases[0]
    dtype = str(plan.dtype).removeprefix("torch.")
    return f"batch {first.batch}, {first.heads} heads, dimension {first.dim}, {dtype}, seed {first.seed}"


def _without_outputs(option: str, outputs: Iterable[str]) -> None:
    for name in outputs:
        raise GdpaError(f"--{name}: expected without {option}, which has nothing to write there, got both")


# What a run takes, and what stands for its absence.
OF_RUNS: dict[str, Any] = {
    **dict.fromkeys(("case", "suite", "mode", "provider", "activation", "batch", "heads", "dim", "dtype", "seed", "seconds")),
    **dict.fromkeys(("model", "preset", "compile", "lengths", "steps")),
    **dict.fromkeys(("list", "memory", "cold", "graph", "schedule", "resume"), False),
}


def _without_measuring(option: str, options: argparse.Namespace) -> None:
    for name, absent in OF_RUNS.items():
        if getattr(options, name) != absent:
            raise GdpaError(f"--{name}: expected without {option}, which measures nothing and shows all rows, got both")


def _wrote(path: Path, console: Console) -> None:
    console.print(f"wrote {path}", markup=False)


def _loaded(path: Path) -> Report:
    data = load(path, "--show")
    rows = [Row.of(row) for row in data["rows"]]
    return Report(data["header"], rows, **{name: data.get(name, []) for name in ("cold", "graph", "schedule")})


def _show_rates(results: Report, console: Console) -> None:
    head = results.as_json()["header"]
    matmul = "the matmuls between the kernels" if head.get("R_rested") else "the matmul in the same rounds"
    for name, what in (("R", matmul), ("R_rested", "the matmul by itself"), ("W", "the copy in the same rounds")):
        if head.get(name):
            console.print(f"[dim]{name}, {what}: {tables.rate(head[name])}[/dim]")


def _pictures(results: Report, outputs: dict[str, Path], console: Console) -> None:
    # matplotlib takes a second to import, which only these two need.
    if "plot" in outputs:
        from gdpa.bench import plot

        plot.write(results, outputs["plot"])
        _wrote(outputs["plot"], console)
    if "report" in outputs:
        from gdpa.bench import page

        page.write(results, outputs["report"])
        _wrote(outputs["report"], console)


class Bar(bench_run.Progress):
    """A bar on a terminal; elsewhere a line for each case and activation that is done, with the time left."""

    def __init__(self, plan: bench_run.Plan, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self.console, self.now = console, now
        self.total, self.done = plan.steps, 0.0
        self.start = now()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("time left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("starting", total=self.total)

    def step(self, text: str, done: float) -> None:
        self.done = done
        self.bar.update(self.task, description=text, completed=done)

    def finished(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(f"measured {text}; {self.left()}")

    def left(self) -> str:
        elapsed = self.now() - self.start
        share = min(max(self.done / self.total, 1e-6), 1.0)
        return f"{elapsed:.0f} s so far, about {elapsed / share - elapsed:.0f} s left"
