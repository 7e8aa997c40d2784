"""`gdpa train`: from its options to a run, and from the run to what is printed and written."""

from __future__ import annotations

import argparse
import fcntl
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from gdpa import api, models
from gdpa.bench import machine, timing
from gdpa.bench.plain import broken_cpu_products, missing_compiler
from gdpa.bench.providers import check_choice
from gdpa.data.schema import Schema
from gdpa.dispatch import BACKENDS
from gdpa.errors import BackendUnavailable, GdpaError
from gdpa.nn.base import AttentionModule
from gdpa.train import source as sources
from gdpa.train import world as worlds
from gdpa.train.checkpoint import Checkpoints
from gdpa.train.log import Log
from gdpa.train.loop import Loop
from gdpa.train.progress import Display
from gdpa.train.settings import Folder, Settings
from gdpa.train.source import Parquet, Source, Synthetic
from gdpa.train.updates import NonFinite
from gdpa.train.world import World

# A history's median length in synthetic data, as a share of the longest.
MEDIAN_SHARE = 8
# Threads that make synthetic batches for a GPU, which is faster than one of them.
WORKERS = 4
# Rows of the square matrices whose product MFU is a share of.
MATMUL_ROWS = {"cuda": 8192, "cpu": 1024}


def train(options: argparse.Namespace, device: torch.device, console: Console) -> int:
    """Exit status: 0, 1 where a loss was not finite, 130 on Ctrl-C, 143 on SIGTERM. GdpaError for what is asked wrongly."""
    with worlds.opened(device) as world, Signals() as signals:
        return _train(options, world, signals, console if world.first else Console(quiet=True))


def _train(options: argparse.Namespace, world: World, signals: Signals, console: Console) -> int:
    settings = _settings(options, world.device)
    source = _source(options, settings, world.device)
    _check_backend(settings, source.schema, world.device)
    folder = _folder(options, world)
    with _owned(folder, world):
        torch.manual_seed(settings.seed)
        model = _model(settings, source.schema, world.device)
        rate = _matmul_rate(world.device, settings.bf16)
        loop = Loop(settings, source, model, world, folder, matmul_rate=rate, stop=lambda: signals.number is not None)
        resumed = options.resume and loop.resume()
        _announce(settings, loop, options, resumed, console)
        log: Log | None = None

        def begin() -> None:
            nonlocal log
            log = Log(folder.log, loop.step)
            loop.checkpoints.clean()
            log.write("resume" if resumed else "start", loop.step, **_header(options, settings, source, world))

        world.by_first(begin)
        try:
            with Display(console, loop.step, settings.steps) as display:
                outcome = loop.run(log, display)
        except NonFinite as error:
            newest = loop.checkpoints.latest()
            kept = f"{newest} is from before it" if newest is not None else "there is no checkpoint yet"
            with _said(console, f"gdpa train: stopped: {error}; {kept}"):
                _close(log, folder, "stopped", loop.step, reason=str(error))
            return 1
        except RuntimeError as error:
            if not timing.out_of_memory(error):
                raise
            raise GdpaError(
                f"--batch-size: expected one that {world.device} has memory for, got {settings.batch_size}: {error}"
            ) from error
        if outcome.scores is None:
            with _said(console, f"interrupted after step {outcome.step}; to go on: {_resume_command(options, folder, world)}"):
                _close(log, folder, "interrupted", outcome.step)
            return 128 + (signals.number or signal.SIGINT)
        scores = outcome.scores
        with _said(console, f"NE {scores.ne:.4f} AUC {scores.auc:.4f} samples/s {outcome.samples_per_s:.1f}"):
            _close(log, folder, "end", outcome.step, **scores._asdict(), samples_per_s=outcome.samples_per_s)
        return 0


def _model(settings: Settings, schema: Schema, device: torch.device) -> models.ClickModel:
    try:
        return models.from_config(settings.config, schema, backend=settings.backend).to(device)
    except RuntimeError as error:
        if not timing.out_of_memory(error):
            raise
        raise GdpaError(f"--preset, --schema: expected weights and tables that {device} has memory for: {error}") from error


