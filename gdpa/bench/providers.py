"""Who computes it: what a provider is, gdpa's backends, and the list of all of them by name.

A provider lays the workload's tensors out as it likes before the clock starts, and brings its results back to the workload's
layout for the correctness gate. One that cannot run a workload says why; none computes something else without its note saying so.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

import gdpa
from gdpa import dispatch
from gdpa.bench.cases import Workload, problem_of
from gdpa.errors import GdpaError
from gdpa.numerics import Inputs, Results, Verdict, judge

NAMES = (
    "gdpa-hopper",
    "gdpa-triton",
    "gdpa-cpu",
    "gdpa-reference",
    "eager",
    "compile",
    "flex",
    "cudnn",
    "flash",
    "varlen",
    "fa3",
    "fa4",
    "hstu",
    "meta-triton",
)
# What materialises score matrices or compiles for a minute is measured where it is asked for.
GPU_DEFAULT = ("gdpa-hopper", "gdpa-triton", "cudnn", "flash", "varlen", "fa3", "fa4", "hstu", "meta-triton")
CPU_DEFAULT = ("gdpa-cpu", "eager")
# `gdpa-hopper@WHERE`: that backend of another version of gdpa (gdpa.bench.versions).
ELSEWHERE = "@"
# A softmax attention is a yardstick of speed, not the same function: tables and plots say so.
SOFTMAX = ("cudnn", "flash", "varlen", "fa3", "fa4")


def label(name: str) -> str:
    """A provider's name as tables and plots show it."""
    return f"{name} (softmax)" if name in SOFTMAX else name


def is_own(name: str) -> bool:
    """Whether it is one of this version's backends."""
    return name.startswith("gdpa-") and ELSEWHERE not in name


def in_order(names: Iterable[str]) -> list[str]:
    """Each once, as tables and plots have them: those of NAMES, each with its other versions behind it, then what they do not know."""

    def place(name: str) -> tuple[int, bool]:
        base = name.split(ELSEWHERE)[0]
        return NAMES.index(base) if base in NAMES else len(NAMES), base != name

    return sorted(dict.fromkeys(names), key=place)


@dataclass(frozen=True)
class Call:
    """A provider made ready: `forward()` computes the output from `leaves`, in the provider's own layout."""

    leaves: tuple[Tensor, Tensor, Tensor]
    forward: Callable[[], Tensor]
    lay_out: Callable[[Tensor], Tensor] = lambda d_out: d_out  # a gradient of the output, from the workload's layout
    collect: Callable[[Results], Results] = lambda results: results  # results, to the workload's layout


class Provider:
    """One way to compute a workload. The gate holds `budget_share` times the error budget against it."""

    name: str
    # gdpa's backends are held to the budget itself. Others round where the budget does not allow a kernel to (eager rounds S: up
    # to 1.6 times it with exp), so they may err more, and their note says so; past this many times the budget they compute something else.
    budget_share: float = 4.0
    note: str | None = None  # what differs from the case's own function

    def reason_against(self, workload: Workload, gradients: bool) -> str | None:
        """None where the provider can run the workload (with its backward, where `gradients`), else why it cannot."""
        raise NotImplementedError

    def prepare(self, workload: Workload) -> Call:
        raise NotImplementedError

    def judge(self, workload: Workload, inputs: Inputs, d_out: Tensor | None, results: Results) -> list[Verdict]:
        """Hold results on some sequences of the workload, `inputs`, against the float64 oracle of what this provider computes."""
        return judge(problem_of(inputs, workload.activation, workload.case.causal), inputs, d_out, results)


