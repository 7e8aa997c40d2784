"""How it is measured: time by rounds over all providers, memory in a run of its own.

Time. Each round runs every provider once, so that a change of the machine's speed falls on all of them; the figure is
the median over rounds and the spread the interquartile range over the median. On a GPU the clock is a pair of CUDA
events, and an untimed call goes before them, so that the device is busy while the timed part is being queued and the
allocator has its blocks.

Memory. The peak during one call beyond what was there before it: the output, the gradients and every temporary.
`backward` covers the forward that precedes it, since what that one keeps is what training pays for. On a GPU torch's
allocator tells; on a CPU see fresh.py.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gdpa.bench.cases import Mode
from gdpa.bench.providers import Call


@dataclass
class Samples:
    """Milliseconds of every round of one provider, or why there are none."""

    ms: list[float] = field(default_factory=list)
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


@dataclass(frozen=True)
class Effort:
    """How long to measure one (case, mode): rounds until `seconds` are spent, within the two bounds.

    A provider that has used `seconds` by itself, its warm-up included, sits out the rounds after its first.
    """

    seconds: float
    least_rounds: int = 3
    most_rounds: int = 25


def once(call: Call, mode: Mode, d_out: Tensor, twice: bool = False) -> float:
    """Milliseconds of one forward, or of one backward after an untimed forward; `twice` makes the whole call untimed before."""
    device = d_out.device
    if mode == "forward":
        with torch.no_grad():
            if twice:
                call.forward()
            return clock(call.forward, device)
    if twice:
        torch.autograd.grad(call.forward(), call.leaves, d_out)
    out = call.forward()
    return clock(lambda: torch.autograd.grad(out, call.leaves, d_out), device)


def interleaved(
    calls: dict[str, Call],
    mode: Mode,
    d_outs: dict[str, Tensor],
    effort: Effort,
    on_step: Callable[[str, float], None] = lambda name, share: None,
) -> dict[str, Samples]:
    """Time every call in turn, round after round. `on_step` hears each provider's turn and the share of the work done.

    A provider that fails (out of memory) leaves the rotation with its reason; the others go on.
    """
    samples = {name: Samples() for name in calls}
    spent = dict.fromkeys(calls, 0.0)

    def turn(name: str, warm: bool = True) -> float | None:
        start = time.perf_counter()
        # On a GPU a call goes before the timed one, to keep the device busy and because another provider's blocks may have split
        # what the allocator keeps: a cudaMalloc is nobody's time. What takes seconds needs neither.
        twice = warm and d_outs[name].device.type != "cpu" and spent[name] < effort.seconds
        try:
            return once(calls[name], mode, d_outs[name], twice)
        except Exception as error:
            samples[name].failure = describe_failure(error)
            release()
            return None
        finally:
            spent[name] += time.perf_counter() - start

    for name in calls:  # warm-up
        on_step(name, 0.0)
        turn(name, warm=False)
    start = time.perf_counter()
    for done in range(effort.most_rounds):
        elapsed = time.perf_counter() - start
        if done >= effort.least_rounds and elapsed > effort.seconds:
            break
        for name in calls:
            sits_out = bool(samples[name].ms) and spent[name] > effort.seconds and len(calls) > 1
            if samples[name].failure is None and not sits_out:
                on_step(name, min(1.0, max(elapsed / effort.seconds, done / effort.most_rounds)))
                ms = turn(name)
                if ms is not None:
                    samples[name].ms.append(ms)
    return samples


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


def clock(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def describe_failure(error: Exception) -> str:
    """The cell's text: out of memory by its name, anything else by its type and first line."""
    text = str(error).strip().split("\n")[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return "out of memory"
    return f"failed: {type(error).__name__}: {text}"


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
