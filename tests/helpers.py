"""Random problems in every form of the public API, and how tests run them on a named backend.

`make_case` draws inputs; `run` calls the public functions forward and backward with poisoned memory and returns what
`gdpa.numerics` judges; `check` does both. No test states a tolerance of its own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa import numerics
from gdpa.activations import resolve
from gdpa.numerics import Inputs, Results
from gdpa.problem import Problem, check_window, describe

FORMS = ("packed", "dense", "dense-key", "shared-query")
BACKENDS = ("reference", "cpu", "triton")

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_COMPILER = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
needs_interpreter = pytest.mark.skipif(
    not (HAS_TRITON and INTERPRETED),
    reason="the Triton interpreter is off: this machine has a GPU (see tests/gpu) or no triton",
)
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="Inductor needs a C++ compiler; none was found")


def backend_params() -> list[Any]:
    """Every backend as a test parameter; triton runs interpreted on CPU tensors, or skips, saying so."""
    return [pytest.param(name, marks=needs_interpreter) if name == "triton" else name for name in BACKENDS]


def clean_env(**extra: str) -> dict[str, str]:
    """The environment of a subprocess that imports gdpa from this checkout with the Triton interpreter off."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH", ""))))
    env.setdefault("OMP_NUM_THREADS", "1")
    return env | extra


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised tensors hold NaN (integers: their largest value), so that what a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@dataclass(frozen=True)
class Case:
    """One call of the public API: its inputs, its keywords, an upstream gradient, and its `Problem` for the oracle."""

    form: str
    problem: Problem
    inputs: Inputs
    d_out: Tensor
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def call(self, q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
        keywords = dict(self.keywords, backend=backend)
        if self.inputs.out_scale is not None:
            keywords["out_scale"] = self.inputs.out_scale
        if self.form == "dense":
            return gdpa.attention(q, k, v, **keywords)
        return gdpa.attention_varlen(q, k, v, self.inputs.cu_seqlens_q, self.inputs.cu_seqlens_k, **keywords)

    def explain(self, backend: str | None = None) -> gdpa.Explanation:
        keywords = dict(self.keywords, backend=backend)
        if self.inputs.out_scale is not None:
            keywords["out_scale"] = self.inputs.out_scale
        return gdpa.explain(*self.inputs[:5], **keywords)

    def with_inputs(self, **changes: Tensor) -> Case:
        """The same call on other tensors of the same shapes."""
        return replace(self, inputs=self.inputs._replace(**changes))


def offsets_of(lengths: Sequence[int], dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return torch.tensor(ends, dtype=dtype, device=device)


def make_case(
    form: str = "packed",
    *,
    q_lengths: Sequence[int] = (5, 0, 7, 1),
    k_lengths: Sequence[int] | None = None,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    activation: Any = "gelu",
    scale: float | None = None,
    out_scale: float | str | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    offset_dtypes: tuple[torch.dtype, torch.dtype] = (torch.int32, torch.int32),
    tail: tuple[int, int] = (0, 0),
    seed: int = 0,
    device: str = "cpu",
    spread: float = 1.0,
    deterministic: bool | None = False,
) -> Case:
    """Draw a problem. Dense sides take the first length for every sequence; keys are as long as the queries by default.

    `tail` appends rows that no sequence covers to packed queries and keys; `out_scale="per-sequence"` draws (B,). `deterministic`
    is said for every call, since the memory that `run` poisons turns torch's flag on.
    """
    k_lengths = q_lengths if k_lengths is None else k_lengths
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    batch = len(q_lengths if form != "shared-query" else k_lengths)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * spread).to(device, dtype)

    cu_q = offsets_of(q_lengths, offset_dtypes[0], device) if form in ("packed", "dense-key") else None
    cu_k = offsets_of(k_lengths, offset_dtypes[1], device) if form in ("packed", "shared-query") else None
    first_q, first_k = (lengths[0] if len(lengths) else 3 for lengths in (q_lengths, k_lengths))
    if cu_q is not None:
        q = draw(sum(q_lengths) + tail[0], heads, head_dim)
    else:
        q = draw(batch, first_q, heads, head_dim) if form == "dense" else draw(first_q, heads, head_dim)
    key_rows = (sum(k_lengths) + tail[1],) if cu_k is not None else (batch, first_k)
    k, v = draw(*key_rows, kv_heads, head_dim), draw(*key_rows, kv_heads, value_dim)

    keywords: dict[str, Any] = {
        "activation": activation,
        "scale": scale,
        "causal": causal,
        "window_size": window_size,
        "deterministic": deterministic,
    }
    factors = None
    if out_scale == "per-sequence":
        factors = torch.rand(batch, generator=generator).add(0.25).to(device)
    elif out_scale is not None:
        keywords["out_scale"] = out_scale
    problem = describe(
        q,
        k,
        v,
        cu_q,
        cu_k,
        None,
        None,
        resolve(activation, heads),
        scale,
        float(out_scale) if isinstance(out_scale, (int, float)) else 1.0,
        check_window(window_size, causal),
        False,
    )
    d_out = draw(*problem.output_shape)
    return Case(form, problem, Inputs(q, k, v, cu_q, cu_k, factors), d_out, keywords)


def leaves(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as autograd leaves that keep their strides."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    return q, k, v


def run(case: Case, backend: str) -> Results:
    """Forward and backward through the public API on `backend`, which must be the one that runs."""
    assert case.explain(backend).backend == backend
    q, k, v = leaves(case.inputs)
    with poisoned_memory():
        out = case.call(q, k, v, backend)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), case.d_out)
    return Results(out.detach(), dq, dk, dv)


