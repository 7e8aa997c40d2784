"""`gdpa bench --suite train`: one training step of the reference models, with the attention done by each provider.

The step is the trainer's own: forward, loss, backward, clipping, both optimisers, metrics. One model, one batch: the providers are set in
it in turn, and before each turn the weights and the optimisers are those of the start.

    set-up     the model; where it is compiled: for gdpa's operator layer by layer, the operator's calls inside, and for an attention that
               is no operator what lies between its calls (gdpa.nn.regions). One compilation serves all providers of either kind
    gate       the gradient of the dense part at full size, against that of the first provider in a model that is not compiled; past
               TOLERANCE, or where a parameter's own is lost, it is wrong
    a turn     one untimed step; timed ones, queued without a wait between them, by the wall clock from idle to idle; and one whose
               attention calls are timed where they run, queued behind products that keep the device busy
    a round    one turn of every provider, in an order drawn anew, and a matmul, whose rate MFU is a share of

The file is written after every provider's gate and after every round, so a run that is stopped leaves what it had.
"""

from __future__ import annotations

import argparse
import math
import random
import shlex
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

import gdpa
from gdpa import models
from gdpa.bench import machine, timing, training_attention
from gdpa.bench.plain import broken_cpu_products
from gdpa.bench.providers import check_choice
from gdpa.bench.tables import size
from gdpa.bench.training_attention import Attention, Gdpa, Padded, Watched, on_gpu, run_on, watched_backends
from gdpa.bench.training_report import Report, Row, show
from gdpa.data.schema import Batch
from gdpa.errors import BackendUnavailable, GdpaError
from gdpa.files import why_unwritten
from gdpa.models import ClickModel
from gdpa.nn.regions import compile_regions, compile_stages, plain_regions, plain_stages
from gdpa.train import metrics
from gdpa.train.command import MEDIAN_SHARE
from gdpa.train.loop import STEP_FORWARDS, Loop
from gdpa.train.settings import Folder, Settings
from gdpa.train.source import Synthetic
from gdpa.train.updates import Updates
from gdpa.train.world import World

# Of the padded step of plain PyTorch an example takes about 0.55 GB in InterFormer and 0.11 GB in Kunlun, by count of what autograd keeps
# at 2048 events: these batches need 105 GB and 57 GB, of an H200's 150.
DEFAULT_BATCH = {("interformer", "gem-block"): 192, ("kunlun", "gem-block"): 512}
# Seconds of rounds for each model, and timed steps of a turn.
SECONDS = {"cuda": 6.0, "cpu": 5.0}
STEPS = 4
LEAST_ROUNDS, MOST_ROUNDS = 3, 12
# Slow steps are fewer: as many as this allows, and one at least.
TURN_SECONDS = 0.5
# Of the histories: uniform from 1 to the longest is the traffic of the published benchmark; of lognormal ones most are short.
LENGTHS = ("uniform", "lognormal")
# How far the dense part's gradient may be from that of another provider: rounding alone, through all layers, under autocast or not.
TOLERANCE = {True: 0.1, False: 1e-3}
# How far a parameter's own gradient may be, relative to its norm and a share of the whole, which is rounding: below 1, which is where one
# is lost. In the whole gradient's norm a lost one may be 3 %, or nothing.
PARAMETER_TOLERANCE = 0.5
PARAMETER_SHARE = {True: 1e-4, False: 1e-5}
# Products of the yardstick's size that are queued before the step whose attention is timed: about 50 ms of an H200.
FILLERS = 32


@dataclass(frozen=True)
class Plan:
    models: tuple[str, ...]
    preset: str
    providers: tuple[str, ...]
    device: torch.device
    bf16: bool
    compile: bool = False
    lengths: str = LENGTHS[0]
    batch: int | None = None
    seed: int = 0
    steps: int = STEPS
    seconds: float = SECONDS["cpu"]

    def settings(self, model: str) -> Settings:
        config = models.preset_config(model, self.preset)
        examples = self.batch or DEFAULT_BATCH.get((model, self.preset), config.batch_size)
        return Settings(config=config, steps=1, batch_size=examples, seed=self.seed, bf16=self.bf16)


