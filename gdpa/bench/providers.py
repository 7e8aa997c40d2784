"""Who computes it: plain PyTorch and each gdpa backend, behind one interface.

A provider lays the workload's tensors out as it likes before the clock starts, and brings its results back to the
workload's layout for the correctness gate. One that cannot run a workload says why; none computes something else.
"""

from __future__ import annotations

import difflib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

import gdpa
from gdpa import dispatch
from gdpa.activations import Activation
from gdpa.bench.cases import Workload
from gdpa.errors import GdpaError
from gdpa.jagged import pack, unpack
from gdpa.numerics import Results
from gdpa.problem import Problem

# Eager keeps S, the mask's copy and P for backward, and its gradients beside them: about five score matrices at once.
SCORE_MATRICES = 5


@dataclass(frozen=True)
class Call:
    """A provider made ready: `forward()` computes the output from `leaves`, in the provider's own layout."""

    leaves: tuple[Tensor, Tensor, Tensor]
    forward: Callable[[], Tensor]
    lay_out: Callable[[Tensor], Tensor]  # a gradient of the output, from the workload's layout to the provider's
    collect: Callable[[Results], Results]  # results, from the provider's layout to the workload's


class Provider(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def baseline(self) -> bool:
        """Plain PyTorch is what the others are compared with: its error is shown, and it is timed whatever that is."""

    def reason_against(self, workload: Workload) -> str | None:
        """None where the provider can run the workload, else why it cannot."""

    def prepare(self, workload: Workload) -> Call: ...


@dataclass(frozen=True)
class Gdpa:
    """`gdpa.attention_varlen` on one named backend."""

    backend: str
    baseline: bool = False

    @property
    def name(self) -> str:
        return f"gdpa-{self.backend}"

    def reason_against(self, workload: Workload) -> str | None:
        if self.backend == "triton" and os.environ.get("TRITON_INTERPRET", "0") == "1":
            return "TRITON_INTERPRET=1: the interpreter is for tests, its times mean nothing"
        reason = dispatch.reason_against(self.backend, workload.problem)
        if reason is None and self.backend == "reference":
            reason = _lacks_memory(workload, workload.pairs, torch.promote_types(workload.problem.dtype, torch.float32))
        return reason

    def prepare(self, workload: Workload) -> Call:
        inputs = workload.inputs
        q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))

        def forward() -> Tensor:
            return gdpa.attention_varlen(
                q,
                k,
                v,
                inputs.cu_seqlens_q,
                inputs.cu_seqlens_k,
                activation=workload.activation,
                backend=self.backend,
            )

        return Call((q, k, v), forward, lambda d_out: d_out, lambda results: results)


@dataclass(frozen=True)
class Eager:
    """f(scale * q @ k^T) @ v on padded (B, H, S, D) tensors with a mask over the padded keys: what one writes by hand.

    The padded copies are made before the clock starts, in the layout torch.matmul likes best.
    """

    name: str = "eager"
    baseline: bool = True

    def reason_against(self, workload: Workload) -> str | None:
        q_len, k_len = (max((n for _, n in rows), default=0) for rows in (workload.q_rows, workload.k_rows))
        problem = workload.problem
        return broken_products(problem) or _lacks_memory(workload, problem.batch * q_len * k_len, problem.dtype)

    def prepare(self, workload: Workload) -> Call:
        problem, inputs = workload.problem, workload.inputs
        f = Activation.from_key(problem.activation_of(0))
        q_len, k_len = (max((n for _, n in rows), default=0) for rows in (workload.q_rows, workload.k_rows))

        def padded(x: Tensor, offsets: Tensor | None, length: int) -> Tensor:
            full = x if offsets is None else unpack(x, offsets, length)
            return full.transpose(-3, -2).contiguous()  # [B, H, S, D]; shared queries [H, S, D]

        q = padded(inputs.q, inputs.cu_seqlens_q, q_len).detach().requires_grad_()
        k = padded(inputs.k, inputs.cu_seqlens_k, k_len).detach().requires_grad_()
        v = padded(inputs.v, inputs.cu_seqlens_k, k_len).detach().requires_grad_()
        padding = None
        if inputs.cu_seqlens_k is not None:
            key_lengths = inputs.cu_seqlens_k.diff()
            padding = (torch.arange(k_len, device=k.device) >= key_lengths[:, None])[:, None, None, :]

        def forward() -> Tensor:
            s = problem.scale * (q @ k.transpose(-1, -2))
            p = f(s)
            if padding is not None:
                p = p.masked_fill(padding, 0)
            return p @ v

        def packed(x: Tensor | None, offsets: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            x = x.transpose(-3, -2)
            return x.contiguous() if offsets is None else pack(x, offsets.diff())[0]

        def collect(results: Results) -> Results:
            out = packed(results.out, inputs.cu_seqlens_q)
            assert out is not None
            return Results(
                out,
                packed(results.dq, inputs.cu_seqlens_q),
                packed(results.dk, inputs.cu_seqlens_k),
                packed(results.dv, inputs.cu_seqlens_k),
            )

        return Call((q, k, v), forward, lambda d_out: padded(d_out, inputs.cu_seqlens_q, q_len), collect)


def available(backends: tuple[str, ...] = dispatch.BACKENDS) -> tuple[Provider, ...]:
    """Plain PyTorch first: it is what the others are compared with. Then gdpa's backends, fastest first."""
    for backend in backends:
        dispatch.check_name(backend)
    return (Eager(), *(Gdpa(backend) for backend in dispatch.BACKENDS if backend in backends))


def by_name(name: str) -> Provider:
    """The provider called this, in a process that was told its name."""
    return Eager() if name == "eager" else Gdpa(name.removeprefix("gdpa-"))


def broken_products(problem: Problem) -> str | None:
    """Why torch.matmul must not be called here in this dtype, or None. Backends that multiply in fp32 need not ask."""
    if problem.device.type != "cpu" or problem.dtype.itemsize > 2:
        return None
    return _broken_cpu_products(str(problem.dtype).removeprefix("torch."))


@lru_cache(maxsize=2)
def _broken_cpu_products(dtype: str) -> str | None:
    """Tried in another process: where a virtual machine announces AMX without its tiles, the product dies of SIGILL."""
    product = f"import torch; a = torch.ones(4, 256, 256, dtype=torch.{dtype}); a @ a"
    done = subprocess.run([sys.executable, "-c", product], capture_output=True, timeout=120)
    if done.returncode == 0:
        return None
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}"
    return f"torch.matmul in {dtype} ends the process with {how} on this CPU; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 may avoid it"


def _lacks_memory(workload: Workload, pairs: int, dtype: torch.dtype) -> str | None:
    """Asked on a CPU only, where the system ends a process that takes too much; a GPU's allocator raises an error."""
    if workload.problem.device.type != "cpu":
        return None
    free = _free_bytes()
    needed = SCORE_MATRICES * pairs * workload.problem.heads * dtype.itemsize
    if free is None or needed < free:
        return None
    return f"out of memory: needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"


def _free_bytes() -> int | None:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def nearest(name: str, names: tuple[str, ...]) -> str:
    """`; did you mean ...?` where a known name is close."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_choice(argument: str, value: str, names: tuple[str, ...]) -> str:
    if value not in names:
        raise GdpaError(f"{argument}: expected one of {', '.join(names)}, got {value!r}{nearest(value, names)}")
    return value
