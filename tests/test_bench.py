"""The benchmark's arithmetic against hand-computed values, its gate, its cells and its files, on tiny cases."""

import io
import json
import math
import os
import subprocess
import time
from dataclasses import dataclass, replace

import pytest
import torch

from gdpa.bench import fresh, providers, report, run, timing
from gdpa.bench.cases import MODES, Case, build, production
from gdpa.bench.providers import Call, Eager, Gdpa
from gdpa.bench.report import Report, Row
from gdpa.data import traffic
from gdpa.numerics import Results

CPU = torch.device("cpu")
QUICK = timing.Effort(seconds=0.01, least_rounds=2, most_rounds=2)
SELF = Case("self", batch=3, heads=2, dim=8, length=20)
PMA = Case("pma", batch=3, heads=2, dim=8, length=20, fixed=4)
PFFN = Case("pffn", batch=3, heads=2, dim=8, length=20, fixed=5)
CASES = pytest.mark.parametrize("case", [SELF, PMA, PFFN], ids=["self", "pma", "pffn"])
KEYS = [
    "case",
    "mode",
    "activation",
    "provider",
    "ms",
    "spread",
    "tflops",
    "peak_bytes",
    "error",
    "budget_used",
    "note",
]


def plan(*chosen, cases=(SELF,), fresh=False):
    return run.Plan(cases, ("gelu",), chosen, torch.float32, CPU, QUICK, fresh)


def fixed_lengths(monkeypatch, lengths):
    monkeypatch.setitem(traffic.GENERATORS, "uniform", lambda *_, **__: torch.tensor(lengths))


# Counting: lengths 2, 0 and 3; two heads of dimension 8; four bytes an element.


@pytest.mark.parametrize(("case", "pairs"), [(SELF, 4 + 0 + 9), (PMA, 4 * 5), (PFFN, 5 * 5)], ids=["self", "pma", "pffn"])
def test_flops_count_the_allowed_pairs(monkeypatch, case, pairs):
    fixed_lengths(monkeypatch, [2, 0, 3])
    workload = build(case, "gelu", torch.float32, CPU)
    assert workload.pairs == pairs
    assert workload.flops("forward") == 2 * (8 + 8) * 2 * pairs
    assert workload.flops("backward") == 2 * (3 * 8 + 2 * 8) * 2 * pairs
    assert workload.flops("backward") == 2.5 * workload.flops("forward")


@pytest.mark.parametrize(
    ("case", "queries", "keys", "outputs"),
    [(SELF, 5, 5, 5), (PMA, 4, 5, 3 * 4), (PFFN, 5, 3 * 5, 5)],
    ids=["self", "pma", "pffn"],
)
def test_bytes_count_each_input_and_output_once(monkeypatch, case, queries, keys, outputs):
    fixed_lengths(monkeypatch, [2, 0, 3])
    workload = build(case, "gelu", torch.float32, CPU)
    row = 2 * 8 * 4
    assert workload.bytes("forward") == row * (queries + 2 * keys + outputs)
    assert workload.bytes("backward") == row * (2 * (queries + 2 * keys) + outputs)


def test_flops_agree_with_what_the_operator_registers():
    from torch.utils.flop_counter import FlopCounterMode

    workload = build(SELF, "gelu", torch.float32, CPU)
    call = Gdpa("cpu").prepare(workload)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(call.forward(), call.leaves, workload.d_out)
    assert counter.get_total_flops() == workload.flops("forward") + workload.flops("backward")


def test_production_size_follows_the_device_and_what_the_user_says():
    gpu = production(torch.device("cuda"))
    assert [case.name for case in gpu] == ["self-1024-jag", "pma-32x2048-jag", "pffn-1024x256-jag"]
    assert all((case.batch, case.heads, case.dim) == (1152, 4, 128) for case in gpu)
    cpu = production(CPU, batch=2, heads=1, dim=16, lengths="lognormal")
    assert [case.name for case in cpu] == ["self-512-tail", "pma-32x1024-tail", "pffn-512x256-tail"]
    assert all((case.batch, case.heads, case.dim) == (2, 1, 16) for case in cpu)


