"""The CPU backend against the padded eager computation, as ratios within one run.

    python -m gdpa.bench.cpu_ratio [--quick] [--json FILE]

Both sides do a forward and a backward for the gradients of q, k and v, on the same numbers, H = 4 and D = 128:

    gdpa     gdpa.attention_varlen(q, k, v, offsets, offsets, activation=f, backend="cpu") on packed tensors (T, H, D)
    padded   f(q @ k^T * scale) @ v with autograd on (B, H, L, D) tensors; a jagged batch is padded to its longest
             sequence and its activated scores are multiplied by a (B, 1, L, L) mask
    eager    on dense batches: the same from gdpa's tensors to gdpa's tensors, transposed views of (T, H, D) and back

Padding, unpadding, bringing heads first for `padded` and making the mask are not timed. The sides take turns, at least 5 times and
for up to 6 seconds; a time is the best round's (what else the machine does only ever adds), a speed-up the ratio of two. The rounds'
own ratios have a median and a range: what eager's page faults and the operating system cost is in them. Extra memory (with the
first activation) is the high-water mark of the resident set during one forward and backward in a fresh process, beyond what
was resident before it and beyond the output and the gradients. A correctness gate runs first.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import gdpa
from gdpa import numerics
from gdpa.bench.machine import commit
from gdpa.bench.tables import print_whole
from gdpa.errors import GdpaError
from gdpa.files import check_target, replacing
from gdpa.problem import describe

HEADS = 4
HEAD_DIM = 128
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEAST_ROUNDS, MOST_ROUNDS, SECONDS = 5, 25, 6.0
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"


@dataclass(frozen=True)
class Batch:
    name: str
    lengths: tuple[int, ...]

    @property
    def jagged(self) -> bool:
        return len(set(self.lengths)) > 1


@dataclass(frozen=True)
class Speedup:
    """How many times faster than another side: best round against best round, and the rounds' own ratios."""

    best: float
    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, ours: list[float], theirs: list[float]) -> Speedup:
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        return cls(min(theirs) / min(ours), statistics.median(ratios), min(ratios), max(ratios))


@dataclass(frozen=True)
class Row:
    """One line of the result: milliseconds, how many times faster, extra MiB and its fraction of the padded side's."""

    batch: str
    dtype: str
    activation: str
    gdpa_ms: float
    padded_ms: float
    speedup: float
    speedup_median: float
    speedup_lowest: float
    speedup_highest: float
    rounds: int
    difference: float
    eager_ms: float | None  # dense batches only, as what follows
    eager_speedup: float | None
    eager_speedup_median: float | None
    eager_speedup_lowest: float | None
    eager_speedup_highest: float | None
    gdpa_mib: float | None
    padded_mib: float | None
    memory_fraction: float | None


def batches(quick: bool) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 1025, (8 if quick else 64,), generator=generator).tolist()
    return [
        Batch(f"{len(lengths)} x 1..1024", tuple(lengths)),
        Batch(f"{4 if quick else 8} x 1024", (1024,) * (4 if quick else 8)),
        Batch(f"{4 if quick else 16} x 512", (512,) * (4 if quick else 16)),
        Batch("64 x 256", (256,) * 64),
        Batch("16 x 256", (256,) * 16),
        Batch("64 x 128", (128,) * 64),
    ]


class Contest:
    """The same numbers packed and padded, and one forward and backward of either side."""

    def __init__(self, batch: Batch, dtype: torch.dtype, activation: str, only: str | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.lengths = torch.tensor(batch.lengths)
        self.offsets = gdpa.offsets_from_lengths(self.lengths)
        self.activation = activation
        shape = (sum(batch.lengths), HEADS, HEAD_DIM)
        packed = [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]
        self.mask: Tensor | None = None
        self.padded: list[Tensor] = []
        if only != "gdpa":
            longest = max(batch.lengths)
            # (B, L, H, D) -> contiguous (B, H, L, D), what plain code would hold.
            self.padded = [gdpa.unpack(x, self.offsets, longest).transpose(1, 2).contiguous() for x in packed]
            for x in self.padded[:3]:
                x.requires_grad_()
            if batch.jagged:
                valid = torch.arange(longest) < self.lengths[:, None]
                self.mask = (valid[:, None, :, None] & valid[:, None, None, :]).to(dtype)
        self.packed = packed if only != "padded" else []
        for x in self.packed[:3]:
            x.requires_grad_()

    def gdpa(self) -> list[Tensor]:
        """The output and the three gradients, packed."""
        q, k, v, d_out = self.packed
        out = gdpa.attention_varlen(q, k, v, self.offsets, self.offsets, activation=self.activation, backend="cpu")
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]

    def heads_first(self) -> list[Tensor]:
        """The output and the three gradients, (B, H, L, D)."""
        q, k, v, d_out = self.padded
        out = self._plain(q, k, v)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]

    def eager(self) -> list[Tensor]:
        """The output and the three gradients of a dense batch, packed."""
        q, k, v, d_out = self.packed
        by_head = [x.view(len(self.lengths), -1, HEADS, HEAD_DIM).transpose(1, 2) for x in (q, k, v)]
        out = self._plain(*by_head).transpose(1, 2).reshape(q.shape)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = ACTIVATIONS[self.activation](q @ k.transpose(2, 3) * (1 / math.sqrt(HEAD_DIM)))
        return (p if self.mask is None else p * self.mask) @ v

    def difference(self, ours: list[Tensor], theirs: list[Tensor]) -> float:
        """The largest relative Frobenius difference of the four results."""
        largest = 0.0
        for a, b in zip(ours, theirs, strict=True):
            packed, _ = gdpa.pack(b.transpose(1, 2), self.lengths)
            largest = max(largest, ((a.float() - packed.float()).norm() / packed.float().norm()).item())
        return largest


