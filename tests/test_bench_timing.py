"""How the benchmark takes time: rounds, events, R and W, with a GPU stood in for."""

import time

import pytest
import torch

from gdpa.bench import timing
from gdpa.bench.cases import MODES
from gdpa.bench.providers import Call

CPU = torch.device("cpu")


def test_median_spread_and_noise_are_those_of_the_samples():
    samples = timing.Samples([1.0, 2.0, 3.0, 4.0, 10.0])
    assert samples.median == 3
    assert samples.spread == pytest.approx((4 - 2) / 3)
    assert samples.noise is None
    assert timing.Samples([5.0]).spread is None
    assert timing.Samples([10.0, 11.0] * 3).noise == pytest.approx(1 / 10.5)


def test_the_order_of_a_round_is_drawn_anew_and_the_same_in_every_run():
    """Whoever comes after the same one each time would inherit its clocks."""

    def orders() -> list[str]:
        order: list[str] = []
        tasks = {name: _recording(name, order) for name in "abcd"}
        timing.interleaved(tasks, CPU, timing.Effort(60.0, least_rounds=12, most_rounds=12))
        return ["".join(order[start : start + 4]) for start in range(4, len(order), 4)]

    first = orders()
    assert first == orders()
    before_b = {each[each.index("b") - 1] for each in first if each.index("b")}
    assert before_b == {"a", "c", "d"}


def test_rounds_interleave_the_providers():
    order = []
    tasks = {name: _recording(name, order) for name in "abc"}
    samples = timing.interleaved(tasks, CPU, timing.Effort(60.0, least_rounds=3, most_rounds=3))
    rounds = ["".join(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert rounds[0] == "abc"  # the warm-up
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds[1:])
    assert len(rounds) == 4
    assert all(len(sample.ms) == 3 for sample in samples.values())


def test_a_provider_that_uses_up_the_time_by_itself_is_measured_once():
    order = []
    tasks = {"quick": _recording("q", order), "slow": _recording("s", order, 0.1), "rate": _recording("r", order, 0.1)}
    samples = timing.interleaved(tasks, CPU, timing.Effort(0.08, least_rounds=4, most_rounds=4), always=("rate",))
    assert [len(samples[name].ms) for name in tasks] == [4, 1, 4]


def test_a_task_that_fails_while_it_is_timed_leaves_the_rotation():
    turns = iter(range(100))

    def work():
        if next(turns) >= 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    tasks = {"flaky": timing.Task(lambda repeats: work), "steady": _recording("s", [])}
    samples = timing.interleaved(tasks, CPU, timing.Effort(60.0, least_rounds=2, most_rounds=2))
    assert samples["flaky"].failure == "out of memory"
    assert samples["steady"].failure is None
    assert len(samples["steady"].ms) == 2


def _recording(name, order, seconds=0.0):
    def work():
        order.append(name)
        time.sleep(seconds)

    return timing.Task(lambda repeats: work)


@pytest.mark.parametrize(("ms", "repeats"), [(5.0, 1), (0.2, 1), (0.19, 3), (0.1, 5), (0.01, 8), (0.0, 8)])
def test_short_calls_are_repeated_between_the_events(ms, repeats):
    assert timing.repeats_for(ms) == repeats


@pytest.mark.parametrize("mode", MODES)
def test_a_task_times_its_mode_and_nothing_else(mode):
    """Backward runs its forward in the set-up; both runs it in the timed part."""
    seen = []
    leaf = torch.ones(3, requires_grad=True)

    def forward():
        seen.append(torch.is_grad_enabled())
        return leaf * 2

    work = timing.task_of(Call((leaf,) * 3, forward), mode, torch.ones(3)).setup(2)
    assert seen == ([True] if mode == "backward" else [])
    work()
    work()
    assert seen == {"forward": [False, False], "backward": [True], "both": [True, True]}[mode]


def test_the_rates_are_those_of_the_matmul_and_the_copy(monkeypatch):
    monkeypatch.setitem(timing.HARDWARE_SIZES, "cpu", (1024, 2**26))
    hardware = timing.Hardware.of(CPU, torch.float32)
    samples = {"matmul": timing.Samples([2.0]), "copy": timing.Samples([4.0])}
    rates = hardware.rates(samples)
    assert rates.matmul == pytest.approx(2 * 1024**3 / 2e-3)
    assert rates.bandwidth == pytest.approx(2 * 2**26 / 4e-3)
    assert rates.rested is None  # a CPU has no filler, so there is no other R
    assert hardware.filler is None
    broken = timing.Hardware.of(CPU, torch.float32, products=False)
    assert list(broken.tasks) == ["copy"]
    assert broken.rates({"copy": timing.Samples([4.0])}) is None


# What runs on a GPU only, with the device stood in for: the order of what is queued, and the arithmetic.

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A log of what the host asks of the device; an event's time is its place in it."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.place = len(log)
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, other):
            return float(other.place - self.place - 1)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    return log


