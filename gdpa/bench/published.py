"""The published GDPA benchmark's shapes on a GPU: how near the portable kernels come to what the hardware allows.

    python -m gdpa.bench.published [--activation silu --activation gelu_tanh] [--json FILE]

B = 1152, H = 4, D = 128, bf16. `self-L`: queries and keys of L rows, packed. `pffn-LxF`: L queries, F dense keys; `-jag`: queries
uniform on [1, L]. The floor is max(FLOPs / R, bytes / W), with R the rate of an 8192^3 bf16 matmul and W a copy's bandwidth,
both measured in the same rounds as the kernels; see docs/benchmarking.md. A case is checked against the oracle before it is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import gdpa
from gdpa.activations import resolve
from gdpa.bench.machine import header
from gdpa.bench.timing import clock, release
from gdpa.data import traffic
from gdpa.jagged import offsets_from_lengths
from gdpa.numerics import Inputs, Results, judge
from gdpa.problem import describe

BATCH, HEADS, DIM = 1152, 4, 128
GATED_BATCH = 4


@dataclass(frozen=True)
class Shape:
    queries: int
    keys: int
    own_keys: bool = False  # keys dense (pffn), or the queries' own rows (self)
    jagged: bool = False

    @property
    def name(self) -> str:
        sizes = f"pffn-{self.queries}x{self.keys}" if self.own_keys else f"self-{self.queries}"
        return sizes + ("-jag" if self.jagged else "")


SHAPES = (
    Shape(256, 256),
    Shape(512, 512),
    Shape(1024, 1024),
    Shape(2048, 2048),
    Shape(1024, 256, own_keys=True),
    Shape(2048, 256, own_keys=True),
    Shape(2048, 128, own_keys=True),
    Shape(512, 512, own_keys=True, jagged=True),
    Shape(1024, 256, own_keys=True, jagged=True),
    Shape(2048, 2048, own_keys=True, jagged=True),
    Shape(2048, 2048, jagged=True),
)


@dataclass(frozen=True)
class Work:
    """A shape's tensors, and what they cost."""

    inputs: Inputs
    d_out: Tensor
    pairs: int

    def call(self, q: Tensor, k: Tensor, v: Tensor, activation: str, backend: str) -> Tensor:
        inputs = self.inputs
        return gdpa.attention_varlen(q, k, v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, activation=activation, backend=backend)

    def floor_ms(self, mode: str, rate: float, bandwidth: float) -> float:
        """`rate` in FLOP/s, `bandwidth` in bytes/s."""
        forward_bytes = sum(x.numel() * x.element_size() for x in (*self.inputs[:3], self.d_out))
        gradient_bytes = sum(x.numel() * x.element_size() for x in self.inputs[:3])
        moved = forward_bytes if mode == "forward" else forward_bytes + gradient_bytes
        return max(self.flops(mode) / rate, moved / bandwidth) * 1e3

    def flops(self, mode: str) -> float:
        return 4 * DIM * HEADS * self.pairs * (1.0 if mode == "forward" else 2.5)


def build(shape: Shape, batch: int, device: torch.device) -> Work:
    lengths = traffic.uniform(batch, shape.queries, sparsity=0.5 if shape.jagged else 1.0)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, HEADS, DIM, generator=generator, device=device, dtype=torch.bfloat16)

    rows = int(lengths.sum())
    offsets = offsets_from_lengths(lengths).to(device)
    q = draw(rows)
    if shape.own_keys:
        k, v, k_offsets = draw(batch, shape.keys), draw(batch, shape.keys), None
        pairs = rows * shape.keys
    else:
        k, v, k_offsets = draw(rows), draw(rows), offsets
        pairs = int((lengths * lengths).sum())
    return Work(Inputs(q, k, v, offsets, k_offsets), draw(rows), pairs)


def gate(shape: Shape, activation: str, backend: str, device: torch.device) -> float:
    """The share of the error budget used, by a few sequences of the shape."""
    work = build(shape, GATED_BATCH, device)
    q, k, v = (x.requires_grad_() for x in work.inputs[:3])
    out = work.call(q, k, v, activation, backend)
    grads = torch.autograd.grad(out, (q, k, v), work.d_out)
    inputs = work.inputs._replace(q=q.detach(), k=k.detach(), v=v.detach())
    keys = resolve(activation, HEADS)
    problem = describe(
        inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, None, None, keys, None, 1.0, (-1, -1), False
    )
    return max(verdict.budget_used for verdict in judge(problem, inputs, work.d_out, Results(out.detach(), *grads)))


