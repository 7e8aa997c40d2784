"""The benchmark's arithmetic against hand-computed values, its gate and its rows, on tiny cases."""

import json
import math
import os
import subprocess
from dataclasses import replace

import pytest
import torch

from gdpa.bench import extras, fresh, gate, plain, providers, run, timing
from gdpa.bench.cases import FULL, MODES, SUITES, Case, Size, build, chosen
from gdpa.bench.plain import Eager
from gdpa.bench.providers import Gdpa, Provider
from gdpa.bench.report import Report
from gdpa.data import traffic
from gdpa.numerics import Results

CPU = torch.device("cpu")
QUICK = timing.Effort(seconds=0.01, least_rounds=2, most_rounds=2)
SIZE = Size(batch=3, heads=2, dim=8)
SELF, PMA, PFFN = (Case.named(name, SIZE) for name in ("self-20-jag", "pma-4x20-jag", "pffn-20x5-jag"))
DENSE_SELF, DENSE_PFFN = (Case.named(name, SIZE) for name in ("self-6", "pffn-6x5"))
CAUSAL, DENSE_CAUSAL = (Case.named(name, SIZE) for name in ("causal-20-jag", "causal-6"))
EVERY = [SELF, PMA, PFFN, DENSE_SELF, DENSE_PFFN, CAUSAL, DENSE_CAUSAL]
CASES = pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def _small_yardsticks(monkeypatch):
    """R and W of a small matmul and a small copy: what they are does not matter here."""
    monkeypatch.setitem(timing.HARDWARE_SIZES, "cpu", (64, 2**16))


def plan(*providers_, cases=(SELF,), modes=("forward", "backward"), **options):
    return run.Plan(cases, ("gelu",), modes, providers_, torch.float32, CPU, QUICK, **options)


def fixed_lengths(monkeypatch, lengths):
    monkeypatch.setitem(traffic.GENERATORS, "uniform", lambda *_, **__: torch.tensor(lengths))


# Names and sizes


def test_the_full_suite_is_the_published_list():
    assert FULL == (
        "self-256", "self-512", "self-1024", "self-2048", "self-512-jag", "self-2048-jag", "self-1024-tail",
        "pffn-1024x256", "pffn-2048x256", "pffn-2048x128", "pffn-512x512-jag", "pffn-1024x256-jag", "pffn-2048x2048-jag",
        "pma-32x2048-jag",
    )  # fmt: skip


@pytest.mark.parametrize("name", [*FULL, *SUITES["quick"], *SUITES["causal"], "self-7-power", "pma-3x9"])
def test_a_name_and_its_case_go_both_ways(name):
    assert Case.named(name, SIZE).name == name


def test_names_say_which_side_varies():
    pffn, pma = Case.named("pffn-1024x256-jag", SIZE), Case.named("pma-32x2048-tail", SIZE)
    assert (pffn.length, pffn.fixed, pffn.lengths) == (1024, 256, "uniform")
    assert (pma.length, pma.fixed, pma.lengths) == (2048, 32, "lognormal")


@pytest.mark.parametrize("name", ["self", "self-0", "self-12x3", "pffn-8", "self-512-jagged", "pma-0x5"])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match="--case"):
        Case.named(name, SIZE)


def test_an_unknown_name_brings_the_nearest():
    with pytest.raises(ValueError, match="nearest: self-2048-jag"):
        Case.named("self-2048-jagg", SIZE)


def test_the_size_follows_the_device_and_what_the_user_says():
    gpu = chosen(None, None, gpu=True)
    assert tuple(case.name for case in gpu) == FULL
    assert {(case.batch, case.heads, case.dim) for case in gpu} == {(1152, 4, 128)}
    cpu = chosen(None, None, gpu=False, batch=2, seed=7)
    assert tuple(case.name for case in cpu) == SUITES["quick"]
    assert {(case.batch, case.heads, case.dim, case.seed) for case in cpu} == {(2, 4, 64, 7)}
    assert {case.batch for case in chosen(None, "quick", gpu=True)} == {32}
    assert [case.name for case in chosen(["self-9"], None, gpu=True)] == ["self-9"]
    assert [case.name for case in chosen(["self-9", "self-09"], None, gpu=True)] == ["self-9"]