@CASES
def test_a_case_draws_the_same_data_again(case):
    first, second = (build(case, "gelu", torch.float32, CPU) for _ in range(2))
    for a, b in zip((*first.inputs[:3], first.d_out), (*second.inputs[:3], second.d_out), strict=True):
        assert torch.equal(a, b)


# Timing


def test_median_and_spread_are_those_of_the_samples():
    samples = timing.Samples([1.0, 2.0, 3.0, 4.0, 10.0])
    assert samples.median == 3
    assert samples.spread == pytest.approx((4 - 2) / 3)
    assert timing.Samples([5.0]).spread is None


def test_rounds_interleave_the_providers():
    order = []
    calls = {name: _recording(name, order) for name in "abc"}
    d_outs = dict.fromkeys(calls, torch.ones(1))
    samples = timing.interleaved(calls, "forward", d_outs, timing.Effort(60.0, least_rounds=3, most_rounds=3))
    assert "".join(order) == "abc" * 4  # the warm-up and three rounds
    assert all(len(sample.ms) == 3 for sample in samples.values())


def test_a_provider_that_uses_up_the_time_by_itself_is_measured_once():
    order = []
    calls = {"quick": _recording("q", order), "slow": _recording("s", order, seconds=0.1)}
    d_outs = dict.fromkeys(calls, torch.ones(1))
    samples = timing.interleaved(calls, "forward", d_outs, timing.Effort(0.15, least_rounds=4, most_rounds=4))
    assert len(samples["quick"].ms) == 4
    assert len(samples["slow"].ms) == 1


def _recording(name, order, seconds=0.0):
    def forward():
        order.append(name)
        time.sleep(seconds)
        return torch.zeros(1)

    return Call((torch.zeros(1),) * 3, forward, lambda x: x, lambda x: x)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the system keeps no high-water mark to set back")
def test_peak_memory_counts_what_each_side_materialises():
    case = Case("self", batch=8, heads=4, dim=32, length=400)
    workload = build(case, "gelu", torch.float32, CPU)
    scores = 8 * 4 * max(length for _, length in workload.q_rows) ** 2 * 4
    eager, ours = (fresh.peak_bytes(case, "gelu", torch.float32, name) for name in ("eager", "gdpa-cpu"))
    assert 2 * scores < eager["forward"] < 4 * scores
    assert 3 * scores < eager["backward"] < 6 * scores
    row = workload.inputs.q.numel() * 4
    assert row < ours["forward"] < scores
    assert 3 * row < ours["backward"] < scores


# Providers and the gate


@CASES
@pytest.mark.parametrize("provider", [Eager(), Gdpa("cpu"), Gdpa("reference")], ids=lambda provider: provider.name)
def test_every_provider_passes_the_gate_in_fp32(case, provider):
    entry = run.enter(provider, build(case, "silu", torch.float32, CPU))
    assert entry.note is None
    assert [verdict.name for verdict in entry.verdicts] == ["out", "dq", "dk", "dv"]
    assert all(verdict.passed for verdict in entry.verdicts)


@CASES
def test_the_gate_samples_the_extremes(case):
    workload = build(replace(case, batch=50), "gelu", torch.float32, CPU)
    sizes = [q * k for (_, q), (_, k) in zip(workload.q_rows, workload.k_rows, strict=True)]
    chosen = [sizes[b] for b in run.sampled(workload)]
    assert len(chosen) == run.GATED_SEQUENCES
    assert min(chosen) == min(sizes)
    assert max(chosen) == max(sizes)


@dataclass(frozen=True)
class Stub:
    """The CPU backend with something wrong about it."""

    name: str = "stub"
    baseline: bool = False
    spoil: str = ""
    error: Exception | None = None
    reason: str | None = None

    def reason_against(self, workload):
        return self.reason

    def prepare(self, workload):
        right = Gdpa("cpu").prepare(workload)

        def forward():
            if self.error is not None:
                raise self.error
            return right.forward()

        def collect(results):
            spoiled = {name: getattr(results, name).clone() for name in Results._fields}
            if self.spoil:
                spoiled[self.spoil][:] *= 1.01
            return Results(**spoiled)

        return replace(right, forward=forward, collect=collect)


