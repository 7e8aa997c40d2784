"""Whole problems drawn at random, on each backend, against the oracle: output and gradients inside the error budget.

The draws are the same in every run; `GDPA_FUZZ=N pytest tests/test_properties.py` draws N new ones for each backend.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import pytest
import torch
from helpers import FORMS, Case, assert_neighbours_untouched, make_case, needs_interpreter, poison_sequence, run
from hypothesis import strategies as st
from torch import Tensor

import gdpa
from gdpa import numerics

FUZZ = int(os.environ.get("GDPA_FUZZ", "0"))
SHARDS = 4
EXAMPLES = {"cpu": 75, "triton": 25}  # in each shard

CUSTOM = {
    "relu squared over 64": gdpa.Activation(lambda s: torch.relu(s) ** 2 / 64),
    "gaussian": gdpa.Activation(lambda s: torch.exp(-s * s)),
    "softsign": gdpa.Activation(lambda s: s / (1 + s.abs())),
    "two pieces": gdpa.Activation(lambda s: torch.where(s > 0.5, s, 0.1 * s - 0.2)),
    "clamped": gdpa.Activation(lambda s: s.clamp(-1, 1) * torch.sigmoid(s)),
    "constant": gdpa.Activation(lambda s: torch.full_like(s, 0.5)),
    "log of 2 + s^2": gdpa.Activation(lambda s: torch.log(2 + s * s)),
    "mish": gdpa.Activation(torch.nn.functional.mish),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OFFSETS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Drawn:
    """One problem as hypothesis shows it. `options` are the arguments of `helpers.make_case`."""

    options: dict[str, Any]
    activation: str | tuple[str, ...]
    layout: str
    poison: float | None
    poisoned_sequence: int

    def activations(self) -> Any:
        if isinstance(self.activation, str):
            return CUSTOM.get(self.activation, self.activation)
        return [CUSTOM.get(name, name) for name in self.activation]


@st.composite
def problems(draw: st.DrawFn, longest: int, rows: int) -> Drawn:
    form = draw(st.sampled_from(FORMS))
    batch = draw(st.sampled_from([0, 1, 2, 2, 3, 3]))
    lengths = st.sampled_from([n for n in (0, 1, 2, 5, 16, 17, 31, 32, 33, 63, 64, 65) if n <= longest])
    sides = [draw(st.lists(lengths, min_size=batch, max_size=batch).filter(lambda x: sum(x) <= rows)) for _ in range(2)]
    dtype = draw(st.sampled_from(DTYPES))
    if dtype == torch.float32:
        # A handful of fp32 scores has so few roundings that the yardstick is often lucky: add a larger sequence.
        sides = [[33, *lengths] for lengths in sides]
        batch += 1
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.sampled_from([1, 2] if kv_heads > 1 else [1, 2, 3]))
    head_dim = draw(st.sampled_from([8, 16, 24, 32, 40, 64, 72, 96, 136, 256]))
    names = st.sampled_from([*gdpa.activations(), *CUSTOM])
    activation = draw(names | st.tuples(*[names] * heads))
    # Relative to 1 / sqrt(D), so that exp of a score stays inside fp16.
    factor = draw(st.sampled_from([None, 0.5, -1.0]))
    options = {
        "form": form,
        "q_lengths": tuple(sides[0]),
        "k_lengths": tuple(sides[1]),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": draw(st.sampled_from([head_dim, 8, 24, 64])),
        "dtype": dtype,
        "scale": None if factor is None else factor / head_dim**0.5,
        "out_scale": draw(st.sampled_from([None, 0.125, -2.0, "per-sequence"])),
        "causal": draw(st.booleans()),
        "window_size": draw(st.sampled_from([(-1, -1), (-1, -1), (0, 0), (4, -1), (-1, 3), (17, 9), (40, 0)])),
        "offset_dtypes": (draw(st.sampled_from(OFFSETS)), draw(st.sampled_from(OFFSETS))),
        "tail": (draw(st.sampled_from([0, 0, 3])), draw(st.sampled_from([0, 0, 40]))),
        "seed": draw(st.integers(0, 2**16)),
    }
    poison = draw(st.sampled_from([None, None, float("nan"), float("inf"), float("-inf")])) if batch > 1 else None
    poisoned_sequence = draw(st.integers(0, batch - 1)) if poison is not None else 0
    return Drawn(options, activation, draw(st.sampled_from(["plain", "heads first", "spaced"])), poison, poisoned_sequence)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "spaced":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), float("nan"), dtype=x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    return x


def make(drawn: Drawn) -> Case:
    """The case, its uncovered tail rows full of NaN."""
    case = make_case(activation=drawn.activations(), **drawn.options)
    inputs, d_out = case.inputs, case.d_out * 0.25
    tensors = {name: laid_out(getattr(inputs, name), drawn.layout) for name in "qkv"}
    for name, offsets in (("q", inputs.cu_seqlens_q), ("k", inputs.cu_seqlens_k), ("v", inputs.cu_seqlens_k)):
        if offsets is not None:
            tensors[name][int(offsets[-1]) :] = float("nan")
    if inputs.cu_seqlens_q is not None:
        d_out[int(inputs.cu_seqlens_q[-1]) :] = float("nan")
    return replace(case, inputs=inputs._replace(**tensors), d_out=d_out)


def check(drawn: Drawn, backend: str) -> None:
    case = make(drawn)
    results = run(case, backend)
    if not all(x.isfinite().all() for x in results):
        ideal = numerics.yardstick(case.problem, case.inputs, case.d_out)
        hypothesis.assume(all(x.isfinite().all() for x in ideal))  # the problem itself overflows its dtype
    numerics.check(case.problem, case.inputs, case.d_out, results)
    if drawn.poison is not None:
        dirty = run(poison_sequence(case, drawn.poisoned_sequence, drawn.poison), backend)
        assert_neighbours_untouched(case, drawn.poisoned_sequence, results, dirty)


def search(backend: str, shard: int, longest: int, rows: int) -> None:
    @hypothesis.seed(shard if FUZZ == 0 else int.from_bytes(os.urandom(4), "little"))
    @hypothesis.settings(
        max_examples=EXAMPLES[backend] if FUZZ == 0 else -(-FUZZ // SHARDS),
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(problems(longest, rows))
    def problem_is_inside_the_budget(drawn: Drawn) -> None:
        check(drawn, backend)

    problem_is_inside_the_budget()


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_problems_on_cpu(shard):
    search("cpu", shard, longest=65, rows=160)


@needs_interpreter
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_problems_on_triton_interpreted(shard):
    search("triton", 100 + shard, longest=33, rows=40)


def test_the_search_notices_a_wrong_backend(monkeypatch):
    """A backend that forgets the output's scale must fail the same search."""
    from gdpa.backends import cpu

    forward = cpu.forward

    def wrong(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out_scale):
        return forward(replace(problem, out_scale=1.0), q, k, v, cu_seqlens_q, cu_seqlens_k, None)

    monkeypatch.setattr(cpu, "forward", wrong)
    with pytest.raises(AssertionError, match="out: relative error"):
        search("cpu", 0, longest=17, rows=40)