def _check_backend(settings: Settings, schema: Schema, device: torch.device) -> None:
    """Before anything is written: whether a backend that was asked for takes the heads of the model on this device."""
    if settings.backend == "auto":
        return
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    with torch.device("meta"):  # as good as any to ask for its heads
        model = models.from_config(settings.config, schema, backend=settings.backend)
    for module in model.modules():
        if isinstance(module, AttentionModule) and module.backend is not None:
            q = torch.empty(1, module.heads, module.head_dim, dtype=dtype, device=device)
            offsets = torch.tensor([0, 1], device=device)
            try:
                api.explain(q, q, q, offsets, offsets, activation=module.activation, backend=module.backend)
            except BackendUnavailable as error:
                raise GdpaError(
                    f"--backend: expected one that runs this model on {device}, got {settings.backend}: {error}"
                ) from error


def _settings(options: argparse.Namespace, device: torch.device) -> Settings:
    check_choice("--model", options.model, tuple(models.PRESETS))
    check_choice("--preset", options.preset, tuple(models.PRESETS[options.model]))
    config = models.preset_config(options.model, options.preset)
    check_choice("--backend", options.backend, ("auto", *BACKENDS))
    bf16 = device.type == "cuda" if options.dtype is None else options.dtype == torch.bfloat16
    if options.dtype is not None and options.dtype not in (torch.bfloat16, torch.float32):
        raise GdpaError(f"--dtype: expected bf16 or fp32, got {options.dtype}")
    if bf16 and device.type == "cpu":
        broken = broken_cpu_products("bfloat16")
        if broken is not None:
            raise GdpaError(f"--dtype: expected one that this CPU computes in, got bf16, and {broken}")
    missing = missing_compiler(device) if options.compile else None
    if missing is not None:
        raise GdpaError(f"--compile: expected on a machine that can, got one that cannot: {missing}")
    return Settings(
        config=config,
        steps=options.steps or config.default_steps,
        batch_size=options.batch_size or config.batch_size,
        seed=options.seed,
        backend=options.backend,
        no_history=options.no_history,
        bf16=bf16,
        compile=bool(options.compile),
        parallel=options.parallel,
        log_every=options.log_every,
        checkpoint_every=options.checkpoint_every,
        keep=options.keep,
        evaluation=options.evaluation_examples,
    )


