"""The command line: `gdpa bench | check | info | precompile`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import gdpa
from gdpa import dispatch
from gdpa.activations import resolve
from gdpa.bench import check, report
from gdpa.bench import run as bench_run
from gdpa.bench.cases import production
from gdpa.bench.providers import available, check_choice
from gdpa.bench.timing import Effort
from gdpa.data import traffic
from gdpa.device_source import cache_directory
from gdpa.errors import GdpaError
from gdpa.problem import describe

# float64 is the oracle's own dtype: it cannot judge it, and the GPU kernels do not compute in it.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Tables keep their columns when the output goes to a file.
PLAIN_WIDTH = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 (a check failed), 2 (wrong usage), 130 (interrupted)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.command_line = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status: int = options.run(options)
    except GdpaError as error:
        print(f"gdpa {options.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gdpa", description="Generalized dot-product attention: any elementwise activation in place of softmax."
    )
    parser.add_argument("--version", action="version", version=f"gdpa {gdpa.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    bench = commands.add_parser(
        "bench",
        help="time, memory and error of the three production workloads against plain PyTorch",
        description="Forward and backward of self-attention, PMA (32 shared seeds) and PFFN (256 keys per sequence) on "
        "jagged batches, each checked against the float64 oracle first, beside plain PyTorch on padded tensors. "
        "Production size on a GPU, scaled down on a CPU. Exit status 1 where a backend is wrong or fails.",
        epilog="The CPU backend against padded eager on larger batches: python -m gdpa.bench.cpu_ratio",
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the rows, and where they come from, to FILE")
    _device_argument(bench)
    bench.add_argument("--dtype", type=_dtype, help="bf16, fp16 or fp32 (default: bf16 on a GPU, fp32 on a CPU)")
    bench.add_argument("--activation", action="append", metavar="NAME", help="may be repeated (default: gelu)")
    bench.add_argument("--batch", type=_positive, help="sequences (default: 1152 on a GPU, 32 on a CPU)")
    bench.add_argument("--heads", type=_positive, help="heads (default: 4)")
    bench.add_argument("--dim", type=_positive, help="head dimension (default: 128 on a GPU, 64 on a CPU)")
    bench.add_argument("--lengths", default="uniform", metavar="NAME", help="uniform (default), lognormal or power-law")
    bench.add_argument("--seconds", type=float, help="time to spend on each case and mode (default: 4 on a CPU, 2 on a GPU)")
    bench.add_argument(
        "--quick",
        action="store_true",
        help="leave out what needs fresh processes: cold first calls, and memory on a CPU",
    )
    _backend_argument(bench)
    bench.set_defaults(run=_bench)

    checks = commands.add_parser(
        "check",
        help="errors of every backend here over the activation table, against their budget",
        description="Forward and the three gradients of small jagged problems, with every activation, on every backend "
        "that runs here, against the float64 oracle. Exit status 1 where one is over its budget.",
    )
    _device_argument(checks)
    checks.add_argument("--dtype", type=_dtype, action="append", help="may be repeated (default: fp32, bf16 and fp16)")
    checks.add_argument("--activation", action="append", metavar="NAME", help="may be repeated (default: all)")
    _backend_argument(checks)
    checks.set_defaults(run=_check)

    info = commands.add_parser("info", help="what this machine can run, and why not the rest; for bug reports")
    info.set_defaults(run=_info)

    precompile = commands.add_parser(
        "precompile",
        help="build the Triton kernels ahead of the first call",
        description="Build the kernels of the given activations and sizes into Triton's cache, so that no first call "
        "waits for the compiler. --arch builds for another GPU than this machine's; copy the cache folders there "
        "(gdpa info names them).",
    )
    precompile.add_argument("--activation", action="append", required=True, metavar="NAME", help="may be repeated")
    precompile.add_argument("--dim", type=_positive, required=True, help="head dimension of q and k")
    precompile.add_argument("--value-dim", type=_positive, help="head dimension of v (default: that of q)")
    precompile.add_argument("--dtype", type=_dtype, default=torch.bfloat16, help="bf16 (default), fp16 or fp32")
    precompile.add_argument("--causal", action="store_true", help="for calls with causal=True or a window_size")
    precompile.add_argument("--group", type=_positive, default=1, help="query heads per key head (default: 1)")
    precompile.add_argument("--kv-heads", type=_positive, default=4, help="key heads: row strides are compiled in (default: 4)")
    precompile.add_argument("--arch", type=_positive, metavar="CC", help="compute capability, such as 80, 90 or 100")
    precompile.set_defaults(run=_precompile)
    return parser


def _device_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda (default: the GPU where there is one)")


def _backend_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help=f"{', '.join(dispatch.BACKENDS)}; may be repeated (default: all)",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


_positive.__name__ = "positive integer"  # argparse says: invalid positive integer value


def _dtype(text: str) -> torch.dtype:
    try:
        return DTYPES[check_choice("--dtype", text, tuple(DTYPES))]
    except GdpaError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--dtype: ")) from None


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        check_choice("--device", name, ("cpu", "cuda"))
    assert device is not None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise GdpaError(f"--device: expected a device of this machine, got {name!r}, and torch {_why_no_gpu()}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise GdpaError(f"--device: expected a device of this machine, which has {torch.cuda.device_count()}, got {name!r}")
    return device


def _why_no_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"{torch.__version__} is built for the CPU only"
    return f"{torch.__version__} finds no GPU"


def _activations(names: list[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(names or default))
    for name in chosen:
        resolve(name, 1)  # an unknown name is refused here, with the nearest ones
    return chosen


def _backends(names: list[str] | None) -> tuple[str, ...]:
    for name in names or ():
        dispatch.check_name(name)
    return tuple(name for name in dispatch.BACKENDS if names is None or name in names)


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PLAIN_WIDTH)


class _Bar(bench_run.Progress):
    """A bar on a terminal; elsewhere one line for each case that is done."""

    def __init__(self, steps: float, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("time left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("starting", total=steps)

    def step(self, text: str, done: float) -> None:
        self.bar.update(self.task, description=text, completed=done)

    def finished(self, case: str) -> None:
        if not self.console.is_terminal:
            self.console.print(f"measured {case}")


def _bench(options: argparse.Namespace) -> int:
    device = _device(options.device)
    on_cpu = device.type == "cpu"
    check_choice("--lengths", options.lengths, tuple(traffic.GENERATORS))
    if options.seconds is not None and not options.seconds > 0:
        raise GdpaError(f"--seconds: expected a positive number, got {options.seconds}")
    path: Path | None = options.json
    if path is not None and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
        raise GdpaError(f"--json: expected a file in a folder that can be written, got {path}")
    plan = bench_run.Plan(
        cases=production(device, batch=options.batch, heads=options.heads, dim=options.dim, lengths=options.lengths),
        activations=_activations(options.activation, ("gelu",)),
        providers=available(_backends(options.backend)),
        dtype=options.dtype or (torch.float32 if on_cpu else torch.bfloat16),
        device=device,
        effort=Effort(options.seconds or (4.0 if on_cpu else 2.0)),
        fresh=not options.quick,
    )
    results = report.Report(report.header(device, options.command_line))
    results.header["dtype"] = str(plan.dtype).removeprefix("torch.")

    def save() -> None:
        if path is not None:
            results.write(path)

    console, progress_console = _console(), _console(stderr=True)
    head = results.header
    console.print(f"{head['device']}, threads: {head['threads']}, torch {head['versions']['torch']}\n")
    interrupted = False
    bar = _Bar(plan.steps, progress_console)
    try:
        with bar.bar:
            bench_run.run(plan, results, bar, save)
    except KeyboardInterrupt:
        interrupted = True
    save()
    report.show(results, console)
    console.print(
        "[dim]spread: interquartile range / median. vs eager: times as fast as plain PyTorch on padded tensors.\n"
        "memory: peak beyond the inputs, backward with its forward. error: relative, against the float64 oracle;\n"
        "budget: the share used of what docs/numerics.md allows. "
        "cold: first forward and backward of a process, caches empty.[/dim]"
    )
    if path is not None:
        console.print(f"wrote {path}")
    if interrupted:
        console.print("interrupted: these are the rows so far")
        return 130
    if results.failed:
        console.print("[red]a backend was wrong or failed: see the notes[/red]")
        return 1
    return 0


def _check(options: argparse.Namespace) -> int:
    device = _device(options.device)
    activations = _activations(options.activation, gdpa.activations())
    backends = _backends(options.backend)
    dtypes = tuple(dict.fromkeys(options.dtype or check.DTYPES))
    console, progress_console = _console(), _console(stderr=True)
    table = Table(box=box.SIMPLE_HEAD, title=f"error against budget, {report.device_name(device)}", title_justify="left")
    for name in ("backend", "dtype", "activation"):
        table.add_column(name, no_wrap=True)
    for name in ("out", "dq", "dk", "dv"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    ran = failures = 0
    left_out: dict[tuple[str, str], list[str]] = {}
    for backend in backends:
        for dtype in dtypes:
            label = str(dtype).removeprefix("torch.")
            reason = check.unavailable(backend, dtype, device)
            if reason is not None:
                left_out.setdefault((backend, reason), []).append(label)
                continue
            for activation in activations:
                with progress_console.status(f"{backend} {label} {activation}"):
                    line = check.check_one(backend, dtype, activation, device)
                ran += 1
                failures += not line.passed
                cells = [
                    f"{v.relative:.1e} {v.budget_used:4.0%}" if (v := line.worst.get(name)) is not None else "-"
                    for name in ("out", "dq", "dk", "dv")
                ]
                verdict = "ok" if line.passed else line.note or "over the budget"
                table.add_row(backend, label, line.activation, *cells, verdict, style=None if line.passed else "red")
            table.add_section()
    if ran:
        console.print(table)
        console.print("[dim]relative error, and the share of its budget that is used; the worst of four forms[/dim]")
    for (backend, reason), labels in left_out.items():
        console.print(f"not checked: {backend} in {', '.join(labels)}: {reason}")
    console.print(f"{ran - failures} passed, {failures} failed")
    return 1 if failures or not ran else 0


def _info(options: argparse.Namespace) -> int:
    facts = [
        ("gdpa", f"{gdpa.__version__}, {Path(gdpa.__file__).parent}"),
        ("commit", report.commit() or "not a checkout"),
        ("python", f"{platform.python_version()}, {sys.executable}"),
        ("system", platform.platform()),
        ("processor", f"{report.cpu_name()}, {os.cpu_count()} logical cores, {torch.get_num_threads()} torch threads"),
        ("torch", torch.__version__),
        ("triton", report.installed_version("triton") or "not installed"),
        ("numpy", report.installed_version("numpy") or "not installed"),
    ]
    devices = ["cpu"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = properties.total_memory / 2**30
            capability = f"{properties.major}.{properties.minor}"
            facts.append((f"cuda:{index}", f"{properties.name}, {memory:.0f} GiB, compute capability {capability}"))
        devices.append("cuda")
    else:
        facts.append(("GPU", f"none: torch {_why_no_gpu()}"))
    for device in devices:
        for backend, reason in _backend_reasons(torch.device(device)).items():
            facts.append((f"{backend} on {device}", "runs" if reason is None else f"does not run: {reason}"))
    triton_cache = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    facts.append(("generated code", str(cache_directory())))
    facts.append(("compiled kernels", str(triton_cache)))
    facts += [(name, value) for name, value in sorted(os.environ.items()) if name.startswith(("GDPA_", "TRITON_"))]
    print(report.lines(facts))
    return 0


def _backend_reasons(device: torch.device) -> dict[str, str | None]:
    """For a usual call (bf16 on a GPU, fp32 on a CPU) on this device: None where a backend runs it, else why not."""
    q = torch.empty(1, 16, 1, 64, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16, device=device)
    problem = describe(q, q, q, None, None, None, None, ["gelu"], None, 1.0, (-1, -1), False)
    return {backend: dispatch.reason_against(backend, problem) for backend in dispatch.BACKENDS}


def _precompile(options: argparse.Namespace) -> int:
    activations = _activations(options.activation, ())
    if report.installed_version("triton") is None:
        raise GdpaError("precompile: expected Triton to be installed, and it is not")
    if options.arch is None and not torch.cuda.is_available():
        raise GdpaError("--arch: expected a compute capability such as 80, 90 or 100, since there is no GPU here to take it from")
    from gdpa.backends.triton.launch import precompile

    value_dim = options.value_dim or options.dim
    for name in activations:
        sizes = (options.dim, value_dim, options.dtype)
        for line in precompile(resolve(name, 1), *sizes, options.causal, options.group, options.arch, options.kv_heads):
            print(line)
    return 0
