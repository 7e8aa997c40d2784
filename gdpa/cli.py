"""The command line: `gdpa bench | train | check | info | precompile`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import gdpa
from gdpa import dispatch
from gdpa.activations import resolve
from gdpa.bench import check, command, compare, machine, providers, tables
from gdpa.bench.cases import MODES, SUITES, Case, Size, build
from gdpa.bench.providers import check_choice
from gdpa.device_source import cache_directory
from gdpa.errors import GdpaError
from gdpa.problem import describe

# float64 is the oracle's own dtype: it cannot judge it, and the GPU kernels do not compute in it.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# The kernels are compiled in CI from this one on.
OLDEST_ARCHITECTURE = 80

# Tables keep their columns when the output goes to a file.
PLAIN_WIDTH = 130


def run() -> NoReturn:
    """The command's process: main, and its end.

    A rank of torchrun ends without the interpreter's own end. Two that had finished their run aborted in it ("terminate called without an
    active exception"), on a busy machine. torch holds on to process groups that are destroyed (DDP, DTensor and checkpoints each do), so
    gloo's threads are still there; one that wants the interpreter's lock while the interpreter ends is ended inside C++, which may do that.
    """
    status = main()
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


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

    _bench_arguments(commands)
    _train_arguments(commands)

    checks = commands.add_parser(
        "check",
        help="errors of every backend here over the activation table, against their budget",
        description="Forward and the three gradients of small jagged problems, with every activation, on every backend "
        "that runs here, against the float64 oracle. Options that may be repeated also take a list with commas. Exit status 1 "
        "where one is over its budget.",
    )
    _device_argument(checks)
    checks.add_argument("--dtype", type=_dtypes, action="extend", help="may be repeated (default: fp32, bf16 and fp16)")
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
    precompile.add_argument(
        "--activation", action="append", required=True, metavar="NAME", help="may be repeated, or a list with commas"
    )
    precompile.add_argument("--dim", type=_positive, required=True, help="head dimension of q and k")
    precompile.add_argument("--value-dim", type=_positive, help="head dimension of v (default: that of q)")
    precompile.add_argument("--dtype", type=_dtype, default=torch.bfloat16, help="bf16 (default), fp16 or fp32")
    precompile.add_argument("--causal", action="store_true", help="for calls with causal=True or a window_size")
    precompile.add_argument("--group", type=_positive, default=1, help="query heads per key head (default: 1)")
    precompile.add_argument("--kv-heads", type=_positive, default=4, help="key heads: row strides are compiled in (default: 4)")
    precompile.add_argument("--arch", type=_positive, metavar="CC", help="compute capability, such as 80, 90 or 100")
    precompile.set_defaults(run=_precompile)
    return parser


def _bench_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="time, distance from the hardware's floor, memory and error of every provider on the production workloads",
        description="Each case is checked against the float64 oracle first, then timed in rounds that all providers share. "
        "Production size on a GPU, scaled down on a CPU. Options that may be repeated also take a list with commas. "
        "Exit status 1 where a provider is wrong or fails, or a comparison is slower; 130 after Ctrl-C, with the rows so far.",
        epilog="What it all means: docs/benchmarking.md. The CPU backend against padded eager on larger batches: "
        "python -m gdpa.bench.cpu_ratio",
    )
    what = bench.add_argument_group("what is measured")
    what.add_argument("--list", action="store_true", help="print the cases with their sizes, FLOPs and bytes; measure nothing")
    what.add_argument("--case", action="append", metavar="NAME", help="such as self-512-jag; may be repeated")
    what.add_argument("--suite", metavar="NAME", help=f"{', '.join(SUITES)} (default: full on a GPU, quick on a CPU), or train")
    what.add_argument("--mode", action="append", metavar="NAME", help=f"{', '.join(MODES)} (default: forward and backward)")
    what.add_argument(
        "--provider",
        "--providers",
        action="append",
        metavar="NAME",
        help=f"all, or some of {', '.join(providers.NAMES)}; gdpa-BACKEND{providers.ELSEWHERE}WHERE is that backend of another version "
        "of gdpa: a folder with a checkout, or a commit of this one",
    )
    what.add_argument("--activation", action="append", metavar="NAME", help="may be repeated (default: gelu)")
    what.add_argument(
        "--batch", type=_positive, help="sequences (default: 1152 on a GPU, 32 on a CPU; of --suite train see its docs)"
    )
    what.add_argument("--heads", type=_positive, help="heads (default: 4)")
    what.add_argument("--dim", type=_positive, help="head dimension (default: 128 on a GPU, 64 on a CPU)")
    what.add_argument("--dtype", type=_dtype, help="bf16, fp16 or fp32 (default: bf16 on a GPU, fp32 on a CPU)")
    what.add_argument("--seed", type=int, help="of the lengths and the data (default: 0)")
    _device_argument(what)
    step = bench.add_argument_group("--suite train: a training step, with the attention done by each provider")
    step.add_argument("--model", action="append", metavar="NAME", help="interformer, kunlun (default: both); may be repeated")
    step.add_argument("--preset", metavar="NAME", help="tiny, small or gem-block (default: gem-block on a GPU, tiny on a CPU)")
    _compile_argument(step, "on a GPU")
    step.add_argument("--lengths", metavar="NAME", help="of the histories: uniform from 1 to the longest (default), or lognormal")
    step.add_argument("--steps", type=_positive, help="timed steps of each provider's turn, at most (default: 4)")
    how = bench.add_argument_group("how")
    how.add_argument(
        "--seconds",
        type=float,
        help="rounds of each case, activation and mode (default: 0.7 on a GPU, 3 on a CPU), or of each model (6 and 5)",
    )
    how.add_argument("--memory", action="store_true", help="also the peak memory of a call, beyond its inputs")
    how.add_argument("--cold", action="store_true", help="also the first call of a process with empty caches")
    how.add_argument("--graph", action="store_true", help="also the replay of a CUDA graph")
    how.add_argument("--schedule", action="store_true", help="also the cost of building gdpa's tile list, uncached")
    out = bench.add_argument_group("what becomes of it")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the rows, and where they come from, to FILE")
    out.add_argument("--resume", action="store_true", help="go on with the rows that --json FILE has already")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows as bars against the floor, to a PNG")
    out.add_argument("--report", type=Path, metavar="FILE", help="write one self-contained HTML page")
    out.add_argument("--show", type=Path, metavar="FILE", help="print, --plot or --report the rows of a JSON file; measure nothing")
    out.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="two JSON files: what got faster and slower")
    out.add_argument("--threshold", type=float, help=f"slower than this is a failure of --compare (default: {compare.THRESHOLD})")
    bench.set_defaults(run=_bench)


def _train_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train",
        help="train a reference model on synthetic or Parquet data",
        description="Train InterFormer or Kunlun. The last line printed has the scores on held-out examples and the speed: "
        "NE <value> AUC <value> samples/s <value>. Ctrl-C finishes the step, writes a checkpoint and exits with 130; --resume goes on "
        "from the newest checkpoint. Under torchrun the ranks share every batch.",
        epilog="What it all means: docs/training.md.",
    )
    what = train.add_argument_group("what is trained")
    what.add_argument("--model", default="kunlun", metavar="NAME", help="kunlun (default) or interformer")
    what.add_argument("--preset", default="tiny", metavar="NAME", help="tiny (default), small or gem-block")
    what.add_argument("--data", default="synthetic", metavar="PATH", help="synthetic (default), a Parquet file or a folder of them")
    what.add_argument("--schema", type=Path, metavar="FILE", help="JSON, for Parquet files that do not hold their own")
    what.add_argument("--no-history", action="store_true", help="empty every history: what is learned without them")
    what.add_argument("--steps", type=_positive, help="the last step (default: the preset's)")
    what.add_argument("--batch-size", type=_positive, help="examples of a step, over all ranks (default: the preset's)")
    what.add_argument("--seed", type=int, default=0, help="of the weights and the data (default: 0)")
    how = train.add_argument_group("how")
    _device_argument(how)
    how.add_argument(
        "--backend", default="auto", metavar="NAME", help=f"of the attention: auto (default), {', '.join(dispatch.BACKENDS)}"
    )
    how.add_argument("--dtype", type=_dtype, help="bf16 (autocast; the default on a GPU) or fp32 (the default on a CPU)")
    _compile_argument(how, "no")
    how.add_argument("--parallel", default="ddp", metavar="NAME", help="of the dense part under torchrun: ddp (default) or fsdp")
    out = train.add_argument_group("what becomes of it")
    out.add_argument("--out", type=Path, metavar="FOLDER", help="checkpoints, log.jsonl, curves.png (default: a new one in runs/)")
    out.add_argument("--resume", action="store_true", help="go on with the run in --out, from its newest checkpoint")
    out.add_argument("--checkpoint-every", type=_positive, default=200, metavar="STEPS", help="(default: 200)")
    out.add_argument("--keep", type=_positive, default=2, metavar="N", help="checkpoints that stay, the newest (default: 2)")
    out.add_argument("--log-every", type=_positive, default=10, metavar="STEPS", help="(default: 10)")
    out.add_argument("--evaluation-examples", type=_positive, default=8192, metavar="N", help="held out, at most (default: 8192)")
    train.set_defaults(run=_train)


def _device_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda (default: the GPU where there is one)")


def _compile_argument(parser: argparse._ActionsContainer, default: str) -> None:
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help=f"torch.compile of the model, layer by layer (default: {default})",
    )


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


def _dtypes(text: str) -> list[torch.dtype]:
    """One, or some with commas."""
    try:
        return [_dtype(part) for part in command.listed("--dtype", [text]) or ()]
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
    chosen = tuple(dict.fromkeys(command.listed("--activation", names) or default))
    for name in chosen:
        resolve(name, 1)  # an unknown name is refused here, with the nearest ones
    return chosen


def _backends(names: list[str] | None) -> tuple[str, ...]:
    names = command.listed("--backend", names)
    for name in names or ():
        dispatch.check_name(name)
    return tuple(name for name in dispatch.BACKENDS if names is None or name in names)


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PLAIN_WIDTH)


def _bench(options: argparse.Namespace) -> int:
    return command.bench(options, _device(options.device), _console(), _console(stderr=True))


def _train(options: argparse.Namespace) -> int:
    from gdpa.train import command as train_command  # the other commands do not wait for torch.distributed and the models

    return train_command.train(options, _device(options.device), _console())


def _check(options: argparse.Namespace) -> int:
    device = _device(options.device)
    activations = _activations(options.activation, gdpa.activations())
    backends = _backends(options.backend)
    dtypes = tuple(dict.fromkeys(options.dtype or check.DTYPES))
    console, progress_console = _console(), _console(stderr=True)
    table = Table(box=box.SIMPLE_HEAD, title=f"error against budget, {machine.device_name(device)}", title_justify="left")
    for name in ("backend", "dtype", "activation"):
        table.add_column(name, no_wrap=True)
    for name in ("out", "dq", "dk", "dv"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", max_width=tables.NOTE_WIDTH)
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
        tables.print_whole(table, console)
        console.print("[dim]relative error, and the share of its budget that is used; the worst of four forms[/dim]")
    for (backend, reason), labels in left_out.items():
        console.print(f"not checked: {backend} in {', '.join(labels)}: {reason}")
    console.print(f"{ran - failures} passed, {failures} failed")
    return 1 if failures or not ran else 0


def _info(options: argparse.Namespace) -> int:
    facts = [
        ("gdpa", f"{gdpa.__version__}, {Path(gdpa.__file__).parent}"),
        ("commit", machine.commit() or "not a checkout"),
        ("python", f"{platform.python_version()}, {sys.executable}"),
        ("system", platform.platform()),
        ("processor", f"{machine.cpu_name()}, {os.cpu_count()} logical cores, {torch.get_num_threads()} torch threads"),
        ("torch", torch.__version__),
        ("triton", machine.installed_version("triton") or "not installed"),
        ("numpy", machine.installed_version("numpy") or "not installed"),
    ]
    devices = ["cpu"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = properties.total_memory / 2**30
            capability = f"{properties.major}.{properties.minor}"
            facts.append((f"cuda:{index}", f"{properties.name}, {memory:.0f} GiB, compute capability {capability}"))
        facts.append(("CUDA", f"{torch.version.cuda}, driver {machine.driver(torch.device('cuda', 0)) or 'unknown'}"))
        devices.append("cuda")
    else:
        facts.append(("GPU", f"none: torch {_why_no_gpu()}"))
    for device in devices:
        for backend, reason in _backend_reasons(torch.device(device)).items():
            facts.append((f"{backend} on {device}", "runs" if reason is None else f"does not run: {reason}"))
    # gdpa's own are the backends above.
    others = [name for name in providers.NAMES if not name.startswith("gdpa-")]
    for name in others:
        reason = _provider_reason(name, torch.device(devices[-1]))
        facts.append((f"bench: {name}", f"runs on {devices[-1]}" if reason is None else reason))
    triton_cache = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    facts.append(("generated code", str(cache_directory())))
    facts.append(("compiled kernels", str(triton_cache)))
    facts += [(name, value) for name, value in sorted(os.environ.items()) if name.startswith(("GDPA_", "TRITON_"))]
    print(tables.lines(facts))
    return 0


def _backend_reasons(device: torch.device) -> dict[str, str | None]:
    """For a usual call (bf16 on a GPU, fp32 on a CPU) on this device: None where a backend runs it, else why not."""
    q = torch.empty(1, 16, 1, 64, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16, device=device)
    problem = describe(q, q, q, None, None, None, None, ["gelu"], None, 1.0, (-1, -1), False)
    return {backend: dispatch.reason_against(backend, problem) for backend in dispatch.BACKENDS}


def _provider_reason(name: str, device: torch.device) -> str | None:
    """Why `gdpa bench` would have no figure of this provider for a small dense forward, or None."""
    # FlexAttention takes only what is never negative, HSTU only SiLU.
    activation = "relu" if name == "flex" else "silu"
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    workload = build(Case.named("self-16", Size(batch=1, heads=1, dim=64)), activation, dtype, device)
    return providers.by_name(name).reason_against(workload, gradients=False)


def _precompile(options: argparse.Namespace) -> int:
    activations = _activations(options.activation, ())
    if machine.installed_version("triton") is None:
        raise GdpaError("precompile: expected Triton to be installed, and it is not")
    if options.arch is None and not torch.cuda.is_available():
        raise GdpaError("--arch: expected a compute capability such as 80, 90 or 100, since there is no GPU here to take it from")
    from gdpa.backends.gpu import architecture
    from gdpa.backends.hopper.backend import HEAD_DIMENSIONS
    from gdpa.backends.triton.backend import is_head_dimension
    from gdpa.backends.triton.launch import precompile

    value_dim = options.value_dim or options.dim
    for name, size in (("--dim", options.dim), ("--value-dim", value_dim)):
        if not is_head_dimension(size):
            raise GdpaError(f"{name}: expected a multiple of 8 from 8 to 256, got {size}")
    # LLVM ends the process where there is no such GPU.
    if options.arch is not None and not OLDEST_ARCHITECTURE <= options.arch < 200:
        raise GdpaError(
            f"--arch: expected a compute capability from {OLDEST_ARCHITECTURE} on, such as 90 or 100, got {options.arch}"
        )
    arch = options.arch or architecture(torch.device("cuda", torch.cuda.current_device()))
    on_hopper = arch == 90 and options.dim == value_dim in HEAD_DIMENSIONS and options.dtype.itemsize == 2
    for name in activations:
        keys = resolve(name, 1)
        sizes = (options.dim, value_dim, options.dtype)
        for line in precompile(keys, *sizes, options.causal, options.group, arch, options.kv_heads):
            print(line)
        if on_hopper:
            from gdpa.backends.hopper import launch, launch_backward

            for module in (launch, launch_backward):
                for line in module.precompile(keys, options.dim, options.dtype, options.causal, options.group, options.kv_heads):
                    print(line)
    return 0