def test_events_stand_around_the_timed_calls_alone(gpu):
    assert timing.clock(lambda: gpu.append("call"), GPU, repeats=3) == pytest.approx(3 / 3)
    assert gpu == ["event", "call", "call", "call", "event", "wait"]


def test_the_filler_has_events_of_its_own_and_is_not_repeated(gpu):
    """It is queued while the device sleeps, so that its time begins with it and not with its launch."""
    work = [lambda: gpu.append("filler"), lambda: gpu.append("call") or gpu.append("call")]
    assert timing.clock_behind(*work, repeats=3) == (1.0, pytest.approx(6 / 3))
    assert gpu == ["sleep", "event", "filler", "event", *["call"] * 6, "event", "wait"]


def test_on_a_gpu_an_untimed_call_and_a_filler_go_before_each_timed_one(gpu):
    task = timing.Task(lambda repeats: lambda: gpu.append("call"))
    effort = timing.Effort(60.0, least_rounds=1, most_rounds=1)
    samples = timing.interleaved({"a": task}, GPU, effort, filler=lambda: gpu.append("filler"))
    assert gpu == ["event", "call", "event", "wait", "call", "sleep", "event", "filler", "event", "call", "event", "wait"]
    assert samples["a"].ms == [1.0]
    assert samples["a"].filler_ms == [1.0]  # that of the round; the warm-up has none


class Throttled:
    """A device that does a matmul in 1 ms behind another, in 2 behind a kernel and in 5 behind a copy; what is queued takes its
    time at once."""

    matmul_flops, copy_bytes = 8e9, 6e6
    kernel_ms, copy_ms = 40.0, 3.0

    def __init__(self, monkeypatch):
        self.now, self.last = 0.0, ""
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.now

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return other.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        self.hardware = timing.Hardware(self.task("matmul"), self.task("copy"), self.matmul_flops, self.copy_bytes, fills=True)

    def queue(self, name):
        after = {"matmul": 1.0, "copy": 5.0}.get(self.last, 2.0)
        self.now += {"matmul": after, "copy": self.copy_ms}.get(name, self.kernel_ms)
        self.last = name

    def task(self, name):
        return timing.Task(lambda repeats: lambda: self.queue(name))

    def samples(self, tasks, rounds=3, **effort):
        """Of these providers and the yardsticks, as a run has them."""
        yardsticks = self.hardware.tasks
        chosen_effort = timing.Effort(**{"seconds": 60.0, "least_rounds": rounds, "most_rounds": rounds} | effort)
        return timing.interleaved({**tasks, **yardsticks}, GPU, chosen_effort, self.hardware.filler, always=yardsticks)


@pytest.mark.parametrize("names", ["a", "abc"], ids=["one provider", "three"])
def test_r_is_that_of_the_matmuls_between_the_kernels(monkeypatch, names):
    """Not of those before the copy (5 ms), nor of the matmul's own turns (1 ms)."""
    device = Throttled(monkeypatch)
    samples = device.samples({name: device.task(name) for name in names})
    assert [samples[name].ms for name in names] == [[40.0] * 3] * len(names)
    assert [samples[name].filler_ms for name in names] == [[2.0] * 3] * len(names)
    assert (samples["matmul"].ms, samples["copy"].ms) == ([1.0] * 3, [3.0] * 3)
    rates = device.hardware.rates(samples)
    assert rates.matmul == pytest.approx(8e9 / 2e-3)
    assert rates.rested == pytest.approx(8e9 / 1e-3)
    assert rates.bandwidth == pytest.approx(6e6 / 3e-3)