# Options of `gdpa bench` that are about single calls of the attention, with what they are where nobody gave them.
OF_CALLS = {
    "case": None,
    "mode": None,
    "activation": None,
    "heads": None,
    "dim": None,
    "list": False,
    "memory": False,
    "cold": False,
    "graph": False,
    "schedule": False,
    "resume": False,
    "plot": None,
    "report": None,
}


def plan_of(options: argparse.Namespace, device: torch.device, listed: Callable[[str, list[str] | None], list[str] | None]) -> Plan:
    for name, absent in OF_CALLS.items():
        if getattr(options, name) != absent:
            raise GdpaError(f"--{name}: expected with the other suites alone, got it with --suite train")
    gpu = device.type == "cuda"
    names = listed("--model", options.model) or list(models.PRESETS)
    for name in names:
        check_choice("--model", name, tuple(models.PRESETS))
    preset = options.preset or ("gem-block" if gpu else "tiny")
    for name in names:
        check_choice("--preset", preset, tuple(models.PRESETS[name]))
    providers = listed("--provider", options.provider) or list(
        training_attention.GPU_DEFAULT if gpu else training_attention.CPU_DEFAULT
    )
    if "all" in providers:
        providers = list(training_attention.NAMES)
    for name in providers:
        check_choice("--provider", name, (*training_attention.NAMES, "all"))
    lengths = options.lengths or LENGTHS[0]
    check_choice("--lengths", lengths, LENGTHS)
    if options.dtype not in (None, torch.bfloat16, torch.float32):
        raise GdpaError(f"--dtype: expected bf16 or fp32, got {options.dtype}")
    bf16 = gpu if options.dtype is None else options.dtype == torch.bfloat16
    broken = broken_cpu_products("bfloat16") if bf16 and not gpu else None
    if broken is not None:
        raise GdpaError(f"--dtype: expected one that this CPU computes in, got bf16, and {broken}")
    if options.seconds is not None and not options.seconds > 0:
        raise GdpaError(f"--seconds: expected a positive number, got {options.seconds}")
    return Plan(
        models=tuple(dict.fromkeys(names)),
        preset=preset,
        providers=tuple(dict.fromkeys(providers)),
        device=device,
        bf16=bf16,
        compile=gpu if options.compile is None else options.compile,
        lengths=lengths,
        batch=options.batch,
        seed=options.seed or 0,
        steps=options.steps or STEPS,
        seconds=options.seconds or SECONDS[device.type],
    )


def bench(plan: Plan, command_line: list[str], output: Path | None, console: Console, progress: Console) -> int:
    """Exit status: 0, 1 where a provider is wrong or fails, 130 on Ctrl-C."""
    started = time.monotonic()
    report = Report(
        {
            **machine.header(plan.device, shlex.join(["gdpa", *command_line])),
            "suite": "train",
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": None,
            "R": None,
            "dtype": "bfloat16" if plan.bf16 else "float32",
            "preset": plan.preset,
            "lengths": plan.lengths,
            "seed": plan.seed,
            "steps": plan.steps,
            "models": {},
        }
    )

    unwritten: GdpaError | None = None

    def save() -> None:
        nonlocal unwritten
        report.header["seconds"] = round(time.monotonic() - started, 1)
        if output is not None:
            unwritten = why_unwritten(lambda: report.write(output))

    def say(text: str) -> None:
        progress.print(f"{time.monotonic() - started:6.1f} s  {text}", markup=False, highlight=False)

    console.print(f"{report.header['device']}, threads: {report.header['threads']}, torch {report.header['versions']['torch']}")
    interrupted = False
    with machine.Clocks(plan.device) as clocks:
        try:
            for name in plan.models:
                Comparison(name, plan, report, save, say)()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            run_on(None)
        report.header["clocks"] = clocks.summary()
    save()
    show(report.as_json(), console)
    if unwritten is not None:
        raise unwritten
    if output is not None:
        console.print(f"wrote {output}", markup=False)
    if interrupted:
        console.print("interrupted: these are the rows so far")
        return 130
    if report.failed:
        console.print("[red]a provider was wrong or failed: see the notes[/red]")
        return 1
    return 0