def measure_time(batch: Batch, dtype: str, activation: str) -> dict[str, Any]:
    contest = Contest(batch, DTYPES[dtype], activation)
    sides = {"gdpa": contest.gdpa, "padded": contest.heads_first} | ({} if batch.jagged else {"eager": contest.eager})
    difference = contest.difference(contest.gdpa(), contest.heads_first())  # the warm-up
    times: dict[str, list[float]] = {name: [] for name in sides}
    began = time.perf_counter()
    while len(times["gdpa"]) < LEAST_ROUNDS or (time.perf_counter() - began < SECONDS and len(times["gdpa"]) < MOST_ROUNDS):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times | {"difference": difference}


def measure_memory(batch: Batch, dtype: str, activation: str, side: str) -> dict[str, Any]:
    # A small call first, so that what the libraries load and keep is not counted.
    small = Contest(Batch("small", (65, 64)), DTYPES[dtype], activation, side)
    small.gdpa() if side == "gdpa" else small.heads_first()
    contest = Contest(batch, DTYPES[dtype], activation, side)
    # What making the inputs has freed would be used again without showing.
    ctypes.CDLL(None).malloc_trim(0)
    # Writing 5 sets the high-water mark back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    results = contest.gdpa() if side == "gdpa" else contest.heads_first()
    kept = sum(x.numel() * x.element_size() for x in results)
    return {"mib": (_status_bytes("VmHWM") - before - kept) / 2**20}


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def check(dtype: str, activation: str) -> dict[str, Any]:
    """Hold the backend to the error budget on a small jagged batch before anything is timed."""
    contest = Contest(Batch("gate", (1, 65, 200)), DTYPES[dtype], activation, "gdpa")
    q, k, v, d_out = (x.detach() for x in contest.packed)
    offsets = contest.offsets
    problem = describe(q, k, v, offsets, offsets, None, None, [activation], None, 1.0, (-1, -1), False)
    numerics.check(problem, numerics.Inputs(q, k, v, offsets, offsets), d_out, numerics.Results(*contest.gdpa()))
    return {}