@CASES
@pytest.mark.parametrize("tensor", Results._fields)
def test_a_wrong_result_is_reported_without_a_time(case, tensor):
    results = Report({})
    run.run(plan(Stub(spoil=tensor), cases=(case,)), results)
    assert [row.mode for row in results.rows] == list(MODES)
    assert all(row.ms is None and row.failed for row in results.rows)
    assert all(row.note.startswith(f"wrong, not timed: {tensor}: relative error") for row in results.rows)
    assert results.failed


def test_nan_anywhere_is_a_red_gate():
    workload = build(SELF, "gelu", torch.float32, CPU)
    stub = Stub(spoil="out")
    call = stub.prepare(workload)
    poisoned = replace(call, collect=lambda results: results._replace(dk=results.dk * math.nan))
    with pytest.raises(ValueError, match="dk holds NaN"):
        run.gate(workload, poisoned)


def test_plain_pytorch_over_the_budget_is_timed_and_marked():
    results = Report({})
    run.run(plan(Stub(name="eager", baseline=True, spoil="dq")), results)
    assert all(row.ms is not None for row in results.rows)
    assert all(row.note == "over the budget: dq" for row in results.rows)
    assert not results.failed


@pytest.mark.parametrize(
    ("stub", "note", "failed"),
    [
        (Stub(error=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")), "out of memory", False),
        (Stub(error=RuntimeError("DefaultCPUAllocator: can't allocate memory")), "out of memory", False),
        (Stub(error=RuntimeError("first line\nsecond line")), "failed: RuntimeError: first line", True),
        (Stub(reason="it takes no such thing"), "it takes no such thing", False),
    ],
    ids=["cuda memory", "cpu memory", "error", "unavailable"],
)
def test_what_cannot_run_is_a_cell_and_the_others_go_on(stub, note, failed):
    results = Report({})
    run.run(plan(stub, Gdpa("cpu")), results)
    cells = [row for row in results.rows if row.provider == "stub"]
    assert [(row.ms, row.note) for row in cells] == [(None, note)] * 2
    assert results.failed == failed
    assert all(row.ms > 0 for row in results.rows if row.provider == "gdpa-cpu")


def test_a_provider_that_fails_while_it_is_timed_leaves_the_rotation():
    turns = iter(range(100))

    def forward():
        if next(turns) >= 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(1)

    order = []
    calls = {
        "flaky": Call((torch.zeros(1),) * 3, forward, lambda x: x, lambda x: x),
        "steady": _recording("s", order),
    }
    effort = timing.Effort(60.0, least_rounds=2, most_rounds=2)
    samples = timing.interleaved(calls, "forward", dict.fromkeys(calls, torch.zeros(1)), effort)
    assert samples["flaky"].failure == "out of memory"
    assert samples["steady"].failure is None
    assert len(samples["steady"].ms) == 2


def test_eager_refuses_what_would_not_fit_in_memory(monkeypatch):
    monkeypatch.setattr(providers, "_free_bytes", lambda: 1000)
    reason = Eager().reason_against(build(SELF, "gelu", torch.float32, CPU))
    assert reason.startswith("out of memory: needs about")


def test_a_half_precision_product_that_kills_the_process_is_a_reason(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -4))
    providers._broken_cpu_products.cache_clear()
    try:
        reason = Eager().reason_against(build(SELF, "gelu", torch.bfloat16, CPU))
    finally:
        providers._broken_cpu_products.cache_clear()
    assert "SIGILL" in reason
    assert Gdpa("cpu").reason_against(build(SELF, "gelu", torch.bfloat16, CPU)) is None


def test_an_unknown_backend_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'reference'"):
        providers.available(("refrence",))


# Rows and files


def test_a_run_gives_a_row_for_every_case_mode_and_provider(tmp_path):
    results = Report({})
    run.run(plan(Eager(), Gdpa("cpu"), Gdpa("reference"), cases=(SELF, PMA, PFFN)), results)
    keys = [(row.case, row.mode, row.provider) for row in results.rows]
    names = ("self-20-jag", "pma-4x20-jag", "pffn-20x5-jag")
    assert keys == [(c, m, p) for c in names for m in MODES for p in ("eager", "gdpa-cpu", "gdpa-reference")]
    for row in results.rows:
        assert row.ms > 0
        assert 0 < row.budget_used <= 1
        assert row.note is None
    workload = build(SELF, "gelu", torch.float32, CPU)
    first = results.rows[0]
    assert first.tflops == pytest.approx(workload.flops("forward") / (first.ms / 1e3) / 1e12)


def test_the_json_has_every_key_in_every_row(tmp_path):
    path = tmp_path / "rows.json"
    results = Report(report.header(CPU, ["bench", "--batch", "3"]))
    run.run(plan(Stub(reason="absent"), Gdpa("cpu")), results, save=lambda: results.write(path))
    loaded = json.loads(path.read_text())
    assert list(loaded) == ["header", "rows"]
    assert set(loaded["header"]) >= {"machine", "device", "versions", "threads", "commit", "command", "cases"}
    assert loaded["header"]["command"] == "gdpa bench --batch 3"
    assert loaded["header"]["cases"]["self-20-jag"]["seed"] == 0
    assert all(list(row) == KEYS for row in loaded["rows"])
    assert loaded["rows"][0]["ms"] is None
    assert list(tmp_path.iterdir()) == [path]


def test_a_stop_leaves_the_rows_so_far(tmp_path):
    path = tmp_path / "rows.json"
    results = Report({})

    class Stop(run.Progress):
        def step(self, text, done):
            if text.startswith("pma"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(plan(Gdpa("cpu"), cases=(SELF, PMA)), results, Stop(), lambda: results.write(path))
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["mode"]) for row in rows] == [("self-20-jag", "forward"), ("self-20-jag", "backward")]


