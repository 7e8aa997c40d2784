"""How it is measured: time by rounds over everything that is compared, memory in a run of its own.

Time. Each round runs every provider once, and with them the two yardsticks of the hardware (a matmul and a copy), so that a change
of the machine's speed falls on all of them; the figure is the median over rounds and the spread the interquartile range over the
median. On a GPU the clock is a pair of CUDA events. Before them go one untimed call (it brings the allocator's blocks back) and a
matmul, the filler, that keeps the device busy while the timed part is queued, so that what is measured is the device's time; the
host's is a figure of its own. Calls shorter than SHORT_MS are repeated between the events.

The filler is timed too, by events of its own: at its power cap a GPU may give a matmul between the kernels other clocks than one
among other matmuls, and the kernels are held against the former (see Rates).

Memory. The peak during one call beyond what was there before it: the output, the gradients and every temporary. `backward` covers
the forward that precedes it, since what that one keeps is what training pays for. On a GPU torch's allocator tells; on a CPU see
fresh.py.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gdpa.bench.cases import Mode
from gdpa.bench.providers import Call

SHORT_MS = 0.2
MOST_REPEATS = 8
# The even and the odd rounds are two measurements of the same thing: medians further apart than this make a row noisy.
NOISE = 0.03
LEAST_ROUNDS_FOR_NOISE = 6
HOST_CALLS, LEAST_HOST_CALLS, HOST_SECONDS = 20, 5, 0.15
# About 50 microseconds of a GPU: longer than the host takes to queue a matmul.
HEAD_START_CYCLES = 100_000
# Rows of the square matrices that R is measured with, and bytes of the copy for W.
HARDWARE_SIZES = {"cuda": (8192, 2**30), "cpu": (1024, 2**26)}

Work = Callable[[], object]


@dataclass
class Samples:
    """Milliseconds of every round of one provider, or why there are none; and those of the fillers behind its untimed calls."""

    ms: list[float] = field(default_factory=list)
    filler_ms: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def spread(self) -> float | None:
        """Interquartile range as a fraction of the median; None for a single round."""
        if len(self.ms) < 2:
            return None
        first, _, third = statistics.quantiles(self.ms, n=4, method="inclusive")
        return (third - first) / self.median

    @property
    def noise(self) -> float | None:
        """How far apart the medians of the even and the odd rounds are, as a fraction; None where rounds are too few to say."""
        if len(self.ms) < LEAST_ROUNDS_FOR_NOISE:
            return None
        even, odd = statistics.median(self.ms[::2]), statistics.median(self.ms[1::2])
        return abs(even - odd) / self.median


@dataclass(frozen=True)
class Effort:
    """How long to measure one (case, mode): rounds until `seconds` are spent, within the two bounds.

    A provider that has used `patience * seconds` by itself sits out the rounds after its first.
    """

    seconds: float
    least_rounds: int = 6
    most_rounds: int = 40
    patience: float = 1.0


@dataclass(frozen=True)
class Task:
    """Something to time: `setup(repeats)` does what is not timed and returns what is, to be called `repeats` times."""

    setup: Callable[[int], Work]


def task_of(call: Call, mode: Mode, d_out: Tensor) -> Task:
    def forward() -> Tensor:
        with torch.no_grad():
            return call.forward()

    def backward(repeats: int) -> Work:
        out = call.forward()
        # Keeping the graph is for repeats only: compiled code reuses the buffers of a graph that is let go.
        return lambda: torch.autograd.grad(out, call.leaves, d_out, retain_graph=repeats > 1)

    if mode == "forward":
        return Task(lambda repeats: forward)
    if mode == "backward":
        return Task(backward)
    return Task(lambda repeats: lambda: torch.autograd.grad(call.forward(), call.leaves, d_out))


def interleaved(
    tasks: dict[str, Task],
    device: torch.device,
    effort: Effort,
    filler: Work | None = None,
    on_step: Callable[[str, float], None] = lambda name, share: None,
    always: Iterable[str] = (),
) -> dict[str, Samples]:
    """Time every task in turn, round after round, in an order drawn anew for each: a task inherits the clocks that the power of the
    one before left it. `on_step` hears each one's turn and the share of the work done.

    A task that fails (out of memory) leaves the rotation with its reason; the others go on. Those named in `always` never sit out.
    `filler` is for a GPU alone.
    """
    samples = {name: Samples() for name in tasks}
    spent = dict.fromkeys(tasks, 0.0)
    repeats = dict.fromkeys(tasks, 1)
    on_gpu = device.type == "cuda"

    def turn(name: str, warmed: bool) -> float | None:
        start = time.perf_counter()
        task, count = tasks[name], repeats[name]
        try:
            # Another provider's blocks may have split what the allocator keeps, and a cudaMalloc is nobody's time. What takes
            # seconds by itself does not notice one.
            untimed_first = warmed and on_gpu and spent[name] < effort.seconds
            if untimed_first:
                task.setup(1)()
            if not warmed or filler is None:
                return clock(task.setup(count), device, count)
            filler_ms, ms = clock_behind(filler, task.setup(count), count)
            if untimed_first:  # else the filler had the clocks of whichever task came before
                samples[name].filler_ms.append(filler_ms)
            return ms
        except Exception as error:
            samples[name].failure = describe_failure(error)
            release()
            return None
        finally:
            spent[name] += time.perf_counter() - start

    for name in tasks:  # warm-up
        on_step(name, 0.0)
        ms = turn(name, warmed=False)
        if ms is not None and on_gpu:
            repeats[name] = repeats_for(ms)
        spent[name] = 0.0  # the warm-up may have compiled
    kept = set(always)
    order, shuffled = list(tasks), random.Random(0)
    start = time.perf_counter()
    for done in range(effort.most_rounds):
        elapsed = time.perf_counter() - start
        if done >= effort.least_rounds and elapsed > effort.seconds:
            break
        shuffled.shuffle(order)
        for name in order:
            sits_out = (
                bool(samples[name].ms) and spent[name] > effort.patience * effort.seconds and len(tasks) > 1 and name not in kept
            )
            if samples[name].failure is None and not sits_out:
                on_step(name, min(1.0, max(elapsed / effort.seconds, done / effort.most_rounds)))
                ms = turn(name, warmed=True)
                if ms is not None:
                    samples[name].ms.append(ms)
    return samples


def repeats_for(ms: float) -> int:
    """How often to repeat a call between two events: a lone short one is measured in a few ticks of their clock."""
    if ms >= SHORT_MS:
        return 1
    return min(MOST_REPEATS, int(2 * SHORT_MS / max(ms, 1e-3)) + 1)


def clock(work: Work, device: torch.device, repeats: int = 1) -> float:
    """Milliseconds of one call."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - start) * 1e3 / repeats
    first = _event()
    for _ in range(repeats):
        work()
    last = _event()
    last.synchronize()
    return float(first.elapsed_time(last)) / repeats


