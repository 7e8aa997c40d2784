"""Plain PyTorch: the computation as one writes it by hand, the same under torch.compile, and FlexAttention's logarithm trick.

All three work on tensors padded to the longest sequence, (B, H, S, D), made before the clock starts.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.bench.cases import Workload
from gdpa.bench.providers import Call, Provider, as_leaves, lacks_memory
from gdpa.jagged import pack, unpack
from gdpa.numerics import Results
from gdpa.problem import Problem


@dataclass(frozen=True)
class Padded:
    """A workload's tensors padded to its longest sequence, and the way back."""

    workload: Workload

    def tensor(self, x: Tensor, queries: bool) -> Tensor:
        offsets = self.workload.inputs.cu_seqlens_q if queries else self.workload.inputs.cu_seqlens_k
        full = x if offsets is None else unpack(x, offsets, self.workload.longest[0 if queries else 1])
        return full.transpose(-3, -2).contiguous()  # [B, H, S, D]; shared queries [H, S, D]

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        inputs = self.workload.inputs
        return as_leaves(self.tensor(inputs.q, True), self.tensor(inputs.k, False), self.tensor(inputs.v, False))

    def collect(self, results: Results) -> Results:
        inputs = self.workload.inputs

        def packed(x: Tensor | None, offsets: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            x = x.transpose(-3, -2)
            return x.contiguous() if offsets is None else pack(x, offsets.diff())[0]

        out = packed(results.out, inputs.cu_seqlens_q)
        assert out is not None
        return Results(
            out,
            packed(results.dq, inputs.cu_seqlens_q),
            packed(results.dk, inputs.cu_seqlens_k),
            packed(results.dv, inputs.cu_seqlens_k),
        )

    def call(self, leaves: tuple[Tensor, Tensor, Tensor], forward: Callable[[], Tensor]) -> Call:
        return Call(leaves, forward, lambda d_out: self.tensor(d_out, True), self.collect)


# torch's own functions, as one would write them.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda s: s,
    "relu": F.relu,
    "relu2": lambda s: F.relu(s).square(),
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda s: F.gelu(s, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "elu": F.elu,
    "hardswish": F.hardswish,
    "exp": torch.exp,
}


class Eager(Provider):
    """f(scale * q @ k^T) @ v with a mask over the padded keys, and those that are later than the query."""

    name = "eager"

    def reason_against(self, workload: Workload, gradients: bool) -> str | None:
        q_len, k_len = workload.longest
        problem = workload.problem
        return broken_products(problem) or lacks_memory(workload, problem.batch * q_len * k_len, problem.dtype, gradients)

    def prepare(self, workload: Workload) -> Call:
        problem, inputs = workload.problem, workload.inputs
        f = FUNCTIONS[workload.activation]
        padded = Padded(workload)
        q, k, v = padded.leaves()
        masked: Tensor | None = None
        rows = torch.arange(k.shape[-2], device=k.device)
        if inputs.cu_seqlens_k is not None:
            masked = (rows >= inputs.cu_seqlens_k.diff()[:, None])[:, None, None, :]
        if workload.case.causal:
            later = rows > rows[:, None]  # queries and keys are padded alike
            masked = later if masked is None else masked | later

        def forward() -> Tensor:
            s = problem.scale * (q @ k.transpose(-1, -2))
            p = f(s)
            if masked is not None:
                p = p.masked_fill(masked, 0)
            return p @ v

        return padded.call((q, k, v), forward)


class Compiled(Eager):
    """torch.compile of the same function."""

    name = "compile"

    def reason_against(self, workload: Workload, gradients: bool) -> str | None:
        return missing_compiler(workload.problem.device) or super().reason_against(workload, gradients)

    def prepare(self, workload: Workload) -> Call:
        call = super().prepare(workload)
        return replace(call, forward=compiled(call.forward))


# log f, for the activations that are never negative. Where f is 0 its logarithm is -inf, with a slope of zero.
LOGARITHMS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda s: s,
    "sigmoid": F.logsigmoid,
    "softplus": lambda s: F.softplus(s).log(),
    "relu": lambda s: torch.where(s > 0, s.log(), -torch.inf),
    "relu2": lambda s: torch.where(s > 0, 2 * s.log(), -torch.inf),
}


