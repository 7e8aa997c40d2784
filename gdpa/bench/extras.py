"""What is measured on request, beside the rows: cold first calls, CUDA-graph replay, the cost of gdpa's tile schedule."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from gdpa import schedule
from gdpa.bench import fresh, timing
from gdpa.bench.cases import Case, Mode, Workload
from gdpa.bench.gate import Entry
from gdpa.bench.providers import Call, Provider, is_own
from gdpa.bench.report import Report

# Plain PyTorch and the reference have nothing to compile: a cold call of theirs is a warm one.
NOTHING_TO_COMPILE = ("eager", "gdpa-reference")
REPLAYS = 11
# About half a millisecond: longer than the host takes to queue the schedule.
SLEEP_CYCLES = 1_000_000
SCHEDULE_ROUNDS = 11
SCHEDULE_BLOCK = 128  # rows of a tile in the forward kernels


def cold_row(
    case: Case, activation: str, dtype: torch.dtype, device: torch.device, provider: Provider, gradients: bool
) -> dict[str, Any]:
    """The first call of a process with empty caches: forward, and backward where the run asks for gradients."""
    row = {"case": case.name, "activation": activation, "provider": provider.name, "ms": None, "note": None}
    try:
        return {**row, "ms": fresh.first_call_ms(case, activation, dtype, device, provider.name, gradients)}
    except fresh.FreshProcessFailed as error:
        return {**row, "note": str(error)}


def graph_rows(workload: Workload, entry: Entry, modes: tuple[Mode, ...]) -> list[dict[str, Any]]:
    """Replay of a captured forward, and of a forward with its backward where a mode asks for gradients."""
    captured: list[Mode] = ["forward"] if "forward" in modes else []
    captured += ["both"] if set(modes) - {"forward"} else []
    rows = []
    for mode in captured:
        row: dict[str, Any] = {
            "case": workload.case.name,
            "mode": mode,
            "activation": workload.activation,
            "provider": entry.provider.name,
            "ms": None,
            "note": entry.note,
        }
        if entry.wrong(mode):
            row["note"] = "wrong, not timed"
        elif entry.call is not None:
            try:
                row["ms"] = replay_ms(entry.call, mode, entry.call.lay_out(workload.d_out))
            except Exception as error:
                timing.release()
                row["note"] = timing.describe_failure(error)
        rows.append(row)
    return rows


def replay_ms(call: Call, mode: Mode, d_out: Tensor) -> float:
    """Milliseconds of one replay, the median of REPLAYS; the graph is captured on a side stream after a warm-up there.

    Each is queued behind another: on an idle device the time of its launch would be in it.
    """
    stream = torch.cuda.Stream(d_out.device)
    stream.wait_stream(torch.cuda.current_stream(d_out.device))
    with torch.cuda.stream(stream):
        timing.training_step(call, mode, d_out)
    torch.cuda.current_stream(d_out.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        timing.training_step(call, mode, d_out)
    graph.replay()
    torch.cuda.synchronize(d_out.device)
    return statistics.median(timing.clock_behind(graph.replay, graph.replay)[1] for _ in range(REPLAYS))


def schedule_row(workload: Workload, report: Report) -> dict[str, Any]:
    """What building the forward's tile list costs when nothing is cached, beside the fastest gdpa forward of the case."""
    row = {"case": workload.case.name, "ms": None, "fraction_of_forward": None, "note": None}
    if workload.case.dense:
        return {**row, "note": "a dense batch has no list"}
    device = workload.problem.device
    times = []
    for _ in range(SCHEDULE_ROUNDS):
        fresh_offsets = [None if x is None else x.clone() for x in (workload.inputs.cu_seqlens_q, workload.inputs.cu_seqlens_k)]
        if device.type == "cuda":
            torch.cuda._sleep(SLEEP_CYCLES)  # else the clock would run while the host prepares the launch
        times.append(timing.clock(lambda offsets=fresh_offsets: build_schedule(workload, *offsets), device))  # type: ignore[misc]
    ms = statistics.median(times)
    forward = [
        r.ms for r in report.rows if (r.case, r.mode) == (workload.case.name, "forward") and is_own(r.provider) and r.ms is not None
    ]
    return {**row, "ms": ms, "fraction_of_forward": ms / min(forward) if forward else None}


def build_schedule(workload: Workload, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
    """The tile records of the forward, from offsets that no cache has seen."""
    problem = workload.problem
    return schedule.records(cu_seqlens_q, cu_seqlens_k, problem.batch, problem.query_rows, problem.key_rows, SCHEDULE_BLOCK)