def test_dense_cases_are_dense_tensors_and_the_others_packed():
    sides = {case.name: build(case, "gelu", torch.float32, CPU).problem for case in EVERY}
    assert [(p.query_side, p.key_side) for p in sides.values()] == [
        ("packed", "packed"),
        ("shared", "packed"),
        ("packed", "dense"),
        ("dense", "dense"),
        ("dense", "dense"),
        ("packed", "packed"),
        ("dense", "dense"),
    ]
    assert [p.window for p in sides.values()] == [(-1, -1)] * 5 + [(-1, 0)] * 2


def test_sequences_that_attend_to_themselves_share_one_tensor_of_offsets():
    """By that the hopper backend knows that its own kernels may compute causal gradients."""
    for case in (SELF, CAUSAL):
        inputs = build(case, "gelu", torch.float32, CPU).inputs
        assert inputs.cu_seqlens_q is inputs.cu_seqlens_k


# Counting: lengths 2, 0 and 3 in a batch of three; two heads of dimension 8; four bytes an element.


@pytest.mark.parametrize(
    ("case", "pairs"),
    [
        (SELF, 4 + 0 + 9),
        (PMA, 4 * 5),
        (PFFN, 5 * 5),
        (DENSE_SELF, 3 * 36),
        (DENSE_PFFN, 3 * 6 * 5),
        (CAUSAL, 3 + 0 + 6),
        (DENSE_CAUSAL, 3 * 21),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_flops_count_the_allowed_pairs(monkeypatch, case, pairs):
    fixed_lengths(monkeypatch, [2, 0, 3])
    case = replace(case)  # a copy, which draws its lengths anew
    assert case.pairs == pairs
    assert case.flops("forward") == 2 * (8 + 8) * 2 * pairs
    assert case.flops("backward") == 2 * (3 * 8 + 2 * 8) * 2 * pairs == 2.5 * case.flops("forward")
    assert case.flops("both") == case.flops("forward") + case.flops("backward")


@pytest.mark.parametrize(
    ("case", "queries", "keys", "outputs"),
    [(SELF, 5, 5, 5), (PMA, 4, 5, 3 * 4), (PFFN, 5, 3 * 5, 5), (DENSE_SELF, 18, 18, 18), (DENSE_PFFN, 18, 15, 18)],
    ids=["self", "pma", "pffn", "dense self", "dense pffn"],
)
def test_bytes_count_each_input_and_output_once(monkeypatch, case, queries, keys, outputs):
    fixed_lengths(monkeypatch, [2, 0, 3])
    case = replace(case)
    row = 2 * 8 * 4
    assert case.bytes("forward", 4) == row * (queries + 2 * keys + outputs)
    assert case.bytes("backward", 4) == row * (2 * (queries + 2 * keys) + outputs)
    workload = build(case, "gelu", torch.float32, CPU)
    held = sum(x.numel() * x.element_size() for x in (*workload.inputs[:3], workload.d_out))
    assert case.bytes("forward", 4) == held


def test_the_floor_is_the_larger_of_the_two_bounds():
    case = Case.named("self-6", SIZE)
    flops, moved = case.flops("forward"), case.bytes("forward", 4)
    assert case.floor_ms("forward", 4, rate=1e6, bandwidth=1e12) == pytest.approx(flops / 1e6 * 1e3)
    assert case.floor_ms("forward", 4, rate=1e15, bandwidth=1e6) == pytest.approx(moved / 1e6 * 1e3)
    parts = [case.floor_ms(mode, 4, 1e9, 1e9) for mode in ("forward", "backward", "both")]
    assert parts[2] == pytest.approx(parts[0] + parts[1])


@CASES
def test_flops_agree_with_what_the_operator_registers(case):
    from torch.utils.flop_counter import FlopCounterMode

    workload = build(case, "gelu", torch.float32, CPU)
    call = Gdpa("cpu").prepare(workload)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(call.forward(), call.leaves, workload.d_out)
    assert counter.get_total_flops() == case.flops("both")


@CASES
def test_a_case_draws_the_same_data_again_and_another_seed_other_data(case):
    first, second, other = (build(c, "gelu", torch.float32, CPU) for c in (case, case, replace(case, seed=1)))
    for a, b in zip((*first.inputs[:3], first.d_out), (*second.inputs[:3], second.d_out), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.inputs.k.flatten()[:8], other.inputs.k.flatten()[:8])


# Memory


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the system keeps no high-water mark to set back")
def test_peak_memory_counts_what_each_side_materialises():
    case = Case("self", batch=8, heads=4, dim=32, length=400)
    scores = 8 * 4 * int(case.drawn.max()) ** 2 * 4
    eager, ours = (fresh.peak_bytes(case, "gelu", torch.float32, name) for name in ("eager", "gdpa-cpu"))
    assert 2 * scores < eager["forward"] < 4 * scores
    assert 3 * scores < eager["backward"] < 6 * scores
    row = int(case.drawn.sum()) * 4 * 32 * 4
    assert row < ours["forward"] < scores
    assert 3 * row < ours["backward"] < scores
    assert ours["both"] == ours["backward"]


# The gate


@CASES
@pytest.mark.parametrize("provider", [Eager(), Gdpa("cpu"), Gdpa("reference")], ids=lambda provider: provider.name)
def test_every_provider_passes_the_gate_in_fp32(case, provider):
    entry = gate.enter(provider, build(case, "silu", torch.float32, CPU), gradients=True)
    assert entry.note is None
    assert [verdict.name for verdict in entry.verdicts] == ["out", "dq", "dk", "dv"]
    assert all(verdict.passed for verdict in entry.verdicts)
    forward = gate.enter(provider, build(case, "silu", torch.float32, CPU), gradients=False)
    assert [verdict.name for verdict in forward.verdicts] == ["out"]
    assert forward.verdicts[0].passed


@CASES
def test_the_gate_samples_the_extremes(case):
    workload = build(replace(case, batch=50), "gelu", torch.float32, CPU)
    sizes = [q * k for (_, q), (_, k) in zip(workload.q_rows, workload.k_rows, strict=True)]
    chosen_sizes = [sizes[b] for b in gate.sampled(workload)]
    assert len(chosen_sizes) == gate.GATED_SEQUENCES
    assert min(chosen_sizes) == min(sizes)
    assert max(chosen_sizes) == max(sizes)


class Stub(Provider):
    """The CPU backend with something wrong about it."""

    def __init__(self, name="stub", share=1.0, spoil="", by=1.01, error=None, reason=None):
        self.name, self.budget_share, self.spoil, self.by, self.error, self.reason = name, share, spoil, by, error, reason

    def reason_against(self, workload, gradients):
        return self.reason

    def prepare(self, workload):
        right = Gdpa("cpu").prepare(workload)

        def forward():
            if self.error is not None:
                raise self.error
            return right.forward()

        def collect(results):
            if not self.spoil or getattr(results, self.spoil) is None:
                return results
            return results._replace(**{self.spoil: getattr(results, self.spoil) * self.by})

        return replace(right, forward=forward, collect=collect)


@CASES
@pytest.mark.parametrize("tensor", Results._fields)
def test_a_wrong_result_has_no_time_in_the_modes_that_rest_on_it(case, tensor):
    results = Report({})
    run.run(plan(Stub(spoil=tensor), cases=(case,), modes=MODES), results)
    red = {row.mode for row in results.rows if row.ms is None}
    assert red == ({"forward", "both"} if tensor == "out" else {"backward", "both"})
    for row in results.rows:
        if row.mode in red:
            assert row.failed
            assert row.note.startswith(f"wrong, not timed: {tensor}: relative error")
            assert row.error == pytest.approx(0.01, rel=0.01)
    assert results.failed


def test_nan_anywhere_is_a_red_gate():
    workload = build(SELF, "gelu", torch.float32, CPU)
    entry = gate.enter(Stub(spoil="dk", by=math.nan), workload, gradients=True)
    assert entry.call is None
    assert entry.failed
    assert "dk holds NaN" in entry.note


def test_others_over_the_budget_are_timed_and_marked_until_they_are_far_off():
    results = Report({})
    near, far = Stub("near", share=8.0, spoil="dq", by=1 + 1e-6), Stub("far", share=8.0, spoil="dq", by=1.01)
    run.run(plan(near, far, modes=("backward",)), results)
    close, off = results.rows
    assert close.ms is not None
    assert close.note.startswith("over gdpa's error budget: dq")
    assert off.ms is None
    assert off.failed


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


def test_a_case_that_does_not_fit_is_cells_and_the_next_one_goes_on(monkeypatch):
    real = run.build

    def build_or_fail(case, *rest):
        if case.kind == "self":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(case, *rest)

    monkeypatch.setattr(run, "build", build_or_fail)
    results = Report({})
    run.run(plan(Gdpa("cpu"), cases=(SELF, PMA)), results)
    assert [(row.case, row.ms is None) for row in results.rows] == [
        ("self-20-jag", True), ("self-20-jag", True), ("pma-4x20-jag", False), ("pma-4x20-jag", False)
    ]  # fmt: skip
    assert results.rows[0].note.startswith("out of memory")


@pytest.mark.parametrize(("gradients", "matrices"), [(False, 3), (True, 5)], ids=["forward", "backward"])
def test_what_would_not_fit_in_memory_says_how_much_it_needs(monkeypatch, gradients, matrices):
    monkeypatch.setattr(providers, "free_bytes", lambda device: 1000)
    workload = build(SELF, "gelu", torch.float32, CPU)
    q_len, k_len = workload.longest
    needed = matrices * 3 * q_len * k_len * 2 * 4 / 1e9
    assert Eager().reason_against(workload, gradients).startswith(f"out of memory: needs {needed:.3g} GB for its score matrices")


def test_a_half_precision_product_that_kills_the_process_is_a_reason(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -4))
    plain.broken_cpu_products.cache_clear()
    try:
        reason = Eager().reason_against(build(SELF, "gelu", torch.bfloat16, CPU), gradients=False)
    finally:
        plain.broken_cpu_products.cache_clear()
    assert "SIGILL" in reason
    assert Gdpa("cpu").reason_against(build(SELF, "gelu", torch.bfloat16, CPU), gradients=False) is None


# Rows


def test_a_run_gives_a_row_for_every_case_mode_activation_and_provider():
    results = Report({})
    chosen_plan = replace(plan(Eager(), Gdpa("cpu"), cases=tuple(EVERY), modes=MODES), activations=("gelu", "relu"))
    run.run(chosen_plan, results)
    keys = [(row.case, row.activation, row.mode, row.provider) for row in results.rows]
    assert keys == [(c.name, a, m, p) for c in EVERY for a in ("gelu", "relu") for m in MODES for p in ("eager", "gdpa-cpu")]
    for row in results.rows:
        case = next(case for case in EVERY if case.name == row.case)
        assert row.ms > 0
        assert row.host_us is None  # a CPU has no queue
        assert 0 < row.error < 1e-5
        assert row.tflops == pytest.approx(case.flops(row.mode) / (row.ms / 1e3) / 1e12)
        assert row.fraction_of_floor == pytest.approx(row.floor_ms / row.ms)
    assert len(results.rates) == len(EVERY) * 2 * len(MODES)


def test_rows_and_header_have_both_matmuls_and_the_floor_is_of_the_one_between_the_kernels(monkeypatch):
    """With a GPU's samples stood in for: 2 ms between the kernels, 1 ms by itself."""
    hardware = timing.Hardware(timing.Task(lambda _: None), timing.Task(lambda _: None), 8e9, 6e12, fills=True)
    samples = {"gdpa-cpu": timing.Samples([4.0], [2.0]), "matmul": timing.Samples([1.0]), "copy": timing.Samples([3.0])}
    monkeypatch.setattr(timing.Hardware, "of", lambda *_, **__: hardware)
    monkeypatch.setattr(timing, "interleaved", lambda *_, **__: samples)
    results = Report({})
    run.run(plan(Gdpa("cpu"), modes=("forward",)), results)
    (row,) = results.rows
    assert (row.R, row.R_rested) == (4.0, 8.0)
    assert row.floor_ms == pytest.approx(SELF.flops("forward") / 4e12 * 1e3)
    assert row.fraction_of_floor == pytest.approx(row.tflops / row.R)
    header = results.as_json()["header"]
    assert (header["R"]["median"], header["R_rested"]["median"], header["W"]["median"]) == (4.0, 8.0, 2000.0)


def test_on_a_cpu_r_is_the_matmuls_own():
    results = Report({})
    run.run(plan(Gdpa("cpu"), modes=("forward",)), results)
    (row,) = results.rows
    header = results.as_json()["header"]
    assert header["R"]["median"] == pytest.approx(row.R)
    assert row.R_rested is None
    assert header["R_rested"] is None


def test_a_row_whose_rounds_disagree_is_marked_noisy(monkeypatch):
    monkeypatch.setattr(timing.Samples, "noise", property(lambda self: 0.04))
    results = Report({})
    run.run(plan(Gdpa("cpu"), modes=("forward",)), results)
    assert results.rows[0].note == "noisy: its even and odd rounds differ by 4%"


def test_memory_is_measured_where_it_is_asked_for():
    results = Report({})
    run.run(plan(Gdpa("cpu"), modes=("forward",), memory=True), results)
    assert results.rows[0].peak_bytes >= 0
    results = Report({})
    run.run(plan(Gdpa("cpu"), modes=("forward",)), results)
    assert results.rows[0].peak_bytes is None


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


def test_progress_never_goes_back_and_ends_within_its_total():
    steps = []

    class Watch(run.Progress):
        def step(self, text, done):
            steps.append(done)

    chosen_plan = plan(Eager(), Gdpa("cpu"), cases=(SELF, PMA))
    run.run(chosen_plan, Report({}), Watch())
    assert steps == sorted(steps)
    assert steps[-1] <= chosen_plan.steps


# What is measured on request


def test_a_cold_call_goes_into_a_list_of_its_own():
    results = Report({})
    run.run(plan(Gdpa("cpu"), Gdpa("reference"), modes=("forward",), cold=True), results)
    assert [row["provider"] for row in results.cold] == ["gdpa-cpu"]
    assert set(results.cold[0]) == {"case", "activation", "provider", "ms", "note"}
    assert results.cold[0]["ms"] > 0, results.cold[0]["note"]


def test_a_failed_cold_call_says_what_the_process_said():
    with pytest.raises(fresh.FreshProcessFailed, match=r"BackendUnavailable.*float64"):
        fresh.first_call_ms(SELF, "gelu", torch.float64, CPU, "gdpa-triton")


def test_graphs_are_of_the_forward_and_of_forward_with_backward(monkeypatch):
    replayed = []
    monkeypatch.setattr(extras, "replay_ms", lambda call, mode, d_out: replayed.append(mode) or 0.5)
    results = Report({})
    run.run(plan(Gdpa("cpu"), Stub(reason="absent"), Stub("wrong", spoil="dq"), graph=True), results)
    assert [(row["provider"], row["mode"], row["ms"], row["note"]) for row in results.graph] == [
        ("gdpa-cpu", "forward", 0.5, None),
        ("gdpa-cpu", "both", 0.5, None),
        ("stub", "forward", None, "absent"),
        ("stub", "both", None, "absent"),
        ("wrong", "forward", 0.5, None),
        ("wrong", "both", None, "wrong, not timed"),
    ]
    assert replayed == ["forward", "both", "forward"]


def test_the_schedules_cost_stands_beside_the_forward():
    results = Report({})
    run.run(plan(Gdpa("cpu"), cases=(SELF, PMA, PFFN, DENSE_SELF), schedule=True), results)
    assert [row["case"] for row in results.schedule] == [case.name for case in (SELF, PMA, PFFN, DENSE_SELF)]
    forward = {row.case: row.ms for row in results.rows if row.mode == "forward"}
    for row in results.schedule[:3]:
        assert row["ms"] > 0
        assert row["fraction_of_forward"] == pytest.approx(row["ms"] / forward[row["case"]])
    assert results.schedule[3]["ms"] is None


def test_the_schedule_is_built_anew_every_time(monkeypatch):
    from gdpa import schedule

    seen = []
    monkeypatch.setattr(schedule, "records", lambda q_offsets, k_offsets, *sizes: seen.append(id(k_offsets)) or torch.zeros(4, 8))
    kept = []
    real = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: kept.append(real(self)) or kept[-1])
    extras.schedule_row(build(PMA, "gelu", torch.float32, CPU), Report({}))
    assert len(set(seen)) == len(seen) == extras.SCHEDULE_ROUNDS
