"""What is computed: cases by name, their data, and how much work they are.

    self-L        every sequence attends to itself, L rows
    causal-L      the same, each row to those up to itself
    pffn-LxF      personalised feed-forward: L queries attend to the sequence's own F generated keys and values
    pma-SxL       pooling: S learned seeds, shared by the batch, attend to a sequence of L rows

A suffix says that lengths vary: -jag uniform on [1, L], -tail lognormal (median 120, 5 % empty), -power a power law, all capped
at L; without one every sequence has L rows. Varying sides are packed with offsets; the others are dense (B, S, H, D) tensors.

FLOPs count allowed (query, key) pairs, never padding: 2 (D + Dv) per pair and head forward, 2 (3 D + 2 Dv) backward.
Bytes count each input once and each output once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gdpa.activations import resolve
from gdpa.data import traffic
from gdpa.errors import GdpaError
from gdpa.jagged import offsets_from_lengths
from gdpa.numerics import Inputs
from gdpa.problem import Problem, describe, row_ranges

Kind = Literal["self", "causal", "pffn", "pma"]
Mode = Literal["forward", "backward", "both"]
MODES: tuple[Mode, ...] = get_args(Mode)

SUFFIXES = {"": "dense", "-jag": "uniform", "-tail": "lognormal", "-power": "power-law"}
_NAME = re.compile(rf"(self|causal)-(\d+)({'|'.join(SUFFIXES)})|(pffn|pma)-(\d+)x(\d+)({'|'.join(SUFFIXES)})")

FULL = (
    "self-256",
    "self-512",
    "self-1024",
    "self-2048",
    "self-512-jag",
    "self-2048-jag",
    "self-1024-tail",
    "pffn-1024x256",
    "pffn-2048x256",
    "pffn-2048x128",
    "pffn-512x512-jag",
    "pffn-1024x256-jag",
    "pffn-2048x2048-jag",
    "pma-32x2048-jag",
)
CAUSAL = (
    "causal-256",
    "causal-512",
    "causal-1024",
    "causal-2048",
    "causal-512-jag",
    "causal-2048-jag",
    "causal-1024-tail",
)
SUITES = {
    "full": FULL,
    "causal": CAUSAL,
    "production": ("self-512-jag", "pma-32x2048-jag", "pffn-1024x256-jag"),
    "quick": ("self-512-jag", "pma-32x1024-jag", "pffn-512x256-jag", "self-256"),
}


@dataclass(frozen=True)
class Size:
    """What every case of a run shares."""

    batch: int
    heads: int
    dim: int
    seed: int = 0


GPU_SIZE = Size(batch=1152, heads=4, dim=128)  # the published GDPA benchmark's
CPU_SIZE = Size(batch=32, heads=4, dim=64)


@dataclass(frozen=True)
class Case:
    """One workload. `length` caps the side that may vary; `fixed` is the other side's rows: PMA's seeds, PFFN's keys."""

    kind: Kind
    batch: int
    heads: int
    dim: int
    length: int
    fixed: int = 0
    lengths: str = "uniform"  # a generator of gdpa.data.traffic, or dense
    seed: int = 0

    @classmethod
    def named(cls, name: str, size: Size) -> Case:
        """The case of this name; any sizes may stand in it, so that a user's own shape can be measured."""
        match = _NAME.fullmatch(name)
        if match is None:
            close = difflib.get_close_matches(name, (*FULL, *CAUSAL), n=3, cutoff=0.4)
            hint = f"; nearest: {', '.join(close)}" if close else ""
            raise GdpaError(
                f"--case: expected a name like self-512, causal-512, pffn-1024x256 or pma-32x2048, with -jag, -tail or -power where "
                f"lengths vary (gdpa bench --list), got {name!r}{hint}"
            )
        kind: Kind
        if match[1]:
            kind, length, fixed, suffix = "self" if match[1] == "self" else "causal", int(match[2]), 0, match[3]
        elif match[4] == "pffn":
            kind, length, fixed, suffix = "pffn", int(match[5]), int(match[6]), match[7]
        else:
            kind, length, fixed, suffix = "pma", int(match[6]), int(match[5]), match[7]
        if length < 1 or (kind in ("pffn", "pma") and fixed < 1):
            raise GdpaError(f"--case: expected at least one row on either side, got {name!r}")
        return cls(kind, size.batch, size.heads, size.dim, length, fixed, SUFFIXES[suffix], size.seed)

    @property
    def name(self) -> str:
        sizes = {"pma": f"{self.fixed}x{self.length}", "pffn": f"{self.length}x{self.fixed}"}
        suffix = next(suffix for suffix, lengths in SUFFIXES.items() if lengths == self.lengths)
        return f"{self.kind}-{sizes.get(self.kind, self.length)}{suffix}"

    @property
    def causal(self) -> bool:
        return self.kind == "causal"

    @property
    def of_itself(self) -> bool:
        """Whether sequences attend to themselves: queries and keys share their rows."""
        return self.kind in ("self", "causal")

    @property
    def dense(self) -> bool:
        """Whether it is a call of gdpa.attention, on 4-D tensors. Shared seeds need offsets, even of equal lengths."""
        return self.lengths == "dense" and self.kind != "pma"

    @cached_property
    def drawn(self) -> Tensor:
        """The lengths of the varying side, (batch,)."""
        if self.lengths == "dense":
            return torch.full((self.batch,), self.length, dtype=torch.int64)
        return traffic.GENERATORS[self.lengths](self.batch, self.length, seed=self.seed)

    @property
    def pairs(self) -> int:
        """Allowed (query, key) pairs over the batch."""
        return int((self.drawn * (self.drawn + 1) // 2).sum()) if self.causal else self.scores

    @property
    def scores(self) -> int:
        """Pairs over the batch, allowed or not: what there is of scores where they are all computed."""
        rows = self.drawn
        return int((rows * rows).sum()) if self.of_itself else int(rows.sum()) * self.fixed

    def flops(self, mode: Mode) -> int:
        """Two products forward, five backward: S again, dP, dQ, dK, dV. D = Dv here, so 2.5 times the forward's."""
        per_pair = {"forward": 4, "backward": 10, "both": 14}[mode] * self.dim
        return per_pair * self.heads * self.pairs

    def bytes(self, mode: Mode, itemsize: int) -> int:
        """q, k, v read, the output written; backward reads q, k, v, d_out and writes dq, dk, dv. No offsets.

        Shared seeds are read once, not once per sequence.
        """
        rows = int(self.drawn.sum())
        queries, keys, outputs = {
            "self": (rows, rows, rows),
            "causal": (rows, rows, rows),
            "pffn": (rows, self.batch * self.fixed, rows),
            "pma": (self.fixed, rows, self.batch * self.fixed),
        }[self.kind]
        forward, backward = queries + 2 * keys + outputs, 2 * (queries + 2 * keys) + outputs
        moved = {"forward": forward, "backward": backward, "both": forward + backward}[mode]
        return moved * self.heads * self.dim * itemsize

    def floor_ms(self, mode: Mode, itemsize: int, rate: float, bandwidth: float) -> float:
        """No less than this, at `rate` FLOP/s and `bandwidth` bytes/s. A backward waits for its forward, so floors add up."""
        if mode == "both":
            return sum(self.floor_ms(part, itemsize, rate, bandwidth) for part in ("forward", "backward"))
        return max(self.flops(mode) / rate, self.bytes(mode, itemsize) / bandwidth) * 1e3

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def chosen(names: Iterable[str] | None, suite: str | None, gpu: bool, **overrides: int | None) -> tuple[Case, ...]:
    """The cases asked for, at the size of the device they run on unless the user says otherwise.

    The quick suite has the size of a CPU anywhere.
    """
    if names is None and suite is None:
        suite = "full" if gpu else "quick"
    size = GPU_SIZE if gpu and suite != "quick" else CPU_SIZE
    size = replace(size, **{name: value for name, value in overrides.items() if value is not None})
    listed = [*(SUITES[suite] if suite is not None else ()), *(names or ())]
    found = [Case.named(name, size) for name in listed]
    return tuple({case.name: case for case in found}.values())  # self-8 and self-08 are one


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
    def longest(self) -> tuple[int, int]:
        """The most queries and the most keys of one sequence."""
        q_len, k_len = (max((n for _, n in rows), default=0) for rows in (self.q_rows, self.k_rows))
        return q_len, k_len

    def with_activation(self, activation: str) -> Workload:
        """The same tensors under another activation."""
        return replace(self, activation=activation, problem=problem_of(self.inputs, activation, self.case.causal))


def build(case: Case, activation: str, dtype: torch.dtype, device: torch.device) -> Workload:
    """Draw the tensors: lengths from the case's generator, values standard normal."""
    generator = torch.Generator(device=device).manual_seed(case.seed)
    rows = int(case.drawn.sum())

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, case.heads, case.dim, generator=generator, device=device, dtype=dtype)

    varying = (case.batch, case.length) if case.dense else (rows,)
    offsets = None if case.dense else offsets_from_lengths(case.drawn).to(device)
    fixed = (case.batch, case.fixed)
    if case.of_itself:
        inputs = Inputs(normal(*varying), normal(*varying), normal(*varying), offsets, offsets)
    elif case.kind == "pffn":
        inputs = Inputs(normal(*varying), normal(*fixed), normal(*fixed), offsets, None)
    else:
        inputs = Inputs(normal(case.fixed), normal(rows), normal(rows), None, offsets)
    d_out = normal(*(fixed if case.kind == "pma" else varying))
    return Workload(case, activation, problem_of(inputs, activation, case.causal), inputs, d_out)


def problem_of(inputs: Inputs, activation: str, causal: bool = False) -> Problem:
    keys = list(resolve(activation, inputs.q.shape[-2]))
    q, k, v, cu_seqlens_q, cu_seqlens_k, _ = inputs
    return describe(q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, keys, None, 1.0, (-1, 0) if causal else (-1, -1), False)