def _source(options: argparse.Namespace, settings: Settings, device: torch.device) -> Source:
    if options.data != "synthetic":
        return Parquet(Path(options.data), settings.batch_size, seed=settings.seed, schema=_schema(options.schema))
    if options.schema is not None:
        raise GdpaError(f"--schema: expected with --data PATH alone, since synthetic data have their own, got {options.schema}")
    if settings.steps > sources.HELD_OUT:
        raise GdpaError(sources.too_many_steps())
    longest = settings.config.max_history
    return Synthetic(
        settings.batch_size,
        seed=settings.seed,
        median_length=max(1, longest // MEDIAN_SHARE),
        max_length=longest,
        workers=WORKERS if device.type == "cuda" else 1,
    )


def _schema(path: Path | None) -> Schema | None:
    """The schema in a file of its JSON text."""
    if path is None:
        return None
    try:
        return Schema.from_json(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise GdpaError(f"--schema: expected a file that can be read, got {path}: {error}") from None
    except GdpaError as error:
        raise GdpaError(f"--schema: {path}: {error}") from None


def _folder(options: argparse.Namespace, world: World) -> Folder:
    """The folder of --out, or a new one; the first rank chooses."""
    if options.out is None and options.resume:
        raise GdpaError("--resume: expected --out FOLDER with it, the run to go on with, got none")
    path = options.out
    if path is None and world.first:
        number = 1
        while (path := Path("runs") / f"{options.model}-{options.preset}-{number}").exists():
            number += 1
    folder = Folder(Path(world.from_first(str(path))))
    # Checkpoints without a log are a run too: this one's would be taken for the older ones and removed.
    if (folder.log.exists() or Checkpoints(folder.checkpoints).complete()) and not options.resume:
        raise GdpaError(f"--out: expected a folder without a run, or --resume to go on with it, got {folder.path}")
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GdpaError(f"--out: expected a folder that can be written, got {folder.path}: {error.strerror}") from None
    return folder


@contextmanager
def _owned(folder: Folder, world: World) -> Iterator[None]:
    """The folder for this run alone: two of them would write each other's files. The lock ends with the process, however it ends."""
    with ExitStack() as held:
        # All ranks end with the reason, where the others would wait for the first in vain.
        refusal = world.from_first(_lock(folder, held) if world.first else None)
        if refusal is not None:
            raise GdpaError(refusal)
        yield


def _lock(folder: Folder, held: ExitStack) -> str | None:
    """Lock the folder until `held` ends; or why that cannot be."""
    try:
        file = held.enter_context((folder.path / ".lock").open("w"))
    except OSError as error:
        return f"--out: expected a folder that can be written, got {folder.path}: {error.strerror}"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"--out: expected a folder that no other run uses, got {folder.path}, which one does"
    except OSError as error:
        return f"--out: expected a folder whose files can be locked, got {folder.path}: {error.strerror}"
    return None


class Signals:
    """Ctrl-C and SIGTERM as a number that is looked at between steps. A second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number


def _announce(settings: Settings, loop: Loop, options: argparse.Namespace, resumed: bool, console: Console) -> None:
    world = loop.world
    parameters = sum(parameter.numel() for parameter in loop.updates.parameters().values())
    ranks = f", {world.size} ranks, {settings.parallel}" if world.size > 1 else ""
    history = " without histories" if settings.no_history else ""
    lines = [
        f"{options.model} {options.preset}, {parameters:,} parameters, on {machine.device_name(world.device)}{ranks}, "
        f"{'bf16' if settings.bf16 else 'fp32'}{', compiled' if settings.compile else ''}, threads: {torch.get_num_threads()}",
        f"data: {options.data}{history}, batches of {settings.batch_size}, seed {settings.seed}; writing to {loop.folder.path}",
    ]
    if resumed:
        lines.append(f"resumed after step {loop.step} of {settings.steps}")
    elif options.resume:
        lines.append("there is no checkpoint to resume: starting at the first step")
    for line in lines:
        _say(console, line)


def _header(options: argparse.Namespace, settings: Settings, source: Source, world: World) -> dict[str, Any]:
    return {
        **machine.header(world.device, shlex.join(["gdpa", *options.command_line])),
        "ranks": world.size,
        "config": settings.identity(),
        "data": source.facts,
        "steps": settings.steps,
    }


def _close(log: Log | None, folder: Folder, event: str, step: int, **facts: Any) -> None:
    """The last line of the log, and the picture; by the first rank."""
    if log is None:
        return
    from gdpa.train import curves  # matplotlib takes a second to import

    log.write(event, step, **facts)
    log.close()
    try:
        curves.write(folder.log, folder.curves)
    except GdpaError as error:  # the run is what it is without a picture of it
        print(f"gdpa train: no picture: {error}", file=sys.stderr)


@contextmanager
def _said(console: Console, text: str) -> Iterator[None]:
    """Say it after the block, also where a full disk ends that: what a run came to is worth more than its line in the log."""
    try:
        yield
    finally:
        _say(console, text)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _resume_command(options: argparse.Namespace, folder: Folder, world: World) -> str:
    """The command that this run was started with, and what makes it go on."""
    words = ["gdpa", *options.command_line] if world.size == 1 else ["torchrun", "...", "-m", "gdpa", *options.command_line]
    if options.out is None:
        words += ["--out", str(folder.path)]
    return shlex.join(words if options.resume else [*words, "--resume"])


def _matmul_rate(device: torch.device, bf16: bool) -> float:
    """FLOP/s of a large matrix product in the dtype of the run: the median of a few."""
    rows = MATMUL_ROWS[device.type]
    a = torch.ones(rows, rows, device=device, dtype=torch.bfloat16 if bf16 else torch.float32)
    taken = []
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return 2 * rows**3 / statistics.median(taken[1:])