@dataclass
class Turns:
    """What has been measured of one provider: a number for each turn, in milliseconds."""

    step: timing.Samples = field(default_factory=timing.Samples)
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    spent: float = 0.0


class Comparison:
    """One model with every provider."""

    def __init__(self, name: str, plan: Plan, report: Report, save: Callable[[], None], say: Callable[[str], None]) -> None:
        self.name, self.plan, self.report, self.save, self.say = name, plan, report, save, say
        self.device, self.gpu = plan.device, on_gpu(plan.device)
        self.rows = {provider: Row(name, plan.preset, provider) for provider in plan.providers}
        self.turns = {provider: Turns() for provider in plan.providers}
        self.attentions: dict[str, Attention] = {}
        # What is set in the model now; and by kind of attention (`in_graphs`), why the model around it is not compiled, or None.
        self.used: Attention | None = None
        self.compiled: dict[bool, str | None] = {}
        # Whose gradient the others' are held against, and that gradient, on the CPU.
        self.anchor: tuple[str, dict[str, Tensor]] | None = None
        self.matmuls: list[float] = []

    def __call__(self) -> None:
        report = self.report
        for row in self.rows.values():
            report.add(row)
        failure = self._attempt(self._set_up)
        if failure is not None:
            for row in self.rows.values():
                row.fail(f"{failure} (while the model and its batch were made)")
            self.save()
            return
        for provider in self._gate_order():
            self.say(f"{self.name}: {provider}, compiling and checking")
            self._enter(provider)
            self.save()
        self._rounds()
        self.save()
        self._attempt(self._leave)

    def _leave(self) -> None:
        """Let go of the model, for the next one's room."""
        run_on(None)
        self.used = None
        del self.loop, self.model, self.batch, self.weights
        self.anchor = None
        self.attentions.clear()
        timing.release()

    def _set_up(self) -> None:
        settings = self.plan.settings(self.name)
        longest = settings.config.max_history
        source = Synthetic(
            settings.batch_size,
            seed=settings.seed,
            lengths=self.plan.lengths,
            median_length=max(1, longest // MEDIAN_SHARE),
            max_length=longest,
        )
        host = source.batches(0)
        batch = next(host).recent(longest)
        host.close()  # type: ignore[attr-defined]
        torch.manual_seed(settings.seed)
        model = models.from_config(settings.config, source.schema)
        summary = model.summary(batch)
        self.weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        if self.gpu:
            self.weights = {name: value.pin_memory() for name, value in self.weights.items()}
        self.model: ClickModel = model.to(self.device)
        self.batch: Batch = batch.to(self.device)
        self.examples, self.events = len(batch), int(batch.history.items.shape[0])
        self.flops = STEP_FORWARDS * summary.forward_flops
        self.loop = Loop(settings, source, self.model, World(self.device), Folder(Path()))
        self.window = metrics.Window(self.device)
        self.report.header["models"][self.name] = {
            "batch": self.examples,
            "events": self.events,
            "longest": batch.history.counts().longest,
            "median_length": float(batch.lengths.float().median()),
            "parameters": summary.parameters,
            "step_flops": self.flops,
            "config": settings.config.to_dict(),
            "compiled": False,
        }

    def _compile(self, provider: str, attention: Attention) -> None:
        """Compile the model around attentions of this kind, if that is asked for and works; the row says which."""
        if not self.plan.compile:
            return
        kind = attention.in_graphs
        if kind not in self.compiled:
            self.say(f"{self.name}: compiling the model for {provider}")
            self.compiled[kind] = None
            self.compiled[kind] = self._attempt(lambda: self._gradients_with(attention))
            self.used = None
            self.model.zero_grad(set_to_none=True)
            self.report.header["models"][self.name]["compiled"] = not any(self.compiled.values())
        failure = self.compiled[kind]
        how = "compiled layer by layer" if kind else "compiled between the attention's calls"
        self.rows[provider].add_note(how if failure is None else f"not compiled: torch.compile {failure}")

    def _use(self, attention: Attention) -> None:
        """Set it in the model, and the model's compiled parts that go with it."""
        if self.used is attention:
            return
        self.used = None
        plain_regions(self.model.dense)
        plain_stages(self.model.dense)
        inside = self._inside(attention)
        if inside:
            compile_stages(self.model.dense)
        elif self._is_compiled(attention):
            compile_regions(self.model.dense)
        self.model.set_attention(gdpa.attention_varlen if inside else attention)
        run_on(attention.backend if inside and isinstance(attention, Gdpa) else None)
        self.used = attention

    def _is_compiled(self, attention: Attention) -> bool:
        return attention.in_graphs in self.compiled and self.compiled[attention.in_graphs] is None

    def _inside(self, attention: Attention) -> bool:
        """Whether compiled code calls it."""
        return attention.in_graphs and self._is_compiled(attention)

    def _gradients_with(self, attention: Attention) -> None:
        attention.begin()
        self._use(attention)
        self._gradients()

    def _gradients(self) -> None:
        metrics.log_losses(self.loop.logits(self.batch), self.batch.labels).mean().backward()

    def _gate_order(self) -> list[str]:
        """Plain PyTorch first: the others are held against it."""
        return sorted(self.plan.providers, key=lambda provider: provider != "eager")

    def _restore(self) -> None:
        """The weights and optimisers of the start."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.grad = None
                parameter.copy_(self.weights[name], non_blocking=True)
        rates = self.loop.settings.rates
        self.loop.updates = Updates(self.model.dense_parameters(), self.model.table_parameters(), rates)

    def _enter(self, provider: str) -> None:
        """Compile, check, and measure memory; a failure goes to the row."""
        row = self.rows[provider]
        attention = training_attention.by_name(provider)
        reason = attention.reason_against(self.device, self.plan.bf16)
        if reason is not None:
            row.error = reason
            return
        row.add_note(attention.note)
        failure = self._attempt(lambda: self._learn(attention))
        if failure is None:
            self._compile(provider, attention)
            failure = self._attempt(lambda: self._check(provider, attention))
        if failure is None and row.error is None:
            failure = self._attempt(lambda: self._memory(provider, attention))
        if isinstance(attention, Padded) and attention.padded_scores:
            needed = attention.estimated_bytes(2 if self.plan.bf16 else 4)
            row.add_note(f"its score matrices need about {size(needed)}, by estimate")
        if failure is not None:
            row.fail(failure)
            return
        if isinstance(attention, Gdpa):
            row.add_note(f"backend {', '.join(sorted(set(attention.backends)))}")
        if row.error is None:
            self.attentions[provider] = attention

    def _learn(self, attention: Attention) -> None:
        """An eager forward, in which the attention learns what it must know of the batch."""
        self._restore()
        self.used = None
        plain_regions(self.model.dense)
        plain_stages(self.model.dense)
        run_on(None)
        self.model.set_attention(attention)
        attention.begin(learn=True)
        with torch.no_grad():
            self.loop.logits(self.batch)

    def _check(self, provider: str, attention: Attention) -> None:
        """Hold the gradient of the dense part against the anchor: that of the first provider of the same function, not compiled."""
        row = self.rows[provider]
        if attention.same_function and self.anchor is None:
            expected = self._dense_gradients(attention, compiled=False)
            if not _finite(expected):
                row.fail("wrong: the gradient is not finite")
                return
            self.anchor = provider, {name: x.float().cpu() for name, x in expected.items()}
            if not self._is_compiled(attention):
                return
        gradients = self._dense_gradients(attention)
        if not _finite(gradients):
            row.fail("wrong: the gradient is not finite")
        elif attention.same_function and self.anchor is not None:
            other, expected = self.anchor
            if other == provider:
                other = "the same, not compiled"
            apart = _differences(gradients, expected, PARAMETER_SHARE[self.plan.bf16])
            row.gradient_difference = apart.whole
            if not apart.whole <= TOLERANCE[self.plan.bf16]:
                row.fail(f"wrong: its gradient is {apart.whole:.1e} away from that of {other}, relative to it")
            elif not apart.worst <= PARAMETER_TOLERANCE:
                row.fail(f"wrong: its gradient of {apart.parameter} is {apart.worst:.1e} away from that of {other}, relative to it")

    def _dense_gradients(self, attention: Attention, *, compiled: bool = True) -> dict[str, Tensor]:
        """Of the dense part's parameters, with the model compiled as it is for this attention or not at all.

        The head's last map starts as zeros, and nothing that it alone reads has a gradient: here it has other weights."""
        out = self.model.get_parameter("dense.head.out.weight")
        with torch.no_grad():
            out.copy_(torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out) / out.numel() ** 0.5)
        kept = self.compiled
        if not compiled:
            self.compiled, self.used = {}, None
        try:
            self._gradients_with(attention)
        finally:
            if not compiled:
                self.compiled, self.used = kept, None
        gradients = {name: x.grad for name, x in self.model.dense_parameters() if x.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return gradients

    def _memory(self, provider: str, attention: Attention) -> None:
        """A whole step, and the most memory that was allocated in it: weights, optimisers and batch included."""
        self._restore()
        self._wait()
        if self.gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        self._step(attention)
        self.loop.updates.check()
        if self.gpu:
            self.rows[provider].peak_bytes = torch.cuda.max_memory_allocated(self.device)

    def _step(self, attention: Attention) -> None:
        """The trainer's step."""
        attention.begin()
        self._use(attention)
        self.loop.train_step(self.batch, self.examples, self.window)

    def _watched_step(self, attention: Attention) -> tuple[float, float]:
        """The milliseconds of the attention's calls in a step, forward and backward."""
        if self._inside(attention):
            with watched_backends(attention.backends, self.gpu) as marks:
                self._step(attention)
            return marks.milliseconds()
        watched = Watched(attention, self.gpu)
        self._use(attention)
        self.model.set_attention(watched)
        try:
            self._step(attention)
        finally:
            self.used = None
        return watched.milliseconds()

    def _rounds(self) -> None:
        plan, order, shuffled = self.plan, list(self.attentions), random.Random(0)
        start = time.perf_counter()
        for done in range(MOST_ROUNDS):
            if not self.attentions or (done >= LEAST_ROUNDS and time.perf_counter() - start > plan.seconds):
                break
            self.say(f"{self.name}: round {done + 1}")
            failure = self._attempt(self._matmul)
            if failure is not None:
                self.say(f"{self.name}: the rounds end here, since the matmul that goes with them {failure}")
                break
            shuffled.shuffle(order)
            for provider in order:
                turns = self.turns[provider]
                # One that takes all the time by itself has had its turn.
                if provider in self.attentions and not (turns.step.ms and turns.spent > plan.seconds):
                    began = time.perf_counter()
                    failure = self._attempt(lambda provider=provider: self._turn(provider))  # type: ignore[misc]
                    turns.spent += time.perf_counter() - began
                    if failure is not None:
                        self.rows[provider].fail(failure)
                        del self.attentions[provider]
            self._fill_rows()
            self.save()

    def _turn(self, provider: str) -> None:
        attention, turns = self.attentions[provider], self.turns[provider]
        self._restore()
        if self.gpu:
            timing.release()  # the blocks of another provider, cut to its sizes
        untimed = self._seconds(attention, 1)
        steps = max(1, min(self.plan.steps, int(TURN_SECONDS / untimed)))
        turns.step.ms.append(1e3 * self._seconds(attention, steps) / steps)
        if self.gpu:
            self._keep_busy()
        forward, backward = self._watched_step(attention)
        turns.forward.append(forward)
        turns.backward.append(backward)
        self.loop.updates.check()

    def _seconds(self, attention: Attention, steps: int) -> float:
        """Of so many steps, from an idle device to an idle device."""
        self._wait()
        start = time.perf_counter()
        for _ in range(steps):
            self._step(attention)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def _square(self) -> Tensor:
        rows = timing.HARDWARE_SIZES[self.device.type][0]
        return torch.randn(rows, rows, device=self.device, dtype=torch.bfloat16 if self.plan.bf16 else torch.float32)

    def _matmul(self) -> None:
        a = self._square()
        product = a @ a
        ms = timing.clock(lambda: torch.mm(a, a, out=product), self.device, repeats=3)
        self.matmuls.append(2 * a.shape[0] ** 3 / ms * 1e3)

    def _keep_busy(self) -> None:
        a = self._square()
        product = torch.empty_like(a)
        for _ in range(FILLERS):
            torch.mm(a, a, out=product)

    def _fill_rows(self) -> None:
        rate = statistics.median(self.matmuls)
        self.report.rates[self.name] = rate
        for provider, turns in self.turns.items():
            if turns.step.ms and self.rows[provider].error is None:
                self._fill(self.rows[provider], turns, rate)

    def _fill(self, row: Row, turns: Turns, rate: float) -> None:
        median = statistics.median
        seconds = turns.step.median / 1e3
        row.step_ms, row.spread, row.rounds = turns.step.median, turns.step.spread, len(turns.step.ms)
        row.samples_per_s, row.tokens_per_s = self.examples / seconds, self.events / seconds
        row.attention_forward_ms, row.attention_backward_ms = median(turns.forward), median(turns.backward)
        row.attention_ms = row.attention_forward_ms + row.attention_backward_ms
        rest = row.step_ms - row.attention_ms
        row.other_ms = (
            rest if rest >= 0 else None
        )  # timed in different steps, on a busy machine the part may take longer than the whole
        row.mfu = self.flops / seconds / rate

    def _attempt(self, work: Callable[[], None]) -> str | None:
        """None, or why it failed; then what it held is free again."""
        try:
            work()
            return None
        except BackendUnavailable as error:
            failure = str(error)
        except Exception as error:
            failure = timing.describe_failure(error)
        # Only here has the traceback let go of the tensors in its frames.
        # After a fault of the device nothing works, and the rows are still to be written.
        with suppress(Exception):
            self.model.zero_grad(set_to_none=True)
        with suppress(Exception):
            timing.release()
        return failure


def _finite(gradients: dict[str, Tensor]) -> bool:
    return all(bool(x.isfinite().all()) for x in gradients.values())


class Differences(NamedTuple):
    """Relative, in the Frobenius norm: of all gradients together, and of the parameter whose own is the furthest off."""

    whole: float
    worst: float
    parameter: str


def _differences(gradients: dict[str, Tensor], expected: dict[str, Tensor], share: float) -> Differences:
    """Infinite where they are not those of the same parameters."""
    for name in gradients.keys() ^ expected.keys():
        return Differences(math.inf, math.inf, name)
    squares = []
    for name, gradient in gradients.items():
        right = expected[name].to(gradient.device)
        squares.append(torch.stack(((gradient.float() - right).square().sum(), right.square().sum())))
    apart, norms = torch.stack(squares).double().sqrt().cpu().unbind(1)
    whole = norms.norm()
    if not whole:
        return Differences(math.inf, math.inf, next(iter(gradients)))
    own = apart / (norms + share * whole)
    return Differences(float(apart.norm() / whole), float(own.max()), list(gradients)[int(own.argmax())])