def check_float64(case: Case, backend: str) -> None:
    """Run on `backend` and hold float64 results to the oracle, which is float64 too and has no digits to spare for the budget: the two
    differ by the order of their sums. Each term is rounded once."""
    q, k, v, *_ = case.inputs
    rows = max(x.numel() // (x.shape[-1] * x.shape[-2]) for x in (q, k, case.d_out))
    terms = max(q.shape[-1], v.shape[-1], rows * q.shape[-2] // k.shape[-2])
    truth = numerics.truth(case.problem, case.inputs, case.d_out)
    for name, got, right in zip(Results._fields, run(case, backend), truth, strict=True):
        assert got.dtype == torch.float64
        assert (got - right).norm() <= terms**0.5 * torch.finfo(torch.float64).eps * right.norm(), name


def check(case: Case, backend: str) -> Results:
    """Run on `backend` and hold the output and the three gradients to the error budget."""
    results = run(case, backend)
    numerics.check(case.problem, case.inputs, case.d_out, results)
    return results


def rows_of(offsets: Tensor | None, sequence: int) -> int | slice:
    """Where one sequence's rows are in a packed tensor, or in a dense one."""
    return sequence if offsets is None else slice(int(offsets[sequence]), int(offsets[sequence + 1]))


def poison_sequence(case: Case, sequence: int, value: float) -> Case:
    """The case with every input row of one sequence, and its upstream gradient, set to `value`. Shared queries stay."""
    inputs, d_out = case.inputs, case.d_out.clone()
    _, _, _, cu_q, cu_k, _ = inputs
    places = {"q": rows_of(cu_q, sequence), "k": rows_of(cu_k, sequence), "v": rows_of(cu_k, sequence)}
    if case.form == "shared-query":
        del places["q"]
    tensors = {name: same_strides(getattr(inputs, name)) for name in places}
    for name, rows in places.items():
        tensors[name][rows] = value
    d_out[rows_of(cu_q, sequence)] = value
    return replace(case, inputs=inputs._replace(**tensors), d_out=d_out)


def same_strides(x: Tensor) -> Tensor:
    """A copy that keeps the strides, so that a kernel takes the same path."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def assert_neighbours_untouched(case: Case, sequence: int, clean: Results, dirty: Results, reordered: Sequence[str] = ()) -> None:
    """Everything outside the poisoned sequence is bit for bit what it was; the results named `reordered`, whose terms may be rounded and
    added in any order, are within the rounding of the largest: a poison that reached them would not be finite."""
    _, _, _, cu_q, cu_k, _ = case.inputs
    for name, was, now, offsets in zip(Results._fields, clean, dirty, (cu_q, cu_q, cu_k, cu_k), strict=True):
        if was is None or now is None:
            continue  # nobody asked for it
        if case.form == "shared-query" and name == "dq":
            continue  # a sum over the batch, the poisoned sequence included
        keep = torch.ones(now.shape[0], dtype=torch.bool, device=now.device)
        keep[rows_of(offsets, sequence)] = False
        now, was = now[keep], was[keep]
        same = torch.equal(now, was)
        if name in reordered:
            same = torch.allclose(
                now.double(), was.double(), rtol=2**-7, atol=2**-7 * float(was.abs().max()) if was.numel() else 0.0
            )
        assert same, f"{name}: the poison of sequence {sequence} reached another"
        assert now.isfinite().all(), f"{name}: not finite"


def spy(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[tuple[Any, ...]]:
    """Record the arguments of every call of `module.name`, which still runs."""
    calls: list[tuple[Any, ...]] = []
    function: Callable[..., Any] = getattr(module, name)

    def recorded(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        return function(*arguments, **keywords)

    monkeypatch.setattr(module, name, recorded)
    return calls


def gradients(case: Case, out: Tensor, inputs: tuple[Tensor, ...]) -> Results:
    return Results(out.detach(), *torch.autograd.grad(out, inputs, case.d_out))


def assert_same(results: Results, expected: Results) -> None:
    for name, x, y in zip(Results._fields, results, expected, strict=True):
        assert torch.equal(x, y), f"{name} differs by {(x - y).abs().max()}"


class Block(torch.nn.Module):
    """A residual attention block over a packed batch."""

    def __init__(self, width: int = 16, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.project = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (self.heads, -1)).chunk(3, dim=-1)
        return x + self.out(gdpa.attention_varlen(q, k, v, offsets, offsets, activation="silu").flatten(1))