def measure(shape: Shape, activation: str, backend: str, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    budget_used = gate(shape, activation, backend, device)
    row = {"case": shape.name, "activation": activation, "provider": f"gdpa-{backend}", "budget_used": budget_used}
    if budget_used > 1:
        return [{**row, "mode": mode, "ms": None, "error": "outside the error budget"} for mode in ("forward", "backward")]
    work = build(shape, BATCH, device)
    q, k, v = (x.requires_grad_() for x in work.inputs[:3])
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    b, moved = torch.randn_like(a), torch.empty(2**30, device=device, dtype=torch.uint8)
    target = torch.empty_like(moved)
    out = work.call(q, k, v, activation, backend)

    def forward() -> None:
        with torch.no_grad():
            work.call(q, k, v, activation, backend)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), work.d_out, retain_graph=True)

    timed: dict[str, Callable[[], object]] = {
        "matmul": lambda: a @ b,
        "copy": lambda: target.copy_(moved),
        "forward": forward,
        "backward": backward,
    }
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(rounds + 2):
        for name, work_once in timed.items():
            a @ b  # queued first, so that the device is busy while the timed work is being launched
            ms = clock(work_once, device)
            if turn >= 2:
                samples[name].append(ms)
    middle = {name: statistics.median(times) for name, times in samples.items()}
    rate, bandwidth = 2 * 8192**3 / middle["matmul"] * 1e3, 2 * moved.numel() / middle["copy"] * 1e3
    rows = []
    for mode in ("forward", "backward"):
        first, _, third = statistics.quantiles(samples[mode], n=4, method="inclusive")
        floor = work.floor_ms(mode, rate, bandwidth)
        rows.append(
            {
                **row,
                "mode": mode,
                "ms": middle[mode],
                "spread": (third - first) / middle[mode],
                "tflops": work.flops(mode) / middle[mode] / 1e9,
                "floor_ms": floor,
                "fraction_of_floor": floor / middle[mode],
                "matmul_tflops": rate / 1e12,
                "copy_tbs": bandwidth / 1e12,
                "error": None,
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gdpa.bench.published", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--activation", action="append", help="default: silu and gelu_tanh")
    parser.add_argument("--case", action="append", choices=[shape.name for shape in SHAPES], help="default: all")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device; on a CPU: gdpa bench, python -m gdpa.bench.cpu_ratio", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = [shape for shape in SHAPES if not options.case or shape.name in options.case]
    activations = options.activation or ["silu", "gelu_tanh"]
    command = " ".join(["python -m gdpa.bench.published", *(sys.argv[1:] if arguments is None else arguments)])
    report: dict[str, Any] = {"header": header(device, command), "rows": []}
    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(shapes) * len(activations))
        for shape in shapes:
            for activation in activations:
                progress.update(task, description=f"{shape.name} {activation}")
                report["rows"] += measure(shape, activation, options.backend, device, options.rounds)
                release()
                progress.advance(task)
                if options.json:
                    options.json.write_text(json.dumps(report, indent=1) + "\n")
    console.print(table(report["rows"]))
    return 0


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(
        title="bf16, B=1152, H=4, D=128", caption="fraction: of the floor, from a matmul and a copy timed in the same rounds"
    )
    for name in ("case", "activation", "mode", "ms", "TFLOP/s", "fraction", "matmul TFLOP/s", "budget used"):
        shown.add_column(name, justify="left" if name in ("case", "activation", "mode") else "right")
    for row in rows:
        figures = ["-"] * 4 if row["ms"] is None else [
            f"{row['ms']:.3f}", f"{row['tflops']:.0f}", f"{row['fraction_of_floor']:.2f}", f"{row['matmul_tflops']:.0f}"
        ]  # fmt: skip
        shown.add_row(row["case"], row["activation"], row["mode"], *figures, f"{row['budget_used']:.2f}")
    return shown


if __name__ == "__main__":
    sys.exit(main())