def clock_behind(filler: Work, work: Work, repeats: int = 1) -> tuple[float, float]:
    """Milliseconds of the filler, and of one call that is queued on the GPU behind it."""
    # Where the queue is empty the filler's time would begin before its launch.
    torch.cuda._sleep(HEAD_START_CYCLES)
    start = _event()
    filler()
    first = _event()
    for _ in range(repeats):
        work()
    last = _event()
    last.synchronize()
    return float(start.elapsed_time(first)), float(first.elapsed_time(last)) / repeats


def _event() -> torch.cuda.Event:
    """One that is recorded now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def host_us(task: Task, device: torch.device, ms: float) -> float | None:
    """Microseconds from a call to its return, one call after the other; None on a CPU, where the call is the work.

    A median over HOST_CALLS calls; fewer where they would take more than HOST_SECONDS. The host does not wait for the device in between,
    as in training, and the first call, which comes after a wait, does not count: a host that has waited is slower, and the more so the
    longer it did (cuDNN's forward on an H200's host, after a call like it: 34 microseconds at 256 rows, 59 at 2048, up to 300 at times).
    """
    if device.type != "cuda":
        return None
    taken = []
    torch.cuda.synchronize(device)
    for _ in range(1 + max(LEAST_HOST_CALLS, min(HOST_CALLS, int(HOST_SECONDS * 1e3 / max(ms, 1e-3))))):
        work = task.setup(1)
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    torch.cuda.synchronize(device)
    return statistics.median(taken[1:]) * 1e6


class Rates(NamedTuple):
    """What bounded the kernels of one group of rounds."""

    matmul: float  # R in FLOP/s: of the matmuls between the kernels where there are such, else of the matmul's own turns
    bandwidth: float  # W in bytes/s
    rested: float | None = None  # FLOP/s of the matmul's own turns, where R is not that


@dataclass
class Hardware:
    """The two rates that bound every kernel: a large matmul's and a copy's. Both are tasks of the same rounds, and on a GPU the
    matmul is also the filler before every timed call."""

    matmul: Task | None
    copy: Task
    matmul_flops: float
    copy_bytes: float
    fills: bool = False

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, products: bool = True) -> Hardware:
        """`products` is False where a matmul in this dtype would end the process; then there is no R."""
        size, moved = HARDWARE_SIZES[device.type]
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        product = torch.empty_like(a)
        source = torch.zeros(moved, device=device, dtype=torch.uint8)
        target = torch.zeros_like(source)
        return cls(
            Task(lambda _: lambda: torch.mm(a, b, out=product)) if products else None,
            Task(lambda _: lambda: target.copy_(source)),
            2.0 * size**3,
            2.0 * moved,
            fills=device.type == "cuda",
        )

    @property
    def tasks(self) -> dict[str, Task]:
        return {"copy": self.copy} if self.matmul is None else {"matmul": self.matmul, "copy": self.copy}

    @property
    def filler(self) -> Work | None:
        return self.matmul.setup(1) if self.fills and self.matmul is not None else None

    def rates(self, samples: dict[str, Samples]) -> Rates | None:
        """Of one group of rounds, or None where R or W is missing."""
        if any(name not in samples or not samples[name].ms for name in ("matmul", "copy")):
            return None
        own = self.matmul_flops / samples["matmul"].median * 1e3
        bandwidth = self.copy_bytes / samples["copy"].median * 1e3
        if not self.fills:
            return Rates(own, bandwidth)
        # A provider that failed has no figure, so the kernels that its fillers stood between are not in the report.
        kernels = [each for name, each in samples.items() if name not in self.tasks and each.failure is None]
        between = [ms for each in kernels for ms in each.filler_ms]
        return Rates(self.matmul_flops / statistics.median(between) * 1e3, bandwidth, own) if between else None


def training_step(call: Call, mode: Mode, d_out: Tensor) -> tuple[Tensor, ...]:
    """What memory is measured over: a forward without gradients, or a forward and its backward."""
    if mode == "forward":
        with torch.no_grad():
            return (call.forward(),)
    return torch.autograd.grad(call.forward(), call.leaves, d_out)


def gpu_peak_bytes(call: Call, mode: Mode, d_out: Tensor) -> int:
    """Peak of the memory allocated during a call beyond what was there before it."""
    release()
    torch.cuda.synchronize(d_out.device)
    torch.cuda.reset_peak_memory_stats(d_out.device)
    before = torch.cuda.memory_allocated(d_out.device)
    training_step(call, mode, d_out)
    torch.cuda.synchronize(d_out.device)
    return torch.cuda.max_memory_allocated(d_out.device) - before


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def describe_failure(error: Exception) -> str:
    """The cell's text: out of memory by its name, anything else by its type and first line."""
    if out_of_memory(error):
        return "out of memory"
    return f"failed: {type(error).__name__}: {str(error).strip().split(chr(10))[0]}"


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
