"""`gdpa check`: the numerics of every backend that runs here, over the activation table, held to the error budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import gdpa
from gdpa import dispatch
from gdpa.activations import resolve
from gdpa.numerics import Inputs, Results, Verdict, judge
from gdpa.problem import Problem, describe

# Odd lengths, both sides of the tile sizes, and sequences that are empty on one side or on both.
QUERY_LENGTHS = (65, 0, 1, 40, 0)
KEY_LENGTHS = (33, 17, 64, 0, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = ("packed", "dense keys", "shared queries", "causal")
DIM, VALUE_DIM, HEADS, KV_HEADS = 32, 24, 4, 2


@dataclass
class Line:
    """One backend, dtype and activation: the worst verdict of each tensor over the forms, or why there is none."""

    backend: str
    dtype: torch.dtype
    activation: str
    worst: dict[str, Verdict]
    note: str | None = None

    @property
    def passed(self) -> bool:
        return self.note is None and all(verdict.passed for verdict in self.worst.values())


def unavailable(backend: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a backend is not checked in this dtype, or None."""
    problem = _problem(*_draw("packed", dtype, device), "gelu", (-1, -1))
    return dispatch.reason_against(backend, problem)


def check_one(backend: str, dtype: torch.dtype, activation: str, device: torch.device) -> Line:
    worst: dict[str, Verdict] = {}
    for form in FORMS:
        inputs, d_out = _draw(form, dtype, device)
        window = (-1, 0) if form == "causal" else (-1, -1)
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        try:
            q, k, v = leaves
            out = gdpa.attention_varlen(
                q,
                k,
                v,
                inputs.cu_seqlens_q,
                inputs.cu_seqlens_k,
                activation=activation,
                causal=form == "causal",
                backend=backend,
            )
            results = Results(out.detach(), *torch.autograd.grad(out, leaves, d_out))
            verdicts = judge(_problem(inputs, d_out, activation, window), inputs, d_out, results)
        except Exception as error:
            return Line(backend, dtype, activation, worst, f"{form}: {type(error).__name__}: {error}".split("\n")[0])
        for verdict in verdicts:
            if verdict.name not in worst or not verdict.budget_used <= worst[verdict.name].budget_used:
                worst[verdict.name] = verdict
    return Line(backend, dtype, activation, worst)


def _draw(form: str, dtype: torch.dtype, device: torch.device) -> tuple[Inputs, Tensor]:
    """The same values on every device: drawn on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    def offsets(lengths: tuple[int, ...]) -> Tensor:
        return gdpa.offsets_from_lengths(torch.tensor(lengths)).to(device)

    batch, queries, keys, fixed = len(QUERY_LENGTHS), sum(QUERY_LENGTHS), sum(KEY_LENGTHS), 33
    if form == "dense keys":
        k, v = normal(batch, fixed, KV_HEADS, DIM), normal(batch, fixed, KV_HEADS, VALUE_DIM)
        return Inputs(normal(queries, HEADS, DIM), k, v, offsets(QUERY_LENGTHS)), normal(queries, HEADS, VALUE_DIM)
    k, v = normal(keys, KV_HEADS, DIM), normal(keys, KV_HEADS, VALUE_DIM)
    if form == "shared queries":
        q, d_out = normal(7, HEADS, DIM), normal(batch, 7, HEADS, VALUE_DIM)
        return Inputs(q, k, v, None, offsets(KEY_LENGTHS)), d_out
    q, d_out = normal(queries, HEADS, DIM), normal(queries, HEADS, VALUE_DIM)
    return Inputs(q, k, v, offsets(QUERY_LENGTHS), offsets(KEY_LENGTHS)), d_out


def _problem(inputs: Inputs, d_out: Tensor, activation: str, window: tuple[int, int]) -> Problem:
    q, k, v, cu_seqlens_q, cu_seqlens_k, _ = inputs
    keys = list(resolve(activation, HEADS))
    return describe(q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, keys, None, 1.0, window, False)