def test_r_is_a_median_over_the_fillers_of_all_providers():
    hardware = timing.Hardware(timing.Task(lambda _: None), timing.Task(lambda _: None), 8e9, 6e6, fills=True)
    samples = {"matmul": timing.Samples([1.0], [1.0] * 4), "copy": timing.Samples([3.0], [9.0] * 9)}
    samples |= {"a": timing.Samples([7.0] * 3, [2.0, 4.0, 5.0]), "b": timing.Samples([7.0] * 2, [8.0, 16.0])}
    assert hardware.rates(samples) == timing.Rates(8e9 / 5e-3, 6e6 / 3e-3, 8e9 / 1e-3)


def test_calls_repeated_between_the_events_have_one_filler(monkeypatch):
    device = Throttled(monkeypatch)
    monkeypatch.setattr(timing, "repeats_for", lambda ms: 4)
    samples = device.samples({"a": device.task("a")}, rounds=2)
    assert samples["a"].ms == [40.0] * 2
    assert samples["a"].filler_ms == [2.0] * 2


def test_the_fillers_of_a_provider_that_fails_do_not_count(monkeypatch):
    device = Throttled(monkeypatch)
    turns = iter(range(100))

    def fails_in_its_second_round():
        if next(turns) == 4:  # after the warm-up, two calls of the first round and the untimed one of the second
            raise torch.OutOfMemoryError("CUDA out of memory")
        device.queue("copy")

    samples = device.samples({"a": device.task("a"), "bad": timing.Task(lambda repeats: fails_in_its_second_round)})
    assert samples["bad"].failure == "out of memory"
    assert samples["bad"].filler_ms == [5.0]  # of the first round: that before the call that failed is lost with it
    assert device.hardware.rates(samples).matmul == pytest.approx(8e9 / 2e-3)
    for name in ("a", "bad"):
        samples[name].failure = "failed"
    assert device.hardware.rates(samples) is None  # no row has a figure to hold against it


def test_a_filler_without_an_untimed_call_before_it_does_not_count(monkeypatch):
    """A provider that has used up the time goes without, and its filler has the clocks of another task."""
    device = Throttled(monkeypatch)
    samples = device.samples({"a": device.task("a")}, seconds=1e-9, patience=1e12)
    assert samples["a"].ms == [40.0] * 3
    assert samples["a"].filler_ms == [2.0]


def test_short_calls_are_repeated_in_the_rounds(gpu, monkeypatch):
    monkeypatch.setattr(timing, "repeats_for", lambda ms: 4)
    seen = []
    task = timing.Task(lambda repeats: seen.append(repeats) or (lambda: gpu.append("call")))
    timing.interleaved({"a": task}, GPU, timing.Effort(60.0, least_rounds=1, most_rounds=1))
    assert seen == [1, 1, 4]  # the warm-up, the untimed call, the timed ones
    assert gpu.count("call") == 1 + 1 + 4


def test_the_hosts_time_is_that_of_calls_in_a_row(gpu):
    task = timing.Task(lambda repeats: gpu.append("set-up") or (lambda: gpu.append("call")))
    us = timing.host_us(task, GPU, ms=50.0)
    # Few of them, since they are long, and one more before them.
    assert gpu == ["synchronize", *["set-up", "call"] * (1 + timing.LEAST_HOST_CALLS), "synchronize"]
    assert us > 0
    gpu.clear()
    timing.host_us(task, GPU, ms=0.1)
    assert gpu.count("call") == 1 + timing.HOST_CALLS


def test_the_call_after_a_wait_does_not_count(gpu, monkeypatch):
    takes, now = iter([1e-3, 7e-6]), 0.0

    def call():
        nonlocal now
        now += next(takes)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(timing, "LEAST_HOST_CALLS", 1)
    assert timing.host_us(timing.Task(lambda repeats: call), GPU, ms=1e6) == pytest.approx(7.0)


def test_the_gpus_peak_is_what_a_call_adds(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: gpu.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    call = Call((torch.zeros(1),) * 3, lambda: gpu.append("call") or torch.zeros(1))
    assert timing.gpu_peak_bytes(call, "forward", torch.zeros(1)) == 250
    assert gpu == ["synchronize", "reset", "call", "synchronize"]