class Gdpa(Provider):
    """`gdpa.attention` or `gdpa.attention_varlen` on one named backend."""

    budget_share = 1.0

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.name = f"gdpa-{backend}"
        self.package: ModuleType = gdpa

    def reason_against(self, workload: Workload, gradients: bool) -> str | None:
        if self.backend in ("triton", "hopper") and os.environ.get("TRITON_INTERPRET", "0") == "1":
            return "TRITON_INTERPRET=1: the interpreter is for tests, its times mean nothing"
        reason = self._refusal(workload)
        if reason is None and self.backend == "reference":
            wide = torch.promote_types(workload.problem.dtype, torch.float32)
            reason = lacks_memory(workload, workload.case.scores, wide, gradients)
        return reason

    def _refusal(self, workload: Workload) -> str | None:
        """What the backend has against it."""
        if self.backend not in dispatch.BACKENDS:
            return f"this gdpa has no backend {self.backend!r}"
        return dispatch.reason_against(self.backend, workload.problem)

    def prepare(self, workload: Workload) -> Call:
        inputs, activation = workload.inputs, workload.activation
        options = {"causal": workload.case.causal, "backend": self.backend}
        q, k, v = as_leaves(inputs.q, inputs.k, inputs.v)

        def dense() -> Tensor:
            out: Tensor = self.package.attention(q, k, v, activation, **options)
            return out

        def jagged() -> Tensor:
            offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k
            out: Tensor = self.package.attention_varlen(q, k, v, *offsets, activation=activation, **options)
            return out

        return Call((q, k, v), dense if workload.case.dense else jagged)


@cache
def by_name(name: str) -> Provider:
    """The provider of this name. The modules of the others are imported here, so that a fresh process loads what it needs."""
    from gdpa.bench import external, plain, softmax, versions

    if ELSEWHERE in name:
        return versions.Elsewhere(*name.removeprefix("gdpa-").split(ELSEWHERE, 1))
    if name.startswith("gdpa-"):
        return Gdpa(name.removeprefix("gdpa-"))
    others: dict[str, type[Provider]] = {
        "eager": plain.Eager,
        "compile": plain.Compiled,
        "flex": plain.Flex,
        "cudnn": softmax.Cudnn,
        "flash": softmax.Flash,
        "varlen": softmax.Varlen,
        "fa3": external.FlashAttention3,
        "fa4": external.FlashAttention4,
        "hstu": external.Hstu,
        "meta-triton": external.MetaTriton,
    }
    return others[name]()


def chosen(names: Iterable[str] | None, gpu: bool) -> tuple[Provider, ...]:
    """The providers asked for ("all" is every one), or the default ones of the device."""
    listed = list(names) if names is not None else list(GPU_DEFAULT if gpu else CPU_DEFAULT)
    if "all" in listed:
        listed = [*NAMES, *(name for name in listed if ELSEWHERE in name)]
    for name in listed:
        base, elsewhere, _ = name.partition(ELSEWHERE)
        check_choice("--provider", base, (*NAMES, "all"))
        if elsewhere and not base.startswith("gdpa-"):
            raise GdpaError(f"--provider: expected one of gdpa's backends before the {ELSEWHERE}, got {name!r}")
    return tuple(by_name(name) for name in dict.fromkeys(listed))


def as_leaves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors, on the same memory, as leaves that ask for gradients."""
    return q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()


# Plain PyTorch holds S, its scaled copy and P at once; for backward also the mask's copy and the gradients beside them.
MATRICES = {False: 3, True: 5}


def lacks_memory(workload: Workload, pairs: int, dtype: torch.dtype, gradients: bool) -> str | None:
    """Why score matrices of so many pairs do not fit, or None. Asked beforehand: a CPU's system ends a process that takes too
    much, and on a GPU the attempt would take the others' time."""
    needed = MATRICES[gradients] * pairs * workload.problem.heads * dtype.itemsize
    free = free_bytes(workload.problem.device)
    if free is None or needed < free:
        return None
    return f"out of memory: needs {needed / 1e9:.3g} GB for its score matrices, {free / 1e9:.3g} GB are free"


def free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def check_choice(argument: str, value: str, names: tuple[str, ...]) -> str:
    if value not in names:
        close = difflib.get_close_matches(value, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise GdpaError(f"{argument}: expected one of {', '.join(names)}, got {value!r}{hint}")
    return value