class Flex(Provider):
    """FlexAttention with log f as its score: softmax(log f) = f / sum f, and exp(logsumexp(log f)) gives the sum back."""

    name = "flex"

    def reason_against(self, workload: Workload, gradients: bool) -> str | None:
        if workload.activation not in LOGARITHMS:
            return f"{workload.activation} takes negative values, which have no logarithm"
        if workload.problem.device.type != "cpu":
            return None
        if gradients:
            return "FlexAttention has no backward on a CPU"
        # Uncompiled, it materialises the scores.
        q_len, k_len = workload.longest
        return lacks_memory(workload, workload.problem.batch * q_len * k_len, torch.float32, gradients)

    def prepare(self, workload: Workload) -> Call:
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        padded, inputs = Padded(workload), workload.inputs
        leaves = padded.leaves()
        log_f = LOGARITHMS[workload.activation]
        batch, on_gpu = workload.problem.batch, workload.problem.device.type == "cuda"
        mask, causal = None, workload.case.causal
        if causal or inputs.cu_seqlens_q is not None or inputs.cu_seqlens_k is not None:
            q_len, k_len = workload.longest
            device = workload.problem.device
            queries, keys = (
                torch.tensor([length for _, length in rows], device=device) for rows in (workload.q_rows, workload.k_rows)
            )

            def inside(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
                return (row < queries[b]) & (column < (torch.minimum(keys[b], row + 1) if causal else keys[b]))

            mask = create_block_mask(inside, batch, None, q_len, k_len, device=device)

        def score(s: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return log_f(s)

        def forward() -> Tensor:
            # On a CPU it has no backward, and refuses leaves that might ask for one.
            q, k, v = leaves if on_gpu else (x.detach() for x in leaves)
            if q.dim() == 3:  # seeds shared by the batch
                q = q.expand(batch, *q.shape)
            out, sums = flex_attention(q, k, v, score_mod=score, block_mask=mask, return_aux=AuxRequest(lse=True))
            assert sums.lse is not None
            return out * sums.lse.exp()[..., None].to(out.dtype)

        return padded.call(leaves, compiled(forward) if on_gpu else forward)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile, which raises where it would run something eagerly without a word: at a graph break, or after too many cases."""
    torch._dynamo.config.recompile_limit = 4096
    torch._dynamo.config.accumulated_recompile_limit = 4096
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    result: Callable[..., Tensor] = torch.compile(function, dynamic=False, fullgraph=True)
    return result


def broken_products(problem: Problem) -> str | None:
    """Why torch.matmul must not be called here in this dtype, or None. Backends that multiply in fp32 need not ask."""
    if problem.device.type != "cpu" or problem.dtype.itemsize > 2:
        return None
    return broken_cpu_products(str(problem.dtype).removeprefix("torch."))


def missing_compiler(device: torch.device) -> str | None:
    """Why torch.compile cannot be used on this device, or None."""
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        return f"torch.compile needs a C++ compiler on a CPU, and there is no {compiler}"
    return None


@lru_cache(maxsize=2)
def broken_cpu_products(dtype: str) -> str | None:
    """Tried in another process: where a virtual machine announces AMX without its tiles, the product dies of SIGILL."""
    product = f"import torch; a = torch.ones(4, 256, 256, dtype=torch.{dtype}); a @ a"
    done = subprocess.run([sys.executable, "-c", product], capture_output=True, timeout=120)
    if done.returncode == 0:
        return None
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}"
    return f"torch.matmul in {dtype} ends the process with {how} on this CPU; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 may avoid it"