def test_progress_never_goes_back_and_ends_at_its_total():
    steps = []

    class Watch(run.Progress):
        def step(self, text, done):
            steps.append(done)

    chosen = plan(Eager(), Gdpa("cpu"), cases=(SELF, PMA))
    run.run(chosen, Report({}), Watch())
    assert steps == sorted(steps)
    assert steps[-1] <= chosen.steps


def test_the_cold_call_is_a_row_of_its_own():
    results = Report({})
    run.run(plan(Gdpa("cpu"), Gdpa("reference"), fresh=True), results)
    cold_rows = [row for row in results.rows if row.mode == "cold"]
    assert [row.provider for row in cold_rows] == ["gdpa-cpu"]
    assert cold_rows[0].ms > 0, cold_rows[0].note
    assert all(row.peak_bytes > 0 for row in results.rows if row.mode != "cold")


def test_a_failed_cold_call_says_what_the_process_said():
    with pytest.raises(fresh.FreshProcessFailed, match=r"BackendUnavailable.*float64"):
        fresh.first_call_ms(SELF, "gelu", torch.float64, CPU, "gdpa-triton")


def test_the_table_shows_ratios_sizes_and_notes_within_80_columns():
    from rich.console import Console

    rows = [
        Row("self-20-jag", "forward", "gelu", "eager", 20.0, 0.01, 0.002, 3_000_000, 3e-7, 0.5),
        Row("self-20-jag", "forward", "gelu", "gdpa-cpu", 5.0, 0.02, 0.008, 40_000, 3e-7, 0.5),
        Row("self-20-jag", "forward", "gelu", "gdpa-triton", note="there is no GPU"),
    ]
    console = Console(width=80, file=io.StringIO())
    report.show(Report({"cases": {"self-20-jag": {"summary": "batch 3"}}}, rows), console)
    text = console.file.getvalue()
    assert "4.00x" in text
    assert "40 KB" in text
    assert "gdpa-triton: there is no GPU" in text
    assert "…" not in text


@pytest.mark.parametrize(
    ("ms", "text"), [(None, "-"), (0.0123, "12.3 us"), (1.5, "1.5 ms"), (999.0, "999 ms"), (61_000.0, "61.00 s")]
)
def test_durations_read_naturally(ms, text):
    assert report.duration(ms) == text