def bf16_product() -> dict[str, Any]:
    """One bf16 product large enough for oneDNN."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    return {"sum": (x @ x).sum().item()}


def _child(connection: Connection, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches both: what is to be said of it, the parent says
    connection.send(function(*arguments))


def in_a_process(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call in a fresh process: no measurement inherits another's heap, and a crash has a name."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        result: dict[str, Any] = ours.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        reason = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        raise ChildFailed(f"{function.__name__}{arguments} ended with {reason}", reason) from None
    process.join()
    return result


class ChildFailed(RuntimeError):
    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def cap_isa_if_amx_is_broken(console: Console) -> None:
    """Some virtual machines announce AMX without its tiles: there torch's bf16 products are illegal instructions.

    The padded computation needs those products, so oneDNN is held below AMX for the children. The backend makes none.
    """
    try:
        in_a_process(bf16_product)
    except ChildFailed as failure:
        if failure.reason != "SIGILL" or ISA_VARIABLE in os.environ:
            raise
        os.environ[ISA_VARIABLE] = "AVX512_CORE_BF16"
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]  # it holds the old environment
        in_a_process(bf16_product)
        console.print(f"[yellow]torch's bf16 products die of SIGILL here (AMX); measuring with {ISA_VARIABLE}=AVX512_CORE_BF16")


def header() -> dict[str, Any]:
    return {
        "command": " ".join(["python -m gdpa.bench.cpu_ratio", *sys.argv[1:]]),
        "machine": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        ISA_VARIABLE: os.environ.get(ISA_VARIABLE),
        "commit": commit(),
        "heads": HEADS,
        "head_dim": HEAD_DIM,
    }


def _processor() -> str:
    capabilities = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{capabilities[0] if capabilities else platform.machine()}, {os.cpu_count()} cores"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def run(quick: bool, console: Console, rows: list[Row]) -> None:
    """Measure into `rows`, which has what there is if this is stopped."""
    for dtype in DTYPES:
        for activation in ACTIVATIONS:
            in_a_process(check, dtype, activation)
    console.print("gate: every result within its error budget")
    for batch in batches(quick):
        for dtype in DTYPES:
            for activation in ACTIVATIONS:
                times = in_a_process(measure_time, batch, dtype, activation)
                ours, theirs = times["gdpa"], times["padded"]
                against = Speedup.of(ours, theirs)
                alike = None if batch.jagged else Speedup.of(ours, times["eager"])
                memory: list[float | None] = [None, None]
                if activation == next(iter(ACTIVATIONS)):
                    memory = [in_a_process(measure_memory, batch, dtype, activation, side)["mib"] for side in ("gdpa", "padded")]
                row = Row(
                    batch=batch.name,
                    dtype=dtype,
                    activation=activation,
                    gdpa_ms=min(ours),
                    padded_ms=min(theirs),
                    speedup=against.best,
                    speedup_median=against.median,
                    speedup_lowest=against.lowest,
                    speedup_highest=against.highest,
                    rounds=len(ours),
                    difference=times["difference"],
                    eager_ms=None if alike is None else min(times["eager"]),
                    eager_speedup=None if alike is None else alike.best,
                    eager_speedup_median=None if alike is None else alike.median,
                    eager_speedup_lowest=None if alike is None else alike.lowest,
                    eager_speedup_highest=None if alike is None else alike.highest,
                    gdpa_mib=memory[0],
                    padded_mib=memory[1],
                    memory_fraction=None if memory[0] is None or memory[1] is None else memory[0] / memory[1],
                )
                rows.append(row)
                console.print(f"{batch.name}, {dtype}, {activation}: {row.speedup:.2f}x", highlight=False)


def table(rows: list[Row]) -> Table:
    result = Table(title="Forward + backward, H=4, D=128: gdpa (backend cpu) against padded eager")
    for name in ("batch", "dtype", "f"):
        result.add_column(name, no_wrap=True)
    for name in ("gdpa ms", "padded ms", "speed-up", "median", "range", "eager", "median", "MiB", "padded", "fraction"):
        result.add_column(name, justify="right")
    for row in rows:
        result.add_row(
            row.batch,
            row.dtype,
            row.activation,
            f"{row.gdpa_ms:.0f}",
            f"{row.padded_ms:.0f}",
            f"{row.speedup:.2f}x",
            f"{row.speedup_median:.2f}x",
            f"{row.speedup_lowest:.2f}-{row.speedup_highest:.2f}",
            *("-" if value is None else f"{value:.2f}x" for value in (row.eager_speedup, row.eager_speedup_median)),
            *("-" if value is None else f"{value:.0f}" for value in (row.gdpa_mib, row.padded_mib)),
            "-" if row.memory_fraction is None else f"{100 * row.memory_fraction:.1f} %",
        )
    return result


def main() -> int:
    """Exit status: 0, or 130 on Ctrl-C, after which the rows so far are printed and no file is written."""
    parser = argparse.ArgumentParser(prog="python -m gdpa.bench.cpu_ratio", description="CPU backend against padded eager")
    parser.add_argument("--quick", action="store_true", help="smaller batches, a few minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write {header, rows} here")
    arguments = parser.parse_args()
    if arguments.json:
        try:
            check_target("--json", arguments.json)
        except GdpaError as error:
            parser.error(str(error))
    console = Console()
    if not console.is_terminal:
        console = Console(width=132)
    multiprocessing.set_forkserver_preload(["torch", "gdpa", "gdpa.numerics", "rich.table"])
    rows: list[Row] = []
    try:
        cap_isa_if_amx_is_broken(console)
        run(arguments.quick, console, rows)
    except KeyboardInterrupt:
        if rows:
            print_whole(table(rows), console)
        console.print("interrupted: these are the rows so far" if rows else "interrupted")
        return 130
    print_whole(table(rows), console)
    if arguments.json:
        with replacing(arguments.json) as partial:
            partial.write_text(json.dumps({"header": header(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
