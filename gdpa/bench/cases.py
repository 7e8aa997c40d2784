"""What is computed: the three production workloads, their data, and how much work they are.

    self    every sequence attends to itself                         queries and keys jagged, same lengths
    pma     pooling: a few learned seeds, shared by the batch,
            attend to every sequence                                 queries shared, keys jagged
    pffn    personalised feed-forward: every sequence attends to
            its own F generated keys and values                      queries jagged, keys dense

FLOPs count allowed (query, key) pairs, never padding: 2 (D + Dv) per pair and head forward, 2 (3 D + 2 Dv) backward.
Bytes count each input once and each output once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gdpa.activations import resolve
from gdpa.data import traffic
from gdpa.jagged import offsets_from_lengths
from gdpa.numerics import Inputs
from gdpa.problem import Problem, allowed_pairs, describe, row_ranges

Kind = Literal["self", "pma", "pffn"]
Mode = Literal["forward", "backward"]
MODES: tuple[Mode, ...] = ("forward", "backward")

_SUFFIX = {"uniform": "jag", "lognormal": "tail", "power-law": "power"}


@dataclass(frozen=True)
class Case:
    """One workload. `length` caps the jagged side; `fixed` is the other side's rows: PMA's seeds, PFFN's keys."""

    kind: Kind
    batch: int
    heads: int
    dim: int
    length: int
    fixed: int = 0
    lengths: str = "uniform"
    seed: int = 0

    @property
    def name(self) -> str:
        sizes = {"self": f"{self.length}", "pma": f"{self.fixed}x{self.length}", "pffn": f"{self.length}x{self.fixed}"}
        return f"{self.kind}-{sizes[self.kind]}-{_SUFFIX[self.lengths]}"

    def facts(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Workload:
    """A case with its tensors, on a device, in a dtype, with an activation."""

    case: Case
    activation: str
    problem: Problem
    inputs: Inputs
    d_out: Tensor

    @property
    def q_rows(self) -> list[tuple[int, int]]:
        """(first row, length) of every sequence's queries."""
        return row_ranges(self.inputs.cu_seqlens_q, self.problem.batch, self.problem.query_rows)

    @property
    def k_rows(self) -> list[tuple[int, int]]:
        return row_ranges(self.inputs.cu_seqlens_k, self.problem.batch, self.problem.key_rows)

    @property
    def pairs(self) -> int:
        return allowed_pairs(self.problem, self.inputs.cu_seqlens_q, self.inputs.cu_seqlens_k)

    def flops(self, mode: Mode) -> int:
        """Two products forward, five backward: three of depth D (S again, dQ, dK) and two of depth Dv (dP, dV)."""
        dim, value_dim = self.problem.head_dim, self.problem.value_dim
        per_pair = 2 * (dim + value_dim) if mode == "forward" else 2 * (3 * dim + 2 * value_dim)
        return per_pair * self.problem.heads * self.pairs

    def bytes(self, mode: Mode) -> int:
        """q, k, v read, the output written; backward reads q, k, v, d_out and writes dq, dk, dv. No offsets."""
        q, k, v = (x.numel() * x.element_size() for x in (self.inputs.q, self.inputs.k, self.inputs.v))
        out = self.d_out.numel() * self.d_out.element_size()
        return q + k + v + out if mode == "forward" else 2 * (q + k + v) + out


def production(
    device: torch.device,
    *,
    batch: int | None = None,
    heads: int | None = None,
    dim: int | None = None,
    lengths: str = "uniform",
) -> tuple[Case, ...]:
    """The three workloads: at production size on a GPU, scaled to a few minutes of a 2-core CPU elsewhere."""
    if device.type == "cpu":
        batch, heads, dim = batch or 32, heads or 4, dim or 64
        caps = {"self": 512, "pma": 1024, "pffn": 512}
    else:
        batch, heads, dim = batch or 1152, heads or 4, dim or 128
        caps = {"self": 1024, "pma": 2048, "pffn": 1024}
    return (
        Case("self", batch, heads, dim, caps["self"], lengths=lengths),
        Case("pma", batch, heads, dim, caps["pma"], fixed=32, lengths=lengths),
        Case("pffn", batch, heads, dim, caps["pffn"], fixed=256, lengths=lengths),
    )


def build(case: Case, activation: str, dtype: torch.dtype, device: torch.device) -> Workload:
    """Draw the tensors: lengths from the case's generator, values standard normal."""
    lengths = traffic.GENERATORS[case.lengths](case.batch, case.length, seed=case.seed)
    offsets = offsets_from_lengths(lengths).to(device)
    total = int(lengths.sum())
    generator = torch.Generator(device=device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, case.heads, case.dim, generator=generator, device=device, dtype=torch.float32).to(dtype)

    if case.kind == "self":
        inputs = Inputs(normal(total), normal(total), normal(total), offsets, offsets)
    elif case.kind == "pma":
        inputs = Inputs(normal(case.fixed), normal(total), normal(total), None, offsets)
    else:
        inputs = Inputs(normal(total), normal(case.batch, case.fixed), normal(case.batch, case.fixed), offsets, None)
    problem = problem_of(inputs, activation)
    d_out = normal(case.batch, case.fixed) if case.kind == "pma" else normal(total)
    return Workload(case, activation, problem, inputs, d_out)


def problem_of(inputs: Inputs, activation: str) -> Problem:
    keys = list(resolve(activation, inputs.q.shape[-2]))
    q, k, v, cu_seqlens_q, cu_seqlens_k, _ = inputs
    return describe(q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, keys, None, 1.0, (-1, -1), False)
